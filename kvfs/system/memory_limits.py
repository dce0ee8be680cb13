"""How much memory this process may use: of the host, or of its cgroup if that is less."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

CGROUPS, SELF = "/sys/fs/cgroup", "/proc/self/cgroup"


def memory_available() -> int | None:
    """Bytes that the page cache of this process may grow by."""
    return min((n for n in (_meminfo("MemAvailable:"), cgroup_limit()) if n is not None), default=None)


def memory_limit() -> int | None:
    """Bytes that there are for this process and those of its cgroup."""
    return min((n for n in (_meminfo("MemTotal:"), cgroup_limit()) if n is not None), default=None)


def cgroup_limit() -> int | None:
    """The least memory limit of this process's cgroup and of those around it (version 2, or 1), or None.

    What limits is often not the innermost one: batch systems and supervisors put processes into groups of a job's.
    """
    limits = []
    for folder, name in _cgroups():
        with contextlib.suppress(OSError, ValueError), open(f"{folder}/{name}", encoding="ascii") as file:
            limits.append(int(file.read()))  # "max" in version 2, nearly 2**63 in version 1: none
    return min((n for n in limits if n < 1 << 60), default=None)


def _cgroups() -> Iterator[tuple[str, str]]:
    """(folder, file of the limit) of this process's cgroups and of all around them."""
    found = {"": (CGROUPS, "memory.max"), "memory": (f"{CGROUPS}/memory", "memory.limit_in_bytes")}
    paths = dict.fromkeys(found, "")  # a container may see its own as the root alone, whatever it is called
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
