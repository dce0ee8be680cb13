"""Imports bundles. Every page is verified before it is stored; no page of a changed bundle is stored.

The pages are appended to this store's own segments and published like any others, so identity, limits, quotas and
evictions are those of this store. Pages that are stored already are skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from kvfs.bundles.exporter import (
    MANIFEST,
    BundleError,
    ExportWindow,
    Member,
    TooLargeError,
    read_manifest,
    read_members,
)
from kvfs.bundles.incoming import Page, PageAppender, read_pages
from kvfs.bundles.signature import read_key
from kvfs.context import Context
from kvfs.directory.config import SEGMENT_MAX
from kvfs.errors import ConfigError
from kvfs.format.segment import Entry
from kvfs.index import ledger
from kvfs.index.rows import RUN
from kvfs.pages.identity import Described
from kvfs.segments.scan import Scan, scan_segment
from kvfs.write.active_segments import ActiveSegments

MEMBERS_MAX = 100_000  # files in a bundle
#: Of a manifest, as bytes and per file in the bundle: parsed, hostile JSON takes 27 times its size.
MANIFEST_BYTES_MAX, MEMBER_BYTES = 4 << 20, 256
PROBLEMS_MAX = 100  # lines of a report
BATCH_PAGES, BATCH_BYTES = 256, 16 << 20  # of one append
SPACE_SECONDS = 30.0  # longest wait for room, per append
_SEGMENT_NAME = re.compile(r"[0-9a-f]{32}\.kvs\Z")


@dataclass
class Imported:
    """How many pages of a bundle were stored, skipped and refused."""

    digest: str = ""
    pages: int = 0  # in the bundle
    stored: int = 0
    skipped: int = 0  # stored already
    expired: int = 0
    bad: int = 0  # did not verify; only of a partial import
    left_out: int = 0  # of namespaces that were not chosen
    namespaces: dict[str, int] = field(default_factory=dict)  # "name@revision" -> pages that are or were stored
    nbytes: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.bad += 1
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)


class Pace(NamedTuple):
    """Bounds of an import: what it appends at once, how long it waits for room, what runs between two steps."""

    batch_bytes: int = BATCH_BYTES
    space_seconds: float = SPACE_SECONDS
    manifest_bytes_max: int = MANIFEST_BYTES_MAX
    members_max: int = MEMBERS_MAX
    records_max: int = 1 << 32  # of a segment
    page_bytes_max: int = 1 << 62
    step: Callable[[], None] = lambda: None  # may rest, or raise to end the import


class Importer:
    """One import: verifies a bundle, then appends its pages. ``partial_``: takes what verifies of a damaged bundle.

    ``namespaces``: takes only the pages of these (see ``Described.is_named``).
    """

    def __init__(
        self, context: Context, active: ActiveSegments, *, partial_: bool, namespaces: Sequence[str] = (),
        pace: Pace | None = None,
    ) -> None:  # fmt: skip
        self._c = context
        self._active = active
        self._partial = partial_
        self._chosen = tuple(namespaces)
        self._key: bytes | None = None
        self._pace = pace or Pace()
        self.report = Imported()
        self._append = PageAppender(context, active, self.report, self._pace.space_seconds)
        self._heads: set[bytes] = set()  # chunk hashes that begin a run
        self._found: set[str] = set()  # chosen names that the bundle has
        self._stamps: dict[int, int] = {}  # access times in the bundle -> access times here

    def run(self, path: str, progress: Callable[[int, int], None], *, digest: str | None = None) -> Imported:
        """Verify all of a bundle, then store its pages. ``progress``: (bytes done, all bytes). BundleError says what is
        wrong with the bundle."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as exc:
            raise ConfigError(f"{path}: {exc.strerror}; give a bundle that kvfs export wrote") from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{path} is no regular file; give a bundle that kvfs export wrote")
            return self.take(fd, progress, digest=digest)
        except OSError as exc:
            raise BundleError(f"{path}: {exc.strerror}; copy the bundle again") from None
        finally:
            os.close(fd)

    def take(
        self, fd: int, progress: Callable[[int, int], None] = lambda done, total: None, *, digest: str | None = None
    ) -> Imported:
        """``run`` for an open file. OSError if it cannot be read."""
        size = os.fstat(fd).st_size
        members = self.members(fd, size, digest)
        done = 0
        for member in members:  # all are verified before any is stored: a changed bundle leaves no pages behind
            self._check(fd, member)
            done += member.nbytes
            progress(done, 2 * size)
        for ref in self._chosen:
            if ref not in self._found:
                raise ConfigError(f"namespace {ref!r} is not in this bundle: leave out -n to import all of it")
        # one access time per request, as in the store of origin, and in the same order
        now = self._c.files.now_us()
        self._stamps = {stamp: now + i for i, stamp in enumerate(sorted(self._stamps))}
        for member in members:
            self._take(fd, member)
            done += member.nbytes
            progress(done, 2 * size)
        return self.report

    # -- verifying ----------------------------------------------------------------------------

    def members(self, fd: int, size: int, digest: str | None = None) -> list[Member]:
        """The segments of a complete bundle: its last member is a manifest with their names and sizes.

        BundleError if it is not complete. ``digest``: what the manifest's digest must begin with.
        """
        found = read_members(fd, size, self._c.files.read, self._pace.members_max)
        members = [member for member in found if self._pace.step() is None]
        bound = self._pace.manifest_bytes_max + MEMBER_BYTES * len(members)
        if not members or members[-1].name != MANIFEST or members[-1].nbytes > bound:
            raise BundleError("there is no manifest at the end: not a bundle of kvfs, or cut short; copy it again")
        data = self._c.files.read(fd, members[-1].nbytes, members[-1].offset)
        self.report.digest = hashlib.blake2b(data, digest_size=32).hexdigest()
        if digest is not None and not (len(digest) >= 16 and self.report.digest.startswith(digest.lower())):
            raise BundleError(f"its digest is {self.report.digest}, not {digest}: another bundle, or a changed one")
        self._key = read_key(self._c.settings.bundle_key) if self._c.settings.bundle_key else None
        listed = read_manifest(data, self._key)
        segments = members[:-1]
        if [(m.name, m.nbytes) for m in segments] != [x[:2] for x in listed]:
            raise BundleError("its files are not those of its manifest; copy the bundle again")
        self._digests = {name: wanted for name, _, wanted in listed}
        for m in segments:
            if not _SEGMENT_NAME.match(m.name) or m.nbytes > 2 * SEGMENT_MAX:
                raise BundleError(f"{m.name!r} is no segment; this bundle was not written by kvfs")
        return segments

    def _check(self, fd: int, member: Member) -> None:
        """Verify the digest and every page of a segment."""
        with self._segment(fd, member) as (source, at):
            if self._key is None and not self._is_intact(fd, member):
                if not self._partial:
                    raise BundleError(
                        f"{member.name} was changed after it was written; --partial takes what still verifies"
                    )
                self.report.problems.append(f"{member.name} was changed after it was written")
            self._check_pages(source, at)

    @contextlib.contextmanager
    def _segment(self, fd: int, member: Member) -> Iterator[tuple[int, Member]]:
        """The file and place to read a segment from. If bundles are signed, a verified copy in memory: a file in the
        drop folder may be changed at any moment."""
        if self._key is None:
            yield fd, member
            return
        copy = os.memfd_create("kvfs-import")
        try:
            if not self._is_intact(fd, member, copy):
                raise BundleError(f"{member.name} was changed after it was signed")
            yield copy, member._replace(offset=0)
        finally:
            os.close(copy)

    def _is_intact(self, fd: int, member: Member, copy: int | None = None) -> bool:
        """Whether a segment has the digest of the manifest. What was read is written to ``copy``."""
        digest = hashlib.blake2b(digest_size=32)
        for at in range(0, member.nbytes, 4 << 20):
            data = self._c.files.read(fd, min(4 << 20, member.nbytes - at), member.offset + at)
            digest.update(data)
            if copy is not None:
                self._c.files.write_all(copy, [data], at)
            self._pace.step()
        return digest.hexdigest() == self._digests[member.name]

    def _check_pages(self, fd: int, member: Member) -> None:
        scan = self._scan(fd, member)
        if scan is None or scan.seal is None or scan.header.segment_id.hex() != member.name[:32]:
            if scan is None or not self._partial:
                self._refuse(f"{member.name}: header, tables and seal do not agree")
            if scan is None:
                return
        for entry, page in self._pages(fd, member, scan):
            self.report.pages += 1
            if isinstance(page, str):
                self._refuse(f"{member.name} record {entry.seq}: {page}")
                continue
            if not self._is_chosen(page.described):
                self.report.left_out += 1
                continue
            name = f"{page.described.name}@{page.described.revision}"
            self.report.namespaces[name] = self.report.namespaces.get(name, 0) + 1
            if entry.chunk % RUN == 0:
                self._heads.add(entry.chunk_hash)
            self._stamps.setdefault(entry.written_us, 0)

    def _is_chosen(self, described: Described) -> bool:
        named = {ref for ref in self._chosen if described.is_named(ref)}
        self._found |= named
        return bool(named) or not self._chosen

    def _scan(self, fd: int, member: Member) -> Scan | None:
        scan = scan_segment(fd, ExportWindow(member, self._pace.step), records_max=self._pace.records_max + 1)
        if scan is not None and len(scan.entries) > self._pace.records_max:
            raise TooLargeError(f"{member.name} has more than {self._pace.records_max} records")
        return scan

    def _refuse(self, text: str) -> None:
        if not self._partial:
            raise BundleError(f"{text}: refused; --partial takes the pages that verify")
        self.report.note(text)

    def _pages(self, fd: int, member: Member, scan: Scan) -> Iterator[tuple[Entry, Page | str]]:
        """Each record with its verified page, or with the reason why it does not verify."""
        pace, limit = self._pace, ledger.page_limit(self._c.settings)
        return read_pages(fd, ExportWindow(member), scan, limit, pace.page_bytes_max, pace.step)

    # -- storing ------------------------------------------------------------------------------

    def _take(self, fd: int, member: Member) -> None:
        """Store the pages of a segment. They are verified again as they are read: the file may have changed."""
        with self._segment(fd, member) as (source, at):
            self._take_pages(source, at)

    def _take_pages(self, fd: int, member: Member) -> None:
        now = self._c.files.now_us()
        scan = self._scan(fd, member)
        if scan is None:
            return
        pages = (page for _, page in self._pages(fd, member, scan) if isinstance(page, Page))
        good = (page for page in pages if self._is_chosen(page.described))
        shapes = groupby(
            good, key=lambda p: (p.described.digest, p.entry.group, p.part, p.entry.expires, p.entry.written_us)
        )
        for (_, _, _, expires, stamp), same in shapes:
            if expires and expires <= now // 1_000_000:
                self.report.expired += sum(1 for _ in same)
                continue
            batch: list[Page] = []
            for page in same:
                batch.append(page)
                if len(batch) == BATCH_PAGES or len(batch) * len(page.payload) >= self._pace.batch_bytes:
                    self._append.store(batch, self._stamps.get(stamp, now), self._head)
                    batch = []
            if batch:
                self._append.store(batch, self._stamps.get(stamp, now), self._head)

    def _head(self, page: Page) -> bytes:
        """The row for a page: its run's, if the bundle holds the run's first chunk; else its own."""
        return page.entry.run_hash if page.entry.run_hash in self._heads else page.entry.chunk_hash
