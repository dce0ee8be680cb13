"""The connection to the kernel, over a socket: what becomes of requests whose replies the kernel does not take."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from kvfs.mount import connection as connections
from kvfs.mount import wire
from kvfs.mount.connection import Connection
from kvfs.mount.wire import HEADER, ROOT_ID, Op
from tests.mount.kernel import ME, Mounted

Ask = Callable[[Op, int, bytes], tuple[int, bytes]]


@pytest.fixture
def ask(mounted: Mounted) -> Iterator[Ask]:
    """Send a request of the kernel; (error, body) of the reply."""
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with kernel, ours:
        connection = Connection(ours.fileno(), mounted.table)

        def ask(op: Op, node: int, body: bytes) -> tuple[int, bytes]:
            kernel.send(HEADER.pack(HEADER.size + len(body), op, 7, node, 0, 0, 0, 0, 0) + body)
            assert connection._serve_one(memoryview(bytearray(8192)))
            reply = kernel.recv(1 << 20)
            length, error, _ = wire.REPLY.unpack_from(reply)
            assert length == len(reply)
            return -error, reply[wire.REPLY.size :]

        yield ask


def listing(ask: Ask, node: int, size: int, op: Op = Op.READDIRPLUS) -> Iterator[tuple[bytes, int, int]]:
    """(name, node, size of the file) of each item, from replies of so many bytes; nodes of READDIR are -1."""
    error, opened = ask(Op.OPENDIR, node, bytes(8))
    assert not error
    handle, offset = wire.OPEN_REPLY.unpack(opened)[0], 0
    while True:
        error, body = ask(op, node, wire.READ_IN.pack(handle, offset, size, 0, 0, 0, 0))
        assert not error
        assert len(body) <= size
        if not body:
            break
        while body:
            number, nbytes = -1, 0
            if op == Op.READDIRPLUS:
                number, nbytes = wire.ENTRY.unpack_from(body)[0], wire.ATTR.unpack_from(body, 40)[1]
                body = body[wire.ENTRY_BYTES :]
            _, offset, length, _ = wire.DIRENT.unpack_from(body)
            yield body[24 : 24 + length], number, nbytes
            body = body[24 + length + -(24 + length) % 8 :]
    ask(Op.RELEASEDIR, node, wire.RELEASE_IN.pack(handle, 0, 0, 0))


@pytest.mark.parametrize("size", [200, 500, 4096])
@pytest.mark.parametrize("op", [Op.READDIR, Op.READDIRPLUS])
def test_a_listing_is_continued_where_the_last_reply_ended(mounted: Mounted, ask: Ask, size: int, op: Op) -> None:
    mounted.kernel.mkdir("files/folder")
    for n in range(12):
        mounted.kernel.save(f"files/{n:02}", bytes(n))
    os.unlink("03", dir_fd=mounted.names.root)
    os.close(os.open("04", os.O_CREAT | os.O_TRUNC | os.O_RDWR, dir_fd=mounted.names.root))  # no manifest
    files = mounted.table.lookup(ROOT_ID, b"files").node
    found = list(listing(ask, files, size, op))
    numbers = [n for n in range(12) if n not in (3, 4)]
    assert [name for name, _, _ in found] == [b"%02d" % n for n in numbers] + [b"folder"]
    if op == Op.READDIRPLUS:
        assert [nbytes for _, _, nbytes in found][:-1] == numbers


def test_a_listing_with_attributes_needs_no_lookups_and_gives_one_reference_each(mounted: Mounted, ask: Ask) -> None:
    for n in range(9):
        mounted.kernel.save(f"files/{n}", bytes(n))
    files = mounted.table.lookup(ROOT_ID, b"files").node
    known = len(mounted.table._nodes)
    found = list(listing(ask, files, 600))
    for name, node, nbytes in found:
        assert mounted.table.getattr(node, None)[0].size == nbytes == int(name)
        mounted.table.forget(node, 1)
    assert len(mounted.table._nodes) == known


def test_a_listing_shows_what_is_written_after_the_directory_was_opened(mounted: Mounted, ask: Ask) -> None:
    mounted.kernel.save("files/a", b"1")
    files = mounted.table.lookup(ROOT_ID, b"files").node
    handle = wire.OPEN_REPLY.unpack(ask(Op.OPENDIR, files, bytes(8))[1])[0]
    mounted.kernel.save("files/a", b"22")
    body = ask(Op.READDIRPLUS, files, wire.READ_IN.pack(handle, 0, 4096, 0, 0, 0, 0))[1]
    assert wire.ATTR.unpack_from(body, 40)[1] == 2


def test_a_directory_that_was_replaced_is_looked_up_again_when_it_is_opened(mounted: Mounted, ask: Ask) -> None:
    mounted.kernel.mkdir("files/folder")
    folder = mounted.table.lookup(mounted.table.lookup(ROOT_ID, b"files").node, b"folder").node
    os.rename("folder", "other", src_dir_fd=mounted.names.root, dst_dir_fd=mounted.names.root)
    os.mkdir("folder", dir_fd=mounted.names.root)
    assert ask(Op.OPENDIR, folder, bytes(8))[0] == errno.ESTALE


def test_a_listing_costs_nothing_for_what_is_made_when_it_is_asked_for(
    mounted: Mounted, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounted.store, "stats", None)
    found = {name: node for name, node, _ in listing(ask, ROOT_ID, 4096)}
    assert found[b"stats.json"] == found[b"files"] == 0


def test_a_name_that_cannot_be_looked_up_is_listed_and_ends_a_slow_reply(
    mounted: Mounted, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        mounted.kernel.save(f"files/{n}", b"x")
    files = mounted.table.lookup(ROOT_ID, b"files").node
    monkeypatch.setattr(connections, "LIST_SECONDS", -1.0)

    def silent(*arguments: object) -> bool:
        raise OSError(errno.EIO, "the index does not answer")

    monkeypatch.setattr(mounted.names, "is_complete", silent)
    assert [(name, node) for name, node, _ in listing(ask, files, 4096)] == [(b"0", 0), (b"1", 0), (b"2", 0)]
    handle = wire.OPEN_REPLY.unpack(ask(Op.OPENDIR, files, bytes(8))[1])[0]
    body = ask(Op.READDIRPLUS, files, wire.READ_IN.pack(handle, 0, 4096, 0, 0, 0, 0))[1]
    assert len(body) == wire.item_bytes(b"0", attributes=True)


def test_entries_of_a_listing_that_nobody_takes_are_forgotten(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted.kernel.save("files/a", b"x")
    files = mounted.table.lookup(ROOT_ID, b"files").node
    known = len(mounted.table._nodes)

    def refuse(fd: int, buffers: object) -> int:
        raise OSError(errno.ENOENT, "the process was interrupted")

    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with kernel, ours:
        connection = Connection(ours.fileno(), mounted.table)
        body = wire.READ_IN.pack(1, 0, 4096, 0, 0, 0, 0)
        kernel.send(HEADER.pack(HEADER.size + len(body), Op.READDIRPLUS, 7, files, 0, 0, 0, 0, 0) + body)
        monkeypatch.setattr(os, "writev", refuse)
        assert connection._serve_one(memoryview(bytearray(4096)))
    assert len(mounted.table._nodes) == known


def test_a_name_is_opened_once_for_a_lookup_and_not_for_attributes(
    mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted.kernel.save("files/a", b"data")
    files = mounted.table.lookup(ROOT_ID, b"files").node
    opened: list[object] = []
    original = os.open

    def counted(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        opened.append(path)
        return original(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", counted)
    monkeypatch.setattr(mounted.names, "manifest", None)  # its size is known
    entry = mounted.table.lookup(files, b"a")
    assert opened == [b"a"]
    assert (entry.attr.size, mounted.table.getattr(entry.node, None)[0].size) == (4, 4)
    with pytest.raises(OSError, match=rf"\[Errno {errno.ENODATA}\]"):  # asked before the first write to each file
        mounted.table.getxattr(entry.node, b"security.capability")
    assert opened == [b"a"]
    made, _ = mounted.table.create(files, b"b", os.O_WRONLY, 0o600, ME)
    assert made.attr.size == 0


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
