"""Signatures of bundles: BLAKE2b-256 of the manifest, which has the digest of each segment, keyed with a file.

The key is symmetric: a process that can check a signature can also sign.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Mapping
from typing import Any

from kvfs.errors import ConfigError

FIELD = "signature"  # of a manifest
KEY_BYTES_MIN, KEY_BYTES_MAX = 16, 4096  # of a key file: 128 random bits or more


def read_key(path: str) -> bytes:
    """The key in a file; all bytes of the file count. ConfigError if it is not one that others cannot read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise ConfigError(f"key file {path}: {exc.strerror}; head -c 32 /dev/urandom writes one") from None
    try:
        st = os.fstat(fd)
        data = os.read(fd, KEY_BYTES_MAX + 1) if stat.S_ISREG(st.st_mode) else b""
    except OSError as exc:
        raise ConfigError(f"key file {path}: {exc.strerror}") from None
    finally:
        os.close(fd)
    if not KEY_BYTES_MIN <= len(data) <= KEY_BYTES_MAX:
        raise ConfigError(f"key file {path} is no file of {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes")
    if st.st_mode & 0o007:
        raise ConfigError(f"key file {path}: other users have access; chmod o-rwx, and make a new key")
    return hashlib.blake2b(b"kvfs bundle key 1\n" + data, digest_size=32).digest()


def signature(manifest: Mapping[str, Any], key: bytes) -> str:
    """64 hex digits for a manifest without its signature. ValueError if the values are not plain JSON."""
    body = {name: value for name, value in manifest.items() if name != FIELD}
    data = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return hashlib.blake2b(data, key=key, digest_size=32).hexdigest()


def is_signed(manifest: Mapping[str, Any], key: bytes) -> bool:
    """Whether a manifest was signed with this key."""
    given = manifest.get(FIELD)
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, signature(manifest, key))
