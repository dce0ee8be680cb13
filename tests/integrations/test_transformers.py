"""The real transformers library on tiny random models: restoring changes only the amount of work.

The process that saves is a child of the one that restores, so that only the store connects them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvfs  # noqa: E402
from kvfs.errors import ConfigError, UnsupportedModelError  # noqa: E402
from kvfs.integrations.transformers import cache as cache_module  # noqa: E402
from kvfs.integrations.transformers import generate, namespace_for, weights_digest  # noqa: E402
from kvfs.system.files import Files  # noqa: E402
from kvfs.types import Tier  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("llama", "qwen3", "mistral", "gemma3", "deepseek_v2", "deepseek_v3")
DTYPES = ("float32", "bfloat16")
VOCABULARY = 96
WINDOW = 24
NEW = {"max_new_tokens": 12, "do_sample": False}
CAPACITY = "64MiB"
pytestmark = pytest.mark.timeout(660)  # the process that saves may be slow on a busy machine


def config_of(kind: str, **changes: Any) -> Any:
    classes = {
        "llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig, "gemma3": transformers.Gemma3TextConfig,
        "deepseek_v2": transformers.DeepseekV2Config, "deepseek_v3": transformers.DeepseekV3Config,
    }  # fmt: skip
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    if kind in ("mistral", "gemma3"):
        fields["sliding_window"] = WINDOW
    if kind == "gemma3":  # five layers slide, the sixth does not
        fields["num_hidden_layers"] = 6
    if kind.startswith("deepseek"):  # latents of 16 numbers, 8 rotary ones; the second layer is a mixture of experts
        del fields["head_dim"]
        fields |= {
            "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
        }  # fmt: skip
    return classes[kind](**{**fields, **changes})


def model_of(kind: str, dtype: str = "float32", *, seed: int = 1, **changes: Any) -> Any:
    torch.manual_seed(seed)
    auto = transformers.AutoModelForCausalLM
    return auto.from_config(config_of(kind, **changes), dtype=getattr(torch, dtype)).eval().requires_grad_(False)


def prompt(length: int, seed: int = 7) -> Any:
    """[1, length]; prompts of one seed share their beginning."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, 512), generator=generator)[:, :length]


def plain(model: Any, ids: Any, **options: Any) -> list[list[int]]:
    """The tokens that the library generates without a store."""
    tokens: list[list[int]] = model.generate(ids, **NEW, **options).tolist()
    return tokens


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower with threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def store(store_path: Path) -> Iterator[Any]:
    with kvfs.open(store_path, capacity=CAPACITY) as opened:
        yield opened


# ---------------------------------------------------------------- across processes


class Case(NamedTuple):
    kind: str
    dtype: str
    page_tokens: int


CASES = [Case(kind, dtype, size) for kind in MODELS for dtype in DTYPES for size in (16, 64)]


def save_all(path: Path) -> list[list[int]]:
    """Run by the child: save the KV of every case. Returns the tokens that the library generates alone."""
    outputs = []
    with kvfs.open(path, capacity=CAPACITY) as opened:
        for case in CASES:
            model = model_of(case.kind, case.dtype)
            done = generate(model, namespace_for(opened, model, page_tokens=case.page_tokens), prompt(100), **NEW)
            assert done.restored == 0 and done.saved.declined == 0, (case, done)
            cold = plain(model, prompt(100))
            assert done.output.tolist() == cold, case
            outputs += cold
    return outputs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[Case, list[int]]]]:
    """A store that another process has filled and closed, and the tokens that it generated."""
    path = tmp_path_factory.mktemp("transformers") / "store"
    command = [sys.executable, "-m", "tests.integrations.test_transformers", str(path)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout.splitlines()[-1])
    with kvfs.open(path) as opened:
        yield opened, dict(zip(CASES, outputs, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_a_new_process_restores_and_generates_the_same(case: Case, saved: tuple[Any, dict[Case, list[int]]]) -> None:
    opened, outputs = saved
    model = model_of(case.kind, case.dtype)
    done = generate(model, namespace_for(opened, model, page_tokens=case.page_tokens), prompt(100), **NEW)
    assert done.restored == 99 // case.page_tokens * case.page_tokens
    assert done.output.tolist() == [outputs[case]]
    assert len(set(outputs[case][100:])) > 2, "a model that repeats one token proves nothing"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 64, 65])
@pytest.mark.parametrize("kind", MODELS)
def test_any_length_of_prompt(kind: str, length: int, saved: tuple[Any, dict[Case, list[int]]]) -> None:
    """Shorter than a page, exact multiples, one more: whole pages are restored, one token is left."""
    model = model_of(kind)
    done = generate(model, namespace_for(saved[0], model, page_tokens=16), prompt(length), **NEW)
    assert done.restored == (length - 1) // 16 * 16
    assert done.output.tolist() == plain(model, prompt(length))


