"""Looks a prompt up step by step, for a load that begins with the first pages while the rest is looked up.

In a group that needs all of its pages the prefix ends at the first missing page, so the pages of a step can be sent
before the next step is hashed. What windows and snapshots need is known once the end of the prefix is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvfs.context import Context
from kvfs.errors import IndexUnavailableError
from kvfs.lookup.matcher import Matcher, later
from kvfs.lookup.prefix_match import GroupMatch, PrefixMatch
from kvfs.lookup.search import GroupLookup, Prompt, walk_back, walk_forward
from kvfs.pages.chunk_hash_cache import Chain
from kvfs.pages.identity import Identity
from kvfs.pages.layout import Part
from kvfs.segments.open_segments import OpenSegment


class Lookahead:
    """One lookup in progress. Used by one thread. Owns the open segments of what it finds, until ``release``."""

    def __init__(
        self, context: Context, matcher: Matcher, identity: Identity, chain: Chain, wants: list[Part], chunks: int
    ) -> None:
        self._c, self._matcher, self._identity, self._chain = context, matcher, identity, chain
        self._lookups, self._read = matcher.begin(Prompt(identity.digest, ()), wants)
        self._needs_all = [n for n, x in enumerate(self._lookups) if x.group.need.kind == "all"]
        self._found = dict.fromkeys(self._needs_all, 0)  # leading chunks that were found and are held
        self._asked, self._seconds = chunks, 0.0
        self.limit = chunks  # more than these cannot be restored
        #: open segments of what was found, by number, and the end of what is published in each; both grow
        self.held: dict[int, OpenSegment] = {}
        self.tails: dict[int, int] = {}
        #: everything that was found, after ``finish``
        self.match: PrefixMatch = PrefixMatch(0, identity.layout.page_tokens, identity.digest, "", (), {})

    def more(self, number: int, chunks: int) -> int:
        """Look up the first ``chunks`` chunks of a group that needs all; how many of them were found.

        Fewer than asked for: the prefix ends there.
        """
        began = self._c.files.monotonic()
        chunks, found = min(chunks, self.limit), self._found[number]
        if chunks > found:
            self._found[number] = found = self._look(number, found, chunks)
            if found < chunks:
                self.limit = found
        self._seconds += self._c.files.monotonic() - began
        return min(chunks, found)

    def found(self, number: int, chunks: int) -> GroupMatch:
        """The pages of the first ``chunks`` chunks of a group, all of which were found."""
        return self._matcher.group_match(number, self._lookups[number], 0, chunks)

    def finish(self, *, go_on: bool) -> PrefixMatch:
        """The longest restorable prefix. Unless ``go_on``, only what was already looked up counts."""
        for number in self._needs_all if go_on else ():
            self.more(number, self.limit)
        began = self._c.files.monotonic()
        others = [x for x in self._lookups if x.group.need.kind != "all"]
        chunks = min([self.limit, *self._found.values()])
        if others:
            chunks = self._look_back(others, chunks) if go_on else 0
        self.match = self._matcher.hold(self._lookups, chunks, self._read.generation, self.held)
        self.held.update(self.match.hold.held if self.match.hold is not None else {})
        later(self.tails, self.match.tails)
        self._chain.remember()
        if go_on or self.match:
            self._matcher.count(self.match, self._asked, self._seconds + self._c.files.monotonic() - began)
        return self.match

    def release(self) -> None:
        """Release the segments: nothing is loaded from them any more."""
        self.held.clear()
        self.match.close()

    def _extend(self, chunks: int) -> None:
        self._chain.grow(chunks)
        prompt = Prompt(self._identity.digest, self._chain.hashes)
        for lookup in self._lookups:
            lookup.extend(prompt)

    def _look(self, number: int, known: int, chunks: int) -> int:
        self._extend(chunks)
        lookup = self._lookups[number]
        found = self._walk(partial(walk_forward, lookup, chunks, self._read, known), known)
        new = {n: i for n, i in dict(lookup.segments).items() if n not in self.held}
        later(self.tails, dict(lookup.tails))
        if new:
            self.held.update(self._matcher.acquire(new, self._read.generation))
            if not new.keys() <= self.held.keys():
                sources = self.found(number, found).cut(known, found - known).sources()
                for chunk in range(known, found):
                    if not all(s.place.segment in self.held for s in sources.get(chunk, [])):
                        return chunk
        return found

    def _look_back(self, others: list[GroupLookup], chunks: int) -> int:
        self._extend(chunks)
        return self._walk(partial(walk_back, others, self._identity.layout.page_tokens, chunks, self._read), 0)

    def _walk(self, walk: Callable[[], int], otherwise: int) -> int:
        """The result of ``walk``; ``otherwise`` if the index cannot answer."""
        try:
            return walk()
        except IndexUnavailableError as exc:
            self._matcher.count_unavailable(exc)
            return otherwise
