"""A connection to the kernel's FUSE driver: receives requests in several threads and sends the replies.

Each thread takes one request, calls the file system, and replies: a request that waits for a disk delays no other, as
long as a thread is free. The kernel ends the connection when the directory is unmounted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable

from kvfs.mount import wire
from kvfs.mount.operations import Operations
from kvfs.mount.wire import Init, Op, OpenFlag, ProtocolError, Request

THREADS = 8  # requests in progress: reads of one cold file come in twos, and several files are read at once
WRITE_BYTES = 1 << 20  # of one request to write or read: the most that the kernel sends
LIST_SECONDS = 1.0  # after which a part of a listing is sent as it is: between parts its reader can be interrupted
_SILENT = frozenset({Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT})  # requests without a reply
log = logging.getLogger("kvfs.mount")

Reply = bytes | bytearray | memoryview


class Backings:
    """Files that the kernel reads by itself. All opens of a node must name one registration of one file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._numbers: dict[int, tuple[int, int]] = {}  # the kernel's number and the open files, by descriptor
        self._handles: dict[int, int] = {}  # descriptor, by handle

    def open(self, handle: int, backing: int) -> int:
        """The kernel's number; 0 if it refuses: without CAP_SYS_ADMIN, and for some file systems."""
        with self._lock:
            number, count = self._numbers.get(backing, (0, 0))
            if not number:
                try:
                    wanted = bytearray(wire.BACKING_MAP.pack(backing, 0, 0))
                    number = fcntl.ioctl(self._fd, wire.IOC_BACKING_OPEN, wanted, True)
                except OSError:
                    return 0
            self._numbers[backing] = number, count + 1
            self._handles[handle] = backing
            return number

    def close(self, handle: int) -> None:
        with self._lock:
            backing = self._handles.pop(handle, -1)
            number, count = self._numbers.pop(backing, (0, 0))
            if count > 1:
                self._numbers[backing] = number, count - 1
            elif number:
                with contextlib.suppress(OSError):
                    fcntl.ioctl(self._fd, wire.IOC_BACKING_CLOSE, number.to_bytes(4, "little"), False)


