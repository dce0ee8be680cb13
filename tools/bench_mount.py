"""Files through a mount against the same files on the host's file system, in turns in one run. Needs root and FUSE.

    python -m tools.bench_mount --turns 7 --mib 96

Prints median [min, max] of ratios; above 1, the mount is faster. ``write`` compares with ext4 plus the chunking alone:
hashing and storing the same number of bytes by a call, without a mount. Cold: the segments, or the file, are dropped
from the page cache first. Every turn writes new random bytes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--dir", help="where to make the store and the plain file; default: the temporary directory")
    arguments = parser.parse_args()
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
    for what, ratios in found.items():
        print(f"{what:<34} {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
