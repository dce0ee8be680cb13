"""The files of pins, for what only reads them."""

from __future__ import annotations

import json
import re
import stat
from typing import NamedTuple

from kvfs.directory.root import Directory
from kvfs.errors import FormatError

_FILE = re.compile(r"[0-9a-f]{16}\Z")
PIN_BYTES_MAX = 8 << 20  # of one file: about 230,000 segment ids


class Pin(NamedTuple):
    """One pinned prefix."""

    name: str
    namespace: str  # digest, hex
    tokens: int
    created_us: int
    segments: tuple[str, ...]  # ids, hex


def list_pins(directory: Directory) -> list[Pin]:
    """All pins, by name. OSError if they cannot be read."""
    files = directory.files.listdir(directory.sub("pins"))
    found = (read_pin(directory, name) for name in files if _FILE.match(name))
    return sorted(pin for pin in found if pin is not None)


def pinned_segments(directory: Directory) -> set[bytes]:
    """Ids of the segments that pins protect. OSError if they cannot be read: then nothing may be evicted."""
    return {bytes.fromhex(s) for pin in list_pins(directory) for s in pin.segments}


def read_pin(directory: Directory, file: str) -> Pin | None:
    """The pin in a file of ``pins/``; None if the file holds none."""
    try:
        data = directory.read_small(file, PIN_BYTES_MAX, sub="pins")
    except FormatError:
        return None
    except OSError:
        if stat.S_ISREG(directory.files.stat(file, dir_fd=directory.sub("pins")).st_mode):
            raise
        return None  # a pin is a regular file: this was not made by kvfs
    if data is None:
        return None
    try:
        body = json.loads(data)
        pin = Pin(body["name"], body["namespace"], body["tokens"], body["created_us"], tuple(body["segments"]))
        kinds = (str, str, int, int)
        valid = all(type(v) is k for v, k in zip(pin, kinds, strict=False))
        return pin if valid and all(len(bytes.fromhex(s)) == 16 for s in pin.segments) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