# ---------------------------------------------------------------- what is restored


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_loaded_cache_holds_the_saved_bits(kind: str, dtype: str, store: Any) -> None:
    model = model_of(kind, dtype)
    cache = namespace_for(store, model, page_tokens=16)
    whole = transformers.DynamicCache()
    model(prompt(100), past_key_values=whole)
    cache.save(prompt(100), whole)
    past, columns = cache.load(prompt(100))
    assert columns == past.get_seq_length() == 96
    expected = transformers.DynamicCache(config=model.config)
    for layer, fresh, full in zip(past.layers, expected.layers, whole.layers, strict=True):
        assert isinstance(layer, type(fresh))
        assert layer.get_seq_length() == 96
        begin = 96 - (WINDOW - 1) if layer.is_sliding else 0
        assert torch.equal(layer.keys, full.keys[:, :, begin:96])
        assert torch.equal(layer.values, full.values[:, :, begin:96])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_on_a_gpu(kind: str, store: Any) -> None:
    model = model_of(kind, "bfloat16").to("cuda")
    ids = prompt(100).to("cuda")
    cache = namespace_for(store, model, page_tokens=16)
    whole = transformers.DynamicCache()
    model(ids, past_key_values=whole)
    cache.save(ids, whole)
    past, columns = cache.load(ids)
    assert columns == 96
    for layer, full in zip(past.layers, whole.layers, strict=True):
        assert layer.keys.device == ids.device
        begin = 96 - (WINDOW - 1) if layer.is_sliding else 0
        assert torch.equal(layer.keys, full.keys[:, :, begin:96])
        assert torch.equal(layer.values, full.values[:, :, begin:96])
    done = generate(model, cache, ids, **NEW)
    assert done.restored == 96
    assert done.output.tolist() == plain(model, ids)
    assert namespace_for(store, model.to("cpu"), page_tokens=16).load(prompt(100))[1] == 96


def test_pages_are_in_canonical_order(store: Any) -> None:
    """[granule][layer][head][token], keys before values, index by index."""
    model = model_of("gemma3")
    cache = namespace_for(store, model, page_tokens=32)
    past = transformers.DynamicCache()
    model(prompt(64), past_key_values=past)
    cache.save(prompt(64), past)
    groups = {group.name: group for group in cache.namespace.layout.groups}
    assert set(groups) == {"full", "window"}
    with cache.namespace.match(prompt(64)[0]) as match:
        pages = {name: bytearray(match.page_count(name) * group.page_bytes) for name, group in groups.items()}
        assert cache.namespace.get(match, pages) == 2
        first = {name: match.first_page(name) for name in groups}
    for name, group in groups.items():
        expected = b"".join(
            layer.keys[0, head, token].numpy().tobytes() + layer.values[0, head, token].numpy().tobytes()
            for granule in range(first[name] * 2, 4)
            for layer in (past.layers[i] for i in group.layers)
            for head in range(2)
            for token in range(granule * 16, granule * 16 + 16)
        )
        assert pages[name] == expected


@pytest.mark.parametrize("kind", MODELS)
def test_prompts_that_share_a_beginning_share_pages(kind: str, store: Any) -> None:
    model = model_of(kind)
    cache = namespace_for(store, model, page_tokens=16)
    other = torch.cat([prompt(70), prompt(40, seed=8)], dim=1)
    assert generate(model, cache, prompt(100), **NEW).restored == 0
    done = generate(model, cache, other, **NEW)
    assert done.restored == 64
    assert done.output.tolist() == plain(model, other)
    # 121 tokens of each make 7 pages per group, of which the first 4 are shared
    groups = len(cache.namespace.layout.groups)
    assert (done.saved.stored, done.saved.skipped) == (3 * groups, 4 * groups)


@pytest.mark.parametrize("kind", MODELS)
def test_a_second_turn_restores_the_first_and_adds_its_own_pages(kind: str, store: Any) -> None:
    model = model_of(kind)
    cache = namespace_for(store, model, page_tokens=16)
    groups = len(cache.namespace.layout.groups)
    first = generate(model, cache, prompt(60), **NEW)
    assert first.saved.stored == 4 * groups  # 71 tokens are in the cache
    longer = torch.cat([first.output, prompt(40, seed=9)], dim=1)
    second = generate(model, cache, longer, **NEW)
    assert second.restored == 64
    assert second.output.tolist() == plain(model, longer)
    assert (second.saved.stored, second.saved.skipped) == (3 * groups, 4 * groups)  # 123 tokens


