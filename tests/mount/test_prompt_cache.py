"""A prompt cache of transformers as a safetensors file in a mount: saved, mounted again, loaded, continued."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvfs
from tests.mount.real import needs_fuse, serving
from tests.stores import segment_files

LAYERS, SYSTEM_TOKENS = 2, 1_200
NEW_TOKENS, CONVERSATIONS = 4, 3


@needs_fuse
@pytest.mark.timeout(600)  # a model computes: a busy machine takes minutes
def test_a_cache_of_transformers_continues_after_a_restart(
    store_path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tensors = pytest.importorskip("safetensors.torch")
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)  # threads that wait for each other take minutes on a busy machine
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=500, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64,
        )
    ).eval()  # fmt: skip

    def prompt(number: int) -> Any:
        draw = torch.Generator().manual_seed(number + 1)
        own = torch.randint(5, 500, (1, 100 + 20 * number), generator=draw)
        system = torch.randint(5, 500, (1, SYSTEM_TOKENS), generator=torch.Generator().manual_seed(0))
        return torch.cat([system, own], 1)

    def continuation(cache: Any, last: Any) -> list[int]:
        tokens = []
        for _ in range(NEW_TOKENS):
            last = model(last, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(last))
        return tokens

    (tmp_path / "mnt").mkdir()
    files = tmp_path / "mnt" / "files"
    kvfs.open(store_path, capacity="64MiB").close()
    expected = []
    with torch.no_grad():
        with serving(store_path, tmp_path / "mnt"):
            for number in range(CONVERSATIONS):
                cache = transformers.DynamicCache()
                model(prompt(number)[:, :-1], past_key_values=cache, use_cache=True)
                kept = {f"{n}.k": layer.keys for n, layer in enumerate(cache.layers)}
                kept |= {f"{n}.v": layer.values for n, layer in enumerate(cache.layers)}
                tensors.save_file({name: t.contiguous() for name, t in kept.items()}, files / f"{number}.safetensors")
                expected.append(continuation(cache, prompt(number)[:, -1:]))
            saved = sum(file.stat().st_size for file in files.iterdir())
        with serving(store_path, tmp_path / "mnt"):
            for number in range(CONVERSATIONS):
                loaded = tensors.load_file(files / f"{number}.safetensors")
                cache = transformers.DynamicCache()
                for n in range(LAYERS):
                    cache.update(loaded[f"{n}.k"].clone(), loaded[f"{n}.v"].clone(), n)
                del loaded  # its tensors map the file, and a mapped file keeps the mount
                assert continuation(cache, prompt(number)[:, -1:]) == expected[number]
    assert saved > 1.5 * sum(file.stat().st_blocks * 512 for file in segment_files(store_path))
