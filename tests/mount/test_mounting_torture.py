"""Real mounts under random use: reads and writes of every kind on one file, and kill -9 of the process in between.

KVFS_MOUNT_SECONDS: how long each test runs (default 10). The random numbers have a seed; what a kill hits has not.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

import kvfs
from tests.mount.real import kvfs as command
from tests.mount.real import needs_fuse, serving

SECONDS = float(os.environ.get("KVFS_MOUNT_SECONDS", "10"))
SIZE_MAX = 1 << 20

pytestmark = [needs_fuse, pytest.mark.slow, pytest.mark.timeout(SECONDS * 3 + 300)]


@pytest.fixture
def where(tmp_path: Path, store_path: Path) -> Path:
    (tmp_path / "mnt").mkdir()
    kvfs.open(store_path, capacity="256MiB").close()
    return tmp_path / "mnt"


class Exerciser:
    """One file and the bytes that it must have. The kinds of calls are those of fsx."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.draw = path, random.Random(seed)
        self.expected = bytearray()
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.calls = 0

    def step(self) -> None:
        self.calls += 1
        kind = self.draw.choice(["write", "write", "read", "read", "truncate", "map", "map write", "sync", "reopen"])
        at = self.draw.randrange(SIZE_MAX)
        data = self.draw.randbytes(self.draw.choice([1, 511, 4_096, 70_000]))[: SIZE_MAX - at]
        size = len(self.expected)
        if kind == "write":
            os.pwrite(self.fd, data, at)
            self.expected.extend(bytes(max(0, at - size)))
            self.expected[at : at + len(data)] = data
        elif kind == "read":
            assert os.pread(self.fd, len(data), at) == bytes(self.expected[at : at + len(data)]), self.where(kind, at)
        elif kind == "truncate":
            os.ftruncate(self.fd, at)
            self.expected = self.expected[:at] + bytes(max(0, at - size))
        elif kind.startswith("map") and size:
            with mmap.mmap(self.fd, size) as mapped:
                at %= size
                if kind == "map write":
                    data = data[: size - at]
                    mapped[at : at + len(data)] = data
                    self.expected[at : at + len(data)] = data
                assert mapped[at : at + 70_000] == bytes(self.expected[at : at + 70_000]), self.where(kind, at)
        elif kind == "sync":
            os.fsync(self.fd)
        elif kind == "reopen":
            os.close(self.fd)
            assert self.path.read_bytes() == bytes(self.expected), self.where(kind, 0)
            self.fd = os.open(self.path, os.O_RDWR)

    def where(self, kind: str, at: int) -> str:
        return f"call {self.calls}: {kind} at {at} of {len(self.expected)}"


def test_one_file_under_every_kind_of_call(store_path: Path, where: Path) -> None:
    with serving(store_path, where):
        exerciser = Exerciser(where / "files" / "a", seed=1)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            exerciser.step()
        os.close(exerciser.fd)
        assert (where / "files" / "a").read_bytes() == bytes(exerciser.expected)
        print(f"{exerciser.calls} calls")
    with serving(store_path, where, "--read-only"):
        assert (where / "files" / "a").read_bytes() == bytes(exerciser.expected)


class Saver:
    """A program that saves numbered contents by rename, until the mount breaks under it."""

    def __init__(self, files: Path, name: str, draw: random.Random) -> None:
        self.path, self.draw = files / name, draw
        self.saved = self.tried = 0
        self.size = 200_000 + draw.randrange(300_000)

    def content(self, number: int) -> bytes:
        return random.Random(f"{self.path.name} {number}").randbytes(self.size)

    def run(self) -> None:
        try:
            while True:
                self.tried += 1
                temporary = self.path.with_suffix(".tmp")
                temporary.write_bytes(self.content(self.tried))
                temporary.rename(self.path)
                self.saved = self.tried
        except OSError:
            return  # the process was killed

    def check(self) -> None:
        """The file is the last one that was saved, or the one that was being renamed; nothing else."""
        if self.saved or self.path.exists():
            assert self.path.read_bytes() in (self.content(self.saved), self.content(self.tried))


def test_killed_again_and_again_while_programs_save(store_path: Path, where: Path) -> None:
    draw = random.Random(2)
    savers = [Saver(where / "files", f"s{n}", draw) for n in range(3)]
    end, kills = time.monotonic() + SECONDS, 0
    while time.monotonic() < end or not kills:
        with serving(store_path, where) as process:
            for saver in savers:
                saver.check()
                saver.saved = saver.tried if saver.path.exists() and is_last(saver) else saver.saved
            threads = [threading.Thread(target=saver.run) for saver in savers]
            for thread in threads:
                thread.start()
            time.sleep(draw.uniform(0.2, 1.5))
            process.send_signal(signal.SIGKILL)
            process.wait()
            for thread in threads:
                thread.join()
            command("umount", "--lazy", str(where))
            kills += 1
    with serving(store_path, where):
        for saver in savers:
            saver.check()
        assert {p.suffix for p in (where / "files").iterdir()} <= {"", ".tmp"}
    with kvfs.open(store_path) as store:
        assert store.wait_ready()
        assert store.verify().ok
    print(f"{kills} kills, {sum(saver.saved for saver in savers)} saves")


def is_last(saver: Saver) -> bool:
    return saver.path.read_bytes() == saver.content(saver.tried)
