"""A small file in ``run/`` that all processes of a store update: one JSON object, which a death cannot tear.

It consists of two slots that are written in turn, each with its own checksum: a death in the middle of a write leaves
the other slot. An exclusive flock serializes the updates. Blocks are allocated when the file is made, by ``reserve`` or
by the first update, and updates overwrite them: a disk that fills up later costs nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from kvfs.directory.root import Directory
from kvfs.format.checksums import checksum
from kvfs.system.descriptors import Descriptor

SLOT_BYTES_MIN, SLOT_BYTES_MAX = 4096, 1 << 20
WAIT_SECONDS = 0.2  # for the lock: an update takes a fraction of a millisecond, unless its process is stopped
TURNS_MAX = 1 << 62  # of a valid slot
READS_MAX = 3  # of the slots, until one of them is not in the middle of an update
_HEAD = struct.Struct("<QQI")  # check, turn, length of the JSON that follows


class _Slot(NamedTuple):
    turn: int  # the higher one is the valid one
    body: dict[str, Any]


_EMPTY = _Slot(0, {})


class SlotFile:
    """Owns one such file. What it holds is advice, and as little trusted as every other file of a store.

    ``slot_bytes``: of a new file; one that exists keeps its size.
    """

    def __init__(self, directory: Directory, name: str, slot_bytes: int) -> None:
        self._directory = directory
        self._files = directory.files
        self._name = name
        self._slot_bytes = slot_bytes

    def read(self) -> dict[str, Any]:
        """The object; empty if there is none. OSError."""
        try:
            file = Descriptor.open(self._files, self._name, os.O_RDONLY, dir_fd=self._directory.sub("run"))
        except FileNotFoundError:
            return {}
        for _ in range(READS_MAX):
            if (found := self._read(file)).turn:
                return found.body
        return {}

    def reserve(self) -> None:
        """Make the file with its blocks, unless it has them or another process keeps the lock. OSError."""
        file = self._opened()
        if not self._size(file) and self._locked(file):
            self._reserve(file)

    def update(self, change: Callable[[dict[str, Any], int], dict[str, Any]]) -> bool:
        """Replace the object by ``change(object, room)``; False if another process keeps the lock. OSError.

        The JSON of the result must have at most ``room`` bytes.
        """
        file = self._opened()
        if not self._locked(file):
            return False
        size = self._reserve(file)
        before, room = self._read(file), size - _HEAD.size
        body = json.dumps(change(before.body, room), separators=(",", ":")).encode()
        assert len(body) <= room, "callers bound what they store"
        head = _HEAD.pack(0, before.turn + 1, len(body))[8:]
        slot = checksum(head + body).to_bytes(8, "little") + head + body
        self._files.write_all(file.fd, [slot], (before.turn + 1) % 2 * size)
        return True

    def _reserve(self, file: Descriptor) -> int:
        """Bytes of each slot."""
        size = self._size(file)
        if not size:
            size = self._slot_bytes
            self._files.truncate(file.fd, 0)  # one that is too large would never be read
            self._files.write_all(file.fd, [bytes(2 * size)], 0)
        return size

    def _opened(self) -> Descriptor:
        """The file. It is locked as long as the result lives."""
        run = self._directory.sub("run")
        with contextlib.suppress(FileExistsError):
            return Descriptor.create(self._files, self._name, self._directory.file_mode, dir_fd=run)
        return Descriptor.open(self._files, self._name, os.O_RDWR, dir_fd=run)

    def _locked(self, file: Descriptor) -> bool:
        end = self._files.monotonic() + WAIT_SECONDS
        while not self._files.flock(file.fd, fcntl.LOCK_EX):
            if self._files.monotonic() >= end:
                return False
            self._files.sleep(0.001)
        return True

    def _size(self, file: Descriptor) -> int:
        """Bytes of each slot; 0 of a file that has none yet."""
        size = self._files.fstat(file.fd).st_size
        return size // 2 if 2 * SLOT_BYTES_MIN <= size <= 2 * SLOT_BYTES_MAX else 0

    def _read(self, file: Descriptor) -> _Slot:
        size = self._size(file)
        data = self._files.read(file.fd, 2 * size, 0)
        return max((_parse(data[:size]), _parse(data[size:])), key=lambda slot: slot.turn)


def _parse(data: bytes) -> _Slot:
    """A slot's content; empty for bytes that are not one."""
    if len(data) < _HEAD.size:
        return _EMPTY
    check, turn, length = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    if end > len(data) or turn >= TURNS_MAX or checksum(data[8:end]) != check:
        return _EMPTY
    try:
        body = json.loads(data[_HEAD.size : end])
    except (ValueError, RecursionError):
        return _EMPTY
    return _Slot(turn, body) if isinstance(body, dict) else _EMPTY
