"""Single token slots from the pools of peers, as a router that knows where each token is asks for them."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from kvfs.errors import ConfigError
from kvfs.gpu.device import Event
from kvfs.gpu.gpu_io import GpuPools
from kvfs.gpu.lane import CommandBuffer, Lane
from kvfs.kernels.driver import CudaError
from kvfs.ranks.pull import LEASE_SECONDS, POLL_SECONDS, Source
from kvfs.ranks.shared_files import PeerTable
from kvfs.transfer.workers import Attached

PROGRAMS = 128
TOKENS_MAX = 1 << 20  # of one copy
WAITING_MAX = 64  # copies whose command buffers are kept; a further one is declined


#: Between two looks at a copy that no caller waits for: a source that asks for the lease waits that much longer.
LOOK_SECONDS = 1e-3


class _Leased(NamedTuple):
    """Slots of one rank, under a lease."""

    table: PeerTable
    lease: tuple[int, int]
    places: Sequence[int]  # of these tokens in the call
    slots: Sequence[int]
    generations: Sequence[int]  # of the slots, behind the lease and before the copies

    def lost(self) -> list[int]:
        """Places of tokens that do not count, once the copies have ended."""
        if not self.table.alive():
            return list(self.places)
        now = self.table.generations(self.slots)
        if now == self.generations:
            return []
        return [i for i, new, old in zip(self.places, now, self.generations, strict=True) if new != old]


class TokenCopy:
    """Tokens on their way into slots of this rank, and the leases on where they come from. Any thread may use it.

    ``event``: happens when the copies have ended. A stream of the engine may wait for it.
    """

    def __init__(
        self, pools: GpuPools, lane: Lane, commands: CommandBuffer, tokens: int, leased: Sequence[_Leased], event: Event
    ) -> None:  # fmt: skip
        self.event = event
        self._pools, self._lane, self._commands = pools, lane, commands
        self._leased, self._tokens = leased, tokens
        self._lock = threading.Lock()
        self._arrived: bytes | None = None

    def arrived(self, timeout: float = 0.0) -> bytes | None:
        """Wait for the end, at most ``timeout`` seconds. None: not yet. Else a byte for each token: 1 if it counts.

        A token counts if its rank was alive, and had not retracted the slot, when the copies had ended. The slots of
        the others here have been written to all the same.
        """
        end = time.monotonic() + timeout
        with self._pools.device.current():
            while self._arrived is None and not self.look():
                if time.monotonic() >= end:
                    return None
                time.sleep(POLL_SECONDS)
        return self._arrived

    def look(self) -> bool:
        """End the leases if the copies have ended; whether they have. With the device entered."""
        with self._lock:
            if self._arrived is not None:
                return True
            try:
                if not self.event.query():
                    return False
                lost = [i for one in self._leased for i in one.lost()]
            except CudaError:  # the GPU has failed: it is not known what has been copied
                lost = list(range(self._tokens))
            arrived = bytearray(b"\1") * self._tokens
            for i in lost:
                arrived[i] = 0
            self._pools.counters.add("tokens_copied", self._tokens - len(lost))
            self._pools.counters.add("tokens_retracted", len(lost))
            _end(self._leased)
            self._lane.give_back(self._commands)
            self._arrived = bytes(arrived)
            return True

    def watch(self) -> None:
        """On the thread of pulls: end the leases when the copies have ended, or leave them to their deadline."""
        self._pools.device.enter()
        end = time.monotonic() + LEASE_SECONDS
        while not self.look() and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)


def _by_rank(ranks: Sequence[int], slots: Sequence[int]) -> dict[int, tuple[Sequence[int], Sequence[int]]]:
    """By rank: the places of its tokens in the call, and their slots."""
    different = set(ranks)
    if len(different) == 1:
        return {ranks[0]: (range(len(ranks)), slots)}
    found: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
    each = bytes(list(ranks))  # less than RANKS_MAX
    for rank in different:
        of_it = each.translate(bytes(one == rank for one in range(256)))
        found[rank] = list(compress(range(len(ranks)), of_it)), list(compress(slots, of_it))
    return found


def _lease(
    sources: Mapping[int, Source], parts: Mapping[int, tuple[Sequence[int], Sequence[int]]]
) -> Sequence[_Leased] | None:
    """A lease on the slots of each rank; None, and none of them, where one cannot be had."""
    leased = list[_Leased]()
    for rank, (places, slots) in parts.items():
        table, mine = sources[rank].table, array("I", slots)
        lease = table.lease_slots(mine, LEASE_SECONDS)
        if lease is None:
            _end(leased)
            return None
        leased.append(_Leased(table, lease, places, mine, table.generations(mine)))
    return leased


def _end(leased: Sequence[_Leased]) -> None:
    for one in leased:
        one.table.end_lease(one.lease)


class TokenCopies:
    """Enqueues copies of tokens. Use it under the lock of the lane, with the device entered."""

    def __init__(self, pools: GpuPools, lane: Lane) -> None:
        self._pools, self._lane = pools, lane
        self._sent: deque[TokenCopy] = deque()

    def check(self) -> Attached:
        """The group that has the slots. ConfigError unless it is the only one, and a unit of it is one token."""
        attached = list(self._pools.attached.values())
        if not token_slots(attached):
            raise ConfigError("copy_tokens is for engines with one group of token slots: pull pages with load")
        return attached[0]

    def enqueue(
        self, sources: Mapping[int, Source], ranks: Sequence[int], slots: Sequence[int], targets: Sequence[int]
    ) -> TokenCopy | None:
        """``sources``: by rank. None if too many copies are under way, or leases taken. ConfigError, CudaError."""
        from kvfs.kernels import token_copy

        a = self.check()
        pools, name = self._pools, a.group.name
        own = pools.shapes[a.number]
        peers = {rank: source.groups[name] for rank, source in sources.items()}
        for rank, peer in peers.items():
            if not sources[rank].table.token_slots or token_copy.cells_of(peer.shape) != token_copy.cells_of(own):
                raise ConfigError(f"rank {rank} keeps the cells of a token otherwise: pull pages with load")
        parts = _by_rank(ranks, slots)
        for rank, (_, mine) in parts.items():
            if max(mine) >= peers[rank].units:
                raise ConfigError(f"source slot {max(mine)} of rank {rank}: it has {peers[rank].units}")
        self.reclaim()
        if len(self._sent) >= WAITING_MAX:
            return None
        leased = _lease(sources, parts)
        if leased is None:
            self._pools.counters.add("pulls_without_lease")
            return None
        try:
            addresses = {rank: peer.table.address for rank, peer in peers.items()}
            tiles = token_copy.cut(own, *(peer.shape for peer in peers.values()))
            work = token_copy.pack(
                pools.tables[a.number].address, own.layers, [addresses[rank] for rank in ranks], slots, targets
            )  # fmt: skip
            copy = self._launch(work, tiles, len(targets), leased)
        except BaseException:
            _end(leased)
            raise
        self._sent.append(copy)
        return copy

    def _launch(self, work: bytes, tiles: Any, tokens: int, leased: Sequence[_Leased]) -> TokenCopy:
        from kvfs.kernels import token_copy

        lane = self._lane
        commands = lane.commands(len(work))
        try:
            at = commands.put(work)
            commands.send(lane.dma, at)
            with lane.dma.use():
                token_copy.copy(commands.work(at, commands.words(0, 0)).words, tiles, programs=PROGRAMS)
            return TokenCopy(self._pools, lane, commands, tokens, leased, lane.dma.record())
        except BaseException:
            lane.wait()
            lane.give_back(commands)
            raise

    def reclaim(self) -> None:
        """Forget copies that have ended."""
        while self._sent and self._sent[0].look():
            self._sent.popleft()


def token_slots(attached: Sequence[Attached]) -> bool:
    """Whether units are single tokens of one group."""
    return len(attached) == 1 and attached[0].device.unit_tokens == 1 and attached[0].group.states > 1


def checked_slots(values: Any, count: int, what: str) -> array[int]:
    """Slots or ranks as i64, not negative. ConfigError for what is none; ``count``: how many are expected, or -1."""
    try:
        found = array("q", values.tolist() if hasattr(values, "tolist") else values)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{what} must be a flat sequence of integers") from None
    if len(found) > TOKENS_MAX or count not in (-1, len(found)) or (found and min(found) < 0):
        raise ConfigError(f"{what}: pass one number for each token, 0 or more, of at most {TOKENS_MAX} tokens")
    return found
