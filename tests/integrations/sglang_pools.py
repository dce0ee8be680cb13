"""Host pools as SGLang lays them out, without SGLang, and an engine over them for the contract of adapters."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from kvfs.integrations.sglang import attachment as module
from kvfs.integrations.sglang.attachment import Attachment
from kvfs.integrations.sglang.identity import ModelFiles
from kvfs.integrations.sglang.linker_pages import LinkerPages
from kvfs.integrations.sglang.pages import HiCachePages
from kvfs.integrations.sglang.pools import device_pool
from kvfs.integrations.sglang.ranks import Rank
from kvfs.integrations.sglang.settings import settings_of
from kvfs.store import open_store
from kvfs.system.files import Files

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
GRANULE = 16
POISON = 0x7B


def hashes(tokens: Sequence[int], page: int, seed: bytes = b"") -> list[str]:
    """SGLang's page hashes, from the definition."""
    found = list[str]()
    for at in range(0, len(tokens) - page + 1, page):
        seed = hashlib.sha256(seed + b"".join(t.to_bytes(4, "little") for t in tokens[at : at + page])).digest()
        found.append(seed.hex())
    return found


class MHATokenToKVPoolHost:
    """The attributes and the memory of SGLang's pool of this name."""

    def __init__(
        self, layout: str = "page_first", *, page_size: int = 64, pages: int = 96, layers: int = 3, heads: int = 2,
        dim: int = 8, start_layer: int = 0, dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.layout, self.page_size, self.dtype = layout, page_size, dtype
        self.layer_num = self.target_layer_num = layers
        self.head_num, self.head_dim, self.v_head_dim, self.start_layer = heads, dim, dim, start_layer
        slots = page_size * pages
        shape = {
            "layer_first": (2, layers, slots, heads, dim),
            "page_first": (2, slots, layers, heads, dim),
            "page_first_direct": (2, pages, layers, page_size, heads, dim),
            "page_head": (2, pages, heads, page_size, layers, dim),
        }.get(layout, (2, pages, heads * page_size * layers * dim))
        self.kv_buffer = torch.empty(shape, dtype=dtype)
        poison(self)

    @property
    def k_buffer(self) -> torch.Tensor:
        return self.kv_buffer[0]

    @property
    def v_buffer(self) -> torch.Tensor:
        return self.kv_buffer[1]


class MLATokenToKVPoolHost:
    def __init__(
        self, layout: str = "page_first", *, page_size: int = 64, pages: int = 96, layers: int = 3, rank: int = 24,
        rope: int = 8, start_layer: int = 0,
    ) -> None:  # fmt: skip
        self.layout, self.page_size, self.dtype = layout, page_size, torch.bfloat16
        self.layer_num = self.target_layer_num = layers
        self.kv_lora_rank, self.qk_rope_head_dim, self.kv_cache_dim = rank, rope, rank + rope
        self.start_layer = start_layer
        slots = page_size * pages
        shape = {
            "layer_first": (layers, slots, 1, rank + rope),
            "page_first": (slots, layers, 1, rank + rope),
            "page_first_direct": (pages, layers, page_size, 1, rank + rope),
        }[layout]
        self.kv_buffer = torch.empty(shape, dtype=self.dtype)
        poison(self)


def _all_bytes(pool: Any) -> list[torch.Tensor]:
    if hasattr(pool, "kv_buffer"):
        buffers = pool.kv_buffer if isinstance(pool.kv_buffer, (list, tuple)) else [pool.kv_buffer]
    else:
        buffers = [*pool.k_buffer, *pool.v_buffer]
    return [buffer.view(torch.uint8) for buffer in buffers]


def poison(pool: Any) -> None:
    for buffer in _all_bytes(pool):
        buffer.fill_(POISON)


def cells(pool: Any, slot: int) -> list[torch.Tensor]:
    """K and V (or latents) of one token slot: views of [layer, head, dim], straight from SGLang's layouts."""
    latent = "MLA" in type(pool).__name__
    page, token = divmod(slot, pool.page_size)
    found = []
    for buffer in [pool.kv_buffer] if latent else [pool.k_buffer, pool.v_buffer]:
        if pool.layout == "layer_first":
            found.append(buffer[:, slot])
        elif pool.layout == "page_first":
            found.append(buffer[slot])
        elif pool.layout == "page_first_direct":
            found.append(buffer[page, :, token])
        else:
            found.append(buffer[page, :, token].transpose(0, 1))
    return found


def _of_device(pool: Any, page: int) -> list[list[torch.Tensor]]:
    """K and V of a page of a device pool: views of [token, head, dim] for each layer."""
    some = slice(page * pool.page_size, (page + 1) * pool.page_size)
    both = [pool.kv_buffer] if hasattr(pool, "kv_buffer") else [pool.k_buffer, pool.v_buffer]
    return [[layer[some] for layer in tensors] for tensors in both]


def page_of(pool: Any, page: int) -> bytes:
    """Canonical bytes of a page of the pool: [granule][layer][head][token][K, V]."""
    if hasattr(pool, "layout"):
        tokens = [torch.cat(cells(pool, page * pool.page_size + t), dim=-1) for t in range(pool.page_size)]
        whole = torch.stack(tokens)  # token, layer, head, cell
    else:
        whole = torch.cat([torch.stack(layers, dim=1) for layers in _of_device(pool, page)], dim=-1)
    grouped = whole.reshape(-1, GRANULE, *whole.shape[1:]).permute(0, 2, 3, 1, 4)
    return grouped.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def set_page(pool: Any, page: int, content: bytes) -> None:
    """Make ``content`` (canonical bytes) a page of the pool."""
    data = torch.frombuffer(bytearray(content), dtype=pool.dtype)
    if not hasattr(pool, "layout"):
        pieces = _of_device(pool, page)
        heads, sizes = pieces[0][0].shape[1], [views[0].shape[2] for views in pieces]
        whole = data.reshape(-1, pool.layer_num, heads, GRANULE, sum(sizes)).permute(0, 3, 1, 2, 4)
        for views, part in zip(pieces, whole.flatten(0, 1).split(sizes, dim=-1), strict=True):
            for layer, view in enumerate(views):
                view.copy_(part[:, layer])
        return
    example = torch.cat(cells(pool, page * pool.page_size), dim=-1)
    layers, heads, cell = example.shape
    tokens = data.reshape(-1, layers, heads, GRANULE, cell).permute(0, 3, 1, 2, 4).reshape(-1, layers, heads, cell)
    for t in range(pool.page_size):
        at = 0
        for view in cells(pool, page * pool.page_size + t):
            view.copy_(tokens[t, :, :, at : at + view.shape[-1]])
            at += view.shape[-1]


def page_bytes(pool: Any) -> int:
    return len(page_of(pool, 0))


def slots(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    """The slots of these pages of the pool, token by token."""
    return torch.tensor([p * pool.page_size + t for p in pages for t in range(pool.page_size)], dtype=torch.int64)


class MHATokenToKVPool:
    """The attributes and the memory of SGLang's device pool of this name; page 0 is never given out."""

    kv_cache_layout = "nhd"

    def __init__(
        self, *, page_size: int = 64, pages: int = 96, layers: int = 3, heads: int = 2, dim: int = 8,
        start_layer: int = 0, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.page_size, self.dtype, self.layer_num, self.start_layer = page_size, torch.bfloat16, layers, start_layer
        self.head_num, self.head_dim, self.v_head_dim = heads, dim, dim
        shape = (page_size * (pages + 1), heads, dim)
        self.k_buffer, self.v_buffer = (
            [torch.empty(shape, dtype=self.dtype, device=device) for _ in range(layers)] for _ in range(2)
        )
        poison(self)


class MLATokenToKVPool:
    """The same of latents."""

    def __init__(self, *, page_size: int = 64, pages: int = 96, layers: int = 3, rank: int = 24, rope: int = 8) -> None:
        self.page_size, self.dtype, self.layer_num, self.start_layer = page_size, torch.bfloat16, layers, 0
        self.kv_lora_rank, self.qk_rope_head_dim, self.kv_cache_dim = rank, rope, rank + rope
        self.kv_buffer = [
            torch.empty((page_size * (pages + 1), 1, rank + rope), dtype=self.dtype) for _ in range(layers)
        ]
        poison(self)


class FakeCounter:
    """SGLang's counter of layers: a future for each layer of a batch."""

    def __init__(self, layers: int) -> None:
        self._layers, self.batches = layers, list[list[Future[None]]]()

    def update_producer(self) -> int:
        self.batches.append([Future() for _ in range(self._layers)])
        return len(self.batches) - 1

    def complete(self, index: int, layer: int) -> None:
        self.batches[index][layer].set_result(None)

    def fail(self, index: int, error: BaseException) -> None:
        for future in self.batches[index]:
            if not future.done():
                future.set_exception(error)

    def finish(self, index: int) -> bool:
        return all(future.exception(60) is None for future in self.batches[index])

    def reset(self) -> None:
        self.batches.clear()


class FakeLinkerEngine:
    """Stands for SGLang's radix tree with a linker: nodes are offloaded, tails of prompts are loaded."""

    def __init__(self, pool: Any, pages: LinkerPages, counter: Any) -> None:
        self.pool, self.pages, self.counter = pool, pages, counter
        self._closed = False

    @classmethod
    def start(
        cls, path: Path, pool: Any, *, rank: Rank | None = None, files: Files | None = None,
        replica: tuple[int, int] = (0, 1), **settings: Any,
    ) -> FakeLinkerEngine:  # fmt: skip
        extra = {"path": str(path), "capacity": "64MiB", "weights_id": "0123abcd", "ring_bytes": "8MiB", **settings}
        options, counter = settings_of(extra, "a flag"), FakeCounter(pool.layer_num)
        opened: Callable[..., Any] = functools.partial(open_store, files=files) if files is not None else open_store
        before, module.open_store = module.open_store, opened  # type: ignore[assignment]
        try:
            attached = Attachment.open(
                options, rank or Rank(), ModelFiles(None), "org/model", device_pool(pool), replica
            )  # fmt: skip
        finally:
            module.open_store = before
        return cls(pool, LinkerPages(attached, options, counter, pool.start_layer), counter)

    def put(self, tokens: Sequence[int], pages: Sequence[bytes], first: int = 0) -> int:
        names = hashes(tokens, self.pool.page_size)[first : first + len(pages)]
        mine = range(1, len(pages) + 1)
        for page, content in zip(mine, pages, strict=True):
            set_page(self.pool, page, content)
        assert self.pages.offload(names, slots(self.pool, mine), None)
        return len(pages) if self.reported() else 0

    def reported(self) -> bool:
        end = time.monotonic() + 60
        while not self.pages.completed():
            assert time.monotonic() < end
            time.sleep(0.002)
        return self.pages.pop()

    def lookup(self, tokens: Sequence[int]) -> int:
        return self.pages.lookup(hashes(tokens, self.pool.page_size))

    def get(self, tokens: Sequence[int], count: int) -> list[bytes | None]:
        names, mine = hashes(tokens, self.pool.page_size)[:count], list(range(1, count + 1))[::-1]
        poison(self.pool)
        untouched = page_of(self.pool, mine[0])
        assert self.pages.load("rid", names, slots(self.pool, mine))
        index = self.pages.start(None)
        used = self.counter.finish(index)
        found = [page_of(self.pool, page) for page in mine]
        assert not used or untouched not in found
        return [page if page != untouched else None for page in found]

    def counters(self) -> Mapping[str, int]:
        return dict(self.pages._attached.store.stats()["counters"])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.pages.close()


class FakeEngine:
    """Stands for SGLang's controller: batches of 128 pages, host pages in an order of their own."""

    batch = 128

    def __init__(self, pool: Any, pages: HiCachePages) -> None:
        self.pool, self.pages = pool, pages
        self._free = list(range(len(slots_of(pool)) // pool.page_size))[::-1]

    @classmethod
    def start(
        cls, path: Path, pool: Any, *, rank: Rank | None = None, files: Files | None = None, server: Any = None,
        **settings: Any,
    ) -> FakeEngine:  # fmt: skip
        extra = {"path": str(path), "capacity": "64MiB", "weights_id": "0123abcd", "ring_bytes": "8MiB", **settings}
        pages = HiCachePages(settings_of(extra), rank or Rank(), ModelFiles(server), "org/model")
        opened: Callable[..., Any] = functools.partial(open_store, files=files) if files is not None else open_store
        before, module.open_store = module.open_store, opened  # type: ignore[assignment]
        try:
            pages.attach(pool)
        finally:
            module.open_store = before
        return cls(pool, pages)

    def put(self, tokens: Sequence[int], pages: Sequence[bytes], first: int = 0) -> int:
        names, mine = hashes(tokens, self.pool.page_size), self._free[: len(pages)]
        for page, content in zip(mine, pages, strict=True):
            set_page(self.pool, page, content)
        return self.save(names[first : first + len(pages)], mine, names[:first])

    def save(self, names: Sequence[str], mine: Sequence[int], prefix: list[str] | None) -> int:
        done = 0
        for at in range(0, len(names), self.batch):
            batch = list(names[at : at + self.batch])
            good = self.pages.save(batch, slots(self.pool, mine[at : at + self.batch]), prefix)
            done += good.index(False) if False in good else len(good)
            if not all(good):
                break
            prefix = None if prefix is None else prefix + batch
        return done

    def lookup(self, tokens: Sequence[int]) -> int:
        return self.pages.exists(hashes(tokens, self.pool.page_size), None)

    def get(self, tokens: Sequence[int], count: int) -> list[bytes | None]:
        names, mine, found = hashes(tokens, self.pool.page_size)[:count], self._free[-count:], list[bytes | None]()
        poison(self.pool)
        untouched = page_of(self.pool, mine[0])
        good = self.pages.load(names, slots(self.pool, mine), None)
        for page, fine in zip(mine, good, strict=True):
            content = page_of(self.pool, page)
            assert fine or content == untouched, "a page that is refused was touched"
            found.append(content if fine else None)
        return found

    def counters(self) -> Mapping[str, int]:
        return dict(self.pages.attached.store.stats()["counters"])

    def close(self) -> None:
        self.pages.close()


def slots_of(pool: Any) -> range:
    """All slots of a host pool."""
    return range(sum(b.numel() for b in _all_bytes(pool)) // sum(v.numel() * v.element_size() for v in cells(pool, 0)))
