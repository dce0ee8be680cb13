"""Every file-system call and every clock that kvfs uses, in one object.

A store receives a :class:`Files`; tests pass one that fails, shortens or delays the n-th call
(``kvfs.testing.FaultyFiles``). Calls raise ``OSError`` like the functions that they wrap. Full reads and writes are
loops here, because a short read or write is not an error to the kernel; a file that ends too early is ``EIO``.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import re
import stat
import struct
import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from kvfs.system.memory_views import address_of_readonly

IOV_MAX = 1024  # buffers of one pwritev: the kernel's limit
Mapping: TypeAlias = mmap.mmap
_FALLOC_FL_KEEP_SIZE = 1
_CACHESTAT = 451
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # read only what is in the page cache; 0: not supported by this Python
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM)  # by a file system, kernel or filter
#: This process, or the host, lacks a resource for now: such an error says nothing about the file.
SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
HUGE_BYTES = 2 << 20  # of a huge page


class BareMap:
    """A shared read-only map without a descriptor: an address, mapped until ``close``.

    A process may have far fewer descriptors than it has pieces of files to map.
    """

    __slots__ = ("address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes

    def close(self) -> None:
        nbytes, self.nbytes = self.nbytes, 0
        if nbytes:
            _munmap(self.address, nbytes)


class Files:
    """The real file system and the real clocks."""

    # -- clocks and randomness ---------------------------------------------------------------

    def monotonic(self) -> float:
        """Seconds, for deadlines."""
        return time.monotonic()

    def now_us(self) -> int:
        """Microseconds since 1970, for times that other processes and later boots read."""
        return time.time_ns() // 1000

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def random(self, nbytes: int) -> bytes:
        return os.urandom(nbytes)

    # -- directories and names ---------------------------------------------------------------

    def open_root(self, path: str) -> int:
        """Open a directory by path. Symlinks in the path are followed: the user named it."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open(
        self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int, keep: list[int | None] | None = None
    ) -> int:
        """Open a regular file or directory below a directory. Symlinks are not followed, fifos are not waited for.

        The C call that opens the file also appends the descriptor to ``keep``: no interrupt can come in between.
        """
        kept: list[int | None] = [None] if keep is None else keep
        how = flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        kept.extend(map(functools.partial(os.open, dir_fd=dir_fd), (name,), (how,), (mode,)))
        fd = kept[-1]
        assert fd is not None
        if not flags & os.O_DIRECTORY and not stat.S_ISREG(os.fstat(fd).st_mode):
            Files.close_kept(self, kept)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return fd

    def reopen(self, fd: int, flags: int, keep: list[int | None]) -> int:
        """Open the file of ``fd`` again, even if it was renamed or unlinked; needs /proc. ``keep`` as in ``open``."""
        keep.extend(map(os.open, (f"/proc/self/fd/{fd}",), (flags | os.O_CLOEXEC | os.O_NONBLOCK,)))
        found = keep[-1]
        assert found is not None
        return found

    def close_kept(self, keep: list[int | None]) -> None:
        """Close what ``open`` appended to ``[None]``, and remove it from the list, in one C call."""
        collections.deque(map(os.close, iter(keep.pop, None)), maxlen=0)

    def create(self, name: str, mode: int, *, dir_fd: int, keep: list[int | None] | None = None) -> int:
        """Create a new file with exactly ``mode``, whatever the umask removes. Root's belong to the folder's owner."""
        fd = self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode, dir_fd=dir_fd, keep=keep)
        _hand_over(fd, dir_fd)
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)
        return fd

    def mkdir(self, name: str, mode: int, *, dir_fd: int | None = None) -> None:
        os.mkdir(name, mode & 0o777, dir_fd=dir_fd)
        if dir_fd is None:
            os.chmod(name, mode)
        else:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
            try:
                _hand_over(fd, dir_fd)
                os.fchmod(fd, mode)
            finally:
                os.close(fd)

    def listdir(self, dir_fd: int) -> list[str]:
        """Names in a directory. It is opened again: threads that list through one open file share its offset."""
        try:
            return os.listdir(f"/proc/self/fd/{dir_fd}")
        except FileNotFoundError:  # no /proc, or the directory was removed
            return os.listdir(dir_fd)

    def rename(self, src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        os.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, name: str, *, dir_fd: int) -> None:
        os.rmdir(name, dir_fd=dir_fd)

    def stat(self, name: str, *, dir_fd: int) -> os.stat_result:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    # -- data --------------------------------------------------------------------------------

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        return os.preadv(fd, buffers, offset, flags) if flags else os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def read_into(self, fd: int, buffer: memoryview, offset: int, block: int = 1) -> None:
        """Fill ``buffer`` from ``offset``; EIO if the file ends first.

        ``block``: the read goes on at a multiple of this many bytes after a short read, as O_DIRECT requires.
        """
        done, total = 0, len(buffer)
        while done < total:
            n = self.preadv(fd, [buffer[done:] if done else buffer], offset + done)
            n -= n % block
            if n <= 0:
                raise OSError(errno.EIO, f"file ends {total - done} bytes short")
            done += n

    def read_cached(self, fd: int, buffer: memoryview, offset: int) -> bool:
        """Fill ``buffer`` if the page cache has all of it; else False, and the content of ``buffer`` is undefined."""
        if _NOWAIT:
            try:
                return self.preadv(fd, [buffer], offset, _NOWAIT) == len(buffer)
            except BlockingIOError:
                return False
            except OSError as exc:
                if exc.errno not in _NOT_SUPPORTED:
                    raise
        if (cached := self.cached_bytes(fd, offset, len(buffer))) is not None and cached < len(buffer):
            return False
        self.read_into(fd, buffer, offset)
        return True

    def read(self, fd: int, nbytes: int, offset: int) -> bytes:
        buffer = bytearray(nbytes)
        self.read_into(fd, memoryview(buffer), offset)
        return bytes(buffer)

    def read_view(self, fd: int, nbytes: int, offset: int) -> memoryview:
        """As ``read``, without the copy that makes the bytes immutable."""
        buffer = memoryview(bytearray(nbytes))
        self.read_into(fd, buffer, offset)
        return buffer

    def write_all(self, fd: int, buffers: Sequence[Any], offset: int, block: int = 1) -> int:
        """Write all buffers one after the other; returns the bytes written. ``block`` as in ``read_into``."""
        start = offset
        for first in range(0, len(buffers), IOV_MAX):
            batch: list[Any] = [memoryview(b) for b in buffers[first : first + IOV_MAX]]
            while batch:
                n = self.pwritev(fd, batch, offset)
                n -= n % block
                if n <= 0:
                    raise OSError(errno.EIO, "write made no progress")
                offset += n
                while batch and n >= len(batch[0]):
                    n -= len(batch.pop(0))
                if n:
                    batch[0] = batch[0][n:]
        return offset - start

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def fallocate(self, fd: int, offset: int, nbytes: int, *, keep_size: bool = False) -> None:
        """Allocate blocks; a file system without the call gets a sparse file of that size instead."""
        if nbytes <= 0:
            return
        try:
            _fallocate(fd, _FALLOC_FL_KEEP_SIZE if keep_size else 0, offset, nbytes)
        except OSError as exc:
            if exc.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            if not keep_size and os.fstat(fd).st_size < offset + nbytes:
                os.ftruncate(fd, offset + nbytes)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def map(self, fd: int, length: int, offset: int) -> Mapping:
        """A shared read-only map. Python's map keeps a duplicate of ``fd``, and with it a flock."""
        return mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset)

    def map_bare(self, fd: int, length: int, offset: int) -> BareMap:
        """A map without a duplicate of ``fd``: the caller keeps that open. OSError beyond the end of the file."""
        if offset + length > self.fstat(fd).st_size:
            raise OSError(errno.EINVAL, "the file ends before the map would")
        return BareMap(_mmap(fd, length, offset), length)

    def populate(self, mapping: Mapping, offset: int = 0, nbytes: int = 0) -> None:
        """Read a map, or part of it, into the page cache and map it."""
        self.populate_at(address_of_readonly(mapping) + offset, nbytes or len(mapping) - offset)

    def populate_at(self, address: int, nbytes: int) -> None:
        """Read what is mapped at ``address`` into the page cache. A bad sector is an ``OSError``; later it is SIGBUS.

        A large range is read in folios of 2 MiB where the kernel has them: they cost it a fraction of the work. Other
        threads run meanwhile: ``mapping.madvise`` would hold the GIL until the disk has answered.
        """
        if nbytes >= HUGE_BYTES:
            self.prefer_huge(address, nbytes)
        try:
            _madvise(address, nbytes, _MADV_POPULATE_READ)
        except OSError as exc:
            if exc.errno != errno.EINVAL:  # kernels before 5.14 do not know the advice
                raise

    def prefer_huge(self, address: int, nbytes: int) -> None:
        """Ask for huge pages. The kernel splits a map where such advice ends, and limits the maps of a process."""
        with contextlib.suppress(OSError):
            _madvise(address, nbytes, _MADV_HUGEPAGE)

    # -- locks and the page cache --------------------------------------------------------------

    def flock(self, fd: int, operation: int) -> bool:
        """``flock`` without waiting; False if another open file holds it."""
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def readahead(self, fd: int, offset: int, nbytes: int) -> None:
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def has_large_folios(self) -> bool:
        """Whether ``populate`` is the cheapest way to fill the page cache: ext4 got large folios last, with 6.16."""
        found = re.match(r"(\d+)\.(\d+)", os.uname().release)
        return found is not None and (int(found[1]), int(found[2])) >= (6, 16)

    def random_access(self, fd: int) -> None:
        """No readahead through this descriptor: only what is read enters the page cache."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def drop_cached(self, fd: int, offset: int, nbytes: int) -> None:
        """Drop the clean, unmapped pages of a range from the page cache."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def cached_bytes(self, fd: int, offset: int, nbytes: int) -> int | None:
        """Bytes of the range that are in the page cache, or None if the kernel does not say."""
        return _cachestat(fd, offset, nbytes)


