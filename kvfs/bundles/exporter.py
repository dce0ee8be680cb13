"""Bundles: pages in one file, for another store. ``kvfs.bundles.importer`` reads them.

A bundle is a plain tar file (ustar): sealed segments in the format of docs/format.md, ``<id>.kvs``, and as the last
member ``kvfs-bundle.json`` with the BLAKE2b-256 of each. Without that member a bundle is not complete. The segments
are new: they hold the chosen pages, each verified as it is copied; ``written_us`` is the time of a page's last use.
The digest of the manifest names the whole bundle.

Digests detect a changed bundle only for an importer that knows the right digest or requires a signature
(``kvfs.bundles.signature``): otherwise a bundle is as trustworthy as its source.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import IO, Any, NamedTuple

from kvfs.bundles.signature import FIELD, is_signed, signature
from kvfs.catalog.catalog import Catalog
from kvfs.catalog.records import Records
from kvfs.catalog.walk import Walk
from kvfs.context import Context
from kvfs.errors import ConfigError, KvfsError
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES, leaf_table, root_of
from kvfs.format.codec import CodecError, decoded, fits
from kvfs.format.segment import BLOCK, Entry, Header
from kvfs.index.session import Session
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.pages.identity import Described
from kvfs.pages.layout import Group, Part
from kvfs.segments.writer import Record, SegmentWriter, file_name
from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files

MANIFEST = "kvfs-bundle.json"
SEGMENT_BYTES = 64 << 20  # a segment of a bundle is sealed when it has reached this size
BATCH_BYTES = 8 << 20  # payloads held in memory at once
NAMESPACES_LISTED = 4096  # in a manifest, for people; bounds its size
_TAR = 512  # block size of the tar format
_COPY_BYTES = 4 << 20  # of one read and write


class Chosen(NamedTuple):
    """Neighbouring records that go into a bundle. They sort so that one request's pages are neighbours."""

    digest: bytes
    group: int
    part: bytes
    stamp_us: int
    segment_id: bytes
    seq: int
    records: int


@dataclass
class Exported:
    """What a bundle holds; ``left_out`` counts records that were evicted meanwhile or did not verify."""

    path: str
    digest: str = ""
    pages: int = 0
    nbytes: int = 0
    segments: int = 0
    file_bytes: int = 0
    left_out: int = 0


def choose(context: Context, namespaces: Collection[Described], matches: Collection[PrefixMatch]) -> list[Chosen]:
    """All live records of these namespaces, and those of matches, each once. ConfigError if none is given."""
    if not namespaces and not matches:
        raise ConfigError("nothing is chosen for the export: pass names or ids of namespaces, prefixes= or match=")
    chosen = _of_namespaces(context, namespaces) if namespaces else []
    digests = {d.digest for d in namespaces}
    single = {c[4:6]: c for m in matches if m.namespace not in digests for c in _of_match(m)}
    return chosen + sorted(single.values())


def _of_namespaces(context: Context, wanted: Iterable[Described]) -> list[Chosen]:
    digests = {d.digest for d in wanted}
    numbers = {c.segment for c in Catalog(context).contents() if c.digest in digests}
    return sorted(
        Chosen(s.digest, s.group, s.part, s.stamp_us, s.segment_id, s.seq, s.pages)
        for s in Walk(context).stretches(numbers.__contains__)
        if s.digest in digests
    )


def _of_match(match: PrefixMatch) -> list[Chosen]:
    return sorted(
        Chosen(match.namespace, g.number, s.part.pack(), match.at_us, match.segments[s.place.segment], s.place.seq, 1)
        for g in match.groups
        for sources in g.sources().values()
        for s in sources
    )


def export(
    context: Context, chosen: list[Chosen], path: str, progress: Callable[[int, int], None], key: bytes | None = None
) -> Exported:
    """Write a bundle; it appears at ``path`` when it is complete. ``progress``: (records done, all records). ``key``
    signs it. Raises OSError unchanged."""
    return _Exporter(context, path, key).run(chosen, progress)


def verified_record(
    records: Records, segment_id: bytes, seq: int, group: Group, into: memoryview | None = None
) -> Record | None:
    """A record with its payload and its leaf table, if it verifies. ``into``: memory for the payload, if it fits."""
    entry = records.entry(segment_id, seq)
    if (
        entry is None
        or entry.kind != fmt.KIND_PART
        or not fits(entry.codec, entry.stored_bytes, group.part_bytes(part := Part.unpack(entry.part)))
    ):
        return None
    payload = records.payload(segment_id, entry, into)
    try:
        raw = decoded(payload, entry.codec, group.part_bytes(part)) if payload is not None else b""
    except CodecError:
        return None
    table = leaf_table(raw, group.leaf_bytes(part))
    if payload is None or root_of(table) != entry.root:
        return None
    return Record(
        payload, group.leaf_bytes(part), group.leaves(part), entry.raw_bytes, entry.group, entry.chunk, entry.part,
        entry.chunk_hash, entry.run_hash, entry.expires, entry.codec, table,
    )  # fmt: skip


