"""A load to host memory: pages are read into slots, verified there, and only then copied to the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from kvfs.lookup.incremental import Lookahead
from kvfs.lookup.prefix_match import GroupMatch, PrefixMatch
from kvfs.pages.chunk_set import bits_of, span
from kvfs.pages.host_copy import scatter_pages
from kvfs.segments.open_segments import OpenSegment
from kvfs.transfer.control import TransferControl
from kvfs.transfer.outcome import TierAccounting, restored
from kvfs.transfer.staging import Lease, SlotState
from kvfs.transfer.units import UnitIds
from kvfs.transfer.workers import Attached, TransportContext, fail, wait_for
from kvfs.types import PageOutcome, Tier, TransferState

#: The chunks of each group.
Pages: TypeAlias = "Sequence[tuple[Attached, list[int]]]"


class BegunLoad(Protocol):
    """What a transport has begun of a load before there was a transfer."""

    def drop(self) -> None:
        """Undo it, unless the load has taken it. May be called again."""


@dataclass(frozen=True)
class LoadRequest:
    """What a load is to do, for the host transport and for the GPU transport.

    With ``lookahead`` the prompt is still to be looked up: ``match`` is empty, and ``pages`` are those that may exist.
    """

    context: TransportContext
    transfer: TransferControl
    match: PrefixMatch
    pages: Pages
    units: Mapping[int, UnitIds]  # by group number
    after: Any
    first_token: int
    tiers: TierAccounting
    layerwise: bool = False  # ignored by the host transport: pages come whole
    lookahead: Lookahead | None = None
    begun: BegunLoad | None = None
    gentle: bool = False  # likewise


def finish_lookup(request: LoadRequest) -> LoadRequest:
    """The request with the match that its lookahead finds, and the pages of that; the transfer is told of them."""
    lookahead, transfer = request.lookahead, request.transfer
    assert lookahead is not None
    match = lookahead.finish(go_on=not transfer.stopped and not request.context.late(transfer))
    pages = []
    for a, chunks in request.pages:
        gm = match.group(a.group.name)
        pages.append((a, [chunk for chunk in chunks if gm.first <= chunk < gm.first + gm.count]))
    names, tiers, first_token = {a.number: a.group.name for a, _ in pages}, request.tiers, request.first_token
    transfer.offer(
        {a.number: bits_of(chunks) for a, chunks in pages},
        lambda done: restored(match, names, done, tiers, first_token),
    )
    return replace(request, match=match, pages=pages)


class LoadJob(Protocol):
    """A load that a transport has accepted."""

    def run(self) -> None:
        """On a thread of the transport: all of it, or all that has to be done before its end."""

    def run_now(self) -> bool:
        """The same in the caller's thread, if nothing has to be waited for; False: nothing was done."""


class HostLoad:
    """A load in progress."""

    def __init__(self, request: LoadRequest) -> None:
        self._request = request
        self._context, self._transfer = request.context, request.transfer
        self._possible: dict[str, int] = {}  # chunks that may still be good, as bits, by group name

    def run_now(self) -> bool:
        return False

    def run(self) -> None:
        """On a read thread."""
        transfer, lookahead = self._transfer, self._request.lookahead
        try:
            if lookahead is not None:
                self._request = finish_lookup(self._request)
            match = self._request.match
            self._possible = {g.name: span(g.first, g.count) for g in match.groups}
            wait_for(transfer, self._request.after)
            transfer.enter(TransferState.LOADING)
            with self._context.reader.open_segments(match) as held:
                for attached, chunks in self._request.pages:
                    if self._load(attached, chunks, held):
                        transfer.layers_ready(attached.group.layers)
        except Exception as exc:
            fail(transfer, exc)
        finally:
            if lookahead is not None:
                lookahead.release()
            transfer.end()

    def _load(self, attached: Attached, chunks: list[int], held: Mapping[int, OpenSegment]) -> bool:
        """Load a group; whether all of its pages were loaded."""
        context, transfer, match = self._context, self._transfer, self._request.match
        gm = match.group(attached.group.name).for_part(attached.part, attached.page_bytes)
        rest, loaded = list(chunks), 0
        while rest and not transfer.stopped:
            limit = match.chunks if match.keyed else match.restorable(self._possible)
            rest = [chunk for chunk in rest if chunk < limit]
            if not rest or context.late(transfer):
                break
            size = attached.page_bytes
            transfer.late_for = "ring"
            lease = context.ring.acquire(
                min(context.batch(size), len(rest)), transfer.deadline, page_bytes=size, least=1
            )
            transfer.late_for = "deadline"
            if lease is None:
                transfer.note("ring")
                break
            batch, rest = rest[: len(lease)], rest[len(lease) :]
            try:  # the transfer does not own the lease: it may end while a disk hangs, and the read writes to the slots
                loaded += self._load_batch(attached, gm, batch, lease, held)
            finally:
                lease.release()
        self._possible[gm.name] &= ~bits_of(rest)
        return loaded == len(chunks)

    def _load_batch(
        self, attached: Attached, gm: GroupMatch, chunks: list[int], lease: Lease, held: Mapping[int, OpenSegment]
    ) -> int:  # fmt: skip
        """Read into the slots and verify, then copy the pages that are good; how many were."""
        transfer, good, read = self._transfer, 0, list[tuple[Tier, int]]()
        self._context.reading.add(transfer)
        try:
            for first, memory in lease.runs(attached.page_bytes):
                there = chunks[first : first + len(memory) // attached.page_bytes]
                good |= self._read(gm, attached, there, memory, held, read)
        finally:
            self._context.reading.discard(transfer)
        lease.move(SlotState.FULL)
        with transfer.step() as allowed:
            if not allowed:  # it has ended, perhaps while the read was waiting for the disk
                return 0
            lease.move(SlotState.DRAINING)
            for tier, those in read:
                self._request.tiers.note(attached.number, those, tier)
            units = self._request.units[attached.number]
            fine = [(page, chunk) for page, chunk in zip(lease.views(), chunks, strict=True) if good >> chunk & 1]
            scatter_pages(
                [page for page, _ in fine], attached.group, attached.part, attached.device, units,
                [chunk for _, chunk in fine], first_token=self._request.first_token,
            )  # fmt: skip
            bad = bits_of(chunks) & ~good
            if bad:
                transfer.note("unreadable")
                self._possible[gm.name] &= ~bad
            transfer.settle(attached.number, good, PageOutcome.LOADED)
            transfer.settle(attached.number, bad, PageOutcome.UNREADABLE)
        return good.bit_count()

    def _read(
        self, gm: GroupMatch, attached: Attached, chunks: list[int], memory: memoryview,
        held: Mapping[int, OpenSegment], read: list[tuple[Tier, int]],
    ) -> int:  # fmt: skip
        """Read pages one behind the other; neighbours in the prompt in one call. The good ones, as bits.

        Appends (tier, chunks as bits) to ``read``.
        """
        good, at, size = 0, 0, attached.page_bytes
        for first, count in neighbours(chunks):
            target = memory[at * size : (at + count) * size]
            bits, tiers = self._context.reader.load_run(
                self._request.match, gm.cut(first, count), attached.group, target, held
            )
            good |= bits
            read += tiers.items()
            at += count
        return good


def neighbours(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each stretch of consecutive chunks."""
    first = 0
    for i in range(1, len(chunks) + 1):
        if i == len(chunks) or chunks[i] != chunks[i - 1] + 1:
            yield chunks[first], i - first
            first = i
