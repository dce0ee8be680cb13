"""What a store reports that it holds, against what was put: after evictions, rebuilds and purges, and during writes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.catalog.catalog import Catalog, NamespaceInfo, NotFoundError, identity_of
from kvfs.catalog.records import Records
from kvfs.catalog.walk import Walk
from kvfs.index import environment
from kvfs.index.session import Session
from tests.stores import TINY_BYTES, load, seeded, segment_files, tiny, tokens_of


def put(ns: kvfs.Namespace, seed: int, chunks: int) -> list[int]:
    tokens = tokens_of(seed, chunks)
    assert ns.put(tokens, seeded(seed, chunks * TINY_BYTES)).stored == chunks
    return tokens


def spaces(store: kvfs.Store) -> dict[str, NamespaceInfo]:
    return {i.name: i for i in store.catalog.namespaces()}


def walked(store: kvfs.Store) -> dict[str, int]:
    """Live pages by namespace, counted one by one."""
    names = {d.digest: d.name for d in store.catalog.described()}
    found: dict[str, int] = {}
    for s in Walk(store._shared.c).stretches():
        found[names[s.digest]] = found.get(names[s.digest], 0) + s.pages
    return found


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="32MiB") as made:
        yield made


def test_counts_are_those_of_a_walk_over_all_pages(store: kvfs.Store) -> None:
    alpha, beta = store.namespace("alpha", tiny(), "1a"), store.namespace("beta", tiny(), "2b")
    for seed in range(12):
        put(alpha, seed, 45)
        put(beta, 100 + seed, 7)
    infos = spaces(store)
    assert (infos["alpha"].pages, infos["beta"].pages) == (540, 84)
    assert infos["alpha"].nbytes == 540 * TINY_BYTES
    assert walked(store) == {"alpha": 540, "beta": 84}


def test_counts_follow_evictions_pins_and_purges(store: kvfs.Store) -> None:
    alpha, beta = store.namespace("alpha", tiny(), "1a"), store.namespace("beta", tiny(), "2b")
    tokens = put(alpha, 1, 30)
    for seed in range(20):
        put(beta, 100 + seed, 40)
    store.pin("keep", alpha, tokens)
    assert spaces(store)["alpha"].pages == 30 == walked(store)["alpha"]
    store.gc(store.stats()["used_bytes"] // 2)
    assert {n: i.pages for n, i in spaces(store).items()} == walked(store)
    store.unpin("keep")
    store.purge(alpha, prefix=tokens[: 10 * 16])
    assert spaces(store)["alpha"].pages == 20
    store.purge("beta")
    assert "beta" not in spaces(store)


def test_counts_are_the_same_after_a_rebuild(store: kvfs.Store, store_path: Path) -> None:
    alpha = store.namespace("alpha", tiny(), "1a")
    for seed in range(6):
        put(alpha, seed, 45)
    store.close()
    shutil.rmtree(store_path / "index")
    with kvfs.open(store_path) as again:
        assert again.wait_ready()
        info = spaces(again)["alpha"]
        assert (info.pages, info.nbytes) == (270, 270 * TINY_BYTES)


def test_prefixes_are_what_requests_used_last(store: kvfs.Store) -> None:
    alpha = store.namespace("alpha", tiny(), "1a")
    first, second = put(alpha, 1, 10), put(alpha, 2, 64)
    found, walk = store.catalog.prefixes(store.catalog.find("alpha"))
    assert walk.complete and sorted((p.first_chunk, p.last_chunk, p.pages) for p in found) == [(0, 9, 10), (0, 63, 64)]
    with alpha.match(second[: 32 * 16]) as match:
        load(alpha, match)
    found, _ = store.catalog.prefixes(store.catalog.find("alpha"))
    newest = max(found, key=lambda p: p.stamp_us)
    assert (newest.first_chunk, newest.last_chunk, newest.pages) == (0, 31, 32)
    assert {p.last_hash for p in found} >= {alpha.plan_save(first).hashes[-1], alpha.plan_save(second).hashes[-1]}


def test_last_use_tells_namespaces_of_one_segment_apart(store: kvfs.Store) -> None:
    alpha, beta = store.namespace("alpha", tiny(), "1a"), store.namespace("beta", tiny(), "2b")
    tokens = put(alpha, 1, 4)
    put(beta, 2, 4)
    with beta.match(tokens_of(2, 4)) as match:
        load(beta, match)
    with alpha.match(tokens) as match:
        load(alpha, match)
        infos = spaces(store)
        assert infos["alpha"].last_used_us == match.at_us > infos["beta"].last_used_us > 0


def test_a_walk_that_runs_out_of_time_is_incomplete(store: kvfs.Store) -> None:
    alpha = store.namespace("alpha", tiny(), "1a")
    for seed in range(300):
        put(alpha, seed, 1)
    found, walk = store.catalog.prefixes(store.catalog.find("alpha"), seconds=0.0)
    assert not walk.complete and 0.0 < walk.share < 1.0 and 0 < len(found) < 300


def test_names_short_digests_and_ambiguous_ones(store: kvfs.Store) -> None:
    put(store.namespace("alpha", tiny(), "1abc"), 1, 1)
    put(store.namespace("alpha", tiny(), "1abd"), 1, 1)
    catalog = store.catalog
    with pytest.raises(kvfs.ConfigError, match="names 2 namespaces"):
        catalog.find("alpha")
    found = catalog.find("alpha@1abc")
    assert catalog.find(found.digest.hex()[:8]) == found and found.revision == "1abc"
    with pytest.raises(NotFoundError, match="it has: alpha"):
        catalog.find("gamma")
    for ref in ("", "@", "ffffffffffff", "zz"):
        with pytest.raises((NotFoundError, kvfs.ConfigError)):
            catalog.find(ref)
    assert store.namespace(**identity_of(found)).match(tokens_of(1, 1)).tokens == 16


def test_a_page_is_found_by_digits_of_its_hash(store: kvfs.Store) -> None:
    alpha = store.namespace("alpha", tiny(), "1a")
    hashes = alpha.plan_save(put(alpha, 1, 50)).hashes
    for number in (0, 31, 32, 49):
        for digits in (7, 12, 64):
            (page,) = store.catalog.find_pages(hashes[number].hex()[:digits])
            assert page.chunk_hash == hashes[number]
            assert page.located is not None and page.located.entry.chunk == number
    assert store.catalog.find_pages("00") == []


def test_any_number_of_pages_is_found_in_one_walk(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    alpha = store.namespace("alpha", tiny(), "1a")
    for seed in range(8):
        put(alpha, seed, 40)
    ids = [p.last_hash.hex()[: 6 + 2 * n] for n, p in enumerate(store.catalog.prefixes(store.catalog.find("alpha"))[0])]
    each = {ref: store.catalog.find_pages(ref) for ref in ids}
    walks, hashes = list[object](), Walk.hashes

    def counted(walk: Walk) -> object:
        walks.append(walk)
        return hashes(walk)

    monkeypatch.setattr(Walk, "hashes", counted)
    assert len(ids) == 8 and store.catalog.find_all_pages([*ids, "ffffff", "no"]) == {**each, "ffffff": [], "no": []}
    assert store.warm(prefixes=ids).nbytes == store.warm(["alpha"]).nbytes
    assert len(walks) == 2
    assert store.catalog.find_all_pages(["no"]) == {"no": []} and len(walks) == 2


def test_entries_are_found_across_chained_tables_and_damage_is_none(store_path: Path) -> None:
    store = kvfs.open(store_path, capacity="64MiB", segment_bytes="2MiB")
    alpha = store.namespace("alpha", tiny(page_tokens=16, head_dim=2), "1a")
    size = alpha.layout.page_bytes
    assert alpha.put(tokens_of(1, 250), seeded(1, 250 * size)).stored == 250
    store.close()
    with kvfs.open(store_path) as again:
        infos = again.catalog.segments()
        with Records(again._shared.c) as records:
            for info in infos:
                seqs = [s for s in range(info.row.records) if records.entry(info.row.segment_id, s) is not None]
                assert seqs == list(range(info.row.records))
                assert records.entry(info.row.segment_id, info.row.records + 10_000) is None
            assert records.entry(bytes(16), 0) is None
        file = segment_files(store_path)[0]
        data = bytearray(file.read_bytes())
        data[4096 + 160 * 75 + 32] ^= 1  # the entry that leads to the second table
        file.write_bytes(data)
        with Records(again._shared.c) as records:
            assert records.entry(bytes.fromhex(file.stem), 70) is not None
            assert records.entry(bytes.fromhex(file.stem), 80) is None


WRITER = """
import sys
import kvfs
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of
with kvfs.open(sys.argv[1]) as store:
    ns = store.namespace("alpha", tiny(), "1a")
    print("ready", flush=True)
    for i in range(40):
        while ns.put(tokens_of(int(sys.argv[2]) * 1000 + i, 20), seeded(i, 20 * TINY_BYTES)).declined:
            pass  # the index timed out on a loaded machine
