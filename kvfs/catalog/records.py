"""Single records of segments, found by their number without reading the table entries before them."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import OrderedDict
from typing import NamedTuple

from kvfs.context import Context
from kvfs.format import segment as fmt
from kvfs.format.segment import ENTRY_BYTES, Entry
from kvfs.pages.identity import Described, parse_descriptor
from kvfs.segments.scan import read_descriptor
from kvfs.segments.writer import file_name
from kvfs.system import direct_io
from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files

OPEN_MAX = 128  # segments open at once
TABLES_MAX = 1 << 20  # tables of one segment: bounds a damaged chain of tables


class _Open:
    """One segment, open for reading entries."""

    __slots__ = ("fd", "namespaces", "seed", "tables")

    def __init__(self, fd: int, segment_id: bytes) -> None:
        self.fd = fd
        self.seed = fmt.segment_seed(segment_id)
        self.tables = [fmt.FIRST_TABLE]  # offsets of the record tables found so far
        self.namespaces: dict[int, bytes | None] = {}  # seq -> digest


class Located(NamedTuple):
    """A record's entry and the digest of the namespace that it belongs to."""

    entry: Entry
    digest: bytes


class Records:
    """Reads entries of segments by (segment id, seq); owns the descriptors that it keeps open. The bytes are
    untrusted: what does not verify is None.

    Takes no locks on the segments: their published bytes never change, and one that is dropped meanwhile reads
    unchanged or as None.
    """

    def __init__(self, context: Context) -> None:
        self._directory = context.directory
        self._files: Files = context.files
        self._mode = context.mode
        self._open: OrderedDict[bytes, _Open] = OrderedDict()
        self._stamps: OrderedDict[bytes, array[int]] = OrderedDict()
        self._access_times = context.access_times

    def entry(self, segment_id: bytes, seq: int) -> Entry | None:
        """Entry ``seq`` of a segment."""
        segment = self._segment(segment_id)
        if segment is None:
            return None
        try:
            return self._read(segment, seq)
        except OSError:
            return None

    def locate(self, segment_id: bytes, seq: int) -> Located | None:
        """A part's entry and its namespace."""
        entry = self.entry(segment_id, seq)
        if entry is None or entry.kind != fmt.KIND_PART:
            return None
        known = self._open[segment_id].namespaces
        if entry.ns_seq not in known:
            named = self.entry(segment_id, entry.ns_seq)
            known[entry.ns_seq] = named.chunk_hash if named is not None and named.kind == fmt.KIND_NAMESPACE else None
        digest = known[entry.ns_seq]
        return Located(entry, digest) if digest is not None else None

    def described(self, segment_id: bytes, ns_seq: int) -> Described | None:
        """The namespace that record ``ns_seq`` of a segment describes."""
        entry = self.entry(segment_id, ns_seq)
        if entry is None or entry.kind != fmt.KIND_NAMESPACE:
            return None
        try:
            data = read_descriptor(self._open[segment_id].fd, self._files, entry)
        except OSError:
            return None
        return parse_descriptor(data) if data is not None else None

    def payload(self, segment_id: bytes, entry: Entry, into: memoryview | None = None) -> memoryview | None:
        """The stored bytes of a part, not verified; None if they cannot be read. ``into``: memory for them, if it has
        room; fresh memory costs more than the read."""
        segment = self._segment(segment_id)
        if segment is None:
            return None
        try:
            fits = into is not None and len(into) >= entry.stored_bytes
            data = (
                into[: entry.stored_bytes] if into is not None and fits else memoryview(bytearray(entry.stored_bytes))
            )
            if not self._mode.direct:
                self._files.read_into(segment.fd, data, entry.payload)
                return data
            direct = Descriptor.reopen(self._files, segment.fd, os.O_RDONLY | os.O_DIRECT)
            with contextlib.closing(direct):
                direct_io.read(self._files, direct.fd, data, entry.payload)
            return data
        except OSError:
            return None

    def stamps(self, segment_id: bytes) -> array[int]:
        """Access times of a segment's records in us, by seq; 0 or absent: not used since it was written. Read once."""
        if segment_id not in self._stamps:
            self._stamps[segment_id] = self._access_times.raw(segment_id)
            if len(self._stamps) > OPEN_MAX:
                self._stamps.popitem(last=False)
        return self._stamps[segment_id]

    def _segment(self, segment_id: bytes) -> _Open | None:
        found = self._open.pop(segment_id, None)
        if found is None:
            try:
                fd = self._files.open(file_name(segment_id), os.O_RDONLY, dir_fd=self._directory.sub("segments"))
            except OSError:
                return None
            if self._mode.direct:  # entries only: no readahead of payloads
                self._files.random_access(fd)
            found = _Open(fd, segment_id)
            if len(self._open) >= OPEN_MAX:
                self._close(self._open.popitem(last=False)[1])
        self._open[segment_id] = found
        return found

    def _read(self, segment: _Open, seq: int) -> Entry | None:
        first, later = fmt.slots_of_table(True), fmt.slots_of_table(False)
        number, slot = (0, seq) if seq < first else ((seq - first) // later + 1, (seq - first) % later)
        if number > TABLES_MAX:
            return None
        while len(segment.tables) <= number:  # the last slot of each table leads to the next one
            last = len(segment.tables) - 1
            slots = first if last == 0 else later
            chain = self._parse(segment, segment.tables[last] + (slots - 1) * ENTRY_BYTES)
            if chain is None or chain.kind != fmt.KIND_CHAIN or chain.payload <= segment.tables[last]:
                return None
            segment.tables.append(chain.payload)
        entry = self._parse(segment, segment.tables[number] + slot * ENTRY_BYTES)
        return entry if entry is not None and entry.seq == seq else None

    def _parse(self, segment: _Open, offset: int) -> Entry | None:
        return fmt.parse_entry(self._files.read(segment.fd, ENTRY_BYTES, offset), segment.seed)

    def _close(self, segment: _Open) -> None:
        with contextlib.suppress(OSError):
            self._files.close(segment.fd)

    def close(self) -> None:
        for segment in self._open.values():
            self._close(segment)
        self._open.clear()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
