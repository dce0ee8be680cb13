"""The directory of a store: its files, their permissions, the super file, what a file system must support.

Everything below the root is opened through directory descriptors, without following symlinks. Names are fixed words or
generated hex, never user text.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from typing import Any

from kvfs.errors import (
    ConfigError,
    CorruptError,
    FormatError,
    NoSpaceError,
    StoreAccessError,
    StoreNotFoundError,
    StoreReadOnlyError,
)
from kvfs.format.checksums import checksum
from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files
from kvfs.version import FORMAT

DROP_FOLDER = "import"  # bundles that are put there are imported
SUBDIRECTORIES = ("index", "segments", "doomed", "run", "run/use", "pins", DROP_FOLDER, "quarantine", "purged")
#: Added after format 1: a store of an earlier version lacks them until it is opened for writing.
OPTIONAL_SUBDIRECTORIES = frozenset({"purged"})
SUPER_BYTES_MAX = 16 * 1024  # larger: not a super file
#: File systems whose flock, rename and mmap are known to work for all processes of one host.
GOOD_FILESYSTEMS = frozenset({"ext4", "ext3", "ext2", "xfs", "btrfs", "tmpfs", "ramfs", "f2fs", "zfs", "bcachefs"})
_CACHEDIR_TAG = (
    b"Signature: 8a477f597d28d172789f06886806bc55\n"
    b"# This directory is a kvfs KV-cache store. Its content can be recomputed; back-ups may leave it out.\n"
)
_README = (
    b"This directory is a kvfs store: a persistent cache of LLM attention KV.\n"
    b"It may be deleted as a whole while no process uses it; nothing else in it is meant to be edited by hand.\n"
    b"The file kvfs.toml holds its limits. Format: see `super`.\n"
)


class Directory:
    """An open store directory. ``close()`` when done; descriptors are private to this process.

    ``root``: a descriptor of the directory, if there is one: ``path`` may name another directory by now.
    """

    def __init__(self, path: str, files: Files, *, read_only: bool, root: int | None = None) -> None:
        self.path = os.path.abspath(path)
        self.files = files
        self.read_only = read_only
        self._fds: dict[str, Descriptor] = {}
        try:
            here = os.O_RDONLY | os.O_DIRECTORY
            self.root = files.open_root(self.path) if root is None else files.open(".", here, dir_fd=root)
        except FileNotFoundError:
            raise StoreNotFoundError(
                f"{path} does not exist; create a store with kvfs.open(path, capacity=...)"
            ) from None
        except NotADirectoryError:
            raise StoreNotFoundError(f"{path} is a file, and a store is a directory: name another path") from None
        except PermissionError:
            raise StoreAccessError(f"{path}: no permission; run as its owner or a member of its group") from None
        try:
            mode = stat.S_IMODE(files.fstat(self.root).st_mode)
        except OSError:
            self.close()
            raise
        shared = mode & 0o070 == 0o070
        #: modes of new files and directories: private, or shared with the group that the root names
        self.file_mode = 0o660 if shared else 0o600
        self.dir_mode = 0o2770 if shared else 0o700

    # -- descriptors -------------------------------------------------------------------------

    def sub(self, name: str) -> int:
        """Descriptor of a subdirectory, opened once."""
        folder = self._fds.get(name)
        if folder is None:
            fd = self.root
            parent: Descriptor | None
            for step in name.split("/"):
                parent = folder
                try:
                    folder = Descriptor.open(self.files, step, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
                finally:
                    if parent is not None:
                        parent.close()
                fd = folder.fd
            assert folder is not None
            folder = self._fds.setdefault(name, folder)  # another thread may have been first, and uses its own
        return folder.fd

    def close(self) -> None:
        for folder in self._fds.values():
            folder.close()
        self._fds.clear()
        with contextlib.suppress(OSError):
            self.files.close(self.root)
        self.root = -1

    def opener(self, path: str, flags: int) -> int:
        """``opener`` for a file with stored pages: private, but a shared store's in a folder of a group is readable by
        that group."""
        mode = os.stat(os.path.dirname(os.path.abspath(path))).st_mode
        shared = self.file_mode & 0o060 and mode & 0o2070 == 0o2070
        return os.open(path, flags, 0o640 if shared else 0o600)

    # -- small files -------------------------------------------------------------------------

    def read_small(self, name: str, limit: int, *, sub: str = "") -> bytes | None:
        """Content of a small file, or None if there is none. FormatError if it is larger than ``limit`` bytes."""
        try:
            fd = self.files.open(name, os.O_RDONLY, dir_fd=self.sub(sub) if sub else self.root)
        except FileNotFoundError:
            return None
        try:
            size = self.files.fstat(fd).st_size
            if size > limit:
                where = os.path.join(self.path, sub, name)
                raise FormatError(f"{where} has {size} bytes, at most {limit} are expected: not written by kvfs")
            return self.files.read(fd, size, 0)
        finally:
            self.files.close(fd)

    def write_small(
        self, name: str, data: bytes, *, sub: str = "", durable: bool = True, sync_folder: bool = True
    ) -> None:
        """Replace a small file: temporary name, fsync, rename, fsync of the directory (unless the caller does it)."""
        dir_fd = self.sub(sub) if sub else self.root
        temporary = f".{name}.{self.files.random(8).hex()}"
        fd = self.files.create(temporary, self.file_mode, dir_fd=dir_fd)
        try:
            try:
                self.files.write_all(fd, [data], 0)
                if durable:
                    self.files.fsync(fd)
            finally:
                self.files.close(fd)
            try:
                self.files.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            except IsADirectoryError:  # not made by kvfs: moved out of the way
                aside = f"{name}.{self.files.random(8).hex()}"
                self.files.rename(name, aside, src_dir_fd=dir_fd, dst_dir_fd=self.sub("quarantine"))
                self.files.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except OSError:
            with contextlib.suppress(OSError):
                self.files.unlink(temporary, dir_fd=dir_fd)
            raise
        if durable and sync_folder:
            self.files.fsync(dir_fd)

    def remove(self, name: str, *, sub: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(name, dir_fd=self.sub(sub))

    # -- super -------------------------------------------------------------------------------

    def store_id(self) -> bytes:
        """Id of the store; FormatError if this version must not use the store."""
        data = self.read_small("super", SUPER_BYTES_MAX)
        if data is None:
            self.check_unused()
            raise StoreNotFoundError(
                f"{self.path} holds no kvfs store (no super file); create one with kvfs.open(path, capacity=...)"
            )
        return parse_super(data, self.path, read_only=self.read_only)

    def check_unused(self) -> None:
        """CorruptError for a directory with segments or pins but without a super file: a new store would drop them."""
        for name in ("segments", "pins"):
            with contextlib.suppress(FileNotFoundError):
                if self.files.listdir(self.sub(name)) and not self.has_super():
                    raise CorruptError(
                        f"{self.path} is a kvfs store whose super file is lost ({name}/ is not empty): put it back, or "
                        "run kvfs verify --repair, which makes a new one from the segments; no new store is made here"
                    )

    def has_super(self) -> bool:
        """Whether there is a super file, valid or not."""
        try:
            self.files.stat("super", dir_fd=self.root)
        except FileNotFoundError:
            return False
        return True

    def publish_super(self, store_id: bytes, created_us: int) -> None:
        """Write the super file unless there is one."""
        _publish_once(self, "super", pack_super(store_id, created_us))


def pack_super(store_id: bytes, created_us: int) -> bytes:
    body: dict[str, Any] = {
        "kvfs": "store",
        "format": FORMAT,
        "store_id": store_id.hex(),
        "created_us": created_us,
        "features": {"compatible": [], "read_only_compatible": [], "incompatible": []},
        "algorithms": {"chain": "sha256", "page_key": "blake2b-256", "leaf": "xxh3-64", "root": "xxh3-128"},
    }
    body["check"] = f"{checksum(_canonical(body)):016x}"
    return json.dumps(body, indent=1).encode() + b"\n"


def parse_super(data: bytes, path: str, *, read_only: bool) -> bytes:
    """Store id of a super file; FormatError with the reason if this code must not open the store."""
    try:
        body = json.loads(data)
        check = body.pop("check")
        version, features = body["format"], body["features"]
        store_id = bytes.fromhex(body["store_id"])
        incompatible, limited = list(features["incompatible"]), list(features["read_only_compatible"])
        if body["kvfs"] != "store" or len(store_id) != 16 or type(version) is not int:
            raise ValueError("not the super file of a store")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise FormatError(
            f"{path}/super is damaged or not kvfs's ({exc}); restore it or start with an empty directory"
        ) from None
    if version != FORMAT:
        raise FormatError(f"{path} has format {version}, this kvfs reads format {FORMAT}: use the kvfs that wrote it")
    if check != f"{checksum(_canonical(body)):016x}":
        raise FormatError(f"{path}/super is damaged (checksum); restore it or start with an empty directory")
    if incompatible:
        raise FormatError(f"{path} uses features {incompatible} that this kvfs does not know: upgrade kvfs")
    if limited and not read_only:
        raise FormatError(
            f"{path} uses features {limited} that this kvfs may only read: open it with read_only=True, or upgrade kvfs"
        )
    return store_id


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def check_layout(directory: Directory) -> None:
    """Make missing directories of a store; CorruptError where that is not possible."""
    for name in SUBDIRECTORIES:
        try:
            directory.sub(name)
        except FileNotFoundError:  # its content is lost, the rest of the store is usable
            parent, _, leaf = name.rpartition("/")
            over = directory.sub(parent) if parent else directory.root
            if directory.read_only:
                if name in OPTIONAL_SUBDIRECTORIES:
                    continue
                raise CorruptError(f"{directory.path}/{name} is missing: open the store for writing once") from None
            try:
                directory.files.mkdir(leaf, directory.dir_mode, dir_fd=over)
            except OSError as exc:
                if exc.errno != errno.ENOSPC or name not in OPTIONAL_SUBDIRECTORIES:
                    raise
        except NotADirectoryError:
            raise CorruptError(f"{directory.path}/{name} is no directory: move it away") from None
    if not directory.read_only:
        run = directory.sub("run")
        try:
            directory.files.stat("gc", dir_fd=run)
        except FileNotFoundError:  # the directory has just been made
            with contextlib.suppress(FileExistsError):
                directory.files.close(directory.files.create("gc", directory.file_mode, dir_fd=run))


# -- creating --------------------------------------------------------------------------------


def create(path: str, settings: bytes, files: Files) -> None:
    """Make a store in an absent, empty or half-made directory. Several processes may do this at once.

    The super file is written last, by a link that never overwrites: with it the directory is a store.
    """
    with translate_os_errors(path):
        try:
            files.mkdir(path, 0o700)
        except FileExistsError:
            pass
        except FileNotFoundError:
            parent = os.path.dirname(os.path.abspath(path))
            if os.path.isdir(parent):  # a file system that allows no new directories
                raise
            raise StoreNotFoundError(f"{parent} does not exist; create it first") from None
        check_filesystem(path)
        directory = Directory(path, files, read_only=False)
        try:
            _populate(directory, settings, files)
        finally:
            directory.close()


def check_free(path: str, files: Files) -> None:
    """Raise what ``create`` would raise for a directory in which no store can be made. Changes nothing."""
    check_filesystem(path)
    with contextlib.closing(Directory(path, files, read_only=True)) as directory:
        _check_empty(directory)


def is_store(path: str) -> bool:
    """Whether the path holds a super file, valid or not."""
    with translate_os_errors(path):
        try:
            os.lstat(os.path.join(path, "super"))
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def check_output(path: str) -> None:
    """ConfigError unless a rename may put a file at ``path``: it replaces a device, a link, a file of a store, too."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigError(f"{path}: there is no directory {folder}")
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        kind = "a directory" if os.path.isdir(path) else "no regular file"
        raise ConfigError(f"{path} is {kind}: name a file, which is replaced by a rename")
    above = place = os.path.realpath(folder)
    while not _holds_store(above) and above != os.path.dirname(above):
        above = os.path.dirname(above)
    if _holds_store(above) and place != os.path.join(above, DROP_FOLDER):
        raise ConfigError(f"{path} is inside the store {above}: name a file elsewhere")