def test_saving_in_small_pieces_stores_the_same_pages(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SAVE_BYTES", 1)
    model = model_of("gemma3")
    cache = namespace_for(store, model, page_tokens=16)
    assert generate(model, cache, prompt(100), **NEW).saved == (12, 0, 0, 0, "")
    done = generate(model, cache, prompt(100), **NEW)
    assert done.restored == 96
    assert done.output.tolist() == plain(model, prompt(100))


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_of_a_windowed_cache_only_complete_pages_are_saved(kind: str, store: Any) -> None:
    """The library's own cache has dropped the beginning; only what it still holds is stored."""
    model = model_of(kind)
    cache = namespace_for(store, model, page_tokens=16)
    own = transformers.DynamicCache(config=model.config)
    model(prompt(80), past_key_values=own)
    cache.save(prompt(80), own)  # of 80 tokens the window layers hold the last 23
    missing = cache.namespace.plan_save(prompt(80)[0]).missing
    assert missing == {g.name: (0, 1, 2, 3) if g.name == "window" else () for g in cache.namespace.layout.groups}
    assert cache.load(prompt(100))[1] == 0
    # a cache without a config has kept everything, and adds the missing pages
    whole = transformers.DynamicCache()
    model(prompt(80), past_key_values=whole)
    assert cache.save(prompt(80), whole).stored == 4
    done = generate(model, cache, prompt(100), **NEW)
    assert done.restored == 80
    assert done.output.tolist() == plain(model, prompt(100))


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_a_cache_from_load_keeps_its_whole_history(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    pages = []
    for number, make in enumerate((lambda c: c.load(prompt(80))[0], lambda _: transformers.DynamicCache())):
        with kvfs.open(tmp_path / str(number), capacity=CAPACITY) as opened:
            cache = namespace_for(opened, model, page_tokens=16)
            past = make(cache)
            model(prompt(80), past_key_values=past)
            cache.save(prompt(80), past)
            pages.extend((number, raw_pages(cache, prompt(length))) for length in (16, 48, 80))
    halves = [[found for number, found in pages if number == wanted] for wanted in (0, 1)]
    assert halves[0] == halves[1]
    assert all(halves[0])


def raw_pages(cache: Any, ids: Any) -> dict[str, bytes]:
    with cache.namespace.match(ids[0]) as match:
        groups = cache.namespace.layout.groups
        pages = {g.name: bytearray(match.page_count(g.name) * g.page_bytes) for g in groups}
        assert cache.namespace.get(match, pages) == ids.shape[1] // 16
        return {name: bytes(data) for name, data in pages.items()}


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (3, 1, 1, 1), (7, 2, 1), (4,), (5, 5), (12, 1)])
def test_attention_sees_the_same_window_while_the_history_is_kept(sizes: tuple[int, ...]) -> None:
    from transformers.cache_utils import DynamicSlidingWindowLayer

    from kvfs.integrations.transformers.layers import RecordingLayer

    own, recording = DynamicSlidingWindowLayer(sliding_window=5), RecordingLayer(5)
    states = torch.randn(2, 2, 3, sum(sizes), 4)
    for keys, values in zip(*(half.split(sizes, dim=2) for half in states), strict=True):
        for seen, expected in zip(recording.update(keys, values), own.update(keys, values), strict=True):
            assert torch.equal(seen, expected)
    assert torch.equal(recording.keys, states[0])
    assert torch.equal(recording.values, states[1])
    assert own.get_seq_length() == recording.get_seq_length() == sum(sizes)


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("page", [0, 2, 5])
@pytest.mark.parametrize("kind", MODELS)
def test_a_flipped_byte_on_disk_shortens_the_prefix(kind: str, page: int, store_path: Path) -> None:
    model = model_of(kind)
    with kvfs.open(store_path, capacity=CAPACITY) as opened:
        cache = namespace_for(opened, model, page_tokens=16)
        generate(model, cache, prompt(100), **NEW)
        group = cache.namespace.layout.groups[-1]  # the windows, if there are any
        needed = raw_pages(cache, prompt(16 * (page + 1)))[group.name][-group.page_bytes :]
    flip(store_path, needed)
    with kvfs.open(store_path) as opened:
        done = generate(model, namespace_for(opened, model, page_tokens=16), prompt(100), **NEW)
    if group.need.kind == "all":
        assert done.restored == page * 16
    elif page == 5:  # a window before the bad page is whole
        assert done.restored == 80
    else:  # the last window does not reach back that far
        assert done.restored == 96
    assert done.output.tolist() == plain(model, prompt(100))


def test_a_flipped_byte_in_every_page_leaves_nothing(store_path: Path) -> None:
    model = model_of("gemma3")
    with kvfs.open(store_path, capacity=CAPACITY) as opened:
        cache = namespace_for(opened, model, page_tokens=16)
        generate(model, cache, prompt(100), **NEW)
        pages = raw_pages(cache, prompt(96))
    sizes = {group.name: group.page_bytes for group in cache.namespace.layout.groups}
    for name, data in pages.items():
        for start in range(0, len(data), sizes[name]):
            flip(store_path, data[start : start + sizes[name]])
    with kvfs.open(store_path) as opened:
        done = generate(model, namespace_for(opened, model, page_tokens=16), prompt(100), **NEW)
    assert done.restored == 0
    assert done.output.tolist() == plain(model, prompt(100))


def flip(store_path: Path, payload: bytes) -> None:
    """Flip one bit in the middle of these bytes, wherever the segments hold them."""
    for path in (store_path / "segments").glob("*.kvs"):
        where = path.read_bytes().find(payload)
        if where >= 0:
            with path.open("r+b") as file:
                file.seek(where + len(payload) // 2)
                file.write(bytes([payload[len(payload) // 2] ^ 1]))
            return
    pytest.fail("no segment holds this page")


def test_a_read_only_store_restores_and_declines(store_path: Path) -> None:
    model = model_of("llama")
    with kvfs.open(store_path, capacity=CAPACITY) as opened:
        generate(model, namespace_for(opened, model, page_tokens=16), prompt(40), **NEW)
    with kvfs.open(store_path, read_only=True) as opened:
        done = generate(model, namespace_for(opened, model, page_tokens=16), prompt(100), **NEW)
    assert done.restored == 32
    assert done.output.tolist() == plain(model, prompt(100))
    assert (done.saved.stored, done.saved.reason) == (0, "read-only")


# ---------------------------------------------------------------- identity


def restored_after(store: Any, one: Any, two: Any, first: dict[str, Any], second: dict[str, Any]) -> int:
    generate(one, namespace_for(store, one, page_tokens=16, **first), prompt(50), **NEW)
    columns: int = namespace_for(store, two, page_tokens=16, **second).load(prompt(50))[1]
    return columns


def test_equal_models_share(store: Any) -> None:
    assert restored_after(store, model_of("llama"), model_of("llama"), {}, {}) == 48


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param({"seed": 2}, {}, id="weights"),
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}, id="rope"),
        pytest.param({"dtype": "bfloat16"}, {}, id="dtype"),
        pytest.param({"rms_norm_eps": 1e-3}, {}, id="config"),
        pytest.param({}, {"revision": "0123abc"}, id="revision"),
        pytest.param({}, {"salt": "tenant"}, id="salt"),
        pytest.param({}, {"adapter": "0123abc"}, id="adapter"),
        pytest.param({}, {"epoch": 1}, id="epoch"),
        pytest.param({}, {"name": "other"}, id="name"),
    ],
)
def test_what_changes_kv_is_not_shared(model: dict[str, Any], options: dict[str, Any], store: Any) -> None:
    assert restored_after(store, model_of("llama"), model_of("llama", **model), {}, options) == 0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, id="rope"),
        pytest.param({"dtype": "bfloat16"}, id="dtype"),
    ],
)
def test_a_given_revision_does_not_replace_the_identity_of_the_config(changes: dict[str, Any], store: Any) -> None:
    same = {"revision": "0123abc"}
    assert restored_after(store, model_of("llama"), model_of("llama", **changes), same, same) == 0


