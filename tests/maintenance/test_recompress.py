"""Recompression of cold segments: the same pages in less space, none lost; other segments stay as they are."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs import PageLayout
from kvfs.format import codec
from kvfs.format import segment as fmt
from kvfs.maintenance import recompress
from kvfs.segments.scan import scan_segment
from kvfs.system.files import Files
from kvfs.testing import Fault, FaultyFiles
from kvfs.write.appender import Appender
from tests.format.test_codec import LAYOUT, PAGE, PAGES, entries_of, flip
from tests.stores import TINY_BYTES, restored, scanned, seeded, segment_files, tiny, tokens_of
from tools.torture.case import allocated_bytes

PROMPTS = range(8)


def fill(store: kvfs.Store, *, pages: bytes = PAGES, ttl: float | None = None) -> kvfs.Namespace:
    ns = store.namespace("model", LAYOUT, "1")
    for prompt in PROMPTS:
        assert ns.put(tokens_of(prompt, 6), pages, ttl=ttl).stored == 6
    store._shared.services().active.finish_all()
    return ns


def found(ns: kvfs.Namespace, pages: bytes = PAGES) -> int:
    """Chunks that are restored, each with its bytes."""
    total = 0
    for prompt in PROMPTS:
        data = restored(ns, tokens_of(prompt, 6))
        assert data == pages[: len(data)]
        total += len(data) // PAGE
    return total


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(tmp_path / "store", capacity="64MiB", segment_bytes="512KiB") as opened:
        yield opened


@pytest.mark.parametrize("name", ["zstd", "planes"])
def test_the_same_pages_take_less_space(store: kvfs.Store, name: str) -> None:
    ns = fill(store)
    before = store.stats()
    plan = store.recompress_plan(name, idle=0)
    assert len(plan.steps) == before["segments"]["sealed"] == 4 and not plan.left
    done = store.recompress(name, idle=0)
    assert (done.segments, done.pages, done.stopped) == (4, 48, "")
    after = store.stats()
    assert (done.bytes_before, done.bytes_after) == (before["used_bytes"], after["used_bytes"])
    saved = before["used_bytes"] - after["used_bytes"]
    assert 0.7 * plan.saves_bytes < saved < 1.3 * plan.saves_bytes
    assert {e.codec for e in entries_of(store)} == {codec.CODECS[name]}
    assert found(ns) == 48
    report = store.verify()
    assert report.ok and report.index_pages == 48, report.problems
    assert sum(p.stat().st_blocks * 512 for p in segment_files(Path(store.path))) <= after["used_bytes"]
    [info] = store.catalog.namespaces()
    assert (info.pages, info.nbytes) == (48, sum(e.stored_bytes for e in entries_of(store)))
    assert not store.recompress_plan(name, idle=0).steps, "it finds something to do forever"
    assert store.recompress(name, idle=0).segments == 0


def test_a_plan_changes_nothing(store: kvfs.Store) -> None:
    fill(store)
    before = {p: p.read_bytes() for p in segment_files(Path(store.path))}
    store.recompress_plan(idle=0)
    assert {p: p.read_bytes() for p in segment_files(Path(store.path))} == before


def test_what_is_used_pinned_held_or_dense_is_left_alone(store: kvfs.Store) -> None:
    ns = fill(store)
    assert store.recompress_plan(idle="1h").left == {"used lately": 4}
    assert store.recompress(idle="1h").segments == 0
    with ns.match(tokens_of(0, 6)):
        assert store.recompress_plan(idle=0).left == {"in use": 1}
    store.pin("system prompt", ns, tokens_of(1, 6))
    plan = store.recompress_plan(idle=0)
    assert plan.left["pinned"] == 1
    [pin] = store.pins()
    assert {s.segment_id.hex() for s in plan.steps}.isdisjoint(pin.segments)
    noise = store.namespace("noise", LAYOUT, "1")
    for prompt in range(3):
        noise.put(tokens_of(prompt, 6), seeded(prompt, 6 * PAGE))
    store._shared.services().active.finish_all()
    assert store.recompress_plan(idle=0).left["would not shrink"] >= 1
    store.recompress(idle=0)
    assert found(ns) == 48
    assert store.recompress_plan(idle=0).left["pinned"] == 1


def test_it_ends_when_its_time_is_over(store: kvfs.Store) -> None:
    ns = fill(store)
    done = store.recompress(idle=0, seconds=0.0)
    assert (done.segments, done.stopped) == (0, "") or done.stopped == "time"
    assert found(ns) == 48


def test_uses_and_lifetimes_go_with_the_pages(store: kvfs.Store) -> None:
    ns = fill(store, ttl=3600)
    now = store._shared.c.files.now_us()
    rows = {r.segment_id: r for _, r in store.catalog.segment_rows()}
    before = {c.chunk_hash: c.expires for c in entries_of(store)}
    stamps = {
        e.chunk_hash: stamp
        for i in rows
        for e, stamp in _access_times(store, i)
    }  # fmt: skip
    assert store.recompress(idle=0).segments == 4
    assert {c.chunk_hash: c.expires for c in entries_of(store)} == before
    kept = {r.segment_id: r for _, r in store.catalog.segment_rows()}
    assert rows.keys().isdisjoint(kept)
    assert all(0 < r.expires <= now // 1_000_000 + 3601 for r in kept.values()), "it would never be dropped"
    assert {e.chunk_hash: stamp for i in kept for e, stamp in _access_times(store, i)} == stamps
    assert found(ns) == 48


def _access_times(store: kvfs.Store, segment_id: bytes) -> list[tuple[fmt.Entry, int]]:
    c = store._shared.c
    number = next(n for n, r in store.catalog.segment_rows() if r.segment_id == segment_id)
    held = c.segments.acquire(number, segment_id, c.index.generation)
    assert held is not None
    scan = scan_segment(held.fd, c.files)
    assert scan is not None
    stamps = c.access_times.stamps(segment_id, [e.written_us for e in scan.entries])
    return [(e, stamps[e.seq]) for e in scan.parts()]


def test_damaged_pages_are_not_copied(store: kvfs.Store) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    ns.put(tokens_of(0, 6), PAGES)
    store._shared.services().active.finish_all()
    flip(store, 3, lambda data: data.__setitem__(100, data[100] ^ 1))
    done = store.recompress(idle=0)
    assert (done.segments, done.pages) == (1, 5)
    assert restored(ns, tokens_of(0, 6)) == PAGES[: 3 * PAGE]
    assert store.verify().ok
    assert ns.put(tokens_of(0, 6), PAGES).stored == 1
    assert restored(ns, tokens_of(0, 6)) == PAGES


def _break(store: kvfs.Store, what: str) -> None:
    """Flip a bit of a segment's table entry with a number, or of the descriptor of its namespace."""
    [path] = segment_files(Path(store.path))
    at = fmt.FIRST_PAYLOAD + 20 if what == "descriptor" else fmt.FIRST_TABLE + int(what) * fmt.ENTRY_BYTES + 40
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("what", ["3", "7", "descriptor"])  # 7: the first page of another prompt, in a row of its own
@pytest.mark.parametrize("late", [False, True])
def test_a_segment_whose_table_is_damaged_is_not_dropped_with_its_good_pages(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, what: str, late: bool
) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    for prompt in (0, 1):
        ns.put(tokens_of(prompt, 6), PAGES)
    store._shared.services().active.finish_all()
    if late:  # after it was examined
        rewrite = recompress.Recompressor._rewrite

        def breaks(*args: Any) -> None:
            _break(store, what)
            rewrite(*args)

        monkeypatch.setattr(recompress.Recompressor, "_rewrite", breaks)
        done = store.recompress(idle=0)
        assert (done.segments, done.failed) == (0, 1)
    else:
        _break(store, what)
        done = store.recompress(idle=0)
        assert done.segments == 0
    assert store.recompress_plan(idle=0).left == {"unreadable": 1}
    assert [restored(ns, tokens_of(prompt, 6)) for prompt in (0, 1)] == [PAGES, PAGES]


