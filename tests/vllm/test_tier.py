"""kvfs as a secondary tier: rows of vLLM's CPU tier as opaque pages, across restarts."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import ScheduleEndContext, TransferJob

from kvfs.errors import ConfigError
from kvfs.integrations.vllm import tier as tier_module
from kvfs.integrations.vllm.tier import KvfsTier, identity_of
from tests.vllm.engine import Engine

ROW = 8192
KEYS = [make_offload_key(bytes([n]) * 32, 0) for n in range(6)]


def spec(tp_size: int = 1) -> Any:
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(32, ("model.layers.0",), 0),), worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=False, extra_config={}, engine_id="e", model=OffloadingModelConfig("m", "bfloat16"),
        cache=OffloadingCacheConfig(32, 1),
        parallel=OffloadingParallelConfig(0, tp_size, tp_size, 1, 1, 1, 0, 1, None, False),
    )  # fmt: skip
    return SimpleNamespace(config=config, tokens_per_block=(32,), blocks_per_chunk=1)


def tier(folder: Path, rows: np.ndarray[Any, Any], **options: Any) -> KvfsTier:
    arguments = {"path": str(folder), "capacity": "32MiB", "weights_id": "w", **options}
    return KvfsTier(spec(arguments.pop("tp_size", 1)), memoryview(rows), "kvfs", **arguments)


def run(one: KvfsTier, job_id: int, keys: list[Any], chunks: list[int], *, load: bool) -> Any:
    job = TransferJob(job_id, keys, np.array(chunks), load, ReqContext("r"))
    (one.submit_load if load else one.submit_store)(job)
    one.drain_jobs()
    (result,) = one.get_finished_jobs()
    return result


def found(one: KvfsTier, keys: list[Any]) -> list[bool]:
    context, end = ReqContext(f"r{time.monotonic()}"), time.monotonic() + 20
    while time.monotonic() < end:
        results = [one.lookup(key, context) for key in keys]
        if LookupResult.RETRY not in results:
            return [result is LookupResult.HIT for result in results]
        one.on_schedule_end(ScheduleEndContext((), ()))
        time.sleep(0.005)
    raise AssertionError("lookups stay undecided")


def test_rows_are_found_after_a_restart(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).integers(0, 256, (8, ROW), dtype=np.uint8)
    one = tier(tmp_path / "s", rows)
    assert run(one, 1, KEYS[:4], [5, 0, 2, 7], load=False).success
    assert found(one, KEYS) == [True] * 4 + [False] * 2
    one.shutdown()
    again = np.zeros_like(rows)
    other = tier(tmp_path / "s", again)
    assert run(other, 2, KEYS[:3], [1, 2, 3], load=True).success
    assert (again[1:4] == rows[[5, 0, 2]]).all() and not again[0].any() and not again[4:].any()
    partly = run(other, 3, [KEYS[3], KEYS[4], KEYS[0]], [4, 5, 6], load=True)
    assert not partly.success and partly.successful_keys == (KEYS[3],)
    other.shutdown()
    elsewhere = tier(tmp_path / "s", np.zeros_like(rows), tp_size=2)
    assert found(elsewhere, KEYS) == [False] * 6, "ranks are part of the identity here"
    elsewhere.shutdown()


def test_the_identity_is_made_of_named_fields() -> None:
    """A later vLLM tells more about the same bytes; another length of the model does not change them."""
    told = spec().config

    @dataclass(frozen=True)
    class Later:
        name: str = "m"
        dtype: str = "bfloat16"
        max_model_len: int = 4096

    assert identity_of(dataclasses.replace(told, model=Later())) == identity_of(told)  # type: ignore[arg-type]
    assert identity_of(dataclasses.replace(told, kv_cache_layout="BLHNC")) != identity_of(told)


def test_damaged_rows_are_failed_promotions(tmp_path: Path) -> None:
    rows = np.random.default_rng(2).integers(0, 256, (8, ROW), dtype=np.uint8)
    one = tier(tmp_path / "s", rows)
    assert run(one, 1, KEYS[:2], [0, 1], load=False).success
    for path in (tmp_path / "s" / "segments").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    assert not run(one, 2, KEYS[:2], [2, 3], load=True).success
    one.shutdown()


def test_hashes_that_differ_between_processes_are_neither_found_nor_stored(tmp_path: Path) -> None:
    """Such as xxhash: 16 bytes, seeded per process."""
    one = tier(tmp_path / "s", np.ones((2, ROW), dtype=np.uint8))
    key = make_offload_key(b"x" * 16, 0)
    assert found(one, [key]) == [False]
    assert not run(one, 1, [key], [0], load=False).success and not run(one, 2, [key], [1], load=True).success
    one.shutdown()


@pytest.mark.parametrize("load", [False, True], ids=["store", "load"])
@pytest.mark.parametrize("end", ["drain_jobs", "shutdown"])
def test_a_disk_that_hangs_keeps_no_reset_and_no_end_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: bool, end: str
) -> None:
    """Its jobs have failed, those that had not begun as well, and no row moves when the disk answers at last."""
    monkeypatch.setattr(tier_module, "DRAIN_SECONDS", 0.05)
    rows = np.random.default_rng(3).integers(0, 256, (8, ROW), dtype=np.uint8)
    one = tier(tmp_path / "s", rows, threads=1)
    assert run(one, 1, KEYS[:2], [0, 1], load=False).success
    reached, answers, ended = threading.Event(), threading.Event(), threading.Event()
    get, put = one._ns.get, one._ns.put_keys

    def hangs(call: Callable[..., Any], *arguments: Any) -> Any:
        reached.set()
        assert answers.wait(20)
        try:
            return call(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(one._ns, "get", partial(hangs, get))
    monkeypatch.setattr(one._ns, "put_keys", partial(hangs, put))
    for job_id in (2, 3):
        keys = KEYS[:2] if load else KEYS[2:4]
        job = TransferJob(job_id, keys, np.array([4, 5]), load, ReqContext("r"))
        (one.submit_load if load else one.submit_store)(job)
    assert reached.wait(20)
    before = rows.copy()
    getattr(one, end)()
    results = list(one.get_finished_jobs())
    assert [(r.job_id, r.success, r.successful_keys) for r in results] == [(2, False, None), (3, False, None)]
    answers.set()
    assert ended.wait(20)
    one._pool.close()
    assert (rows == before).all() and not list(one.get_finished_jobs())
    if end == "drain_jobs":
        one.shutdown()


@pytest.mark.parametrize("missing", ["path", "weights_id"])
def test_a_missing_path_or_weights_id_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing} (is )?''"):
        tier(tmp_path / "s", np.zeros((2, ROW), dtype=np.uint8), **{missing: ""})


def test_below_the_engines_own_tier(model: Callable[[str], Path], tmp_path: Path) -> None:
    """vLLM's CPU tier refuses machines without a GPU, so here the CPU makes its copies."""
    transfer = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "tools.benchmarks.vllm_peers",
            "cpu_bytes_to_use": 64 << 20, "block_size": 32,
            "secondary_tiers": [
                {"type": "kvfs", "path": str(tmp_path / "s"), "capacity": "64MiB", "weights_id": "w"}
            ],
        },
    }  # fmt: skip
    prompt = [random.Random(f"tier {i}").randrange(5, 1000) for i in range(500)]
    with Engine(model("llama"), transfer=transfer) as first:
        cold = first.generate(prompt)
    with Engine(model("llama"), transfer=transfer) as second:
        assert second.generate(prompt) == [(480, cold[0][1])]
