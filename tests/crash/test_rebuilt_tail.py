"""An append after a rebuild begins behind all that the segment holds, leaf tables included, which may cross blocks."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.format.segment import BLOCK, KIND_NAMESPACE, slots_of_table
from kvfs.index import ledger
from kvfs.index.ledger import release_ownership
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, SegmentRow
from kvfs.maintenance import rebuild
from kvfs.pages.layout import Part
from kvfs.segments.writer import SegmentWriter
from kvfs.write.appender import Appender
from tests.stores import TINY_BYTES, counters, restored, run_child, scanned, seeded, segment_files, tiny, tokens_of
from tools.torture.faults import lose_index

LAYERS, PAGES, TOKENS = 80, 2, 64
LAYOUT = kvfs.PageLayout.kv(layers=LAYERS, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=TOKENS)
BYTES = PAGES * LAYOUT.page_bytes
#: Stores of children that exit without closing them.
KEPT: list[kvfs.Store] = []
CHECKED = Part(0, 1, 0, LAYERS)  # half a page: a read of it checks its leaves one by one


def content(seed: int, codec: str) -> bytes:
    return seeded(seed, BYTES) if codec == "raw" else (seeded(seed, 64) * (BYTES // 64 + 1))[:BYTES]


def fill(path: Path, codec: str, names: tuple[str, ...]) -> Path:
    """The store of a killed process; the last leaf table of its segment crosses a block."""

    def killed() -> None:
        store = kvfs.open(path, capacity="256MiB", segment_bytes="16MiB", codec=codec)
        KEPT.append(store)
        for seed, name in enumerate(names, 1):
            assert store.namespace(name, LAYOUT, "r1").put(tokens_of(seed, PAGES, TOKENS), content(seed, codec)).stored

    run_child(killed)
    [segment] = segment_files(path)
    assert list(scanned(segment).parts())[-1].leaves // BLOCK * BLOCK + BLOCK == scanned(segment).end
    return segment


def checks(store: kvfs.Store, codec: str, names: tuple[str, ...]) -> bool:
    """Whether all pages are restored, and their halves, of which each leaf is checked."""
    for seed, name in enumerate(names, 1):
        ns = store.namespace(name, LAYOUT, "r1")
        for part, nbytes in ((None, BYTES), (CHECKED, BYTES // 2)):
            with ns.match(tokens_of(seed, PAGES, TOKENS), part=part) as match:
                out = bytearray(nbytes)
                if ns.get(match, out) != PAGES or (part is None and out != content(seed, codec)):
                    return False
    return store.verify().ok


@pytest.mark.parametrize("names", [("m",), ("m", "other")])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_an_append_after_a_rebuild_spares_the_leaf_tables(tmp_path: Path, codec: str, names: tuple[str, ...]) -> None:
    fill(tmp_path / "store", codec, names)
    with kvfs.open(tmp_path / "store") as store:
        assert store._shared.rebuilt is not None and store._shared.rebuilt.pages == PAGES * len(names)
        assert store.namespace(names[0], LAYOUT, "r1").put(tokens_of(9, PAGES, TOKENS), content(9, codec)).stored
        assert len(segment_files(tmp_path / "store")) == 1, "the segment was adopted"
        assert checks(store, codec, names)


def test_a_segment_with_an_unknown_layout_is_not_adopted(tmp_path: Path) -> None:
    """A layout of another version, or a lost descriptor: the size of its leaf tables is unknown."""
    segment = fill(tmp_path / "store", "raw", ("m", "other"))
    [_, entry] = [e for e in scanned(segment).entries if e.kind == KIND_NAMESPACE]
    with segment.open("r+b") as file:
        file.seek(entry.payload)
        file.write(b"?")
    before = segment.read_bytes()
    with kvfs.open(tmp_path / "store") as store:
        assert store.namespace("m", LAYOUT, "r1").put(tokens_of(9, PAGES, TOKENS), seeded(9, BYTES)).stored == PAGES
        with store.namespace("m", LAYOUT, "r1").match(tokens_of(1, PAGES, TOKENS), part=CHECKED) as match:
            assert store.namespace("m", LAYOUT, "r1").get(match, bytearray(BYTES // 2)) == PAGES
    assert segment.read_bytes() == before and len(segment_files(tmp_path / "store")) == 2


def test_a_segment_with_a_short_tail_is_not_adopted(tmp_path: Path) -> None:
    """Rebuilds of earlier versions may have left one."""
    fill(tmp_path / "store", "raw", ("m",))
    with kvfs.open(tmp_path / "store") as store:

        def shorten(session: Session) -> SegmentRow:
            [(number, row)] = session.segments_in(ACTIVE)
            session.set_segment(number, row, row._replace(tail=row.tail - BLOCK))
            return row

        store._shared.c.index.write(shorten, 2.0)
        assert store.namespace("m", LAYOUT, "r1").put(tokens_of(9, PAGES, TOKENS), seeded(9, BYTES)).stored == PAGES
        assert counters(store)["adopt_errors"] == 1
        assert len(segment_files(tmp_path / "store")) == 2 and checks(store, "raw", ("m",))


@pytest.mark.parametrize("before", [1, slots_of_table(True) - 4])  # the dead owner's entries reach a second table
def test_a_rebuild_names_no_entry_whose_payload_an_adopter_has_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """A writer died between its entries and the publish, and its adopter before its own entries."""
    pages = seeded(2, 5 * TINY_BYTES)
    with kvfs.open(tmp_path / "store", capacity="64MiB", segment_bytes="1MiB") as store:
        ns, core = store.namespace("m", tiny(), "r1"), store._shared
        assert ns.put(tokens_of(1, before), bytes(before * TINY_BYTES)).stored == before
        with monkeypatch.context() as patch:
            patch.setattr(Appender, "_publish", lambda *_: 0)
            ns.put(tokens_of(2, 5), pages)
        [(segment_class, (writer, generation))] = core.services().active._writers.items()
        assert writer.records > before + 5
        core.services().active._writers.pop(segment_class)
        writer.close()
        owner, number, size = core.c.owner, writer.number, writer.allocated
        core.c.index.write(lambda s: release_ownership(s, number, owner, generation, size), 2.0)
        with monkeypatch.context() as patch:
            patch.setattr(SegmentWriter, "_write_entries", fails)
            assert ns.put(tokens_of(3, 5), seeded(3, 5 * TINY_BYTES)).reason == "io"
        assert len(segment_files(tmp_path / "store")) == 1, "the segment was adopted"
    lose_index(tmp_path / "store")
    with kvfs.open(tmp_path / "store") as store:
        assert store.wait_ready(10.0)
        ns = store.namespace("m", tiny(), "r1")
        assert ns.put(tokens_of(2, 5), pages).stored == 5
        assert restored(ns, tokens_of(2, 5)) == pages
        assert restored(ns, tokens_of(1, before)) == bytes(before * TINY_BYTES)


def fails(*_: object) -> None:
    raise OSError(errno.EIO, "no entries")


def test_a_segment_is_adopted_however_many_others_are_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvfs.open(tmp_path / "store", capacity="64MiB") as store:
        ns, core = store.namespace("m", tiny(), "r1"), store._shared
        live = [bytes([i]) * len(core.c.owner) for i in range(1, 20)]
        monkeypatch.setattr(core.c.liveness, "is_alive", lambda owner: owner in live)
        limits = ledger.budget(core.c.settings)
        for owner in live:
            core.c.index.write(lambda s, o=owner: ledger.new_segment(s, o[:1] * 16, o, bytes(16), 0, 4096, limits), 2.0)
        for seed in range(3):
            assert ns.put(tokens_of(seed, 5), seeded(seed, 5 * TINY_BYTES)).stored == 5
            assert core.services().active.close()
        assert len(segment_files(tmp_path / "store")) == 1
        assert [restored(ns, tokens_of(seed, 5)) == seeded(seed, 5 * TINY_BYTES) for seed in range(3)] == [True] * 3


def test_a_rebuild_charges_a_segment_that_was_renamed_after_it_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evictor had dropped it in the last generation, and a reader holds it."""
    fill(tmp_path / "store", "raw", ("m",))
    [file] = segment_files(tmp_path / "store")
    held = file.open("rb")
    fcntl.flock(held, fcntl.LOCK_SH)
    listed = rebuild._list_all

    def list_all(*args: Any) -> Iterator[Any]:
        yield from listed(*args)
        if file.exists():
            file.rename(tmp_path / "store" / "doomed" / file.name)

    monkeypatch.setattr(rebuild, "_list_all", list_all)
    with kvfs.open(tmp_path / "store") as store:
        assert store.wait_ready(10.0)
        segments = store.stats()["segments"]
        assert (segments["sealed"], segments["dropped"]) == (0, 1)
        held.close()
        store.gc()
        assert store.stats()["segments"]["dropped"] == 0 and not list((tmp_path / "store" / "doomed").iterdir())