def test_forks_move_with_their_rows(store: kvfs.Store) -> None:
    ns = store.namespace("model", LAYOUT, "1")
    head = tokens_of(1, 3)
    prompts = [head + tokens_of(i, 3) for i in range(2, 8)]
    for prompt in prompts:
        ns.put(prompt, PAGES)
    store._shared.services().active.finish_all()
    store.recompress(idle=0)
    for prompt in prompts:
        assert restored(ns, prompt) == PAGES
    assert {e.codec for e in entries_of(store)} == {fmt.CODEC_PLANES}


def test_opaque_namespaces_are_recompressed(store: kvfs.Store) -> None:
    ns = store.namespace("engine", PageLayout.opaque(PAGE, 16), "1")
    keys = [b"a", b"b", b"c"]
    ns.put_keys(keys, PAGES[: 3 * PAGE])
    store._shared.services().active.finish_all()
    assert store.recompress(idle=0).pages == 3
    with ns.match_keys(keys) as match:
        out = bytearray(match.nbytes)
        assert ns.get(match, out) == 3 and out == PAGES[: 3 * PAGE]


def test_a_store_that_is_nearly_full_is_recompressed_within_its_limit(tmp_path: Path) -> None:
    with kvfs.open(tmp_path / "store", capacity="16MiB") as store:
        store._shared.background.stop()  # it may evict a segment while the copies use the reserve
        ns = store.namespace("model", LAYOUT, "1")
        for prompt in range(100):
            ns.put(tokens_of(prompt, 6), PAGES)
        store._shared.services().active.finish_all()
        before = sum(ns.match(tokens_of(p, 6)).chunks for p in range(100))
        used = store.stats()["used_bytes"]
        done = store.recompress(idle=0)
        assert done.segments > 10 and done.stopped == ""
        assert store.stats()["used_bytes"] < 0.8 * used
        files = allocated_bytes(tmp_path / "store")
        assert files <= 16 << 20
        assert sum(ns.match(tokens_of(p, 6)).chunks for p in range(100)) == before
        assert store.verify().ok


