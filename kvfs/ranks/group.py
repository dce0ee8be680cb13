"""RankGroup: what one rank publishes of its GPU, and what it pulls from the GPUs of others."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvfs.errors import ConfigError
from kvfs.gpu.gpu_io import GpuIO, GpuPools
from kvfs.gpu.lane import Lane
from kvfs.kernels.driver import CudaError
from kvfs.kernels.unit_table import BUFFERS_MAX, sums_in_units, unit_table
from kvfs.lookup.prompt_pages import PromptPages
from kvfs.native.shared_prefixes import Found
from kvfs.pages.chunk_set import bits_of, members, span
from kvfs.ranks.geometry import page_of
from kvfs.ranks.memory import PeerGroup, PeerMemory, describe, peer_group
from kvfs.ranks.plan import PeerPages, RankPlan, RankTables, native_library, table_name
from kvfs.ranks.publish import Publisher
from kvfs.ranks.pull import POLL_SECONDS, Pull, Source, prepare
from kvfs.ranks.shared_files import DIRECTORY, OwnTable, PeerTable
from kvfs.ranks.tokens import TokenCopies, TokenCopy, checked_slots, token_slots
from kvfs.transfer.control import OnDone, Outcomes, TransferControl, TransferTask
from kvfs.transfer.handle import Transfer
from kvfs.transfer.unfinished import Unfinished
from kvfs.transfer.units import UnitIds, Units, check_enough, checked_units, to_load
from kvfs.transfer.workers import JobThreads, fail
from kvfs.types import PageDone, PageOutcome, Tier, TransferState

log = logging.getLogger("kvfs")
LOAD_SECONDS, PUBLISH_SECONDS, CLOSE_SECONDS = 30.0, 2.0, 10.0
QUEUE_MAX = 256  # pulls, and publications, that have not ended
CHECK_SECONDS = 1.0  # between two looks at who is alive
#: A pull of at most so many bytes is enqueued by the caller: to wake a thread takes longer than to enqueue it.
INLINE_BYTES = 5 << 30
HELPED_SECONDS = 1e-3  # between two looks at copies that a waiter looks at
#: A waiter asks without a pause once a link of so many bytes a second might have done it, for so long.
LINK_BYTES, SPIN_SECONDS = 450e9, 5e-4


class RankGroup:
    """One of ``ranks`` ranks of a host that hold the same parts of one model's pages. Any thread may use it.

    ``io``: its attached buffers, on a GPU. ``rank``: 0 to ranks - 1, one process for each. ``name``: separates groups
    that would otherwise be one. ``directory``: of a memory file system that all ranks see.

    Close it before ``io``. A forked child must not use it. Raises ConfigError.
    """

    def __init__(
        self, io: GpuIO, rank: int, ranks: int, *, name: str = "", directory: str = DIRECTORY
    ) -> None:  # fmt: skip
        pools = getattr(io, "pools", None)
        if not isinstance(pools, GpuPools):
            raise ConfigError("ranks are for buffers on a GPU: attach the engine's buffers there")
        self.tables = RankTables(
            io.namespace, pools.layout, io.parts, ranks, name=name, directory=directory, files=pools.files
        )
        if type(rank) is not int or not 0 <= rank < ranks:
            raise ConfigError(f"rank is {rank!r}: pass 0 to {ranks - 1}")
        if not all(map(sums_in_units, pools.shapes.values())):
            raise ConfigError(
                "ranks need pages that the GPU can verify: Triton's kernels, leaves of 241 bytes or more, and at most "
                f"{BUFFERS_MAX} buffers of a group"
            )
        self.rank = rank
        self._io, self._pools, self._pid = io, pools, os.getpid()
        self._closed = False
        self._lock = threading.RLock()
        self._sources: dict[str, Source] = {}  # by instance
        self._memories: dict[str, PeerMemory] = {}
        self._refused: Counter[str] = Counter()  # instances whose memory cannot be reached
        self._check_at = 0.0
        with contextlib.ExitStack() as undo, pools.device.current():
            self._lane = Lane(pools.device, pinned_commands=True, urgent_copies=True)
            undo.callback(self._lane.close)
            sums = Lane(pools.device, pinned_commands=True)
            undo.callback(sums.close)
            pages = {name: (page_of(a), a.device.units) for name, a in pools.attached.items()}
            self.offers = True  # whether peers can open the memory of this rank
            own = self._own_table(pages, io, name, directory)
            undo.callback(own.close)
            self._unit_tables = {number: pools.upload(unit_table(shape)) for number, shape in pools.shapes.items()}
            self._publisher = Publisher(pools, sums, own, self._unit_tables)
            self._pulling = threading.Lock()  # who enqueues pulls
            self._tokens = TokenCopies(pools, self._lane)
            self._unfinished = Unfinished(pools.files.monotonic)
            self._pulls, self._publications = JobThreads("rank-pull", 1), JobThreads("rank-publish", 1)
            self._undo = undo.pop_all()
        self._own = own
        self._publications.put(self._look_around)

    def _own_table(self, pages: Mapping[str, Any], io: GpuIO, name: str, directory: str) -> OwnTable:
        try:
            text = describe(self._pools.device, self._pools.attached.values())
        except CudaError as exc:
            log.warning(
                "rank %d cannot offer its memory to others, who load from the store (%s): use plain allocations, "
                "without expandable_segments or a sleep mode", self.rank, exc,
            )  # fmt: skip
            self._pools.counters.add("ranks_without_handles")
            self.offers = False
            text = {"allocations": [], "buffers": {}}
        attached = list(self._pools.attached.values())
        slots = attached[0].device.units if token_slots(attached) else 0
        return OwnTable(
            self._pools.files, directory, table_name(io.namespace, io.parts, name, self.rank), native_library(), pages,
            text, slots,
        )  # fmt: skip

    # -- what this rank holds ----------------------------------------------------------------

    def publish(
        self, hashes: Sequence[bytes], units: Units, after: Any = None, *, first: int = 0,
        first_unit: int | Mapping[str, int] = 0,
    ) -> bool:  # fmt: skip
        """Peers may pull the chunks from ``first`` on, named by ``hashes`` (``PromptPages.hashes``), from ``units``.

        ``units``, ``first_unit`` and ``after`` as in ``GpuIO.save``. Returns at once; the GPU sums the pages once
        ``after`` has happened, and then they are found. What these units held before is retracted. False if too many
        publications wait: the pages are then not published. Raises ConfigError.
        """
        self._check_open()
        ids = checked_units(self._pools.attached, units, first_unit)
        self._publisher.retract(_from(self._pools, ids, first))
        if self._publications.waiting >= QUEUE_MAX:
            self._pools.counters.add("publications_declined")
            return False
        deadline = self._pools.files.monotonic() + PUBLISH_SECONDS
        self._publications.put(self._publisher.announce(hashes, ids, first, after, deadline))
        self._look_soon()
        return True

    def retract(self, units: Units, timeout: float = 0.0) -> bool:
        """No peer begins to read these units from now on. Call it before they are reused.

        True: none reads them any more. False: a pull may still do so, after ``timeout`` seconds; if they are written
        to now, it ends with a shorter prefix. Raises ConfigError.
        """
        self._check_open()
        entries = self._publisher.retract(dict(checked_units(self._pools.attached, units)))
        files = self._pools.files
        end = files.monotonic() + timeout
        while self._publisher.leased(entries):
            if files.monotonic() >= end:
                self._pools.counters.add("units_reused_under_lease")
                return False
            files.sleep(POLL_SECONDS)
        return True

    # -- what peers hold ---------------------------------------------------------------------

    def longest(self, pages: PromptPages, *, first: int = 0, leave: int = 0) -> RankPlan:
        """The longest prefix that this GPU, its peers and the store hold (``RankTables.longest``)."""
        self._check_open()
        return self.tables.longest(pages, first=first, leave=leave, rank=self.rank)

    def load(
        self, plan: RankPlan, units: Units, after: Any = None, deadline: float = LOAD_SECONDS, first_token: int = 0, *,
        first_unit: int | Mapping[str, int] = 0, on_done: OnDone = None,
    ) -> Transfer:  # fmt: skip
        """Load the pages of a plan into ``units``, each from its source. Arguments and result as in ``GpuIO.load``.

        A page that a peer has retracted, or that does not verify, is not loaded, and the result is shorter.
        """
        self._check_open()
        if plan.namespace != self._pools.namespace:
            raise ConfigError("this plan is of another namespace: use the one that is attached")
        ids = checked_units(self._pools.attached, units, first_unit)
        wanted = {}
        for name, a in self._pools.attached.items():
            mine, chunks = ids.get(a.number, UnitIds("q")), plan.needed(name)
            check_enough(a, mine, chunks)
            wanted[name] = bits_of(chunks if mine.complete else to_load(a, mine, chunks))
        job = _Load(self, plan, ids, wanted, after, first_token)
        numbers = {name: a.number for name, a in self._pools.attached.items()}
        groups = {a.number: (a.group.name, a.group.layers, a.page_bytes) for a in self._pools.attached.values()}
        task = TransferTask(
            "load", {numbers[name]: bits for name, bits in wanted.items()}, groups,
            self._pools.files.monotonic() + deadline, job.summary, None, on_done,
        )  # fmt: skip
        begun = job.begin()  # before the rest, which is done while the GPU copies
        transfer = job.transfer = TransferControl(task, self._forget)
        handle = Transfer(transfer)
        with self._lock:
            reason = "closed" if self._closed else "busy" if len(self._unfinished) >= QUEUE_MAX else ""
            if not reason:
                self._unfinished.add(transfer)
        if reason:
            transfer.stop(reason)
        if reason and not begun:
            transfer.end()
            return handle
        job.go_on(begun, deadline)
        self._look_soon()
        return handle

    def copy_tokens(self, source_ranks: Any, source_slots: Any, target_slots: Any) -> TokenCopy | None:
        """Copy single tokens, each from a slot of a rank into a slot of this one: all layers with one launch.

        For engines of token slots whose router decides by token (LightLLM's ``kv_trans_for_dp``). What it copies is
        not verified, by design, as there: no sum covers a token. The sources hold the slots until this returns. Then
        a lease holds them until the copies have ended: a source calls ``retract`` before it reuses slots, and waits,
        or the tokens do not count (``TokenCopy.arrived``). The own engine does not read the targets before. Ordered
        behind nothing: call it when all are written. None, and nothing moves, if a rank is not reached, or if too many
        copies are under way or leases taken. Raises ConfigError, also for slots that do not exist.
        """
        self._check_open()
        a = self._tokens.check()
        targets = checked_slots(target_slots, -1, "target_slots")
        ranks = checked_slots(source_ranks, len(targets), "source_ranks")
        slots = checked_slots(source_slots, len(targets), "source_slots")
        if targets and max(targets) >= a.device.units:
            raise ConfigError(f"target_slots reach {max(targets)}: this rank has {a.device.units} slots")
        if ranks and max(ranks) >= self.tables.ranks:
            raise ConfigError(f"source_ranks reach {max(ranks)}: there are {self.tables.ranks} ranks")
        self._look_soon()
        with self._pulling, self._pools.device.current():
            sources = {}
            for rank in set(ranks):
                table = self.tables.table(rank)
                source = self._sources.get(table.instance) if table is not None and table.alive() else None
                if source is None:
                    self._pools.counters.add("pulls_without_peer")
                    return None
                sources[rank] = source
            copy = self._tokens.enqueue(sources, ranks, slots, targets)
        if copy is not None:
            self._pulls.put(copy.watch)
        return copy

    def _forget(self, transfer: TransferControl) -> None:
        self._unfinished.discard(transfer)
        self._pools.counters.add(f"pulls_{transfer.state.value}")
        if transfer.result is not None:  # the load from the store counts its own
            pulled = transfer.result.tiers.get(Tier.PEER, 0)
            self._pools.counters.loaded(self._pools.namespace, {Tier.PEER: pulled} if pulled else {})

    # -- peers -------------------------------------------------------------------------------

    def _look_soon(self) -> None:
        now = self._pools.files.monotonic()
        if now >= self._check_at and not self._publications.waiting:
            self._check_at = now + CHECK_SECONDS
            self._publications.put(self._look_around)

    def _look_around(self) -> None:
        """On the thread of publications: open the memory of ranks that have come, close that of those that ended."""
        self._pools.device.enter()
        self.tables.check()
        for rank in range(self.tables.ranks):
            table = self.tables.table(rank)
            if table is not None and table.instance not in self._sources and table.instance not in self._refused:
                self._open(rank, table)
                self._show_reached()  # not behind the next one: its kernels may have to be compiled
        self._show_reached()
        tables = {rank: self.tables.table(rank) for rank in range(self.tables.ranks)}
        alive = {table.instance for table in tables.values() if table is not None}
        self._refused = Counter({instance: 1 for instance in self._refused if instance in alive})
        for instance in [one for one in self._sources if one not in alive]:
            with self._pulling:  # what was enqueued before ends before the memory is unmapped
                del self._sources[instance]
            memory = self._memories.pop(instance, None)
            if memory is not None:
                self._lane.wait()
                memory.close()

    def _show_reached(self) -> None:
        tables = {rank: self.tables.table(rank) for rank in range(self.tables.ranks)}
        self._own.reach(sum(1 << rank for rank, t in tables.items() if t is not None and t.instance in self._sources))

    def _open(self, rank: int, table: PeerTable) -> None:
        pools = self._pools
        groups: Mapping[str, PeerGroup]
        try:
            if rank == self.rank:
                groups = {name: peer_group(pools, a, a.device) for name, a in pools.attached.items()}
            else:
                memory = PeerMemory(pools, table.description)
                self._memories[table.instance] = memory
                groups = memory.groups
            if any(table.sections[name].page != peer.page for name, peer in groups.items()):
                raise ConfigError("its table and its memory differ in the units of a page")
            if table.token_slots not in (0, *(peer.units for peer in groups.values())):
                raise ConfigError("its table and its memory differ in the number of token slots")
            source = Source(table, groups)
            with self._pulling:
                prepare(pools, self._unit_tables, source, self._lane)
            self._sources[table.instance] = source
        except Exception as exc:
            self._refused[table.instance] += 1
            pools.counters.add("peers_unreachable")
            log.warning("rank %d is not reached, its prefixes come from the store: %s", rank, exc)
            memory_or_none = self._memories.pop(table.instance, None)
            if memory_or_none is not None:
                memory_or_none.close()

    def source(self, instance: str) -> Source | None:
        """A peer whose memory is open."""
        return self._sources.get(instance)

    @property
    def peers(self) -> list[int]:
        """Ranks that can be pulled from now, this one not counted."""
        reached = self._own.reached
        return [rank for rank in range(self.tables.ranks) if rank != self.rank and reached >> rank & 1]

    def wait_for_peers(self, ranks: int, timeout: float) -> bool:
        """Wait until ``ranks`` peers can be pulled from; for tests and benchmarks."""
        end = self._pools.files.monotonic() + timeout
        while len(self.peers) < ranks:
            if self._pools.files.monotonic() >= end:
                return False
            self._publications.put(self._look_around)
            self._pools.files.sleep(0.05)
        return True

    # -- the end -----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise ConfigError("this RankGroup belongs to the parent process: make one in this process")
        if self._closed:
            raise ConfigError("this RankGroup was closed: make a new one")

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Retract everything, finish what was accepted, at most ``timeout`` seconds, and unmap the peers' memory."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        end = time.monotonic() + timeout
        self._publisher.close()
        self._own.close()  # peers see that this rank has ended
        for threads in (self._pulls, self._publications):
            threads.close(max(0.1, end - time.monotonic()))
        for transfer in self._unfinished.wait(0.0):
            transfer.stop("closed")
            transfer.try_end()
        self._unfinished.dismiss()
        with self._pulling, self._pools.device.current():  # a caller of ``load`` may be enqueuing
            self._lane.wait()
            self._tokens.reclaim()  # ends the leases
            for memory in self._memories.values():
                memory.close()
            self._memories.clear()
            self._sources.clear()
            self._undo.close()
        self.tables.close()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Load:
    """A load of a plan: pulls, and what comes from the store meanwhile."""

    transfer: TransferControl

    def __init__(
        self, group: RankGroup, plan: RankPlan, ids: dict[int, UnitIds], wanted: dict[str, int], after: Any,
        first_token: int,
    ) -> None:  # fmt: skip
        self._group, self._plan, self._ids, self._wanted = group, plan, ids, wanted
        self._after, self._first_token = after, first_token
        self._inner: Transfer | None = None
        self._inner_pages: list[PageDone] = []
        self._parts = 1  # that have not ended: the pull, and the load from the store
        self._pull: Pull | None = None
        self._error: Exception | None = None  # of enqueuing it
        self._finishing, self._settling = threading.Lock(), False
        self._helpers = 0  # waiters that look for the end
        self._moving = contextlib.ExitStack()

    # -- the store ---------------------------------------------------------------------------

    def start_store(self, deadline: float) -> None:
        """Begin the load of the pages that come from the store."""
        plan, pools = self._plan, self._group._pools
        stored = {g: bits & self._wanted.get(g, 0) for g, bits in plan.stored.items()}
        if plan.match is None or not any(stored.values()):
            return
        units = {}
        for name, a in pools.attached.items():
            ids = array("q", [-1]) * len(self._ids[a.number])
            for chunk in members(stored.get(name, 0)):
                for i in a.device.unit_range(a.group, chunk):
                    ids[i] = self._ids[a.number][i]
            units[name] = ids
        if not self._moving.enter_context(self.transfer.step(tell=False)):  # until that load has ended, too
            return
        self._parts = 2
        self._inner = self._group._io.load(
            plan.match,
            units,
            self._after,
            deadline,
            self._first_token,
            on_page=self._inner_pages.append,
            on_done=lambda _: self._end_part(),
        )

    # -- the pull ----------------------------------------------------------------------------

    def _peers(self) -> list[tuple[Source, PeerPages]]:
        found, groups = [], dict[str, tuple[Sequence[int], Found]]()
        for pages in self._plan.peers.values():
            source = self._group.source(pages.instance)
            if source is None:
                self._group._pools.counters.add("pulls_without_peer")
                continue
            groups = {}
            for name, (chunks, entries) in pages.groups.items():
                wanted = self._wanted.get(name, 0)
                if not bits_of(chunks) & ~wanted:
                    groups[name] = chunks, entries
                    continue
                keep = [i for i, chunk in enumerate(chunks) if wanted >> chunk & 1]
                if keep:
                    some = Found(
                        array("I", [entries.entries[i] for i in keep]), array("Q", [entries.seqs[i] for i in keep])
                    )
                    groups[name] = [chunks[i] for i in keep], some
            if groups:
                found.append((source, PeerPages(pages.instance, groups)))
        return found

    def _nbytes(self) -> int:
        attached = self._group._pools.attached
        return sum(
            len(chunks) * attached[name].page_bytes
            for pages in self._plan.peers.values()
            for name, (chunks, _) in pages.groups.items()
        )

    def _may_begin(self) -> bool:
        """Whether the caller's thread can enqueue the pull without waiting."""
        group = self._group
        query, due = getattr(self._after, "query", None), group._lane.due()
        if (query is not None and not query()) or (due is not None and not due.query()):
            return False
        return (
            self._nbytes() <= INLINE_BYTES and len(group._unfinished) < QUEUE_MAX
            and not group._pools.device.is_capturing()
        )  # fmt: skip

    def begin(self) -> bool:
        """Enqueue the pull on the caller's thread, before the transfer is there; False: that would have to wait."""
        group = self._group
        if not self._may_begin() or not group._pulling.acquire(blocking=False):
            return False
        try:
            if group._closed:
                return False
            with group._pools.device.current():
                self._enqueue(lambda: True)
        finally:
            group._pulling.release()
        return True

    def go_on(self, begun: bool, deadline: float) -> None:
        """Once the transfer is there: all that ``begin`` has left."""
        transfer, group = self.transfer, self._group
        if begun:
            transfer.enter(TransferState.LOADING)
            self._moving.enter_context(transfer.step(tell=False))
            if self._error is not None:
                fail(transfer, self._error)
            if self._pull is not None:
                transfer.expect(self._pull.outcomes())
        if not transfer.stopped:
            self.start_store(deadline)
        if begun and self._inner is None and not transfer.calls_back:
            transfer.done.help_with(self._help)
        with group._lock:  # no thread runs what is put behind the end
            closed = group._closed
            if not closed:
                group._pulls.put(self._finish if begun else self.run)
        if closed:
            self._finish()

    def run(self) -> None:
        """On the thread of pulls: all of it."""
        group, transfer = self._group, self.transfer
        clock, sleep = group._pools.files.monotonic, group._pools.files.sleep
        try:
            group._pools.device.enter()
            query = getattr(self._after, "query", None)
            while query is not None and not query():
                transfer.enter(TransferState.WAITING)
                if transfer.stopped or clock() >= transfer.deadline:
                    transfer.note("deadline")
                    break
                sleep(POLL_SECONDS)
            else:
                with group._pulling:
                    transfer.enter(TransferState.LOADING)
                    if self._may_go_on() and self._moving.enter_context(transfer.step(tell=False)):
                        self._enqueue(self._may_go_on)
                if self._error is not None:
                    fail(transfer, self._error)
        except Exception as exc:
            fail(transfer, exc)
        self._finish()

    def _may_go_on(self) -> bool:
        lane, files = self._group._lane, self._group._pools.files
        due = lane.due()
        while not self.transfer.stopped and files.monotonic() < self.transfer.deadline:
            if due is None or due.query():
                return True
            files.sleep(POLL_SECONDS)
        return False

    def _enqueue(self, pause: Any) -> None:
        """With the lock of pulls held, and the device entered."""
        group = self._group
        self._pull = Pull(group._pools, group._unit_tables, group._lane, self._ids, self._first_token)
        try:
            self._pull.enqueue(self._peers(), pause)
        except Exception as exc:
            self._error = exc

    # -- the end -----------------------------------------------------------------------------

    def _finish(self) -> None:
        """On the thread of pulls: wait for the copies, settle, and end with the store's part; unless a waiter does."""
        files, pull, done = self._group._pools.files, self._pull, self.transfer.done
        try:
            self._group._pools.device.enter()
            while pull is not None and not pull.ended() and not done.is_set():
                files.sleep(HELPED_SECONDS if self._helpers else POLL_SECONDS)
        except Exception as exc:
            self._settle_and_end(exc)
        else:
            self._settle_and_end()

    def _help(self, end: float | None) -> None:
        """On the thread of a waiter: ask for the end of the copies and finish, with no other thread to wake up.

        If an interrupt breaks that off, the thread of pulls, which comes to it in any case, does it again.
        """
        group, pull, clock = self._group, self._pull, time.monotonic
        if pull is None or group._pools.device.is_capturing():
            return
        self._helpers += 1  # one may be lost, or stay: then the thread of pulls looks more often, or more seldom
        try:
            with group._pools.device.current():
                patient = clock() + pull.nbytes / LINK_BYTES
                hasty = patient + SPIN_SECONDS
                while not self._ended(pull):
                    now = clock()
                    if self.transfer.done.is_set() or (end is not None and now >= end):
                        return
                    time.sleep(0.0 if patient <= now < hasty else POLL_SECONDS)
                self._settle_and_end()
        finally:
            self._helpers -= 1

    @staticmethod
    def _ended(pull: Pull) -> bool:
        try:
            return pull.ended()
        except Exception:  # of a GPU that has failed: the thread of pulls meets it too
            return False

    def _settle_and_end(self, error: Exception | None = None) -> None:
        """Once, but again after an interrupt. ``error``: of the GPU; it is not known what has been copied."""
        transfer = self.transfer
        with self._finishing:
            again, self._settling = self._settling, True
            if transfer.done.is_set():
                transfer.finish_end()
                return
            try:
                if error is not None:
                    raise error
                if self._pull is not None:
                    self._pull.settle(transfer)
            except Exception as exc:
                fail(transfer, exc)
                if self._pull is not None:
                    self._pull.abandon()
            self._end_part(again=again)

    def _end_part(self, *, again: bool = False) -> None:
        """The pull has ended, or the load from the store: the last one ends the transfer."""
        if self._inner is not None:
            with self._group._lock:
                self._parts -= 1
                if self._parts:
                    return
            numbers = {name: a.number for name, a in self._group._pools.attached.items()}
            for group, chunk, outcome in self._inner_pages:
                self.transfer.settle(numbers[group], 1 << chunk, outcome)
        self._moving.close()
        if again:
            self.transfer.end_again()
        else:
            self.transfer.end()

    def summary(self, done: Outcomes) -> tuple[int, dict[Tier, int]]:
        """Tokens restored, and by tier."""
        plan, attached = self._plan, self._group._pools.attached
        names = {a.number: name for name, a in attached.items()}
        good = {name: span(needed.start, len(needed)) for name in plan.needs for needed in [plan.needed(name)]}
        for outcome, groups in done.items():
            if outcome is not PageOutcome.LOADED:
                for number, bits in groups.items():
                    good[names[number]] &= ~bits
        chunks, size = plan.restorable(good), plan.page_tokens
        peers = stored = 0
        for pages in plan.peers.values():
            for name, (some, _) in pages.groups.items():
                peers |= bits_of(some) & self._wanted.get(name, 0)
        for name, bits in plan.stored.items():
            stored |= bits & self._wanted.get(name, 0)
        counts = {Tier.PEER: (peers & ~stored & span(0, chunks)).bit_count() * size}
        left = (stored & span(0, chunks)).bit_count() * size
        if self._inner is not None and self._inner.result is not None:
            for tier, tokens in sorted(self._inner.result.tiers.items(), reverse=True):
                if tier is not Tier.DEVICE:
                    counts[tier] = min(tokens, left)
                    left -= counts[tier]
        counts[Tier.DEVICE] = chunks * size - sum(counts.values())
        return chunks * size, {tier: n for tier, n in sorted(counts.items()) if n > 0}


def _from(pools: GpuPools, ids: Mapping[int, UnitIds], first: int) -> dict[int, Sequence[int]]:
    """The units of the chunks from ``first`` on."""
    found: dict[int, Sequence[int]] = {}
    for a in pools.attached.values():
        if a.number in ids:
            found[a.number] = ids[a.number][a.device.unit_range(a.group, first)[0] :]
    return found