def _holds_store(path: str) -> bool:
    """Whether a directory looks like a store, also like one that has lost its super file or its settings."""
    names = [os.path.lexists(os.path.join(path, name)) for name in ("segments", "super", "kvfs.toml")]
    return names[0] and any(names[1:])


@contextlib.contextmanager
def translate_os_errors(path: str) -> Iterator[None]:
    """Turn an OSError into an error of kvfs that names the remedy."""
    try:
        yield
    except OSError as exc:
        other = exc.filename if exc.filename != path else None
        what = f"{path}: {exc.strerror or exc}" + (f" ({other})" if other else "")
        if isinstance(exc, PermissionError):
            raise StoreAccessError(f"{what}; run as the store's owner or a member of its group") from None
        if exc.errno == errno.EROFS:
            raise StoreReadOnlyError(f"{what}: open it with read_only=True, or create it elsewhere") from None
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"{what}: make room on its file system") from None
        remedy = "the device fails: look at dmesg" if exc.errno == errno.EIO else "choose another directory"
        raise StoreAccessError(f"{what}; {remedy}") from None


def _check_empty(directory: Directory) -> None:
    foreign = [n for n in directory.files.listdir(directory.root) if not _is_ours(n)]
    if foreign:
        raise FormatError(
            f"{directory.path} is not empty ({sorted(foreign)[0]!r} is not kvfs's): give kvfs a directory of its own"
        )
    directory.check_unused()


