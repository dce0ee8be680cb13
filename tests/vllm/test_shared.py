"""One prefix for vLLM, transformers, SGLang and LightLLM: each reads what another one stored, bit for bit.

vLLM's part is the connector over cache views in the layouts of its GPU backends; transformers' a model of the library;
SGLang's its adapter over host pools; LightLLM's the service of its disk worker over a CPU cache.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvfs.errors import ConfigError, UnsupportedModelError
from tests.integrations.shared_engines import PAGE, LightLLM, SGLang, Sharing, Transformers
from tests.vllm.test_layouts import BLOCK, SPECS, Asked, Rank, finish, settle

LAYERS, HEADS, DIM, PAGES, GRANULE = 4, 2, 32, 4, 16
PAGE_BYTES = PAGE * LAYERS * HEADS * 2 * DIM * 4
SPECS["shared"] = [
    (FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32), LAYERS)
]


@pytest.fixture(scope="module")
def folder(model: Callable[[str], Path]) -> Path:
    return model("llama")


@pytest.fixture(scope="module")
def config(folder: Path) -> VllmConfig:
    args = EngineArgs(model=str(folder), enforce_eager=True, block_size=BLOCK, max_model_len=1024, dtype="float32")
    made = args.create_engine_config()
    made.device_config.device_type = "cuda"  # blocks ordered token by token, which the CPU's kernels do not keep
    return made


class Vllm:
    """The connector's manager and worker over cache views."""

    def __init__(self, path: Path, config: VllmConfig, layout: KVCacheLayout, **settings: Any) -> None:
        self.rank = Rank(config, "shared", layout, path, **{"share": "engines", "weights_id": "", **settings})
        self.blocks = {0: list(range(3, 3 + PAGES * PAGE // BLOCK))}
        self._jobs = iter(range(1, 100))

    @property
    def identity(self) -> bytes:
        return self.rank.manager._ns.identity.digest

    def put(self, tokens: Sequence[int], pages: Sequence[bytes]) -> int:
        for layer, cells in enumerate(cells_of(pages)):
            view = self.rank.views[f"model.layers.{layer}.self_attn.attn"]
            for n, block in enumerate(self.blocks[0]):
                view[block].view(torch.uint8).copy_(cells[n * BLOCK : (n + 1) * BLOCK].transpose(0, 1))
        asked, job = Asked(self.rank, f"put {len(tokens)}", list(tokens)), next(self._jobs)
        found = len(asked.hits().get(0, []))
        if found < len(pages):
            asked.save(self.blocks, job)
            assert finish(self.rank, job).success
            settle(self.rank)
        return len(Asked(self.rank, "look", list(tokens)).hits().get(0, []))

    def get(self, tokens: Sequence[int]) -> list[bytes]:
        for view in self.rank.views.values():
            view.view(torch.uint8).fill_(0x7B)
        asked, job = Asked(self.rank, "get", list(tokens)), next(self._jobs)
        count = len(asked.hits().get(0, []))
        if not count:
            return []
        mine = {0: self.blocks[0][: count * PAGE // BLOCK]}
        asked.load(mine, {0: 0}, job)
        assert finish(self.rank, job).success
        seen = self.rank.tokens(mine)
        return pages_of([seen[str(layer)] for layer in range(LAYERS)])

    def close(self) -> None:
        self.rank.close()


def cells_of(pages: Sequence[bytes]) -> list[torch.Tensor]:
    """For each layer [token, head, bytes of the cell], from canonical pages [granule][layer][head][token][cell]."""
    whole = torch.frombuffer(bytearray(b"".join(pages)), dtype=torch.uint8)
    whole = whole.reshape(-1, LAYERS, HEADS, GRANULE, 2 * DIM * 4)
    return [whole[:, layer].permute(0, 2, 1, 3).reshape(-1, HEADS, 2 * DIM * 4) for layer in range(LAYERS)]


def pages_of(layers: Sequence[torch.Tensor]) -> list[bytes]:
    whole = torch.stack([one.reshape(-1, GRANULE, HEADS, 2 * DIM * 4).transpose(1, 2) for one in layers], dim=1)
    data = whole.contiguous().numpy().tobytes()
    return [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]


def engines(path: Path, folder: Path, config: VllmConfig) -> dict[str, Callable[[], Sharing]]:
    def transformers() -> Transformers:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return Transformers(path, model, folder)

    shape = {"layers": LAYERS, "heads": HEADS, "dim": DIM, "dtype": torch.float32}
    return {
        "transformers": transformers,
        "vllm-LBNHC": lambda: Vllm(path, config, KVCacheLayout.LBNHC),
        "vllm-LBHNC": lambda: Vllm(path, config, KVCacheLayout.LBHNC),
        "sglang-page_first": lambda: SGLang(path, folder, "page_first", **shape),
        "sglang-layer_first": lambda: SGLang(path, folder, "layer_first", **shape),
        "lightllm": lambda: LightLLM(path, folder, **shape),
    }


NAMES = ("transformers", "vllm-LBNHC", "vllm-LBHNC", "sglang-page_first", "sglang-layer_first", "lightllm")


@pytest.mark.parametrize("writer", NAMES)
def test_every_engine_reads_what_another_one_stored(
    tmp_path: Path, folder: Path, config: VllmConfig, writer: str
) -> None:
    made = engines(tmp_path / "store", folder, config)
    assert set(made) == set(NAMES)
    draw = random.Random(writer)
    tokens = draw.choices(range(1000), k=PAGES * PAGE)
    floats = torch.randn(PAGES * PAGE_BYTES // 4, generator=torch.Generator().manual_seed(1)).numpy().tobytes()
    pages = [floats[at : at + PAGE_BYTES] for at in range(0, len(floats), PAGE_BYTES)]
    first = made[writer]()
    identity = first.identity
    assert first.put(tokens, pages) == PAGES
    first.close()
    for name, start in made.items():
        reader = start()
        assert reader.identity == identity, name
        assert reader.get(tokens) == pages, f"{writer} wrote, {name} read"
        assert reader.put(tokens, pages) == PAGES
        reader.close()


def test_without_sharing_no_engine_finds_pages_of_another(tmp_path: Path, folder: Path, config: VllmConfig) -> None:
    alone = Vllm(tmp_path / "store", config, KVCacheLayout.LBNHC, share="")
    other = Vllm(tmp_path / "store", config, KVCacheLayout.LBNHC)
    assert alone.identity != other.identity
    alone.close()
    other.close()


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("model_config", "quantization", "fp8"),
        ("model_config", "hf_overrides", {"rope_theta": 1.0}),
        ("model_config", "hf_config_path", "/elsewhere"),
        ("model_config", "model_impl", "transformers"),
        ("load_config", "load_format", "dummy"),
        ("cache_config", "cache_dtype", "fp8"),
    ],
)
def test_arguments_that_change_kv_are_refused(
    tmp_path: Path, config: VllmConfig, where: str, name: str, value: Any
) -> None:
    changed = copy.copy(config)
    part = copy.copy(getattr(config, where))
    object.__setattr__(part, name, value)
    object.__setattr__(changed, where, part)
    with pytest.raises(ConfigError, match=r'unknown to other engines: leave it out, or "share"'):
        Vllm(tmp_path / "store", changed, KVCacheLayout.LBNHC, weights_id="w")


def test_blocks_of_a_cpu_are_refused(tmp_path: Path, config: VllmConfig) -> None:
    changed = copy.copy(config)
    device = copy.copy(config.device_config)
    device.device_type = "cpu"
    object.__setattr__(changed, "device_config", device)
    with pytest.raises(UnsupportedModelError, match="on CPUs always"):
        Vllm(tmp_path / "store", changed, KVCacheLayout.LBNHC)
