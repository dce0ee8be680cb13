"""Identifies LoRA adapters by their files: a name or a path does not say what weights it has."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")
DIGEST_SECONDS = 2.0  # longest wait of a request in the queue for a digest: of some 2 GiB; then it bypasses kvfs
CALL_SECONDS = 0.002  # of that in the scheduler's thread: adapters that are known take less; others wait in the queue
WAITING_MAX = 64  # requests whose adapters are read
FILES_MAX = 64  # of an adapter
ADAPTERS_MAX = 4096  # whose digests are kept
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_CONFIG = "adapter_config.json"
_PIECE_BYTES = 1 << 20

_Signature = tuple[tuple[str, int, int, int, int], ...]


class Reading:
    """The files of one adapter, while a thread reads them and afterwards."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.began = time.monotonic()
        self.ended = threading.Event()
        self.found: bytes | None = None  # over all files; None if they do not identify an adapter

    @property
    def late(self) -> bool:
        """Whether it takes longer than a request waits."""
        return not self.ended.is_set() and time.monotonic() - self.began > DIGEST_SECONDS


class Adapters:
    """Digests of adapters, each read once, in a thread. Used by the scheduler's thread, which never waits for a disk.

    The engine has an adapter's weights in memory and does not say when it read them. So only files that have not
    changed since the engine started identify an adapter: requests with others bypass kvfs.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype  # in which the engine applies adapters; "": it takes none
        self._began_ns = time.time_ns()
        self._digests: dict[tuple[str, _Signature], bytes] = {}
        self._paths: dict[int, str] = {}  # by the engine's number of an adapter, which names one adapter
        self._waiting: deque[Reading] = deque()
        self._lock = threading.Lock()  # around ``_waiting`` and ``_thread``
        self._thread: threading.Thread | None = None

    def begin(self, lora: Any) -> Reading | None:
        """Begin to read the files of a request's adapter. None if it cannot be identified, or not in time."""
        inplace = getattr(lora, "load_inplace", False) or getattr(lora, "tensorizer_config_dict", None)
        if inplace or len(self._paths) >= ADAPTERS_MAX or not self._dtype:
            return None
        reading = Reading(lora.lora_path)
        with self._lock:
            if len(self._waiting) >= WAITING_MAX or (self._waiting and self._waiting[0].late):
                return None  # it would wait behind a disk that does not answer
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvfs-adapter", daemon=True)
                try:
                    thread.start()
                except RuntimeError as exc:  # the process may have no more threads; the engine goes on
                    logger.warning_once("kvfs: requests with adapters are computed: %s", exc)
                    return None
                self._thread = thread
            self._waiting.append(reading)
        return reading

    def digest(self, lora: Any, reading: Reading) -> bytes | None:
        """16 bytes for the adapter of a request whose ``reading`` has ended; None if it is not identified."""
        if reading.found is None or self._paths.setdefault(lora.lora_int_id, lora.lora_path) != lora.lora_path:
            return None
        kind = f"{self._dtype} {getattr(lora, 'is_3d_lora_weight', False)}".encode()
        return hashlib.blake2b(kind + reading.found, digest_size=16).digest()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                reading = self._waiting[0]
            try:
                reading.found = self._read(reading.path)
            except Exception as exc:  # such as the name of a repository in place of a directory
                logger.warning_once(
                    "kvfs: adapter %s has no readable files: its requests are computed (%s)", reading.path, exc
                )
            with self._lock:
                self._waiting.popleft()
            reading.ended.set()

    def _read(self, path: str) -> bytes | None:
        """In a thread: the digest of the files in ``path``, if they identify the adapter. OSError."""
        folder = Path(path)
        files = sorted(f for f in folder.iterdir() if f.name == _CONFIG or f.suffix in _WEIGHTS)
        signature = tuple(_signature(file) for file in files)
        if not 2 <= len(files) <= FILES_MAX or _CONFIG not in [file.name for file in files]:
            raise FileNotFoundError(f"no {_CONFIG} with weights")
        if any(changed >= self._began_ns for *_, changed in signature):
            logger.warning_once("kvfs: adapter %s changed after the start: its requests are computed", path)
            return None
        key = (path, signature)
        if key not in self._digests:
            digest = _digest(files)
            if tuple(_signature(file) for file in files) != signature:
                return None
            if len(self._digests) >= ADAPTERS_MAX:
                self._digests.clear()
            self._digests[key] = digest
        return self._digests[key]


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
