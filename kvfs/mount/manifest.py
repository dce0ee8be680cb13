"""The bytes of a manifest: what a file of the mount consists of. No I/O.

All integers are little endian::

    0   8  magic "kvfsfil1"
    8   8  hits: how often the file was opened         \\
    16  8  expires: seconds since 1970, 0 for never     | may change in place
    24  8  XXH3-64 of bytes 8 to 23                    /
    32  8  size of the file in bytes
    40  4  pieces
    44  4  whole pages of PAGE_BYTES
    48  4  bytes in the last page, 0 if there is none
    52  4  size of the last page, 0 if there is none
    56  8  XXH3-64 of bytes 32 to 55 and of all that follows
    64     pieces of 16 bytes: offset in the stream, length; in the order of the file
           keys of 32 bytes: SHA-256 of each whole page, then of the last page, zeros after its bytes included

The *stream* is what the pages hold: the whole pages, then the last one. A file of an unknown format is its own stream,
in one piece. A manifest is untrusted: ``parse`` accepts nothing that points outside the stream.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvfs.format.checksums import checksum

MAGIC = b"kvfsfil1"
PAGE_BYTES = 64 << 10  # of a whole page: docs/decisions/0030 has the experiment
LAST_BYTES_MIN = 4 << 10  # smallest last page: a block of a segment
KEY_BYTES = 32
PIECES_MAX = 4096
MANIFEST_BYTES_MAX = 64 << 20  # about two million pages, 128 GiB of one file
FILE_BYTES_MAX = (MANIFEST_BYTES_MAX // KEY_BYTES - 4096) * PAGE_BYTES
_STATE = struct.Struct("<QQ")
_SHAPE = struct.Struct("<QIIII")
HEAD_BYTES = 64


class Piece(NamedTuple):
    """Neighbouring bytes of a file that are neighbours in its stream."""

    at: int  # offset in the stream
    nbytes: int


class State(NamedTuple):
    """What changes without a change of content."""

    hits: int = 0
    expires: int = 0

    def pack(self) -> bytes:
        body = _STATE.pack(min(self.hits, 2**64 - 1), self.expires)
        return body + checksum(body).to_bytes(8, "little")


STATE_AT, STATE_BYTES = 8, 24
NEW = State()
DAMAGED = State(0, 1)  # nothing is known of the lifetime: it has ended


@dataclass(frozen=True)
class Manifest:
    """What a file consists of. ``check`` tells two contents of one name apart."""

    size: int
    pieces: tuple[Piece, ...]
    keys: tuple[bytes, ...]  # of the whole pages, then of the last one
    last_bytes: int = 0  # bytes of the file in the last page
    last_page: int = 0  # its size
    state: State = NEW
    check: int = field(default=0, compare=False)

    @property
    def whole_pages(self) -> int:
        return len(self.keys) - (1 if self.last_page else 0)

    @property
    def stored_bytes(self) -> int:
        return self.whole_pages * PAGE_BYTES + self.last_page

    def pack(self) -> bytes:
        shape = _SHAPE.pack(self.size, len(self.pieces), self.whole_pages, self.last_bytes, self.last_page)
        body = b"".join([piece.to_bytes(8, "little") for both in self.pieces for piece in both]) + b"".join(self.keys)
        return MAGIC + self.state.pack() + shape + _check(shape, body).to_bytes(8, "little") + body

    def checked(self) -> Manifest:
        """This manifest with the check that ``parse`` would give it."""
        return replace(self, check=int.from_bytes(self.pack()[56:64], "little"))


def last_page_bytes(nbytes: int) -> int:
    """Size of the last page for so many bytes: a power of two, so that few namespaces suffice."""
    return max(LAST_BYTES_MIN, 1 << (nbytes - 1).bit_length()) if nbytes else 0


def parse(data: bytes) -> Manifest | None:
    """The manifest in ``data``; None if it is damaged, unfinished or not one."""
    if not HEAD_BYTES <= len(data) <= MANIFEST_BYTES_MAX or data[:8] != MAGIC:
        return None
    size, count, whole, last_bytes, last_page = _SHAPE.unpack_from(data, 32)
    check = int.from_bytes(data[56:64], "little")
    body = data[HEAD_BYTES:]
    keys_at = count * 16
    keys = whole + (1 if last_page else 0)
    if count > PIECES_MAX or len(body) != keys_at + keys * KEY_BYTES or check != _check(data[32:56], body):
        return None
    pieces = tuple(Piece(*pair) for pair in struct.iter_unpack("<QQ", body[:keys_at]))
    if last_page != last_page_bytes(last_bytes) or last_bytes >= PAGE_BYTES:
        return None
    stream = whole * PAGE_BYTES + last_bytes
    if size != stream or sum(p.nbytes for p in pieces) != size or any(p.at + p.nbytes > stream for p in pieces):
        return None
    names = tuple(body[at : at + KEY_BYTES] for at in range(keys_at, len(body), KEY_BYTES))
    return Manifest(size, pieces, names, last_bytes, last_page, parse_state(data[STATE_AT:32]), check)


def parse_state(data: bytes) -> State:
    """The part that may change; ``DAMAGED`` if it does not verify."""
    if len(data) != STATE_BYTES or checksum(data[:16]).to_bytes(8, "little") != data[16:]:
        return DAMAGED
    return State(*_STATE.unpack(data[:16]))


def _check(shape: bytes, body: bytes) -> int:
    return checksum(shape + body)
