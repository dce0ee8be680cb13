"""Random calls on two mounts of one store against a dictionary: what is read is what was saved, or there is no file."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import kvfs
from tests.mount.kernel import Kernel, Mounted

NAMES = ["a", "b", "c", "folder/a", "folder/b"]
STEPS = 250


class Model:
    """The mounts, and what every name must hold. Two drafts of a name never exist at the same time."""

    def __init__(self, store: kvfs.Store, seed: int) -> None:
        self.store = store
        self.draw = random.Random(seed)
        self.mounts = [Mounted(store), Mounted(store)]
        self.mounts[0].kernel.mkdir("files/folder")
        self.content: dict[str, bytes] = {}
        self.readers: list[tuple[Kernel, int, bytes]] = []

    def step(self) -> None:
        kernel = self.draw.choice(self.mounts).kernel
        name = self.draw.choice(NAMES)
        calls = [self.save, self.save, self.edit, self.truncate, self.rename, self.unlink, self.read, self.read,
                 self.open_reader, self.close_reader, self.remount]  # fmt: skip
        self.draw.choice(calls)(kernel, name)

    def data(self) -> bytes:
        size = self.draw.choice([0, 1, 4_096, 65_536, 65_537, 200_000])
        return self.draw.randbytes(size // 2) * 2 + b"x" * (size % 2)

    def save(self, kernel: Kernel, name: str) -> None:
        data = self.data()
        if self.draw.random() < 0.5:
            kernel.save(f"files/{name}", data)
        else:
            kernel.save("files/new", data)
            kernel.rename("files/new", f"files/{name}")
        self.content[name] = data

    def edit(self, kernel: Kernel, name: str) -> None:
        if name not in self.content:
            return
        fd = kernel.open(f"files/{name}", os.O_RDWR)
        at = self.draw.randrange(len(self.content[name]) + 1)
        kernel.write(fd, b"edited", at)
        old = self.content[name]
        self.content[name] = old[:at] + b"edited" + old[at + 6 :]
        assert kernel.read(fd) == self.content[name]
        kernel.close(fd)

    def truncate(self, kernel: Kernel, name: str) -> None:
        if name in self.content:
            size = self.draw.randrange(100_000)
            kernel.truncate(f"files/{name}", size)
            self.content[name] = self.content[name][:size].ljust(size, b"\0")

    def rename(self, kernel: Kernel, name: str) -> None:
        target = self.draw.choice(NAMES)
        if name in self.content and target != name:
            kernel.rename(f"files/{name}", f"files/{target}")
            self.content[target] = self.content.pop(name)

    def unlink(self, kernel: Kernel, name: str) -> None:
        if name in self.content:
            kernel.unlink(f"files/{name}")
            del self.content[name]

    def read(self, kernel: Kernel, name: str) -> None:
        if name in self.content:
            assert kernel.stat(f"files/{name}").size == len(self.content[name])
            assert kernel.load(f"files/{name}") == self.content[name]
        else:
            assert not kernel.exists(f"files/{name}")

    def open_reader(self, kernel: Kernel, name: str) -> None:
        if name in self.content and len(self.readers) < 4:
            fd = kernel.open(f"files/{name}")
            if kernel.open_files[fd][0].backing >= 0:
                self.readers.append((kernel, fd, self.content[name]))
            else:
                kernel.close(fd)

    def close_reader(self, kernel: Kernel, name: str) -> None:
        if self.readers:
            kernel, fd, data = self.readers.pop(self.draw.randrange(len(self.readers)))
            assert kernel.read(fd) == data, "a file that is open keeps its content"
            kernel.close(fd)

    def remount(self, kernel: Kernel, name: str) -> None:
        if self.draw.random() < 0.2:
            gone = self.mounts.pop(0)
            fd = gone.kernel.open("files/half", os.O_WRONLY | os.O_CREAT)
            gone.kernel.write(fd, b"half")
            self.readers = [r for r in self.readers if r[0] is not gone.kernel]
            gone.close()
            self.mounts.append(Mounted(self.store))

    def check(self) -> None:
        for mounted in self.mounts:
            found = {f"folder/{n}" for n in mounted.kernel.listdir("files/folder")}
            found |= set(mounted.kernel.listdir("files")) - {"folder"}
            assert found == set(self.content)
            for name in NAMES:
                self.read(mounted.kernel, name)

    def close(self) -> None:
        for mounted in self.mounts:
            mounted.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_agree_with_a_dictionary(store_path: Path, seed: int) -> None:
    with kvfs.open(store_path, capacity="128MiB") as store:
        model = Model(store, seed)
        try:
            for _ in range(STEPS):
                model.step()
            model.check()
            for kernel, fd, _ in list(model.readers):
                kernel.close(fd)
            for mounted in model.mounts:
                mounted.sweep()
                assert mounted.tree.drafts == {}
                assert mounted.table._files == {}
            model.check()
        finally:
            model.close()
