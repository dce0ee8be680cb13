"""What `kvfs ls NAMESPACE` shows, other commands take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvfs
from tests.cli.commands import called
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of


@pytest.fixture
def ids(store: Path) -> dict[int, str]:
    """Tokens -> id of the two prefixes in the store."""
    with kvfs.open(store) as s:
        s.namespace("alpha", tiny(), "9213176").put(tokens_of(2, 4), seeded(2, 4 * TINY_BYTES))
    items = json.loads(called("-C", str(store), "ls", "alpha", "--json").stdout)["items"]
    return {item["end_token"]: item["id"] for item in items}


def matched(store: Path, seed: int, chunks: int) -> int:
    with kvfs.open(store) as s, s.namespace("alpha", tiny(), "9213176").match(tokens_of(seed, chunks)) as match:
        return match.tokens


def test_pin(store: Path, ids: dict[int, str]) -> None:
    done = called("-C", str(store), "pin", "system", ids[160][:12])
    assert (done.returncode, done.stdout) == (0, "pinned 160 of 160 tokens as system\n"), done.stderr
    assert json.loads(called("-C", str(store), "pin", "ls", "--json").stdout)["items"][0]["tokens"] == 160
    done = called("-C", str(store), "pin", "other", "0123456789ab")
    assert done.returncode == 1 and "kvfs ls" in done.stderr
    done = called("-C", str(store), "pin", "other", ids[160][:12], "-n", "alpha")
    assert done.returncode == 2 and "leave them out" in done.stderr


def test_a_file_is_a_prompt_even_if_its_name_looks_like_an_id(
    store: Path, ids: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(ids[160][:12]).write_text(" ".join(map(str, tokens_of(2, 4))))
    assert called("-C", str(store), "pin", "system", ids[160][:12]).stdout == "pinned 64 of 64 tokens as system\n"


def test_rm(store: Path, ids: dict[int, str]) -> None:
    shown = called("-C", str(store), "rm", ids[160][:8], "--dry-run")
    assert shown.stdout == f"would remove {ids[160][:12]} of alpha@9213176 (10 pages, 10.0 KiB)\n"
    assert matched(store, 1, 10) == 160
    listed = called("-C", str(store), "ls", "alpha", "-q").stdout.split()
    id_ = next(i for i in listed if i == ids[160])
    assert called("-C", str(store), "rm", id_[:8], "--yes").stdout.startswith("removed 10 pages")
    assert (matched(store, 1, 10), matched(store, 2, 4)) == (0, 64)


def test_rm_of_the_rest_of_a_prompt_keeps_the_head_that_another_one_uses(store: Path) -> None:
    with kvfs.open(store) as s:
        ns = s.namespace("alpha", tiny(), "9213176")
        with ns.match(tokens_of(1, 10)[:64]) as match:
            assert ns.get(match, bytearray(match.nbytes)) == 4
    items = json.loads(called("-C", str(store), "ls", "alpha", "--json").stdout)["items"]
    rest = next(item["id"] for item in items if item["end_token"] == 160)
    done = called("-C", str(store), "rm", rest, "--yes")
    assert done.returncode == 0, done.stderr
    assert matched(store, 1, 10) == next(item["first_token"] for item in items if item["id"] == rest)


def test_export_to_a_bundle(store: Path, ids: dict[int, str], tmp_path: Path) -> None:
    one, both = str(tmp_path / "one.tar"), str(tmp_path / "both.tar")
    assert called("-C", str(store), "export", one, ids[64][:10]).stdout.startswith("exported 4 pages")
    done = called("-C", str(store), "export", both, ids[64][:10], ids[160][:10], ids[64])
    assert done.stdout.startswith("exported 14 pages"), done
    assert called("-C", str(store), "export", both, "alpha", ids[64], "--force").stdout.startswith("exported 14 pages")
    other = tmp_path / "other"
    assert called("-C", str(other), "init", "--capacity", "64MiB").returncode == 0
    assert called("-C", str(other), "import", one).returncode == 0
    assert (matched(other, 2, 4), matched(other, 1, 10)) == (64, 0)


@pytest.mark.parametrize("arguments", [("rm", "alfa", "--yes"), ("export", "x.tar", "alfa"), ("warm", "alfa")])
def test_what_is_neither_a_namespace_nor_an_id_is_answered_with_what_is_close(
    store: Path, arguments: tuple[str, ...]
) -> None:
    done = called("-C", str(store), *arguments)
    assert done.returncode == 1
    assert done.stderr == "kvfs: no namespace 'alfa' in this store (did you mean 'alpha'?); it has: alpha\n"
    assert not Path("x.tar").exists()


def test_long_lists_say_how_much_they_leave_out(store: Path) -> None:
    with kvfs.open(store) as s:
        for n in range(12):
            s.namespace(f"m{n:03}", tiny(), "9213176").put(tokens_of(n, 1), seeded(n, TINY_BYTES))
            s.pin(f"p{n:03}", s.namespace(f"m{n:03}", tiny(), "9213176"), tokens_of(n, 1))
    assert "m006 and 5 more" in called("-C", str(store), "ls", "zzz").stderr
    assert "p007 and 4 more" in called("-C", str(store), "unpin", "zzz").stderr
    assert "did you mean 'p001'" in called("-C", str(store), "unpin", "p0001").stderr


def test_ls_marks_holes_and_verify_names_the_tokens_of_a_bad_page(store: Path) -> None:
    for file in (store / "segments").glob("*.kvs"):
        data = bytearray(file.read_bytes())
        at = data.find(seeded(1, 10 * TINY_BYTES)[6 * TINY_BYTES : 6 * TINY_BYTES + 64])
        if at >= 0:
            data[at] ^= 1
            file.write_bytes(data)
    done = called("-C", str(store), "verify", "--all")
    assert done.returncode == 3 and "alpha@9213176 tokens 96-112, segment " in done.stdout, done.stdout
    assert "missing" not in called("-C", str(store), "ls", "alpha").stdout
    assert called("-C", str(store), "verify", "--all", "--repair").returncode == 0
    assert "0-160, 1 missing  " in called("-C", str(store), "ls", "alpha").stdout
    assert json.loads(called("-C", str(store), "ls", "alpha", "--json").stdout)["items"][0]["missing_chunks"] == 1