def test_rounded_rotary_frequencies_are_another_model(store: Any) -> None:
    """``model.to(bfloat16)`` rounds the frequencies, ``dtype=bfloat16`` does not: keys differ."""
    same = {"revision": "0123abc"}
    cast = model_of("llama").to(torch.bfloat16)
    assert restored_after(store, model_of("llama", "bfloat16"), cast, same, same) == 0


def test_a_revision_is_trusted(store: Any) -> None:
    same = {"revision": "0123abc"}
    assert restored_after(store, model_of("llama"), model_of("llama", seed=2), same, same) == 48


def test_the_commit_of_a_config_does_not_identify_the_weights(store: Any) -> None:
    """In some releases a config holds the commit of its checkpoint, also in a new model that is made from it."""
    one, two = model_of("llama"), model_of("llama", seed=2)
    one.config._commit_hash = two.config._commit_hash = "0123abc" * 5
    assert restored_after(store, one, two, {}, {}) == 0


def test_a_revision_that_moves_is_refused(store: Any) -> None:
    with pytest.raises(ConfigError, match="revision"):
        namespace_for(store, model_of("llama"), revision="main")


def test_the_digest_of_weights_sees_one_changed_number() -> None:
    model, twin = model_of("llama"), model_of("llama")
    before = weights_digest(model)
    assert weights_digest(twin) == before
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    assert weights_digest(model) != before
    with torch.no_grad():
        model.lm_head.weight.copy_(twin.lm_head.weight)
    assert weights_digest(model) == before
    model.model.rotary_emb.inv_freq[1] *= 1.01  # a buffer that is in no checkpoint
    assert weights_digest(model) != before


def test_equal_weights_in_other_code_are_another_model(store: Any) -> None:
    other = model_of("llama")
    attention = type(other.model.layers[0].self_attn)

    class Bidirectional(attention):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.is_causal = False
            return super().forward(*args, **{**kwargs, "attention_mask": None})

    for layer in other.model.layers:
        layer.self_attn.__class__ = Bidirectional
    for same in ({}, {"revision": "0123abc"}):
        assert restored_after(store, model_of("llama"), other, same, same) == 0


