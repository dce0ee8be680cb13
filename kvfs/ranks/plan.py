"""Which source each page of a prompt has: a GPU of this host, or the store."""

from __future__ import annotations

import functools
import hashlib
import operator
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvfs.errors import ConfigError
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.lookup.prompt_pages import PromptPages
from kvfs.lookup.search import valid_lengths
from kvfs.native import shared_prefixes
from kvfs.native.library import Library, state
from kvfs.native.shared_prefixes import NONE, Found
from kvfs.pages.chunk_set import members, span
from kvfs.pages.layout import PageLayout, Part
from kvfs.ranks.shared_files import DIRECTORY, PeerTable
from kvfs.system.files import Files

RANKS_MAX = 64
#: Chunks of a group of full attention that a rank may lack before its table is asked no further.
MISSES_MAX = 64
LOOK_SECONDS = 1.0  # between two looks for a rank that was not there


@dataclass(frozen=True)
class PeerPages:
    """What a plan takes from one rank: by group name the chunks, ascending, and their entries in its table."""

    instance: str  # of the rank's table
    groups: Mapping[str, tuple[Sequence[int], Found]]


@dataclass(frozen=True)
class RankPlan:
    """The longest prefix that GPUs and the store hold together. Picklable: one process plans, others load."""

    namespace: bytes
    tokens: int
    page_tokens: int
    first: int  # chunks before it are not moved: the engine has them
    needs: Mapping[str, int | None]  # by group: chunks before the end that a reader needs; None: all
    peers: Mapping[int, PeerPages]  # by rank
    stored: Mapping[str, int]  # by group the chunks, as bits, that come from the store
    match: PrefixMatch | None = field(default=None, repr=False)  # of these; None: there are none

    @property
    def chunks(self) -> int:
        return self.tokens // self.page_tokens

    def needed(self, group: str) -> range:
        """The chunks of a group that are moved."""
        need = self.needs[group]
        return range(max(self.first, 0 if need is None else self.chunks - need), self.chunks)

    def sources(self, group: str) -> list[int | None]:
        """For each chunk of ``needed``: the rank whose GPU it comes from; None: the store."""
        chunks = self.needed(group)
        found: list[int | None] = [None] * len(chunks)
        for rank, pages in self.peers.items():
            for chunk in pages.groups.get(group, ((), None))[0]:
                found[chunk - chunks.start] = rank
        return found

    def restorable(self, good: Mapping[str, int]) -> int:
        """Longest length in chunks that ``good`` (by group the chunks, as bits) restores."""
        valid = (1 << self.chunks + 1) - 1
        for group, need in self.needs.items():
            valid &= valid_lengths(good[group] | span(0, self.first), need, self.chunks)
        return valid.bit_length() - 1

    def close(self) -> None:
        """Release the pages of the store; a load in progress keeps them."""
        if self.match is not None:
            self.match.close()


def native_library() -> Library:
    """What tables of ranks need. ConfigError if it is off."""
    native = shared_prefixes.native()
    if native is None:
        raise ConfigError(f"ranks need the native library, which is {state()}: install kvfs where a C compiler is")
    return native


def table_name(namespace: bytes, parts: Mapping[str, Part], name: str, rank: int) -> str:
    """Of the table of a rank: ranks of one group hold the same parts of one namespace's pages."""
    text = b"".join([namespace, *(g.encode() + b"\0" + parts[g].pack() for g in sorted(parts)), name.encode()])
    return f"kvfs-ranks-{hashlib.blake2b(text, digest_size=12).hexdigest()}-{rank}"


