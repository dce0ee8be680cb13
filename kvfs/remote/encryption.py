"""Objects that a reader of the bucket cannot read, and a writer of it cannot make, without the key.

A wrapper of an object store: AES-256-GCM over the bodies, in blocks, so that a range of an object verifies alone, and
AES-256-SIV over the chunk hashes in names, so that a name tells no prompt and is the same on all hosts with the key.
docs/format-remote.md has the bytes. The only module that imports ``cryptography``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvfs.errors import ConfigError
from kvfs.remote.names import MARKER, SEALED_BYTES, parse_name
from kvfs.remote.object_store import Fetched, Listed, ObjectStore
from kvfs.remote.page_object import HEAD_BYTES
from kvfs.system.key_files import read_key_file

MAGIC = b"KVFSENC1"
KEY_BYTES, KEY_ID_BYTES, SALT_BYTES, TAG_BYTES = 32, 8, 32, 16
PREFIX_BYTES = len(MAGIC) + KEY_ID_BYTES + SALT_BYTES  # of an object, before its first block
#: The first block is what a question for the table of an object reads; larger ones cost less time per byte.
FIRST_BYTES, BLOCK_BYTES = HEAD_BYTES, 256 << 10
KEYS_MAX = 4  # of a key file: a name that is missing is asked for once with each
KEY_FILE_BYTES_MAX = 4096
REMEDY = "(umask 077; openssl rand -hex 32 > FILE) writes one"
_KEY = re.compile(rb"[0-9a-fA-F]{64}\Z")


class _Key:
    """One key: its id, which is public, and what is derived from it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = self._derived(KEY_ID_BYTES, b"key id")
        self._names: Any = _library().AESSIV(self._derived(64, b"names"))

    def body(self, salt: bytes, name: str) -> Any:
        """The cipher of one object, which is stored under this name."""
        return _library().AESGCM(self._derived(KEY_BYTES, b"object " + name.encode(), salt))

    def seal_name(self, chunk: bytes, place: bytes) -> bytes:
        return bytes(self._names.encrypt(chunk, [place]))

    def open_name(self, sealed: bytes, place: bytes) -> bytes | None:
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._names.decrypt(sealed, [place]))
        except InvalidTag:
            return None

    def _derived(self, length: int, purpose: bytes, salt: bytes = b"") -> bytes:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return bytes(HKDF(SHA256(), length, salt, b"kvfs remote 1 " + purpose).derive(self._secret))


class Keys:
    """The keys of a bucket. The first one encrypts; objects of all of them are read."""

    def __init__(self, secrets: list[bytes]) -> None:
        self.all = [_Key(secret) for secret in secrets]
        self.by_id = {key.id: key for key in self.all}
        self.ids = frozenset(key.id.hex() for key in self.all)

    @property
    def current(self) -> _Key:
        return self.all[0]


def read_keys(path: str) -> Keys:
    """The keys of a file: 64 hex digits in each line, the one that encrypts first. ConfigError names the remedy."""
    data = read_key_file(path, 2 * KEY_BYTES, KEY_FILE_BYTES_MAX, REMEDY)
    lines = [line for line in (part.strip() for part in data.split(b"\n")) if line and not line.startswith(b"#")]
    if not 1 <= len(lines) <= KEYS_MAX or not all(map(_KEY.match, lines)):
        raise ConfigError(
            f"key file {path}: give 1 to {KEYS_MAX} lines of 64 hex digits, the newest key first; {REMEDY}"
        )
    return Keys([bytes.fromhex(line.decode()) for line in lines])


