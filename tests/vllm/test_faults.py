"""Faults of the disk below a serving engine: right tokens, the engine alive, the fault counted."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvfs
from tests.vllm.engine import Engine
from tools.torture.case import allocated_bytes

Models = Callable[[str], Path]
Prompt = Callable[..., list[int]]


@pytest.fixture(scope="module")
def filled(model: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A store with four prompts, and the tokens that follow each."""
    store = tmp_path_factory.mktemp("filled") / "store"
    prompts = [[random.Random(f"{seed} {i}").randrange(5, 1000) for i in range(700)] for seed in range(4)]
    with Engine(model("llama"), store) as engine:
        answers = engine.generate(*prompts)
    assert [cached for cached, _ in answers] == [0] * 4
    return store, [tokens for _, tokens in answers]


@pytest.fixture
def store(filled: tuple[Path, list[list[int]]], tmp_path: Path) -> Path:
    shutil.copytree(filled[0], tmp_path / "store")
    return tmp_path / "store"


def _segments(store: Path) -> list[Path]:
    return sorted(path for path in (store / "segments").iterdir() if path.is_file())


def test_flipped_bytes_are_recomputed(
    store: Path, filled: tuple[Path, list[list[int]]], model: Models, prompt: Prompt
) -> None:
    with Engine(model("llama"), store) as engine:
        for path in _segments(store):
            with path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                for at in range(1 << 16, size, 1 << 16):  # one byte of each page, none of the header
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1]))
        for seed in range(4):
            assert engine.generate(prompt(seed))[0][1] == filled[1][seed]
        counted = engine.metrics()
        assert counted["kvfs_loads_failed"] > 0 and counted["kvfs_pages_not_loaded"] > 0
        for seed in range(4):  # what was computed has been stored again
            assert engine.generate(prompt(seed)) == [(640, filled[1][seed])]


def test_segments_that_vanish_are_recomputed(
    store: Path, filled: tuple[Path, list[list[int]]], model: Models, prompt: Prompt
) -> None:
    with Engine(model("llama"), store) as engine:
        for path in _segments(store):
            path.unlink()
        for seed in range(4):
            assert engine.generate(prompt(seed))[0][1] == filled[1][seed]
        counted = engine.metrics()  # upkeep notices missing files every second: those are not looked up
        failed = counted["kvfs_loads_failed"]
        assert 1 <= failed <= 4
        assert failed <= counted["kvfs_pages_not_loaded"] <= 10 * failed  # a prompt may be in two files, one noticed


def test_a_store_that_is_removed_while_serving(
    store: Path, filled: tuple[Path, list[list[int]]], model: Models, prompt: Prompt
) -> None:
    with Engine(model("llama"), store) as engine:
        assert engine.generate(prompt(0)) == [(640, filled[1][0])]
        shutil.rmtree(store)
        for seed in range(4):
            assert engine.generate(prompt(seed))[0][1] == filled[1][seed]
        engine.generate(prompt(20))  # one more step counts the last ones
        assert engine.metrics()["kvfs_pages_not_stored"] >= 40


def test_a_load_that_is_late_is_recomputed(
    store: Path, filled: tuple[Path, list[list[int]]], model: Models, prompt: Prompt
) -> None:
    with Engine(model("llama"), store, extra={"load_seconds": 1e-6}) as engine:
        for seed in range(2):
            assert engine.generate(prompt(seed))[0][1] == filled[1][seed]
        assert engine.metrics()["kvfs_loads_failed"] == 2


def test_a_disk_that_cannot_be_read_is_recomputed(
    store: Path, filled: tuple[Path, list[list[int]]], model: Models, prompt: Prompt
) -> None:
    with Engine(model("llama"), store, faulty=True) as engine:
        engine.fault(kind="preadv")  # EIO
        for seed in range(4):
            assert engine.generate(prompt(seed))[0][1] == filled[1][seed]
        assert engine.fault() > 0
        counted = engine.metrics()
        assert counted["kvfs_loads_failed"] == 4 and counted["kvfs_pages_not_loaded"] >= 4
        for seed in range(4):
            engine.generate(prompt(seed))
            assert engine.generate(prompt(seed)) == [(640, filled[1][seed])], "read, or stored again, without faults"


def test_a_disk_that_cannot_be_written_serves_what_it_has(
    store: Path, filled: tuple[Path, list[list[int]]], model: Models, prompt: Prompt
) -> None:
    with Engine(model("llama"), store, faulty=True) as engine:
        engine.fault(kind="pwritev")
        fresh = [engine.generate(prompt(seed))[0] for seed in (10, 11)]
        assert [cached for cached, _ in fresh] == [0, 0]
        for seed in range(4):
            assert engine.generate(prompt(seed)) == [(640, filled[1][seed])]
        assert engine.fault() > 0
        assert engine.metrics()["kvfs_pages_not_stored"] >= 20
        for seed, (_, tokens) in zip((10, 11), fresh, strict=True):
            assert engine.generate(prompt(seed)) == [(0, tokens)], "none of it was stored"
            assert engine.generate(prompt(seed)) == [(640, tokens)], "it is now"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("a file system is mounted: needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", mount], check=True)
    yield mount
    subprocess.run(["umount", "-l", mount], check=False)


def test_a_full_disk(small_disk: Path, model: Models, prompt: Prompt, filled: tuple[Path, list[list[int]]]) -> None:
    """The file system is smaller than the capacity says."""
    with Engine(model("llama"), small_disk / "store", extra={"capacity": "64MiB"}) as engine:
        for seed in (0, 1, 2, 3, 0, 1, 2, 3):
            assert engine.generate(prompt(seed))[0][1] == filled[1][seed]
    with kvfs.open(small_disk / "store", create=False) as opened:
        assert opened.stats()["totals"]["disk_full"] > 0


def test_churn_within_a_tenth_of_the_working_set(model: Models, tmp_path: Path) -> None:
    """Memory, descriptors and the directory stay bounded over 500 requests."""
    store = tmp_path / "store"
    prompts = [[random.Random(f"churn {n} {i}").randrange(5, 1000) for i in range(200)] for n in range(600)]
    with Engine(model("llama"), store, extra={"capacity": "16MiB"}) as engine:
        answers = {n: engine.generate(prompts[n], max_tokens=2)[0][1] for n in range(20)}
        usages = []
        for first in range(20, 600, 20):
            engine.generate(*prompts[first : first + 20], max_tokens=2)
            usages.append(engine.ask("usage"))
            assert allocated_bytes(store) <= 16 << 20
        for n in range(20):
            assert engine.generate(prompts[n], max_tokens=2)[0][1] == answers[n]
        usages.append(engine.ask("usage"))
        end = time.monotonic() + 60
        while engine.generate(prompts[19], max_tokens=2)[0][0] == 0 and time.monotonic() < end:
            time.sleep(0.1)  # the disk may be far behind an engine of this size
        for n in range(15, 5, -1):  # the newest but five, of about forty that fit
            assert engine.generate(prompts[n], max_tokens=2)[0] == (192, answers[n]), n
    for what, more in (("fds", 8), ("rss", 64 << 20)):  # how many segments are open varies, but not with the requests
        used = [usage[what] for usage in usages]
        assert max(used[15:]) <= max(used[:15]) + more, used
