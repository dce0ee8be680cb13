"""Pages put together from parts and decoded: the right cells, only what verifies, and what counts as wrong."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.context import Counters
from kvfs.format import codec as codecs
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES, leaf_table, root_of
from kvfs.format.codec import CodecError, CodecMemoryError
from kvfs.index.rows import Place
from kvfs.lookup.prefix_match import GroupMatch, Source
from kvfs.pages.layout import Cell, Group, Need, Part
from kvfs.read.assemble import assemble, decode_page
from tests.stores import seeded

LAYERS, HEADS, GRANULES = 4, 4, 2
GROUP = Group("full", tuple(range(LAYERS)), HEADS, Cell("u32", 256), Need.all(), 16 * GRANULES)
RUN = 16 * 256  # bytes of a head of a layer of a granule
#: each row differs, and all of them shrink when they are encoded
PAGE = b"".join(seeded(row, 64) * (RUN // 64) for row in range(GROUP.page_bytes // RUN))
SEGMENT = 7
FULL = Part(0, HEADS, 0, LAYERS)


def cut(part: Part) -> bytes:
    """The part of the page, from the definition of the order: granule, layer, head, token, cell."""
    rows = (
        (granule * LAYERS + layer) * HEADS + head
        for granule in range(GRANULES)
        for layer in range(part.layer, part.layer + part.layers)
        for head in range(part.head, part.head + part.heads)
    )
    return b"".join(PAGE[row * RUN : (row + 1) * RUN] for row in rows)


class Disk:
    """A segment in memory, with the calls that a reader makes; reads of a range may fail."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.reads: list[tuple[int, int]] = []
        self.error: OSError | None = None

    def store(self, part: Part, codec: int = fmt.CODEC_RAW) -> Source:
        raw, leaf_bytes = cut(part), GROUP.leaf_bytes(part)
        table = leaf_table(raw, leaf_bytes)
        if codec != fmt.CODEC_RAW:
            raw = codecs.encode(raw, fmt.CODEC_ZSTD, 4)[1] if codec == fmt.CODEC_ZSTD else raw
        block = len(self.data) // fmt.BLOCK
        self.data += bytes(raw).ljust(fmt.align(len(raw)), b"\0")
        leaf = len(self.data) // LEAF_BYTES
        self.data += table.ljust(fmt.align(len(table)), b"\0")
        return Source(part, Place(b"h" * 32, root_of(table), codec, 0, SEGMENT, block, len(raw), leaf, 0, 0))

    def at(self, nbytes: int, offset: int) -> bytes:
        if self.error is not None:
            raise self.error
        return bytes(self.data[offset : offset + nbytes])

    def context(self) -> Any:
        def read(held: object, target: memoryview, offset: int) -> None:
            self.reads.append((offset, len(target)))
            target[:] = self.at(len(target), offset)

        segments = SimpleNamespace(read=read, read_bytes=lambda held, nbytes, offset: self.at(nbytes, offset))
        files = SimpleNamespace(read=lambda fd, nbytes, offset: self.at(nbytes, offset))
        return SimpleNamespace(segments=segments, files=files, counters=Counters())


@pytest.fixture
def disk() -> Disk:
    return Disk()


HELD: Any = {SEGMENT: SimpleNamespace(fd=3)}


def put_together(disk: Disk, want: Part, sources: Sequence[Source], held: Any = HELD) -> tuple[Any, bytes, Any]:
    """(what assemble returns, the target, counts)."""
    target, context = bytearray(b"\xee" * GROUP.part_bytes(want)), disk.context()
    gm = GroupMatch(0, "full", want, None, GROUP.part_bytes(want), 0, 1, (), 32)
    result = assemble(context, sources, gm, GROUP, memoryview(target), held)
    counts = {name: n for name, n in context.counters.snapshot().items() if n}
    return result, bytes(target), counts


def ranks(heads: int, layers: int) -> list[Part]:
    """The page in parts of so many heads and layers."""
    return [Part(head, heads, layer, layers) for head in range(0, HEADS, heads) for layer in range(0, LAYERS, layers)]