def _populate(directory: Directory, settings: bytes, files: Files) -> None:
    root = directory.root
    _check_empty(directory)
    tighten(directory)
    for name in SUBDIRECTORIES:
        parent, _, leaf = name.rpartition("/")
        with contextlib.suppress(FileExistsError):
            files.mkdir(leaf, directory.dir_mode, dir_fd=directory.sub(parent) if parent else root)
    for name in ("gate", "main"):
        with contextlib.suppress(FileExistsError):
            files.close(files.create(name, directory.file_mode, dir_fd=root))
    with contextlib.suppress(FileExistsError):
        files.close(files.create("gc", directory.file_mode, dir_fd=directory.sub("run")))
    directory.write_small("CACHEDIR.TAG", _CACHEDIR_TAG, durable=False)
    directory.write_small("README.txt", _README, durable=False)
    _publish_once(directory, "kvfs.toml", settings)
    directory.publish_super(files.random(16), files.now_us())


def _publish_once(directory: Directory, name: str, data: bytes) -> None:
    """Write a file unless it exists: the first of two creators wins."""
    files, root = directory.files, directory.root
    temporary = f".{name}.{files.random(8).hex()}"
    fd = files.create(temporary, directory.file_mode, dir_fd=root)
    try:
        files.write_all(fd, [data], 0)
        files.fsync(fd)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, name, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
    finally:
        try:
            files.close(fd)
        finally:
            files.unlink(temporary, dir_fd=root)
    files.fsync(root)