class EncryptedObjects:
    """The objects of ``inner`` as they are before encryption. What was not made with one of the keys, or not under its
    name, ends before its first block that does not verify: at its beginning, if none does."""

    def __init__(self, inner: ObjectStore, keys: Keys) -> None:
        self._inner, self._keys = inner, keys

    def get(
        self, name: str, start: int, length: int, room: memoryview | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> Fetched | None:  # fmt: skip
        """One request, if ``start`` is in the first block; else two. As many again for each older key, if there is
        no such object. ``arrived`` is not called."""
        if name == MARKER:
            return self._inner.get(name, start, length)
        first, begin = _block_at(start)
        _, end = _block_at(start + length - 1)
        until = sealed_size(end + _block_bytes(end))
        for stored in self._stored_names(name):
            prefix = None
            if first:
                prefix = self._inner.get(stored, 0, PREFIX_BYTES)
                if prefix is None:
                    continue
            at = _sealed_at(first, begin) if first else 0
            found = self._inner.get(stored, at, until - at)
            if found is None:
                continue
            body = found.data
            if prefix is None:
                prefix, body = Fetched(body[:PREFIX_BYTES], found.size), body[PREFIX_BYTES:]
            plain, whole = self._opened(stored, prefix.data, body, first, begin, found.size, room)
            size = plain_size(found.size) if whole else begin + len(plain)
            return Fetched(plain[start - begin :][:length], size)
        return None

    def put_new(self, name: str, data: memoryview | bytes) -> bool:
        if name == MARKER:
            return self._inner.put_new(name, data)
        stored = self._stored_names(name)[0]
        return self._inner.put_new(stored, self._sealed(stored, data))

    def replace(self, name: str, data: memoryview | bytes) -> None:
        if name == MARKER:
            self._inner.replace(name, data)
            return
        names, parsed = self._stored_names(name), parse_name(name)
        # the object that was used may have a name of an older key
        for stored in names if parsed is not None and parsed.kind == "used" else names[:1]:
            self._inner.replace(stored, self._sealed(stored, data))

    def delete(self, name: str) -> None:
        for stored in self._stored_names(name):
            self._inner.delete(stored)

    def listing(self, prefix: str) -> Iterator[Listed]:
        """Without the objects that have plain names of chunks: nothing reads those here. Names that none of the keys
        has made are listed as they are stored."""
        for found in self._inner.listing(prefix):
            parsed = parse_name(found.name)
            if found.name == MARKER:
                yield found
            elif parsed is None or not parsed.chunk or parsed.sealed:
                yield Listed(self._plain_name(found.name), plain_size(found.size), found.modified)

    def folders(self, prefix: str) -> list[str]:
        return self._inner.folders(prefix)

    def close(self) -> None:
        self._inner.close()

    # -- names -------------------------------------------------------------------------------

    def _stored_names(self, name: str) -> list[str]:
        """The names that an object may have in the bucket, that of the current key first."""
        parsed = parse_name(name)
        if parsed is None or not parsed.chunk or parsed.sealed:
            return [name]
        folder, place = name[: -2 * len(parsed.chunk)], parsed.place
        return [folder + key.seal_name(parsed.chunk, place).hex() for key in self._keys.all]

    def _plain_name(self, stored: str) -> str:
        parsed = parse_name(stored)
        if parsed is None or not parsed.sealed:
            return stored
        for key in self._keys.all:
            chunk = key.open_name(parsed.chunk, parsed.place)
            if chunk is not None:
                return stored[: -2 * SEALED_BYTES] + chunk.hex()
        return stored

    # -- bodies ------------------------------------------------------------------------------

    def _sealed(self, stored: str, data: memoryview | bytes) -> memoryview:
        view = memoryview(data).cast("B")
        key, salt = self._keys.current, os.urandom(SALT_BYTES)
        cipher, out = key.body(salt, stored), memoryview(bytearray(sealed_size(len(view))))
        out[:PREFIX_BYTES] = MAGIC + key.id + salt
        for number, begin, nbytes in blocks(len(view)):
            at = _sealed_at(number, begin)
            last = begin + nbytes == len(view)
            cipher.encrypt_into(
                _nonce(number, last), view[begin : begin + nbytes], None, out[at : at + nbytes + TAG_BYTES]
            )
        return out

    def _opened(
        self, stored: str, prefix: memoryview, body: memoryview, number: int, begin: int, size: int,
        room: memoryview | None,
    ) -> tuple[memoryview, bool]:  # fmt: skip
        """(the plain bytes of the whole blocks of ``body``, from block ``number`` on; whether all of them verify).

        ``body`` may end early, if the answer was cut short: the rest of its last block is left out then. The bytes
        are in ``room``, if that is large enough.
        """
        from cryptography.exceptions import InvalidTag

        total = plain_size(size)
        if len(prefix) < PREFIX_BYTES:
            return memoryview(b""), size > PREFIX_BYTES  # the answer was cut short
        known = self._keys.by_id.get(bytes(prefix[len(MAGIC) : len(MAGIC) + KEY_ID_BYTES]))
        if prefix[: len(MAGIC)] != MAGIC or known is None or sealed_size(total) != size:
            return memoryview(b""), False
        cipher = known.body(bytes(prefix[-SALT_BYTES:]), stored)
        most = max(0, min(len(body), total - begin))
        if room is None or len(room) < most:
            room = memoryview(bytearray(most))
        done = at = 0
        while begin + done <= total:
            last = begin + done + _block_bytes(begin + done) >= total
            nbytes = total - begin - done if last else _block_bytes(begin + done)
            if len(body) < at + nbytes + TAG_BYTES:
                break
            try:
                cipher.decrypt_into(
                    _nonce(number, last), body[at : at + nbytes + TAG_BYTES], None, room[done : done + nbytes]
                )
            except InvalidTag:
                return room[:done], False
            number, done, at = number + 1, done + nbytes, at + nbytes + TAG_BYTES
            if last:
                break
        return room[:done], True


class Block(NamedTuple):
    number: int
    begin: int  # in the plain object
    nbytes: int


def blocks(size: int) -> Iterator[Block]:
    """The blocks of a plain object of this size; an empty object has one, which is empty."""
    number = begin = 0
    while begin < size or not number:
        nbytes = min(_block_bytes(begin), size - begin)
        yield Block(number, begin, nbytes)
        number, begin = number + 1, begin + nbytes


def sealed_size(size: int) -> int:
    """Of an object whose plain size this is."""
    more = max(0, size - FIRST_BYTES)
    return PREFIX_BYTES + size + TAG_BYTES * (1 + -(-more // BLOCK_BYTES))


def plain_size(size: int) -> int:
    """Of an object that is stored in so many bytes; of one that kvfs did not make, some number from 0 on."""
    rest = size - PREFIX_BYTES - TAG_BYTES
    more = max(0, rest - FIRST_BYTES)
    return max(0, rest - TAG_BYTES * -(-more // (BLOCK_BYTES + TAG_BYTES)))


def _block_at(offset: int) -> tuple[int, int]:
    """(number, beginning) of the block with this byte of a plain object."""
    if offset < FIRST_BYTES:
        return 0, 0
    number = (offset - FIRST_BYTES) // BLOCK_BYTES
    return 1 + number, FIRST_BYTES + number * BLOCK_BYTES


def _block_bytes(begin: int) -> int:
    """Of a whole block that begins there."""
    return BLOCK_BYTES if begin else FIRST_BYTES


def _sealed_at(number: int, begin: int) -> int:
    """Where a block is stored that begins there in the plain object."""
    return PREFIX_BYTES + begin + TAG_BYTES * number


def _nonce(number: int, last: bool) -> bytes:
    """Of one block: each object has a key of its own. The last block is marked, so no object ends early."""
    return number.to_bytes(11, "big") + bytes([last])


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import aead
    except ImportError:
        raise ConfigError("remote.key_file needs the package cryptography: pip install 'kvfs[remote]'") from None
    return aead