def _hand_over(fd: int, dir_fd: int) -> None:
    """Give what root has created to the owner and group of the folder; otherwise that owner could not open it."""
    if os.geteuid() == 0:
        st = os.fstat(dir_fd)
        if st.st_uid or st.st_gid != os.fstat(fd).st_gid:
            with contextlib.suppress(OSError):  # a root without the capability, or without a mapping of that user
                os.fchown(fd, st.st_uid, st.st_gid)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _fallocate(fd: int, mode: int, offset: int, nbytes: int) -> None:
    call = _libc().fallocate64 if hasattr(_libc(), "fallocate64") else _libc().fallocate
    while call(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _mmap(fd: int, nbytes: int, offset: int) -> int:
    call = _libc().mmap64 if hasattr(_libc(), "mmap64") else _libc().mmap
    call.restype = ctypes.c_void_p
    flags = mmap.PROT_READ, mmap.MAP_SHARED
    address = call(None, ctypes.c_size_t(nbytes), *flags, fd, ctypes.c_int64(offset))
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(address)


def _munmap(address: int, nbytes: int) -> None:
    code = 0 if _libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0 else ctypes.get_errno()
    assert code == 0, f"munmap of {nbytes} bytes at {address:#x}: {os.strerror(code)}"


def _madvise(address: int, nbytes: int, advice: int) -> None:
    if _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _cachestat(fd: int, offset: int, nbytes: int) -> int | None:
    """cachestat(2), kernel 6.5: pages of a range that are in the page cache, without mapping it."""
    wanted = (ctypes.c_uint64 * 2)(offset, nbytes)
    found = (ctypes.c_uint64 * 5)()
    if _libc().syscall(_CACHESTAT, fd, wanted, found, 0) != 0:
        return None
    return min(nbytes, int(found[0]) * mmap.PAGESIZE)


def boot_id(files: Files) -> str:
    """The kernel's id of this boot. An index that was left dirty under another boot id is not trusted."""
    fd = os.open("/proc/sys/kernel/random/boot_id", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 64).decode("ascii").strip()
    finally:
        os.close(fd)


def pack_u64(values: Sequence[int]) -> bytes:
    """Values as little-endian u64."""
    return struct.pack(f"<{len(values)}Q", *values)
