"""An append as a message to another process of the same store. The pages are in memory that both processes map.

Both ends are kvfs, of one installation, connected by a socket that nothing else has: the format is free to change.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kvfs.lookup.search import Prompt
from kvfs.pages.layout import PageLayout, Part
from kvfs.write.active_segments import RoomWait, SegmentClass
from kvfs.write.appender import AppendJob, Outcome

HASH_BYTES = 32
_HEAD = struct.Struct("<I")  # bytes of the JSON that follows; behind it come the hashes, then the leaf tables


def pack_request(job: AppendJob, chunks: Sequence[int], places: Mapping[int, int], wait: RoomWait) -> bytes:
    """``chunks``: to be stored, ascending, not empty. ``places``: where each of them begins in the shared memory."""
    prompt, group_class = job.prompt, job.segment_class
    first = chunks[0] // prompt.run_length * prompt.run_length  # rows of the index name whole runs
    last, count = prompt.run(chunks[-1] // prompt.run_length)
    hashes = b"".join(islice(prompt.hashes, first, last + count))
    tables = b"" if job.table is None else b"".join(map(job.table, chunks))
    body = json.dumps({
        "group": job.group_number, "part": job.packed_part.hex(), "run_length": prompt.run_length, "first": first,
        "hashes": len(hashes), "chunks": list(chunks), "places": [places[chunk] for chunk in chunks],
        "expires": job.expires, "at_us": job.at_us, "attempt": job.attempt.hex(), "codec": job.codec,
        "class": [group_class.class_id.hex(), group_class.flags, group_class.evictor, group_class.lane],
        "wait": wait.seconds,
    }).encode()  # fmt: skip
    return b"".join((_HEAD.pack(len(body)), body, hashes, tables))


class AppendRequest(NamedTuple):
    """What ``pack_request`` packed; the pages that were written are added to ``written``."""

    job: AppendJob
    chunks: list[int]
    wait: RoomWait
    written: list[int]


def unpack_request(
    data: bytes, digest: bytes, descriptor: bytes, layout: PageLayout, memory: memoryview
) -> AppendRequest:
    """``memory``: where the pages are."""
    (size,) = _HEAD.unpack_from(data)
    body = json.loads(data[_HEAD.size : _HEAD.size + size])
    at, first, chunks = _HEAD.size + size, body["first"], body["chunks"]
    hashes = [data[i : i + HASH_BYTES] for i in range(at, at + body["hashes"], HASH_BYTES)]
    at += body["hashes"]
    places, written = dict(zip(chunks, body["places"], strict=True)), list[int]()
    table_bytes = (len(data) - at) // len(chunks)
    tables = {chunk: data[at + i * table_bytes : at + (i + 1) * table_bytes] for i, chunk in enumerate(chunks)}

    def payload(chunk: int) -> memoryview:
        written.append(chunk)
        return memory[places[chunk] : places[chunk] + job.shape.page_bytes]

    class_id, flags, evictor, lane = body["class"]
    job = AppendJob(
        digest, descriptor, body["group"], layout.groups[body["group"]], Part.unpack(bytes.fromhex(body["part"])),
        Prompt(digest, [bytes(HASH_BYTES)] * first + hashes, body["run_length"]), payload, body["expires"],
        body["at_us"], bytes.fromhex(body["attempt"]), SegmentClass(bytes.fromhex(class_id), flags, evictor, lane),
        tables.__getitem__ if table_bytes else None, body["codec"],
    )  # fmt: skip
    return AppendRequest(job, chunks, RoomWait(body["wait"]), written)


class AppendReply(NamedTuple):
    """``counts``: what the process has counted since its last reply; those of NAMESPACE_COUNTS of this namespace."""

    outcome: Outcome
    written: list[int]
    waited: float  # seconds that are left of the request's wait for room
    counts: dict[str, int]

    def pack(self) -> bytes:
        return json.dumps([vars(self.outcome), self.written, self.waited, self.counts]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> AppendReply:
        outcome, written, waited, counts = json.loads(data)
        return cls(Outcome(**outcome), written, waited, counts)
