"""Restores: a prompt is looked up while its first pages are on their way."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs import TransferState, gpurestore
from kvfs.errors import ConfigError
from kvfs.lookahead import Lookahead
from tests.kernels.test_gpu_late import WAYS
from tests.kernels.test_gpu_transport import LATE, NOW, PAGE, SECONDS, Engine, attach, prompt, saved

CHUNKS = 12


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpurestore, "WINDOW_PAGES", 2)


def restored(io: Any, tokens: list[int], units: Any, **how: Any) -> kvfs.TransferResult:
    result = io.restore(tokens, units, NOW, LATE, **how).wait(SECONDS)
    assert result is not None
    return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stored", [0, 1, 2, 5, 6, 7, CHUNKS])
def test_what_is_stored_of_a_prompt_is_restored(ns: kvfs.Namespace, way: str, stored: int) -> None:
    source, target = saved(ns, stored) if stored else Engine(), Engine()
    with attach(ns, target.kv, **WAYS[way]) as io:
        result = restored(io, prompt(CHUNKS), range(2 * CHUNKS))
        assert (result.tokens, result.pages, result.declined, result.reason) == (stored * PAGE, stored, 0, "")
        assert target.tokens(range(2 * stored)) == source.tokens(range(2 * stored))
        assert (target.memory[:, 2 * stored :] == 0xA5A5).all()
        assert io.ring.free == io.ring.slots
