"""A load from the GPUs of peers: gathered over the link into scratch, checked there, and only then scattered.

As with loads from the store (``kvfs.gpu.load``), all of it is enqueued and the host does not wait in between. Two
things make the bytes right: the sums of their leaves, which the peer published, and the entry of each page, which must
still be the same when its copies have ended, since a peer retracts pages before it reuses their units. A lease keeps a
peer that asks from reusing them meanwhile. A page that fails either check does not count as loaded.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvfs.gpu.device import Event
from kvfs.gpu.gpu_io import GpuPools
from kvfs.gpu.lane import ALIGN, BATCHES, CommandBuffer, DmaLane
from kvfs.kernels.work_list import GRANULE_WORDS, HEAD_WORDS, WORD, granule_words, pack
from kvfs.native.shared_prefixes import Found
from kvfs.pages.chunk_set import bits_of
from kvfs.ranks.geometry import granule_tokens, prompt_tokens, sub_of
from kvfs.ranks.memory import PeerGroup
from kvfs.ranks.plan import PeerPages
from kvfs.ranks.shared_files import PeerTable
from kvfs.transfer.control import TransferControl
from kvfs.transfer.workers import Attached
from kvfs.types import PageOutcome

#: Of the first batch, and of the last ones at least: the link is idle while the host prepares the first one, and
#: nothing hides the kernels of the last one.
FIRST_BYTES = 32 << 20
FLAG = 4  # bytes
POLL_SECONDS = 20e-6
LEASE_SECONDS = 5.0  # at most: a pull of 32k tokens takes 12 ms


class Source(NamedTuple):
    """A peer that can be pulled from."""

    table: PeerTable
    groups: Mapping[str, PeerGroup]


@dataclass
class _Sent:
    """Pages of one group of one peer whose copies are enqueued."""

    source: Source
    attached: Attached
    chunks: list[int]
    found: Found
    flags: int = 0  # offset of the first one's flag in the command buffer, and where they come back
    back: int = 0
    enqueued: int = 0  # how many of them


@dataclass
class Pull:
    """One pull. ``enqueue``, then ``ended`` until it is true, then ``settle``; one thread at a time."""

    pools: GpuPools
    lane: DmaLane
    transfer: TransferControl
    units: Mapping[int, array[int]]  # of this rank, by group number
    first_token: int = 0
    _commands: CommandBuffer | None = None
    _sent: list[_Sent] = field(default_factory=list)
    _leases: list[tuple[PeerTable, tuple[int, int]]] = field(default_factory=list)
    _end: Event | None = None

    def enqueue(self, peers: Sequence[tuple[Source, PeerPages]], pause: Callable[[], bool]) -> None:
        """Everything. ``pause``: called before each batch; whether to go on. CudaError: nothing is under way then."""
        groups = [one for source, pages in peers for one in self._leased(source, pages)]
        if not groups:
            return
        commands = self._commands = self.lane.commands(sum(map(self._room, groups)))
        kernels = self.lane.kernels
        try:
            own = {number: commands.put(self.units[number]) for number in {s.attached.number for s in groups}}
            for sent in groups:
                sent.flags = commands.put(bytes(FLAG * len(sent.chunks)))
            commands.send(kernels, min(own.values()))
            for sent in groups:
                sent.back = commands.room(FLAG * len(sent.chunks))
                self._sent.append(sent)
                if not self._send(sent, commands, own[sent.attached.number], pause):
                    break
            for sent in self._sent:
                commands.fetch(kernels, sent.flags, FLAG * len(sent.chunks), into=sent.back)
            self._end = kernels.record()
        except BaseException:
            self.lane.quiet()
            self._sent.clear()
            raise

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
        sent = []
        for group, (chunks, found) in pages.groups.items():
            good = source.table.unchanged(group, found)
            if not all(good):
                kept = [i for i, fine in enumerate(good) if fine]
                self.pools.counters.add("pages_retracted", len(good) - len(kept))
                chunks = [chunks[i] for i in kept]
                found = Found(array("I", [found.entries[i] for i in kept]), array("Q", [found.seqs[i] for i in kept]))
            if chunks:
                sent.append(_Sent(source, self.pools.attached[group], list(chunks), found))
        return sent

    def _room(self, sent: _Sent) -> int:
        """Room in the command buffer, at most."""
        a, n = sent.attached, len(sent.chunks)
        page = sent.source.groups[a.group.name].page
        lists = 2 * GRANULE_WORDS * a.group.granules * WORD
        each = page.units * WORD + page.leaves * WORD + lists
        batches = 6 + -(-n // max(1, self.lane.nbytes // BATCHES // a.page_bytes))
        return (
            n * each
            + batches * (2 * HEAD_WORDS * WORD + 6 * ALIGN)
            + 2 * FLAG * n
            + 4 * ALIGN
            + len(self.units[a.number]) * WORD
        )

    def _send(self, sent: _Sent, commands: CommandBuffer, own: int, pause: Callable[[], bool]) -> bool:
        """Enqueue the batches of a group; False: the pull ends before the last one."""
        a, table = sent.attached, sent.source.table
        peer = sent.source.groups[a.group.name]
        most = max(1, self.lane.nbytes // BATCHES // a.page_bytes)
        least = max(1, min(most, FIRST_BYTES // a.page_bytes))
        first, size, left = 0, least, len(sent.chunks)
        while left:
            if not pause():
                return False
            now = min(size, left)
            found = Found(sent.found.entries[first : first + now], sent.found.seqs[first : first + now])
            units, leaves, good = table.collect(a.group.name, found, peer.units)
            if all(good):
                self._batch(sent, first, now, (units, leaves), peer, commands, own, last=now == left)
            else:  # retracted since it was leased, or the peer's table is wrong: the engine computes what follows
                self.pools.counters.add("pages_retracted", good.count(0))
                sent.chunks, sent.found = sent.chunks[:first], _cut(sent.found, first)
                return True
            first, left = first + now, left - now
            sent.enqueued = first
            size = most if left > most else max(least, left * 3 // 4)
        return True

    def _batch(
        self, sent: _Sent, first: int, count: int, entry: tuple[array[int], bytearray], peer: PeerGroup,
        commands: CommandBuffer, own: int, *, last: bool,
    ) -> None:  # fmt: skip
        pools, lane, a = self.pools, self.lane, sent.attached
        shape, granules = pools.shapes[a.number], a.group.granules
        chunks = sent.chunks[first : first + count]
        units, leaves = entry
        step = shape.layers * shape.leaf_bytes
        scratch = lane.slice(count * a.page_bytes, lane.dma)
        assert scratch is not None, "a batch of a pull was not finished"
        table = commands.put(leaves)
        ids = commands.put(array("q", units))
        mine = self.units[a.number]
        words = granule_words(0, step, prompt_tokens(a, chunks), range(first, first + count), granules)
        work = commands.put(pack(
            shape, words, scratch=scratch.address, unit_ids=commands.address(own), units=len(mine),
            flags=commands.address(sent.flags), leaves=commands.address(table),
            buffers=pools.tables[a.number].address, first_token=self.first_token if a.group.states > 1 else 0,
        ))  # fmt: skip
        scatter = commands.work(work, commands.words(own, len(mine)))
        tokens = granule_tokens(a, peer.page, [sub_of(peer.page, chunk) for chunk in chunks])
        words = granule_words(0, step, tokens, [0] * count, granules)
        work = commands.put(pack(
            peer.shape, words, scratch=scratch.address, unit_ids=commands.address(ids), units=len(units), flags=0,
            leaves=0, buffers=peer.table.address,
        ))  # fmt: skip
        calls = commands.send(lane.dma, table)
        lane.dma.pull(commands.work(work, commands.words(ids, len(units))), peer.shape)
        lane.dma.record(scratch.arrived)
        lane.kernels.after(scratch.arrived)
        lane.kernels.scatter(scatter, shape, check=True, quick=last)
        lane.finished(scratch, lane.kernels, calls + 8)

    def ended(self) -> bool:
        """Whether all that was enqueued has been done."""
        return self._end is None or self._end.query()

    def settle(self) -> None:
        """Count the pages that are right; release the leases and the command buffer. When it has ended."""
        counters, pages, nbytes = self.pools.counters, 0, 0
        for sent in self._sent:
            a, count = sent.attached, sent.enqueued
            same, flagged = sent.source.table.unchanged(a.group.name, sent.found), self._flagged(sent)
            chunks = sent.chunks[:count]
            if not all(same[:count]) or flagged:
                bad = [c for i, c in enumerate(chunks) if not same[i] or i in flagged]
                counters.add("pages_retracted", same[:count].count(0))
                counters.add("pages_pull_corrupt", sum(same[i] for i in flagged if i < count))
                self.transfer.note("unreadable")
                self.transfer.settle(a.number, bits_of(bad), PageOutcome.UNREADABLE)
                chunks = [c for i, c in enumerate(chunks) if same[i] and i not in flagged]
            pages, nbytes = pages + len(chunks), nbytes + len(chunks) * a.page_bytes
            self.transfer.settle(a.number, bits_of(chunks), PageOutcome.LOADED)
        counters.add("pages_pulled", pages)
        counters.add("bytes_pulled", nbytes)
        self.release()

    def _flagged(self, sent: _Sent) -> set[int]:
        """Pages whose sums differ, by their place among those that were sent."""
        assert self._commands is not None
        flags = bytes(self._commands.back(sent.back, FLAG * len(sent.chunks)))
        return {i // FLAG for i, byte in enumerate(flags) if byte} if any(flags) else set()

    def release(self) -> None:
        """Nothing is under way any more."""
        while self._leases:
            table, lease = self._leases.pop()
            table.end_lease(lease)
        if self._commands is not None:
            self.lane.give_back(self._commands)
            self._commands = None


def _cut(found: Found, count: int) -> Found:
    return Found(found.entries[:count], found.seqs[:count])


def gathers(pools: GpuPools, source: Source, lane: DmaLane) -> None:
    """Compile and run the kernels of pulls from this peer once, on no granules. Any error of a compiler."""
    for name, peer in source.groups.items():
        shape, buffers = peer.shape, peer.table
        commands = lane.commands(1 << 16)
        try:
            work = commands.put(pack(
                shape, array("q"), scratch=0, unit_ids=0, units=0, flags=0, leaves=0, buffers=buffers.address
            ))  # fmt: skip
            commands.send(lane.dma, work)
            lane.dma.pull(commands.work(work, commands.words(0, 0)), shape)
            a = pools.attached[name]
            mine, table = pools.shapes[a.number], pools.tables[a.number]
            work = commands.put(pack(
                mine, array("q"), scratch=0, unit_ids=0, units=0, flags=0, leaves=0, buffers=table.address
            ))  # fmt: skip
            commands.send(lane.kernels, work)
            for quick in (False, True):
                lane.kernels.scatter(commands.work(work, commands.words(0, 0)), mine, check=True, quick=quick)
        finally:
            lane.quiet()
            lane.give_back(commands)
