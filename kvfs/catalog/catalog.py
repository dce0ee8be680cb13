"""What is in a store: its namespaces and segments, read from the index in short transactions, and names for them.

Counts come from the ``contents`` rows that every publish updates, so they cost the same in a store of any size. A
page that several ranks wrote counts once per part.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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

HASH_DIGITS_MIN = 6  # shorter references to a hash would be guesses
CANDIDATES_MAX = 8  # names that an error message lists
STAMPS_MAX = 64  # latest access times of a segment that are searched for the last use of its namespaces
_HEX = re.compile(r"[0-9a-f]+\Z")


class NotFoundError(KvfsError):
    """Nothing in the store has that name."""


@dataclass(slots=True)
class NamespaceInfo:
    """One namespace and what the store holds of it."""

    described: Described
    pages: int = 0  # published records
    nbytes: int = 0
    segments: int = 0  # that hold some of it
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


@dataclass
class PrefixPages:
    """The pages that one request used last."""

    described: Described
    last_hash: bytes  # of the page that was asked for: its id
    hashes: dict[int, bytes] = field(default_factory=dict)  # chunk number -> chunk hash
    names: set[bytes] = field(default_factory=set)  # all of the hashes: pages of keys have no numbers of their own
    pages: int = 0  # records
    nbytes: int = 0


class Catalog:
    """Reads what a store holds, through ``Walk`` and ``Records``. Cheap to make; caches nothing between calls.

    StoreLockedError if the disk hangs, IndexUnavailableError if the index does not answer in time.
    """

    def __init__(self, context: Context) -> None:
        self._c = context

    # -- namespaces --------------------------------------------------------------------------

    def contents(self) -> list[Contents]:
        """What live segments hold of each namespace."""
        rows = list(self._c.index.slices(Session.contents, PATIENCE_SECONDS))
        alive = {n for n, row in self.segment_rows() if row.state != DROPPED}
        return [c for c in rows if c.segment in alive]

    def segment_rows(self) -> list[tuple[int, SegmentRow]]:
        return self._c.index.read(lambda s: s.segments(), PATIENCE_SECONDS)

    def described(self) -> list[Described]:
        """All namespaces in the index, by name: those with pages, and some that had pages."""
        parsed = (parse_descriptor(data) for _, data in self._c.index.slices(Session.namespaces, PATIENCE_SECONDS))
        return sorted((d for d in parsed if d is not None), key=_order)

    def _candidates(self, ref: str) -> list[Described]:
        """Namespaces that ``ref`` may name, in order: to find one of 100,000, few descriptors are parsed."""
        names = [json.dumps(name)[1:-1].encode() for name in {ref, ref.rpartition("@")[0]} if name]
        rows = self._c.index.slices(Session.namespaces, PATIENCE_SECONDS)
        parsed = (
            parse_descriptor(data)
            for digest, data in rows
            if b"\\" in data  # which may spell any name
            or any(name in data for name in names)
            or digest.hex().startswith(ref)
        )
        return sorted((d for d in parsed if d is not None), key=_order)

    def namespaces(self) -> list[NamespaceInfo]:
        """All namespaces with what is stored of them."""
        return self._c.calls.run(self._namespaces)

    def _namespaces(self) -> list[NamespaceInfo]:
        infos = {d.digest: NamespaceInfo(d) for d in self.described()}
        by_segment: dict[int, list[NamespaceInfo]] = {}
        for c in self.contents():
            info = infos.get(c.digest)
            if info is not None:
                info.pages += c.records
                info.nbytes += c.stored_bytes
                info.segments += 1
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
        if known is None:
            known = self._candidates(ref)
            known = known if _named(ref, known) else self.described()  # the message lists what there is
        return find_namespace(ref, known, "in this store")

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
        return self._c.calls.run(lambda: self._find_all_pages(refs))

    def _find_all_pages(self, refs: Sequence[str]) -> dict[str, list[PageInfo]]:
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
        prefix = self.pages_of_prefix(ref)
        found = prefix.hashes
        if 0 not in found:
            raise ConfigError(
                f"prefix {ref!r} begins at chunk {min(found, default=0)}, since a later request used its head: "
                "give the prompt with --prompt"
            )
        leading = next(i for i in range(len(found) + 1) if i not in found)
        return prefix.described, [found[i] for i in range(leading)]

    def pages_of_prefix(self, ref: str) -> PrefixPages:
        """The pages of the request that used page ``ref`` last, as ``prefixes`` lists them."""
        return self._c.calls.run(lambda: self._pages_of_prefix(ref))

    def _pages_of_prefix(self, ref: str) -> PrefixPages:
        pages = [p for p in self.find_pages(ref.lower()) if p.located is not None]
        if not pages or pages[0].located is None:
            raise NotFoundError(f"no page has the id {ref!r}: give an id from kvfs ls NAMESPACE")
        digest, stamp = pages[0].located.digest, pages[0].last_used_us
        numbers = {c.segment for c in self.contents() if c.digest == digest}
        described = next(d for d in self.described() if d.digest == digest)
        prefix = PrefixPages(described, pages[0].chunk_hash)
        for s in Walk(self._c).stretches(numbers.__contains__):
            if (s.digest, s.stamp_us) == (digest, stamp):
                hashes = [s.hashes[i : i + HASH_BYTES] for i in range(0, len(s.hashes), HASH_BYTES)]
                prefix.names.update(hashes)
                prefix.hashes.update(zip(range(s.chunk, s.chunk + s.pages), hashes, strict=True))
                prefix.pages += s.pages
                prefix.nbytes += s.nbytes
        return prefix

    def sort_out(self, targets: Sequence[str]) -> tuple[list[str], list[str]]:
        """(namespaces, ids of prefixes) among the targets of a command; NotFoundError for what can be neither."""
        names, ids = list[str](), list[str]()
        known = self.described() if targets else ()
        for target in targets:
            try:
                self.find(target, known)
                names.append(target)
            except NotFoundError:
                if not _is_short(target.lower()):
                    raise
                ids.append(target)
        return names, ids

    def prefixes(self, described: Described, *, seconds: float | None = None) -> tuple[list[Prefix], Walk]:
        """Prefixes of a namespace as they were last used, and the walk that found them (see ``Walk.complete``)."""
        numbers = {c.segment for c in self.contents() if c.digest == described.digest}
        deadline = None if seconds is None else self._c.files.monotonic() + seconds
        walk = Walk(self._c, deadline=deadline)
        return self._c.calls.run(lambda: prefixes(walk, numbers.__contains__, described.digest)), walk


def find_namespace(ref: str, known: Sequence[Described], where: str) -> Described:
    """``Catalog.find`` among known namespaces; ``where`` is for the message."""
    found = _named(ref, known)
    if not found:
        raise NotFoundError(f"no namespace {ref!r} {where}{listed(sorted({d.name for d in known}), ref)}")
    if len(found) > 1:
        ids = [f"{d.digest.hex()[:12]} ({d.label})" for d in found]
        raise ConfigError(_ambiguous(ref, "namespaces", ids))
    return found[0]


def _order(described: Described) -> tuple[str, str, bytes]:
    return described.name, described.revision, described.digest


def _named(ref: str, known: Sequence[Described]) -> list[Described]:
    """Those that ``ref`` names; a name counts before a revision, that before digits of a digest."""
    name, _, revision = ref.rpartition("@") if "@" in ref else (ref, "", "")
    found = [d for d in known if d.name == ref]
    found = found or [d for d in known if name and d.name == name and d.revision.startswith(revision)]
    return found or [d for d in known if _is_short(ref) and d.digest.hex().startswith(ref)]


def listed(names: Iterable[str], wanted: str | None = None) -> str:
    """``a, b and 292 more``; with ``wanted``, the end of a message that names what is close to it."""
    known = list(names)
    more = f" and {len(known) - CANDIDATES_MAX} more" if len(known) > CANDIDATES_MAX else ""
    shown = (", ".join(known[:CANDIDATES_MAX]) or "none") + more
    if wanted is None:
        return shown
    from difflib import get_close_matches

    close = get_close_matches(wanted, known, 3)
    return f" (did you mean {' or '.join(map(repr, close))}?); it has: {shown}" if close else f"; it has: {shown}"


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


def _is_short(ref: str) -> bool:
    return HASH_DIGITS_MIN <= len(ref) <= 64 and bool(_HEX.match(ref))


def _ambiguous(ref: str, what: str, candidates: Iterable[str]) -> str:
    found = list(candidates)
    return f"{ref!r} names {len(found)} {what}: {listed(found)}; give more digits"
