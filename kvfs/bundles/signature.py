"""Signatures of bundles: BLAKE2b-256 of the manifest, which has the digest of each segment, keyed with a file.

The key is symmetric: a process that can check a signature can also sign.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from kvfs.system.key_files import read_key_file

FIELD = "signature"  # of a manifest
KEY_BYTES_MIN, KEY_BYTES_MAX = 16, 4096  # of a key file: 128 random bits or more


def read_key(path: str) -> bytes:
    """The key in a file; all bytes of the file count. ConfigError if it is not one that others cannot read."""
    data = read_key_file(path, KEY_BYTES_MIN, KEY_BYTES_MAX, "head -c 32 /dev/urandom writes one")
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