class RankTables:
    """The tables of a group of ranks, for lookups in any process of the host. Thread-safe.

    ``layout`` and ``namespace`` as the ranks have attached them (``io.namespace``), ``parts`` as in ``io.parts``.
    Raises ConfigError.
    """

    def __init__(
        self, namespace: bytes, layout: PageLayout, parts: Mapping[str, Part], ranks: int, *, name: str = "",
        directory: str = DIRECTORY, files: Files | None = None,
    ) -> None:  # fmt: skip
        if type(ranks) is not int or not 1 <= ranks <= RANKS_MAX:
            raise ConfigError(f"ranks is {ranks!r}: pass how many there are, 1 to {RANKS_MAX}")
        if layout.kind == "opaque":
            raise ConfigError("this namespace holds opaque pages: ranks publish pages of tokens")
        self.ranks = ranks
        self._namespace, self._layout, self._directory = namespace, layout, directory
        self._names = [table_name(namespace, parts, name, rank) for rank in range(ranks)]
        self._native, self._files = native_library(), files or Files()
        self._groups = [layout.group(group) for group in parts]
        self._lock = threading.Lock()
        self._tables: dict[int, PeerTable] = {}
        self._look_at = [0.0] * ranks  # when to look for the table of a rank that is not there

    def table(self, rank: int) -> PeerTable | None:
        """The table of a rank that is alive, or was when it was opened."""
        found = self._tables.get(rank)
        if found is not None or self._files.monotonic() < self._look_at[rank]:
            return found
        with self._lock:
            if rank not in self._tables:
                self._look_at[rank] = self._files.monotonic() + LOOK_SECONDS
                found = PeerTable.open(self._files, self._directory, self._names[rank], self._native)
                if found is not None:
                    self._tables[rank] = found
            return self._tables.get(rank)

    def check(self) -> None:
        """Forget the tables of ranks that have ended."""
        for rank, table in list(self._tables.items()):
            if not table.alive():
                with self._lock:
                    if self._tables.get(rank) is table:
                        del self._tables[rank]
                table.close()

    def held(self, pages: PromptPages, *, rank: int | None = None, own: bool = True) -> dict[str, int]:
        """By group the chunks of a prompt, as bits, that GPUs hold. ``rank`` and ``own`` as in ``longest``."""
        joined, order = pages.joined_hashes(pages.chunks), self._asked(rank, own)
        found = {}
        for group in self._groups:
            by_rank = self._held(group.name, group.need.kind, joined, order)
            found[group.name] = functools.reduce(operator.or_, (bits for bits, _, _ in by_rank.values()), 0)
        return found

    def longest(
        self, pages: PromptPages, *, first: int = 0, leave: int = 0, rank: int | None = None,
        own: bool = True,
    ) -> RankPlan:  # fmt: skip
        """The longest prefix of a prompt that the ranks, and the store as its last ``look`` found it, hold together.

        ``first``: chunks that the engine has. ``leave``: tokens at the end that it computes in any case. ``rank``:
        the one that will load; those that it reaches are asked, its own GPU first if ``own``. A page comes from a GPU
        if one has it, and of GPUs from the one that has most. Takes no lock and touches no disk; pages that come from
        the store are held.
        """
        size = self._layout.page_tokens
        chunks = max(0, min(pages.chunks, (pages.tokens - leave) // size))
        joined = pages.joined_hashes(chunks)
        order = self._asked(rank, own)
        held = {group.name: self._held(group.name, group.need.kind, joined, order) for group in self._groups}
        needs = {group.name: group.need.chunks(size) for group in self._groups}
        good = {name: pages.stored[name] & span(0, chunks) for name in needs}
        for name, by_rank in held.items():
            for bits, _, _ in by_rank.values():
                good[name] |= bits
        empty = RankPlan(self._namespace, chunks * size, size, min(first, chunks), needs, {}, {})
        end = empty.restorable(good)
        if end <= first:
            return RankPlan(self._namespace, first * size, size, first, needs, {}, dict.fromkeys(needs, 0))
        plan = RankPlan(self._namespace, end * size, size, first, needs, {}, {})
        peers, stored = _assign(plan, held, rank)
        match = None
        if any(stored.values()):
            starts = {name: members(bits)[0] for name, bits in stored.items() if bits}
            match = pages.select(starts, end)
        return RankPlan(self._namespace, end * size, size, first, needs, peers, stored, match)

    def _asked(self, rank: int | None, own: bool) -> list[int]:
        """The ranks to ask, ``rank`` first."""
        if rank is None:
            return list(range(self.ranks))
        table = self.table(rank)
        reached = table.reached() if table is not None else 0
        reached &= -1 if own else ~(1 << rank)
        return sorted((one for one in range(self.ranks) if reached >> one & 1), key=lambda one: one != rank)

    def _held(
        self, group: str, kind: str, joined: bytes, order: Sequence[int]
    ) -> dict[int, tuple[int, PeerTable, Found]]:
        """By rank: the chunks that it holds, as bits, its table and their entries."""
        held: dict[int, tuple[int, PeerTable, Found]] = {}
        for rank in order:
            table = self.table(rank)
            if table is not None and joined:
                found = table.held(group, joined, MISSES_MAX if kind == "all" else len(joined))
                bits = _bits(found.entries)
                if bits:
                    held[rank] = bits, table, found
        return held

    def close(self) -> None:
        with self._lock:
            tables, self._tables = list(self._tables.values()), {}
        for table in tables:
            table.close()


def _bits(entries: Sequence[int]) -> int:
    """The places of entries, as bits."""
    return int("".join("0" if entry == NONE else "1" for entry in reversed(entries)) or "0", 2)


def _assign(
    plan: RankPlan, held: Mapping[str, Mapping[int, tuple[int, PeerTable, Found]]], own: int | None
) -> tuple[dict[int, PeerPages], dict[str, int]]:
    """A source for each page of a plan: what comes from each rank, and the rest, which comes from the store."""
    taken: dict[int, dict[str, tuple[Sequence[int], Found]]] = {}
    instances: dict[int, str] = {}
    stored: dict[str, int] = {}
    for group, by_rank in held.items():
        chunks = plan.needed(group)
        left = span(chunks.start, len(chunks))
        order = sorted(by_rank, key=lambda rank: (rank != own, -(by_rank[rank][0] & left).bit_count()))
        for rank in order:
            bits, table, found = by_rank[rank]
            if bits & left:
                mine = array("I", members(bits & left))
                entries = array("I", [found.entries[c] for c in mine])
                taken.setdefault(rank, {})[group] = mine, Found(entries, array("Q", [found.seqs[c] for c in mine]))
                instances[rank] = table.instance
                left &= ~bits
        stored[group] = left
    return {rank: PeerPages(instances[rank], groups) for rank, groups in taken.items()}, stored