def _is_ours(name: str) -> bool:
    ours = {"gate", "main", "kvfs.toml", "super", "state", "CACHEDIR.TAG", "README.txt", "lost+found", "epochs"}
    return (
        name in ours
        or name in SUBDIRECTORIES
        or name.startswith((".kvfs.toml.", ".super.", ".README", ".CACHEDIR", ".state."))
    )


def tighten(directory: Directory) -> None:
    """Remove all permissions of *others*. StoreAccessError if that fails and they may write."""
    mode = stat.S_IMODE(directory.files.fstat(directory.root).st_mode)
    if not mode & 0o007:
        return
    try:
        os.fchmod(directory.root, mode & ~0o007)
    except OSError:
        if mode & 0o002:
            raise StoreAccessError(
                f"{directory.path} is writable by every user (mode {mode:04o}); its owner must run chmod o-rwx"
            ) from None


def check_filesystem(path: str) -> None:
    """StoreAccessError for a file system whose locks or maps not every process that opens the store shares."""
    kind = filesystem_of(path)
    if kind is not None and kind not in GOOD_FILESYSTEMS:
        raise StoreAccessError(
            f"{path} is on {kind}: locks there are not seen by every process (or host), so a store would be damaged. "
            f"Use a local file system ({', '.join(sorted(GOOD_FILESYSTEMS))}), in a container a bind mount of one"
        )


def filesystem_of(path: str) -> str | None:
    """Type of the file system that holds ``path``, from /proc/self/mountinfo; None if unknown."""
    try:
        real, around = os.path.realpath(path, strict=True), dict[str, str]()
        with open("/proc/self/mountinfo", encoding="utf-8") as lines:
            for line in lines:
                fields = line.split()
                mount = fields[4].encode().decode("unicode_escape")
                if real == mount or real.startswith(mount.rstrip("/") + "/"):
                    around[mount] = fields[fields.index("-") + 1]  # a later one on the same directory hides it
        return around[max(around, key=len)]
    except (OSError, ValueError, LookupError):
        return None
