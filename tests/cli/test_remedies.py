"""The remedy of a message works where it is given; nothing is destroyed without a question."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import kvfs
from kvfs.cli.main import cli
from kvfs.cli.output import Output
from tests.cli.commands import called, on_a_terminal
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of


def remedy_of_doctor(store: Path, check: str) -> tuple[list[str], str]:
    findings = json.loads(called("-C", str(store), "doctor", "--json").stdout)["findings"]
    bad = [f for f in findings if f["status"] == "bad"]
    return [f["check"] for f in bad], next(f["remedy"] for f in bad if f["check"] == check)


def test_a_path_without_a_store_is_told_apart_by_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "theirs").touch()
    (tmp_path / "empty").mkdir()
    for arguments in (["ls"], ["config"], ["doctor"], ["config", "set", "capacity", "1GiB"]):
        done = called("-C", str(tmp_path / "full" / "theirs"), *arguments)
        assert done.returncode == 10 and "is a file" in done.stderr and "init" not in done.stderr, done.stderr
        done = called("-C", str(tmp_path / "full"), *arguments)
        assert done.returncode == 10 and "holds other files" in done.stderr, done.stderr
        done = called("-C", str(tmp_path / "full" / "theirs" / "a" / "b"), *arguments)
        said = f"since {tmp_path / 'full' / 'theirs'} is a file"
        assert done.returncode == 10 and said in done.stderr and "init" not in done.stderr, done.stderr
        for name in ("empty", "absent"):
            done = called("-C", str(tmp_path / name), *arguments)
            assert done.returncode == 10 and f"kvfs -C {tmp_path / name} init" in done.stderr, done.stderr
    (tmp_path / "empty" / "segments").mkdir()  # as an init leaves it that was killed
    assert f"kvfs -C {tmp_path / 'empty'} init" in called("-C", str(tmp_path / "empty"), "ls").stderr
    for name in ("full/kvfs", "empty", "absent"):  # the commands that were named
        assert called("-C", str(tmp_path / name), "init", "--capacity", "64MiB").returncode == 0


def test_a_store_without_namespaces_does_not_ask_for_the_name_of_one(store_path: Path) -> None:
    assert called("-C", str(store_path), "init", "--capacity", "64MiB").returncode == 0
    done = called("-C", str(store_path), "match", "/dev/null")
    assert done.returncode == 1 and "no namespace yet" in done.stderr and "-n" not in done.stderr, done.stderr


@pytest.mark.parametrize("arguments", [("match", "-n", "", "/dev/null"), ("inspect", "namespace:")])
def test_an_empty_name_is_answered_with_the_names_that_there_are(store: Path, arguments: tuple[str, ...]) -> None:
    done = called("-C", str(store), *arguments)
    assert done.returncode == 1 and " '' in this store; it has: " in done.stderr, done.stderr


def test_a_new_host_pulls_a_prompt_of_a_namespace_that_only_the_bucket_has(store: Path, tmp_path: Path) -> None:
    bucket, host, prompt = tmp_path / "bucket", tmp_path / "host", tmp_path / "prompt.ids"
    bucket.mkdir()
    prompt.write_text(" ".join(map(str, tokens_of(1, 10))))
    assert called("-C", str(host), "init", "--capacity", "64MiB").returncode == 0
    for path in (store, host):
        assert called("-C", str(path), "config", "set", "remote.url", f"file://{bucket}").returncode == 0
    pull = ["-C", str(host), "pull", "--prompt", str(prompt)]
    done = called(*pull, "-n", "alpha")
    assert done.returncode == 2 and "kvfs push stores some" in done.stderr, done.stderr
    assert called("-C", str(store), "push", "alpha").returncode == 0
    done = called(*pull)
    assert done.returncode == 2 and "name a namespace of the bucket with -n: kvfs remote ls" in done.stderr, done.stderr
    done = called(*pull, "-n", "beta")
    assert done.returncode == 1 and f"in file://{bucket}; it has: alpha" in done.stderr, done.stderr
    done = called(*pull, "-n", "alpha")
    assert done.returncode == 0 and "160 of 160 tokens are stored here now" in done.stdout, done.stderr


@pytest.mark.parametrize("mode", ["memory", "staging"])
def test_a_mode_that_a_file_system_lacks_names_a_setting_only_where_there_is_a_store(
    mode: str, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.directory.io_mode.filesystem_of", lambda _: "tmpfs" if mode == "staging" else "ext4")
    done = called("-C", str(store_path), "init", "--capacity", "64MiB", "--mode", mode)
    assert done.returncode == 2 and 'choose mode "cache"\n' in done.stderr, done.stderr
    assert called("-C", str(store_path), "init", "--capacity", "64MiB").returncode == 0
    assert "config set mode cache" in called("-C", str(store_path), "config", "set", "mode", mode).stderr


def test_a_file_system_that_takes_no_directories_is_no_matter_of_the_kernels_log() -> None:
    done = called("-C", "/proc/foo/store", "init", "--capacity", "64MiB")
    assert done.returncode != 0 and "choose another directory" in done.stderr and "kernel" not in done.stderr
    done = called("-C", "/proc/foo", "init", "--capacity", "64MiB")
    assert "choose another directory" in done.stderr and done.stderr.count("/proc/foo") == 1, done.stderr


@pytest.mark.parametrize(
    ("content", "line", "shown"),
    [('sync = "cache"\ncapacity = """abc', 2, "abc"), ("capacity = [1,\n 77\n\n", 2, "77"), ("x=\n", 1, "x=")],
)
def test_a_broken_kvfs_toml_is_named_with_its_line(store: Path, content: str, line: int, shown: str) -> None:
    """Also where the parser only says that the document ended."""
    (store / "kvfs.toml").write_text(content)
    said = called("-C", str(store), "ls").stderr
    assert shown in said.partition(f"line {line}")[2], said


