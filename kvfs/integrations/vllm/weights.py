"""Identifies the weights of an engine: by a commit, or by a digest of the files that it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvfs.errors import ConfigError
from kvfs.integrations.weights import COMMIT, digest_files, hub_commit, weight_files


def weights_id(model: Any, load: Any) -> str:
    """A revision for the namespace. ``model``: vLLM's ModelConfig; ``load``: its LoadConfig.

    For a hub model its commit. For a local directory a digest of each weight file's name, size, first MiB and 256
    samples of 4 KiB: weights of another training differ everywhere. A few numbers patched by hand may be missed; set
    ``weights_id`` then. ConfigError if the weights cannot be identified.
    """
    if str(load.load_format) == "dummy":
        return f"dummy-seed-{model.seed}"
    path = Path(model.model)
    if path.is_dir():
        if COMMIT.match(path.name):  # a snapshot in the hub's cache
            return path.name
        return f"files-{digest_files(weight_files(path))}"
    if path.is_file():
        return f"files-{digest_files([path])}"
    commit = hub_commit(model.model, model.revision, getattr(load, "download_dir", None))
    if commit:
        return commit
    raise ConfigError(
        f'kvfs cannot tell which weights {model.model!r} has: write "weights_id" with a commit or digest of them '
        "into kv_connector_extra_config"
    )
