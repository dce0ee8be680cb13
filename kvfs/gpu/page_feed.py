"""What a GPU load sends: group after group, and of each group the windows of pages that may be sent now.

A load of a match knows all pages at once; its windows only keep the planning short before the first copy. A restore
looks its prompt up meanwhile. To hash a prompt of 32k tokens, to look it up and to plan its load takes 2 to 6 ms in
which the link would stand still; for the first pages that takes one. In a group that needs all of its pages each window
is what has been found so far. What windows and snapshots need is known when the lookup has ended: these groups follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from kvfs.index.rows import RUN
from kvfs.lookup.incremental import Lookahead
from kvfs.lookup.prefix_match import GroupMatch, PrefixMatch
from kvfs.pages.chunk_set import span
from kvfs.segments.open_segments import OpenSegment
from kvfs.transfer.load import LoadRequest, Pages, finish_lookup
from kvfs.transfer.workers import Attached

WINDOW_PAGES = 32  # that are planned before the first copy; then twice as many, while those are on their way
FIRST_PAGES = RUN  # that a restore looks up first: a row of the index; then twice as many each time
COMMANDS_PAGES = 2048  # of a restore that the first command buffer has room for: most prompts have no more


@dataclass
class GroupPages:
    """The pages of one group to send."""

    attached: Attached
    gm: GroupMatch  # of what has been found
    wanted: list[int]  # chunks
    later: Pages  # groups behind it, with the most pages that they may have
    first: int  # pages of the first window

    def windows(self) -> Iterator[tuple[list[int], int]]:
        """(chunks, how many are known to follow), ascending; each window has twice as many as the last."""
        wanted, done, pages = self.wanted, 0, self.first
        while done < len(wanted):
            now = wanted[done : done + pages]
            done, pages = done + len(now), 2 * pages
            yield now, len(wanted) - done


@dataclass
class GrowingPages(GroupPages):
    """The pages of a group that needs all of them, while they are looked up: ``gm`` and ``wanted`` follow."""

    ahead: Lookahead

    def windows(self) -> Iterator[tuple[list[int], int]]:
        number, wanted, done, pages = self.attached.number, self.wanted, 0, self.first
        while done < len(wanted):
            asked = wanted[done : done + pages]
            found = self.ahead.more(number, asked[-1] + 1)
            now = [chunk for chunk in asked if chunk < found]
            done, pages = done + len(now), 2 * pages
            if len(now) < len(asked):
                wanted = self.wanted = wanted[:done]
            if now:
                self.gm = self.ahead.found(number, found)
                yield now, len(wanted) - done


class PageFeed(Protocol):
    """The pages of one load. Used by the load thread, but for ``match`` and ``release``."""

    match: PrefixMatch  # of a restore: empty until its lookup has ended
    held: Mapping[int, OpenSegment]  # the segments of the pages, by number, from ``hold`` on; may grow
    tails: Mapping[int, int]  # the end of what is published in each of them
    ruled_out: dict[str, int]  # chunks that turned out bad, as bits, by group name: the load adds them

    def begin(self) -> None:
        """What can be done while the engine still uses its units."""

    def hold(self) -> None:
        """Hold the segments until ``release``. May be called again."""

    def groups(self) -> Iterator[GroupPages]:
        """Ask for the next one when the last one is sent."""

    def at_most(self) -> Pages:
        """The pages that the first command buffer needs room for."""

    def release(self) -> None: ...


class MatchFeed:
    """The pages of a match."""

    def __init__(self, request: LoadRequest, ruled_out: dict[str, int]) -> None:
        self._request, self.match, self.ruled_out = request, request.match, ruled_out
        self.held: Mapping[int, OpenSegment] = {}
        self.tails: Mapping[int, int] = request.match.tails
        self._opened: AbstractContextManager[Mapping[int, OpenSegment]] | None = None
        self.at_once = False  # one window for all pages of a group

    def begin(self) -> None:
        pass

    def begin_with(
        self, opened: AbstractContextManager[Mapping[int, OpenSegment]] | None, held: Mapping[int, OpenSegment], *,
        at_once: bool,
    ) -> None:  # fmt: skip
        """Hold the segments that were opened for a plan. ``at_once``: of all pages."""
        self._opened, self.held, self.at_once = opened, held, at_once

    def hold(self) -> None:
        if self._opened is not None:
            return
        self._opened = self._request.context.reader.open_segments(self.match)
        self.held = self._opened.__enter__()

    def groups(self) -> Iterator[GroupPages]:
        match, pages = self.match, self._request.pages
        for number, (a, chunks) in enumerate(pages):
            limit = match.chunks
            if self.ruled_out and not match.keyed:
                limit = match.restorable(
                    {g.name: span(g.first, g.count) & ~self.ruled_out.get(g.name, 0) for g in match.groups}
                )
            wanted = [chunk for chunk in chunks if chunk < limit]
            if wanted and not self._request.transfer.stopped:
                gm = match.group(a.group.name).for_part(a.part, a.page_bytes)
                # each band needs all pages
                first = len(wanted) if self._request.layerwise or self.at_once else WINDOW_PAGES
                yield GroupPages(a, gm, wanted, pages[number + 1 :], first)

    def at_most(self) -> Pages:
        return self._request.pages

    def release(self) -> None:
        if self._opened is not None:
            self._opened.__exit__(None, None, None)
        self.held = {}  # the load may live until the garbage is collected


class RestoreFeed:
    """The pages of a prompt that is looked up meanwhile."""

    def __init__(self, request: LoadRequest, lookahead: Lookahead) -> None:
        self._request, self._ahead = request, lookahead
        self.match = request.match
        self.held: Mapping[int, OpenSegment] = lookahead.held
        self.tails: Mapping[int, int] = lookahead.tails
        self.ruled_out: dict[str, int] = {}

    def begin(self) -> None:
        """Look up the pages that are sent first."""
        transfer = self._request.transfer
        for a, chunks in self._request.pages:
            if a.group.need.kind == "all" and chunks:
                if not transfer.stopped and not self._request.context.late(transfer):
                    self._ahead.more(a.number, chunks[:FIRST_PAGES][-1] + 1)
                return

    def hold(self) -> None:
        pass

    def groups(self) -> Iterator[GroupPages]:
        ahead, pages, sent = self._ahead, self._request.pages, set[int]()
        for number, (a, chunks) in enumerate(pages):
            wanted = [chunk for chunk in chunks if chunk < ahead.limit]
            if wanted and a.group.need.kind == "all" and not self._request.transfer.stopped:
                sent.add(a.number)
                later = self._fewest(pages[number + 1 :])
                yield GrowingPages(a, ahead.found(a.number, 0), wanted, later, FIRST_PAGES, ahead)
        request = finish_lookup(self._request)
        self.match = request.match
        rest = replace(request, pages=[(a, chunks) for a, chunks in request.pages if a.number not in sent])
        yield from MatchFeed(rest, self.ruled_out).groups()

    def at_most(self) -> Pages:
        return [(a, chunks[:COMMANDS_PAGES]) for a, chunks in self._fewest(self._request.pages)]

    def _fewest(self, pages: Pages) -> Pages:
        """Windows and snapshots need fewer pages than there may be, though which is not known yet."""
        needs = [a.group.need.chunks(self._request.match.page_tokens) for a, _ in pages]
        return [(a, chunks[:need]) for (a, chunks), need in zip(pages, needs, strict=True)]

    def release(self) -> None:
        self._ahead.release()
