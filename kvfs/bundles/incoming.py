"""Pages from elsewhere, in a segment that this store did not write: verified, then appended to its own segments.

They are published like any others, so identity, limits, quotas and evictions are those of this store. Pages that are
stored already are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol, TypeAlias

from kvfs.bundles.exporter import TooLargeError, entry_problem
from kvfs.context import Context
from kvfs.directory.config import quota_id
from kvfs.directory.root import translate_os_errors
from kvfs.errors import ConfigError, IndexUnavailableError, NoSpaceError
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES, leaf_table, root_of
from kvfs.format.codec import CodecError, decoded, fits
from kvfs.format.segment import Entry
from kvfs.index import ledger
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.row_updates import Named, Publish, is_live, load, publish
from kvfs.index.rows import RUN, Place
from kvfs.index.session import Session
from kvfs.pages.chunk_hash import page_key
from kvfs.pages.identity import Described, parse_descriptor
from kvfs.pages.layout import Group, Part
from kvfs.segments.scan import Scan, read_descriptor
from kvfs.segments.writer import Record, SegmentWriter
from kvfs.system.files import Files
from kvfs.write.active_segments import ActiveSegments, Declined, RoomWait, SegmentClass

EXPIRY_SECONDS = 3600  # records that expire in the same hour share segments


class Page(NamedTuple):
    """A verified record."""

    entry: Entry
    payload: memoryview  # as it is stored
    table: bytes  # leaf table of what it decodes to
    described: Described
    descriptor: bytes
    group: Group
    part: Part


def read_pages(
    fd: int, files: Files, scan: Scan, page_limit: int, page_bytes_max: int = 1 << 62,
    step: Callable[[], None] = lambda: None, first: int = 0,
) -> Iterator[tuple[Entry, Page | str]]:  # fmt: skip
    """Each record of a segment, from number ``first`` on, with its verified page or why it does not verify.

    A page of more than ``page_limit`` bytes counts as one that does not. TooLargeError at a page of more than
    ``page_bytes_max``. ``step`` is called before each record.
    """
    known: dict[int, tuple[Described, bytes] | None] = {}
    for entry in islice(scan.parts(), first, None):
        step()
        if entry.ns_seq not in known:
            known[entry.ns_seq] = _described(fd, files, scan, entry.ns_seq)
        named = known[entry.ns_seq]
        if named is None:
            yield entry, "its namespace record is damaged"
        else:
            yield entry, read_page(fd, files, entry, named, page_limit, page_bytes_max)


def read_page(
    fd: int, files: Files, entry: Entry, named: tuple[Described, bytes], page_limit: int, page_bytes_max: int = 1 << 62,
    *, has_table: bool = True,
) -> Page | str:  # fmt: skip
    """The page of a record, verified, or the reason why it does not verify. ``named``: what its namespace record says.

    ``has_table``: its leaf table is there to be read, too; if not, the page has to have the root of its entry.
    TooLargeError as of ``read_pages``.
    """
    if entry.group >= len(named[0].layout.groups):
        return "its namespace record is damaged"
    group = named[0].layout.groups[entry.group]
    try:
        part = Part.unpack(entry.part)
        if not fits(entry.codec, entry.stored_bytes, group.part_bytes(part)):
            return "its size or codec contradicts the layout"
        if group.part_bytes(part) > page_bytes_max:
            raise TooLargeError(f"it has a page of {group.part_bytes(part)} bytes")
        if group.part_bytes(part) > page_limit:
            return f"a page of {group.part_bytes(part)} bytes is more than this store's capacity allows"
        payload = files.read_view(fd, entry.stored_bytes, entry.payload)
        raw, leaf_bytes = decoded(payload, entry.codec, group.part_bytes(part)), group.leaf_bytes(part)
        if has_table:
            table = files.read(fd, LEAF_BYTES * group.leaves(part), entry.leaves)
        else:
            table = leaf_table(raw, leaf_bytes)
    except (ConfigError, CodecError, OSError) as exc:
        return str(exc)
    if has_table:
        why = entry_problem(raw, table, entry, leaf_bytes)
    else:
        why = "" if root_of(table) == entry.root else "leaf checksums and root disagree"
    return why or Page(entry, payload, table, *named, group, part)


def _described(fd: int, files: Files, scan: Scan, ns_seq: int) -> tuple[Described, bytes] | None:
    if ns_seq >= len(scan.entries) or scan.entries[ns_seq].kind != fmt.KIND_NAMESPACE:
        return None
    try:
        data = read_descriptor(fd, files, scan.entries[ns_seq])
    except OSError:
        return None
    described = parse_descriptor(data) if data is not None else None
    if data is None or described is None or described.digest != scan.entries[ns_seq].chunk_hash:
        return None
    return described, data


class Tally(Protocol):
    """What an appender counts, in the report of its caller."""

    stored: int
    skipped: int
    nbytes: int


class PageAppender:
    """Appends verified pages to this store's active segments, and publishes them."""

    def __init__(self, context: Context, active: ActiveSegments, report: Tally, space_seconds: float) -> None:
        self._c = context
        self._active = active
        self._space_seconds = space_seconds
        self.report = report
        self.leading = 0  # of the pages given to the last ``store``: these are stored and counted, also if it failed

    def store(self, pages: Sequence[Page], at_us: int, head_of: Callable[[Page], bytes]) -> None:
        """Store pages of one namespace, group, part and expiry. ``head_of``: the chunk hash that keys a page's row.

        A lookup always reads the row of a run's first chunk, and a chunk's own row where that run lacks the chunk.
        NoSpaceError, IndexUnavailableError; StoreAccessError or StoreReadOnlyError if the disk fails.
        """
        digest, group, part = pages[0].described.digest, pages[0].group, pages[0].part
        opaque = pages[0].described.layout.kind == "opaque"
        key = partial(_row_key, digest, group.name, part.pack())
        records = [((p.entry.chunk_hash, 0) if opaque else (head_of(p), p.entry.chunk % RUN), p) for p in pages]
        self.leading = 0
        missing = self._c.index.read(lambda s: _missing(s, key, records), COMMIT_SECONDS)
        segment_class = self._class(pages[0].described, pages[0].entry.expires)
        wait = RoomWait(self._space_seconds)
        try:
            with translate_os_errors(self._c.directory.path), self._active.class_locks.acquire_within(segment_class):
                while missing:
                    try:
                        done = self._append(segment_class, [records[i] for i in missing], key, at_us, wait)
                    except ledger.StaleWriterError:
                        self._active.close_for_appends(segment_class)
                        raise IndexUnavailableError(
                            f"the index was rebuilt meanwhile: {self.report.stored} pages are imported; import again"
                        ) from None
                    except OSError:  # a segment that stays active without a writer would be charged permanently
                        self._active.close_for_appends(segment_class)
                        raise
                    self._count_until(missing[done - 1] + 1, done)
                    missing = missing[done:]
        except Declined as exc:
            raise NoSpaceError(
                f"no room for more ({exc.reason}): {self.report.stored} pages are imported; raise the capacity"
            ) from None
        self._count_until(len(records), 0)

    def _count_until(self, leading: int, appended: int) -> None:
        """Pages before number ``leading`` are stored; all further ones but ``appended`` were so before."""
        self.report.skipped += leading - self.leading - appended
        self.leading = leading

    def _class(self, described: Described, expires: int) -> SegmentClass:
        quotas = self._c.settings.quotas
        names = (f"salt:{described.salt}" if described.salt else "", described.name)
        owner = next((quota_id(n) for n in names if n and n in quotas), bytes(8))
        last = -(-expires // EXPIRY_SECONDS) * EXPIRY_SECONDS
        return SegmentClass(owner + last.to_bytes(8, "little"))

    def _append(
        self, segment_class: SegmentClass, records: list[_Placed],
        key: Callable[[bytes], bytes], at_us: int, wait: RoomWait,
    ) -> int:  # fmt: skip
        """Append and publish the leading records that fit the active segment; how many."""
        first = records[0][1]
        digest, descriptor = first.described.digest, first.descriptor
        leaves = first.group.leaves(first.part)
        size, leaf_bytes = max(len(p.payload) for _, p in records), LEAF_BYTES * leaves
        fresh = SegmentWriter.need_fresh(len(descriptor), size, leaf_bytes)
        everything = SegmentWriter.need_fresh(len(descriptor), size, leaf_bytes, len(records))
        writer, generation = self._active.writer(
            segment_class, fresh, everything, lambda w: w.need(digest, descriptor, size, leaf_bytes, 1), wait
        )
        count, room = len(records), writer.remaining_bytes(ledger.segment_limit(self._c.settings, fresh))
        while count > 1 and writer.need(digest, descriptor, size, leaf_bytes, count) > room:
            count -= 1
        batch = records[:count]
        limits = ledger.budget(self._c.settings, segment_class.class_id)
        need = writer.need(digest, descriptor, size, leaf_bytes, count)

        def reserve(session: Session) -> int:
            row = ledger.own_segment(session, writer.number, self._c.owner, generation)
            session.put_namespace(digest, descriptor, first.entry.group, first.part.pack())
            allocated = max(writer.allocated, fmt.align(writer.tail + need))
            ledger.reserve(session, writer.number, row, allocated, writer.records + count + 8, limits)
            return allocated

        allocated = self._active.with_room(reserve, wait, segment_class)
        if allocated > writer.allocated:
            writer.grow(allocated)
        made = [
            Record(p.payload, p.group.leaf_bytes(p.part), leaves, p.group.part_bytes(p.part), p.entry.group,
                   p.entry.chunk, p.entry.part, p.entry.chunk_hash, head, p.entry.expires, p.entry.codec, p.table)
            for (head, _), p in batch
        ]  # fmt: skip
        placed = writer.append(made, digest, descriptor, at_us)
        named = [
            Publish(
                head, slot,
                Place(r.chunk_hash, at.root, r.codec, 0, writer.number, at.payload // fmt.BLOCK, len(r.payload),
                      at.leaves // 8, at.seq, r.expires),
            )
            for ((head, slot), _), r, at in zip(batch, made, placed, strict=True)
        ]  # fmt: skip

        if self._c.settings.sync != "cache":  # a put that skips a page promises that it is stored
            self._active.sync(writer)

        def commit(session: Session) -> Named:
            row = ledger.own_segment(session, writer.number, self._c.owner, generation)
            session.put_namespace(digest, descriptor, first.entry.group, first.part.pack())  # see ``writer``
            stored = publish(session, key, leaves, named)
            session.add_contents(writer.number, digest, *stored)
            expires = max(row.expires, first.entry.expires) if first.entry.expires else row.expires
            moved = row._replace(records=writer.records, tail=writer.tail, table=writer.table, expires=expires)
            session.set_segment(writer.number, row, moved)
            return stored

        stored = self._c.index.write(commit, COMMIT_SECONDS)
        self._active.note_use(segment_class)
        self.report.stored += stored.records
        self._c.counters.add("pages_imported", stored.records)
        self.report.skipped += count - stored.records
        self.report.nbytes += stored.stored_bytes
        return count


_Placed: TypeAlias = tuple[tuple[bytes, int], Page]


def _missing(session: Session, key: Callable[[bytes], bytes], records: list[_Placed]) -> list[int]:
    """Numbers of the records whose pages are not stored where a lookup finds them."""
    rows: dict[bytes, dict[int, Place]] = {}
    missing = []
    for number, ((head, slot), page) in enumerate(records):
        for first in (head, page.entry.chunk_hash):
            if first not in rows:
                rows[first] = load(session, key(first))
            old = rows[first].get(slot)
            if old is not None and old.chunk_hash == page.entry.chunk_hash and is_live(session, old):
                break
        else:
            missing.append(number)
    return missing


def _row_key(digest: bytes, group: str, packed: bytes, chunk_hash: bytes) -> bytes:
    return page_key(digest, group, chunk_hash) + packed
