"""The command as a process: exit codes, one-line errors, imports, output for people and for programs."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

import kvfs
from kvfs.cli.app import App, complete_namespaces, complete_pins
from kvfs.cli.output import Output
from kvfs.directory import root
from kvfs.directory.root import Directory
from kvfs.maintenance.recompress import Recompressed
from kvfs.system import worker
from tests.cli.commands import called, command, environment, on_a_terminal
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of


def damage_super(path: Path) -> None:
    (path / "super").write_bytes(b"{}")


def future_super(path: Path) -> None:
    (path / "super").write_text((path / "super").read_text().replace('"format": 1', '"format": 9'))


def no_settings(path: Path) -> None:
    (path / "kvfs.toml").unlink()


@pytest.mark.parametrize(
    ("code", "arguments", "spoil"),
    [
        (1, ("ls", "missing"), None),
        (1, ("inspect", "0123456789"), None),
        (1, ("unpin", "missing"), None),
        (1, ("import", "kvfs.toml", "--read-only"), None),
        (2, ("nonsense",), None),
        (2, ("ls", "--nonsense"), None),
        (2, ("ls", "--filter", "x"), None),
        (2, ("ls", "--filter", "pages>²"), None),
        (2, ("ls", "--filter", "pages>" + 5000 * "9"), None),
        (2, ("ls", "--sort", "x"), None),
        (2, ("match", "/nonexistent"), None),
        (2, ("config", "set", "capacity", "lots"), None),
        (2, ("config", "set", "colour", "red"), None),
        (2, ("config", "set", "sync", "sometimes"), None),
        (2, ("rm", "alpha"), None),
        (2, ("rm",), None),
        (2, ("warm",), None),
        (2, ("verify", "--sample", "0"), None),
        (2, ("verify", "--all", "--sample", "5%"), None),
        (2, ("init", "--capacity", "64MiB"), None),
        (12, ("ls",), damage_super),
        (12, ("ls",), future_super),
        (2, ("config", "set", "capacity", "1MiB"), None),
        (2, ("config", "set", "segment_bytes", "32MiB"), None),
        (90, ("ls",), no_settings),
        (90, ("config",), no_settings),
    ],
)
def test_exit_codes_and_one_line_errors(
    store: Path, code: int, arguments: tuple[str, ...], spoil: Callable[[Path], None] | None
) -> None:
    if spoil is not None:
        spoil(store)
    done = called("-C", str(store), *arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout == "" and done.stderr.startswith("kvfs: ") and done.stderr.count("\n") == 1, done.stderr
    done = called("-C", str(store), "--json", *arguments)
    if arguments[0] != "nonsense" or code != 2:
        body = json.loads(done.stderr)["error"]
        assert body["exit_code"] == code == done.returncode and body["message"]


def test_no_store_is_10_and_names_the_remedy(tmp_path: Path) -> None:
    done = called("ls", KVFS_DIR=str(tmp_path / "none"))
    assert done.returncode == 10 and "kvfs -C" in done.stderr and "init --capacity" in done.stderr


def test_the_store_is_the_option_else_the_variable_else_the_cache_directory(store: Path, tmp_path: Path) -> None:
    assert "alpha" in called("ls", "-C", str(store), KVFS_DIR="/nowhere").stdout
    assert "alpha" in called("ls", KVFS_DIR=str(store)).stdout
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kvfs").symlink_to(store)
    assert "alpha" in called("ls", XDG_CACHE_HOME=str(tmp_path / "cache")).stdout


def test_an_empty_option_is_not_another_store(store: Path) -> None:
    done = called("-C", "", "rm", "alpha", "--yes", KVFS_DIR=str(store))
    assert done.returncode == 2 and "-C is empty" in done.stderr
    assert "alpha" in called("ls", KVFS_DIR=str(store)).stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_is_130_without_a_traceback_and_leaves_the_index_clean(
    store: Path, number: signal.Signals
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "kvfs.cli.main", "-C", str(store), "stats", "--watch", "--interval", "60"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # the runner of the tests may ignore it
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(number)
    end = time.monotonic() + 30.0
    while number != signal.SIGINT and child.poll() is None and time.monotonic() < end:
        child.send_signal(number)  # `timeout` sends it twice, at any moment of the cleanup
        time.sleep(0.001)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130 and err == "kvfs: interrupted\n"
    assert json.loads((store / "state").read_text())["clean"]


HUNG = """
import signal, sys, time
import click
from kvfs.cli import main
main.CLEANUP_SECONDS = 0.4