@pytest.mark.parametrize(
    "want", [FULL, Part(0, 2, 0, 4), Part(2, 2, 0, 2), Part(1, 2, 1, 2), Part(3, 1, 3, 1), Part(0, 4, 1, 3)]
)
@pytest.mark.parametrize(("heads", "layers"), [(1, 1), (2, 4), (4, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("codec", [fmt.CODEC_RAW, fmt.CODEC_ZSTD])
def test_a_page_is_put_together_from_parts_of_any_shape(
    disk: Disk, want: Part, heads: int, layers: int, codec: int
) -> None:
    sources = [disk.store(part, codec) for part in ranks(heads, layers)]
    random.Random(heads).shuffle(sources)
    result, target, counts = put_together(disk, want, sources)
    assert result == (True, []) and target == cut(want)
    used = sum(one.part.intersect(want) is not None for one in sources)
    assert counts == ({} if codec == fmt.CODEC_RAW else {"pages_decoded": used})


def test_parts_that_overlap_are_read_until_nothing_is_missing(disk: Disk) -> None:
    parts = [Part(0, 2, 0, 4), Part(1, 3, 0, 4), Part(0, 4, 0, 4)]
    result, target, _ = put_together(disk, FULL, [disk.store(part) for part in parts])
    assert result == (True, []) and target == PAGE
    leaf = [GROUP.leaf_bytes(part) * LAYERS for part in parts]
    assert [nbytes for _, nbytes in disk.reads] == [leaf[0]] * GRANULES + [leaf[1]] * GRANULES, "the third is not read"


def test_only_the_layers_that_are_wanted_are_read(disk: Disk) -> None:
    disk.data += bytes(fmt.BLOCK)
    source = disk.store(FULL)
    result, target, _ = put_together(disk, Part(1, 2, 2, 2), [source])
    assert result == (True, []) and target == cut(Part(1, 2, 2, 2))
    leaf = GROUP.leaf_bytes(FULL)
    assert disk.reads == [(fmt.BLOCK + (g * LAYERS + 2) * leaf, 2 * leaf) for g in range(GRANULES)]


def test_what_is_missing_makes_the_page_incomplete_and_nothing_wrong(disk: Disk) -> None:
    half = disk.store(Part(0, 2, 0, 4))
    result, target, _ = put_together(disk, FULL, [half])
    assert result == (False, []) and target != PAGE
    for skipped, held in (
        (disk.store(Part(0, 2, 0, 4)), HELD),  # has nothing that is wanted
        (disk.store(Part(2, 2, 0, 4)), {}),  # its segment was dropped
        (disk.store(Part(2, 2, 0, 4), codec=200), HELD),  # of a later version
    ):
        result, target, counts = put_together(disk, Part(2, 2, 0, 4), [skipped], held)
        assert result == (False, []) and set(target) == {0xEE} and counts == {}
    assert put_together(disk, FULL, [])[0] == (False, [])


@pytest.mark.parametrize("codec", [fmt.CODEC_RAW, fmt.CODEC_ZSTD])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("error", "wrong", "counted"), [(errno.EIO, True, "read_errors"), (errno.ENOMEM, False, "read_errors")]
)
def test_a_part_that_cannot_be_read_is_wrong_unless_memory_is_short(
    disk: Disk, codec: int, own: bool, error: int, wrong: bool, counted: str
) -> None:
    source = disk.store(FULL, codec)
    disk.error = OSError(error, "broken")
    want = FULL if own else Part(0, 1, 0, 4)
    result, target, counts = put_together(disk, want, [source])
    assert result == (False, [source] if wrong else []) and counts == {counted: 1} and set(target) == {0xEE}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("codec", [fmt.CODEC_RAW, fmt.CODEC_ZSTD])
def test_a_part_that_does_not_verify_is_wrong(disk: Disk, codec: int, own: bool) -> None:
    source = disk.store(FULL, codec)
    for change in ("payload", "root"):
        if change == "payload":
            bad, disk.data[20] = source, disk.data[20] ^ 1
        else:
            disk.data[20] ^= 1
            bad = source._replace(place=source.place._replace(root=bytes(16)))
        result, _, counts = put_together(disk, FULL if own else Part(0, 1, 0, 4), [bad])
        assert result == (False, [bad]) and counts == {"pages_corrupt": 1}


def test_a_good_part_makes_up_for_a_wrong_one(disk: Disk) -> None:
    bad, good = disk.store(FULL), disk.store(FULL)
    disk.data[GROUP.leaf_bytes(FULL) + 3] ^= 1  # its second leaf: the first one has been copied by then
    result, target, counts = put_together(disk, FULL, [bad, good])
    assert result == (True, [bad]) and target == PAGE and counts == {"pages_corrupt": 1}


def test_leaves_that_are_not_wanted_are_not_verified(disk: Disk) -> None:
    source = disk.store(FULL)
    disk.data[GROUP.leaf_bytes(FULL) * 3] ^= 1  # layer 3 of granule 0
    assert put_together(disk, Part(0, 4, 0, 3), [source])[0] == (True, [])
    assert put_together(disk, Part(0, 4, 0, 4), [source])[0] == (False, [source])


# -- encoded pages -----------------------------------------------------------------------------


def decoded(disk: Disk, source: Source, nbytes: int = GROUP.page_bytes) -> tuple[bool | None, bytes, dict[str, int]]:
    target, context = bytearray(nbytes), disk.context()
    held: Any = SimpleNamespace(fd=3)
    fine = decode_page(context, held, source.place, GROUP.leaf_bytes(FULL), memoryview(target))
    return fine, bytes(target), {name: n for name, n in context.counters.snapshot().items() if n}


def test_a_page_is_decoded_and_verified(disk: Disk) -> None:
    disk.data += bytes(3 * fmt.BLOCK)
    source = disk.store(FULL, fmt.CODEC_ZSTD)
    assert decoded(disk, source) == (True, PAGE, {"pages_decoded": 1})
    other = source._replace(place=source.place._replace(root=b"x" * 16))
    assert decoded(disk, other)[::2] == (False, {"pages_corrupt": 1})


def test_a_record_that_claims_too_many_bytes_is_not_read(disk: Disk) -> None:
    source = disk.store(FULL, fmt.CODEC_ZSTD)
    large = source._replace(place=source.place._replace(stored_bytes=1 << 31))
    disk.error = OSError(errno.EIO, "it was read")
    assert decoded(disk, large) == (False, bytes(GROUP.page_bytes), {"pages_corrupt": 1})


@pytest.mark.parametrize(
    ("error", "fine", "counted"),
    [
        (CodecError("x"), False, "pages_corrupt"), (CodecMemoryError(), None, "read_errors"),
        (MemoryError(), None, "read_errors"),
    ],
)  # fmt: skip
def test_a_decoder_that_lacks_memory_says_nothing_of_the_page(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, error: Exception, fine: bool | None, counted: str
) -> None:
    source = disk.store(FULL, fmt.CODEC_ZSTD)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(codecs, "decode", fail)
    assert decoded(disk, source)[::2] == (fine, {counted: 1})
