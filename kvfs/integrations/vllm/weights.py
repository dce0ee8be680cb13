"""Identifies the weights of an engine: by a commit, or by a digest of the files that it loads."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from kvfs.errors import ConfigError

_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
HEAD_BYTES = 1 << 20
SAMPLES, SAMPLE_BYTES = 256, 4096  # of each file, evenly spread


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
        if _COMMIT.match(path.name):  # a snapshot in the hub's cache
            return path.name
        return f"files-{digest_files(path)}"
    if path.is_file():
        return f"files-{digest_files(path.parent, [path])}"
    commit = _hub_commit(model.model, model.revision, getattr(load, "download_dir", None))
    if commit:
        return commit
    raise ConfigError(
        f'kvfs cannot tell which weights {model.model!r} has: write "weights_id" with a commit or digest of them '
        "into kv_connector_extra_config"
    )


def digest_files(folder: Path, files: list[Path] | None = None) -> str:
    """32 hex digits over the weight files in ``folder``. ConfigError if there are none."""
    chosen = files or sorted(f for f in folder.iterdir() if f.suffix in _WEIGHTS and f.is_file())
    if not chosen:
        raise ConfigError(
            f'{folder} has no weight files ({", ".join(_WEIGHTS)}): write "weights_id" into kv_connector_extra_config'
        )
    digest = hashlib.blake2b(digest_size=16)
    for file in chosen:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(f"{file.name} {size}\n".encode())
            digest.update(stream.read(HEAD_BYTES))
            for i in range(SAMPLES):
                stream.seek(i * max(1, size - SAMPLE_BYTES) // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
            stream.seek(max(0, size - SAMPLE_BYTES))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _hub_commit(repository: str, revision: str | None, download_dir: str | None) -> str | None:
    if revision is not None and _COMMIT.match(revision):
        return revision
    if download_dir:  # it holds the weights only: the config is elsewhere, perhaps of another commit
        ref = Path(download_dir, f"models--{repository.replace('/', '--')}", "refs", revision or "main")
        try:
            commit = ref.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
    else:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repository, "config.json", revision=revision)
        commit = Path(found).parent.name if isinstance(found, str) else ""
    return commit if _COMMIT.match(commit) else None
