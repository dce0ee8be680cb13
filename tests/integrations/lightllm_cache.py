"""LightLLM's CPU cache and the calls of its disk worker, without LightLLM."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from kvfs.integrations.lightllm import service as module
from kvfs.integrations.lightllm.service import PyLocalCacheService
from kvfs.integrations.lightllm.tasks import PyState, PyTask
from kvfs.store import open_store
from kvfs.system.files import Files

SECONDS = 60.0
POISON = 0x7B
GRANULE = 16
SETTINGS = {"capacity": "64MiB", "weights_id": "0123abcd", "ring_bytes": "8MiB"}


def hashes(tokens: Sequence[int], page: int) -> list[int]:
    """LightLLM's hashes: of all whole pages but one that ends the prompt."""
    total, found = xxhash.xxh3_128(), list[int]()
    for at in range(0, (len(tokens) - 1) // page * page, page):
        total.update(b"".join(t.to_bytes(8, "little") for t in tokens[at : at + page]))
        found.append(total.intdigest())
    return found


@contextlib.contextmanager
def environment(settings: Mapping[str, Any], server: Mapping[str, Any] | None) -> Iterator[None]:
    """The variables that a LightLLM server has."""
    names = {
        "KVFS_LIGHTLLM": json.dumps(settings),
        "LIGHTLLM_START_ARGS": None if server is None else json.dumps(server),
    }
    before = {name: os.environ.get(name) for name in names}
    for name, value in names.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def start(
    path: Path, tensor: torch.Tensor, *, server: Mapping[str, Any] | None = None, files: Files | None = None,
    prompts: bool = False, **settings: Any,
) -> PyLocalCacheService:  # fmt: skip
    before = module.open_store
    module.open_store = functools.partial(open_store, files=files) if files is not None else open_store  # type: ignore[assignment]
    try:
        with environment({"path": str(path), **SETTINGS, **settings}, server):
            return PyLocalCacheService(tensor, str(path) + ".file", prompts=prompts)
    finally:
        module.open_store = before


def ended(task: PyTask, what: str = "ready") -> list[PyState]:
    """Wait as LightLLM's worker does."""
    end = time.monotonic() + SECONDS
    while not getattr(task, what)():
        assert time.monotonic() < end, "a task does not end"
        time.sleep(0.001)
    return task.state()


class FakeEngine:
    """Stands for the disk worker: all pages of a load are used, or none."""

    def __init__(self, tensor: torch.Tensor, service: PyLocalCacheService, page_tokens: int, prompts: bool) -> None:
        self.tensor, self.service, self._size, self._prompts = tensor, service, page_tokens, prompts
        self._free = list(range(len(tensor)))[::-1]

    def put(self, tokens: Sequence[int], pages: Sequence[bytes], first: int = 0) -> int:
        names = self._names(tokens)[: first + len(pages)]
        mine = self._free[: len(names)]
        for page, content in zip(mine[first:], pages, strict=True):
            self.tensor[page] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        task = self.service.create(hash_128s=names, kv_page_indexer=torch.tensor(mine), mode="w", start_pos=first)
        states = ended(task)
        return next((n for n, state in enumerate(states) if state is not PyState.Finished), len(states))

    def lookup(self, tokens: Sequence[int]) -> int:
        return [*self.service.query(self._names(tokens)), False].index(False)

    def get(self, tokens: Sequence[int], count: int) -> list[bytes | None]:
        names, mine = self._names(tokens)[:count], self._free[len(self._free) - count :]
        self.tensor.fill_(POISON)
        poison = bytes([POISON]) * self.tensor.shape[1]
        states = ended(self.service.create(hash_128s=names, kv_page_indexer=torch.tensor(mine), mode="r"))
        found = [self.page(page) for page in mine]
        for state, content in zip(states, found, strict=True):
            assert (state is PyState.Finished) == (content != poison), "a page that is refused was touched"
        if not all(state is PyState.Finished for state in states):
            return [content if content != poison else None for content in found]
        return list(found)

    def page(self, number: int) -> bytes:
        return self.tensor[number].numpy().tobytes()

    def counters(self) -> Mapping[str, int]:
        return dict(self.service.counters())

    def close(self) -> None:
        self.service.close()

    def _names(self, tokens: Sequence[int]) -> list[int]:
        whole = [*tokens, 0]  # the contract's prompts end with a whole page
        names = hashes(whole, self._size)
        if self._prompts:
            self.service.tell_prompt(names, whole)
        return names


def canonical(tensor: torch.Tensor, page: int, *, layers: int, heads: int, dim: int, dtype: torch.dtype) -> bytes:
    """Canonical bytes of a page of LightLLM's cache, from the definition."""
    tokens = tensor.shape[1] // (layers * 2 * heads * dim * dtype.itemsize)
    whole = tensor[page].view(dtype).reshape(layers, tokens // GRANULE, GRANULE, 2, heads, dim)
    return whole.permute(1, 0, 4, 2, 3, 5).contiguous().view(torch.uint8).numpy().tobytes()


def set_canonical(
    tensor: torch.Tensor, page: int, content: bytes, *, layers: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    """Make ``content`` (canonical bytes) a page of LightLLM's cache."""
    data = torch.frombuffer(bytearray(content), dtype=dtype).reshape(-1, layers, heads, GRANULE, 2, dim)
    tensor[page] = data.permute(1, 0, 3, 4, 2, 5).contiguous().view(torch.uint8).reshape(-1)
