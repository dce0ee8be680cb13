"""The device path of LightLLM over a pool in host memory and on the simulated device; tests/lightllm has LightLLM."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.integrations.lightllm import device as device_module
from kvfs.integrations.lightllm.device_pages import DevicePages, Shard
from kvfs.integrations.lightllm.model import Server
from kvfs.integrations.lightllm.settings import settings_of
from kvfs.namespace import Namespace
from kvfs.system.files import Files
from kvfs.testing import EngineContract, Fault, FaultyFiles
from tests.gpu.simulated import Happened, Pending, SimulatedDevice
from tests.gpu.test_gpu_io import attach as attach_to_device
from tests.integrations.lightllm_cache import environment
from tests.integrations.lightllm_device import FakeDeviceEngine, Loop, MemoryManager, Together
from tests.integrations.test_lightllm import PAGE, PAGE_BYTES, SHAPE, contents, model_folder, server_of, tokens_of
from tests.stores import corrupt

SLOTS = 64 * PAGE


def loop(path: Path, *, slots: int = SLOTS, shape: Any = None, server: Any = None, **how: Any) -> Loop:
    folder = model_folder(path.with_name("model"))
    return Loop(path, MemoryManager(slots, **(shape or SHAPE)), server_of(folder, **(server or {})), PAGE, **how)


class OnDevice(DevicePages):
    """On the simulated device: its events are those of the past, unless a test holds them back."""

    event: Callable[[], Any] = Happened

    def after(self, stream: Any) -> Any:
        return type(self).event()

    def to_host(self, row: torch.Tensor, stream: Any) -> tuple[torch.Tensor, Any]:
        return row.clone(), type(self).event()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    made = SimulatedDevice()

    def attach(self: Namespace, kv: Any, *, ring_bytes: Any, queue_max: int, **_: Any) -> Any:
        return attach_to_device(self, kv, device=made, ring_bytes=ring_bytes, queue_max=queue_max)

    monkeypatch.setattr(Namespace, "attach", attach)
    monkeypatch.setattr(OnDevice, "event", Happened)
    yield made


class TestInHostMemory(EngineContract):
    page_tokens = PAGE
    page_bytes = PAGE_BYTES

    def start(self, path: Path, files: Files | None = None) -> FakeDeviceEngine:
        return FakeDeviceEngine(loop(path, files=files))


class TestOnTheSimulatedDevice(EngineContract):
    page_tokens = PAGE
    page_bytes = PAGE_BYTES

    @pytest.fixture(autouse=True)
    def _device(self, device: SimulatedDevice) -> None:
        pass

    def start(self, path: Path, files: Files | None = None) -> FakeDeviceEngine:
        return FakeDeviceEngine(loop(path, files=files, kind=OnDevice))


# -- loads -------------------------------------------------------------------------------------


def stored(engine: Loop, seed: int, pages: int) -> tuple[list[int], list[bytes]]:
    tokens, content = tokens_of(seed, pages), contents(seed, pages)
    assert FakeDeviceEngine(engine).put(tokens, content) == pages
    return tokens, content


def test_slots_that_the_radix_tree_shares_are_not_written(memory_path: Path, device: SimulatedDevice) -> None:
    engine = loop(memory_path / "store", kind=OnDevice)
    tokens, pages = stored(engine, 1, 6)
    engine.pool.kv_buffer.fill_(1.5)
    shared, req = 2 * PAGE + 5, engine.request([*tokens, 0])  # the tree ends within a page
    engine.rows[0, :shared] = mine = engine.pool.alloc(shared).clone()
    req.cur_kv_len = shared
    assert engine.load(req) == 6 * PAGE and req.shm_req.shm_cur_kv_len == 6 * PAGE
    assert (engine.pool.kv_buffer[:, mine.long()] == 1.5).all()
    assert [engine.page_of(req, n) for n in range(3, 6)] == pages[3:]
    rest = engine.pool.kv_buffer[:, engine.rows[0, shared : 3 * PAGE].long()].view(torch.int16)
    engine.pool.set_page(engine.rows[0, 2 * PAGE : 3 * PAGE], pages[2])
    assert torch.equal(rest, engine.pool.kv_buffer[:, engine.rows[0, shared : 3 * PAGE].long()].view(torch.int16))
    engine.close()


def test_a_load_that_loses_a_page_is_shorter_and_gives_slots_back(memory_path: Path) -> None:
    engine = loop(memory_path / "store")
    tokens, pages = stored(engine, 1, 20)
    engine.close()
    corrupt(memory_path / "store", pages[12])
    engine = loop(memory_path / "store")
    req = engine.request([*tokens, 0])
    assert engine.load(req) == 12 * PAGE
    assert [engine.page_of(req, n) for n in range(12)] == pages[:12]
    assert engine.pool.left == SLOTS - 12 * PAGE and req.shm_req.cpu_prompt_cache_len == 12 * PAGE
    engine.close()


@pytest.mark.parametrize("what", ["short", "logprobs", "no cache", "slave", "in the tree", "no slots"])
def test_what_is_not_worth_a_load_is_computed(memory_path: Path, what: str) -> None:
    engine = loop(memory_path / "store")
    tokens, _ = stored(engine, 1, 6)
    req = engine.request([*tokens, 0])
    if what == "short":
        req = engine.request([*tokens[: 2 * PAGE], 0])
    elif what == "logprobs":
        req.sampling_param.shm_param.prompt_logprobs = 3
    elif what == "no cache":
        req.sampling_param.disable_prompt_cache = True
    elif what == "in the tree":
        req.cur_kv_len = 5 * PAGE
    elif what == "no slots":
        engine.pool.alloc(SLOTS - 5 * PAGE)
    req.slave = what == "slave"
    left, before = engine.pool.left, req.cur_kv_len
    assert engine.load(req) == before and engine.pool.left == left
    engine.close()


def test_a_held_back_request_does_not_hold_back_others(memory_path: Path) -> None:
    engine = loop(memory_path / "store")
    tokens, _ = stored(engine, 1, 6)
    waits, goes = engine.request([*tokens, 0]), engine.request([1, 2, 3], row=1)
    engine.path.begin_loads([waits, goes])
    assert engine.path.ready([waits, goes]) == [goes] and engine.path.is_loading()
    engine.turn_until(lambda: engine.path.ready([waits]) == [waits])
    assert waits.cur_kv_len == 6 * PAGE and not engine.path.is_loading()
    engine.close()


def test_requests_of_one_turn_get_slots_of_their_own(memory_path: Path, device: SimulatedDevice) -> None:
    engine = loop(memory_path / "store", kind=OnDevice)
    prompts = [stored(engine, n, 6) for n in (1, 2, 3)]
    reqs = [engine.request([*tokens, 0], row=n) for n, (tokens, _) in enumerate(prompts)]
    engine.path.begin_loads(reqs)
    time.sleep(0.1)  # all of them are found, and take slots in the next turn
    engine.turn_until(lambda: engine.path.ready(reqs) == reqs)
    for req, (_, pages) in zip(reqs, prompts, strict=True):
        assert [engine.page_of(req, n) for n in range(req.cur_kv_len // PAGE)] == pages
    engine.close()


def test_an_aborted_request_gets_its_slots_back_only_when_nothing_writes_them(
    memory_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop(memory_path / "store", kind=OnDevice)
    tokens, _ = stored(engine, 1, 6)
    copying, go_on = threading.Event(), threading.Event()

    def launch() -> None:
        copying.set()
        assert go_on.wait(60)

    device.before_launch = launch
    left, req = engine.pool.left, engine.request([*tokens, 0])
    engine.path.begin_loads([req])
    engine.turn_until(copying.is_set)
    req.infer_aborted = True
    for _ in range(20):  # the loop goes on meanwhile
        begin = time.monotonic()
        engine.path.update(engine.saves)
        assert time.monotonic() - begin < 1
        assert engine.path.ready([req]) == [] and engine.pool.left == left - 6 * PAGE
    go_on.set()
    engine.turn_until(lambda: engine.path.ready([req]) == [req])
    assert engine.pool.left + req.cur_kv_len == left
    engine.close()


def test_a_load_that_waits_for_the_gpu_ends_when_its_request_is_aborted(
    memory_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop(memory_path / "store", kind=OnDevice)
    tokens, _ = stored(engine, 1, 6)
    pending = Pending()  # steps under way that use the slots: it never comes
    monkeypatch.setattr(OnDevice, "event", lambda: pending)
    engine.pool.kv_buffer.fill_(1.5)
    req = engine.request([*tokens, 0])
    engine.path.begin_loads([req])
    engine.turn_until(lambda: engine.pool.left < SLOTS)
    req.infer_aborted, begin = True, time.monotonic()
    engine.turn_until(lambda: engine.path.ready([req]) == [req])
    assert time.monotonic() - begin < 15, "it is stopped, and does not wait for its deadline of 30 seconds"
    assert req.cur_kv_len == 0 and engine.pool.left == SLOTS
    assert (engine.pool.kv_buffer == 1.5).all(), "slots in use were written"
    engine.close()


@pytest.mark.parametrize("found", [False, True])
def test_an_abort_before_slots_are_taken_takes_none(
    memory_path: Path, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop(memory_path / "store")
    tokens, _ = stored(engine, 1, 6)
    req = engine.request([*tokens, 0])
    engine.path.begin_loads([req])
    end = time.monotonic() + 60
    while found and engine.path._loading[req.req_id].restore.tokens != 6 * PAGE:
        assert time.monotonic() < end
        time.sleep(0.001)
    req.infer_aborted = True
    monkeypatch.setattr(engine.pool, "alloc", None)
    engine.turn_until(lambda: engine.path.ready([req]) == [req])
    assert req.cur_kv_len == 0 and engine.pool.left == SLOTS
    engine.close()


# -- saves -------------------------------------------------------------------------------------


def test_a_finished_request_keeps_its_slots_until_they_are_copied(
    memory_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loop(memory_path / "store", kind=OnDevice)
    pending = Pending()  # the step that writes the last slots
    monkeypatch.setattr(OnDevice, "event", lambda: pending)
    tokens, pages = tokens_of(1, 6), contents(1, 6)
    req = engine.request([*tokens, 0])
    engine.compute(req, [*pages[:5], contents(2, 1)[0]])
    task = engine.path.begin_save(req)
    engine.saves.append(task)
    for _ in range(5):
        engine.path.update(engine.saves)
    assert req.cpu_cache_task_status is req._CpuCacheTaskStatus.RUNNING
    engine.pool.set_page(engine.rows[0, 5 * PAGE : 6 * PAGE], pages[5])  # the step ends
    pending.happened.set()
    engine.turn_until(lambda: req.cpu_cache_task_status is req._CpuCacheTaskStatus.FINISHED)
    assert task is not None and task.save._saving is not None and task.save._saving.wait(60) is not None
    engine.release(req)
    monkeypatch.setattr(OnDevice, "event", Happened)
    assert FakeDeviceEngine(engine).get(tokens, 6) == pages
    engine.close()


def test_a_save_whose_step_never_ends_lets_its_request_go(
    memory_path: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = loop(memory_path / "store", kind=OnDevice, store_seconds=0.05)
    pending = Pending()
    monkeypatch.setattr(OnDevice, "event", lambda: pending)
    req = engine.request([*tokens_of(1, 6), 0])
    engine.compute(req, contents(1, 6))
    engine.save(req)
    assert "a prompt is not stored" in caplog.text
    engine.close()


def test_a_prompt_without_a_whole_page_is_not_stored(memory_path: Path) -> None:
    engine = loop(memory_path / "store")
    req = engine.request(tokens_of(1, 1)[:-1])
    req.cur_kv_len = PAGE
    assert engine.path.begin_save(req) is None
    assert req.cpu_cache_task_status is req._CpuCacheTaskStatus.FINISHED
    engine.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_takes_nothing_costs_no_request(memory_path: Path, code: int) -> None:
    files = FaultyFiles()
    engine = loop(memory_path / "store", files=files)
    files.arm(Fault(kind="pwritev", persistent=True, error=code))
    req = engine.request([*tokens_of(1, 6), 0])
    engine.compute(req, contents(1, 6))
    engine.save(req)
    files.arm()
    assert engine.load(engine.request([*tokens_of(1, 6), 0], row=1)) == 0
    engine.close()


# -- ranks -------------------------------------------------------------------------------------


def ranks_of(path: Path, count: int, heads: int = 2) -> list[Loop]:
    together, each = Together(count), {**SHAPE, "heads": max(1, heads // count)}
    return [loop(path, shape=each, rank=n, ranks=count, agree=together.of(n)) for n in range(count)]


def on_each(ranks: list[Loop], what: Callable[[Loop], Any]) -> list[Any]:
    found: list[Any] = [None] * len(ranks)

    def one(number: int) -> None:
        found[number] = what(ranks[number])

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_store_their_heads_and_restore_what_all_of_them_have(memory_path: Path, count: int) -> None:
    """Two KV heads on two ranks, and on four: then two ranks hold each head."""
    ranks, tokens = ranks_of(memory_path / "store", count), tokens_of(1, 6)

    def save(one: Loop) -> None:
        req = one.request([*tokens, 0])
        number = ranks.index(one) // max(1, count // 2)
        one.compute(req, contents(10 + number, 6, PAGE_BYTES // 2))
        one.save(req)
        one.release(req)

    on_each(ranks, save)

    def load(one: Loop) -> Any:
        one.pool.kv_buffer.fill_(1.5)
        req = one.request([*tokens, 0])
        return one.load(req), [one.page_of(req, n) for n in range(6)], one.rows[0, : 6 * PAGE].tolist()

    found = on_each(ranks, load)
    assert [tokens for tokens, _, _ in found] == [6 * PAGE] * count
    assert len({tuple(slots) for _, _, slots in found}) == 1, "ranks take the same slots"
    for number, (_, pages, _) in enumerate(found):
        assert pages == contents(10 + number // max(1, count // 2), 6, PAGE_BYTES // 2)
    on_each(ranks, lambda one: one.close())


def test_ranks_use_no_more_than_the_one_that_restored_least(memory_path: Path) -> None:
    ranks, tokens = ranks_of(memory_path / "store", 2), tokens_of(1, 20)
    pages = [contents(10 + n, 20, PAGE_BYTES // 2) for n in range(2)]

    def save(one: Loop) -> None:
        req = one.request([*tokens, 0])
        one.compute(req, pages[ranks.index(one)])
        one.save(req)
        one.close()

    on_each(ranks, save)
    corrupt(memory_path / "store", pages[1][12])
    ranks = ranks_of(memory_path / "store", 2)
    found = on_each(ranks, lambda one: one.load(one.request([*tokens, 0])))
    assert found == [12 * PAGE] * 2
    assert [one.pool.left for one in ranks] == [SLOTS - 12 * PAGE] * 2
    on_each(ranks, lambda one: one.close())


# -- starting ----------------------------------------------------------------------------------


def test_the_device_path_is_off_unless_it_is_asked_for(memory_path: Path) -> None:
    with environment({"path": str(memory_path / "store")}, server_of(model_folder(memory_path / "model"))):
        assert device_module.device_path(None, None, None) is None
    assert not (memory_path / "store").exists()


def test_a_pool_of_another_kind_is_refused(memory_path: Path) -> None:
    class PPLINT8KVMemoryManager(MemoryManager):
        pass

    backend = SimpleNamespace(model=SimpleNamespace(mem_manager=PPLINT8KVMemoryManager(256, **SHAPE)))
    given = {"path": str(memory_path / "store"), "device": True, "weights_id": "0123abcd"}
    server = server_of(model_folder(memory_path / "model"))
    with environment(given, server), pytest.raises(UnsupportedModelError, match="its pool is a PPLINT8KVMemoryManager"):
        device_module.device_path(backend, None, None)
    assert not (memory_path / "store").exists()


@pytest.mark.parametrize(
    ("server", "settings", "match"),
    [
        ({"enable_multimodal": True}, {}, "--disable_vision --disable_audio, or leave \"device\""),
        ({"enable_rl": True}, {}, "--enable_rl"),
        ({"cpu_cache_token_page_size": 100}, {}, "multiple of 16"),
        ({"run_mode": "prefill"}, {}, "--run_mode"),
        ({"nnodes": 2}, {}, "--nnodes"),
        ({"llm_kv_type": "int8kv"}, {}, "--llm_kv_type"),
        ({}, {"path": ""}, "no directory of the store"),
        ({}, {"device": 1}, "pass true or false"),
        ({}, {"warm_bytes": "much"}, "warm_bytes"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_a_store_is_made(
    memory_path: Path, server: Any, settings: Any, match: str
) -> None:
    arguments = server_of(model_folder(memory_path / "model"), **server)
    pool = MemoryManager(256, **SHAPE)
    given = {"path": str(memory_path / "store"), "device": True, "weights_id": "0123abcd", **settings}
    with environment(given, arguments), pytest.raises((ConfigError, UnsupportedModelError), match=match):
        found, its = settings_of(), Server()
        its.check('"device" in KVFS_LIGHTLLM')
        DevicePages.open(found, its, Shard(pool.kv_buffer, 0, 1))
    assert not (memory_path / "store").exists()


@pytest.mark.parametrize("change", [{"heads": 4}, {"layers": 2}, {"dim": 16}, {"dtype": torch.float32}])
def test_a_pool_that_is_no_share_of_the_model_is_refused(memory_path: Path, change: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="its pool holds"):
        loop(memory_path / "store", shape={**SHAPE, **change})
    assert not (memory_path / "store").exists()


def test_pages_are_those_of_the_patched_disk_worker(memory_path: Path) -> None:
    from tests.integrations.test_lightllm import patched

    engine = loop(memory_path / "store", weights_id="")
    tokens, pages = stored(engine, 1, 6)
    engine.close()
    worker = patched(memory_path / "store", memory_path / "model")
    assert worker.get(tokens, 6) == pages
    worker.close()
