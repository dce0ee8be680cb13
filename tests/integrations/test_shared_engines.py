"""One prefix for transformers and the adapters of SGLang and LightLLM; tests/vllm/test_shared.py adds vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvfs  # noqa: E402
from kvfs.errors import ConfigError  # noqa: E402
from kvfs.integrations.transformers import namespace_for  # noqa: E402
from kvfs.integrations.weights import model_revision  # noqa: E402
from tests.integrations.shared_engines import PAGE, LightLLM, SGLang, Transformers  # noqa: E402

SHAPE = {"layers": 3, "heads": 2, "dim": 8, "dtype": torch.float32}
PAGES = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model and the folder with its files."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=SHAPE["layers"], num_attention_heads=4,
        num_key_value_heads=SHAPE["heads"], head_dim=SHAPE["dim"], initializer_range=0.2, pad_token_id=None,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load(folder), folder


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def starters(path: Path, model: tuple[Any, Path]) -> list[Callable[[], Any]]:
    return [
        lambda: Transformers(path, *model),
        lambda: SGLang(path, model[1], "page_first", **SHAPE),
        lambda: SGLang(path, model[1], "page_head", **SHAPE),
        lambda: LightLLM(path, model[1], **SHAPE),
    ]


@pytest.mark.parametrize("writer", range(4))
def test_each_engine_reads_what_another_one_stored(memory_path: Path, model: tuple[Any, Path], writer: int) -> None:
    start = starters(memory_path / "store", model)
    tokens = random.Random(writer).choices(range(96), k=PAGES * PAGE)
    first = start[writer]()
    size = first.layout.page_bytes if writer == 0 else PAGE * 3 * 2 * 2 * 8 * 4
    data = torch.randn(PAGES * size // 4, generator=torch.Generator().manual_seed(writer)).numpy().tobytes()
    pages = [data[at : at + size] for at in range(0, len(data), size)]
    assert first.put(tokens, pages) == PAGES
    identity = first.identity
    first.close()
    for one in start:
        reader = one()
        assert reader.identity == identity and reader.get(tokens) == pages
        assert reader.put(tokens, pages) == PAGES
        reader.close()


def test_tokens_are_those_without_a_store_after_pages_went_through_another_engine(
    memory_path: Path, model: tuple[Any, Path]
) -> None:
    """KV of transformers, through SGLang's pool and LightLLM's CPU cache into two more stores, and continued from."""
    ids = random.Random(3).choices(range(96), k=PAGES * PAGE + 7)
    inputs = torch.tensor([ids])
    plain = model[0].generate(inputs, max_new_tokens=12, do_sample=False)
    first = Transformers(memory_path / "first", *model)
    past, found = first.cache.load(inputs)
    assert found == 0
    model[0].generate(inputs, past_key_values=past, max_new_tokens=1, do_sample=False)
    assert first.cache.save(inputs, past).stored == PAGES
    first.close()
    reader = SGLang(memory_path / "first", model[1], "layer_first", **SHAPE)
    pages = reader.get(ids)
    reader.close()
    writer = SGLang(memory_path / "second", model[1], "page_head", **SHAPE)
    assert len(pages) == writer.put(ids, pages) == PAGES
    writer.close()
    relay = LightLLM(memory_path / "second", model[1], **SHAPE)
    pages = relay.get(ids)
    relay.close()
    relay = LightLLM(memory_path / "third", model[1], **SHAPE)
    assert len(pages) == relay.put(ids, pages) == PAGES
    relay.close()
    last = Transformers(memory_path / "third", load(model[1]), model[1])
    past, found = last.cache.load(inputs)
    assert found == PAGES * PAGE
    again = last.model.generate(inputs, past_key_values=past, max_new_tokens=12, do_sample=False)
    assert torch.equal(again, plain)
    last.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"share": "all"}, "share is 'all'"),
        ({"name": "mine"}, "without a name"),
        ({"revision": None}, "revision is missing"),
        ({"adapter": "a" * 32}, "adapter has no meaning"),
    ],
)
def test_arguments_that_other_engines_do_not_know_are_refused(
    memory_path: Path, model: tuple[Any, Path], arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Transformers(memory_path / "store", *model, **arguments)


def test_weights_that_changed_do_not_reach_other_engines(memory_path: Path, model: tuple[Any, Path]) -> None:
    engine = Transformers(memory_path / "store", load(model[1]), model[1])
    tokens = random.Random(4).choices(range(96), k=PAGES * PAGE)
    pages = [bytes(engine.layout.page_bytes)] * PAGES
    with torch.no_grad():
        engine.model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    assert engine.put(tokens, pages) == 0 and "weights changed" in engine.cache.reason
    engine.close()
    changed = load(model[1])
    engine = Transformers(memory_path / "store", changed, model[1])
    changed.config.rms_norm_eps = 0.5
    assert engine.put(tokens, pages) == 0 and "config changed" in engine.cache.reason
    engine.close()


def test_rounded_rope_frequencies_are_refused(memory_path: Path, model: tuple[Any, Path]) -> None:
    rounded = load(model[1]).to(torch.bfloat16)
    with pytest.raises(ConfigError, match="inv_freq of this model is torch"):
        Transformers(memory_path / "store", rounded, model[1])


def test_without_sharing_engines_have_namespaces_of_their_own(memory_path: Path, model: tuple[Any, Path]) -> None:
    shared = Transformers(memory_path / "store", *model)
    with kvfs.open(memory_path / "store") as store:
        alone = namespace_for(store, model[0], revision=model_revision(str(model[1])))
        assert alone.namespace.identity.digest != shared.identity
    shared.close()
