"""Keys and memory objects as LMCache has them, and an engine over the adapter's objects without LMCache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvfs.integrations.lmcache import objects as module
from kvfs.integrations.lmcache.objects import Events, Objects
from kvfs.integrations.lmcache.settings import settings_of
from kvfs.store import open_store
from kvfs.system.files import Files

CHUNK = 256  # tokens
SECONDS = 60.0
PARAMS = {"weights_id": "0123abcd", "capacity": "64MiB", "threads": 2}


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes
    model_name: str = "org/model"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


class Dtype:
    """A dtype of torch, by what the adapter asks of it."""

    def __init__(self, name: str, itemsize: int) -> None:
        self._name, self.itemsize = name, itemsize

    def __str__(self) -> str:
        return f"torch.{self._name}"


UINT8, BF16, FP16 = Dtype("uint8", 1), Dtype("bfloat16", 2), Dtype("float16", 2)


class Memory:
    """A memory object of ``room`` bytes, of which ``used`` are its content."""

    def __init__(self, content: bytes = b"", room: int | None = None, dtype: Dtype = UINT8) -> None:
        room = len(content) if room is None else room
        self._memory = (ctypes.c_ubyte * room)()
        self._used = room
        shape = (room // dtype.itemsize,)
        self.metadata = SimpleNamespace(shape=shape, dtype=dtype, shapes=[shape], dtypes=[dtype])
        if content:
            self.fill(content)

    @property
    def layout(self) -> Any:
        return self.metadata

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self._memory)[: self._used]

    @property
    def content(self) -> bytes:
        return bytes(self._memory)

    def get_size(self) -> int:
        return self._used

    def fill(self, content: bytes) -> None:
        """Make ``content`` the object, as a serializer does that needed less than its buffer."""
        ctypes.memmove(self._memory, content, len(content))
        self._used = len(content)


def keys_of(tokens: Sequence[int], **fields: Any) -> list[Key]:
    """A key for each whole chunk: a hash of the prefix."""
    digest, found = b"", list[Key]()
    for first in range(0, len(tokens) - CHUNK + 1, CHUNK):
        digest = hashlib.sha256(digest + repr(tokens[first : first + CHUNK]).encode()).digest()
        found.append(Key(digest, **fields))
    return found


def open_objects(path: Path, files: Files | None = None, **params: Any) -> Server:
    before = module.open_store
    module.open_store = functools.partial(open_store, files=files) if files is not None else open_store  # type: ignore[assignment]
    try:
        return Server({"path": str(path), **PARAMS, **params})
    finally:
        module.open_store = before


class Server:
    """The adapter's objects, called as LMCache's controllers call the adapter."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.ended = {name: threading.Semaphore(0) for name in ("store", "lookup", "load")}
        self.objects = Objects(settings_of(params), Events(*(self.ended[name].release for name in self.ended)))

    def store(self, keys: Sequence[Any], memory: Sequence[Any]) -> module.Stored:
        number = self.objects.submit_store(keys, memory)
        assert self.ended["store"].acquire(timeout=SECONDS)
        return self.objects.stores.take_all()[number]

    def look(self, keys: Sequence[Any], *layouts: Any) -> list[int]:
        """Numbers of the keys that were found, and are locked now."""
        return self._taken("lookup", self.objects.lookups, self.objects.submit_lookup(keys, dict(enumerate(layouts))))

    def load(self, keys: Sequence[Any], memory: Sequence[Any]) -> list[int]:
        return self._taken("load", self.objects.loads, self.objects.submit_load(keys, memory))

    def _taken(self, name: str, queue: Any, number: int) -> list[int]:
        assert self.ended[name].acquire(timeout=SECONDS)
        result = queue.take(number)
        assert result is not None and queue.take(number) is None, "a result is given once"
        return sorted(result.numbers)

    def unlock(self, keys: Sequence[Any]) -> None:
        self.objects.locks.remove(keys)

    def close(self) -> None:
        self.objects.close()


class FakeEngine:
    """LMCache as the contract of adapters uses an engine: objects are pages."""

    def __init__(self, server: Server, page_bytes: int) -> None:
        self.server, self._nbytes = server, page_bytes

    def put(self, tokens: Sequence[int], pages: Sequence[bytes], first: int = 0) -> int:
        keys = keys_of(tokens)[first : first + len(pages)]
        return len(pages) if self.server.store(keys, [Memory(page) for page in pages]).good else 0

    def lookup(self, tokens: Sequence[int]) -> int:
        keys = keys_of(tokens)
        found = self.server.look(keys)
        self.server.unlock([keys[n] for n in found])
        return next((n for n, number in enumerate(found) if n != number), len(found))

    def get(self, tokens: Sequence[int], count: int) -> list[bytes | None]:
        keys = keys_of(tokens)[:count]
        found = self.server.look(keys)
        poison = b"\xa5" * self._nbytes
        memory = [Memory(poison) for _ in keys]
        good = self.server.load([keys[n] for n in found], [memory[n] for n in found])
        loaded = {found[n] for n in good}
        self.server.unlock([keys[n] for n in found])
        assert not len(self.server.objects.locks)
        assert all(m.content == poison for n, m in enumerate(memory) if n not in found), "memory was touched"
        return [m.content if n in loaded else None for n, m in enumerate(memory)]

    def counters(self) -> Mapping[str, int]:
        return dict(self.server.objects.store.stats()["counters"])

    def close(self) -> None:
        self.server.close()