def test_broken_settings_are_one_finding_whose_remedy_works(store: Path) -> None:
    settings = store / "kvfs.toml"
    settings.write_text('capacity = "abc\n')
    checks, remedy = remedy_of_doctor(store, "settings")
    assert checks == ["settings"] and str(settings) in remedy
    settings.write_text(remedy.partition("is like: ")[2] + "\n")
    assert called("-C", str(store), "ls").returncode == 0
    settings.unlink()
    checks, remedy = remedy_of_doctor(store, "settings")
    assert checks == ["settings"] and str(settings) in remedy


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("statt", "(did you mean 'stats'?)"),
        ("inspekt", "(did you mean 'inspect'?)"),
        ("zzz", "there is no command 'zzz';"),
    ],
)
def test_a_command_that_is_misspelled_is_answered_with_one_that_exists(word: str, said: str) -> None:
    done = called(word)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_gc_asks_before_pages_are_lost_and_only_then(store: Path) -> None:
    done = called("-C", str(store), "gc", "--apply")  # nothing exceeds the limit
    assert done.returncode == 0 and "dropped 0 segments" in done.stdout
    done = called("-C", str(store), "gc", "--apply", "--target", "0")
    assert done.returncode == 2 and "--yes" in done.stderr
    code, seen = on_a_terminal(["-C", str(store), "gc", "--apply", "--target", "0"], b"n\n")
    assert code == 1 and "Evict 10 pages, 1 segments" in seen and "nothing was changed" in seen
    assert "10" in called("-C", str(store), "ls").stdout
    code, seen = on_a_terminal(["-C", str(store), "gc", "--apply", "--target", "0"], b"y\n")
    assert code == 0 and "dropped 1 segments" in seen
    assert called("-C", str(store), "gc", "--yes").returncode == 2


