"""Appends as messages: what is packed is what is unpacked."""

from __future__ import annotations

import random

import pytest

from kvfs.lookup.search import Prompt
from kvfs.pages.layout import PageLayout
from kvfs.write.active_segments import RoomWait, SegmentClass
from kvfs.write.append_request import AppendReply, pack_request, unpack_request
from kvfs.write.appender import AppendJob, Outcome

LAYOUT = PageLayout.kv(layers=4, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=32)
GROUP = LAYOUT.groups[0]


@pytest.mark.parametrize("run_length", [1, 32])
@pytest.mark.parametrize("tables", [False, True])
def test_a_request_survives_its_message(run_length: int, tables: bool) -> None:
    draw = random.Random(run_length + tables)
    hashes = [draw.randbytes(32) for _ in range(100)]
    chunks = [37, 38, 41, 64, 99]
    made = {chunk: draw.randbytes(16) for chunk in chunks}
    job = AppendJob(
        draw.randbytes(32), b"{}", 0, GROUP, GROUP.full, Prompt(draw.randbytes(32), hashes, run_length),
        lambda chunk: b"", 7, 11, b"attempt!", SegmentClass(b"c" * 24, 2, True, 3),
        made.__getitem__ if tables else None, 1,
    )  # fmt: skip
    size = job.shape.page_bytes
    memory = memoryview(draw.randbytes(size * 200))
    places = {chunk: size * (199 - chunk) for chunk in chunks}
    data = pack_request(job, chunks, places, RoomWait(2.5))
    back = unpack_request(data, job.digest, b"{}", LAYOUT, memory)
    assert (back.chunks, back.wait.seconds, back.written) == (chunks, 2.5, [])
    for name in ("digest", "group_number", "group", "part", "expires", "at_us", "attempt", "segment_class", "codec"):
        assert getattr(back.job, name) == getattr(job, name), name
    for number in {chunk // run_length for chunk in chunks}:
        first, count = back.job.prompt.run(number)
        assert (first, count) == job.prompt.run(number)
        if chunks[0] // run_length <= number:
            assert back.job.prompt.hashes[first : first + count] == hashes[first : first + count]
    for chunk in chunks:
        assert bytes(back.job.payload(chunk)) == bytes(memory[places[chunk] : places[chunk] + size])
    assert back.written == chunks
    assert (back.job.table is not None) is tables
    if back.job.table is not None:
        assert {chunk: back.job.table(chunk) for chunk in chunks} == made


def test_a_reply_survives_its_message() -> None:
    reply = AppendReply(Outcome(3, 1, 0, 2, "space"), [1, 2, 5], 0.25, {"pages_stored": 3})
    assert AppendReply.unpack(reply.pack()) == reply
