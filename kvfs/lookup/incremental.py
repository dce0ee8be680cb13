"""Looking a prompt up a piece at a time, for a load that starts with the first piece while the rest is looked up.

In a group that needs all of its pages, each piece is either stored or ends the prefix; so the load of what was found
can start before the next piece is hashed. What windows and snapshots need is known only with the end of the prefix.
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
    """One lookup in progress, used by one thread.

    Owns the segments of what was found (``held``) until ``release``, and the prompt's chain of hashes, which grows as
    far as it is looked up. Walks are delegated to ``search``, the match at the end to ``Matcher``.
    """

    def __init__(
        self, context: Context, matcher: Matcher, identity: Identity, chain: Chain, wants: list[Part], chunks: int
    ) -> None:
        self._c, self._matcher, self._identity, self._chain = context, matcher, identity, chain
        self._lookups, self._read = matcher.begin(Prompt(identity.digest, ()), wants)
        self._needs_all = [n for n, x in enumerate(self._lookups) if x.group.need.kind == "all"]
        self._there = dict.fromkeys(self._needs_all, 0)  # leading chunks that were found and whose segments are held
        self._asked, self._seconds = chunks, 0.0
        self.limit = chunks  # upper bound of the chunks that can be restored
        #: segments of what was found, by number, and the end of what is published in each; both grow
        self.held: dict[int, OpenSegment] = {}
        self.tails: dict[int, int] = {}
        #: everything that was found, after ``finish``
        self.match: PrefixMatch = PrefixMatch(0, identity.layout.page_tokens, identity.digest, "", (), {})

    def more(self, number: int, chunks: int) -> int:
        """Look up the first ``chunks`` chunks of a group that needs all; how many leading ones of them are stored.

        Fewer than asked for means that the prefix ends there.
        """
        began = self._c.files.monotonic()
        chunks, there = min(chunks, self.limit), self._there[number]
        if chunks > there:
            self._there[number] = there = self._look(number, there, chunks)
            if there < chunks:
                self.limit = there
        self._seconds += self._c.files.monotonic() - began
        return min(chunks, there)

    def found(self, number: int, chunks: int) -> GroupMatch:
        """The pages of the first ``chunks`` chunks of a group; ``more`` has found all of them."""
        return self._matcher.group_match(number, self._lookups[number], 0, chunks)

    def finish(self, *, go_on: bool) -> PrefixMatch:
        """The longest restorable prefix. Unless ``go_on``, only what was already looked up counts."""
        for number in self._needs_all if go_on else ():
            self.more(number, self.limit)
        began = self._c.files.monotonic()
        others = [x for x in self._lookups if x.group.need.kind != "all"]
        chunks = min([self.limit, *self._there.values()])
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
        """Release the segments; nothing may be loaded from them after this."""
        self.held.clear()
        self.match.close()

    def _extend(self, chunks: int) -> None:
        self._chain.grow(chunks)
        prompt = Prompt(self._identity.digest, self._chain.hashes)
        for lookup in self._lookups:
            lookup.extend(prompt)

    def _look(self, number: int, there: int, chunks: int) -> int:
        self._extend(chunks)
        lookup = self._lookups[number]
        found = self._walk(partial(walk_forward, lookup, chunks, self._read, there), there)
        new = {n: i for n, i in dict(lookup.segments).items() if n not in self.held}
        later(self.tails, dict(lookup.tails))
        if new:
            self.held.update(self._matcher.acquire(new, self._read.generation))
            if not new.keys() <= self.held.keys():
                sources = self.found(number, found).cut(there, found - there).sources()
                for chunk in range(there, found):
                    if not all(s.place.segment in self.held for s in sources.get(chunk, [])):
                        return chunk
        return found

    def _look_back(self, others: list[GroupLookup], chunks: int) -> int:
        self._extend(chunks)
        return self._walk(partial(walk_back, others, self._identity.layout.page_tokens, chunks, self._read), 0)

    def _walk(self, walk: Callable[[], int], otherwise: int) -> int:
        """The result of ``walk``, or ``otherwise`` if the index cannot answer."""
        try:
            return walk()
        except IndexUnavailableError as exc:
            self._matcher.count_unavailable(exc)
            return otherwise
