"""Prompts whose pages are named by hashes or by keys, in buffers of their own, with holes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvfs
from kvfs.errors import ConfigError
from kvfs.pages.chunk_set import bits_of
from tests.stores import TINY_BYTES, corrupt, seeded, tiny, tokens_of

CHUNKS = 70  # more than two rows


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="32MiB") as store:
        yield store


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("model", tiny(), "1")


def pages_of(seed: int, chunks: int) -> list[bytes]:
    return [seeded(1000 * seed + n, TINY_BYTES) for n in range(chunks)]


def keys_of(count: int) -> list[bytes]:
    return [b"key %d" % n for n in range(count)]


def test_hashes_name_the_pages_of_their_tokens(ns: kvfs.Namespace) -> None:
    tokens, data = tokens_of(1, CHUNKS), pages_of(1, CHUNKS)
    assert ns.put(tokens, b"".join(data)).stored == CHUNKS
    pages = ns.prompt(hashes=ns.chunk_hashes(tokens))
    pages.look()
    assert pages.stored["full"] == (1 << CHUNKS) - 1 and pages.tokens == len(tokens)
    out = [bytearray(TINY_BYTES) for _ in range(45)]
    with pages.select({"full": 0}, end=45) as match:
        assert ns.get_pages(match, out) == {"full": bits_of(range(45))}
    assert out == data[:45]


def test_pages_of_keys_are_found_in_any_order_and_behind_holes(ns: kvfs.Namespace) -> None:
    keys, data = keys_of(CHUNKS), pages_of(2, CHUNKS)
    kept = [n for n in range(CHUNKS) if n not in (0, 7, 31, 32, 69)]
    assert ns.put_keys([keys[n] for n in reversed(kept)], [data[n] for n in reversed(kept)]).stored == len(kept)
    pages = ns.prompt(keys=keys)
    out = [bytearray(TINY_BYTES) for _ in keys]
    with pages.select({"full": 0}, end=CHUNKS) as match:
        assert match.group("full").present == bits_of(kept) and match.keyed
        assert ns.get_pages(match, out) == {"full": bits_of(kept)}
        assert ns.get(match, [bytearray(TINY_BYTES) for _ in keys]) == 0, "the first page is missing"
    assert [bytes(out[n]) for n in kept] == [data[n] for n in kept]


def test_a_part_of_a_match_of_keys_is_loaded_under_the_same_hold(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    keys, data = keys_of(CHUNKS), pages_of(2, CHUNKS)
    kept = [n for n in range(CHUNKS) if n != 40]
    ns.put_keys([keys[n] for n in kept], [data[n] for n in kept])
    with ns.prompt(keys=keys).select({"full": 0}, end=CHUNKS) as match:
        before = store.stats()["counters"].get("tokens_loaded", 0)
        part, out = match.cut(38, 5), [bytearray(TINY_BYTES) for _ in range(5)]
        assert ns.get_pages(part, out) == {"full": bits_of([38, 39, 41, 42])}
        assert [bytes(out[n - 38]) for n in (38, 39, 41, 42)] == [data[n] for n in (38, 39, 41, 42)]
        loaded = store.stats()["counters"]["tokens_loaded"] - before
        assert loaded == 4 * ns.layout.page_tokens, "each page of keys is of use by itself"
        for first, count in ((-1, 2), (CHUNKS - 1, 2), (3, -1)):
            with pytest.raises(ConfigError, match="within its pages"):
                match.cut(first, count)
        part.close()
        assert not match.hold.acquire()
    with ns.match(range(64)) as other, pytest.raises(ConfigError, match="a match of keys"):
        other.cut(0, 0)


def kept_pages(ns: kvfs.Namespace, keys: list[bytes], data: list[bytes]) -> list[int]:
    """The keys, by number, whose pages are loaded with the right bytes."""
    out = [bytearray(TINY_BYTES) for _ in keys]
    with ns.prompt(keys=keys).select({"full": 0}, end=len(keys)) as match:
        good = ns.get_pages(match, out)["full"]
    assert all(bytes(out[n]) == data[n] for n in range(len(keys)) if good >> n & 1)
    return [n for n in range(len(keys)) if good >> n & 1]


def test_tokens_that_spell_a_key_do_not_find_its_page(ns: kvfs.Namespace) -> None:
    """The text that is hashed of a key could be that of the tokens of a first chunk."""
    spelled = b"kvfs key 1\n" + seeded(7, 4 * 16 - 11)
    assert ns.put_keys([spelled[11:]], pages_of(1, 1)).stored == 1
    tokens = np.frombuffer(spelled, "<u4")
    assert ns.match(tokens).tokens == 0
    assert ns.put(tokens, pages_of(2, 1)[0]).stored == 1
    out = bytearray(TINY_BYTES)
    with ns.match_keys([spelled[11:]]) as match:
        assert ns.get(match, out) == 1 and bytes(out) == pages_of(1, 1)[0]


def test_pages_of_keys_survive_a_rebuild(store_path: Path) -> None:
    """A record that names its place among the keys would be put into a slot of its row where no lookup looks."""
    keys, data = keys_of(CHUNKS), pages_of(6, CHUNKS)
    with kvfs.open(store_path, capacity="32MiB") as store:
        assert store.namespace("model", tiny(), "1").put_keys(keys, data).stored == CHUNKS
    (store_path / "index" / "CURRENT").unlink()
    with kvfs.open(store_path) as store:
        assert store.wait_ready()
        assert kept_pages(store.namespace("model", tiny(), "1"), keys, data) == list(range(CHUNKS))


def test_pages_of_keys_survive_recompression(tmp_path: Path) -> None:
    keys, data = keys_of(CHUNKS), [bytes([n]) * TINY_BYTES * 64 for n in range(CHUNKS)]
    layout = tiny(page_tokens=1024)
    with kvfs.open(tmp_path / "store", capacity="64MiB", segment_bytes="512KiB") as store:
        ns = store.namespace("model", layout, "1")
        assert ns.put_keys(keys, data).stored == CHUNKS
        store._shared.services().active.finish_all()
        assert store.recompress("zstd", idle=0).pages == CHUNKS
        assert ns.present_keys(keys) == [True] * CHUNKS


def test_pages_of_keys_are_imported(store: kvfs.Store, ns: kvfs.Namespace, tmp_path: Path) -> None:
    keys, data = keys_of(CHUNKS), pages_of(8, CHUNKS)
    assert ns.put_keys(keys, data).stored == CHUNKS
    assert store.export(str(tmp_path / "bundle"), ["model"]).pages == CHUNKS
    with kvfs.open(tmp_path / "other", capacity="32MiB") as other:
        assert other.import_bundle(str(tmp_path / "bundle")).stored == CHUNKS
        assert kept_pages(other.namespace("model", tiny(), "1"), keys, data) == list(range(CHUNKS))


def test_a_damaged_page_of_keys_is_lost_by_itself(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    keys, data = keys_of(9), pages_of(3, 9)
    ns.put_keys(keys, data)
    corrupt(Path(store.path), data[4])
    out = [bytearray(TINY_BYTES) for _ in keys]
    with ns.match_keys(keys) as match:
        assert ns.get_pages(match, out) == {"full": bits_of(range(9)) ^ 1 << 4}
    assert [n for n in range(9) if bytes(out[n]) == data[n]] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert ns.present_keys(keys) == [n != 4 for n in range(9)]


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("how", ["one by one", "together"])
def test_pages_in_buffers_of_their_own(store: kvfs.Store, codec: str, how: str) -> None:
    """Pages of several sizes of page, in a codec or not, put and got in buffers anywhere in memory."""
    for page_bytes in (100, 4096, 20_000, 300_000):
        ns = store.namespace("opaque", kvfs.PageLayout.opaque(page_bytes, 16), "1", codec=codec)
        data = [(b"%d " % n * page_bytes)[:page_bytes] for n in range(9)]
        out = [bytearray(b"\xee" * (page_bytes + 64)) for _ in data]
        views = [memoryview(b)[32:-32] for b in reversed(out)]
        if how == "together":
            assert ns.put_keys(keys_of(9), b"".join(data)).stored == 9
        else:
            assert ns.put_keys(keys_of(9), data).stored == 9
        with ns.match_keys(keys_of(9)) as match:
            assert ns.get(match, views) == 9
        assert [bytes(b[32:-32]) for b in reversed(out)] == data
        assert all(b[:32] == b[-32:] == b"\xee" * 32 for b in out), "get wrote outside a buffer"


def test_prompts_of_several_names_and_bad_names_are_refused(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    opaque = store.namespace("opaque", kvfs.PageLayout.opaque(100, 16), "1")
    for bad in (b"one", ["text"], [b"short"], [bytes(32), bytes(33)]):
        with pytest.raises(ConfigError, match="hashes"):
            ns.prompt(hashes=bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pass keys="):
        opaque.prompt(hashes=[bytes(32)])
    for both in ({"hashes": [bytes(32)], "keys": [b"k"]}, {"token_ids": [1], "keys": [b"k"]}):
        with pytest.raises(ConfigError, match="one of token_ids, hashes and keys"):
            ns.prompt(**both)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="extra belongs to token_ids"):
        ns.prompt(keys=[b"k"], extra={0: b"x"})
    with pytest.raises(ConfigError, match="make a new one"):
        ns.prompt(keys=[b"k"]).extend([1])


def test_buffers_of_another_size_or_number_are_refused(ns: kvfs.Namespace) -> None:
    data = pages_of(4, 3)
    with pytest.raises(ConfigError, match="buffer 1, has"):
        ns.put_keys(keys_of(3), [data[0], data[1][:-1], data[2]])
    with pytest.raises(ConfigError, match="one page per"):
        ns.put_keys(keys_of(2), data)
    ns.put_keys(keys_of(3), data)
    with ns.match_keys(keys_of(3)) as match:
        with pytest.raises(ConfigError, match="2 buffers"):
            ns.get(match, [bytearray(TINY_BYTES)] * 2)
        with pytest.raises(ConfigError, match="read-only"):
            ns.get(match, data)


def test_purge_by_keys_removes_these_pages_only(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    salted = store.namespace("model", tiny(), "1", salt="secret of a tenant")
    for space in (ns, salted):
        space.put_keys(keys_of(6), pages_of(5, 6))
    assert store.purge(salted, keys=keys_of(6)[2:4]).pages == 2
    assert salted.present_keys(keys_of(6)) == [True, True, False, False, True, True]
    assert ns.present_keys(keys_of(6)) == [True] * 6
    tokens = np.array(tokens_of(9, 3))
    ns.put(tokens, pages_of(9, 3))
    assert store.purge(ns, prefix=tokens).pages == 3, "an array is compared with None by identity"
    with pytest.raises(ConfigError, match="exclude each other"):
        store.purge(ns, keys=[b"k"], chunks=[bytes(32)])
    with pytest.raises(ConfigError, match="need a Namespace"):
        store.purge("model", keys=[b"k"])
