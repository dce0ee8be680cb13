"""How much memory this process may use: the host's, or its cgroup's limit if that is lower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

CGROUPS, SELF = "/sys/fs/cgroup", "/proc/self/cgroup"


def memory_available() -> int | None:
    """Bytes by which the page cache of this process may grow."""
    return min((n for n in (_meminfo("MemAvailable:"), cgroup_limit()) if n is not None), default=None)


def memory_limit() -> int | None:
    """Bytes that the processes of this cgroup may use in sum."""
    return min((n for n in (_meminfo("MemTotal:"), cgroup_limit()) if n is not None), default=None)


def cgroup_limit() -> int | None:
    """The lowest memory limit, in bytes, of this process's cgroup and of its ancestors (version 2 or 1), or None.

    The innermost one often has no limit: batch systems and supervisors set it on a group of the whole job.
    """
    limits = []
    for folder, name in _cgroups():
        with contextlib.suppress(OSError, ValueError), open(f"{folder}/{name}", encoding="ascii") as file:
            limits.append(int(file.read()))  # "max" in version 2, nearly 2**63 in version 1: no limit
    return min((n for n in limits if n < 1 << 60), default=None)


def _cgroups() -> Iterator[tuple[str, str]]:
    """(folder, name of the limit's file) of this process's cgroups and of their ancestors."""
    found = {"": (CGROUPS, "memory.max"), "memory": (f"{CGROUPS}/memory", "memory.limit_in_bytes")}
    paths = dict.fromkeys(found, "")  # a container may see its own cgroup as the root
    with contextlib.suppress(OSError, ValueError), open(SELF, encoding="utf-8") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            kind = "memory" if "memory" in controllers.split(",") else controllers
            if kind in paths and "/.." not in path:
                paths[kind] = path.strip("/")
    for kind, (root, name) in found.items():
        parts = paths[kind].split("/") if paths[kind] else []
        for depth in range(len(parts) + 1):
            yield "/".join([root, *parts[:depth]]), name


def _meminfo(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None
