"""How much memory this process may use: of the host, or of its cgroup if that is less."""

from __future__ import annotations

import contextlib


def memory_available() -> int | None:
    """Bytes that the page cache of this process may grow by."""
    return min((n for n in (_meminfo("MemAvailable:"), cgroup_limit()) if n is not None), default=None)


def memory_limit() -> int | None:
    """Bytes that there are for this process and those of its cgroup."""
    return min((n for n in (_meminfo("MemTotal:"), cgroup_limit()) if n is not None), default=None)


def cgroup_limit() -> int | None:
    """The memory limit of this process's cgroup (version 2, or 1), or None."""
    paths = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as lines:
        paths = [f"/sys/fs/cgroup{line.strip()[3:]}/memory.max" for line in lines if line.startswith("0::")] + paths
    for path in paths:
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            value = int(file.read())
            if value < 1 << 60:
                return value
    return None


def _meminfo(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None
