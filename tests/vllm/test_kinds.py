"""Every kind of cache that the connector keeps: what attention may read is right after a restart, byte for byte.

vLLM's scheduler and grouping run; the workers are simulated (``tests/vllm/simulated.py``).
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvfs.integrations.vllm.drafters import drafter_of
from kvfs.integrations.vllm.metrics import Metrics
from tests.vllm.simulated import SimulatedEngine

Prompt = Callable[..., list[int]]
Specs = dict[str, KVCacheSpec]
BF16 = torch.bfloat16


def _full(block: int = 16, heads: int = 2, size: int = 16, **fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=BF16, **fields)


def _window(window: int, block: int = 16, heads: int = 2, size: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=BF16, sliding_window=window)


def _state(block: int, nbytes: int, padded: int | None = None) -> MambaSpec:
    return MambaSpec(
        block_size=block, shapes=((nbytes // 8,), (nbytes // 8,)), dtypes=(torch.float32, torch.float32),
        page_size_padded=padded, mamba_cache_mode="align",
    )  # fmt: skip


def _attention(numbers: range, spec: KVCacheSpec) -> Specs:
    return {f"model.layers.{n}.self_attn.attn": spec for n in numbers}


KINDS: dict[str, Specs] = {
    "full": _attention(range(3), _full()),
    "window": {**_attention(range(2), _full()), **_attention(range(2, 6), _window(40))},
    # one page of memory: blocks of 32 tokens of the one, of 16 of the other
    "unequal blocks": {**_attention(range(2), _full(heads=1)), **_attention(range(2, 6), _window(70))},
    "padded": {**_attention(range(2), _full(heads=2, size=24)), **_attention(range(2, 4), _window(70, heads=5))},
    "chunked": {
        **_attention(range(1), _full()),
        **_attention(range(1, 4), ChunkedLocalAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=16, dtype=BF16, attention_chunk_size=64)),
    },
    # an indexer next to each attention layer: one group, two shapes, two caches of one model layer
    "indexer": {
        **_attention(range(3), MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=72, dtype=BF16)),
        **{f"model.layers.{n}.self_attn.indexer.k_cache": MLAAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=33, dtype=torch.uint8) for n in range(3)},
    },
    "states": {**_attention(range(2), _full(48)), **{
        f"model.layers.{n}.linear_attn": _state(48, 3000 * 2, 48 * 2 * 64) for n in range(2, 6)}},
    # both in every layer, and a block that is no multiple of 32
    "parallel states": {**_attention(range(2), _full(80)), **{
        f"model.layers.{n}.mamba": _state(80, 80 * 2 * 64) for n in range(2)}},
    # several tokens in one state, of which a window keeps the last ones; as in DeepSeek-V4
    "compressed": {
        **{f"model.layers.{n}.attn.mla": MLAAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=32, dtype=BF16, tokens_per_state=4) for n in range(2)},
        **{f"model.layers.{n}.attn.swa": SlidingWindowMLASpec(
            block_size=16, num_kv_heads=1, head_size=32, dtype=BF16, sliding_window=48) for n in range(2)},
    },
}  # fmt: skip


class _Zero(int):
    """0, also when it is called: some answers are attributes in one version and methods in another."""

    def __call__(self) -> int:
        return 0


class Drafting:
    """What the scheduler asks of a configuration with EAGLE."""

    method, num_speculative_tokens = "eagle3", 2

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda: name == "use_eagle") if name.startswith("use") else _Zero()


@pytest.fixture(scope="module")
def engine_config(model: Callable[[str], Path]) -> VllmConfig:
    args = EngineArgs(
        model=str(model("llama")), enforce_eager=True, block_size=16, max_model_len=2048, dtype="float32",
        max_num_batched_tokens=192, async_scheduling=False,
    )  # fmt: skip
    config = args.create_engine_config()
    config.device_config.device_type = "cuda"  # blocks ordered token by token, which the CPU's kernels do not keep
    return config


def configured(config: VllmConfig, kind: str) -> VllmConfig:
    config = copy.deepcopy(config)
    if "states" in kind:
        config.cache_config.mamba_cache_mode = "align"
        spec = next(spec for spec in KINDS[kind].values() if isinstance(spec, MambaSpec))
        config.cache_config.block_size = config.cache_config.mamba_block_size = spec.block_size
    elif kind in ("indexer", "compressed"):
        config.cache_config.block_size = 64
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_restart_every_byte_that_attention_reads_is_right(
    engine_config: VllmConfig, tmp_path: Path, prompt: Prompt, kind: str
) -> None:
    config, store = configured(engine_config, kind), tmp_path / "store"
    one, two = prompt(1, 500), [*prompt(1, 300), *prompt(2, 150)]
    with SimulatedEngine(config, KINDS[kind], store) as first:
        assert first.generate(one) == [0]
        size = first.connector._manager._model.page_tokens
    with SimulatedEngine(config, KINDS[kind], store) as second:
        before = second.checked
        cached = second.generate(one, two, forget=False)
        assert cached[0] == 499 // size * size, "all whole pages but the last token"
        assert second.checked > before
        assert second.generate(two)[0] >= 400 // size * size


def test_stages_of_a_pipeline_divide_the_groups_of_a_hybrid(
    engine_config: VllmConfig, tmp_path: Path, prompt: Prompt
) -> None:
    """What two stages have stored, another division of the layers reads."""
    store, specs = tmp_path / "store", KINDS["window"]
    layers = {
        f"model.layers.{n}.self_attn.attn": specs[f"model.layers.{0 if n % 3 == 0 else 2}.self_attn.attn"]
        for n in range(6)
    }  # fmt: skip
    names = list(layers)
    halves = [{name: layers[name] for name in part} for part in (names[:3], names[3:])]
    with SimulatedEngine(engine_config, halves, store) as two:
        assert two.generate(prompt(1, 500)) == [0]
    with SimulatedEngine(engine_config, halves, store) as two:
        assert two.generate(prompt(1, 500)) == [496]
        assert two.generate(prompt(2, 300)) == [0]
    with SimulatedEngine(engine_config, layers, store) as one:
        assert one.generate(prompt(1, 500), prompt(2, 300)) == [496, 288]


@pytest.mark.parametrize("kind", ["full", "latent"])
def test_ranks_that_divide_the_tokens_of_a_block(
    engine_config: VllmConfig, tmp_path: Path, prompt: Prompt, kind: str
) -> None:
    """Decode context parallelism: the degree is part of the identity."""
    latent = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=40, dtype=BF16)
    specs, store = _attention(range(3), _full() if kind == "full" else latent), tmp_path / "store"
    for cached in (0, 480):
        with SimulatedEngine(engine_config, specs, store, ranks=2) as engine:
            assert engine.generate(prompt(1, 500)) == [cached]
    with SimulatedEngine(engine_config, specs, store) as one:
        assert one.generate(prompt(1, 500)) == [0]


def test_a_state_inside_a_block_is_kept(engine_config: VllmConfig, tmp_path: Path, prompt: Prompt) -> None:
    """With ``--prefix-match-unit`` vLLM hands over the state at the end of a prompt, between two blocks."""
    config, store = configured(engine_config, "states"), tmp_path / "store"
    config.cache_config.prefix_match_unit = 16
    one = prompt(1, 500)
    for cached in (0, 496):
        with SimulatedEngine(config, KINDS["states"], store) as engine:
            assert engine.connector._manager._model.page_tokens == 16
            assert engine.generate(one) == [cached]


class Kept(Drafting):
    """EAGLE with weights that are identified."""

    def __init__(self, config: VllmConfig, draft: Any = None) -> None:
        self.draft_model_config, self.draft_parallel_config = draft or config.model_config, config.parallel_config


@pytest.mark.parametrize("own_group", [False, True])
def test_the_layers_of_a_drafter_are_kept(
    engine_config: VllmConfig, tmp_path: Path, prompt: Prompt, own_group: bool
) -> None:
    """In a group of their own of the layout. Its weights are part of the identity."""
    store, config = tmp_path / "store", copy.deepcopy(engine_config)
    config.speculative_config = Kept(config)  # type: ignore[assignment]
    own = {"mtp.layers.0.self_attn.attn": _window(48)} if own_group else {"model.layers.4.self_attn.attn": _full()}
    layers = {**_attention(range(4), _full()), **own}
    with SimulatedEngine(config, layers, store) as first:
        groups = [s for g in first.connector._manager._model.groups for s in g.stored]
        assert [sorted(s.layers.values()) for s in groups if s.name.startswith("draft")] == [list(own)]
        assert sum(s.drafts for s in groups) == 1
        assert first.generate(prompt(1, 500)) == [0]
    with SimulatedEngine(config, layers, store) as second:
        size = second.connector._manager._model.page_tokens
        assert second.generate(prompt(1, 500)) == [499 // size * size] and second.checked
    with SimulatedEngine(config, layers, store, drafter=False, drafters=list(own)) as without:
        assert without.generate(prompt(1, 500)) == [0], "its pages are those of an engine without a drafter"
    config.speculative_config.method = "mtp"  # type: ignore[union-attr]
    with SimulatedEngine(config, layers, store, drafters=list(own)) as other:
        assert other.generate(prompt(1, 500)) == [0]


@pytest.mark.parametrize("why", ["weights", "method", "dtype", "ranks", "setting"])
def test_a_drafter_that_cannot_be_kept_is_left_out(engine_config: VllmConfig, why: str) -> None:
    """The engine starts, and stores what it would store without the drafter."""
    config = copy.deepcopy(engine_config)
    draft = copy.copy(config.model_config)
    config.speculative_config = drafting = Kept(config, draft)  # type: ignore[assignment]
    layers = [{**_attention(range(4), _full()), "model.layers.4.self_attn.attn": _full()}]

    def kept() -> bool:
        return drafter_of(config, layers, "", [FullAttentionSpec]) is not None

    assert kept() and drafter_of(config, [_attention(range(4), _full())], "", [FullAttentionSpec]) is None
    if why == "weights":
        draft.model = "unknown/model"
    elif why == "method":
        drafting.method = "dflash"
    elif why == "dtype":
        draft.dtype = torch.float16
    elif why == "ranks":
        drafting.draft_parallel_config = SimpleNamespace(tensor_parallel_size=7)
    else:
        layers[0]["model.layers.4.self_attn.attn"] = _window(48)
    assert not kept()


@pytest.mark.parametrize("own_group", [False, True])
def test_the_layers_of_a_drafter_are_left_out(
    engine_config: VllmConfig, tmp_path: Path, prompt: Prompt, own_group: bool
) -> None:
    """They may share a group with layers of the model: then engines with and without a drafter share pages."""
    store, config = tmp_path / "store", copy.deepcopy(engine_config)
    config.speculative_config = Drafting()  # type: ignore[assignment]
    own = {"mtp.layers.0.self_attn.attn": _window(48)} if own_group else {"model.layers.4.self_attn.attn": _full()}
    target = _attention(range(4), _full())
    with SimulatedEngine(config if own_group else engine_config, {**target, **(own if own_group else {})}, store,
                         drafters=list(own)) as first:  # fmt: skip
        assert first.generate(prompt(1, 500)) == [0]
    with SimulatedEngine(config, {**target, **own}, store, drafters=list(own)) as second:
        model = second.connector._manager._model
        assert sorted(n for g in model.groups for s in g.stored for n in s.layers.values()) == sorted(target)
        assert second.generate(prompt(1, 500)) == [499 // model.page_tokens * model.page_tokens]


@pytest.mark.parametrize("kind", ["window", "unequal blocks", "states"])
def test_under_pressure_every_byte_that_attention_reads_is_right(
    engine_config: VllmConfig, tmp_path: Path, prompt: Prompt, kind: str
) -> None:
    """Requests are preempted, and blocks reused, while pages are copied out of and into the cache."""
    config, store = configured(engine_config, kind), tmp_path / "store"
    config.model_config.max_model_len = 1024
    prompts = [[*prompt(n % 3, 150 + 16 * n), *prompt(10 + n, 100)] for n in range(6)]
    with SimulatedEngine(config, KINDS[kind], store) as whole:
        block = whole.ranks[0].cache.kv_cache_tensors[0].size // whole.cache.num_blocks
        largest = max(spec.block_size for spec in KINDS[kind].values())
    blocks = {"window": 130, "unequal blocks": 100, "states": 60}[kind]
    with SimulatedEngine(config, KINDS[kind], store, pool_bytes=blocks * block) as engine:
        engine.generate(*prompts, tokens=3 * largest)
        cached = engine.generate(*prompts, tokens=3 * largest)
        assert engine.preempted and sum(cached) > 0, (engine.preempted, cached)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the connector counts, of all ranks."""
    counts: Counter[str] = Counter()

    def add(self: Metrics, name: str, n: float = 1) -> None:
        counts[name] += int(n)

    monkeypatch.setattr(Metrics, "add", add)
    return counts


