"""Identifies weights by the commit of a model of the Hugging Face hub, or by a digest of its files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from kvfs.errors import ConfigError

COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
HEAD_BYTES = 1 << 20
SAMPLES, SAMPLE_BYTES = 256, 4096  # of each file, evenly spread


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a local model. ConfigError if there are none."""
    files = sorted(f for f in folder.iterdir() if f.suffix in _WEIGHTS and f.is_file())
    if not files:
        raise ConfigError(f'{folder} has no weight files ({", ".join(_WEIGHTS)}): set "weights_id"')
    return files


def digest_files(files: Sequence[Path]) -> str:
    """32 hex digits over each file's name, size, first MiB and 256 samples of 4 KiB.

    Weights of another training differ everywhere; a few numbers patched by hand may be missed.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
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


def hub_file(repository: str, revision: str | None, name: str = "config.json") -> Path | None:
    """A file of a hub model in the local cache; the name of its folder is the commit."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def hub_commit(repository: str, revision: str | None, download_dir: str | None) -> str | None:
    """The commit of a hub model as it is in the local cache, or in ``download_dir``."""
    if revision is not None and COMMIT.match(revision):
        return revision
    if download_dir:  # it holds the weights only: the config is elsewhere, perhaps of another commit
        ref = Path(download_dir, f"models--{repository.replace('/', '--')}", "refs", revision or "main")
        try:
            commit = ref.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
    else:
        file = hub_file(repository, revision)
        commit = file.parent.name if file is not None else ""
    return commit if COMMIT.match(commit) else None


def config_file(model: str, revision: str | None = None) -> Path | None:
    """The config.json of a local model, or of a hub model in the local cache; None if there is none."""
    if Path(model).is_dir():
        file = Path(model, "config.json")
        return file if file.is_file() else None
    return hub_file(model, revision)


def model_revision(model: str, revision: str | None = None, download_dir: str | None = None) -> str | None:
    """What identifies weights and config of a model, equal for all engines that load its files; None if nothing does.

    Of a hub model its commit; of a local folder a digest of its weight files and config. ConfigError for a folder
    without weights.
    """
    folder = Path(model)
    if not folder.is_dir():
        return hub_commit(model, revision, download_dir)
    if COMMIT.match(folder.name):  # a snapshot in the hub's cache
        return folder.name
    config = config_file(model)
    return f"model-{digest_files([*weight_files(folder), *([config] if config is not None else [])])}"
