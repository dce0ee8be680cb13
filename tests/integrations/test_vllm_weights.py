"""The identity of an engine's weights from its files. Needs no engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvfs.errors import ConfigError
from kvfs.integrations.vllm.weights import weights_id

CONFIG, WEIGHTS = "a" * 40, "b" * 40  # commits


def cache(folder: Path, commit: str, file: str) -> Path:
    """A cache of the Hugging Face hub with one file of one commit."""
    model = folder / "models--org--model"
    for name, content in ((f"snapshots/{commit}/{file}", "{}"), ("refs/main", commit)):
        (model / name).parent.mkdir(parents=True)
        (model / name).write_text(content)
    return folder


def test_weights_in_a_separate_folder_are_not_identified_by_the_commit_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache(tmp_path / "hub", CONFIG, "config.json")))
    model = SimpleNamespace(model="org/model", revision=None, seed=0)
    weights = cache(tmp_path / "weights", WEIGHTS, "model.safetensors")
    assert weights_id(model, SimpleNamespace(load_format="auto", download_dir=None)) == CONFIG
    assert weights_id(model, SimpleNamespace(load_format="auto", download_dir=str(weights))) == WEIGHTS
    with pytest.raises(ConfigError, match="cannot tell which weights"):
        weights_id(model, SimpleNamespace(load_format="auto", download_dir=str(tmp_path / "other")))
