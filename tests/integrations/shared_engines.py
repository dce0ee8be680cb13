"""Engines of one model with ``share="engines"``: what one stores, each other one reads. Canonical pages throughout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

import kvfs
from kvfs.integrations.transformers import namespace_for
from kvfs.integrations.weights import model_revision
from tests.integrations.lightllm_cache import FakeEngine as FakeWorker
from tests.integrations.lightllm_cache import canonical, set_canonical
from tests.integrations.lightllm_cache import start as start_lightllm
from tests.integrations.sglang_pools import FakeEngine, MHATokenToKVPoolHost

PAGE = 64
CAPACITY = "64MiB"


class Sharing(Protocol):
    """An engine with a store. ``identity``: digest of its namespace."""

    @property
    def identity(self) -> bytes: ...

    def put(self, tokens: Sequence[int], pages: Sequence[bytes]) -> int:
        """How many pages of the prompt are stored then."""

    def get(self, tokens: Sequence[int]) -> list[bytes]:
        """The pages of the prompt that the engine finds, in its own memory."""

    def close(self) -> None: ...


class Transformers:
    """``PrefixCache`` over a model of transformers; a cache of its own kind is the engine's memory."""

    def __init__(self, path: Path, model: Any, folder: Path, **arguments: Any) -> None:
        self.store = kvfs.open(path, capacity=CAPACITY)
        self.model, revision = model, model_revision(str(folder))
        try:
            self.cache = namespace_for(self.store, model, **{"share": "engines", "revision": revision, **arguments})
        except BaseException:
            self.store.close()
            raise
        self.layout = self.cache.namespace.layout

    @property
    def identity(self) -> bytes:
        return self.cache.namespace.identity.digest

    def put(self, tokens: Sequence[int], pages: Sequence[bytes]) -> int:
        past, _ = self.cache.load(list(tokens[:1]))
        (group,), heads, dim = self.layout.groups, self.layout.groups[0].heads, self.model.config.head_dim
        shape = (len(group.layers), 2, heads, len(tokens), dim)
        both = torch.empty(shape, dtype=self.model.dtype)
        kvfs.unpack(self.layout, b"".join(pages), both, "layer,kv,head,token,dim")
        for layer, (key, value) in enumerate(both):
            past.update(key[None], value[None], layer)
        done = self.cache.save(list(tokens), past)
        return done.stored + done.skipped

    def get(self, tokens: Sequence[int]) -> list[bytes]:
        past, found = self.cache.load([*tokens, 1])
        if not found:
            return []
        both = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in past.layers])
        packed = bytes(kvfs.pack(self.layout, both[..., :found, :].contiguous(), "layer,kv,head,token,dim"))
        return [packed[at : at + self.layout.page_bytes] for at in range(0, len(packed), self.layout.page_bytes)]

    def close(self) -> None:
        self.store.close()


class SGLang:
    """The hierarchical cache's adapter over a host pool."""

    def __init__(self, path: Path, folder: Path, layout: str, *, layers: int, heads: int, dim: int, dtype: Any) -> None:
        pool = MHATokenToKVPoolHost(layout, page_size=PAGE, pages=16, layers=layers, heads=heads, dim=dim, dtype=dtype)
        server = SimpleNamespace(
            model_path=str(folder),
            revision=None,
            load_format="auto",
            dtype="auto",
            quantization=None,
            download_dir=None,
        )
        self.engine = FakeEngine.start(path, pool, server=server, weights_id="", share="engines")

    @property
    def identity(self) -> bytes:
        return self.engine.pages.attached.space.identity.digest

    def put(self, tokens: Sequence[int], pages: Sequence[bytes]) -> int:
        return self.engine.put(tokens, pages)

    def get(self, tokens: Sequence[int]) -> list[bytes]:
        found = self.engine.get(tokens, self.engine.lookup(tokens))
        return [page for page in found if page is not None]

    def close(self) -> None:
        self.engine.close()


class LightLLM:
    """The service of the disk worker over a CPU cache; the worker tells prompts, as with the patch."""

    def __init__(self, path: Path, folder: Path, *, layers: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self._shape: Any = {"layers": layers, "heads": heads, "dim": dim, "dtype": dtype}
        self._tensor = torch.empty((16, PAGE * layers * 2 * heads * dim * dtype.itemsize), dtype=torch.uint8)
        server = {
            "model_dir": str(folder), "data_type": str(dtype).removeprefix("torch."), "quant_type": "none",
            "llm_kv_type": "None", "cpu_cache_token_page_size": PAGE,
        }  # fmt: skip
        service = start_lightllm(path, self._tensor, server=server, prompts=True, weights_id="", share="engines")
        self._engine = FakeWorker(self._tensor, service, PAGE, prompts=True)

    @property
    def identity(self) -> bytes:
        return self._engine.service.identity

    def put(self, tokens: Sequence[int], pages: Sequence[bytes]) -> int:
        return self._engine.put(tokens, [self._of(page) for page in pages])

    def get(self, tokens: Sequence[int]) -> list[bytes]:
        found = self._engine.get(tokens, self._engine.lookup(tokens))
        return [self._canonical(page) for page in found if page is not None]

    def close(self) -> None:
        self._engine.close()

    def _of(self, page: bytes) -> bytes:
        one = torch.empty_like(self._tensor[:1])
        set_canonical(one, 0, page, **self._shape)
        return one.numpy().tobytes()

    def _canonical(self, page: bytes) -> bytes:
        return canonical(torch.frombuffer(bytearray(page), dtype=torch.uint8)[None], 0, **self._shape)
