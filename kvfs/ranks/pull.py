"""A load from the GPUs of peers: cells are copied over the link into the units of this rank, and summed there.

As with loads from the store (``kvfs.gpu.load``), all of it is enqueued and the host does not wait in between. Two
things make the bytes right: the sums of their leaves, which the peer published, and the entry of each page, which must
still be the same when its copies have ended, since a peer retracts pages before it reuses their units. A lease keeps a
peer that asks from reusing them meanwhile. A page that fails either check does not count as loaded.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvfs.gpu.device import Event, Memory
from kvfs.gpu.gpu_io import GpuPools
from kvfs.gpu.lane import ALIGN, CommandBuffer, Lane
from kvfs.kernels.work_list import GRANULE_WORDS, HEAD_WORDS, WORD, head, pack
from kvfs.native.library import HeadWords, PullPages
from kvfs.native.shared_prefixes import Found
from kvfs.pages.chunk_set import bits_of
from kvfs.ranks.memory import PeerGroup
from kvfs.ranks.plan import PeerPages
from kvfs.ranks.shared_files import PeerTable
from kvfs.transfer.control import TransferControl
from kvfs.transfer.units import UnitIds
from kvfs.transfer.workers import Attached
from kvfs.types import PageOutcome

#: Of a batch: three quarters of what is left, but not less and not more. Its sums take less time than the copies of the
#: next one, and nothing hides those of the last one.
LAST_BYTES, BATCH_BYTES = 64 << 20, 256 << 20
FLAG = 4  # bytes
POLL_SECONDS = 20e-6
LEASE_SECONDS = 5.0  # at most: a pull of 32k tokens takes 12 ms


class Source(NamedTuple):
    """A peer that can be pulled from."""

    table: PeerTable
    groups: Mapping[str, PeerGroup]


class _Batch(NamedTuple):
    """Pages that one launch copies, and their work lists: offsets in the command buffer."""

    first: int  # number of the first page
    pages: int
    copies: int
    copies_end: int
    checks: int
    checks_end: int
    ids: int  # of the peer's units


@dataclass
class _Sent:
    """Pages of one group of one peer that a pull copies."""

    source: Source
    attached: Attached
    peer: PeerGroup
    chunks: array[int]  # u32
    found: Found
    whole: int  # of the pages, the first ones: the others move in part
    batches: list[_Batch] = field(default_factory=list)
    flags: int = 0  # offset of the first one's flag in the command buffer, where it comes back too
    enqueued: int = 0  # how many of them
    bits: int = 0  # these chunks, once everything is enqueued

    def of(self, numbers: Collection[int]) -> int:
        """The chunks of pages with these numbers, as bits."""
        if isinstance(numbers, range) and self.whole == len(self.chunks):
            return bits_of(self.chunks[: len(numbers)])
        return bits_of(sorted(self.chunks[i] for i in numbers))


@dataclass
class Pull:
    """One pull. ``enqueue``, then ``ended`` until it is true, then ``settle``; one thread at a time."""

    pools: GpuPools
    tables: Mapping[int, Memory]  # unit tables of this rank, by group number
    lane: Lane
    units: Mapping[int, UnitIds]  # of this rank, by group number
    first_token: int = 0
    nbytes: int = 0  # that are enqueued
    _own: dict[int, int] = field(default_factory=dict)  # where these units are in the command buffer
    _commands: CommandBuffer | None = None
    _sent: list[_Sent] = field(default_factory=list)
    _leases: list[tuple[PeerTable, tuple[int, int]]] = field(default_factory=list)
    _arrived: Event | None = None  # of the copies of a batch: a wait that is enqueued is for the record before it
    _ready: Event | None = None  # of the work lists of all batches but the first
    _end: Event | None = None
    _settled: bool = False

    def enqueue(self, peers: Sequence[tuple[Source, PeerPages]], pause: Callable[[], bool]) -> None:
        """Everything. ``pause``: called before each batch but the first; whether to go on.

        The copies of the first batch begin before the rest is prepared. CudaError: nothing is under way then.
        """
        groups = [one for source, pages in peers for one in self._leased(source, pages)]
        if not groups:
            return
        lane, commands = self.lane, self.lane.commands(sum(map(self._room, groups)))
        self._commands, self._arrived = commands, lane.event()
        try:
            for number in {sent.attached.number for sent in groups}:
                self._own[number] = commands.put(self.units[number])
            for sent in groups:
                sent.flags = commands.put(bytes(FLAG * len(sent.chunks)))
            self._prepare(groups[0], only_first=True)
            commands.send(lane.dma, 0)
            begun = bool(groups[0].batches)
            if begun:
                self._copy(groups[0], groups[0].batches[0])
            rest = commands.used
            for sent in groups:
                self._prepare(sent)
            if commands.used > rest:  # beside the copies: on their stream it would be between two of them
                commands.send(lane.kernels, rest)
                self._ready = lane.kernels.record(lane.event())
                lane.dma.after(self._ready)
            self._send(groups, begun, pause)
            first, last = groups[0], groups[-1]
            lane.kernels.after(lane.dma.record(self._arrived))  # also if no batch was sent
            commands.fetch(
                lane.kernels, first.flags, last.flags + FLAG * len(last.chunks) - first.flags, into=first.flags
            )
            self._end = lane.kernels.record(lane.event())
        except BaseException:
            self.lane.wait()
            self._sent.clear()
            raise
        for sent in self._sent:
            sent.bits = sent.of(range(sent.enqueued))
            self.nbytes += sent.enqueued * sent.attached.page_bytes

    def _leased(self, source: Source, pages: PeerPages) -> list[_Sent]:
        """What this rank may read of a peer, under a lease."""
        if source.table.instance != pages.instance or not source.table.alive():
            self.pools.counters.add("pulls_without_peer")
            return []
        lease = source.table.lease({g: found for g, (_, found) in pages.groups.items()}, LEASE_SECONDS)
        if lease is None:
            self.pools.counters.add("pulls_without_lease")
            return []
        self._leases.append((source.table, lease))
        return [
            self._whole_first(source, self.pools.attached[group], _as_array(chunks), found)
            for group, (chunks, found) in pages.groups.items()
            if chunks
        ]

    def _whole_first(self, source: Source, a: Attached, chunks: array[int], found: Found) -> _Sent:
        """The pages of which every state moves before those of which the engine has some, or has no unit for some."""
        mine, first = self.units[a.number], self.first_token if a.group.states > 1 else 0
        peer = source.groups[a.group.name]
        if mine.complete and first <= chunks[0] * a.group.states:
            return _Sent(source, a, peer, chunks, found, len(chunks))
        whole = [
            chunk * a.group.states >= first and min(mine[i] for i in a.device.unit_range(a.group, chunk)) >= 0
            for chunk in chunks
        ]
        order = sorted(range(len(chunks)), key=lambda i: not whole[i])
        return _Sent(source, a, peer, array("I", [chunks[i] for i in order]), _some(found, order), sum(whole))

    def _room(self, sent: _Sent) -> int:
        """Room in the command buffer, at most."""
        a, n, page = sent.attached, len(sent.chunks), sent.peer.page
        each = page.units * WORD + page.leaves * WORD + 2 * GRANULE_WORDS * a.group.granules * WORD + FLAG
        batches = 8 + n * a.page_bytes // LAST_BYTES
        return n * each + batches * 2 * (HEAD_WORDS * WORD + 2 * ALIGN) + len(self.units[a.number]) * WORD + 8 * ALIGN

    def _prepare(self, sent: _Sent, *, only_first: bool = False) -> None:
        """The work lists of the batches that have none yet, or of the first one."""
        done = sum(batch.pages for batch in sent.batches)
        for begin, end in ((0, sent.whole), (sent.whole, len(sent.chunks))):
            begin, end = max(begin, done), min(end, len(sent.chunks))
            if begin < end:
                sizes = _batches(end - begin, sent.attached.page_bytes)
                self._list(sent, begin, sizes[:1] if only_first else sizes)
                if only_first:
                    return

    def _list(self, sent: _Sent, first: int, sizes: array[int]) -> None:
        """The work lists of batches of so many pages, of those that are as they were found until one that is not."""
        commands, a, peer, n = self._commands, sent.attached, sent.peer, sum(sizes)
        assert commands is not None
        shape, granules, whole = self.pools.shapes[a.number], a.group.granules, first < sent.whole
        moves, mine = peer.whole if whole else peer.some, self.units[a.number]
        ids, sums = commands.room(n * peer.page.units * WORD), commands.room(n * peer.page.leaves * WORD)
        ends = [HEAD_WORDS + pages * granules * GRANULE_WORDS for pages in sizes]
        at = commands.room((sum(ends) + len(ends)) * WORD)
        count = sent.source.table.pages(a.group.name).pull_list(
            PullPages(a.group.states, granules, a.group.granule_states, peer.units, HeadWords.from_buffer_copy(head(
                shape, 0, scratch=moves.table.address, unit_ids=commands.address(self._own[a.number]), units=len(mine),
                flags=commands.address(sent.flags), leaves=commands.address(sums),
                buffers=self.tables[a.number].address, first_token=self.first_token if a.group.states > 1 else 0,
                source=(peer.shape.unit_tokens, commands.address(ids)),
            ))), sent.found, sent.chunks, first, sizes, commands.host(ids), commands.host(sums), commands.host(at),
        )  # fmt: skip
        done = 0
        for pages, words in zip(sizes, ends, strict=True):
            now = min(pages, count - done)
            if now > 0:
                end = at + (HEAD_WORDS + now * granules * GRANULE_WORDS) * WORD
                batch = _Batch(first + done, now, at, end, at, end, ids)
                if not whole:  # what does not move cannot be summed here: sum what the peer has
                    batch = self._checks_there(sent, batch, sums + done * peer.page.leaves * WORD)
                sent.batches.append(batch)
            done, at = done + now, at + (words + words % 2) * WORD
        if count < n:  # retracted since it was found, or a wrong table: the engine computes what follows
            self.pools.counters.add("pages_retracted")
            sent.chunks, sent.found = sent.chunks[: first + count], _some(sent.found, range(first + count))

    def _checks_there(self, sent: _Sent, batch: _Batch, sums: int) -> _Batch:
        """With a work list of its own for the sums, of the same granules where the peer has them."""
        commands, peer = self._commands, sent.peer
        assert commands is not None
        begin = batch.copies + HEAD_WORDS * WORD
        words = array("q", commands.words(begin, (batch.copies_end - begin) // WORD))
        words[1::GRANULE_WORDS] = words[0::GRANULE_WORDS]
        checks = commands.put(pack(
            peer.shape, words, scratch=0, unit_ids=commands.address(batch.ids), units=batch.pages * peer.page.units,
            flags=commands.address(sent.flags), leaves=commands.address(sums), buffers=peer.table.address,
        ))  # fmt: skip
        return batch._replace(checks=checks, checks_end=commands.used)

    def _send(self, groups: Sequence[_Sent], begun: bool, pause: Callable[[], bool]) -> None:
        """Enqueue all batches; ``begun``: the copies of the first one are. Where ``pause`` is false, the pull ends."""
        batches = [(sent, batch) for sent in groups for batch in sent.batches]
        for i, (sent, batch) in enumerate(batches):
            if i or not begun:
                if not pause():
                    return
                self._copy(sent, batch)
            self._check(sent, batch, last=i + 1 == len(batches))
            if not sent.enqueued:
                self._sent.append(sent)
            sent.enqueued += batch.pages

    def _copy(self, sent: _Sent, batch: _Batch) -> None:
        commands, lane, own = self._commands, self.lane, self._own[sent.attached.number]
        assert commands is not None
        work = commands.work(batch.copies, commands.words(own, len(self.units[sent.attached.number])), batch.copies_end)
        lane.dma.pull(work, (sent.peer.whole if batch.first < sent.whole else sent.peer.some).tiles)
        lane.dma.record(self._arrived)

    def _check(self, sent: _Sent, batch: _Batch, *, last: bool) -> None:
        commands, lane, number, peer = self._commands, self.lane, sent.attached.number, sent.peer
        assert commands is not None and self._arrived is not None
        whole = batch.first < sent.whole
        ids = (self._own[number], len(self.units[number])) if whole else (batch.ids, batch.pages * peer.page.units)
        lane.kernels.after(self._arrived)
        lane.kernels.sum_units(
            commands.work(batch.checks, commands.words(*ids), batch.checks_end),
            self.pools.shapes[number] if whole else peer.shape, check=True, quick=last,
        )  # fmt: skip
        lane.enqueued(lane.kernels, len(peer.whole.tiles) + 5)

    def ended(self) -> bool:
        """Whether all that was enqueued has been done."""
        end = self._end  # another thread may settle
        return end is None or end.query()

    def settle(self, transfer: TransferControl) -> None:
        """Count the pages that are right; release the leases and the command buffer. When it has ended.

        Again after an interrupt: what was broken off is done then.
        """
        if not self._settled:
            pages = nbytes = 0
            for sent in self._sent:
                a, bad = sent.attached, self._bad(sent)
                if bad:
                    transfer.note("unreadable")
                    transfer.settle(a.number, bad, PageOutcome.UNREADABLE)
                good = sent.bits & ~bad
                pages, nbytes = pages + good.bit_count(), nbytes + good.bit_count() * a.page_bytes
                transfer.settle(a.number, good, PageOutcome.LOADED)
            self.pools.counters.add("pages_pulled", pages)
            self.pools.counters.add("bytes_pulled", nbytes)
            self._settled = True
        self.release()

    def outcomes(self) -> dict[PageOutcome, dict[int, int]]:
        """What ``settle`` will most likely record."""
        found: dict[int, int] = {}
        for sent in self._sent:
            found[sent.attached.number] = found.get(sent.attached.number, 0) | sent.bits
        return {PageOutcome.LOADED: found} if found else {}

    def _bad(self, sent: _Sent) -> int:
        """Pages that were retracted, or whose sums differ, as bits."""
        assert self._commands is not None
        table, count = sent.source.table.pages(sent.attached.group.name), sent.enqueued
        good = table.unchanged(sent.found, count, self._commands.host(sent.flags))
        if good is None:
            return 0
        same = table.unchanged(sent.found, count) or bytes([1]) * count
        corrupt = sum(same[i] and not good[i] for i in range(count))
        self.pools.counters.add("pages_retracted", same.count(0))
        self.pools.counters.add("pages_pull_corrupt", corrupt)
        return sent.of([i for i in range(count) if not good[i]])

    def abandon(self) -> None:
        """No page counts: it is not known what has been copied."""
        self._sent.clear()
        self.release()

    def release(self) -> None:
        """Nothing is under way any more."""
        while self._leases:
            table, lease = self._leases.pop()
            table.end_lease(lease)
        commands, self._commands = self._commands, None
        if commands is not None:
            self.lane.give_back(commands)
        for event in (self._arrived, self._ready, self._end):
            if event is not None:
                self.lane.reuse(event)
        self._arrived = self._ready = self._end = None


def _batches(pages: int, page_bytes: int) -> array[int]:
    """Pages of each batch."""
    least, most, sizes = max(1, LAST_BYTES // page_bytes), max(1, BATCH_BYTES // page_bytes), array("I")
    while pages:
        sizes.append(min(pages, max(least, min(most, pages * 3 // 4))))
        pages -= sizes[-1]
    return sizes


def _as_array(chunks: Sequence[int]) -> array[int]:
    return chunks if isinstance(chunks, array) else array("I", chunks)


def _some(found: Found, numbers: Sequence[int]) -> Found:
    entries, seqs = found
    return Found(array("I", [entries[i] for i in numbers]), array("Q", [seqs[i] for i in numbers]))


def prepare(pools: GpuPools, tables: Mapping[int, Memory], source: Source, lane: Lane) -> None:
    """Compile and run the kernels of pulls from this peer once, on no granules. Any error of a compiler."""
    for name, peer in source.groups.items():
        a = pools.attached[name]
        mine, table = pools.shapes[a.number], tables[a.number]
        commands = lane.commands(1 << 16)
        try:
            for shape, buffers in ((mine, table), (peer.shape, peer.table)):
                work = commands.put(pack(
                    shape, array("q"), scratch=0, unit_ids=0, units=0, flags=0, leaves=0, buffers=buffers.address,
                    source=(1, 0),
                ))  # fmt: skip
                commands.send(lane.dma, work)
                none = commands.work(work, commands.words(0, 0))
                for moves in (peer.whole, peer.some):
                    lane.dma.pull(none, moves.tiles)
                lane.kernels.after(lane.dma.record())
                for quick in (False, True):
                    lane.kernels.sum_units(none, shape, check=True, quick=quick)
        finally:
            lane.wait()
            lane.give_back(commands)
