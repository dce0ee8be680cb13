"""Tables fit the terminal, and are whole everywhere else."""

from __future__ import annotations

from pathlib import Path

import kvfs
from kvfs.cli import text
from tests.cli.commands import called, on_a_terminal
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of

LONG = "meta-llama/Llama-3.1-405B-Instruct-with-a-name-as-long-as-those-of-the-hub"


def test_the_widest_name_is_shortened_in_its_middle_until_a_row_fits() -> None:
    rows = [(f"{LONG}@9213176", "bf16", "1,000"), ("short", "bf16", "2")]
    for width in (40, 60, 79):
        lines = text.table(("NAMESPACE", "CELL", "PAGES"), rows, "llr", width)
        assert max(map(len, lines)) == width
        assert lines[1].startswith("meta-") and "..." in lines[1] and "9213176  bf16  1,000" in lines[1]
        assert lines[2].split() == ["short", "bf16", "2"]
    assert text.table(("NAMESPACE", "CELL", "PAGES"), rows, "llr", 200) == text.table(
        ("NAMESPACE", "CELL", "PAGES"), rows, "llr"
    )


def test_a_terminal_that_is_too_narrow_keeps_numbers_and_the_ends_of_names() -> None:
    lines = text.table(("NAME", "SIZE"), [("a" * 30 + "z", "123456789")], "lr", 5)
    assert lines[1] == "aaaaa...aaaz  123456789"


def test_what_fits_is_not_shortened() -> None:
    assert text.shortened("abcdef", 6) == "abcdef"
    assert text.shortened("abcdefg", 6) == "ab...g"
    assert text.shortened("abcdefg", 2) == ".."


def test_rows_fit_the_terminal_unless_told_otherwise(store: Path) -> None:
    with kvfs.open(store) as s:
        s.namespace(LONG, tiny(), "9213176").put(tokens_of(2, 4), seeded(2, 4 * TINY_BYTES))
    for columns in (60, 80, 100):
        for arguments in (["ls"], ["inspect"]):
            code, seen = on_a_terminal(["-C", str(store), *arguments], columns=columns, NO_COLOR="1")
            rows = [line for line in seen.splitlines() if "bf16" in line]
            assert code == 0 and len(rows) == 2
            assert all(len(row) <= max(columns, 72) for row in rows), seen
    assert LONG in on_a_terminal(["-C", str(store), "ls", "--no-truncate"], columns=80)[1]
    assert LONG in called("-C", str(store), "ls").stdout  # a pipe gets all of it


def test_a_list_of_several_ends_with_their_sum(store: Path) -> None:
    lines = called("-C", str(store), "ls").stdout.splitlines()
    assert len(lines) == 2, "one item is its own sum"
    with kvfs.open(store) as s:
        for number in (2, 3):
            s.namespace(f"model-{number}", tiny(), "1").put(tokens_of(number, 4), seeded(number, 4 * TINY_BYTES))
    lines = called("-C", str(store), "ls", "--filter", "name=model-*", "--limit", "1").stdout.splitlines()
    assert lines[2:] == ["... 1 more", f"total 8 pages, {text.size(8 * TINY_BYTES)}"]


def test_inspect_shows_how_full_quotas_are(tmp_path: Path) -> None:
    quotas = {"full": kvfs.Quota(cap_bytes=1 << 20), "kept": kvfs.Quota(guaranteed_bytes=1 << 20)}
    with kvfs.open(tmp_path / "store", capacity="64MiB", quotas=quotas) as store:
        store.namespace("full", tiny(), "1").put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
    lines = called("-C", str(tmp_path / "store"), "inspect").stdout.splitlines()
    full, kept = (line for line in lines if line.startswith("quota "))
    assert full.startswith("quota    full   used ") and "of 1.0 MiB  [" in full and full.endswith(" %")
    assert kept == "quota    kept   used 0 B   guaranteed 1.0 MiB"


def test_labels_show_the_digest_of_weights_behind_its_word(store: Path) -> None:
    with kvfs.open(store) as s:
        for digest in ("8b156518aaaaaaaa", "77fe01b2bbbbbbbb"):
            s.namespace("llama", tiny(), f"weights-{digest}").put(tokens_of(3, 1), seeded(3, TINY_BYTES))
    seen = called("-C", str(store), "ls").stdout
    assert "llama@weights-8b156518 " in seen and "llama@weights-77fe01b2 " in seen
    assert called("-C", str(store), "ls", "llama@weights-8b156518").returncode == 0
    assert "name a namespace" not in called("-C", str(store), "inspect", "llama@weights-77fe01b2").stderr


def test_lines_of_usual_stores_fit_eighty_columns(store: Path) -> None:
    for arguments in (["stats"], ["inspect"], ["verify", "--all"], ["gc", "--target", "0"]):
        code, seen = on_a_terminal(["-C", str(store), *arguments], columns=80, NO_COLOR="1")
        lines = [line for line in seen.splitlines() if str(store) not in line]  # a path is as long as it is
        assert code == 0 and lines and max(map(len, lines)) <= 80, seen


def test_the_log_shows_ids_as_other_commands_do(store: Path) -> None:
    with kvfs.open(store) as s:
        ns = s.namespace("alpha", tiny(), "9213176")
        s.purge(ns)
        digest = ns.identity.digest.hex()
    seen = called("-C", str(store), "log").stdout
    assert f"namespace {digest[:12]}," in seen and digest not in seen
    assert digest in called("-C", str(store), "log", "--json").stdout


def test_names_are_filtered_by_a_pattern(store: Path) -> None:
    with kvfs.open(store) as s:
        s.namespace("org/chat", tiny(), "9213176").put(tokens_of(2, 4), seeded(2, 4 * TINY_BYTES))
    assert "org/chat" in called("-C", str(store), "ls", "--filter", "name=org/*").stdout
    assert "alpha" not in called("-C", str(store), "ls", "--filter", "name=org/*").stdout
    assert "alpha" in called("-C", str(store), "ls", "--filter", "name=alph?").stdout


def test_help_is_also_a_word() -> None:
    assert called("help", "ls").stdout == called("ls", "--help").stdout
    assert called("help", "config", "set").stdout == called("config", "set", "--help").stdout
    done = called("help")
    assert (done.returncode, done.stdout) == (0, called("--help").stdout)
    done = called("help", "lss")
    assert done.returncode == 2 and "did you mean 'ls'" in done.stderr
