"""What is stored of a prompt behind its gaps.

A chunk that does not fit into its run's row has a row of its own, together with its successors, and that row may
outlive the rows that lead to it. So every chunk behind a gap may have a row, though hardly any does. One by one they
would be 32 reads for each run that is not stored, in many holds of the gate; here their keys are computed outside the
gate and looked up in bulk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from kvfs.index.native_session import NativeSession
from kvfs.index.rows import RUN
from kvfs.index.session import Session
from kvfs.lookup.search import ROWS_PER_HOLD, GroupLookup
from kvfs.native.index_walker import HandOverError

T = TypeVar("T")
#: Keys that are looked up in one hold of the gate: about 0.5 ms.
KEYS_PER_HOLD = 512


class Read(Protocol):
    """Runs a function under the gate."""

    def __call__(self, function: Callable[[Session | NativeSession], T], /) -> T: ...


def read_behind_gaps(
    lookup: GroupLookup, read: Read, *, orphans: bool = True, native: NativeSession | None = None
) -> None:
    """Read the runs in ``lookup.gapped`` again, including what is behind a gap, where a chunk has a row of its own.

    Unless ``orphans``, runs of which nothing has been found yet are left out, other than the first such run: rows of
    their later chunks could only exist without the rows that lead to them. ``native`` looks for the keys if it can.
    """
    gapped = sorted(set(lookup.gapped))
    if not orphans:
        first = next((run for run in gapped if not lookup.has_some(run)), None)
        gapped = [run for run in gapped if run == first or lookup.has_some(run)]
    left = _forked(lookup, gapped, native)
    if left is None:
        left = _read_forked(lookup, gapped, read)

    def step(session: Session | NativeSession) -> None:
        budget = lookup.rows_read + ROWS_PER_HOLD
        while left and lookup.rows_read < budget:
            lookup.read_run(session, left[-1], stop_at_gap=False)
            left.pop()

    while left:
        read(step)


def _forked(lookup: GroupLookup, runs: Sequence[int], native: NativeSession | None) -> list[int] | None:
    """Runs in which a chunk other than the first one has a row of its own; None if ``native`` cannot tell."""
    if native is None or native.generation != lookup.generation:
        return None
    try:
        return lookup.forked(native, runs)
    except HandOverError:
        return None


def _read_forked(lookup: GroupLookup, gapped: Sequence[int], read: Read) -> list[int]:
    """The same, by the index thread."""
    left = list[int]()
    together = max(1, KEYS_PER_HOLD // (RUN * max(1, len(lookup.parts))))
    for first in range(0, len(gapped), together):
        runs = gapped[first : first + together]
        keys = [key for run in runs for key in lookup.keys_within(run)]
        stored: set[bytes] = set()
        for at in range(0, len(keys), KEYS_PER_HOLD):  # with many parts, one run alone has more keys
            stored.update(_stored(keys[at : at + KEYS_PER_HOLD], read))
        if stored:
            left += [run for run in runs if not stored.isdisjoint(lookup.keys_within(run))]
    return left


def _stored(keys: Sequence[bytes], read: Read) -> list[bytes]:
    return read(lambda session: session.keys_there(keys))
