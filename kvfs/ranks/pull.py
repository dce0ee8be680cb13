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
from kvfs.native.library import PullPages
from kvfs.native.shared_prefixes import Found
from kvfs.pages.chunk_set import bits_of
from kvfs.ranks.memory import PeerGroup
from kvfs.ranks.plan import PeerPages
from kvfs.ranks.shared_files import PeerTable
from kvfs.transfer.control import TransferControl
from kvfs.transfer.units import UnitIds
from kvfs.transfer.workers import Attached
from kvfs.types import PageOutcome

#: Of a batch: three quarters of what is left, but not less and not more. The host prepares the next one while a large
#: one is copied, and nothing hides the sums of the last one.
LAST_BYTES, BATCH_BYTES = 64 << 20, 256 << 20
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
    chunks: array[int]  # u32
    found: Found
    whole: int  # of the pages, the first ones: the others move in part
    flags: int = 0  # offset of the first one's flag in the command buffer, and where they come back
    back: int = 0
    enqueued: int = 0  # how many of them

    def bits(self, numbers: Collection[int]) -> int:
        """The chunks of pages with these numbers, as bits."""
        if isinstance(numbers, range) and self.whole == len(self.chunks):
            return bits_of(self.chunks[: len(numbers)])
        return bits_of(sorted(self.chunks[i] for i in numbers if i < self.enqueued))


