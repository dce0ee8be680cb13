"""Encoding the pages of a batch before an append: the first one as a sample, then the rest in several threads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvfs.context import Counters
from kvfs.format import codec as codecs
from kvfs.format import segment as fmt
from kvfs.format.checksums import leaf_table
from kvfs.segments.writer import OVERLAP_BYTES, WRITERS, Record

GAIN_MIN = 0.9  # a batch whose first page does not shrink below this share is stored raw


def encode_records(records: Sequence[Record], codec: int, element_bytes: int, counters: Counters) -> list[Record]:
    """Raw records of one shape, encoded in ``codec`` where that saves at least a block.

    An encoded record has its leaf table, which is computed from the raw bytes.
    """
    if codec == fmt.CODEC_RAW or not records or records[0].raw_bytes <= fmt.BLOCK:  # a codec cannot save a block
        return list(records)
    encode = partial(_encode, codec=codec, element_bytes=element_bytes)
    first = encode(records[0])
    if len(first.payload) > GAIN_MIN * records[0].raw_bytes:
        counters.add("pages_incompressible", len(records))
        return list(records)
    rest = records[1:]
    if sum(r.raw_bytes for r in rest) < OVERLAP_BYTES:
        made = [first, *(encode(r) for r in rest)]
    else:
        made = [first, *WRITERS.run([partial(encode, r) for r in rest])]
    encoded = [r for r in made if r.codec != fmt.CODEC_RAW]
    counters.add("pages_incompressible", len(made) - len(encoded))
    counters.add("pages_encoded", len(encoded))
    counters.add("bytes_saved", sum(r.raw_bytes - len(r.payload) for r in encoded))
    return made


def _encode(record: Record, codec: int, element_bytes: int) -> Record:
    used, payload = codecs.encode(record.payload, codec, element_bytes)
    if used == fmt.CODEC_RAW:
        return record
    table = record.table or leaf_table(record.payload, record.leaf_bytes)
    return record._replace(payload=payload, codec=used, table=table)
