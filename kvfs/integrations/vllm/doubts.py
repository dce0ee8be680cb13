"""Requests whose KV may rest on a load that another connector does within a step, and may fail to do.

Such a load fails with the step that has computed from it: the engine then computes the blocks again, and no connector
is told for which requests. So nothing of a request is stored before it has a token from after it got its blocks, which
comes with or after the outcome of that step; and nothing at all of those in doubt when a load fails, or that get blocks
before these have been computed again. Whoever gets blocks meanwhile may share some of theirs, and is in doubt as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass
class _Doubt:
    request: Any
    tokens: int  # of its output: one more, and what it has computed was right, if nothing is said to the contrary
    again: bool = False  # a load failed: it may be computing its blocks again
    never: bool = False  # nothing of it is stored

    def is_open(self) -> bool:
        return int(self.request.num_output_tokens) <= self.tokens


class Doubts:
    """For the scheduler's thread alone."""

    def __init__(self) -> None:
        self._doubts: dict[str, _Doubt] = {}

    def admitted(self, requests: Iterable[Any], *, loads: bool) -> None:
        """These got their blocks in this step. ``loads``: in which another connector loads some."""
        others = [doubt for doubt in self._doubts.values() if doubt.is_open()]
        again = any(doubt.again for doubt in others)
        for request in requests if loads or others else ():
            # what is still under way from before a preemption says nothing
            tokens = request.num_output_tokens + request.num_stale_output_tokens
            self._doubts[request.request_id] = _Doubt(request, tokens, never=again)

    def loads_failed(self) -> None:
        """Some blocks do not hold what they should, whosever they are."""
        for doubt in self._doubts.values():
            doubt.again = doubt.never = True

    def withheld(self) -> set[str]:
        """Ids of the requests of which nothing may be stored now. The rest are in doubt no more."""
        self._doubts = {req_id: doubt for req_id, doubt in self._doubts.items() if doubt.never or doubt.is_open()}
        return set(self._doubts)

    def finished(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            self._doubts.pop(req_id, None)
