"""A restore to a GPU: the first pages of a prompt are on their way while the rest of it is looked up.

To hash a prompt of 32k tokens, to look it up and to plan its load takes 2 to 6 ms in which the link would stand still;
for its first pages that takes one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvfs.gpu.batches import Window
from kvfs.gpu.lane import LaunchQueue
from kvfs.gpu.load import GpuLoad, GroupLoad, Pages
from kvfs.index.rows import RUN
from kvfs.lookup.incremental import Lookahead
from kvfs.segments.open_segments import OpenSegment

FIRST_PAGES = RUN  # that are looked up: a row of the index. Then twice as many, while those are on their way
SHEET_PAGES = 2048  # that there is room for in the first sheet: most prompts have as many at most


@dataclass
class GpuRestore(GpuLoad):
    """A restore in progress. Until its prompt is looked up, ``pages`` are those that there may be."""

    _growing: bool = True

    @property
    def _ahead(self) -> Lookahead:
        assert self.lookahead is not None
        return self.lookahead

    def _look_ahead(self) -> None:
        """The pages that come first are looked up before ``after`` is waited for."""
        for attached, chunks in self.pages:
            if attached.group.need.kind == "all" and chunks:
                if not self.transfer.stopped and not self.gpu.late(self.transfer):
                    self._ahead.more(attached.number, chunks[:FIRST_PAGES][-1] + 1)
                return

    def _hold(self) -> dict[int, OpenSegment]:
        return self._ahead.held

    @property
    def _tails(self) -> Mapping[int, int]:
        return self._ahead.tails

    def _sheet_bytes(self, most: Pages) -> int:
        return super()._sheet_bytes([(a, chunks[:SHEET_PAGES]) for a, chunks in self._at_most(most)])

    def _at_most(self, pages: Pages) -> Pages:
        """Windows and snapshots need fewer pages than there may be, but nobody knows which."""
        needs = [a.group.need.chunks(self.match.page_tokens) for a, _ in pages]
        return [(a, chunks[:need]) for (a, chunks), need in zip(pages, needs, strict=True)]

    def _send_groups(self, launches: LaunchQueue, held: dict[int, OpenSegment]) -> None:
        """Groups that need all of their pages as these are found; then the others: theirs are known by then."""
        ahead = self._ahead
        for number, (attached, chunks) in enumerate(self.pages):
            wanted = [chunk for chunk in chunks if chunk < ahead.limit]
            if wanted and attached.group.need.kind == "all" and not self.transfer.stopped:
                nothing, later = ahead.found(attached.number, 0), self._at_most(self.pages[number + 1 :])
                self._send_group(launches, attached, nothing, wanted, held, later)
        self._growing = False
        good, sent = dict(self.possible), {group.attached.number for group in self._groups}
        self._finish_looking(ahead)
        self.possible = {name: bits & good.get(name, -1) for name, bits in self.possible.items()}
        self.pages = [(a, chunks) for a, chunks in self.pages if a.number not in sent]
        super()._send_groups(launches, held)

    def _windows(self, group: GroupLoad, held: dict[int, OpenSegment]) -> Iterator[Window]:
        """Of a group that needs all: as many pages as are looked up at once."""
        if not self._growing:
            yield from super()._windows(group, held)
            return
        ahead, number, wanted = self._ahead, group.attached.number, group.wanted
        done, pages = 0, FIRST_PAGES
        while done < len(wanted):
            asked = wanted[done : done + pages]
            there = ahead.more(number, asked[-1] + 1)
            now = [chunk for chunk in asked if chunk < there]
            done, pages = done + len(now), 2 * pages
            if len(now) < len(asked):
                wanted = group.wanted = wanted[:done]
            if now:
                group.gm = ahead.found(number, there)
                group.source.grow(group.gm)
                yield self._window(group, now, held, left=len(wanted) - done)