class Connection:
    """Owns the descriptor of /dev/fuse, the threads that serve it, and what the kernel serves by itself (``backing``).

    ``run`` returns when the directory is unmounted.
    """

    def __init__(self, fd: int, operations: Operations) -> None:
        self._fd = fd
        self._operations = operations
        self._features = Init(0)
        self._directories: dict[int, list[wire.DirectoryItem]] = {}  # open ones, by handle
        self._backings = Backings(fd)
        self._lock = threading.Lock()
        self._next = 1
        self._calls: dict[int, Callable[[Request], Reply]] = {
            Op.LOOKUP: self._lookup, Op.GETATTR: self._getattr, Op.SETATTR: self._setattr, Op.MKDIR: self._mkdir,
            Op.MKNOD: self._mknod, Op.UNLINK: self._unlink, Op.RMDIR: self._rmdir, Op.RENAME: self._rename,
            Op.RENAME2: self._rename2, Op.OPEN: self._open, Op.CREATE: self._create, Op.READ: self._read,
            Op.WRITE: self._write, Op.FLUSH: self._flush, Op.RELEASE: self._release, Op.FSYNC: self._fsync,
            Op.FSYNCDIR: self._fsyncdir, Op.OPENDIR: self._opendir, Op.READDIR: self._readdir,
            Op.READDIRPLUS: self._readdirplus, Op.RELEASEDIR: self._releasedir, Op.STATFS: self._statfs,
            Op.GETXATTR: self._getxattr, Op.LISTXATTR: self._listxattr, Op.SETXATTR: self._setxattr,
            Op.REMOVEXATTR: self._removexattr, Op.SYMLINK: self._refuse, Op.LINK: self._refuse, Op.INIT: self._init,
            Op.DESTROY: lambda request: b"", Op.FORGET: self._forget, Op.BATCH_FORGET: self._batch_forget,
            Op.INTERRUPT: lambda request: b"",
        }  # fmt: skip

    # -- the loop ----------------------------------------------------------------------------

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve requests until the directory is unmounted. ``started`` is called when the kernel is ready."""
        self._serve_one(memoryview(bytearray(WRITE_BYTES + wire.PAGE_BYTES)))  # INIT comes first, alone
        threads = [threading.Thread(target=self._serve, name=f"kvfs-mount-{n}", daemon=True) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        started()
        for thread in threads:  # the main thread takes signals, no requests
            thread.join()

    def _serve(self) -> None:
        buffer = memoryview(bytearray(WRITE_BYTES + wire.PAGE_BYTES))
        while self._serve_one(buffer):
            pass

    def _serve_one(self, buffer: memoryview) -> bool:
        """Receive and answer one request; False when there will be no more."""
        try:
            length = os.readv(self._fd, [buffer])
        except OSError as exc:
            if exc.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):  # ENOENT: it was interrupted before we saw it
                return True
            if exc.errno in (errno.ENODEV, errno.ECONNABORTED):
                return False
            raise
        request = wire.parse(buffer[:length])
        error, body = self._answer(request)
        if request.op not in _SILENT:
            self._reply(request, error, body)
        return True

    def _answer(self, request: Request) -> tuple[int, Reply]:
        call = self._calls.get(request.op)
        if call is None:
            return errno.ENOSYS, b""
        try:
            return 0, call(request)
        except OSError as exc:
            return exc.errno or errno.EIO, b""
        except MemoryError:
            return errno.ENOMEM, b""
        except ProtocolError:
            log.exception("a request that is not understood")
            return errno.EINVAL, b""
        except Exception:  # a bug must not leave a process waiting
            log.exception("operation %s failed", request.op)
            return errno.EIO, b""

    def _reply(self, request: Request, error: int, body: Reply) -> None:
        head = wire.REPLY.pack(wire.REPLY.size + len(body), -error, request.unique)
        try:
            os.writev(self._fd, [head, body])
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENODEV, errno.ECONNABORTED):
                self._unanswered(request, error, body)  # the process was interrupted, or the mount is gone
                return
            raise

    def _unanswered(self, request: Request, error: int, body: Reply) -> None:
        """The kernel takes no reply: it will not release what the reply would have given it."""
        if error:
            return
        if request.op in (Op.OPEN, Op.CREATE):
            handle = wire.OPEN_REPLY.unpack_from(body, len(body) - wire.OPEN_REPLY.size)[0]
            self._close(handle)
        if request.op == Op.OPENDIR:
            self._directories.pop(wire.OPEN_REPLY.unpack_from(body)[0], None)
        if request.op in (Op.LOOKUP, Op.CREATE, Op.MKDIR, Op.MKNOD):
            self._operations.forget(wire.ENTRY.unpack_from(body)[0], 1)
        if request.op == Op.READDIRPLUS:
            for node in wire.listed_nodes(body):
                self._operations.forget(node, 1)

    # -- requests ----------------------------------------------------------------------------

    def _init(self, request: Request) -> Reply:
        reply, self._features = wire.init_reply(request.body, WRITE_BYTES)
        return reply

    def _refuse(self, request: Request) -> Reply:
        raise OSError(errno.EPERM, "not supported")  # as link(2) and symlink(2) say for such a file system

    def _lookup(self, request: Request) -> Reply:
        return self._operations.lookup(request.node, wire.names(request.body, 1)[0]).pack()

    def _forget(self, request: Request) -> Reply:
        self._operations.forget(request.node, int.from_bytes(request.body[:8], "little"))
        return b""

    def _batch_forget(self, request: Request) -> Reply:
        count = wire.PAIR_IN.unpack_from(request.body)[0]
        for n in range(count):
            self._operations.forget(*wire.FORGET_ONE.unpack_from(request.body, 8 + n * wire.FORGET_ONE.size))
        return b""

    def _getattr(self, request: Request) -> Reply:
        flags, _, handle = wire.GETATTR_IN.unpack_from(request.body)
        return wire.entry_attr(*self._operations.getattr(request.node, handle if flags & 1 else None))

    def _setattr(self, request: Request) -> Reply:
        change = wire.parse_setattr(request.body, time.time_ns())
        return wire.entry_attr(*self._operations.setattr(request.node, change))

    def _mkdir(self, request: Request) -> Reply:
        mode, _ = wire.PAIR_IN.unpack_from(request.body)
        (name,) = wire.names(request.body[wire.PAIR_IN.size :], 1)
        return self._operations.mkdir(request.node, name, mode, request.caller).pack()

    def _mknod(self, request: Request) -> Reply:
        mode = wire.CREATE_IN.unpack_from(request.body)[0]
        if not stat.S_ISREG(mode):
            return self._refuse(request)
        (name,) = wire.names(request.body[wire.CREATE_IN.size :], 1)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        entry, opened = self._operations.create(request.node, name, flags, mode, request.caller)
        try:
            self._operations.flush(opened.handle)
        finally:
            self._operations.release(opened.handle)
        return entry.pack()

    def _unlink(self, request: Request) -> Reply:
        self._operations.unlink(request.node, wire.names(request.body, 1)[0])
        return b""

    def _rmdir(self, request: Request) -> Reply:
        self._operations.rmdir(request.node, wire.names(request.body, 1)[0])
        return b""

    def _rename(self, request: Request) -> Reply:
        (target,) = wire.RENAME_IN.unpack_from(request.body)
        old, new = wire.names(request.body[wire.RENAME_IN.size :], 2)
        self._operations.rename(request.node, old, target, new, 0)
        return b""

    def _rename2(self, request: Request) -> Reply:
        target, flags, _ = wire.RENAME2_IN.unpack_from(request.body)
        old, new = wire.names(request.body[wire.RENAME2_IN.size :], 2)
        self._operations.rename(request.node, old, target, new, flags)
        return b""

    def _open(self, request: Request) -> Reply:
        flags = wire.PAIR_IN.unpack_from(request.body)[0]
        return self._opened(self._operations.open(request.node, flags))

    def _create(self, request: Request) -> Reply:
        flags, mode, _, _ = wire.CREATE_IN.unpack_from(request.body)
        (name,) = wire.names(request.body[wire.CREATE_IN.size :], 1)
        entry, opened = self._operations.create(request.node, name, flags, mode, request.caller)
        return entry.pack() + self._opened(opened)

    def _opened(self, opened: wire.Opened) -> bytes:
        flags, number = opened.flags, 0
        if opened.backing >= 0 and Init.PASSTHROUGH in self._features:
            number = self._backings.open(opened.handle, opened.backing)
        if number:
            flags |= OpenFlag.PASSTHROUGH
        elif opened.backing >= 0:
            flags |= OpenFlag.KEEP_CACHE  # a file that has a backing does not change
        return wire.OPEN_REPLY.pack(opened.handle, flags, number)

    def _read(self, request: Request) -> Reply:
        handle, offset, size, *_ = wire.READ_IN.unpack_from(request.body)
        return self._operations.read(handle, size, offset)

    def _write(self, request: Request) -> Reply:
        handle, offset, size, *_ = wire.WRITE_IN.unpack_from(request.body)
        data = request.body[wire.WRITE_IN.size :]
        if len(data) != size:
            raise ProtocolError(f"a write of {size} bytes has {len(data)}")
        return wire.PAIR_IN.pack(self._operations.write(handle, data, offset), 0)

    def _flush(self, request: Request) -> Reply:
        self._operations.flush(wire.FLUSH_IN.unpack_from(request.body)[0])
        return b""

    def _release(self, request: Request) -> Reply:
        self._close(wire.RELEASE_IN.unpack_from(request.body)[0])
        return b""

    def _close(self, handle: int) -> None:
        self._backings.close(handle)
        self._operations.release(handle)

    def _fsync(self, request: Request) -> Reply:
        self._operations.fsync(wire.FSYNC_IN.unpack_from(request.body)[0])
        return b""

    def _fsyncdir(self, request: Request) -> Reply:
        return b""  # names are as durable as the store's sync level makes them

    def _opendir(self, request: Request) -> Reply:
        self._operations.getattr(request.node, None)  # ESTALE here, and the kernel looks up again: not so in a read
        with self._lock:
            handle, self._next = self._next, self._next + 1
            self._directories[handle] = []  # filled by the first read
        return wire.OPEN_REPLY.pack(handle, 0, 0)

    def _readdir(self, request: Request) -> Reply:
        return self._list(request, attributes=False)

    def _readdirplus(self, request: Request) -> Reply:
        return self._list(request, attributes=True)

    def _list(self, request: Request, *, attributes: bool) -> Reply:
        """Names from number ``offset`` on, as many as fit. They are looked up now: the program may have waited."""
        handle, offset, size, *_ = wire.READ_IN.unpack_from(request.body)
        if offset == 0:  # also rewinddir(3): what is there now
            self._directories[handle] = self._operations.entries(request.node)
        items = self._directories[handle][offset:]
        out, end = bytearray(), time.monotonic() + LIST_SECONDS
        with contextlib.closing(self._operations.listed(request.node, items, attributes=attributes)) as listed:
            for number, item in enumerate(items, offset + 1):
                if len(out) + wire.item_bytes(item.name, attributes=attributes) > size:
                    break
                is_there, entry = next(listed)
                if is_there:
                    out += wire.pack_item(item, number, entry, attributes=attributes)
                    if time.monotonic() > end:
                        break
        return out

    def _releasedir(self, request: Request) -> Reply:
        self._directories.pop(wire.RELEASE_IN.unpack_from(request.body)[0], None)
        return b""

    def _statfs(self, request: Request) -> Reply:
        return wire.statfs_bytes(self._operations.usage())

    def _getxattr(self, request: Request) -> Reply:
        size, _ = wire.PAIR_IN.unpack_from(request.body)
        (name,) = wire.names(request.body[wire.PAIR_IN.size :], 1)
        return _sized(self._operations.getxattr(request.node, name), size)

    def _listxattr(self, request: Request) -> Reply:
        size, _ = wire.PAIR_IN.unpack_from(request.body)
        return _sized(b"".join(name + b"\0" for name in self._operations.listxattr(request.node)), size)

    def _setxattr(self, request: Request) -> Reply:
        size, _ = wire.PAIR_IN.unpack_from(request.body)
        body = request.body[wire.PAIR_IN.size :]
        (name,) = wire.names(body, 1)
        value = bytes(body[len(name) + 1 :])
        if len(value) != size:
            raise ProtocolError(f"an attribute of {size} bytes has {len(value)}")
        self._operations.setxattr(request.node, name, value)
        return b""

    def _removexattr(self, request: Request) -> Reply:
        self._operations.removexattr(request.node, wire.names(request.body, 1)[0])
        return b""


def _sized(value: bytes, room: int) -> bytes:
    """The reply to a request for a value that may use ``room`` bytes; 0 asks for its size."""
    if not room:
        return wire.PAIR_IN.pack(len(value), 0)
    if len(value) > room:
        raise OSError(errno.ERANGE, "the value needs more room")
    return value
