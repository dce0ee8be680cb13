"""Inputs of the fuzzer, and stand-ins for the files and transactions that parsers read them from.

An input is a sparse file: a hostile store may hold larger files than a corpus can.
"""

from __future__ import annotations

import base64
import bisect
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvfs.system.files import Files

BYTES_READ_MAX = 64 << 20  # of one input: a parser that reads more loops
CALLS_MAX = 20_000


class TooMuchError(Exception):
    """A parser reads endlessly."""


@dataclass
class Image:
    """A sparse file: pieces at ascending offsets, zeros between them."""

    size: int
    pieces: list[tuple[int, bytes]]

    @classmethod
    def of(cls, data: bytes) -> Image:
        return cls(len(data), [(0, data)])

    def bytes(self) -> bytes:
        """All bytes; for inputs that are not segments."""
        assert self.size <= 16 << 20, "a sparse input in the wrong place"
        return self.read(0, self.size)

    def read(self, offset: int, nbytes: int) -> bytes:
        nbytes = max(0, min(nbytes, self.size - offset))
        out = bytearray(nbytes)
        for at, data in self.pieces:
            first, last = max(at, offset), min(at + len(data), offset + nbytes)
            if first < last:
                out[first - offset : last - offset] = data[first - at : last - at]
        return bytes(out)

    def write(self, offset: int, data: bytes) -> None:
        """Later pieces overwrite earlier ones."""
        self.pieces.append((offset, data))
        self.size = max(self.size, offset + len(data))

    def copy(self) -> Image:
        return Image(self.size, list(self.pieces))

    def packed(self) -> dict[str, Any]:
        """As JSON data, for a corpus."""
        pieces = [[at, base64.b85encode(zlib.compress(data, 9)).decode()] for at, data in self.pieces]
        return {"size": self.size, "pieces": pieces}

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> Image:
        pieces = [(at, zlib.decompress(base64.b85decode(text))) for at, text in packed["pieces"]]
        return cls(packed["size"], pieces)


class ImageFiles(Files):
    """Files whose descriptors are images; a budget bounds the bytes and calls of all reads."""

    def __init__(self, names: dict[str, Image]) -> None:
        self.names = names
        self._open: list[Image] = []
        self._left, self._calls = BYTES_READ_MAX, CALLS_MAX

    def now_us(self) -> int:
        return 1_800_000_000_000_000

    def listdir(self, dir_fd: int) -> list[str]:
        return list(self.names)

    def open(self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int, **more: Any) -> int:
        if name not in self.names:
            raise FileNotFoundError(name)
        self._open.append(self.names[name])
        fd = len(self._open) - 1
        more.get("keep", []).append(fd)
        return fd

    def close(self, fd: int) -> None:
        pass

    def close_kept(self, kept: list[int | None]) -> None:
        kept.pop()  # the number of an image: a real descriptor of the process may have the same one

    def unlink(self, name: str, *, dir_fd: int) -> None:
        del self.names[name]

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        done = 0
        for buffer in buffers:
            data = self._open[fd].read(offset + done, len(buffer))
            buffer[: len(data)] = data
            done += len(data)
        self._left, self._calls = self._left - done, self._calls - 1
        if self._left < 0 or self._calls < 0:
            raise TooMuchError(f"more than {BYTES_READ_MAX} bytes or {CALLS_MAX} reads")
        return done

    def fstat(self, fd: int) -> os.stat_result:
        return _stat(self._open[fd])

    def stat(self, name: str, *, dir_fd: int) -> os.stat_result:
        return _stat(self.names[name])


def _stat(image: Image) -> os.stat_result:
    blocks = sum(len(data) for _, data in image.pieces) // 512
    fields: dict[str, Any] = {"st_blocks": blocks}
    return os.stat_result((0o100600, 1, 1, 1, 0, 0, image.size, 0, 0, 0), fields)


class ImageDirectory:
    """The part of ``Directory`` that parsers use."""

    path = "/store"
    read_only = False
    file_mode = 0o600

    def __init__(self, **names: Image) -> None:
        self.files = ImageFiles({name.replace("__", "."): image for name, image in names.items()})
        self.root = 0

    def sub(self, name: str) -> int:
        return 0

    def read_small(self, name: str, limit: int, *, sub: str = "") -> bytes | None:
        from kvfs.directory.root import Directory

        return Directory.read_small(self, name, limit, sub=sub)  # type: ignore[arg-type]


class DictTxn:
    """A transaction on dictionaries, one per database, with the calls of LMDB that kvfs uses."""

    def __init__(self) -> None:
        self.dbs: dict[str, dict[bytes, bytes]] = {}

    def get(self, key: bytes, *, db: str) -> bytes | None:
        return self.dbs.get(db, {}).get(key)

    def put(self, key: bytes, value: bytes, *, db: str) -> None:
        assert 0 < len(key) <= 511, "LMDB refuses the key"
        self.dbs.setdefault(db, {})[key] = value

    def delete(self, key: bytes, *, db: str) -> None:
        self.dbs.get(db, {}).pop(key, None)

    def stat(self, db: str) -> dict[str, int]:
        rows = self.dbs.get(db, {})
        nbytes = sum(len(key) + len(value) for key, value in rows.items())
        return {"entries": len(rows), "branch_pages": 0, "leaf_pages": -(-nbytes // 4096), "overflow_pages": 0}

    @contextmanager
    def cursor(self, *, db: str) -> Iterator[DictCursor]:
        yield DictCursor(self.dbs.get(db, {}))


class DictCursor:
    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self._rows, self._keys, self._at = rows, sorted(rows), 0

    def set_range(self, key: bytes) -> bool:
        self._at = bisect.bisect_left(self._keys, key)
        return self._at < len(self._keys)

    def next(self) -> bool:
        self._at += 1
        return self._at < len(self._keys)

    def key(self) -> bytes:
        return self._keys[self._at]

    def item(self) -> tuple[bytes, bytes]:
        return self.key(), self._rows[self.key()]

    def iternext(self, *, keys: bool = True, values: bool = True) -> Iterator[bytes]:
        assert keys and not values
        return iter(self._keys[self._at :])

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return ((key, self._rows[key]) for key in self._keys[self._at :])