"""


def test_reading_during_the_writes_of_four_processes_disturbs_none(store_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    with kvfs.open(store_path, capacity="64MiB", counted=False) as store:
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(store_path), str(n)], cwd=root, stdout=subprocess.PIPE, text=True
            )
            for n in range(4)
        ]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        before = 0
        while any(writer.poll() is None for writer in writers):
            pages = sum(i.pages for i in Catalog(store._shared.c).namespaces())
            assert before <= pages <= 3200
            before = pages
            list(Walk(store._shared.c).stretches())
            assert store.verify(0.1).ok
        assert all(writer.wait() == 0 for writer in writers)
        assert spaces(store)["alpha"].pages == 3200 == walked(store)["alpha"]
        assert json.dumps(store.stats())


def test_a_listing_of_namespaces_keeps_no_writer_waiting(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """All descriptors were read in one transaction, 100,000 in 0.2 s, while puts wait for the index."""
    names = [f"m{number:02}" for number in range(40)]
    for name in names:
        store.namespace(name, tiny(), revision="r1").put(tokens_of(1, 1), seeded(1, TINY_BYTES))
    monkeypatch.setattr(environment, "ROWS_PER_HOLD", 7)
    held: list[int] = []
    look = Session.namespaces

    def counted_look(session: Session, after: bytes, rows_max: int) -> Any:
        held.append(rows_max)
        return look(session, after, rows_max)

    monkeypatch.setattr(Session, "namespaces", counted_look)
    assert [i.name for i in store.catalog.namespaces()] == names
    assert set(held) == {7} and len(held) >= 40 // 7


@pytest.mark.parametrize("layout", [tiny(), kvfs.PageLayout.opaque(100, 16)], ids=["kv", "opaque"])
def test_all_pages_of_keys_of_one_request_are_listed_together(store_path: Path, layout: kvfs.PageLayout) -> None:
    with kvfs.open(store_path, capacity="32MiB") as store:
        ns, keys = store.namespace("m", layout, "1"), [b"key %d" % n for n in range(40)]
        assert ns.put_keys(keys, bytes(40 * layout.page_bytes)).stored == 40
        names = list(ns.prompt(keys=keys).hashes)
        for ref in (names[0], names[39]):
            found = store.catalog.pages_of_prefix(ref.hex())
            assert found.pages == 40 and found.names == set(names)
        assert store.purge(ns, chunks=found.names).pages == 40
