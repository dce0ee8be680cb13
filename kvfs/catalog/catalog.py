"""What is in a store: its namespaces and segments, read from the index in short transactions, and names for them.

Counts come from the ``contents`` rows that every publish updates, so they cost the same in a store of any size. A
page that several ranks wrote counts once per part.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kvfs.catalog.records import Located, Records
from kvfs.catalog.walk import HASH_BYTES, PATIENCE_SECONDS, Prefix, Walk, prefixes
from kvfs.context import Context
from kvfs.errors import ConfigError, KvfsError
from kvfs.index.rows import Place, parse_row
from kvfs.index.session import Session
from kvfs.index.tables import DROPPED, Contents, SegmentRow
from kvfs.pages.identity import Described, Identity, parse_descriptor, salt_digest
from kvfs.segments.writer import file_name

ROWS_PER_HOLD = 256  # index rows per transaction, so that writers wait little
HASH_DIGITS_MIN = 6  # shorter references to a hash would be guesses
CANDIDATES_MAX = 8  # names that an error message lists
STAMPS_MAX = 64  # latest access times of a segment that are searched for the last use of its namespaces
_HEX = re.compile(r"[0-9a-f]+\Z")


class NotFoundError(KvfsError):
    """Nothing in the store has that name."""


@dataclass
class NamespaceInfo:
    """One namespace and what the store holds of it."""

    described: Described
    pages: int = 0  # published records
    nbytes: int = 0
    segments: set[int] = field(default_factory=set)
    last_used_us: int = 0  # 0: nothing is stored

    @property
    def digest(self) -> bytes:
        return self.described.digest

    @property
    def name(self) -> str:
        return self.described.name

    @property
    def label(self) -> str:
        return self.described.label


class SegmentInfo(NamedTuple):
    """One segment, with what it holds of each namespace."""

    number: int
    row: SegmentRow
    contents: tuple[Contents, ...]


class PageInfo(NamedTuple):
    """One record of a page, and where it is stored."""

    chunk_hash: bytes
    place: Place
    segment_id: bytes
    located: Located | None
    last_used_us: int


class Catalog:
    """Reads what a store holds, through ``Walk`` and ``Records``. Cheap to make; caches nothing between calls."""

    def __init__(self, context: Context) -> None:
        self._c = context

    # -- namespaces --------------------------------------------------------------------------

    def contents(self) -> list[Contents]:
        """What live segments hold of each namespace."""
        rows, after = list[Contents](), b""
        while True:
            batch, following = self._c.index.read(partial(_contents, after=after), PATIENCE_SECONDS)
            rows += batch
            if following is None:
                break
            after = following
        alive = {n for n, row in self.segment_rows() if row.state != DROPPED}
        return [c for c in rows if c.segment in alive]

    def segment_rows(self) -> list[tuple[int, SegmentRow]]:
        return self._c.index.read(lambda s: s.segments(), PATIENCE_SECONDS)

    def described(self) -> list[Described]:
        """All namespaces in the index, by name: those with pages, and some that had pages."""
        pairs = self._c.index.read(lambda s: s.namespaces(), PATIENCE_SECONDS)
        parsed = (parse_descriptor(data) for _, data in pairs)
        return sorted((d for d in parsed if d is not None), key=lambda d: (d.name, d.revision, d.digest))

    def namespaces(self) -> list[NamespaceInfo]:
        """All namespaces with what is stored of them."""
        infos = {d.digest: NamespaceInfo(d) for d in self.described()}
        by_segment: dict[int, list[NamespaceInfo]] = {}
        for c in self.contents():
            info = infos.get(c.digest)
            if info is not None:
                info.pages += c.records
                info.nbytes += c.stored_bytes
                info.segments.add(c.segment)
                by_segment.setdefault(c.segment, []).append(info)
        ids = {n: row.segment_id for n, row in self.segment_rows()}
        with Records(self._c) as records:
            for number, within in by_segment.items():
                if number in ids:
                    self._note_use(records, ids[number], within)
        return list(infos.values())

    def _note_use(self, records: Records, segment_id: bytes, within: Sequence[NamespaceInfo]) -> None:
        """Raise ``last_used_us`` of the namespaces of one segment.

        Exact while each of them has one of the segment's STAMPS_MAX latest access times. The others keep what other
        segments say, or get the time at which the segment was last written.
        """
        stamps = records.stamps(segment_id)
        now = self._c.files.now_us()
        missing = {info.digest: info for info in within}
        for seq in heapq.nlargest(STAMPS_MAX, range(len(stamps)), key=stamps.__getitem__):
            if not 0 < stamps[seq] <= now or not missing:
                break
            if len(within) == 1:
                digest: bytes | None = within[0].digest
            else:
                located = records.locate(segment_id, seq)
                digest = located.digest if located is not None else None
            info = missing.pop(digest, None) if digest is not None else None
            if info is not None:
                info.last_used_us = max(info.last_used_us, stamps[seq])
        if missing:
            try:
                st = self._c.files.stat(file_name(segment_id), dir_fd=self._c.directory.sub("segments"))
            except OSError:
                return
            for info in missing.values():
                info.last_used_us = max(info.last_used_us, min(now, st.st_mtime_ns // 1000))

    def find(self, ref: str, known: Sequence[Described] | None = None) -> Described:
        """The namespace that ``ref`` names: name, name@revision (or its beginning), or 6 or more digits of the digest.
        ``known``: all namespaces, if they have been read already."""
        name, _, revision = ref.rpartition("@") if "@" in ref else (ref, "", "")
        known = self.described() if known is None else known
        found = [d for d in known if d.name == ref]
        found = found or [d for d in known if name and d.name == name and d.revision.startswith(revision)]
        if not found and _is_short(ref):
            found = [d for d in known if d.digest.hex().startswith(ref)]
        if not found:
            names = ", ".join(sorted({d.name for d in known})[:CANDIDATES_MAX]) or "none"
            raise NotFoundError(f"no namespace {ref!r} in this store; it has: {names}")
        if len(found) > 1:
            listed = [f"{d.digest.hex()[:12]} ({d.name}@{d.revision[:12]})" for d in found]
            raise ConfigError(_ambiguous(ref, "namespaces", listed))
        return found[0]

    # -- segments ----------------------------------------------------------------------------

    def segments(self) -> list[SegmentInfo]:
        by_number: dict[int, list[Contents]] = {}
        for c in self.contents():
            by_number.setdefault(c.segment, []).append(c)
        return [SegmentInfo(n, row, tuple(by_number.get(n, ()))) for n, row in self.segment_rows()]

    def find_segments(self, ref: str) -> list[SegmentInfo]:
        """Segments whose id begins with ``ref``."""
        return [s for s in self.segments() if s.row.segment_id.hex().startswith(ref)] if _is_short(ref) else []

    # -- pages and prefixes ------------------------------------------------------------------

    def find_pages(self, ref: str) -> list[PageInfo]:
        """Records of the page whose chunk hash begins with ``ref``; ConfigError if several pages match."""
        return self.find_all_pages([ref])[ref]

    def find_all_pages(self, refs: Sequence[str]) -> dict[str, list[PageInfo]]:
        """``find_pages`` of each, in one walk."""
        pages: dict[str, list[PageInfo]] = {ref: [] for ref in refs}
        short = set(filter(_is_short, refs))
        lengths = sorted(set(map(len, short)))
        only = bytes.fromhex(refs[0][: len(refs[0]) // 2 * 2]) if len(refs) == len(short) == 1 else b""
        with Records(self._c) as records:
            for key, value, segments in Walk(self._c).hashes() if short else ():
                row = parse_row(key, value) if only in value else None
                for _, place in row.places() if row is not None else ():
                    digits = place.chunk_hash.hex()
                    named = [digits[:n] for n in lengths if digits[:n] in short]
                    if named and not place.flags and place.segment in segments:
                        page = _page_info(records, place, segments[place.segment])
                        for ref in named:
                            pages[ref].append(page)
        for ref, found in pages.items():
            names = {page.chunk_hash.hex()[:16] for page in found}
            if len(names) > 1:
                raise ConfigError(_ambiguous(ref, "pages", sorted(names)))
        return pages

    def hashes_of_prefix(self, ref: str) -> tuple[Described, list[bytes]]:
        """(namespace, chunk hashes from the first on) of the pages of the request that used page ``ref`` last."""
        pages = [p for p in self.find_pages(ref.lower()) if p.located is not None]
        if not pages or pages[0].located is None:
            raise NotFoundError(f"no page has the id {ref!r}: give an id from kvfs ls NAMESPACE")
        digest, stamp = pages[0].located.digest, pages[0].last_used_us
        numbers = {c.segment for c in self.contents() if c.digest == digest}
        found: dict[int, bytes] = {}
        for s in Walk(self._c).stretches(numbers.__contains__):
            if (s.digest, s.stamp_us) == (digest, stamp):
                hashes = (s.hashes[i : i + HASH_BYTES] for i in range(0, len(s.hashes), HASH_BYTES))
                found.update(zip(range(s.chunk, s.chunk + s.pages), hashes, strict=True))
        if 0 not in found:
            raise ConfigError(
                f"prefix {ref!r} begins at chunk {min(found, default=0)}, since a later request used its head: "
                "give the prompt with --prompt"
            )
        leading = next(i for i in range(len(found) + 1) if i not in found)
        described = next(d for d in self.described() if d.digest == digest)
        return described, [found[i] for i in range(leading)]

    def prefixes(self, described: Described, *, seconds: float | None = None) -> tuple[list[Prefix], Walk]:
        """Prefixes of a namespace as they were last used, and the walk that found them (see ``Walk.complete``)."""
        numbers = {c.segment for c in self.contents() if c.digest == described.digest}
        deadline = None if seconds is None else self._c.files.monotonic() + seconds
        walk = Walk(self._c, deadline=deadline)
        return prefixes(walk, numbers.__contains__, described.digest), walk


def identity_of(described: Described, salt: str = "") -> dict[str, Any]:
    """Arguments of ``Store.namespace`` for a namespace that was read back; only its tenant knows the salt."""
    body = described.body
    arguments = {
        "name": described.name, "layout": described.layout, "revision": described.revision, "salt": salt,
        "rope": body["rope"], "adapter": body["adapter"], "epoch": body["epoch"], "extra": body["extra"],
    }  # fmt: skip
    if salt_digest(salt) != described.salt:
        raise ConfigError(
            f"namespace {described.name} is salted: give its salt in $KVFS_SALT"
            if not salt
            else f"this is not the salt of namespace {described.name}"
        )
    if Identity(**arguments).digest != described.digest:
        raise KvfsError(f"namespace {described.name} has a descriptor that this version cannot reproduce")
    return arguments


def _page_info(records: Records, place: Place, segment_id: bytes) -> PageInfo:
    located, stamps = records.locate(segment_id, place.seq), records.stamps(segment_id)
    used = stamps[place.seq] if place.seq < len(stamps) else 0
    used = used or (located.entry.written_us if located is not None else 0)
    return PageInfo(place.chunk_hash, place, segment_id, located, used)


def _contents(session: Session, after: bytes) -> tuple[list[Contents], bytes | None]:
    return session.contents(after, ROWS_PER_HOLD)


def _is_short(ref: str) -> bool:
    return HASH_DIGITS_MIN <= len(ref) <= 64 and bool(_HEX.match(ref))


def _ambiguous(ref: str, what: str, candidates: Iterable[str]) -> str:
    listed = list(candidates)
    more = f" and {len(listed) - CANDIDATES_MAX} more" if len(listed) > CANDIDATES_MAX else ""
    return f"{ref!r} names {len(listed)} {what}: {', '.join(listed[:CANDIDATES_MAX])}{more}; give more digits"
