"""A dry run of eviction: the same policy on the same figures, step by step; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvfs.context import Context
from kvfs.eviction.evictor import Evictor
from kvfs.eviction.policy import EvictionPlan, Policy, WriteBudget
from kvfs.eviction.usage import Summary
from kvfs.index import ledger
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.tables import DROPPED, SegmentRow

STEPS_MAX = 100_000  # of one plan: bounds the time and memory of a dry run


@dataclass(frozen=True)
class Step:
    """One segment that would be evicted."""

    segment: int
    segment_id: bytes
    frees_bytes: int
    pages: int  # live pages that become misses
    carried_pages: int  # hot pages that would be copied to another segment first
    carried_bytes: int
    reason: str


@dataclass(frozen=True)
class GcPlan:
    """What gc would do: steps in order, and how much is in use before and after them."""

    used_bytes: int
    target_bytes: int
    dropped_bytes: int  # of segments that are dropped but not reclaimed yet
    steps: tuple[Step, ...] = ()
    pinned: frozenset[bytes] = field(default_factory=frozenset)  # ids of segments that pins protect

    @property
    def freed_bytes(self) -> int:
        return sum(step.frees_bytes - step.carried_bytes for step in self.steps)


def make_plan(context: Context, evictor: Evictor, target_bytes: int | None) -> GcPlan:
    """The steps until ``target_bytes`` are in use (default: the limit).

    Eviction itself decides again before each step, so uses and puts in between change what it does.
    """
    rows = dict(context.index.read(lambda s: s.segments(), COMMIT_SECONDS))
    used = context.index.read(lambda s: s.ledger().used, COMMIT_SECONDS)
    limit = ledger.budget(context.settings).limit if target_bytes is None else target_bytes
    dropped = sum(row.allocated for row in rows.values() if row.state == DROPPED)
    pinned = frozenset(evictor.victims.pinned())
    if used <= limit:
        return GcPlan(used, limit, dropped, (), pinned)  # no table was read
    evictable, summaries, now = evictor.victims.survey()
    # one flock each, once: a reader that holds a segment would keep its blocks
    held = {n for n, row in evictable.items() if evictor.victims.is_held(row)}
    alive = {s.number: replace(s, held=s.number in held) for s in summaries}
    budget = WriteBudget(context.settings.segment_bytes, evictor.budget.tokens)
    policy, steps, left = Policy(), list[Step](), used
    while left > limit and len(steps) < STEPS_MAX:
        choice = policy.choose(alive.values(), now, budget.available)
        if choice is None:
            break
        budget.relocated(choice.relocate_bytes)
        step = _step(alive.pop(choice.victim), evictable[choice.victim], choice)
        steps.append(step)
        left -= step.frees_bytes - step.carried_bytes
    return GcPlan(used, limit, dropped, tuple(steps), pinned)


def _step(summary: Summary, row: SegmentRow, choice: EvictionPlan) -> Step:
    pages = len(summary.fragments.ordinals)
    return Step(
        summary.number, row.segment_id, row.allocated, pages - len(choice.relocate), len(choice.relocate),
        choice.relocate_bytes, choice.reason,
    )  # fmt: skip