def test_gc_takes_a_share_of_the_limit_and_says_that_it_is_a_dry_run(store: Path) -> None:
    def plan(*options: str) -> dict[str, Any]:
        done = called("-C", str(store), "gc", *options, "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    whole, half, none = (plan(*o)["target_bytes"] for o in ((), ("--target", "50%"), ("--target", "0%")))
    assert (half, none) == (whole // 2, 0)
    assert plan("--target", "0", "--dry-run") == plan("--target", "0%") and plan("--target", "0%")["steps"]
    assert called("-C", str(store), "gc", "--dry-run", "--apply").returncode == 2
    assert called("-C", str(store), "gc", "--target", "150%").returncode == 2
    assert "10" in called("-C", str(store), "ls").stdout


def test_verify_and_gc_show_how_far_they_are(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvfs.open(store) as s:
        s.namespace("beta", tiny(), "77fe01b").put(tokens_of(2, 40), seeded(2, 40 * TINY_BYTES))
        told: list[tuple[int, int]] = []
        assert s.verify(progress=lambda done, total: told.append((done, total))).ok
        assert len(told) > 40 and told == sorted(told) and told[-1][0] == told[-1][1] > 50 * TINY_BYTES
        evicted: list[tuple[int, int]] = []
        s.gc(0, progress=lambda done, total: evicted.append((done, total)))
        assert evicted and evicted[0][0] == 0 < evicted[0][1]
    drawn: list[str] = []
    monkeypatch.setattr(Output, "draw", lambda _, line: drawn.append(line))
    monkeypatch.setattr("kvfs.cli.output.PROGRESS_SECONDS", 0.0)
    assert called("-C", str(store), "verify", "--all").returncode == 0
    assert drawn and all(line.startswith("verifying [") for line in drawn)


def test_doctor_colours_its_states_on_a_terminal_unless_no_color(store: Path) -> None:
    seen = on_a_terminal(["-C", str(store), "doctor"])[1]
    assert "\x1b[32m\x1b[1mok  \x1b[0m" in seen, seen
    (store / "kvfs.toml").write_text("capacity = 1\n")
    assert "\x1b[31m\x1b[1mBAD \x1b[0m  settings" in on_a_terminal(["-C", str(store), "doctor"])[1]
    assert "\x1b" not in on_a_terminal(["-C", str(store), "doctor"], NO_COLOR="1")[1]
    assert "\x1b" not in called("-C", str(store), "doctor").stdout


def test_doctor_writes_a_bundle_without_secrets(store: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "report.tar.gz"
    done = called("-C", str(store), "doctor", "--bundle", str(bundle), KVFS_SALT="hush", KVFS_LOG="error")
    assert done.returncode == 0 and str(bundle) in done.stderr
    assert bundle.stat().st_mode & 0o777 == 0o600
    with tarfile.open(bundle) as tar:
        members = {m.name.partition("/")[2]: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]
    assert set(members) == {"findings.json", "versions.json", "totals.json", "kvfs.toml"}
    assert json.loads(members["versions.json"])["environment"] == {"KVFS_LOG": "error"}
    assert json.loads(members["totals.json"])["pages_stored"] == 10
    assert members["kvfs.toml"] == (store / "kvfs.toml").read_bytes()
    assert not any(b"hush" in content for content in members.values())
    again = called("-C", str(store), "doctor", "--bundle", str(bundle))
    assert again.returncode == 2 and "exists already" in again.stderr
    assert called("-C", str(store), "doctor", "--bundle", str(tmp_path / "no" / "x")).returncode in (1, 2)


def test_options_of_a_command_precede_those_of_all_and_examples_follow(store: Path) -> None:
    from kvfs.cli.main import COMMANDS

    for name in COMMANDS:
        shown = called(name, "--help").stdout
        own, _, rest = shown.partition("Common options:")
        assert "  --json" not in own and "--json" in rest and "--read-only" in rest, name
        assert "\nExamples:\n  " in rest and f"kvfs {name}" in rest.partition("Examples:")[2], name


def test_every_command_has_examples_whose_options_and_arguments_it_takes() -> None:
    """In place of manual pages: each line of an example is parsed as the command itself parses it."""

    def walk(command: click.Command, context: click.Context) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield context.command_path, getattr(command, "examples", ())
        for name in command.list_commands(context) if isinstance(command, click.Group) else ():
            inner = command.get_command(context, name)
            assert inner is not None
            yield from walk(inner, click.Context(inner, info_name=name, parent=context))

    def parse(command: click.Command, name: str, words: list[str]) -> None:
        context = command.make_context(name, words, resilient_parsing=False)
        rest = [*context._protected_args, *context.args] if isinstance(command, click.Group) else []
        if rest:
            assert isinstance(command, click.Group)
            found, inner, rest = command.resolve_command(context, rest)
            assert found is not None and inner is not None
            parse(inner, found, rest)

    every = dict(walk(cli, click.Context(cli, info_name="kvfs")))
    assert len(every) > 25
    for path, examples in every.items():
        assert examples, path
        for example in examples:
            plain = example.removeprefix('eval "$(').removesuffix(')"')
            mine = next(m for part in re.split(r" [|>] ", plain) if (m := re.match(r"(?:.* )?kvfs (.*)", part)))
            assert path.split()[-1] in f"kvfs {mine[1]}".split(), example
            with contextlib.suppress(click.exceptions.Exit):  # --help
                parse(cli, "kvfs", shlex.split(mine[1]))


def test_completion_in_json_is_json(store: Path) -> None:
    data = json.loads(called("completion", "bash", "--json").stdout)
    assert data["shell"] == "bash" and data["script"] == called("completion", "bash").stdout


@pytest.mark.parametrize(
    ("words", "incomplete", "offered"),
    [
        (["init", "--mode"], "", ["cache", "staging", "memory"]),
        (["init", "--codec"], "z", ["zstd"]),
        (["gc", "--codec"], "", ["planes", "zstd"]),
        (["ls", "--sort"], "t", ["tokens", "tokens:desc"]),
        (["config", "set"], "ca", ["capacity"]),
        (["config", "set"], "quota.", ["quota.alpha.guaranteed", "quota.alpha.cap", "quota.alpha.ttl"]),
        (["config", "set", "mode"], "s", ["staging"]),
        (["config", "set", "capacity"], "", []),
        (["completion"], "z", ["zsh"]),
    ],
)
def test_values_are_completed(
    store: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], incomplete: str, offered: list[str]
) -> None:
    from click.shell_completion import ShellComplete

    from kvfs.cli.main import cli

    monkeypatch.setenv("KVFS_DIR", str(store))
    items = ShellComplete(cli, {}, "kvfs", "_KVFS_COMPLETE").get_completions(words, incomplete)
    assert [item.value for item in items] == offered
    for option in ("-C", "--store"):
        (folder,) = ShellComplete(cli, {}, "kvfs", "_KVFS_COMPLETE").get_completions([option], "x")
        assert folder.type == "dir"
    (file,) = ShellComplete(cli, {}, "kvfs", "_KVFS_COMPLETE").get_completions(["import"], "x")
    assert file.type == "file"
