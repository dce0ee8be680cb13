"""Which units hold a page, and where its states are in a list of the units of several pages."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvfs.native.shared_prefixes import Page
from kvfs.pages.layout import Group, Part
from kvfs.transfer.workers import Attached


def page_of(a: Attached) -> Page:
    """What an entry of this rank holds for one page of this group."""
    return page_in(a.group, a.part, a.device.unit_tokens)


def page_in(group: Group, part: Part, tokens: int) -> Page:
    """The same for units of so many tokens, which may be those of a peer."""
    states, leaves = group.states, group.leaves(part)
    if states == 1:
        return Page(1, leaves, 1)
    return Page(states // tokens, leaves, 1) if tokens <= states else Page(1, leaves, tokens // states)


def sub_of(page: Page, chunk: int) -> int:
    """Number of a page within its unit, where a unit holds several."""
    return chunk % page.per_unit


def granule_tokens(a: Attached, page: Page, subs: Sequence[int]) -> Sequence[int]:
    """First token of each granule of pages whose units follow one another in a list; ``subs``: one for each page."""
    states, step = a.group.states, a.group.granule_states
    if states == 1:
        return range(len(subs))
    if page.per_unit == 1:
        return range(0, len(subs) * states, step)
    whole = page.per_unit * states
    return array(
        "q",
        [
            t
            for i, sub in enumerate(subs)
            for t in range(i * whole + sub * states, i * whole + (sub + 1) * states, step)
        ],
    )


def units_of(a: Attached, ids: Sequence[int], chunk: int) -> list[int]:
    """The units of a chunk; empty if one of them is missing."""
    numbers = a.device.unit_range(a.group, chunk)
    if numbers[-1] >= len(ids):
        return []
    units = [ids[i] for i in numbers]
    return units if min(units) >= 0 else []
