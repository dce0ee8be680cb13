"""Loads to host memory that an engine's own thread copies while it has nothing else to do: small ones, of pages that
the page cache holds, many of them in one call of the native library."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from kvfs.pages.host_copy import CellTargets, targets
from kvfs.read.plan import Scatter
from kvfs.transfer.load import HostLoad
from kvfs.transfer.workers import Attached, TransportContext

log = logging.getLogger("kvfs")
TOGETHER_BYTES = 32 << 20  # of loads that are copied in one call: some 5 ms, after which the clock is asked


class LoadsAtOnce:
    """Owns where the pages of each attached group go. Used by one thread at a time."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._targets: dict[int, CellTargets] = {}  # of loads from token 0 on, by group number

    def run_some(self, loads: deque[HostLoad]) -> list[HostLoad]:
        """Take the first loads, TOGETHER_BYTES of them, and copy those that are small and need wait for nothing.

        Returns these: ``end`` is to follow for them, ``run`` for the others.
        """
        some, nbytes = list[HostLoad](), 0
        while loads and nbytes < TOGETHER_BYTES:
            some.append(loads.popleft())
            nbytes += some[-1].nbytes if some[-1].is_small else 0
        return self._run(some)

    def _run(self, loads: Sequence[HostLoad]) -> list[HostLoad]:
        try:
            with ExitStack() as steps:
                begun, pages = list[HostLoad](), list[Scatter]()
                for load in loads:
                    found = load.begin_at_once(steps, len(begun), self._targets_of)
                    if found is not None:
                        begun.append(load)
                        pages += found
                left = self._context.reader.scatter_at_once(pages, len(begun))
                loaded = [load for number, load in enumerate(begun) if number not in left]
                for load in loaded:
                    load.settle_at_once()
            return loaded
        except Exception:  # the threads load them, or tell each transfer what is wrong
            log.exception("loads in the engine's thread failed")
            return []

    def _targets_of(self, attached: Attached, first_token: int) -> CellTargets:
        if first_token:
            return targets(attached.group, attached.part, attached.device, first_token)
        if attached.number not in self._targets:
            self._targets[attached.number] = targets(attached.group, attached.part, attached.device)
        return self._targets[attached.number]