@click.command()
def hung():
    {hang}

main.cli.get_command = lambda ctx, name: hung
sys.argv = ["kvfs", "ls"]
main.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "hang",
    [
        # as in a system call that waits for a disk, the signal stays pending
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); print('ready', flush=True); time.sleep(60)",
        "\n    try: print('ready', flush=True); time.sleep(60)\n    finally: time.sleep(60)",
    ],
    ids=["call", "cleanup"],
)
def test_an_interrupt_ends_a_command_that_waits_for_a_disk(number: int, hang: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HUNG.format(hang=hang)], env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(number)
        _, err = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == 130 and err == "kvfs: interrupted, without a cleanup: the disk does not answer\n"


@pytest.mark.parametrize(
    "arguments", [("config",), ("config", "get", "capacity"), ("config", "set", "capacity", "1GiB"), ("init",)]
)
def test_settings_on_a_disk_that_hangs_are_given_up(
    store: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(worker, "HUNG_SECONDS", 0.1)
    monkeypatch.setattr(worker, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(root, "is_store", lambda _: answers.wait(2))
    monkeypatch.setattr(Directory, "__init__", lambda *_, **__: answers.wait(2))
    try:
        done = called("-C", str(store), *arguments)
    finally:
        answers.set()
    assert done.returncode == 11 and "the disk has not answered" in done.stderr


def test_a_reader_that_closes_its_end_ends_the_command_quietly(store: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "{sys.executable}" -m kvfs.cli.main -C {store} stats --json | true'],
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom kvfs.cli.main import run\nfrom kvfs.cli.app import App\nrun(App(), ['--help'])\n"
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'numpy', 'lmdb', 'xxhash'}),"
        " 'kvfs.store' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[] False", done.stdout + done.stderr


def test_no_command_that_looks_loads_torch(store: Path) -> None:
    commands = [("ls",), ("inspect",), ("stats",), ("gc",), ("verify", "--all"), ("doctor",), ("warm", "alpha")]
    code = (
        "import sys\nfrom kvfs.cli.main import run\nfrom kvfs.cli.app import App\n"
        f"code = sum(run(App(), ['-C', {str(store)!r}, *c]) for c in {commands!r})\nprint(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 False", done.stdout + done.stderr


def test_rm_asks_on_a_terminal(store: Path) -> None:
    code, seen = on_a_terminal(["-C", str(store), "rm", "alpha"], b"n\n")
    assert code == 1 and "Remove alpha@9213176 (10 pages" in seen and "nothing was changed" in seen
    code, seen = on_a_terminal(["-C", str(store), "rm", "alpha"], b"y\n")
    assert code == 0 and "removed 10 pages" in seen


def test_headings_are_bold_on_a_terminal_unless_no_color(store: Path) -> None:
    assert "\x1b[1mNAMESPACE" in on_a_terminal(["-C", str(store), "ls"])[1]
    assert "\x1b[1m" not in on_a_terminal(["-C", str(store), "ls"], NO_COLOR="1")[1]
    assert "\x1b" not in called("-C", str(store), "ls").stdout


def test_names_that_look_like_headings_are_listed_at_once(store: Path) -> None:
    names = ["SYSTEM", "customer-support-bot-system-prompt-2026", "AAA" + 60 * " " + "x"]
    with kvfs.open(store) as s:
        ns = s.namespace("alpha", tiny(), "9213176")
        assert [s.pin(name, ns, tokens_of(1, 10)) for name in names] == [160, 160, 160]
    code, seen = on_a_terminal(["-C", str(store), "pin", "ls", "--no-truncate"])
    assert code == 0 and all(name in seen for name in names)
    assert seen.count("\x1b[1m") == 1 and "\x1b[1mPIN " in seen


def test_names_from_the_store_reach_no_terminal_as_control_sequences(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB"):
        pass
    (store_path / "segments" / "\x1b[2Jx").write_bytes(b"")
    done = called("-C", str(store_path), "verify")
    assert done.returncode == 3 and "\x1b" not in done.stdout and "?[2Jx" in done.stdout


def test_a_question_shows_no_control_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(click, "confirm", lambda question, **_: asked.append(question) or True)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    Output().confirm("Remove x\x1b]0;pwn\x07\n\u202ey?", yes=False)
    assert asked == ["Remove x?]0;pwn???y?"]


def test_verify_repairs_a_store_without_its_super_file(store: Path) -> None:
    listed = called("-C", str(store), "ls").stdout
    (store / "super").unlink()
    for arguments in (("ls",), ("init", "--capacity", "64MiB"), ("verify",)):
        done = called("-C", str(store), *arguments)
        assert done.returncode == 90 and "verify --repair" in done.stderr
    assert called("-C", str(store), "verify", "--repair").returncode == 0
    assert called("-C", str(store), "ls").stdout == listed


def test_read_only_changes_nothing(store: Path) -> None:
    def files() -> dict[str, tuple[int, int]]:
        found = (p for p in store.rglob("*") if p.is_file())
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in found}

    before = files()
    for arguments in (("ls",), ("ls", "alpha"), ("inspect",), ("stats",), ("verify", "--all"), ("doctor",), ("gc",)):
        assert called("-C", str(store), *arguments, KVFS_READONLY="1").returncode == 0, arguments
    assert files() == before
    for arguments in (("rm", "alpha", "-y"), ("gc", "--apply"), ("unpin", "x"), ("config", "set", "capacity", "1GiB")):
        assert called("-C", str(store), *arguments, KVFS_READONLY="1").returncode == 1, arguments
    assert files() == before
    assert called("-C", str(store), "config", "set", "capacity", "1GiB", KVFS_READONLY="off").returncode == 0


@pytest.mark.parametrize(
    ("name", "content", "ids"),
    [
        ("a.ids", b"1 2 3\n4, 5", 5),
        ("a.json", b"[1, 2, 3]", 3),
        ("b.json", b'{"input_ids": [1, 2]}', 2),
        ("c", b" [7]", 1),
        ("a.bin", bytes(range(16)), 4),
        ("empty", b"", 0),
    ],
)
def test_prompts_are_read_in_each_format(store: Path, tmp_path: Path, name: str, content: bytes, ids: int) -> None:
    (tmp_path / name).write_bytes(content)
    done = called("-C", str(store), "match", str(tmp_path / name), "--json")
    assert json.loads(done.stdout)["tokens"] == ids


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"[1, 2"), ("a.json", b"3"), ("a.json", b"[-1]"), ("a.json", b"[true]"), ("a.json", b"[4294967296]"),
        ("a.json", b"[" * 100_000), ("a.bin", b"123"), ("a.txt", b"Once upon"), ("a.txt", b"\xff\xfe"),
    ],
)  # fmt: skip
def test_bad_prompts_are_usage_errors_that_name_the_file(
    store: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    done = called("-C", str(store), "match", str(tmp_path / name))
    assert done.returncode == 2 and name in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_number_that_is_no_token_id_is_not_called_no_number(store: Path, tmp_path: Path) -> None:
    (tmp_path / "p.ids").write_text("1 4294967296")
    assert "outside [0, 2**32)" in called("-C", str(store), "match", str(tmp_path / "p.ids")).stderr


def test_a_text_prompt_is_tokenized(store: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 11, "b": 22, "[UNK]": 0}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = ["a", "b"] * 16
    with kvfs.open(store) as s:
        s.namespace("alpha", tiny(), "9213176").put([vocabulary[w] for w in words], seeded(5, 2 * TINY_BYTES))
    (tmp_path / "p.txt").write_text(" ".join(words))
    done = called(
        "-C", str(store), "match", str(tmp_path / "p.txt"), "--tokenizer", str(tmp_path / "tokenizer.json"), "--json"
    )
    assert json.loads(done.stdout)["matched_tokens"] == 32


def test_a_salted_namespace_needs_its_salt(store_path: Path, tmp_path: Path) -> None:
    tokens = tokens_of(3, 4)
    with kvfs.open(store_path, capacity="64MiB") as s:
        s.namespace("beta", tiny(), "9213176", salt="secret").put(tokens, seeded(3, 4 * TINY_BYTES))
    (tmp_path / "p.json").write_text(json.dumps(tokens))
    arguments = ("-C", str(store_path), "match", str(tmp_path / "p.json"), "--json")
    assert json.loads(called(*arguments, KVFS_SALT="secret").stdout)["matched_tokens"] == 64
    for salt in ("", "wrong"):
        done = called(*arguments, KVFS_SALT=salt)
        assert done.returncode == 2 and "salt" in done.stderr and "secret" not in done.stderr
    done = called("-C", str(store_path), "rm", "--tenant", "-y", "--json", KVFS_SALT="secret")
    assert json.loads(done.stdout)["pages"] == 4
    done = called("-C", str(store_path), "rm", "--tenant", "-y", KVFS_SALT="secret")
    assert done.returncode == 1 and "nothing is stored under the salt" in done.stderr


def test_rm_of_a_tenant_says_that_it_does_not_reach_the_salts_of_an_engines_requests(store_path: Path) -> None:
    tokens, pages = tokens_of(3, 4), seeded(3, 4 * TINY_BYTES)
    with kvfs.open(store_path, capacity="64MiB") as s:
        engine = s.namespace("llama", tiny(), "9213176", extra={"engine": "vllm"})
        engine.put(tokens, pages, extra={0: b"digest of cache_salt"})
    arguments = ("-C", str(store_path), "rm", "--tenant", "-y")
    done = called(*arguments, KVFS_SALT="secret")
    assert done.returncode == 1 and "cache_salt" in done.stderr and "llama@9213176" in done.stderr
    with kvfs.open(store_path) as s:
        s.namespace("beta", tiny(), "9213176", salt="secret").put(tokens, pages)
    done = called(*arguments, KVFS_SALT="secret")
    assert done.returncode == 0 and "removed 4 pages" in done.stdout and "llama@9213176" in done.stderr


def test_what_rm_would_remove_of_a_prompt_is_what_it_removes(store_path: Path, tmp_path: Path) -> None:
    """Of a window a match has the last pages only; rm removes all of them."""
    full = kvfs.PageLayout.kv(layers=[0], kv_heads=1, head_dim=16, dtype="bfloat16", page_tokens=16)
    window = kvfs.PageLayout.kv(layers=[1], kv_heads=1, head_dim=16, dtype="bfloat16", page_tokens=16, window=16)
    layout = kvfs.PageLayout.of([*full.groups, *window.groups], 16)
    with kvfs.open(store_path, capacity="64MiB") as s:
        pages = {g.name: bytes(20 * g.page_bytes) for g in layout.groups}
        assert s.namespace("hybrid", layout, "1").put(list(range(320)), pages).stored == 40
    (tmp_path / "p.ids").write_text(" ".join(map(str, range(320))))
    remove = ("-C", str(store_path), "--json", "rm", "--prompt", str(tmp_path / "p.ids"), "-n", "hybrid")
    would, did = (json.loads(called(*remove, how).stdout) for how in ("--dry-run", "--yes"))
    assert would["pages"] == did["pages"] == 40 and would["bytes"] == 20 * layout.page_bytes


def test_gc_that_cannot_evict_fails(store: Path) -> None:
    with open(store / "run" / "gc", "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = called("-C", str(store), "gc", "--apply", "--yes", "--target", "0", "--max-duration", "0.1s")
    assert done.returncode == 11 and "evicts" in done.stderr
    assert called("-C", str(store), "gc", "--apply", "--target", "0", "--yes").stdout.startswith("dropped 1 segments")


def test_the_bytes_freed_are_never_negative(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = {"segments_dropped": 0, "bytes_before": 1, "bytes_after": 9000}
    monkeypatch.setattr(kvfs.Store, "gc", lambda *_, **__: grown)
    monkeypatch.setattr(kvfs.Store, "recompress", lambda *_, **__: Recompressed(bytes_before=1, bytes_after=9000))
    for arguments in (("gc", "--apply"), ("gc", "--recompress", "--apply")):
        done = called("-C", str(store), *arguments)
        assert done.returncode == 0 and "freed 0 B; in use 8.8 KiB" in done.stdout, done


def test_explain_of_a_page_that_is_evicted_at_that_moment_says_so(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = kvfs.Store.gc_plan

    def late(self: kvfs.Store, target: int | None = None) -> Any:
        self.gc(0)
        return plan(self, target)

    page = called("-C", str(store), "ls", "alpha", "-q").stdout.strip()
    monkeypatch.setattr(kvfs.Store, "gc_plan", late)
    done = called("-C", str(store), "gc", "--explain", page)
    assert done.returncode == 0 and "was dropped a moment ago" in done.stdout, done


def test_a_namespace_that_is_named_twice_counts_once(store: Path) -> None:
    done = called("-C", str(store), "rm", "alpha", "alpha@9213176", "--dry-run", "--json")
    assert json.loads(done.stdout)["pages"] == 10


def test_the_wait_for_an_index_that_is_held_is_shorter_than_that_for_a_rebuild(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.cli.app.SILENT_SECONDS", 0.1)
    monkeypatch.setattr("kvfs.cli.app.REBUILD_SECONDS", 20.0)
    waited = list[float]()
    wait_ready = kvfs.Store.wait_ready
    monkeypatch.setattr(kvfs.Store, "wait_ready", lambda s, t: (waited.append(t), wait_ready(s, t))[1])
    with (store / "gate").open("rb") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        done = called("-C", str(store), "ls")
    assert done.returncode == 11 and "does not answer" in done.stderr, done.stderr
    assert sum(waited) < 20.0, "it waited as long as for a rebuild"


def test_a_salt_that_is_not_text_is_a_usage_error(store: Path) -> None:
    done = called("-C", str(store), "rm", "--tenant", "-y", KVFS_SALT="\udcff")
    assert done.returncode == 2 and "not Unicode text" in done.stderr


def test_config_keeps_comments_and_refuses_invalid_values(store: Path) -> None:
    settings = store / "kvfs.toml"
    settings.write_text('# ours\ncapacity = "64MiB"  # for now\n\n[quota."a b"]  # theirs\ncap = 1000\n')
    assert called("-C", str(store), "config", "set", "capacity", "128MiB").returncode == 0
    assert called("-C", str(store), "config", "set", "quota.a b.ttl", "12h").returncode == 0
    assert called("-C", str(store), "config", "set", "quota.x.cap", "2MiB").returncode == 0
    assert settings.read_text() == (
        '# ours\ncapacity = "128MiB"  # for now\n\n[quota."a b"]  # theirs\ncap = 1000\nttl = "12h"\n'
        '\n[quota.x]\ncap = "2MiB"\n'
    )
    shown: dict[str, Any] = json.loads(called("-C", str(store), "config", "--json").stdout)["settings"]
    assert shown["capacity"] == {"value": 128 << 20, "origin": "kvfs.toml"}
    assert shown["sync"] == {"value": "cache", "origin": "default"}
    assert shown["quota.a b.ttl"]["value"] == 12 * 3600
    before = settings.read_bytes()
    done = called("-C", str(store), "config", "set", "quota.x.guaranteed", "1GiB")
    assert done.returncode == 2 and "half the capacity" in done.stderr and settings.read_bytes() == before


def test_a_line_of_the_settings_ends_where_toml_says(store: Path) -> None:
    settings = store / "kvfs.toml"
    settings.write_text('# theirs\u2028capacity = 1\ncapacity = "64MiB"\n', encoding="utf-8")
    for key, value in (("quota.a\u2028b.cap", "8MiB"), ("quota.a\u2028b.ttl", "1h"), ("capacity", "128MiB")):
        done = called("-C", str(store), "config", "set", key, value)
        assert done.returncode == 0, done.stderr
    assert settings.read_text(encoding="utf-8") == (
        '# theirs\u2028capacity = 1\ncapacity = "128MiB"\n\n[quota."a\u2028b"]\ncap = "8MiB"\nttl = "1h"\n'
    )


@pytest.mark.parametrize("key", ["sync", "quota.a\udcff.cap"], ids=ascii)
def test_settings_that_are_not_text_are_named_in_one_line(store: Path, key: str) -> None:
    settings = store / "kvfs.toml"
    if key == "sync":
        settings.write_bytes(settings.read_bytes() + b"# caf\xe9\n")
    before = settings.read_bytes()
    done = called("-C", str(store), "config", "set", key, "batch" if key == "sync" else "1MiB")
    assert done.returncode == 2 and "this is a bug" not in done.stderr, done.stderr
    assert settings.read_bytes() == before


def test_index_bytes_cannot_change_while_the_store_is_open(store: Path) -> None:
    with kvfs.open(store):
        assert called("-C", str(store), "config", "set", "index_bytes", "8MiB").returncode == 11
    done = called("-C", str(store), "config", "set", "index_bytes", "8MiB")
    assert done.returncode == 0 and done.stdout.endswith("for processes that open the store from now on\n")


def test_completion_offers_commands_and_namespaces(store: Path) -> None:
    def complete(words: str) -> str:
        count = str(len(words.split(" ")) - 1)
        return command(_KVFS_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=count, KVFS_DIR=str(store)).stdout

    assert "plain,verify" in complete("kvfs ver")
    assert "plain,alpha" in complete("kvfs ls a")
    with kvfs.open(store) as s:
        for name in ("a;touch${IFS}x;", "$(x)", "a b", "-rf", "org/model-7B@v1.0:q_4+x"):
            ns = s.namespace(name, tiny(), "9213176")
            ns.put(tokens_of(1, 2), seeded(1, 2 * TINY_BYTES))
            assert s.pin(name, ns, tokens_of(1, 2)) == 32
    for words in ("kvfs ls ", "kvfs unpin "):
        offered = [line for line in complete(words).splitlines() if line not in ("plain,alpha", "plain,ls")]
        assert offered == ["plain,org/model-7B@v1.0:q_4+x"]


def test_completion_does_not_wait_for_the_index(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell is blocked while it waits for a completion."""
    monkeypatch.setattr("kvfs.cli.app._rebuilt", lambda _: pytest.fail("waited for a rebuild"))
    monkeypatch.setattr(kvfs.Store, "wait_ready", lambda _, timeout=60.0: timeout > 1.0)
    app = App()
    app.path = str(store)
    context = click.Context(click.Command("ls"), obj=app)
    assert complete_namespaces(context, click.Argument(["x"]), "") == []
    assert complete_pins(context, click.Argument(["x"]), "") == []


def test_watch_shows_the_counts_of_other_processes(store: Path) -> None:
    done = called("-C", str(store), "stats", "--watch", "--interval", "0.1", "--times", "2", "--json")
    decoder, found, text = json.JSONDecoder(), [], done.stdout
    while text.strip():
        body, end = decoder.raw_decode(text.lstrip())
        found.append(body)
        text = text.lstrip()[end:]
    assert len(found) == 2 and all("per_second" in body for body in found)
    assert found[0]["pages_stored"] == 10


def test_watch_accepts_any_interval(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rest(seconds: float) -> None:
        assert seconds <= threading.TIMEOUT_MAX
        raise KeyboardInterrupt

    monkeypatch.setattr("kvfs.cli.stats_cmd.time.sleep", rest)
    assert called("-C", str(store), "stats", "--watch", "--interval", "999999999999").returncode == 130


def test_without_a_command_the_help_is_shown(store: Path) -> None:
    for arguments in ((), ("pin",)):
        done = called(*arguments)
        assert done.returncode == 2 and not done.stdout and "\nCommands:\n" in done.stderr
        done = called(*arguments, "--json")
        assert done.returncode == 2 and "Missing command" in json.loads(done.stderr)["error"]["message"]


@pytest.mark.parametrize("closed", [(1,), (1, 2), (0, 1, 2)])
def test_closed_streams_are_replaced(store: Path, closed: tuple[int, ...]) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    done = subprocess.run(
        [sys.executable, "-m", "kvfs.cli.main", "-C", str(store), "ls"], env=environment(), preexec_fn=close,
        stdin=None if 0 in closed else subprocess.DEVNULL, stdout=None, timeout=60,
        stderr=None if 2 in closed else subprocess.PIPE,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr


def test_letters_that_the_locale_lacks_are_escaped(store: Path) -> None:
    store = store.rename(store.with_name("\u4e2d"))
    done = command("-C", str(store), "config", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0 and "\\u4e2d" in done.stdout, done


def test_an_export_replaces_only_files(store: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("folder", "pipe", "link", "missing/file"):
        done = called("-C", str(store), "export", str(tmp_path / name), "alpha", "--force")
        assert done.returncode == 2 and name.partition("/")[0] in done.stderr, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != store.name) == ["folder", "link", "pipe"]
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    inside = [store / name for name in ("super", "kvfs.toml", "segments/new", "index/CURRENT", "run/use/new")]
    before = {path: path.read_bytes() for path in inside if path.exists()}
    assert len(before) == 3
    (tmp_path / "way").symlink_to(store, target_is_directory=True)
    for path in (*inside, tmp_path / "way" / "super"):
        done = called("-C", str(store), "export", str(path), "alpha", "--force")
        assert done.returncode == 2 and f"is inside the store {store}" in done.stderr, done.stderr
    assert {path: path.read_bytes() for path in inside if path.exists()} == before
    done = called("-C", str(store), "export", str(store / "import" / "b.tar"), "alpha")
    assert done.returncode == 0, done.stderr  # the drop folder: this store, or another one, imports it
    done = called("-C", str(store), "export", "-", "alpha")
    assert done.returncode == 2 and "name a file" in done.stderr
    for name in ("folder", "pipe"):
        done = called("-C", str(store), "import", str(tmp_path / name))
        assert done.returncode == 2 and "no regular file" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stats", "--times", "2"), "--watch"),
        (("stats", "--interval", "2s"), "--watch"),
        (("verify", "--seed", "2"), "--sample"),
        (("rm", "alpha", "-n", "alpha", "--yes"), "--prompt"),
        (("rm", "--tenant", "--tokenizer", "x", "--yes"), "--prompt"),
        (("warm", "alpha", "-n", "alpha"), "--prompt"),
        (("export", "/nonexistent/x", "alpha", "--format", "ids"), "--prompt"),
        (("gc", "--explain", "12"), "6 digits"),
        (("gc", "--explain", "nothex"), "6 digits"),
        (("warm", "--list", "/nonexistent"), "No such file"),
    ],
)
def test_options_that_would_do_nothing_are_refused(store: Path, arguments: tuple[str, ...], said: str) -> None:
    done = called("-C", str(store), *arguments)
    assert done.returncode == 2 and said in done.stderr and "Errno" not in done.stderr


def test_an_error_names_the_size_that_was_given(tmp_path: Path) -> None:
    for option in ("--segment-bytes", "--index-bytes"):
        done = called("-C", str(tmp_path / "new"), "init", "--capacity", "64MiB", option, "1")
        assert done.returncode == 2 and "is 1:" in done.stderr


def test_a_directory_that_init_refuses_keeps_its_mode(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(0o755)
    (theirs / "file").touch()
    empty = tmp_path / "empty"
    empty.mkdir(0o700)
    for code, path, capacity in ((12, theirs, "64MiB"), (2, empty, "1KiB"), (2, tmp_path / "a" / "b", "1KiB")):
        assert called("-C", str(path), "init", "--group", "--capacity", capacity).returncode == code
    assert [stat.S_IMODE(p.stat().st_mode) for p in (theirs, empty)] == [0o755, 0o700]
    assert not (tmp_path / "a").exists()
    assert called("-C", str(empty), "init", "--group", KVFS_CAPACITY="64MiB").returncode == 0
    assert stat.S_IMODE(empty.stat().st_mode) == 0o2770


def test_a_store_without_lookups_has_no_hit_rate(store: Path) -> None:
    assert called("-C", str(store), "stats", "-q").stdout == "-\n"
    assert json.loads(called("-C", str(store), "stats", "--json").stdout)["hit_rate"] is None


def test_namespaces_of_one_name_are_told_apart(store: Path, tmp_path: Path) -> None:
    (tmp_path / "p.ids").write_text("1 2 3")
    with kvfs.open(store) as s:
        for revision in ("aaaa", "bbbb"):
            s.namespace("twin", tiny(), revision).put(tokens_of(2, 2), seeded(2, 2 * TINY_BYTES))
    done = called("-C", str(store), "match", str(tmp_path / "p.ids"))
    assert done.returncode == 2 and "alpha, twin@aaaa, twin@bbbb" in done.stderr


def test_a_user_who_may_only_read_can_list(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this user may create no files in the store, the command reads without registering."""

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvfs.runtime.open_store.Liveness", refused)
    assert "alpha" in called("-C", str(store), "ls").stdout
    done = called("-C", str(store), "rm", "alpha", "-y")
    assert done.returncode == 1 and "owner" in done.stderr


def test_a_long_result_is_written_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One write and one flush per line: a fifth of the time of a listing of 100,000 namespaces."""
    echoed: list[str] = []
    echo = click.echo
    monkeypatch.setattr(click, "echo", lambda message, **how: (echoed.append(message), echo(message, **how)))
    Output().result({}, lambda: (f"line {n}\x1b" for n in range(1000)))
    assert capsys.readouterr().out == "".join(f"line {n}?\n" for n in range(1000))
    assert len(echoed) == 1
    Output().result({}, lambda: ())
    assert capsys.readouterr().out == "" and len(echoed) == 1
