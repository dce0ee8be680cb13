"""Blocks ahead of the index file's end, so that eviction can commit on a disk that is full."""

from __future__ import annotations

import contextlib
import os

from kvfs.directory import Directory

SLACK_BYTES = 8 << 20


def keep_slack(directory: Directory, generation: str, map_size: int) -> None:
    """Allocate up to SLACK_BYTES behind the end of a generation's file. OSError if the disk has no room."""
    files = directory.files
    folder = files.open(generation, os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory.sub("index"))
    with contextlib.ExitStack() as stack:
        stack.callback(files.close, folder)
        fd = files.open("data.mdb", os.O_RDWR, dir_fd=folder)
        stack.callback(files.close, fd)
        st = files.fstat(fd)
        wanted = min(map_size, st.st_size + SLACK_BYTES)
        if st.st_blocks * 512 < min(wanted, st.st_size + SLACK_BYTES // 2):
            files.fallocate(fd, 0, wanted, keep_size=True)
