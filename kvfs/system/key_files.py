"""Files with keys: read whole, and refused if other users could read them."""

from __future__ import annotations

import os
import stat

from kvfs.errors import ConfigError


def read_key_file(path: str, least: int, most: int, remedy: str) -> bytes:
    """All bytes of a file of ``least`` to ``most`` bytes. ConfigError, which names the path and never the content;
    ``remedy`` tells how such a file is written."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise ConfigError(f"key file {path}: {exc.strerror}; {remedy}") from None
    try:
        st = os.fstat(fd)
        data = os.read(fd, most + 1) if stat.S_ISREG(st.st_mode) else b""
    except OSError as exc:
        raise ConfigError(f"key file {path}: {exc.strerror}") from None
    finally:
        os.close(fd)
    if not least <= len(data) <= most:
        raise ConfigError(f"key file {path} is no file of {least} to {most} bytes")
    if st.st_mode & 0o007:
        raise ConfigError(f"key file {path}: other users have access; chmod o-rwx, and make a new key")
    return data
