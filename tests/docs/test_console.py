"""Each console block of the documentation is a session that runs: its commands, in order, print the output shown.

Ids, ages, rates, sizes of caches and paths vary from run to run, so they are masked on both sides. The sections of
docs/cli.md must use each flag of their command. The same sessions run again with --json, and the keys are compared with
the documented ones.

KVFS_REFRESH_DOCS=1 writes the output into the pages.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from kvfs.cli.app import App
from kvfs.cli.main import COMMANDS, cli, run
from tests.mount.real import why_not

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "cli.md", ROOT / "docs" / "quickstart.md"]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^## `kvfs ([a-z]+)`$", re.MULTILINE)
KEYS = re.compile(r"^JSON(?: (?:of|with) [^:]*)?: (.*?)\.$", re.MULTILINE | re.DOTALL)
#: Options that every command has; each must be used somewhere on the page.
COMMON = {"--store", "--json", "--quiet", "--no-truncate", "--read-only", "--help"}

MASKS = [
    (re.compile(r"\b[0-9a-f]{6,}(?:\.kvs)?\b"), "<id>"),
    (re.compile(r"\b\d+ (?:s|min|h|d|w) ago\b"), "<age>"),
    (re.compile(r"\b\d+(?:\.\d+)? s\b"), "<time>"),
    (re.compile(r"\b\d+(?:\.\d+)? (?:B|KiB|MiB|GiB)/s"), "<rate>"),
    (re.compile(r"p50 below .*$", re.MULTILINE), "<latency>"),
    (re.compile(r"\b(?:page cache [\d,]+(?: \| disk [\d,]+)?|disk [\d,]+)\b"), "<tiers>"),
    (re.compile(r"^ +GB/S +MIN.*|^(save|load, page cache|load, disk|match) +[\d.,]+ .*$", re.MULTILINE), "<speed>"),
    (re.compile(r"^(first token|whole request|between tokens) +.*$|requests in [\d.]+ s", re.MULTILINE), "<times>"),
    (re.compile(r"^MS +P50.*$", re.MULTILINE), "<times>"),
    (re.compile(r"restores [\d,]+ tokens per second.*(\n  .*)?$", re.MULTILINE), "<speed>"),
    (re.compile(r"by [^ ]* \(\d+\)"), "<process>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d\b"), "<date>"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "<clock>"),
    (re.compile(r"\d+ pid|pid \d+"), "<pid>"),
    (re.compile(r"^(ok|warn|BAD ) .*$", re.MULTILINE), "<finding>"),
    (re.compile(r"^ +-> .*\n", re.MULTILINE), ""),
    (re.compile(r"\d+ ok, \d+ warnings"), "<n> ok"),
    (re.compile(r"[\d.]+ [KMG]iB read in"), "<bytes> read in"),
    (re.compile(r", [\d.]+ [KMG]?i?B already there"), ""),
    (re.compile(r"0 B read in"), "<bytes> read in"),
    (re.compile(r"loss \d\.\d+ of average"), "<loss>"),
    (re.compile(r"index [\d.]+ KiB of"), "index <size> of"),
    (re.compile(r"  +"), "  "),
]


class Step(NamedTuple):
    """One command of a session and what the page shows of it."""

    command: str
    shown: str


def steps(block: str) -> list[Step]:
    found: list[Step] = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        while command.endswith("\\"):
            more, _, shown = shown.partition("\n")
            command = command[:-1] + more.lstrip("> ")
        found.append(Step(command, shown.rstrip("\n")))
    return found


def masked(text: str) -> str:
    for pattern, word in MASKS:
        text = pattern.sub(word, text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()


class Session:
    """A directory, an environment, and the exit code of the last command."""

    def __init__(self, folder: Path, *, as_json: bool) -> None:
        self.folder = folder
        self.code = 0
        self.as_json = as_json
        self.results: list[tuple[str, dict[str, object]]] = []
        self.names: dict[str, object] = {"__name__": "__docs__"}
        shim = folder / ".bin" / "kvfs"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvfs.cli.main "$@"\n')
        shim.chmod(0o755)
        self.environment = {
            **os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder),
        }  # fmt: skip

    def python(self, code: str) -> None:
        exec(compile(code, "docs", "exec"), self.names)

    def run(self, command: str) -> str:
        if command == "echo $?":
            return str(self.code)
        if command.startswith("export "):
            name, _, value = command[7:].partition("=")
            os.environ[name] = self.environment[name] = value
            return ""
        if not command.startswith("kvfs ") or re.search(r"[|<>$]", command):
            done = subprocess.run(
                ["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True,
                stdin=subprocess.DEVNULL, timeout=60,
            )  # fmt: skip
            self.code = done.returncode
            return done.stdout + done.stderr
        return self._kvfs(shlex.split(command)[1:])

    def _kvfs(self, arguments: list[str]) -> str:
        show = self.as_json and not {"--help", "--version", "completion", "-q"} & set(arguments)
        app, out, err = App(), io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.code = run(app, [*arguments, *(["--json"] if show else [])])
        if show and self.code in (0, 3):
            self.results.append((" ".join(arguments), json.loads(out.getvalue())))
        return (out.getvalue() + err.getvalue()).replace(str(self.folder), "/srv")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("KVFS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("KVFS_DIR", "x")  # so that what a page sets is undone
    monkeypatch.delenv("KVFS_DIR")
    yield Session(tmp_path, as_json=False)


REFRESH = os.environ.get("KVFS_REFRESH_DOCS") == "1"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_console_sessions_show_what_happens(page: Path, session: Session) -> None:
    if page.name == "cli.md":
        pytest.importorskip("tokenizers", reason='cli.md reads prompts of text: pip install ".[transformers]"')
    text = page.read_text(encoding="utf-8")
    fresh, at = [], 0
    for match in BLOCK.finditer(text):
        if match[1] == "python":
            session.python(match[2])
            continue
        if needs_fuse(match[2]) and why_not():
            warnings.warn(f"sessions of kvfs mount are left out: {why_not()}", stacklevel=1)
            continue
        lines = []
        for step in steps(match[2]):
            actual = session.run(step.command).rstrip("\n")
            lines.append(f"$ {step.command}\n" + (actual + "\n" if actual else ""))
            if not REFRESH:
                line = text.count("\n", 0, match.start()) + 1
                assert masked(actual) == masked(step.shown), f"{page.name}, block at line {line}: {step.command}"
        fresh.append((text[at : match.start(2)], "".join(lines)))
        at = match.end(2)
    if REFRESH:
        page.write_text("".join(a + b for a, b in fresh) + text[at:], encoding="utf-8")


def needs_fuse(block: str) -> bool:
    return re.search(r"kvfs u?mount", block) is not None


def documented() -> dict[str, str]:
    """The section of each command in docs/cli.md."""
    text = PAGES[0].read_text(encoding="utf-8")
    heads = list(SECTION.finditer(text))
    ends = [*(h.start() for h in heads[1:]), len(text)]
    return {h[1]: text[h.end() : end] for h, end in zip(heads, ends, strict=True)}


def commands_of(section: str) -> list[str]:
    return [s.command for m in BLOCK.finditer(section) if m[1] == "console" for s in steps(m[2])]


def test_every_command_has_its_section() -> None:
    assert set(documented()) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_documented_and_used(name: str) -> None:
    section = documented()[name]
    used = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", " ".join(commands_of(section))))
    for option in _options(cli.get_command(click.Context(cli), name)):
        if not set(option.opts) & COMMON:
            assert set(option.opts) & used, f"{option.opts} is not used in the section of kvfs {name}"
            assert any(f"`{o}" in section for o in option.opts), f"{option.opts} is not described"


def _options(command: click.Command | None) -> Iterator[click.Option]:
    assert command is not None
    yield from (p for p in command.params if isinstance(p, click.Option) and not p.hidden)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _options(inner)


def test_the_common_options_are_used() -> None:
    page = " ".join(c for section in documented().values() for c in commands_of(section))
    assert all(
        re.search(rf"(?<!\S){o}(?!\S)", page) for o in ("-C", "--json", "-q", "--no-truncate", "--read-only", "--help")
    )


def test_json_keys_are_the_documented_ones(session: Session) -> None:
    pytest.importorskip("tokenizers", reason='cli.md reads prompts of text: pip install ".[transformers]"')
    session.as_json = True
    text = PAGES[0].read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match[1] == "python":
            session.python(match[2])
        elif not (needs_fuse(match[2]) and why_not()):
            for step in steps(match[2]):
                session.run(step.command)
    allowed: dict[str, list[set[str]]] = {}
    for name, section in documented().items():
        allowed[name] = []
        for found in KEYS.finditer(section):
            keys = set(re.findall(r"`([a-z_0-9]+)`", re.sub(r"\([^)]*\)", "", found[1])))
            allowed[name].append(keys | allowed[name][-1] if found[1].startswith("the same and") else keys)
    seen: set[str] = set()
    for arguments, result in session.results:
        name = next(word for word in arguments.split() if word in COMMANDS)
        seen.add(name)
        assert set(result) in allowed[name], f"kvfs {arguments}: {sorted(result)}"
    assert seen == set(COMMANDS) - {"completion"} - ({"mount", "umount"} if why_not() else set())