def test_a_custom_attention_function_is_another_model(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = transformers.AttentionInterface._global_mapping["sdpa"]

    def backwards(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return sdpa(module, query, key, value, None, **{**kwargs, "is_causal": False})

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "backwards", backwards)
    model = model_of("llama")
    before = namespace_for(store, model, page_tokens=16)
    generate(model, before, prompt(50), **NEW)
    model.set_attn_implementation("backwards")
    assert namespace_for(store, model, page_tokens=16).load(prompt(50))[1] == 0
    assert generate(model, before, prompt(90), **NEW).saved.stored == 0
    assert "code" in before.reason


@pytest.mark.parametrize(("before", "after"), [("bfloat16", "float32"), ("float32", "float16")])
def test_a_cast_model_gets_no_kv_of_its_previous_dtype(before: str, after: str, store: Any) -> None:
    model = model_of("llama", before)
    cache = namespace_for(store, model, revision="0123abc", page_tokens=16)
    generate(model, cache, prompt(50), **NEW)
    model.to(getattr(torch, after))
    done = generate(model, cache, prompt(90), **NEW)
    assert (done.restored, done.saved.stored) == (0, 0)
    assert "dtype" in done.saved.reason


def test_a_window_that_is_removed_from_the_config_is_noticed(store: Any) -> None:
    """Each forward pass derives its masks from the config."""
    model = model_of("mistral")
    cache = namespace_for(store, model, page_tokens=16)
    model.config.sliding_window = None
    assert generate(model, cache, prompt(50), **NEW).saved.stored == 0
    assert "config" in cache.reason


def test_weights_with_a_merged_adapter_are_another_model(store: Any) -> None:
    """PEFT writes through ``tensor.data``, which autograd does not count."""
    model = model_of("llama")
    cache, before = namespace_for(store, model, page_tokens=16), weights_digest(model)
    delta = torch.randn(32, 2) @ torch.randn(2, 32) * 0.01
    model.model.layers[1].self_attn.q_proj.weight.data += delta
    assert generate(model, cache, prompt(50), **NEW).saved.stored == 0
    assert "weights" in cache.reason
    assert weights_digest(model) != before


def test_a_namespace_is_named_for_the_weights_and_not_for_their_place(store: Any) -> None:
    """Models of one type are told apart in `kvfs ls`; a copy of a model in another directory finds its pages."""
    one, other, moved = (model_of("llama", seed=seed) for seed in (1, 2, 1))
    moved.config._name_or_path = "/models/copy"
    names = [repr(namespace_for(store, model).namespace) for model in (one, other, moved)]
    assert names[0] == names[2] != names[1]
    assert all(name.startswith("<Namespace llama@weights-") for name in names)
    assert "<Namespace org/tiny@weights-" in repr(namespace_for(store, one, name="org/tiny").namespace)


@pytest.mark.parametrize("how", ["weights", "train", "train a part", "adapter"])
def test_a_changed_model_neither_loads_nor_saves(how: str, store: Any) -> None:
    model = model_of("llama")
    cache = namespace_for(store, model, page_tokens=16)
    generate(model, cache, prompt(50), **NEW)
    if how == "weights":
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
    elif how == "train":
        model.train()
    elif how == "train a part":
        model.model.layers[0].self_attn.train()
    else:
        model.peft_config = {"default": object()}
    past, columns = cache.load(prompt(50))
    assert (columns, past.get_seq_length()) == (0, 0)
    assert how.split()[0] in cache.reason
    whole = transformers.DynamicCache()
    with torch.no_grad():
        model(prompt(90, seed=3), past_key_values=whole)
    result = cache.save(prompt(90, seed=3), whole)
    assert (result.stored, result.declined) == (0, 5)
    assert how.split()[0] in result.reason


# ---------------------------------------------------------------- batches


def left_padded(*lengths: int) -> tuple[Any, Any]:
    """Rows padded with token 0 on the left: [batch, longest] of ids and of the mask."""
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = prompt(length, seed=20 + row)[0]
        mask[row, width - length :] = 1
    return ids, mask


@pytest.mark.parametrize(
    ("kind", "lengths", "restored"),
    [
        ("llama", (100, 84, 52), 96 + 80 + 48),
        ("llama", (100, 93, 60), 87 + 80 + 47),  # pages end in columns 96, 7 + 80 and 40 + 48
        ("qwen3", (50, 50), 48 + 48),
        ("mistral", (100, 84, 52), 96 + 80 + 48),
        ("gemma3", (100, 84, 52), 96 + 80 + 48),
        ("gemma3", (100, 20), 96 + 16),  # a row shorter than the window
    ],
)
def test_a_left_padded_batch_is_restored(kind: str, lengths: tuple[int, ...], restored: int, store: Any) -> None:
    model = model_of(kind)
    ids, mask = left_padded(*lengths)
    cold = plain(model, ids, attention_mask=mask, pad_token_id=0)
    cache = namespace_for(store, model, page_tokens=16)
    for expected in (0, restored):
        done = generate(model, cache, ids, attention_mask=mask, pad_token_id=0, **NEW)
        assert done.restored == expected == sum(done.tiers.values())
        assert done.output.tolist() == cold
    # rows are saved without their padding
    for row, length in enumerate(lengths):
        assert cache.load(ids[row, -length:])[1] == (length - 1) // 16 * 16


def test_padding_is_inferred_as_the_library_does(store: Any) -> None:
    model = model_of("llama")
    ids, mask = left_padded(50, 34)
    cold = plain(model, ids, attention_mask=mask, pad_token_id=0)
    cache = namespace_for(store, model, page_tokens=16)
    for expected in (0, 48 + 32):
        done = generate(model, cache, ids, pad_token_id=0, **NEW)
        assert (done.restored, done.output.tolist()) == (expected, cold)


class NothingCached(Files):
    """A page cache that holds nothing."""

    def cached_bytes(self, fd: int, offset: int, nbytes: int) -> int:
        return 0


class AllCached(Files):
    """A page cache that holds everything."""

    def cached_bytes(self, fd: int, offset: int, nbytes: int) -> int:
        return nbytes

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        return super().preadv(fd, buffers, offset)  # what is cached never makes a read wait


@pytest.mark.parametrize(("files", "tier"), [(AllCached, Tier.HOST), (NothingCached, Tier.DISK)])
def test_each_result_tells_the_tiers_of_its_own_tokens(files: type[Files], tier: Tier, store_path: Path) -> None:
    """Of a batch whose rows end within different pages, only what the cache received is counted."""
    model = model_of("llama")
    ids, mask = left_padded(100, 89)
    with kvfs.open(store_path, capacity=CAPACITY, files=files()) as store:
        cache = namespace_for(store, model, page_tokens=16)
        cold = generate(model, cache, ids, attention_mask=mask, pad_token_id=0, **NEW)
        assert (cold.restored, cold.tiers, cache.tiers) == (0, {}, {})
        warm = generate(model, cache, ids, attention_mask=mask, pad_token_id=0, **NEW)
        # 80 of the second row end in column 91: the first row has five pages and 11 tokens of its sixth
        assert (warm.restored, warm.tiers) == (91 + 80, {tier: 91 + 80})
        assert warm.output.tolist() == cold.output.tolist()
        assert cache.load(ids[0])[1] == 96 and cache.tiers == {tier: 96}
        cache.load(prompt(100, seed=9))
        assert cache.tiers == {}


def test_of_a_window_the_tokens_before_it_come_from_no_tier(store_path: Path) -> None:
    model = model_of("mistral")
    with kvfs.open(store_path, capacity=CAPACITY, files=NothingCached()) as store:
        cache = namespace_for(store, model, page_tokens=16)
        generate(model, cache, prompt(100), **NEW)
        done = generate(model, cache, prompt(100), **NEW)
    assert (done.restored, done.tiers) == (96, {Tier.DEVICE: 64, Tier.DISK: 32})


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_restores_what_all_rows_have(kind: str, store: Any) -> None:
    model = model_of(kind)
    cache = namespace_for(store, model, page_tokens=16)
    ids = torch.cat([prompt(100), torch.cat([prompt(40), prompt(60, seed=5)], dim=1)])
    generate(model, cache, prompt(100), **NEW)
    done = generate(model, cache, ids, **NEW)
    assert done.restored == 32 + 32
    assert done.output.tolist() == plain(model, ids)


def test_window_layers_with_unaligned_paddings_are_computed(store: Any) -> None:
    model = model_of("mistral")
    ids, mask = left_padded(100, 93)
    cache = namespace_for(store, model, page_tokens=16)
    for _ in range(2):
        done = generate(model, cache, ids, attention_mask=mask, pad_token_id=0, **NEW)
        assert done.restored == 0
        assert done.output.tolist() == plain(model, ids, attention_mask=mask, pad_token_id=0)
    cache.load(ids, mask)
    assert "padding" in cache.reason


def test_rows_that_end_early_are_saved_without_their_padding(store: Any) -> None:
    model = model_of("llama")
    ids = torch.cat([prompt(50), prompt(50, seed=5)])
    end = plain(model, ids)[1][52]  # the second row ends with its third token
    cache = namespace_for(store, model, page_tokens=16)
    options = {"pad_token_id": 0, "eos_token_id": end, "max_new_tokens": 40, "do_sample": False}
    done = generate(model, cache, ids, **options)
    assert done.output[1, 53:].eq(0).all()
    full = done.output.shape[1] - 1 if not done.output[0].eq(0).any() else int(done.output[0].eq(0).int().argmax())
    assert done.saved.stored == full // 16 + 3


@pytest.mark.parametrize(
    ("ids", "mask", "why"),
    [
        ([[5, 6, 7]], [[1, 1, 0]], "left"),
        ([[5, 6, 7]], [[1, 0, 1]], "left"),
        ([[5, 6, 7]], [[0, 0, 0]], "padding"),
        ([[5, 6, 7]], [[1, 1, 1, 1]], "attention_mask"),
        ([[5, 6, 7]], [[1, 1, 1], [1, 1, 1]], "attention_mask"),
        ([[5.0, 6.0]], None, "input_ids"),
        ([[]], None, "input_ids"),
        ([[[5]]], None, "input_ids"),
        ([[5], [6, 7]], None, "input_ids"),
        ("text", None, "input_ids"),
    ],
)
def test_inputs_of_a_wrong_kind_are_refused(ids: Any, mask: Any, why: str, store: Any) -> None:
    cache = namespace_for(store, model_of("llama"))
    with pytest.raises(ConfigError, match=why):
        cache.load(ids, mask)


def test_lists_and_single_rows_are_accepted(store: Any) -> None:
    model = model_of("llama")
    cache = namespace_for(store, model, page_tokens=16)
    done = generate(model, cache, prompt(50)[0].tolist(), **NEW)
    assert done.output.tolist() == plain(model, prompt(50))
    assert cache.load(prompt(50)[0].tolist())[1] == cache.load(prompt(50)[0].numpy())[1] == 48


# ---------------------------------------------------------------- what is not understood


def unsupported() -> dict[str, Any]:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return {
        "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY),
        "mamba": transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=4),
        "dynamic rope": config_of("llama", rope_parameters=dynamic),
        "bidirectional": config_of("gemma3", use_bidirectional_attention=True),
        "window of one": config_of("mistral", sliding_window=1),
    }