class _Exporter:
    """One export: owns the temporary file and the list of its members."""

    def __init__(self, context: Context, path: str, key: bytes | None) -> None:
        self._c = context
        self._path = path
        self._key = key
        self._folder = os.path.dirname(os.path.abspath(path))
        self._members: list[dict[str, object]] = []
        self.done = Exported(path)

    def run(self, chosen: list[Chosen], progress: Callable[[int, int], None]) -> Exported:
        described = {d.digest: d for d in Catalog(self._c).described()}
        descriptors = dict(self._c.index.slices(Session.namespaces, 2.0))
        temporary = f"{self._path}.{self._c.files.random(4).hex()}.tmp"
        seen, total = 0, sum(c.records for c in chosen)
        try:
            with open(temporary, "xb", opener=self._c.directory.opener) as tar, Records(self._c) as records:
                writer: _Writer | None = None
                for (digest, number, part, stamp), same in groupby(chosen, key=lambda c: c[:4]):
                    if digest not in described or digest not in descriptors:
                        continue
                    group = described[digest].layout.groups[number]
                    for batch in _batches(same, group.part_bytes(Part.unpack(part))):
                        entries = [verified_record(records, segment_id, seq, group) for segment_id, seq in batch]
                        good = [r for r in entries if r is not None]
                        self.done.left_out += len(entries) - len(good)
                        seen += len(batch)
                        progress(seen, total)
                        if not good:
                            continue
                        if writer is None:
                            writer = _Writer(self._c, self._folder)
                        writer.append(good, digest, descriptors[digest], stamp)
                        self.done.pages += len(good)
                        self.done.nbytes += sum(len(r.payload) for r in good)
                        if writer.tail >= SEGMENT_BYTES:
                            self._seal(tar, writer)
                            writer = None
                if writer is not None:
                    self._seal(tar, writer)
                self._finish(tar, [described[d] for d in sorted({c.digest for c in chosen} & set(described))])
            os.replace(temporary, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return self.done

    def _seal(self, tar: IO[bytes], writer: _Writer) -> None:
        with contextlib.closing(writer):
            size = writer.seal()
            tar.write(_tar_header(writer.name, size))
            digest = hashlib.blake2b(digest_size=32)
            for at in range(0, size, _COPY_BYTES):
                data = os.pread(writer.fd, min(_COPY_BYTES, size - at), at)
                digest.update(data)
                tar.write(data)
            tar.write(bytes(-size % _TAR))
        self._members.append({"name": writer.name, "bytes": size, "blake2b": digest.hexdigest()})

    def _finish(self, tar: IO[bytes], namespaces: list[Described]) -> None:
        listed = namespaces[:NAMESPACES_LISTED]
        body: dict[str, object] = {
            "kvfs": "bundle",
            "version": 1,
            "created_us": self._c.files.now_us(),
            "store_id": self._c.store_id.hex(),
            "pages": self.done.pages,
            "namespaces": [{"name": d.name, "revision": d.revision, "digest": d.digest.hex()} for d in listed],
            "segments": self._members,
        }
        if self._key is not None:
            body[FIELD] = signature(body, self._key)
        manifest = json.dumps(body, indent=1).encode()
        tar.write(_tar_header(MANIFEST, len(manifest)) + manifest + bytes(-len(manifest) % _TAR) + bytes(2 * _TAR))
        tar.flush()
        os.fsync(tar.fileno())
        self.done.digest = hashlib.blake2b(manifest, digest_size=32).hexdigest()
        self.done.segments, self.done.file_bytes = len(self._members), tar.tell()


class _Writer:
    """One segment of a bundle, in an unnamed file in the same directory."""

    def __init__(self, context: Context, folder: str) -> None:
        files, segment_id = context.files, context.files.random(16)
        root = files.open_root(folder)
        try:
            temporary = f".{segment_id.hex()}.tmp"
            self._file = Descriptor.create(files, temporary, 0o600, dir_fd=root)
            files.unlink(temporary, dir_fd=root)
        finally:
            files.close(root)
        self.fd = self._file.fd
        self.name = file_name(segment_id)
        header = Header(segment_id, context.store_id, context.files.now_us())
        context.files.write_all(self.fd, [fmt.pack_header(header), bytes(fmt.FIRST_TABLE_BYTES)], 0)
        self._writer = SegmentWriter(
            self._file, segment_id, 0, context.files, epoch=1, tail=fmt.FIRST_PAYLOAD, table=fmt.FIRST_TABLE, records=0,
            allocated=1 << 62,
        )  # fmt: skip

    @property
    def tail(self) -> int:
        return self._writer.tail

    def append(self, records: list[Record], digest: bytes, descriptor: bytes, stamp_us: int) -> None:
        self._writer.append(records, digest, descriptor, stamp_us)

    def seal(self) -> int:
        return self._writer.seal()

    def close(self) -> None:
        self._file.close()


def _batches(same: Iterable[Chosen], part_bytes: int) -> Iterator[list[tuple[bytes, int]]]:
    batch: list[tuple[bytes, int]] = []
    for c in same:
        for seq in range(c.seq, c.seq + c.records):
            batch.append((c.segment_id, seq))
            if len(batch) * part_bytes >= BATCH_BYTES:
                yield batch
                batch = []
    if batch:
        yield batch


# -- tar -------------------------------------------------------------------------------------


class Member(NamedTuple):
    """A file in a tar."""

    name: str
    offset: int
    nbytes: int


class ExportWindow(Files):
    """Reads a segment that is a member of another file."""

    def __init__(self, member: Member, step: Callable[[], None] = lambda: None) -> None:
        self._member = member
        self._step = step  # before each read

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        self._step()
        left = self._member.nbytes - offset
        if left <= 0:
            return 0
        return super().preadv(fd, buffers, self._member.offset + offset, flags)

    def fstat(self, fd: int) -> Any:
        return _Size(self._member.nbytes)


class _Size(NamedTuple):
    st_size: int


class BundleError(KvfsError):
    """A bundle that must not be imported: it is not one, not complete, or was changed."""

    exit_code = 90


class TooLargeError(BundleError):
    """A bundle that exceeds the bounds of the import."""


class UnsignedError(BundleError):
    """A bundle without the signature that the store requires."""


def _tar_header(name: str, size: int) -> bytes:
    fields = (
        name.encode().ljust(100, b"\0") + b"0000600\0" + b"0000000\0" * 2 + f"{size:011o}\0".encode()
        + b"00000000000\0" + b" " * 8 + b"0" + bytes(100) + b"ustar\00000"
    ).ljust(_TAR, b"\0")  # fmt: skip
    return fields[:148] + f"{sum(fields):06o}\0 ".encode() + fields[156:]


def read_members(fd: int, size: int, read: Callable[[int, int, int], bytes], members_max: int) -> Iterator[Member]:
    """The files of a bundle: untrusted bytes, strictly the tar that ``export`` writes."""
    at, count = 0, 0
    while at + _TAR <= size:
        block = read(fd, _TAR, at)
        if not any(block):
            return
        name = block[:100].split(b"\0")[0].decode("ascii", "replace")
        try:
            nbytes, check = int(block[124:135], 8), int(block[148:154], 8)
        except ValueError:
            nbytes = check = -1
        if (
            block[257:262] != b"ustar"
            or sum(block[:148]) + sum(block[156:]) + 8 * 32 != check
            or block[156:157] != b"0"
        ):
            raise BundleError(f"byte {at}: not a bundle of kvfs, or damaged at that byte")
        at += _TAR
        count += 1
        if count > members_max:
            raise TooLargeError(f"it has more than {members_max} files")
        if nbytes < 0 or at + nbytes > size:
            raise BundleError(f"{name!r} is cut short; copy the bundle again")
        yield Member(name, at, nbytes)
        at += nbytes + -nbytes % _TAR
    raise BundleError("the end is missing; copy the bundle again")


def read_manifest(data: bytes, key: bytes | None = None) -> list[tuple[str, int, str]]:
    """(name, bytes, digest) of the segments that a manifest names. The values are untrusted and not checked.

    UnsignedError if there is a ``key`` and the manifest is not signed with it.
    """
    try:
        manifest = json.loads(data)
        if manifest["kvfs"] != "bundle" or manifest["version"] != 1:
            raise BundleError("a bundle of another version: use the kvfs that wrote it")
        if key is not None and not is_signed(manifest, key):
            raise UnsignedError("not signed with the key of this store: kvfs export --key-file signs a bundle")
        return [(s["name"], s["bytes"], s["blake2b"]) for s in manifest["segments"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BundleError("the manifest is damaged; copy the bundle again") from None


def entry_problem(payload: Any, table: bytes, entry: Entry, leaf_bytes: int) -> str:
    """What is wrong with the bytes of a page; empty if nothing is."""
    if leaf_table(payload, leaf_bytes) != table:
        return "payload and leaf checksums disagree"
    return "" if root_of(table) == entry.root else "leaf checksums and root disagree"


assert SEGMENT_BYTES % BLOCK == 0 and LEAF_BYTES == 8