def test_a_segment_that_cannot_be_read_stays_and_the_others_are_rewritten(memory_path: Path) -> None:
    failed = 0
    for n in range(4, 40, 4):
        files = FaultyFiles()
        with kvfs.open(memory_path / str(n), capacity="64MiB", segment_bytes="512KiB", files=files) as store:
            ns = fill(store)
            files.arm(Fault(files.calls["preadv"] + n, "preadv"))
            done = store.recompress(idle=0)
            files.arm()
            assert done.stopped == "" and 3 <= done.segments <= 4 - done.failed
            assert found(ns) == 48
            failed += done.failed
            assert store.recompress(idle=0).segments == 4 - done.segments
            assert found(ns) == 48
    assert failed > 1


def test_a_segment_with_one_page_that_cannot_be_read_stays(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours are read with it, then each alone; the segment must not be dropped without the bad one."""
    ns = fill(store)
    files = segment_files(Path(store.path))
    file = max(files, key=lambda file: file.stat().st_size)  # of a small one, the bad page may be tried first
    bad, preadv = list(scanned(file).parts())[3].payload, Files.preadv

    def fail(self: Files, fd: int, buffers: Sequence[Any], offset: int, *more: Any) -> int:
        if offset <= bad < offset + sum(map(len, buffers)) and os.readlink(f"/proc/self/fd/{fd}") == str(file):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(self, fd, buffers, offset, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "preadv", fail)
        done = store.recompress(idle=0)
    assert (done.segments, done.failed) == (len(files) - 1, 1) and file.exists()
    assert found(ns) == 48


def test_an_eviction_goes_first(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    monkeypatch.setattr(recompress, "LOCK_SECONDS", 0.05)
    with store._shared.services().evictor.lock.hold(0.0) as held:
        assert held
        with pytest.raises(kvfs.StoreLockedError, match="try again"):
            store.recompress(idle=0)
    assert store.recompress(idle=0).segments == 4


def test_a_reader_that_has_matched_before_still_reads(store: kvfs.Store) -> None:
    ns = fill(store)
    with ns.match(tokens_of(0, 6)) as match:
        there = pickle.dumps(match)
    assert store.recompress(idle=0).segments == 4
    late = pickle.loads(there)
    out = bytearray(late.nbytes)
    chunks = ns.get(late, out)  # its segment is dropped: nothing is restored, or the right bytes
    assert out[: chunks * PAGE] == PAGES[: chunks * PAGE]
    assert found(ns) == 48


def test_read_only_and_disabled_stores_refuse(tmp_path: Path, store: kvfs.Store) -> None:
    with pytest.raises(kvfs.ConfigError, match="choose one of"):
        store.recompress("gzip")
    with pytest.raises(kvfs.ConfigError, match="idle"):
        store.recompress(idle="soon")
    fill(store)
    path = store.path
    store.close()
    with kvfs.open(path, read_only=True) as reader:
        assert reader.recompress_plan(idle=0).steps
        with pytest.raises(kvfs.StoreReadOnlyError):
            reader.recompress(idle=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "KVFS_DISABLE", "1")
        with kvfs.open(path) as off, pytest.raises(kvfs.ConfigError, match="switched off"):
            off.recompress()


@pytest.mark.parametrize("lowered", [False, True])
def test_a_quota_at_its_cap_does_not_end_recompressing_of_the_whole_store(tmp_path: Path, lowered: bool) -> None:
    quotas = {"capped": kvfs.Quota(cap_bytes=1 << 20)}
    with kvfs.open(tmp_path / "store", capacity="64MiB", segment_bytes="512KiB", quotas=quotas) as store:
        capped = store.namespace("capped", LAYOUT, "1")
        for prompt in range(20, 24):
            capped.put(tokens_of(prompt, 6), PAGES)
        ns = fill(store)
        before = sum(capped.match(tokens_of(p, 6)).chunks for p in range(20, 24))
        if lowered:  # there is no room for the copies any more, not even with the reserve
            c = store._shared.c
            c.settings = replace(c.settings, quotas={"capped": kvfs.Quota(cap_bytes=4096)}, segment_bytes=256 << 10)
        done = store.recompress(idle=0)
        assert (done.segments, done.failed, done.stopped) == ((4, 1, "") if lowered else (6, 0, ""))
        assert sum(capped.match(tokens_of(p, 6)).chunks for p in range(20, 24)) == before > 0
        assert found(ns) == 48


def test_one_large_page_among_small_ones_does_not_decline_them_all_for_space(tmp_path: Path) -> None:
    layout = PageLayout.kv(layers=8, kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16)
    assert layout.page_bytes == 64 << 10
    pages = bytes(99 * layout.page_bytes) + seeded(1, layout.page_bytes)
    with kvfs.open(tmp_path / "store", capacity="64MiB", segment_bytes="1MiB", codec="zstd") as store:
        ns = store.namespace("model", layout, "1")
        assert ns.put(tokens_of(0, 100), pages).stored == 100
        store._shared.services().active.finish_all()
        assert store.pin("prompt", ns, tokens_of(0, 100)) == 1600
        assert restored(ns, tokens_of(0, 100)) == pages


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each batch of copies has moved."""
    sizes: list[int] = []
    relocate = Appender.relocate

    def spied(appender: Appender, job: Any) -> int:
        sizes.append(len(job.moves))
        return relocate(appender, job)

    monkeypatch.setattr(Appender, "relocate", spied)
    return sizes


def test_tiny_pages_do_not_hold_the_index_for_long(tmp_path: Path, moved: list[int]) -> None:
    pages = seeded(1, 600 * TINY_BYTES)
    with kvfs.open(tmp_path / "store", capacity="256MiB", segment_bytes="16MiB") as store:
        ns = store.namespace("tiny", tiny(), "1")
        assert ns.put(tokens_of(0, 600), pages).stored == 600
        store._shared.services().active.finish_all()
        assert store.pin("prompt", ns, tokens_of(0, 600)) == 9600
        assert sum(moved) == 600 and max(moved) <= 256
        assert restored(ns, tokens_of(0, 600)) == pages


def test_copies_are_made_in_batches_of_a_quarter_of_a_segment(tmp_path: Path, moved: list[int]) -> None:
    """A batch needs room for all of its records in one segment."""
    layout = PageLayout.kv(layers=2, kv_heads=2, head_dim=16, dtype="bfloat16", page_tokens=16)
    assert layout.page_bytes == 4096
    with kvfs.open(tmp_path / "store", capacity="16MiB", segment_bytes="256KiB") as store:
        ns = store.namespace("model", layout, "1")
        assert ns.put(tokens_of(0, 40), seeded(1, 40 * 4096)).stored == 40
        store._shared.services().active.finish_all()
        assert store.pin("prompt", ns, tokens_of(0, 40)) == 640
    assert moved == [16, 16, 8]
