"""Files through a mount against the same files on the host's file system, in turns in one run. Needs root and FUSE.

    python -m tools.bench_mount --turns 7 --mib 96

Prints median [min, max] of ratios; above 1, the mount is faster. ``write`` compares with ext4 plus the chunking alone:
hashing and storing the same number of bytes by a call, without a mount. Cold: the segments, or the file, are dropped
from the page cache first. Every turn writes new random bytes. Then names: files of one byte are saved, looked up with
``stat`` by a process that has not seen them, listed as by ``ls -l``, renamed and removed; against ext4, and with
``pip install mfusepy`` and libfuse3 also against ext4 shown by a FUSE process that passes calls on.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kvfs
from kvfs.mount.chunks import Chunks
from kvfs.mount.spool import Spool

MIB = 1 << 20


@contextmanager
def mounted(store: Path, where: Path) -> Iterator[Path]:
    command = [sys.executable, "-m", "kvfs.cli.main"]
    subprocess.run([*command, "-C", str(store), "mount", str(where), "--daemon"], check=True)
    try:
        yield where / "files"
    finally:
        subprocess.run([*command, "umount", "--lazy", str(where)], check=True)


def write(path: Path, blocks: list[bytes]) -> float:
    began = time.monotonic()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for block in blocks:
        os.write(fd, block)
    os.close(fd)
    return time.monotonic() - began


def read(path: Path, size: int) -> float:
    buffer = bytearray(MIB)
    began, done = time.monotonic(), 0
    fd = os.open(path, os.O_RDONLY)
    while n := os.readv(fd, [buffer]):
        done += n
    os.close(fd)
    assert done == size, f"{done} of {size} bytes"
    return time.monotonic() - began


def drop(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def turn(plain: Path, files: Path, store: kvfs.Store, chunks: Chunks, spool: Spool, mib: int) -> dict[str, float]:
    size, blocks = mib * MIB, [os.urandom(MIB) for _ in range(mib)]
    by_ext4, by_mount = write(plain, blocks), write(files / "x", blocks)
    file = spool.create()
    for n in range(mib):
        spool.write(file, memoryview(os.urandom(MIB)), n * MIB)
    began = time.monotonic()
    chunks.save(file)
    chunking = time.monotonic() - began
    spool.release(file)
    drop(plain, *(Path(store.path) / "segments").iterdir())
    cold_ext4, cold_mount = read(plain, size), read(files / "x", size)
    warm_ext4 = min(read(plain, size) for _ in range(3))
    warm_mount = min(read(files / "x", size) for _ in range(3))
    (files / "x").unlink()
    return {
        "write: (ext4 + chunking) / mount": (by_ext4 + chunking) / by_mount,
        "cold read: ext4 / mount": cold_ext4 / cold_mount,
        "cached read: ext4 / mount": warm_ext4 / warm_mount,
    }


NAMES = 200  # of one turn
NAME_SECONDS = 1.2  # after which the kernel has forgotten what it knows of names


def names(folder: Path) -> dict[str, float]:
    """Seconds for each kind of call on NAMES files."""
    took = {}
    paths = [folder / f"{n}" for n in range(NAMES)]

    def timed(kind: str, call: Callable[[Path], object]) -> None:
        began = time.monotonic()
        for path in paths:
            call(path)
        took[kind] = time.monotonic() - began

    timed("save", lambda path: path.write_bytes(b"x"))
    time.sleep(NAME_SECONDS)
    timed("stat", lambda path: path.stat())
    time.sleep(NAME_SECONDS)
    began = time.monotonic()
    with os.scandir(folder) as entries:
        listed = sum(entry.stat().st_size for entry in entries if entry.name.isdigit())
    took["list with stat"] = time.monotonic() - began
    assert listed == NAMES, f"{listed} of {NAMES} files"
    timed("rename", lambda path: path.rename(path.with_suffix(".new")))
    paths = [path.with_suffix(".new") for path in paths]
    timed("unlink", lambda path: path.unlink())
    return took


def serve_passed(source: str, where: str) -> None:
    """Show ``source`` at ``where`` and pass each call on, until it is unmounted."""
    import mfusepy

    class Passed(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            st = os.lstat(source + path)
            return {
                n: getattr(st, n) for n in ("st_mode", "st_nlink", "st_size", "st_mtime_ns", "st_uid", "st_gid")
            } | {"st_mtime": st.st_mtime_ns}

        def create(self, path: str, mode: int, fi: object = None) -> int:
            return os.open(source + path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

        def open(self, path: str, flags: int) -> int:
            return os.open(source + path, flags)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(source + path, length)
            return 0

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(source + path)]

        def rename(self, old: str, new: str) -> int:
            os.rename(source + old, source + new)
            return 0

        def unlink(self, path: str) -> int:
            os.unlink(source + path)
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    mfusepy.FUSE(Passed(), where, foreground=True)


@contextmanager
def passed(base: Path) -> Iterator[Path | None]:
    """A directory of ext4 shown by a FUSE process; None if mfusepy is not installed."""
    if importlib.util.find_spec("mfusepy") is None:
        yield None
        return
    (base / "source").mkdir()
    (base / "passed").mkdir()
    command = [sys.executable, "-m", "tools.bench_mount", "--serve-passed", str(base / "source"), str(base / "passed")]
    with subprocess.Popen(command) as process:
        while process.poll() is None and not os.path.ismount(base / "passed"):
            time.sleep(0.1)
        try:
            yield base / "passed" if process.poll() is None else None
        finally:
            subprocess.run(["umount", "-l", str(base / "passed")], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--dir", help="where to make the store and the plain file; default: the temporary directory")
    parser.add_argument("--serve-passed", nargs=2, metavar=("SOURCE", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_passed:
        serve_passed(*arguments.serve_passed)
        return
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        base = Path(folder)
        (base / "mnt").mkdir()
        with kvfs.open(base / "store", capacity=f"{(2 * arguments.turns + 4) * arguments.mib}MiB") as store:
            spool = Spool(folder, 2 * arguments.mib * MIB)
            with mounted(base / "store", base / "mnt") as files:
                for _ in range(arguments.turns):
                    for what, ratio in turn(
                        base / "plain", files, store, Chunks(store, spool), spool, arguments.mib
                    ).items():
                        found[what].append(ratio)
                (base / "names").mkdir()
                with passed(base) as peer:
                    for _ in range(arguments.turns):
                        mount, ext4 = names(files), names(base / "names")
                        fuse = names(peer) if peer is not None else {}
                        for kind, seconds in mount.items():
                            found[f"{kind}: per second"].append(NAMES / seconds)
                            found[f"{kind}: ext4 / mount"].append(ext4[kind] / seconds)
                            if peer is not None:
                                found[f"{kind}: passed on / mount"].append(fuse[kind] / seconds)
    for what, ratios in found.items():
        print(f"{what:<34} {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
