"""Which pages of a batch are stored encoded, and what is counted of them."""

from __future__ import annotations

import random

import pytest

from kvfs.context import Counters
from kvfs.format import codec as codecs
from kvfs.format import segment as fmt
from kvfs.format.checksums import leaf_table
from kvfs.segments.writer import Record
from kvfs.write import encode
from kvfs.write.encode import encode_records

PAGE = 4 * fmt.BLOCK
LEAF = fmt.BLOCK


def record(chunk: int, payload: bytes, table: bytes = b"") -> Record:
    leaves = len(payload) // LEAF
    return Record(payload, LEAF, leaves, len(payload), 0, chunk, bytes(8), bytes(32), bytes(32), 0, table=table)


def even(chunk: int, nbytes: int = PAGE) -> Record:
    """A page that shrinks."""
    return record(chunk, bytes([chunk]) * nbytes)


def noise(chunk: int) -> Record:
    """A page that does not."""
    return record(chunk, random.Random(chunk).randbytes(PAGE))


def encoded(records: list[Record]) -> tuple[list[Record], dict[str, int]]:
    counters = Counters()
    made = encode_records(records, fmt.CODEC_ZSTD, 0, counters)
    return made, {
        name: counters.snapshot().get(name, 0) for name in ("pages_encoded", "pages_incompressible", "bytes_saved")
    }


@pytest.mark.parametrize("threads", [False, True])
def test_pages_that_shrink_are_encoded_in_their_order(threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if threads:
        monkeypatch.setattr(encode, "OVERLAP_BYTES", 2 * PAGE)
    records = [even(1), noise(2), even(3)]
    made, counts = encoded(records)
    assert [r.chunk for r in made] == [1, 2, 3]
    assert [r.codec for r in made] == [fmt.CODEC_ZSTD, fmt.CODEC_RAW, fmt.CODEC_ZSTD]
    for before, after in zip(records, made, strict=True):
        assert bytes(codecs.decoded(after.payload, after.codec, PAGE)) == before.payload
    saved = sum(PAGE - len(made[i].payload) for i in (0, 2))
    assert counts == {"pages_encoded": 2, "pages_incompressible": 1, "bytes_saved": saved}


def test_an_encoded_page_has_the_checksums_of_its_raw_bytes() -> None:
    known = bytes(range(32))
    made, _ = encoded([even(1), record(2, bytes(PAGE), table=known)])
    assert made[0].table == leaf_table(bytes([1]) * PAGE, LEAF)
    assert made[1].table == known, "not computed again"


def test_a_batch_whose_first_page_does_not_shrink_is_stored_raw() -> None:
    records = [noise(1), even(2)]
    made, counts = encoded(records)
    assert made == records
    assert counts == {"pages_encoded": 0, "pages_incompressible": 2, "bytes_saved": 0}


def test_pages_of_one_block_and_raw_batches_are_not_tried() -> None:
    small = [even(1, fmt.BLOCK)]
    assert encoded(small) == (small, {"pages_encoded": 0, "pages_incompressible": 0, "bytes_saved": 0})
    counters = Counters()
    assert encode_records([even(1)], fmt.CODEC_RAW, 0, counters) == [even(1)]
    assert encode_records([], fmt.CODEC_ZSTD, 0, counters) == [] and not counters.snapshot()


@pytest.mark.parametrize(("dense", "shrink"), [(0, 4), (2, 3), (5, 1)])
def test_pages_of_both_kinds_are_counted(dense: int, shrink: int) -> None:
    _, counts = encoded([*(even(n) for n in range(shrink)), *(noise(shrink + n) for n in range(dense))])
    assert (counts["pages_encoded"], counts["pages_incompressible"]) == (shrink, dense)
