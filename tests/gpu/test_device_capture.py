"""Graphs that an engine captures: calls of the driver by kvfs must not end a capture."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.gpu.device import Gpu
from kvfs.kernels import driver

GLOBAL, RELAXED = 0, 2


class Driver:
    """Keeps the mode of each thread, as CUDA does."""

    def __init__(self) -> None:
        self.code = 0
        self._modes = threading.local()

    @property
    def mode(self) -> int:
        return getattr(self._modes, "mode", GLOBAL)

    def capture_mode(self, pointer: Any) -> int:
        if not self.code:
            value = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))
            value[0], self._modes.mode = self.mode, value[0]
        return self.code

    def check(self, code: int, what: str) -> None:
        if code:
            raise driver.CudaError(what)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "_driver", lambda: made)
    return made


@pytest.fixture
def gpu(fake: Driver) -> Gpu:
    asked = SimpleNamespace(query=lambda: made.asked.append(fake.mode))
    made: Any = object.__new__(Gpu)
    made.index, made.asked, made._entered = 0, [], threading.local()
    made._torch = SimpleNamespace(cuda=SimpleNamespace(
        set_device=lambda index: None, current_stream=lambda: asked, device=lambda index: contextlib.nullcontext(),
    ))  # fmt: skip
    return made  # type: ignore[no-any-return]


def test_a_thread_of_kvfs_relaxes_its_mode_permanently(gpu: Gpu, fake: Driver) -> None:
    modes: list[int] = []

    def run() -> None:
        for _ in range(2):
            gpu.enter()
            modes.append(fake.mode)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert modes == [RELAXED, RELAXED] and fake.mode == GLOBAL
    assert gpu.asked == [RELAXED], "nothing is asked before"  # type: ignore[attr-defined]


def test_a_thread_of_the_engine_gets_its_mode_back(gpu: Gpu, fake: Driver) -> None:
    with pytest.raises(ValueError, match="any error"), gpu.current():
        assert fake.mode == RELAXED
        with gpu.current():
            pass
        assert fake.mode == RELAXED
        raise ValueError("any error")
    assert fake.mode == GLOBAL and gpu.asked == [RELAXED, RELAXED]  # type: ignore[attr-defined]
    fake.code = 1
    with pytest.raises(driver.CudaError), gpu.current():
        pass
