"""`await transfer`: the result in a coroutine, while the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs.types import TransferState
from tests.stores import tokens_of

LAYOUT = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=4, dtype="float16", page_tokens=16)
CHUNKS = 8


@pytest.fixture
def attached(store_path: Path) -> Iterator[tuple[kvfs.Namespace, Any, Any]]:
    with kvfs.open(store_path, capacity="64MiB") as store:
        ns = store.namespace("alpha", LAYOUT, "9213176")
        kv = np.random.default_rng(1).random((2, CHUNKS, 2, 16, 2, 4)).astype(np.float16)
        described = kvfs.describe(LAYOUT.groups[0], kv, "layer,block,kv,token,head,dim")
        with ns.attach(described, ring_bytes="1MiB") as io:
            yield ns, io, kv


def test_a_coroutine_gets_the_result_while_others_run(attached: tuple[kvfs.Namespace, Any, Any]) -> None:
    ns, io, kv = attached
    tokens, before = tokens_of(1, CHUNKS), attached[2].copy()

    async def main() -> list[Any]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        saved = await io.save(ns.plan_save(tokens), list(range(CHUNKS)))
        kv[:] = 0
        with ns.match(tokens) as match:
            load = io.load(match, list(range(CHUNKS)))
            loaded = await load
            again, both = await load, await asyncio.gather(_result(load), _result(load))
        ticker.cancel()
        return [saved, loaded, again, *both, ticks]

    saved, loaded, *others, ticks = asyncio.run(main())
    assert saved.pages == loaded.pages == CHUNKS and loaded.tokens == 16 * CHUNKS and (kv == before).all()
    assert all(other is loaded for other in others) and ticks > 0


async def _result(transfer: kvfs.Transfer) -> Any:
    return await transfer


def test_a_task_that_is_cancelled_leaves_the_transfer(attached: tuple[kvfs.Namespace, Any, Any]) -> None:
    ns, io, _ = attached
    released = threading.Event()

    class After:
        def synchronize(self) -> None:
            assert released.wait(30)

    async def main() -> kvfs.Transfer:
        transfer = io.save(ns.plan_save(tokens_of(1, CHUNKS)), list(range(CHUNKS)), after=After())
        task = asyncio.create_task(_result(transfer))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return transfer

    transfer = asyncio.run(main())  # and the loop is closed
    released.set()
    result = transfer.wait(30)
    assert result is not None and result.pages == CHUNKS and transfer.state is TransferState.DONE
