"""The answers of an engine during faults of the disk below its connector: kvfs and vLLM's own connectors, on a CPU.

Each connector stores four prompts. For each fault, a new engine on a copy of these files gets the prompts again.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Make = Callable[[Path], "dict[str, Any] | None"]
PROMPTS, TOKENS = 4, 700
DISK_BYTES = 8 << 20  # of a disk that is full before all prompts are stored
FAULTS = ("none", "flipped bits", "files missing", "EIO", "reads hang", "directory removed", "disk full")


def run(connectors: Mapping[str, Make]) -> None:
    from tests.vllm import models
    from tests.vllm.engine import Engine

    folder = Path(tempfile.mkdtemp(prefix="kvfs-bench-"))
    prompts = [[random.Random(f"{n} {i}").randrange(5, 1000) for i in range(TOKENS)] for n in range(PROMPTS)]
    try:
        shim = _shim(folder)
        model = models.build("llama", folder / "model")
        with Engine(model) as plain:
            right = [plain.ask("time", prompt=p, tokens=8)["tokens"] for p in prompts]
        for name, make in connectors.items():
            if name == "none":
                continue
            filled = folder / "filled"
            with Engine(model, transfer=make(filled)) as first:
                for prompt in prompts:
                    first.ask("time", prompt=prompt, tokens=8)
                time.sleep(2.0)
            cells = [_one(fault, folder, filled, make, model, shim, prompts, right) for fault in FAULTS]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
            shutil.rmtree(filled)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _one(
    fault: str, folder: Path, filled: Path, make: Make, model: Path, shim: Path, prompts: list[list[int]],
    right: list[list[int]],
) -> str:  # fmt: skip
    """A cell of the table: right answers, answers from the cache, and seconds if the disk was slow."""
    from tests.vllm.engine import Engine

    mode = folder / "mode"
    mode.write_text("")
    with _place(fault, folder, filled) as path:
        transfer = make(path)
        assert transfer is not None
        if transfer["kv_connector"] == "KvfsConnector":
            transfer["kv_connector_extra_config"]["load_seconds"] = 1.0
        env = {"LD_PRELOAD": str(shim), "BADREADS_UNDER": str(path), "BADREADS_MODE": str(mode)}
        try:
            with Engine(model, transfer=transfer, env=env) as engine:
                _break(fault, path, mode)
                asked = prompts * 2 if fault == "disk full" else prompts
                began = time.monotonic()
                answers = [engine.ask("time", prompt=p, tokens=8) for p in asked]
                seconds = time.monotonic() - began
        except AssertionError:
            return "the engine ended"
    good = sum(a["tokens"] == right[n % PROMPTS] for n, a in enumerate(answers))
    cached = sum(a["cached"] > 0 for a in answers)
    text = f"{good} of {len(asked)} right, {cached} from the cache"
    return f"{text}, {seconds / len(asked):.1f} s each" if fault == "reads hang" else text


@contextmanager
def _place(fault: str, folder: Path, filled: Path) -> Iterator[Path]:
    """A copy of the stored files; for "disk full" a small empty disk."""
    path = folder / "disk"
    path.mkdir()
    try:
        if fault == "disk full":
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", path], check=True)
            yield path / "store"
            return
        shutil.copytree(filled, path / "store")
        if fault == "flipped bits":
            flip(path / "store")
        yield path / "store"
    finally:
        if fault == "disk full":
            subprocess.run(["umount", "-l", path], check=False)
        shutil.rmtree(path, ignore_errors=True)


def _break(fault: str, path: Path, mode: Path) -> None:
    """Inject the fault below a running engine."""
    if fault == "files missing":
        for file in payloads(path):
            file.unlink()
    elif fault == "directory removed":
        shutil.rmtree(path)
    elif fault in ("EIO", "reads hang"):
        mode.write_text("eio" if fault == "EIO" else "slow")


def payloads(path: Path) -> list[Path]:
    """Files with KV, of any connector."""
    return [f for f in path.rglob("*") if f.is_file() and f.stat().st_size > 1 << 15 and "index" not in f.parts]


def flip(path: Path) -> None:
    """Flip a bit in every 64 KiB of every file, in the exponent of a number of two or four bytes."""
    for file in payloads(path):
        with file.open("r+b") as stream:
            size = os.fstat(stream.fileno()).st_size
            for at in range(min(size - 4, 1 << 16), size - 3, 1 << 16):
                stream.seek(at + 3)
                byte = stream.read(1)
                stream.seek(at + 3)
                stream.write(bytes([byte[0] ^ 64]))


def _shim(folder: Path) -> Path:
    built = folder / "badreads.so"
    source = Path(__file__).with_name("badreads.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(built), str(source), "-ldl"], check=True)
    return built
