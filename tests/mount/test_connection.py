"""The connection to the kernel, over a socket: what becomes of requests whose replies the kernel does not take."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from kvfs.mount.connection import Connection
from kvfs.mount.wire import HEADER, ROOT_ID, Op
from tests.mount.kernel import Mounted


def test_a_directory_whose_opener_was_interrupted_is_not_kept(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, buffers: object) -> int:
        raise OSError(errno.ENOENT, "the process was interrupted")

    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with kernel, ours:
        connection = Connection(ours.fileno(), mounted.table)
        kernel.send(HEADER.pack(HEADER.size + 8, Op.OPENDIR, 7, ROOT_ID, 0, 0, 0, 0, 0) + bytes(8))
        monkeypatch.setattr(os, "writev", refuse)
        assert connection._serve_one(memoryview(bytearray(4096)))
    assert not connection._directories
