"""Single token slots from the pools of peers, as a router that knows where each token is asks for them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvfs.errors import ConfigError
from kvfs.gpu.device import Event
from kvfs.gpu.gpu_io import GpuPools
from kvfs.gpu.lane import CommandBuffer, Lane
from kvfs.ranks.pull import Source
from kvfs.transfer.workers import Attached

PROGRAMS = 128
TOKENS_MAX = 1 << 20  # of one copy
WAITING_MAX = 64  # copies whose command buffers are kept; a further one is declined


class TokenCopies:
    """Enqueues copies of tokens. Use it under the lock of the lane, with the device entered."""

    def __init__(self, pools: GpuPools, lane: Lane) -> None:
        self._pools, self._lane = pools, lane
        self._sent: deque[tuple[Event, CommandBuffer]] = deque()

    def check(self) -> Attached:
        """The group that has the slots. ConfigError unless it is the only one, and a unit of it is one token."""
        attached = list(self._pools.attached.values())
        if len(attached) != 1 or attached[0].device.unit_tokens != 1 or attached[0].group.states == 1:
            raise ConfigError("copy_tokens is for engines with one group of token slots: pull pages with load")
        return attached[0]

    def enqueue(
        self, sources: Mapping[int, Source], ranks: Sequence[int], slots: Sequence[int], targets: Sequence[int]
    ) -> Event | None:
        """``sources``: by rank. None if too many copies are under way. ConfigError, CudaError."""
        from kvfs.kernels import token_copy

        a = self.check()
        pools, lane, name = self._pools, self._lane, a.group.name
        own = pools.shapes[a.number]
        peers = {rank: source.groups[name] for rank, source in sources.items()}
        for rank, peer in peers.items():
            if peer.shape.unit_tokens != 1 or token_copy.cells_of(peer.shape) != token_copy.cells_of(own):
                raise ConfigError(f"rank {rank} keeps the cells of a token otherwise: pull pages with load")
        units = {rank: peer.units for rank, peer in peers.items()}
        wrong = next((i for i, slot in enumerate(slots) if not 0 <= slot < units[ranks[i]]), None)
        if wrong is not None:
            raise ConfigError(f"source slot {slots[wrong]} of rank {ranks[wrong]}: it has {units[ranks[wrong]]}")
        self.reclaim()
        if len(self._sent) >= WAITING_MAX:
            return None
        addresses = {rank: peer.table.address for rank, peer in peers.items()}
        tiles = token_copy.cut(own, *(peer.shape for peer in peers.values()))
        work = token_copy.pack(
            pools.tables[a.number].address, own.layers, [addresses[rank] for rank in ranks], slots, targets
        )  # fmt: skip
        commands = lane.commands(len(work))
        try:
            at = commands.put(work)
            commands.send(lane.dma, at)
            with lane.dma.use():
                token_copy.copy(commands.work(at, commands.words(0, 0)).words, tiles, programs=PROGRAMS)
            event = lane.dma.record()
        except BaseException:
            lane.wait()
            lane.give_back(commands)
            raise
        self._sent.append((event, commands))
        return event

    def reclaim(self) -> None:
        """Give back the command buffers of copies that have ended."""
        while self._sent and self._sent[0][0].query():
            self._lane.give_back(self._sent.popleft()[1])


def checked_slots(values: Any, count: int, what: str) -> array[int]:
    """Slots or ranks as i64, not negative. ConfigError for what is none; ``count``: how many are expected, or -1."""
    try:
        found = array("q", values.tolist() if hasattr(values, "tolist") else values)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{what} must be a flat sequence of integers") from None
    if len(found) > TOKENS_MAX or count not in (-1, len(found)) or (found and min(found) < 0):
        raise ConfigError(f"{what}: pass one number for each token, 0 or more, of at most {TOKENS_MAX} tokens")
    return found