@pytest.mark.parametrize("what", sorted(unsupported()))
def test_models_with_an_unsupported_cache_are_refused(what: str, store: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_config(unsupported()[what]).eval()
    with pytest.raises(UnsupportedModelError):
        namespace_for(store, model)


def test_latents_that_the_library_expands_are_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in early releases of transformers 5."""
    model = model_of("deepseek_v3")
    monkeypatch.delattr(type(model.model.layers[0].self_attn), "expand_kv")
    with pytest.raises(UnsupportedModelError, match="expanded to all heads"):
        namespace_for(store, model)


def test_latents_are_stored_once_and_in_the_order_of_their_model(store: Any) -> None:
    sizes = {}
    for kind, order in (("deepseek_v2", "interleaved"), ("deepseek_v3", "halves")):
        group = namespace_for(store, model_of(kind), page_tokens=16).namespace.layout.groups[0]
        assert (group.heads, group.cell.encoding) == (1, f"f32 latent 16+8 {order}")
        sizes[kind] = group.page_bytes
    assert set(sizes.values()) == {16 * 2 * (16 + 8) * 4}


def test_encoder_decoders_are_refused(store: Any) -> None:
    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2, vocab_size=VOCABULARY)
    with pytest.raises(UnsupportedModelError):
        namespace_for(store, transformers.T5ForConditionalGeneration(config).eval())


@pytest.mark.parametrize("what", ["quantised", "packed", "subclass", "adapter", "offloaded", "parallel"])
def test_models_whose_kv_depends_on_more_than_their_weights_are_refused(
    what: str, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    if what == "quantised":
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    elif what == "packed":  # as torch.ao.quantization.quantize_dynamic does: no parameter, no buffer holds the weights
        where = {"__module__": "torch.ao.nn.quantized.dynamic.modules.linear"}
        model.lm_head = type("Linear", (torch.nn.Module,), where)()
    elif what == "subclass":  # as torchao.quantize_ does
        kind = type("Packed", (torch.Tensor,), {})
        weight = torch.Tensor._make_subclass(kind, model.lm_head.weight.data)
        model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    elif what == "adapter":
        model.peft_config = {"default": object()}
    elif what == "offloaded":
        model.lm_head.to("meta")
    else:
        monkeypatch.setattr(type(model), "tp_size", 2)
    with pytest.raises(UnsupportedModelError):
        namespace_for(store, model, revision="0123abc")


def test_an_adapter_with_a_digest_is_accepted(store: Any) -> None:
    model = model_of("llama")
    model.peft_config = {"default": object()}
    cache = namespace_for(store, model, adapter="0123abc", page_tokens=16)
    generate(model, cache, prompt(50), **NEW)
    assert generate(model, cache, prompt(50), **NEW).restored == 48


class Lora(torch.nn.Module):  # type: ignore[misc]
    """A layer as PEFT wraps it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer, self.active_adapters, self.merged_adapters = base, ["one"], list[str]()
        self.disable_adapters, self.scaling = False, {"one": 0.1, "two": 0.9}
        self.eval()

    def forward(self, x: Any) -> Any:
        scale = 0.0 if self.disable_adapters else self.scaling[self.active_adapters[0]]
        return self.base_layer(x) + scale * x[..., :16]


Lora.__module__ = "peft.tuners.lora.layer"
SWITCHES: dict[str, Callable[[Lora], Any]] = {
    "other": lambda layer: setattr(layer, "active_adapters", ["two"]),
    "off": lambda layer: setattr(layer, "disable_adapters", True),
    "merged": lambda layer: layer.merged_adapters.append("one"),
    "scaled": lambda layer: layer.scaling.update(one=0.2),
}


@pytest.mark.parametrize("what", SWITCHES)
def test_kv_of_another_adapter_is_not_stored_under_the_digest_of_the_first(what: str, store: Any) -> None:
    model = model_of("llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj = Lora(layer.self_attn.v_proj)
    cache = namespace_for(store, model, adapter="0123abc", revision="0123abc", page_tokens=16)
    generate(model, cache, prompt(50), **NEW)
    SWITCHES[what](model.model.layers[1].self_attn.v_proj)
    assert cache.load(prompt(50))[1] == 0
    done = generate(model, cache, prompt(90, seed=3), **NEW)
    assert (done.saved.stored, done.saved.declined) == (0, 6)
    assert "adapter" in done.saved.reason


@pytest.mark.parametrize(
    "config",
    [{"is_prompt_learning": True}, {"peft_type": "XLORA"}, {"alora_invocation_tokens": [5, 6]}],
    ids=lambda config: next(iter(config)),
)
def test_adapters_that_make_kv_depend_on_more_than_the_tokens_are_refused(config: dict[str, Any], store: Any) -> None:
    model = model_of("llama")
    model.peft_config = {"default": SimpleNamespace(**config)}
    with pytest.raises(UnsupportedModelError, match="an adapter"):
        namespace_for(store, model, adapter="0123abc")


def steered(module: Any, inputs: Any, output: Any) -> Any:
    return output + 5.0


def loud(x: Any) -> Any:
    return x * 5.0


@pytest.mark.parametrize("what", ["hook", "method"])
def test_kv_of_a_model_with_hooks_is_not_restored_without_them(what: str, store: Any) -> None:
    model = model_of("llama")
    first, last = (layer.input_layernorm for layer in model.model.layers)
    before = namespace_for(store, model, page_tokens=16)
    digests = {before.namespace.identity.digest}
    for part in (first, last):
        if what == "hook":
            undo = part.register_forward_hook(steered).remove
        else:
            part.forward, undo = loud, partial(delattr, part, "forward")
        assert "code" in generate(model, before, prompt(50), **NEW).saved.reason
        cache = namespace_for(store, model, page_tokens=16)
        digests.add(cache.namespace.identity.digest)
        assert generate(model, cache, prompt(50), **NEW).saved.stored > 0
        undo()
        assert before.load(prompt(50))[1] == cache.load(prompt(50))[1] == 0
    assert len(digests) == 3


def test_a_model_in_training_mode_is_refused(store: Any) -> None:
    with pytest.raises(ConfigError, match="eval"):
        namespace_for(store, model_of("llama").train())
    part = model_of("llama", attention_dropout=0.5)
    part.model.layers[1].self_attn.train()
    with pytest.raises(ConfigError, match="eval"):
        namespace_for(store, part)


def test_kv_computed_under_autocast_is_not_saved_as_full_precision(store: Any) -> None:
    """The cache is float32, but its values were rounded before."""
    model = model_of("llama")
    cache = namespace_for(store, model, page_tokens=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        done = generate(model, cache, prompt(50), **NEW)
    assert (done.saved.stored, done.saved.declined) == (0, 3)
    assert "autocast" in done.saved.reason
    assert generate(model, cache, prompt(50), **NEW).restored == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cache.load(prompt(50))[1] == 0


def test_an_argument_that_is_not_a_model_is_refused(store: Any) -> None:
    with pytest.raises(ConfigError, match="model"):
        namespace_for(store, "meta-llama/Llama-3.1-8B")


def strange_caches(model: Any) -> dict[str, Any]:
    from transformers.cache_utils import DynamicLayer

    class IndexedLayer(DynamicLayer):  # type: ignore[misc]
        """A layer that keeps more than keys and values."""

    mixed = transformers.DynamicCache()
    model(prompt(50), past_key_values=mixed)
    indexed = IndexedLayer()
    indexed.update(mixed.layers[1].keys, mixed.layers[1].values)
    mixed.layers[1] = indexed
    static = transformers.StaticCache(config=model.config, max_cache_len=64)
    model(prompt(50), past_key_values=static)
    offloaded = transformers.DynamicCache(offloading=False)
    model(prompt(50), past_key_values=offloaded)
    offloaded.offloading = True
    uneven = transformers.DynamicCache()
    model(prompt(50), past_key_values=uneven)
    uneven.layers[1].keys = uneven.layers[1].keys[:, :, :-3]
    caches = {"indexed": mixed, "static": static, "offloaded": offloaded, "uneven": uneven}
    others = {
        "heads": model_of("llama", num_key_value_heads=4), "dim": model_of("llama", head_dim=16),
        "dtype": model_of("llama", "bfloat16"), "layers": model_of("llama", num_hidden_layers=3),
        "window": model_of("mistral"),
    }  # fmt: skip
    for name, other in others.items():
        caches[name] = transformers.DynamicCache(config=other.config)
        other(prompt(50), past_key_values=caches[name])
    twice = transformers.DynamicCache()
    model(prompt(50).repeat(2, 1), past_key_values=twice)
    encoder = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    return {
        **caches, "rows": twice, "encoder-decoder": encoder, "empty": transformers.DynamicCache(), "none": None,
        "fresh": transformers.DynamicCache(config=model.config),
    }  # fmt: skip


STRANGE = (
    "indexed", "static", "offloaded", "uneven", "heads", "dim", "dtype", "layers", "window", "rows",
    "encoder-decoder", "empty", "none", "fresh",
)  # fmt: skip


@pytest.mark.parametrize("what", STRANGE)
def test_caches_that_do_not_fit_are_declined_entirely(what: str, store: Any) -> None:
    model = model_of("llama")
    cache = namespace_for(store, model, page_tokens=16)
    with torch.no_grad():
        past = strange_caches(model)[what]
    result = cache.save(prompt(50), past)
    assert (result.stored, result.skipped, result.declined) == (0, 0, 3)
    assert result.reason.startswith("cache:") and cache.reason == result.reason
    assert cache.load(prompt(50))[1] == 0
    assert cache.reason == ""


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
        {"prefill_chunk_size": 16},
        {"generation_config": transformers.GenerationConfig(num_beams=3)},
        {"past_key_values": transformers.DynamicCache()},
        {"inputs_embeds": torch.zeros(1, 50, 32)},
        {"position_ids": torch.arange(50)[None]},
        {"token_type_ids": torch.ones(1, 50, dtype=torch.int64)},
        {"assistant_model": object()},
    ],
    ids=lambda options: "-".join(options),
)
def test_generation_that_a_store_cannot_serve_is_refused(options: dict[str, Any], store: Any) -> None:
    model = model_of("llama")
    cache = namespace_for(store, model, page_tokens=16)
    with pytest.raises(ConfigError, match=next(iter(options)) if "generation_config" not in options else "num_beams"):
        generate(model, cache, prompt(50), max_new_tokens=4, **options)
    assert cache.load(prompt(50))[1] == 0


def test_a_cache_of_another_model_object_is_refused(store: Any) -> None:
    cache = namespace_for(store, model_of("llama"))
    with pytest.raises(ConfigError, match="another model"):
        generate(model_of("llama"), cache, prompt(50), **NEW)


def test_generate_takes_a_store_in_place_of_a_cache(store: Any) -> None:
    model = model_of("llama")
    assert generate(model, store, prompt(100), **NEW).restored == 0
    assert generate(model, store, prompt(100), **NEW).restored == 64


def test_sampling_continues_the_same_random_sequence(store: Any) -> None:
    model = model_of("qwen3")
    cache = namespace_for(store, model, page_tokens=16)
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(generate(model, cache, prompt(100), do_sample=True, max_new_tokens=12))
    assert outputs[1].restored == 96
    assert outputs[0].output.tolist() == outputs[1].output.tolist()


def test_an_output_object_is_returned_unchanged(store: Any) -> None:
    model = model_of("llama")
    cache = namespace_for(store, model, page_tokens=16)
    options = {"return_dict_in_generate": True, "output_scores": True, **NEW}
    for expected in (0, 48):
        done = generate(model, cache, prompt(50), **options)
        assert done.restored == expected
        assert done.output.sequences.tolist() == plain(model, prompt(50))
        assert len(done.output.scores) == 12


def test_a_cache_with_other_columns_than_the_output_is_not_saved(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    cache = namespace_for(store, model, page_tokens=16)
    original = model.generate
    # as if the library had added more to the cache than it returns
    monkeypatch.setattr(model, "generate", lambda ids, **options: original(ids, **options)[:, :60])
    done = generate(model, cache, prompt(50), **NEW)
    assert done.saved.stored == 0
    assert "61" in done.saved.reason
    assert cache.load(prompt(50))[1] == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(save_all(Path(sys.argv[1]))))
