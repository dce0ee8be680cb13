"""The state file, which says whether an index may be trusted."""

from __future__ import annotations

import errno
from pathlib import Path

import kvfs
from kvfs.index.trust import read_state, write_state
from kvfs.testing import Fault, FaultyFiles


def test_on_a_full_disk_the_state_is_overwritten_in_place_and_synced(memory_path: Path) -> None:
    """A state that says "clean" and is not on the disk when the index changes would be trusted after a power cut."""
    files = FaultyFiles(trace=True)
    with kvfs.open(memory_path / "store", capacity="16MiB", files=files) as store:
        store._shared.background.stop()
        directory = store._shared.c.directory
        state = read_state(directory)
        assert state is not None
        before = len(files.trace)
        files.arm(Fault(files.calls["pwritev"] + 1, "pwritev", error=errno.ENOSPC))
        write_state(directory, state)
        calls = [(call.kind, call.detail.split()[0] if call.detail else "") for call in files.trace[before:]]
        written = max(i for i, (kind, _) in enumerate(calls) if kind == "pwritev")
        assert ("fsync", calls[written][1]) in calls[written:] and not any(kind == "rename" for kind, _ in calls)
        assert read_state(directory) == state
