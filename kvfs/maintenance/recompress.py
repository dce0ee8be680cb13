"""Recompression: rewrites cold sealed segments in a codec, so that more fits before segments must be evicted.

A segment qualifies if it is sealed, no page of it was used for a while, no pin protects it, no reader holds it, and a
sample page shows that enough would be saved. The records that the index names are relocated as eviction relocates hot
pages: verified, appended to another segment, moved in the index in one commit per batch. The source is dropped only
when all of them have moved. A crash in between leaves each page named once, in either segment, and a source that the
next run finds again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvfs.context import Context
from kvfs.errors import IndexUnavailableError, StoreLockedError
from kvfs.eviction.evictor import Evictor
from kvfs.format import codec as codecs
from kvfs.format import segment as fmt
from kvfs.format.segment import Entry
from kvfs.index import ledger
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.rows import CLAIM
from kvfs.index.session import Session
from kvfs.index.tables import SEALED, SegmentRow
from kvfs.pages.chunk_hash import page_key
from kvfs.pages.identity import Described
from kvfs.pages.layout import Part
from kvfs.segments.open_segments import OpenSegment
from kvfs.segments.scan import Scan, read_namespace, scan_segment
from kvfs.system.files import Files
from kvfs.write.active_segments import ActiveSegments, Declined, SegmentClass
from kvfs.write.encode import GAIN_MIN

IDLE_SECONDS = 3600.0  # a segment is cold if no page of it was used for so long, unless the caller says otherwise
LOCK_SECONDS = 30.0  # longest wait for the evictors' lock, per segment
FAILURES_MAX = 3  # segments in a row that fail before a run ends
KEYS_PER_HOLD = 256  # index rows per transaction, so that writers wait little


class RecompressStep(NamedTuple):
    """One segment that would be rewritten."""

    segment: int
    segment_id: bytes
    pages: int  # that are raw now
    raw_bytes: int  # of these pages
    saves_bytes: int  # estimated from a sample page
    last_used_us: int


@dataclass(frozen=True)
class RecompressPlan:
    """What a run would do, longest unused segment first, and why the other sealed segments stay as they are."""

    codec: int
    idle_seconds: float
    steps: tuple[RecompressStep, ...] = ()
    left: dict[str, int] = field(default_factory=dict)  # reason -> segments

    @property
    def saves_bytes(self) -> int:
        return sum(step.saves_bytes for step in self.steps)


@dataclass
class Recompressed:
    """What a run did. ``stopped``: why it ended early; empty if it did not."""

    segments: int = 0
    pages: int = 0
    failed: int = 0  # segments that stay as they are: a page could not be read or written
    bytes_before: int = 0  # used by the store
    bytes_after: int = 0
    stopped: str = ""


class Recompressor:
    """Chooses segments for one plan or one run; ``Relocator`` copies their records, the evictor drops them."""

    def __init__(self, context: Context, evictor: Evictor, active: ActiveSegments) -> None:
        self._c = context
        self._evictor = evictor
        self._active = active

    # -- the plan ----------------------------------------------------------------------------

    def plan(self, codec: int, idle_seconds: float = IDLE_SECONDS, seconds: float | None = None) -> RecompressPlan:
        """What a run would do now. Reads the tables of sealed segments and a page of each; changes nothing.

        Segments that were not examined within ``seconds`` are left out.
        """
        deadline = None if seconds is None else self._c.files.monotonic() + seconds
        rows = self._c.index.read(lambda s: s.segments(), COMMIT_SECONDS)
        pinned, steps, left = self._evictor.victims.pinned(), list[RecompressStep](), dict[str, int]()
        for number, row in rows:
            if row.state != SEALED:
                continue
            if row.segment_id in pinned:
                found: RecompressStep | str = "pinned"
            elif deadline is not None and self._c.files.monotonic() >= deadline:
                found = "not looked at"
            else:
                found = self._examine(number, row, codec, idle_seconds)
            if isinstance(found, str):
                left[found] = left.get(found, 0) + 1
            else:
                steps.append(found)
        steps.sort(key=lambda step: step.last_used_us)
        return RecompressPlan(codec, idle_seconds, tuple(steps), left)

    def _examine(self, number: int, row: SegmentRow, codec: int, idle_seconds: float) -> RecompressStep | str:
        """The step for a segment, or why it stays as it is."""
        if self._evictor.victims.is_held(row):
            return "in use"
        mark = self._c.marks.read(row.segment_id)
        if mark is not None and mark.pending:
            return "being purged"
        held = self._c.segments.acquire(number, row.segment_id, self._c.index.generation)
        if held is None:
            return "gone"
        try:
            scan = scan_segment(held.fd, self._c.files)
            if scan is None or len(scan.entries) < row.records:
                return "unreadable"
            parts = list(scan.parts())
            stamps = self._c.access_times.stamps(row.segment_id, [e.written_us for e in scan.entries])
            last_used_us = max((stamps[e.seq] for e in parts), default=0)
            if last_used_us > self._c.files.now_us() - int(idle_seconds * 1e6):
                return "used lately"
            if any(e.codec not in codecs.NAMES for e in parts):
                return "of a codec that this version does not know"
            raw = [e for e in parts if e.codec == fmt.CODEC_RAW]
            if not raw:
                return "encoded"
            if _namespaces(held, scan, self._c.files) is None:
                return "unreadable"
            share = self._sample(held, scan, raw[len(raw) // 2], codec)
        except OSError:
            self._c.counters.add("read_errors")
            return "unreadable"
        raw_bytes = sum(e.stored_bytes for e in raw)
        saves_bytes = int(raw_bytes * (1 - share))
        if saves_bytes < (1 - GAIN_MIN) * row.allocated:
            return "would not shrink"
        return RecompressStep(number, row.segment_id, len(raw), raw_bytes, saves_bytes, last_used_us)

    def _sample(self, held: OpenSegment, scan: Scan, entry: Entry, codec: int) -> float:
        """Size of a page's encoded form relative to its stored bytes; 1.0 if it cannot be determined."""
        described = read_namespace(held.fd, self._c.files, scan.entries, entry.ns_seq)
        if described is None or entry.group >= len(described.layout.groups):
            return 1.0
        group = described.layout.groups[entry.group]
        try:
            if not codecs.fits(entry.codec, entry.stored_bytes, group.part_bytes(Part.unpack(entry.part))):
                return 1.0
            payload = self._c.segments.read_bytes(held, entry.stored_bytes, entry.payload)
        except ValueError:  # a part that the layout does not have
            return 1.0
        return len(codecs.encode(payload, codec, group.cell.element_bytes)[1]) / entry.stored_bytes

    # -- the run -----------------------------------------------------------------------------

    def run(
        self, codec: int, idle_seconds: float = IDLE_SECONDS, seconds: float | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Recompressed:  # fmt: skip
        """Examine each sealed segment, the oldest first, and rewrite those that qualify, for ``seconds`` at most.

        Ends early where there is no room for the copies, or the disk fails repeatedly; what was done by then stays.
        Segments of a quota stay as they are if a lowered cap put it above its cap by more than the standing reserve.
        StoreLockedError if other evictions or purges hold the lock all the time.
        """
        clock = self._c.files.monotonic
        end = None if seconds is None else clock() + seconds
        report = Recompressed(bytes_before=self._used())
        used: set[SegmentClass] = set()
        full: set[bytes] = set()  # quotas whose cap leaves no room for copies
        failures = 0
        try:
            rows = self._c.index.read(lambda s: s.segments(), COMMIT_SECONDS)
            sealed = sorted((n, row) for n, row in rows if row.state == SEALED)
            pinned = self._evictor.victims.pinned()
            for done, (number, row) in enumerate(sealed):
                progress(done, len(sealed))
                if end is not None and clock() >= end:
                    report.stopped = "time"
                    break
                owner = row.class_id[: ledger.QUOTA_BYTES]
                if owner in full:
                    continue
                step = "pinned" if row.segment_id in pinned else self._examine(number, row, codec, idle_seconds)
                if isinstance(step, str):
                    continue
                try:
                    self._rewrite(step, codec, report, used)
                    failures = 0
                except (Declined, OSError) as exc:
                    if isinstance(exc, Declined) and exc.reason == "space":
                        if owner == ledger.NO_QUOTA:
                            raise
                        full.add(owner)
                        report.failed += 1
                        continue
                    failures += 1
                    report.failed += 1
                    if failures == FAILURES_MAX:
                        raise
        except Declined as exc:
            report.stopped = exc.reason
        except (OSError, IndexUnavailableError):
            report.stopped = "io"
        for target in used:
            self._active.finish(target)
        report.bytes_after = self._used()
        self._c.counters.add("segments_recompressed", report.segments)
        return report

    def _rewrite(self, step: RecompressStep, codec: int, report: Recompressed, used: set[SegmentClass]) -> None:
        """Relocate what the index names of a segment, then drop it. The lock is held per segment: writers that need
        room wait for it."""
        with self._evictor.lock.hold(self._c.files.monotonic() + LOCK_SECONDS) as lock:
            if not lock and not report.segments:
                raise StoreLockedError("another process evicts, purges or recompresses this store: try again")
            if not lock:
                raise Declined("the lock")
            row = self._c.index.read(lambda s: s.segment(step.segment), COMMIT_SECONDS)
            if row is None or row.state != SEALED or row.segment_id != step.segment_id:
                return
            if step.segment_id in self._evictor.victims.pinned():  # pinned meanwhile
                return
            target = _class_of(row)
            used.add(target)
            report.pages += self._copy(step, row.records, target, codec)
            report.segments += 1
            self._evictor.reclaimer.drop(step.segment, step.segment_id)
            self._evictor.victims.forget(step.segment_id)

    def _copy(self, step: RecompressStep, records: int, target: SegmentClass, codec: int) -> int:
        """Relocate all records of a segment that the index names; the source is released on return.

        They are found in the segment's own tables: Declined unless all ``records`` entries can be read.
        """
        held = self._c.segments.acquire(step.segment, step.segment_id, self._c.index.generation)
        scan = scan_segment(held.fd, self._c.files) if held is not None else None
        if held is None:
            raise Declined("a segment is gone")
        if scan is None or len(scan.entries) < records:
            raise Declined("unreadable")
        named = self._named(step.segment, held, scan)
        return self._evictor.relocator.copy(target, step.segment, held, named, recode=codec)

    def _named(self, number: int, held: OpenSegment, scan: Scan) -> list[int]:
        """Records of a segment that the index names, ascending; the others were replaced or moved already."""
        spaces = _namespaces(held, scan, self._c.files)
        if spaces is None:
            raise Declined("unreadable")
        keys: set[bytes] = set()
        for entry in scan.parts():
            described = spaces[entry.ns_seq]
            name = described.layout.groups[entry.group].name
            for head in (entry.run_hash, entry.chunk_hash):  # a fork's row is keyed by the chunk itself
                keys.add(page_key(described.digest, name, head) + entry.part)
        ordered, found = sorted(keys), set[int]()
        for first in range(0, len(ordered), KEYS_PER_HOLD):
            some = ordered[first : first + KEYS_PER_HOLD]
            found |= self._c.index.read(partial(_seqs_of, number=number, keys=some), COMMIT_SECONDS)
        return sorted(found)

    def _used(self) -> int:
        return self._c.index.read(lambda s: s.ledger().used, COMMIT_SECONDS)


def _class_of(row: SegmentRow) -> SegmentClass:
    """The class of the copies: the source's, so that lifetimes still match; pages once pinned become ordinary."""
    class_id = row.class_id[: ledger.QUOTA_BYTES] + bytes(8) if row.flags & fmt.FLAG_PINNED else row.class_id
    return SegmentClass(class_id, row.flags & fmt.FLAG_CARRIED, evictor=True)


def _namespaces(held: OpenSegment, scan: Scan, files: Files) -> dict[int, Described] | None:
    """The namespaces of a segment's records, by ``ns_seq``; None if one of them cannot be read."""
    spaces: dict[int, Described] = {}
    for entry in scan.parts():
        described = spaces.get(entry.ns_seq) or read_namespace(held.fd, files, scan.entries, entry.ns_seq)
        if described is None or entry.group >= len(described.layout.groups):
            return None
        spaces[entry.ns_seq] = described
    return spaces


def _seqs_of(session: Session, number: int, keys: Sequence[bytes]) -> set[int]:
    """Records of a segment that these rows name."""
    rows = (session.row(key) for key in keys)
    places = (place for row in rows if row is not None for _, place in row.places())
    return {place.seq for place in places if place.segment == number and not place.flags & CLAIM}