@pytest.mark.parametrize(("kind", "kept"), [("full", 320), ("window", 0), ("states", 0)])
def test_a_load_whose_last_pages_fail(
    engine_config: VllmConfig, tmp_path: Path, prompt: Prompt, counted: Counter[str], kind: str, kept: int
) -> None:
    """The pages before are kept if the engine has one group. What is computed in their place is stored again."""
    store, one, config = tmp_path / "store", prompt(1, 500), configured(engine_config, kind)
    with SimulatedEngine(config, KINDS[kind], store) as engine:
        assert engine.generate(one) == [0]
        damaged = engine.cell(one, 330, "model.layers.0.self_attn.attn")
    (segment,) = (path for path in (store / "segments").iterdir() if damaged in path.read_bytes())
    data = bytearray(segment.read_bytes())
    data[data.index(damaged)] ^= 1
    segment.write_bytes(data)
    with SimulatedEngine(config, KINDS[kind], store) as engine:
        size = engine.connector._manager._model.page_tokens
        assert engine.generate(one) == [kept]
        assert counted["loads_shortened" if kept else "loads_failed"] == 1
        assert counted["pages_not_loaded"] > 0
        assert engine.generate(one) == [499 // size * size], "all is stored again"


def test_each_adapter_has_pages_of_its_own(engine_config: VllmConfig, tmp_path: Path, prompt: Prompt) -> None:
    """It is known by its files: renamed, it hits; changed in place, it does not, nor while an engine runs."""
    config, store, one = copy.deepcopy(engine_config), tmp_path / "store", prompt(1, 500)
    config.lora_config = SimpleNamespace(lora_dtype=BF16, max_loras=4)  # type: ignore[assignment]

    def adapter(name: str, number: int, seed: int | None = None) -> LoRARequest:
        folder = tmp_path / name
        if seed is not None:
            folder.mkdir(exist_ok=True)
            (folder / "adapter_config.json").write_text("{}")
            (folder / "adapter_model.safetensors").write_bytes(random.Random(seed).randbytes(1000))
        return LoRARequest(name, number, str(folder))

    first, second = adapter("first", 1, seed=1), adapter("second", 2, seed=2)
    with SimulatedEngine(config, KINDS["full"], store) as engine:
        for lora in (first, second, None):
            assert engine.generate(one, lora=lora) == [0]
        for lora in (first, second, None):
            assert engine.generate(one, lora=lora) == [448]
        adapter("first", 1, seed=3)
        assert engine.generate(one, lora=first) == [0], "the engine may have either"
        assert engine.generate(one, lora=adapter("second", 1)) == [0], "a number names one adapter"
    (tmp_path / "second").rename(tmp_path / "renamed")
    with SimulatedEngine(config, KINDS["full"], store) as engine:
        assert engine.generate(one, lora=first) == [0], "its files have changed"
        assert engine.generate(one, lora=adapter("renamed", 5)) == [448]
        engine.adapters[6] = b"of a repository"
        assert engine.generate(one, lora=LoRARequest("hub", 6, "organisation/adapter")) == [0]


def test_an_engine_is_idle_after_a_reset(engine_config: VllmConfig, tmp_path: Path, prompt: Prompt) -> None:
    """Its last stores have not begun: they are dropped, and reported, for which vLLM waits since 0.33."""
    with SimulatedEngine(engine_config, KINDS["full"], tmp_path / "store") as engine:
        (rank,) = engine.ranks
        half = rank.connector.connector_worker
        assert half is not None
        engine.submit(prompt(1, 100), tokens=1)
        while engine.scheduler.has_unfinished_requests():
            engine.step()
        dropped = {job[0] for job in half._unsubmitted_store_jobs}
        assert dropped and engine.reset()
        reported: set[int] = set()
        build = rank.connector.build_connector_worker_meta

        def recorded() -> Any:
            meta = build()
            reported.update(meta.completed_jobs if meta is not None else ())
            return meta

        rank.connector.build_connector_worker_meta = recorded  # type: ignore[method-assign]
        for _ in range(5):
            engine.step()
        assert reported == dropped and not engine.scheduler.has_requests()
        assert engine.generate(prompt(1, 100)) == [0]
