"""Identifies LoRA adapters by their files: a name or a path does not say what weights it has."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")
DIGEST_SECONDS = 0.25  # longest wait of a request for a digest: the deadline of the index; then it bypasses kvfs
FILES_MAX = 64  # of an adapter
ADAPTERS_MAX = 4096  # whose digests are kept
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_CONFIG = "adapter_config.json"
_PIECE_BYTES = 1 << 20

_Signature = tuple[tuple[str, int, int, int, int], ...]


class Adapters:
    """Digests of adapters, each read once, in a thread. Used by the scheduler's thread.

    The engine has an adapter's weights in memory and does not say when it read them. So only files that have not
    changed since the engine started identify an adapter: requests with others bypass kvfs.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype  # in which the engine applies adapters; "": it takes none
        self._began_ns = time.time_ns()
        self._digests: dict[tuple[str, _Signature], bytes] = {}
        self._paths: dict[int, str] = {}  # by the engine's number of an adapter, which names one adapter
        self._reading: threading.Thread | None = None

    def digest(self, lora: Any) -> bytes | None:
        """16 bytes for a request's adapter. None if it cannot be identified, or not in time."""
        inplace = getattr(lora, "load_inplace", False) or getattr(lora, "tensorizer_config_dict", None)
        if inplace or len(self._paths) >= ADAPTERS_MAX or not self._dtype:
            return None
        if self._reading is not None and self._reading.is_alive():
            return None  # it would wait behind another
        found: list[bytes] = []
        self._reading = threading.Thread(
            target=self._read, args=(lora.lora_path, found), name="kvfs-adapter", daemon=True
        )  # fmt: skip
        self._reading.start()
        self._reading.join(DIGEST_SECONDS)
        if not found or self._paths.setdefault(lora.lora_int_id, lora.lora_path) != lora.lora_path:
            return None
        kind = f"{self._dtype} {getattr(lora, 'is_3d_lora_weight', False)}".encode()
        return hashlib.blake2b(kind + found[0], digest_size=16).digest()

    def _read(self, path: str, found: list[bytes]) -> None:
        """In a thread: append the digest of the files in ``path``, if they identify the adapter."""
        try:
            folder = Path(path)
            files = sorted(f for f in folder.iterdir() if f.name == _CONFIG or f.suffix in _WEIGHTS)
            signature = tuple(_signature(file) for file in files)
            if not 2 <= len(files) <= FILES_MAX or _CONFIG not in [file.name for file in files]:
                raise FileNotFoundError(f"no {_CONFIG} with weights")
            if any(changed >= self._began_ns for *_, changed in signature):
                logger.warning_once("kvfs: adapter %s changed after the start: its requests are computed", path)
                return
            key = (path, signature)
            if key not in self._digests:
                digest = _digest(files)
                if tuple(_signature(file) for file in files) != signature:
                    return
                if len(self._digests) >= ADAPTERS_MAX:
                    self._digests.clear()
                self._digests[key] = digest
            found.append(self._digests[key])
        except OSError as exc:  # such as the name of a repository in place of a directory
            logger.warning_once("kvfs: adapter %s has no readable files: its requests are computed (%s)", path, exc)


def _signature(file: Path) -> tuple[str, int, int, int, int]:
    about = os.stat(file)
    return file.name, about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns


def _digest(files: list[Path]) -> bytes:
    """Over the names and all bytes."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(f"{file.name} {os.fstat(stream.fileno()).st_size}\n".encode())
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
    return digest.digest()
