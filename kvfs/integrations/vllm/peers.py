"""Pages from the GPUs of other DP ranks of the host: ``"dp_pulls": true``.

The scheduler asks the tables of the ranks, which are in shared memory, and names the blocks that its step will write
to. The worker publishes pages, takes them back before their blocks are written, and pulls those of its peers. This
module knows nothing of vLLM's classes.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfs.lookup.prompt_pages import PromptPages
from kvfs.pages.layout import PageLayout, Part
from kvfs.ranks import RankGroup, RankPlan, RankTables
from kvfs.transfer.handle import Transfer

log = logging.getLogger("vllm.kvfs")
GPUS_MAX = 16  # of a host: bounds the ranks where vLLM does not tell how many there are
CHECK_SECONDS = 1.0  # between two looks at which ranks have ended


@dataclass(frozen=True)
class PeerPlace:
    """Where one worker publishes. It tells its scheduler, which looks at the same place of the other ranks."""

    worker: int  # its rank among the TP and PP ranks of its engine
    name: str  # of the group
    rank: int
    ranks: int
    parts: Mapping[str, Part]


def place_of(parallel: Any, parts: Mapping[str, Part]) -> PeerPlace:
    """``parallel``: vLLM's ParallelConfig.

    Of models without experts, vLLM makes each DP rank believe that it is the only one: its index alone is left.
    """
    local, worker = int(parallel.data_parallel_size_local), int(parallel.rank)
    ranks = max(local, GPUS_MAX // max(1, int(parallel.world_size)))
    name = f"vllm {parallel.data_parallel_master_ip} {parallel.data_parallel_master_port} {worker}"
    return PeerPlace(worker, name, int(parallel.data_parallel_index) % ranks, ranks, parts)


class Reused(NamedTuple):
    """What a step of the engine writes to. Picklable."""

    blocks: tuple[int, ...]
    everything: bool = False  # no page that was published is offered any more


class ReusedBlocks:
    """Collects the blocks that the next step writes to, while the scheduler plans it. Blocks are of all cache groups
    together: groups share one pool, so a number that one of them gets is taken from all.

    Used by the scheduler's thread.
    """

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}
        self._admitted: list[tuple[Any, int, Sequence[Sequence[int]]]] = []
        self._everything = False

    def asked(self, req_id: str, computed: int) -> None:
        """The engine's own cache has ``computed`` tokens of a request that waits."""
        self._asked[req_id] = computed

    def admitted(self, request: Any, blocks: Sequence[Sequence[int]]) -> None:
        """A request got its ``blocks``, by cache group. It fills those behind what the engine's own cache has."""
        known = self._asked.pop(request.request_id, 1 << 62)
        self._admitted.append((request, known, blocks))

    def forget_all(self) -> None:
        """The engine's cache was reset."""
        self._everything = True

    def take(self, output: Any, block_tokens: Mapping[int, int]) -> Reused | None:
        """Of the step ``output``, which is planned; None: nothing. ``block_tokens``: by cache group of the engine."""
        ids = set[int](output.new_block_ids_to_zero or ())
        ids.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
        for request, known, blocks in self._admitted:
            # a load may have been counted, or the hit of the engine's own cache dropped since it was asked
            computed = min(known, request.num_computed_tokens)
            for group, mine in enumerate(blocks):
                ids.update(mine[computed // block_tokens[group] if group in block_tokens else 0 :])
        cached = output.scheduled_cached_reqs
        for req_id, grown in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if grown is not None and req_id not in cached.resumed_req_ids:  # those were admitted in this step
                ids.update(block for mine in grown for block in mine)
        everything, self._everything = self._everything, False
        self._asked.clear()
        self._admitted.clear()
        return Reused(tuple(sorted(ids)), everything) if ids or everything else None


class PeerLookups:
    """What the GPUs of the other ranks hold, for the scheduler: a page counts if peers of all of its workers have it.

    Takes no lock that a peer holds, and touches no disk and no GPU.
    """

    def __init__(self, namespace: bytes, layout: PageLayout, places: Sequence[PeerPlace]) -> None:
        """ConfigError without the native library."""
        self._workers = [(p, RankTables(namespace, layout, p.parts, p.ranks, name=p.name)) for p in places]
        self._size = layout.page_tokens
        self._check_at = 0.0

    def held(self, pages: PromptPages) -> dict[str, int]:
        """By group the chunks, as bits."""
        now = time.monotonic()
        found: dict[str, int] = {}
        for place, tables in self._workers:
            if now >= self._check_at:
                tables.check()
            mine = tables.held(pages, rank=place.rank, own=False)
            # a worker of a pipeline holds some of the groups
            found.update({name: found.get(name, -1) & bits for name, bits in mine.items()})
        if now >= self._check_at:
            self._check_at = now + CHECK_SECONDS
        return found

    def plans(self, pages: PromptPages, first: int, end: int) -> dict[int, RankPlan]:
        """By worker: where the chunks from ``first`` to ``end`` come from. Empty if all come from the store.

        A plan is shorter if a peer has taken pages back since ``held``. Close the plans.
        """
        leave = pages.tokens - end * self._size
        plans = {
            place.worker: tables.longest(pages, first=first, leave=leave, rank=place.rank, own=False)
            for place, tables in self._workers
        }
        if any(plan.peers or plan.chunks < end for plan in plans.values()):
            return plans
        for plan in plans.values():
            plan.close()
        return {}

    def close(self) -> None:
        for _, tables in self._workers:
            tables.close()


class PeerCopies:
    """The worker's part: publishes, takes back, pulls. Its calls never wait; used by one thread of the worker."""

    def __init__(
        self, group: RankGroup, place: PeerPlace, units: Mapping[str, int], per_block: Mapping[str, int]
    ) -> None:
        """``units``: how many each group has; ``per_block``: how many of them make a block of the engine."""
        self._group, self.place = group, place
        self._units, self._per_block = units, per_block

    def publish(self, hashes: Sequence[bytes], units: Mapping[str, Sequence[int]], first: int, after: Any) -> None:
        """Offer the chunks from ``first`` on to the other ranks, once ``after`` has happened."""
        if self._group.offers and first < len(hashes):
            self._group.publish(hashes, units, after, first=first)

    def retract(self, reused: Reused) -> None:
        """Before the engine writes to these blocks. It comes first: a pull that reads one of them ends shorter."""
        if not self._group.offers:
            return
        units: dict[str, Sequence[int]] = {}
        for name, count in self._units.items():
            per = self._per_block[name]
            if reused.everything:
                units[name] = range(count)
            else:
                blocks = [block for block in reused.blocks if (block + 1) * per <= count]
                units[name] = array("q", [block * per + i for block in blocks for i in range(per)])
        self._group.retract(units)

    def load(
        self, plan: RankPlan, units: Mapping[str, Sequence[int]], after: Any, deadline: float, on_done: Any
    ) -> Transfer:
        return self._group.load(plan, units, after, deadline, on_done=on_done)

    def close(self) -> None:
        self._group.close()


def join(io: Any, parallel: Any, per_block: Mapping[str, int], units: Mapping[str, int]) -> PeerCopies | None:
    """Make this worker one of the ranks; None, and a line in the log, if it cannot be one."""
    place = place_of(parallel, io.parts)
    try:
        group = RankGroup(io, place.rank, place.ranks, name=place.name)
    except Exception as exc:  # a device without memory, a driver that refuses: the engine goes on with the store
        log.warning("kvfs: dp_pulls is off, pages come from the store: %s", exc)
        return None
    return PeerCopies(group, place, units, per_block)


def stored_hashes(joined: bytes, nbytes: int = 32) -> list[bytes]:
    """Chunk hashes that are one behind the other."""
    return [joined[i : i + nbytes] for i in range(0, len(joined), nbytes)]
