"""Requests whose KV may rest on a load that another connector does within a step, and may fail to do.

Such a load fails with the step that has computed from it: the engine then computes the blocks again, and no connector
is told for which requests. So nothing of a request is stored before it has a token from after it got its blocks, which
comes with or after the outcome of that step; and nothing at all of those in doubt when a load fails. Whoever gets
blocks meanwhile may share some of theirs, and is in doubt as well.

The engine leaves blocks that were loaded wrongly in its prefix cache, for others to share: until they are computed
again, and for ever if the request that should do so is given up, or loses them. So blocks of those in doubt when a load
fails are spoilt until they are given out anew, and with them those of each request that has shared one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.v1.request import RequestStatus


class Given(NamedTuple):
    """Blocks that a request gets in a step."""

    request: Any
    admitted: bool  # it had none; else it goes on with more
    shared: Sequence[int]  # from the engine's prefix cache
    fresh: Sequence[int]


@dataclass
class _Doubt:
    request: Any
    tokens: int  # of its output: one more, and what it has computed was right, if nothing is said to the contrary
    blocks: set[int]  # that were given to it afresh
    never: bool = False  # nothing of it is stored

    def is_open(self) -> bool:
        ended = self.request.status is RequestStatus.FINISHED_STOPPED  # with its output, which may be no token
        return not ended and int(self.request.num_output_tokens) <= self.tokens


class Doubts:
    """For the scheduler's thread alone. Bounded by the engine's requests and blocks."""

    def __init__(self) -> None:
        self._doubts: dict[str, _Doubt] = {}
        self._spoilt: set[int] = set()

    def __bool__(self) -> bool:
        """Whether steps without loads of other connectors need be told."""
        return bool(self._doubts or self._spoilt)

    def given(self, gifts: Sequence[Given], *, loads: bool) -> None:
        """What was given in this step, in which another connector loads some."""
        open_doubts = {req_id: doubt for req_id, doubt in self._doubts.items() if doubt.is_open()}
        for gift in gifts:
            self._spoilt.difference_update(gift.fresh)
            req_id = gift.request.request_id
            if not gift.admitted:
                if req_id in self._doubts:
                    self._doubts[req_id].blocks.update(gift.fresh)
                continue
            self._doubts.pop(req_id, None)
            if loads or open_doubts:
                before = open_doubts[req_id].blocks if req_id in open_doubts else ()
                self._doubts[req_id] = _doubt(gift, before)
        self._spread(gifts)

    def _spread(self, gifts: Sequence[Given]) -> None:
        """Who shares a spoilt block spoils its own, which others may share within the same step."""
        never = {req_id for req_id, doubt in self._doubts.items() if doubt.never}
        clean = list(gifts)
        while hit := [g for g in clean if g.request.request_id in never or not self._spoilt.isdisjoint(g.shared)]:
            for gift in hit:
                req_id = gift.request.request_id
                self._doubts.setdefault(req_id, _doubt(gift)).never = True
                never.add(req_id)
                self._spoilt.update(gift.fresh)
            clean = [gift for gift in clean if gift.request.request_id not in never]

    def loads_failed(self, blocks: Iterable[int]) -> None:
        """These do not hold what they should, whosever they are."""
        self._spoilt.update(blocks)
        for doubt in self._doubts.values():
            doubt.never = True
            self._spoilt.update(doubt.blocks)

    def withheld(self) -> set[str]:
        """Ids of the requests of which nothing may be stored now. The rest are in doubt no more."""
        self._doubts = {req_id: doubt for req_id, doubt in self._doubts.items() if doubt.never or doubt.is_open()}
        return set(self._doubts)

    def finished(self, req_ids: Iterable[str]) -> set[str]:
        """Those of which nothing may be stored. To be told before what is given, which may be their blocks."""
        ended = {req_id: self._doubts.pop(req_id) for req_id in req_ids if req_id in self._doubts}
        bad = {req_id for req_id, doubt in ended.items() if doubt.never or doubt.is_open()}
        for req_id in bad:
            self._spoilt.update(ended[req_id].blocks)
        return bad


def _doubt(gift: Given, before: Iterable[int] = ()) -> _Doubt:
    # what was under way when it was preempted adds none: it is dropped, or came before the request got blocks again
    return _Doubt(gift.request, gift.request.num_output_tokens, {*before, *gift.fresh})
