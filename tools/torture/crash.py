"""crash: every write of a workload is recorded; images that a crash may have left are built from them, and opened.

Each block of 4 KiB that was not synced may be missing, or there in any of its versions; files that were not synced may
be missing. Names that changed since their folder was synced may be the old ones: removed files are back, renamed ones
have their old names, the last changes first. After a crash the index is not trusted but rebuilt. Pages that level
"sync" acknowledged before the crash must be served; at every level, what was purged must stay away.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvfs.system.files import Files
from tools.torture.case import PROMPTS, get, namespace, open_store, put
from tools.torture.faults import lose_index
from tools.torture.judge import Judge

BLOCK = 4096
READY_SECONDS = 20.0
FAMILIES = 25


class Op(NamedTuple):
    """One change of the directory."""

    kind: str  # write, size, sync, move, remove; of a prompt: putting, ack, purging, purged
    path: str
    offset: int = 0
    data: bytes = b""
    to: str = ""


class Recorder(Files):
    """Files that records its changes below ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self.ops: list[Op] = []

    def _name(self, fd: int, name: str = "") -> str:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return os.path.relpath(os.path.join(path, name) if name else path, self._root)

    def create(self, name: str, mode: int, *, dir_fd: int, keep: list[int | None] | None = None) -> int:
        fd = super().create(name, mode, dir_fd=dir_fd, keep=keep)
        self.ops.append(Op("size", self._name(fd), 0))
        return fd

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        done = super().pwritev(fd, buffers, offset)
        data = b"".join(bytes(b) for b in buffers)[:done]
        self.ops.append(Op("write", self._name(fd), offset, data))
        return done

    def truncate(self, fd: int, nbytes: int) -> None:
        super().truncate(fd, nbytes)
        self.ops.append(Op("size", self._name(fd), nbytes))

    def fallocate(self, fd: int, offset: int, nbytes: int, *, keep_size: bool = False) -> None:
        super().fallocate(fd, offset, nbytes, keep_size=keep_size)
        if not keep_size:
            self.ops.append(Op("size", self._name(fd), os.fstat(fd).st_size))

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.ops.append(Op("sync", self._name(fd)))

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self.ops.append(Op("sync", self._name(fd)))

    def rename(self, src: str, dst: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        super().rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self.ops.append(Op("move", self._name(src_dir_fd, src), to=self._name(dst_dir_fd, dst)))

    def unlink(self, name: str, *, dir_fd: int) -> None:
        super().unlink(name, dir_fd=dir_fd)
        self.ops.append(Op("remove", self._name(dir_fd, name)))


@dataclass
class Content:
    """What a file may hold after a crash: versions of each block and of the size, the last synced one first."""

    blocks: dict[int, list[bytes]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=lambda: [0])
    synced: bool = False  # then its name is durable as well

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        for block in range(offset // BLOCK, -(-end // BLOCK)):
            versions = self.blocks.setdefault(block, [bytes(BLOCK)])
            first, last = max(offset, block * BLOCK), min(end, (block + 1) * BLOCK)
            now = bytearray(versions[-1])
            now[first - block * BLOCK : last - block * BLOCK] = data[first - offset : last - offset]
            versions.append(bytes(now))
        self.sizes.append(max(self.sizes[-1], end))

    def sync(self) -> None:
        self.blocks = {block: [versions[-1]] for block, versions in self.blocks.items()}
        self.sizes, self.synced = [self.sizes[-1]], True

    def image(self, chance: random.Random) -> bytes:
        """One of the contents that a crash may leave."""
        keep = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        size = self.sizes[-1] if chance.random() < 0.8 else chance.choice(self.sizes)
        data = bytearray(size)
        for block, versions in self.blocks.items():
            if block * BLOCK < size:
                version = versions[-1] if chance.random() < keep else chance.choice(versions)
                part = version[: size - block * BLOCK]
                data[block * BLOCK : block * BLOCK + len(part)] = part
        return bytes(data)


class Renamed(NamedTuple):
    """A change of names that a crash may undo: one that no sync of a folder has made durable yet."""

    before: str
    content: Content
    after: str = ""  # "": it was removed
    replaced: Content | None = None

    def folders(self) -> set[str]:
        return {os.path.dirname(name) or "." for name in (self.before, self.after) if name}

    def undo(self, files: dict[str, Content]) -> None:
        if self.after and files.get(self.after) is self.content:
            del files[self.after]
            if self.replaced is not None:
                files[self.after] = self.replaced
        elif self.after:
            return  # a later change of the name is durable
        files.setdefault(self.before, self.content)


def replay(ops: Sequence[Op]) -> tuple[dict[str, Content], list[Renamed]]:
    """(files, changes of names that may be undone) after these operations."""
    files: dict[str, Content] = {}
    loose: list[Renamed] = []
    for op in ops:
        if op.kind == "write":
            files.setdefault(op.path, Content()).write(op.offset, op.data)
        elif op.kind == "size":
            files.setdefault(op.path, Content()).sizes.append(op.offset)
        elif op.kind == "sync" and op.path in files:
            files[op.path].sync()
        elif op.kind == "sync":
            loose = [one for one in loose if op.path not in one.folders()]
        elif op.kind == "move" and op.path in files:
            content = files.pop(op.path)
            loose.append(Renamed(op.path, content, op.to, files.get(op.to)))
            files[op.to] = content
        elif op.kind == "remove" and op.path in files:
            loose.append(Renamed(op.path, files.pop(op.path)))
    return files, loose


def build(image: Path, store: Path, ops: Sequence[Op], chance: random.Random) -> None:
    """Write one image of a crash after ``ops`` to a directory."""
    shutil.rmtree(image, ignore_errors=True)
    for folder, _, _ in os.walk(store):
        if not os.path.relpath(folder, store).startswith("index/"):
            (image / os.path.relpath(folder, store)).mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("super", "kvfs.toml"):  # durable before anything else exists, by a link
        shutil.copy(store / name, image / name)
    files, loose = replay(ops)
    for one in reversed(loose[chance.randrange(len(loose) + 1) :]):
        one.undo(files)
    for path, content in files.items():
        if not path.startswith("index/") and (content.synced or chance.random() > 0.1):
            (image / path).write_bytes(content.image(chance))
    for name in ("gate", "main"):
        (image / name).touch()


def workload(path: Path, sync: str, chance: random.Random, judge: Judge) -> list[Op]:
    """Puts, loads, purges, closes; what was promised of a prompt is part of the record."""
    recorder = Recorder(path)
    for _ in range(3):
        with open_store(path, recorder, sync=sync) as store:
            ns = namespace(store)
            for _ in range(20):
                family, chunks = chance.randrange(FAMILIES), chance.randint(1, 20)
                if chance.random() < 0.15:
                    recorder.ops.append(Op("purging", str(family)))
                    store.purge(ns, prefix=PROMPTS.tokens(family, 20))
                    recorder.ops.append(Op("purged", str(family)))
                    continue
                recorder.ops.append(Op("putting", str(family)))
                result = put(ns, PROMPTS.tokens(family, chunks), judge)
                if result is not None and result.stored + result.skipped == chunks:
                    recorder.ops.append(Op("ack", str(family), chunks))
                get(ns, PROMPTS.tokens(chance.randrange(FAMILIES), 20), judge)
        if chance.random() < 0.3:
            lose_index(path)
    return recorder.ops


def run(folder: Path, seed: int, seconds: float, judge: Judge) -> None:
    """Workloads, and images of each, until the time is up."""
    chance = random.Random(seed)
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        sync = ("cache", "sync")[number % 2]
        judge.context = f"crash, seed {seed}, workload {number}, level {sync}: "
        judge.fault = "after a crash"
        store, image = folder / "store", folder / "image"
        shutil.rmtree(store, ignore_errors=True)
        ops = workload(store, sync, chance, judge)
        for _ in range(40):
            at = chance.randrange(1, len(ops) + 1)
            build(image, store, ops[:at], chance)
            check(image, ops[:at], sync, judge)
            judge.counts["images"] += 1
            if time.monotonic() > end:
                break
        number += 1


def promised(ops: Sequence[Op], sync: str) -> dict[int, int]:
    """Family -> chunks that must be served; 0: none may be."""
    found: dict[int, int] = {}
    for op in ops:
        if op.kind == "putting" and found.get(int(op.path)) == 0:
            del found[int(op.path)]
        elif op.kind == "purging":
            found.pop(int(op.path), None)
        elif op.kind == "purged":
            found[int(op.path)] = 0
        elif op.kind == "ack" and sync == "sync":
            found[int(op.path)] = max(op.offset, found.get(int(op.path), 0))
    return found


def check(image: Path, ops: Sequence[Op], sync: str, judge: Judge) -> None:
    """Check that the image opens, serves correct bytes only, keeps all promises, and takes new pages."""
    store = judge.call("open", lambda: open_store(image), may_raise=True)
    if store is None or not store.wait_ready(READY_SECONDS):
        judge.found("unopenable", "an image does not open")
        return
    with store:
        ns = namespace(store)
        for family in range(FAMILIES):
            get(ns, PROMPTS.tokens(family, 20), judge, views=family % 3 == 0)
        for family, chunks in promised(ops, sync).items():
            found = get(ns, PROMPTS.tokens(family, chunks or 20), judge)
            if found < chunks:
                judge.found("lost", f"{found} of {chunks} pages of family {family}")
            elif found and not chunks:
                judge.found("wrong", f"{found} purged pages of family {family} are back")
        put(ns, PROMPTS.tokens(1000, 5), judge)
        if get(ns, PROMPTS.tokens(1000, 5), judge) != 5:
            judge.found("unopenable", f"no new pages: {store.stats()}")
        store.wait_ready(READY_SECONDS)  # a starved machine may have opened the breaker
        if not store._shared.c.index.read(lambda s: s.check_ledger(), 5.0):
            judge.found("raised", "the ledger does not add up")
