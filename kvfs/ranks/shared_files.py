"""The shared memory of one rank: a table that it alone writes, and the leases that its peers take.

    NAME-RANK        magic, bytes of the description (u64), ranks whose memory it reaches (u64, a bit for each), the
                     description (JSON), the entries of each group, the generation (u64) of each token slot
    NAME-RANK.ID     the leases: SLOTS of them, a state and one bit for each entry of all groups, then for each token
                     slot

Files of /dev/shm (or another directory of a memory file system), readable by one user only. The rank holds the table
under an exclusive flock while it is alive. What a table says is checked before it is used; it is as little trusted as a
file of the store.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import threading
import weakref
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvfs.errors import ConfigError
from kvfs.native.library import Library
from kvfs.native.shared_prefixes import (
    NONE,
    WAYS,
    Found,
    Page,
    SharedLeases,
    SharedPrefixes,
    entry_bytes,
    slot_bytes,
)
from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files

DIRECTORY = "/dev/shm"
MAGIC, FORMAT = b"kvfsrnk1", 2
HEAD_BYTES, REACHED_AT = 24, 16
DESCRIPTION_BYTES_MAX = 4 << 20
TABLE_BYTES_MAX = 1 << 36
SLOTS = 64  # leases on one rank at a time
GENERATION_BYTES = 8
SPARE = 3, 2  # entries for pages that the units of a rank can hold: each finds a place in one of two buckets


class Section(NamedTuple):
    """The entries of one group."""

    group: str
    offset: int
    buckets: int
    page: Page
    first: int  # number of its first entry among those of all groups

    @property
    def entries(self) -> int:
        return self.buckets * WAYS


class OwnTable:
    """The table and the leases of this rank. ``close`` removes them."""

    def __init__(
        self, files: Files, directory: str, name: str, native: Library, pages: Mapping[str, tuple[Page, int]],
        description: dict[str, Any], token_slots: int = 0,
    ) -> None:  # fmt: skip
        """``pages``: of each group what an entry holds, and how many units there are. ``token_slots``: of the only
        group, if its units are single tokens.

        ConfigError if a process that is alive has the rank, or if there is no room.
        """
        self._files, self._name = files, name
        self._folder = _open_directory(files, directory)
        self.instance = files.random(8).hex()
        sections, offset, first = list[Section](), 0, 0
        for group, (page, units) in pages.items():
            most = max(1, units // page.units * page.per_unit)
            buckets = -(-most * SPARE[0] // (SPARE[1] * WAYS))
            sections.append(Section(group, offset, buckets, page, first))
            offset += _aligned(buckets * WAYS * entry_bytes(native, page))
            first += buckets * WAYS
        leases = f"{name}.{self.instance}"
        text = json.dumps({
            **description, "format": FORMAT, "instance": self.instance, "leases": leases, "pid": os.getpid(),
            "sections": [[s.group, s.offset, s.buckets, *s.page, s.first] for s in sections],
            "token_slots": [offset, token_slots],
        }).encode()  # fmt: skip
        start, end = _aligned(HEAD_BYTES + len(text)), offset + _aligned(GENERATION_BYTES * token_slots)
        bits = first + token_slots
        self._leases_name = leases
        try:
            self._take_place(native)
            self._file, self._map = self._create(f"{name}.new-{self.instance}", start + end)
            assert files.flock(self._file.fd, fcntl.LOCK_EX), "a new file is locked"
            self._map[HEAD_BYTES : HEAD_BYTES + len(text)] = text
            self._map[:REACHED_AT] = MAGIC + len(text).to_bytes(8, "little")
            self._lease_file, self._lease_map = self._create(leases, SLOTS * slot_bytes(bits))
            files.rename(f"{name}.new-{self.instance}", name, src_dir_fd=self._folder.fd, dst_dir_fd=self._folder.fd)
        except OSError as exc:
            self._unlink(f"{name}.new-{self.instance}", leases)
            raise ConfigError(
                f"{directory} cannot hold the table of this rank ({exc}): pass directory=, of a memory file system "
                f"that all ranks share, with {start + end + SLOTS * slot_bytes(bits)} bytes free"
            ) from None
        base, lease_base = _address(self._map), _address(self._lease_map)
        self.sections = {s.group: s for s in sections}
        self._tables = {s.group: SharedPrefixes(native, base + start + s.offset, s.buckets, s.page) for s in sections}
        self._leases = SharedLeases(native, lease_base, SLOTS, bits)
        self._first_slot, self.token_slots = first, token_slots
        at = start + offset
        self.generations = memoryview(self._map)[at : at + GENERATION_BYTES * token_slots].cast("Q")
        self._holders = {group: array("I", [NONE]) * (units * page.per_unit) for group, (page, units) in pages.items()}
        self._stamp = 0
        self.reached = 0

    def reach(self, ranks: int) -> None:
        """The ranks that this one can pull from, as bits: processes that only plan read it."""
        self.reached = ranks
        self._map[REACHED_AT:HEAD_BYTES] = ranks.to_bytes(8, "little")

    def publish(self, group: str, hashes: bytes, subs: array[int], units: array[int], leaves: bytes) -> None:
        """Pages of ``group``: 32 bytes of hash, number within the unit, units, leaf table of each."""
        self._stamp += 1
        self._tables[group].publish(self._holders[group], hashes, subs, units, leaves, self._stamp)

    def retract(self, group: str, units: array[int]) -> array[int]:
        """No lookup finds a page in ``units`` from now on. The entries that it had, among those of all groups."""
        first = self.sections[group].first
        return array("I", [first + entry for entry in self._tables[group].retract(self._holders[group], units)])

    def lease_numbers(self, slots: array[int]) -> array[int]:
        """What ``leased`` takes for token slots."""
        return array("I", [self._first_slot + slot for slot in slots]) if self.token_slots else array("I")

    def leased(self, entries: array[int]) -> bool:
        """Whether a reader's lease on one of these, which were retracted, is still in force."""
        return any(self._leases.busy(now_ms(self._files), entries))

    def close(self) -> None:
        self._unlink(self._leases_name)
        with contextlib.suppress(OSError):  # another one may have taken the name of a rank that counted as dead
            mine, there = self._files.fstat(self._file.fd), self._files.stat(self._name, dir_fd=self._folder.fd)
            if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
                self._files.unlink(self._name, dir_fd=self._folder.fd)
        self._file.close()  # releases the lock: peers see that the rank is gone
        self._lease_file.close()
        self._folder.close()

    def _take_place(self, native: Library) -> None:
        """Remove what a dead rank of this name has left. ConfigError if it is alive."""
        try:
            before = Descriptor.open(self._files, self._name, os.O_RDONLY, dir_fd=self._folder.fd)
        except FileNotFoundError:
            before = None
        if before is not None:
            alive = not self._files.flock(before.fd, fcntl.LOCK_SH)
            before.close()
            if alive:
                raise ConfigError(
                    f"{self._name} belongs to a process that is alive: pass another rank, or another name"
                )
        old = [name for name in self._files.listdir(self._folder.fd) if name.startswith(f"{self._name}.")]
        self._unlink(*old)

    def _create(self, name: str, nbytes: int) -> tuple[Descriptor, mmap.mmap]:
        file = Descriptor.create(self._files, name, 0o600, dir_fd=self._folder.fd)
        self._files.fallocate(file.fd, 0, nbytes)  # now: a write to a full memory file system would end the process
        again = Descriptor.open(self._files, name, os.O_RDWR, dir_fd=self._folder.fd)
        try:  # a map duplicates its descriptor, for forked children too: not the one that holds the lock
            return file, mmap.mmap(again.fd, nbytes)
        finally:
            again.close()

    def _unlink(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self._files.unlink(name, dir_fd=self._folder.fd)


class PeerTable:
    """The table and the leases of another rank. Use ``open``. Lookups take no lock and touch no disk."""

    def __init__(
        self, files: Files, file: Descriptor, nbytes: int, start: int, leases: mmap.mmap, native: Library, text: Any
    ) -> None:  # fmt: skip
        """``start``: of the entries in the table, which has ``nbytes``. What it raises means: no table of a rank."""
        self.description: dict[str, Any] = text
        self.instance = str(text["instance"])
        self._files, self._file, self._lease_map = files, file, leases
        self._lock = threading.Lock()  # of the file: its number may be another file's once it is closed
        self.sections = {s.group: s for s in _sections(text, native, nbytes - start)}
        entries = sum(s.entries for s in self.sections.values())
        slots_at, self.token_slots = text["token_slots"]
        if any(type(n) is not int or not 0 <= n < TABLE_BYTES_MAX for n in (slots_at, self.token_slots)):
            raise ValueError("a table has wrong numbers of token slots")
        if slots_at % GENERATION_BYTES or slots_at + GENERATION_BYTES * self.token_slots > nbytes - start:
            raise ValueError("the token slots of a table reach beyond it")
        if len(leases) < SLOTS * slot_bytes(entries + self.token_slots):
            raise ValueError("the file of the leases is too short")
        self._map = files.map_bare(file.fd, nbytes, 0)
        weakref.finalize(self, self._map.close).atexit = False  # not at ``close``: a lookup may be under way
        base = self._map.address + start
        self._tables = {
            s.group: SharedPrefixes(native, base + s.offset, s.buckets, s.page) for s in self.sections.values()
        }
        self._leases = SharedLeases(native, _address(leases), SLOTS, entries + self.token_slots)
        self._first_slot = entries
        at = (ctypes.c_uint64 * self.token_slots).from_address(base + slots_at)
        self._generations = memoryview(at).cast("B").cast("Q")

    @classmethod
    def open(cls, files: Files, directory: str, name: str, native: Library) -> PeerTable | None:
        """None if there is no such rank, if it is dead, or if its table is not one of this format."""
        try:
            folder = _open_directory(files, directory)
        except ConfigError:
            return None
        try:
            file = Descriptor.open(files, name, os.O_RDONLY, dir_fd=folder.fd)
            nbytes = _size(files, file)
            head = files.read(file.fd, HEAD_BYTES, 0)
            size = int.from_bytes(head[8:REACHED_AT], "little")
            if head[:8] != MAGIC or size > min(DESCRIPTION_BYTES_MAX, nbytes - HEAD_BYTES):
                return None
            text = json.loads(files.read(file.fd, size, HEAD_BYTES))
            leases_name = text["leases"]
            if text["format"] != FORMAT or not str(leases_name).startswith(f"{name}.") or "/" in leases_name:
                return None
            lease_file = Descriptor.open(files, leases_name, os.O_RDWR, dir_fd=folder.fd)
            leases = mmap.mmap(lease_file.fd, _size(files, lease_file))
            found = cls(files, file, nbytes, _aligned(HEAD_BYTES + size), leases, native, text)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        finally:
            folder.close()
        return found if found.alive() else None

    def alive(self) -> bool:
        """Whether the process of the rank lives: it holds the lock of its table. False once this is closed."""
        with self._lock:
            if self._file.fd < 0:
                return False
            free = self._files.flock(self._file.fd, fcntl.LOCK_SH)
            if free:
                with contextlib.suppress(OSError):
                    self._files.flock(self._file.fd, fcntl.LOCK_UN)
            return not free

    def reached(self) -> int:
        """The ranks that this one can pull from, as bits."""
        return ctypes.c_uint64.from_address(self._map.address + REACHED_AT).value

    def held(self, group: str, hashes: bytes, misses_max: int) -> Found:
        """The entries of these chunks, until ``misses_max`` of them are not there."""
        table = self._tables.get(group)
        return Found(array("I"), array("Q")) if table is None else table.held(hashes, misses_max)

    def pages(self, group: str) -> SharedPrefixes:
        """The entries of a group that the table has."""
        return self._tables[group]

    def lease(self, found: Mapping[str, Found], seconds: float) -> tuple[int, int] | None:
        """Take a lease on these entries; None if SLOTS others are in force."""
        return self._take([(self.sections[group].first, some.entries) for group, some in found.items()], seconds)

    def lease_slots(self, slots: array[int], seconds: float) -> tuple[int, int] | None:
        """The same for token slots (u32). Ask ``generations`` afterwards."""
        return self._take([(self._first_slot, slots)], seconds)

    def generations(self, slots: Sequence[int]) -> Sequence[int]:
        """Of token slots: a number that is another one once the rank has retracted the slot. IndexError."""
        return list(map(self._generations.__getitem__, slots))

    def _take(self, entries: Sequence[tuple[int, array[int]]], seconds: float) -> tuple[int, int] | None:
        now = now_ms(self._files)
        nonce = int.from_bytes(self._files.random(3), "little") | 1
        return self._leases.take(nonce, now, now + max(1, int(seconds * 1000)), entries)

    def end_lease(self, lease: tuple[int, int]) -> None:
        self._leases.end(lease)

    def close(self) -> None:
        with self._lock:
            self._file.close()


def now_ms(files: Files) -> int:
    return int(files.monotonic() * 1000)


def _sections(text: Any, native: Library, room: int) -> Sequence[Section]:
    """The sections that a description names. ValueError unless they are within ``room`` bytes."""
    found, first = list[Section](), 0
    for group, offset, buckets, units, leaves, per_unit, given in text["sections"]:
        numbers = (offset, buckets, units, leaves, per_unit, given)
        if any(type(n) is not int or not 0 <= n < TABLE_BYTES_MAX for n in numbers) or not buckets or not per_unit:
            raise ValueError("a section of a table has wrong numbers")
        page = Page(units, leaves, per_unit)
        if offset % 8 or given != first or offset + buckets * WAYS * entry_bytes(native, page) > room:
            raise ValueError("a section of a table reaches beyond it")
        found.append(Section(str(group), offset, buckets, page, first))
        first += buckets * WAYS
    return found


def _open_directory(files: Files, path: str) -> Descriptor:
    try:
        return Descriptor.owning(files, files.open_root(path))
    except OSError as exc:
        raise ConfigError(
            f"{path} cannot be opened ({exc.strerror}): pass directory=, one that all ranks share"
        ) from None


def _size(files: Files, file: Descriptor) -> int:
    """Bytes of a file of this user. ValueError for the file of another one, and for one that no rank has made."""
    state = files.fstat(file.fd)
    if state.st_uid != os.geteuid():
        raise ValueError("the file belongs to another user")
    if not HEAD_BYTES <= state.st_size <= TABLE_BYTES_MAX:
        raise ValueError("the file is too short, or too long")
    return state.st_size


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
