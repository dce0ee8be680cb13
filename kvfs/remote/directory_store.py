"""Objects as files of a directory: a shared file system in place of an object store, and the default of the tests.

A new object is written under a temporary name and linked to its own: ``link`` fails if that name exists, so of two
hosts one succeeds. The directory is as untrusted as any bucket: no symlink in it is followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator

from kvfs.errors import ConfigError
from kvfs.remote.object_store import Fetched, Listed, RemoteError

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\Z")
TEMPORARY = ".tmp-"  # begins the names of files that are being written; no component of a name begins with a dot
_TEMPORARY = re.compile(rf"{re.escape(TEMPORARY)}[0-9a-f]{{16}}\Z")  # others are files of another program
READ_BYTES = 4 << 20  # at once
STALE_SECONDS = 86_400.0  # a temporary file that is older belongs to a process that was killed


class DirectoryStore:
    """Objects below ``root``, which is made when the first one is stored."""

    def __init__(self, root: str) -> None:
        if not os.path.isabs(root):
            raise ConfigError(f"remote.url is file://{root}: give an absolute path, file:///mnt/shared/kvfs")
        self._root = root

    def get(
        self, name: str, start: int, length: int, room: memoryview | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> Fetched | None:  # fmt: skip
        path = self._path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.isfile(self._root):
                raise RemoteError(f"{self._root} is a file: name a directory in remote.url") from None
            return None
        except OSError as exc:
            raise _failed(name, exc) from None
        try:
            st = os.fstat(fd)
            if stat.S_ISDIR(st.st_mode):
                return None
            if not stat.S_ISREG(st.st_mode):
                raise RemoteError(f"{path} is no regular file")
            size, done = max(0, min(length, st.st_size - start)), 0
            view = memoryview(bytearray(size)) if room is None else room[:size]
            while done < size and (n := os.preadv(fd, [view[done : done + READ_BYTES]], start + done)):
                done += n
                if room is not None and arrived is not None:
                    arrived(done)
            return Fetched(view[:done], st.st_size)
        except OSError as exc:
            raise _failed(name, exc) from None
        finally:
            os.close(fd)

    def put_new(self, name: str, data: memoryview | bytes) -> bool:
        return self._write(name, data, new=True)

    def replace(self, name: str, data: memoryview | bytes) -> None:
        self._write(name, data, new=False)

    def delete(self, name: str) -> None:
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self._path(name))
        except OSError as exc:
            raise _failed(name, exc) from None

    def listing(self, prefix: str) -> Iterator[Listed]:
        folders = [prefix.strip("/")]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(os.path.join(self._root, folder)) as entries:
                    found = list(entries)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as exc:
                raise _failed(folder or self._root, exc) from None
            for entry in found:
                name = f"{folder}/{entry.name}" if folder else entry.name
                try:
                    st = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed meanwhile
                    continue
                except OSError as exc:
                    raise _failed(name, exc) from None
                if stat.S_ISDIR(st.st_mode):
                    folders.append(name)
                elif entry.name.startswith(TEMPORARY):
                    if _TEMPORARY.match(entry.name):
                        self._remove_stale(entry.path, st.st_mtime)
                elif stat.S_ISREG(st.st_mode):
                    yield Listed(name, st.st_size, st.st_mtime)

    def folders(self, prefix: str) -> list[str]:
        folder = os.path.join(self._root, prefix.strip("/"))
        try:
            with os.scandir(folder) as entries:
                return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as exc:
            raise _failed(folder, exc) from None

    def close(self) -> None:
        pass

    def _path(self, name: str) -> str:
        components = name.split("/")
        if not all(map(_COMPONENT.match, components)):
            raise RemoteError(f"{name!r} is no name of an object")
        path = self._root
        for component in components[:-1]:  # a symlink to a directory would lead elsewhere
            path = os.path.join(path, component)
            if os.path.islink(path):
                raise RemoteError(f"{path} is a symlink: not followed")
        return os.path.join(path, components[-1])

    def _write(self, name: str, data: memoryview | bytes, *, new: bool) -> bool:
        path = self._path(name)
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, f"{TEMPORARY}{os.urandom(8).hex()}")
        try:
            os.makedirs(folder, exist_ok=True)
            try:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                with open(fd, "wb", buffering=0) as file:
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) or 0 :]
                    os.fsync(fd)
                if new:
                    try:
                        os.link(temporary, path, follow_symlinks=False)
                    except FileExistsError:
                        return False
                else:
                    os.replace(temporary, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
        except OSError as exc:
            raise _failed(name, exc) from None
        return True

    def _remove_stale(self, path: str, modified: float) -> None:
        if time.time() - modified > STALE_SECONDS:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _failed(name: str, exc: OSError) -> RemoteError:
    return RemoteError(f"{name}: {exc.strerror or exc}")