@dataclass
class Pull:
    """One pull. ``enqueue``, then ``ended`` until it is true, then ``settle``; one thread at a time."""

    pools: GpuPools
    tables: Mapping[int, Memory]  # unit tables of this rank, by group number
    lane: Lane
    transfer: TransferControl
    units: Mapping[int, UnitIds]  # of this rank, by group number
    first_token: int = 0
    _commands: CommandBuffer | None = None
    _sent: list[_Sent] = field(default_factory=list)
    _leases: list[tuple[PeerTable, tuple[int, int]]] = field(default_factory=list)
    _event: Event | None = None
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
            commands.send(self.lane.dma, min(own.values()))
            for sent in groups:
                sent.back = commands.room(FLAG * len(sent.chunks))
                self._sent.append(sent)
                if not self._send(sent, commands, own[sent.attached.number], pause):
                    break
            kernels.after(self.lane.dma.record(self._arrived()))  # also if no batch was sent
            for sent in self._sent:
                commands.fetch(kernels, sent.flags, FLAG * len(sent.chunks), into=sent.back)
            self._end = kernels.record()
        except BaseException:
            self.lane.wait()
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
        return [
            self._whole_first(source, self.pools.attached[group], _as_array(chunks), found)
            for group, (chunks, found) in pages.groups.items()
            if chunks
        ]

    def _whole_first(self, source: Source, a: Attached, chunks: array[int], found: Found) -> _Sent:
        """The pages of which every state moves before those of which the engine has some, or has no unit for some."""
        mine, first = self.units[a.number], self.first_token if a.group.states > 1 else 0
        if mine.complete and first <= chunks[0] * a.group.states:
            return _Sent(source, a, chunks, found, len(chunks))
        whole = [
            chunk * a.group.states >= first and min(mine[i] for i in a.device.unit_range(a.group, chunk)) >= 0
            for chunk in chunks
        ]
        order = sorted(range(len(chunks)), key=lambda i: not whole[i])
        return _Sent(source, a, array("I", [chunks[i] for i in order]), _some(found, order), sum(whole))

    def _room(self, sent: _Sent) -> int:
        """Room in the command buffer, at most."""
        a, n = sent.attached, len(sent.chunks)
        page = sent.source.groups[a.group.name].page
        each = page.units * WORD + page.leaves * WORD + 2 * GRANULE_WORDS * a.group.granules * WORD + 2 * FLAG
        batches = 8 + n * a.page_bytes // LAST_BYTES
        return n * each + batches * (2 * HEAD_WORDS * WORD + 4 * ALIGN) + len(self.units[a.number]) * WORD + 4 * ALIGN

    def _send(self, sent: _Sent, commands: CommandBuffer, own: int, pause: Callable[[], bool]) -> bool:
        """Enqueue the batches of a group; False: the pull ends before the last one."""
        a = sent.attached
        peer = sent.source.groups[a.group.name]
        first = 0
        while first < len(sent.chunks):
            if not pause():
                return False
            left = (sent.whole if first < sent.whole else len(sent.chunks)) - first
            wanted = max(LAST_BYTES, min(BATCH_BYTES, left * a.page_bytes * 3 // 4))
            now = min(left, max(1, wanted // a.page_bytes))
            done = self._batch(sent, range(first, first + now), peer, commands, own)
            first = sent.enqueued = first + done
            if done < now:  # retracted since it was found, or a wrong table: the engine computes what follows
                self.pools.counters.add("pages_retracted")
                sent.chunks, sent.found = sent.chunks[:first], _some(sent.found, range(first))
        return True

    def _batch(self, sent: _Sent, pages: range, peer: PeerGroup, commands: CommandBuffer, own: int) -> int:
        """Enqueue those of ``pages`` that are as they were found, until one that is not: how many."""
        pools, lane, a = self.pools, self.lane, sent.attached
        shape, granules, whole = pools.shapes[a.number], a.group.granules, pages.start < sent.whole
        moves, mine = peer.whole if whole else peer.some, self.units[a.number]
        ids = commands.room(len(pages) * peer.page.units * WORD)
        sums = commands.room(len(pages) * peer.page.leaves * WORD)
        work = commands.room((HEAD_WORDS + len(pages) * granules * GRANULE_WORDS) * WORD)
        first_word = work + HEAD_WORDS * WORD
        count = sent.source.table.pages(a.group.name).pull_list(
            PullPages(a.group.states, granules, a.group.granule_states, peer.units), sent.found, sent.chunks, pages,
            commands.host(ids), commands.host(sums), commands.host(first_word),
        )  # fmt: skip
        if not count:
            return 0
        flags, units = commands.address(sent.flags), count * peer.page.units
        commands.write(work, head(
            shape, count * granules, scratch=moves.table.address, unit_ids=commands.address(own), units=len(mine),
            flags=flags, leaves=commands.address(sums), buffers=self.tables[a.number].address,
            first_token=self.first_token if a.group.states > 1 else 0,
            source=(peer.shape.unit_tokens, commands.address(ids)),
        ))  # fmt: skip
        copies = checks = commands.work(work, commands.words(own, len(mine)))
        if not whole:  # what does not move cannot be summed here: sum what the peer has
            words = array("q", commands.words(first_word, count * granules * GRANULE_WORDS))
            words[1::GRANULE_WORDS] = words[0::GRANULE_WORDS]
            work = commands.put(pack(
                peer.shape, words, scratch=0, unit_ids=commands.address(ids), units=units, flags=flags,
                leaves=commands.address(sums), buffers=peer.table.address,
            ))  # fmt: skip
            checks = commands.work(work, commands.words(ids, units))
        calls = commands.send(lane.dma, ids)
        lane.dma.pull(copies, moves.tiles)
        lane.kernels.after(lane.dma.record(self._arrived()))
        last = pages.start + count == len(sent.chunks)
        lane.kernels.sum_units(checks, shape if whole else peer.shape, check=True, quick=last)
        lane.enqueued(lane.kernels, calls + len(moves.tiles) + 4)
        return count

    def _arrived(self) -> Event:
        """The event that the sums of a batch wait for; a wait that is enqueued is for the record before it."""
        if self._event is None:
            self._event = self.lane.dma.event()
        return self._event

    def ended(self) -> bool:
        """Whether all that was enqueued has been done."""
        return self._end is None or self._end.query()

    def settle(self) -> None:
        """Count the pages that are right; release the leases and the command buffer. When it has ended."""
        counters, pages, nbytes = self.pools.counters, 0, 0
        for sent in self._sent:
            a, count = sent.attached, sent.enqueued
            same, flagged = sent.source.table.unchanged(a.group.name, sent.found), self._flagged(sent)
            bad = {i for i in range(count) if not same[i]} | flagged if not all(same) or flagged else set()
            if bad:
                counters.add("pages_retracted", same[:count].count(0))
                counters.add("pages_pull_corrupt", sum(same[i] for i in flagged if i < count))
                self.transfer.note("unreadable")
                self.transfer.settle(a.number, sent.bits(bad), PageOutcome.UNREADABLE)
            good = sent.bits(range(count)) & ~sent.bits(bad)
            pages, nbytes = pages + good.bit_count(), nbytes + good.bit_count() * a.page_bytes
            self.transfer.settle(a.number, good, PageOutcome.LOADED)
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
