"""Loads to host memory that an engine's own thread copies while it has nothing else to do: small ones, of pages that
the page cache holds, many of them in one call of the native library. They have ended when it returns, so there is no
transfer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.pages.chunk_set import bits_of, span
from kvfs.pages.host_copy import CellTargets, targets
from kvfs.read.plan import Scatter
from kvfs.transfer.load import Pages, neighbours
from kvfs.transfer.units import UnitIds
from kvfs.transfer.workers import Attached, TransportContext
from kvfs.types import Tier, TransferResult

log = logging.getLogger("kvfs")
AT_ONCE_BYTES = 8 << 20  # of a load that an engine's own thread may copy: about 2 ms
TOGETHER_BYTES = 32 << 20  # of loads that are copied in one call: some 5 ms, after which the clock is asked


class SmallLoad(NamedTuple):
    """A load that may be small enough, and its checked units, by group number."""

    match: PrefixMatch
    pages: Pages
    units: Mapping[int, UnitIds]

    @property
    def nbytes(self) -> int:
        return sum(attached.page_bytes * len(chunks) for attached, chunks in self.pages)


class LoadsAtOnce:
    """Owns where the pages of each attached group go. Used by one thread at a time."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._targets: dict[int, CellTargets] = {}  # by group number
        self._told: set[type[Exception]] = set()

    def run(self, loads: Sequence[SmallLoad], end: float) -> list[TransferResult | None]:
        """Copy loads until ``end``, on the clock of the store, TOGETHER_BYTES of them in a call.

        The result of each that is whole; None of the others, some of whose pages may have been copied. Not in mode
        staging: no page is in the page cache, and even a read that waits for no disk has the kernel read ahead into it.
        """
        store, results = self._context.store, list[TransferResult | None]()
        while not store.mode.direct and len(results) < len(loads) and store.files.monotonic() < end:
            some, nbytes = list[SmallLoad](), 0
            for load in loads[len(results) :]:
                if nbytes >= TOGETHER_BYTES:
                    break
                some.append(load)
                nbytes += load.nbytes if load.nbytes <= AT_ONCE_BYTES else 0
            results += self._run(some)
        return [*results, *[None] * (len(loads) - len(results))]

    def _run(self, loads: Sequence[SmallLoad]) -> list[TransferResult | None]:
        try:
            with ExitStack() as holds:
                begun, pages = set[int](), list[Scatter]()
                for number, load in enumerate(loads):
                    hold = load.match.hold
                    if load.nbytes <= AT_ONCE_BYTES and hold is not None and hold.acquire():
                        holds.callback(hold.release)
                        begun.add(number)
                        pages += self._scatters(number, load)
                begun -= self._context.reader.scatter_at_once(pages, len(loads))
        except Exception as exc:  # the threads load them, or tell each transfer what is wrong
            if type(exc) not in self._told:  # what fails, fails in each step
                self._told.add(type(exc))
                log.exception("loads in the engine's thread failed")
            return [None] * len(loads)
        return [_result(load) if number in begun else None for number, load in enumerate(loads)]

    def _scatters(self, number: int, load: SmallLoad) -> list[Scatter]:
        """What has to be copied of a load whose segments are held. ``number``: of those that are copied together."""
        pages, hold = [], load.match.hold
        assert hold is not None
        for attached, chunks in load.pages:
            if not chunks:  # a caller may leave out the units of such a group
                continue
            gm = load.match.group(attached.group.name).for_part(attached.part, attached.page_bytes)
            leaf, where = attached.group.leaf_bytes(attached.part), self._targets_of(attached)
            for first, count in neighbours(chunks):
                pages.append(Scatter(
                    number, load.match, gm.cut(first, count), hold.held, leaf, attached.group.states,
                    load.units[attached.number], where,
                ))  # fmt: skip
        return pages

    def _targets_of(self, attached: Attached) -> CellTargets:
        if attached.number not in self._targets:
            self._targets[attached.number] = targets(attached.group, attached.part, attached.device)
        return self._targets[attached.number]


def _result(load: SmallLoad) -> TransferResult:
    """All of its pages came out of the page cache."""
    match, pages, loaded = load.match, 0, 0
    for _, chunks in load.pages:
        pages += len(chunks)
        loaded |= bits_of(chunks)
    length = match.restorable({gm.name: span(gm.first, gm.count) for gm in match.groups})
    tokens, size = length * match.page_tokens, match.page_tokens
    host = (loaded & span(0, length)).bit_count() * size
    tiers = {Tier.DEVICE: tokens - host, Tier.HOST: host}
    return TransferResult(tokens, pages, load.nbytes, tiers={tier: n for tier, n in tiers.items() if n})
