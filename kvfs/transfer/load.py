"""A load to host memory: pages are read into slots, verified there, and only then copied to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvfs.lookup.incremental import Lookahead
from kvfs.lookup.prefix_match import GroupMatch, PrefixMatch
from kvfs.pages.chunk_set import bits_of, span
from kvfs.pages.host_copy import scatter
from kvfs.segments.open_segments import OpenSegment
from kvfs.transfer.control import TransferControl
from kvfs.transfer.outcome import TierAccounting, restored
from kvfs.transfer.staging import Lease, SlotState
from kvfs.transfer.units import UnitIds
from kvfs.transfer.workers import Attached, TransportContext, fail, wait_for
from kvfs.types import PageOutcome, TransferState


@dataclass
class Load:
    """A load in progress."""

    desk: TransportContext
    transfer: TransferControl
    match: PrefixMatch
    pages: list[tuple[Attached, list[int]]]
    units: Mapping[int, UnitIds]
    after: Any
    first_token: int
    came_from: TierAccounting
    possible: dict[str, int]  # chunks that may still be good, as bits, by group name
    layerwise: bool = False  # pages come whole here
    lookahead: Lookahead | None = None  # the match is made by the load, and ``pages`` are those that there may be

    def run(self) -> None:
        """On a read thread."""
        try:
            if self.lookahead is not None:
                self._finish_looking(self.lookahead)
            wait_for(self.transfer, self.after)
            self.transfer.enter(TransferState.LOADING)
            with self.desk.reader.held(self.match) as held:
                for attached, chunks in self.pages:
                    if self._load(attached, chunks, held):
                        self.transfer.layers_ready(attached.group.layers)
        except Exception as exc:
            fail(self.transfer, exc)
        finally:
            if self.lookahead is not None:
                self.lookahead.release()
            self.transfer.end()

    def _finish_looking(self, lookahead: Lookahead) -> None:
        """Find out what of ``pages`` there is."""
        match = self.match = lookahead.finish(go_on=not self.transfer.stopped and not self.desk.late(self.transfer))
        self.possible.update({g.name: span(g.first, g.count) for g in self.match.groups})
        found = []
        for a, chunks in self.pages:
            gm = self.match.group(a.group.name)
            found.append((a, [chunk for chunk in chunks if gm.first <= chunk < gm.first + gm.count]))
        self.pages = found
        names, came_from, first_token = {a.number: a.group.name for a, _ in found}, self.came_from, self.first_token
        self.transfer.offer(
            {a.number: bits_of(chunks) for a, chunks in found},
            lambda done: restored(match, names, done, came_from, first_token),
        )

    def _load(self, attached: Attached, chunks: list[int], held: dict[int, OpenSegment]) -> bool:
        """Load a group; whether all of its pages are there."""
        desk, transfer = self.desk, self.transfer
        gm = self.match.group(attached.group.name).for_part(attached.part, attached.page_bytes)
        rest, loaded = list(chunks), 0
        while rest and not transfer.stopped:
            limit = self.match.restorable(self.possible)
            rest = [chunk for chunk in rest if chunk < limit]
            if not rest or desk.late(transfer):
                break
            size = attached.page_bytes
            lease = desk.ring.acquire(min(desk.batch(size), len(rest)), transfer.deadline, page_bytes=size, least=1)
            if lease is None:
                transfer.note("ring")
                break
            batch, rest = rest[: len(lease)], rest[len(lease) :]
            try:
                if transfer.own(lease):
                    loaded += self._batch(attached, gm, batch, lease, held)
            finally:
                lease.release()
        self.possible[gm.name] &= ~bits_of(rest)
        return loaded == len(chunks)

    def _batch(
        self, attached: Attached, gm: GroupMatch, chunks: list[int], lease: Lease, held: dict[int, OpenSegment]
    ) -> int:
        """Read into the slots and verify, then copy what is good; how many pages were."""
        good = 0
        with self.transfer.step(engine=False) as allowed:
            if not allowed:
                return 0
            for first, memory in lease.runs(attached.page_bytes):
                good |= self._read(
                    attached, gm, chunks[first : first + len(memory) // attached.page_bytes], memory, held
                )
            lease.move(SlotState.FULL)
        with self.transfer.step() as allowed:
            if not allowed:
                return 0
            lease.move(SlotState.DRAINING)
            for page, chunk in zip(lease.views(), chunks, strict=True):
                if good >> chunk & 1:
                    scatter(
                        page, attached.group, attached.part, attached.device, self.units[attached.number], chunk,
                        first_token=self.first_token,
                    )  # fmt: skip
            bad = bits_of(chunks) & ~good
            if bad:
                self.transfer.note("unreadable")
                self.possible[gm.name] &= ~bad
            self.transfer.settle(attached.number, good, PageOutcome.LOADED)
            self.transfer.settle(attached.number, bad, PageOutcome.UNREADABLE)
        return good.bit_count()

    def _read(
        self, attached: Attached, gm: GroupMatch, chunks: list[int], memory: memoryview, held: dict[int, OpenSegment]
    ) -> int:
        """Read pages one behind the other; neighbours in the prompt in one call. The good ones, as bits."""
        good, first, size = 0, 0, attached.page_bytes
        for i in range(1, len(chunks) + 1):
            if i < len(chunks) and chunks[i] == chunks[i - 1] + 1:
                continue
            run = gm.cut(chunks[first], i - first)
            bits, tiers = self.desk.reader.load_run(
                self.match, run, attached.group, memory[first * size : i * size], held
            )
            good |= bits
            for tier, read in tiers.items():
                self.came_from.note(attached.number, read, tier)
            first = i
        return good
