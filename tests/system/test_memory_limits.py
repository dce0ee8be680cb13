"""How much memory there is: any of the cgroups that enclose a process may set the limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfs.system import memory_limits

GIB = 1 << 30


@pytest.mark.parametrize(
    ("own", "limits", "least"),
    [
        ("0::/job/step/task", {"job/memory.max": 8 * GIB, "job/step/task/memory.max": "max"}, 8 * GIB),
        ("0::/job/step/task", {"job/memory.max": 8 * GIB, "job/step/memory.max": 4 * GIB}, 4 * GIB),
        ("0::/job/task", {"job/memory.max": 2 * GIB, "job/task/memory.max": 4 * GIB}, 2 * GIB),
        ("0::/", {"memory.max": GIB}, GIB),  # a container with a cgroup namespace
        ("0::/../other", {"memory.max": GIB}, GIB),
        ("0::/a:b", {"a:b/memory.max": GIB}, GIB),
        ("4:memory:/job/task", {"memory/job/memory.limit_in_bytes": GIB}, GIB),
        ("4:cpu,memory:/on/the/host", {"memory/memory.limit_in_bytes": GIB}, GIB),  # a container of version 1
        ("4:memory:/\n0::/job", {"memory/memory.limit_in_bytes": (1 << 63) - 4096, "job/memory.max": "max"}, None),
        ("", {}, None),
    ],
)
def test_the_lowest_limit_of_all_enclosing_cgroups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, limits: dict[str, object], least: int | None
) -> None:
    """The innermost cgroup of a batch system has no limit: as much was pinned as if the job had the whole host."""
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{limit}\n")
    (tmp_path / "self").write_text(own + "\n" if own else "")
    monkeypatch.setattr(memory_limits, "CGROUPS", str(tmp_path))
    monkeypatch.setattr(memory_limits, "SELF", str(tmp_path / "self"))
    assert memory_limits.cgroup_limit() == least
