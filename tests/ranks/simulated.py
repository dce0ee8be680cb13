"""One rank of a host, with KV memory that its peers can open."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvfs
from kvfs.gpu.gpu_io import GpuIO
from kvfs.pages.layout import PageLayout
from kvfs.ranks import RankGroup
from kvfs.transfer.handle import Transfer
from kvfs.types import TransferResult
from tests.gpu.simulated import Happened, SimulatedDevice

SECONDS = 30.0  # of waits that end at once unless something is wrong
PAGE, BLOCK = 32, 16
LAYOUT = PageLayout.kv(layers=4, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=PAGE)
ORDER = "layer,block,token,head,2*dim"
NOW = Happened()


def prompt(chunks: int, first: int = 0) -> list[int]:
    return list(range(first, first + chunks * PAGE))


class Rank:
    """A rank of ``ranks``, its engine's memory filled with random bytes or poison."""

    def __init__(
        self, ns: kvfs.Namespace, rank: int, ranks: int, folder: Path, *, seed: int | None = None, units: int = 32,
        block: int = BLOCK, device: SimulatedDevice | None = None, shared: bool = True, **changes: Any,
    ) -> None:  # fmt: skip
        self.ns, self.rank, self.block, self.units = ns, rank, block, units
        self.device = device or SimulatedDevice()
        shape = (4, units, block, 2, 16)
        nbytes = 2 * int(np.prod(shape))
        path = folder / f"{uuid.uuid4().hex[:12]}.pool"
        raw = self.device.share(str(path), nbytes) if shared else np.zeros(nbytes, dtype="uint8")
        self.memory = raw.view("uint16").reshape(shape)
        self.memory[...] = 0xA5A5
        if seed is not None:
            self.memory[...] = np.random.default_rng(seed).integers(0, 65536, shape, dtype="uint16")
        order = ORDER if block > 1 else "layer,slot,head,2*dim"
        tensor = self.memory if block > 1 else self.memory.reshape(4, units, 2, 16)
        self.kv = kvfs.describe(LAYOUT.groups[0], tensor, order)
        self.io = GpuIO(
            self.device, ns._c, ns._appender, ns._reader, ns._matcher, ns.identity, ns._retention, [self.kv],
            ring_bytes="1MiB", threads=1, dirty_bytes=None, queue_max=16, scratch_bytes="1MiB",
            registered_bytes="64MiB",
        )  # fmt: skip
        settings = {"directory": str(folder), **changes}
        self.group = RankGroup(self.io, rank, ranks, **settings)

    def pages(self, tokens: Sequence[int]) -> kvfs.PromptPages:
        pages = self.ns.prompt(tokens)
        pages.look()
        return pages

    def publish(self, tokens: Sequence[int], units: Sequence[int], **changes: Any) -> None:
        """Publish, and wait until peers can find it."""
        before = self.counters().get("pages_published", 0)
        pages = self.ns.prompt(tokens)
        assert self.group.publish(list(pages.hashes), units, NOW, **changes)
        self.group._publications.put(lambda: None)
        wait_until(lambda: not self.group._publications.waiting)
        wait_until(lambda: self.counters().get("pages_published", 0) > before)

    def counters(self) -> dict[str, int]:
        return self.ns._c.counters.snapshot()

    def load(self, tokens: Sequence[int], units: Sequence[int], **changes: Any) -> TransferResult:
        plan = self.group.longest(self.pages(tokens))
        result = self.begin(plan, units, **changes).wait(SECONDS)
        assert result is not None
        return result

    def begin(self, plan: Any, units: Sequence[int], **changes: Any) -> Transfer:
        return self.group.load(plan, units[: plan.chunks * max(1, PAGE // self.block)], NOW, **changes)

    def bytes(self, units: Sequence[int]) -> bytes:
        return self.memory[:, list(units)].tobytes()

    def tokens(self, units: Sequence[int], count: int) -> bytes:
        """The cells of a prompt's first ``count`` tokens, in the order of the tokens."""
        flat = self.memory[:, list(units)].reshape(4, -1, 2, 16)
        return flat[:, :count].tobytes()

    def close(self) -> None:
        self.group.close()
        self.io.close()


def wait_until(condition: Any) -> None:
    import time

    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


def closing(*ranks: Rank) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for rank in ranks:
        stack.callback(rank.close)
    return stack
