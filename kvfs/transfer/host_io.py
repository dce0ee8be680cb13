"""HostIO: asynchronous saves and loads between an engine's host memory and the store.

Threads: ``threads`` that copy out of the engine, one that writes, ``threads`` that read and copy into the engine.
The ring, the slots that saves may use of it, the unfinished transfers and every wait are bounded.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvfs.context import Context
from kvfs.directory.config import parse_size
from kvfs.errors import ConfigError, StoreReadOnlyError
from kvfs.lookup.incremental import Lookahead
from kvfs.lookup.matcher import Matcher
from kvfs.lookup.prefix_match import Hold, PrefixMatch
from kvfs.lookup.prompt_pages import chain_of
from kvfs.lookup.search import Prompt
from kvfs.pages.chunk_set import bits_of
from kvfs.pages.device_kv import DeviceKV
from kvfs.pages.identity import Identity
from kvfs.pages.layout import Part
from kvfs.read.reader import Reader
from kvfs.transfer.at_once import LoadsAtOnce, SmallLoad
from kvfs.transfer.control import OnDone, OnPage, Summary, TransferControl, TransferTask
from kvfs.transfer.handle import Transfer
from kvfs.transfer.load import BegunLoad, HostLoad, LoadJob, LoadRequest, Pages
from kvfs.transfer.outcome import TierAccounting, restored
from kvfs.transfer.save import Save, stored
from kvfs.transfer.staging import StagingRing
from kvfs.transfer.unfinished import Unfinished
from kvfs.transfer.units import UnitIds, Units, check_enough, checked_units, chunks_covered, to_load
from kvfs.transfer.workers import Attached, JobThreads, TransportContext, Writes, make_ring
from kvfs.types import ExtraKeys, SavePlan, Tier, TokensLike, TransferResult, TransferState
from kvfs.write.active_segments import SegmentClass
from kvfs.write.appender import Appender

SAVE_SECONDS = 2.0
LOAD_SECONDS = 30.0
CLOSE_SECONDS = 10.0
WARM_SECONDS = 10.0


class HostIO:
    """One rank's attached buffers. Made by ``Namespace.attach``; any thread may use it.

    A forked child must attach again; closing the store closes it.
    """

    transport = "host"
    _save: type[Save] = Save
    _load: Callable[[LoadRequest], LoadJob] = HostLoad
    _write_lanes = 1

    def __init__(
        self, context: Context, appender: Appender, reader: Reader, matcher: Matcher, identity: Identity,
        retention: Callable[[float | str | None], tuple[int, SegmentClass]], device_kvs: Sequence[DeviceKV], *,
        ring_bytes: int | str, threads: int, dirty_bytes: int | str | None, queue_max: int, codec: int = 0,
    ) -> None:  # fmt: skip
        _number("threads", threads, 64)
        self._queue_max = _number("queue_max", queue_max, 1 << 20)
        self._c, self._matcher, self._identity = context, matcher, identity
        self._retention, self._codec = retention, codec
        self._attached = self._check(device_kvs)
        self._whole_last = sorted(self._attached.values(), key=lambda a: a.group.need.kind == "all")
        self._context = self._make_context(appender, reader, ring_bytes, dirty_bytes)
        self._pid = os.getpid()
        self._closed = False
        self._at_once = LoadsAtOnce(self._context)
        self._copying = threading.RLock()  # while a caller loads at once
        self._lock = threading.RLock()
        try:
            self._unfinished = Unfinished(context.files.monotonic)
            self._copies, self._reads = JobThreads("copy", threads), self._load_threads(threads)
            self._writes = [JobThreads("write", 1) for _ in range(self._write_lanes)]
        except BaseException:  # the process may have no more threads
            self._unpin()
            raise
        context.attached.add(self)

    def _make_context(
        self, appender: Appender, reader: Reader, ring_bytes: int | str, dirty_bytes: int | str | None
    ) -> TransportContext:
        for a in self._attached.values():
            if a.device.memory.startswith("cuda"):  # no address for the copies here
                where = a.device.memory
                raise ConfigError(f"group {a.group.name} is in {where}, others in host memory: attach one device")
        ring, keep = make_ring(self._c, self._attached.values(), ring_bytes, dirty_bytes)
        identity, writes = self._identity, Writes(self._c.files.monotonic)
        descriptor = identity.descriptor_bytes()
        return TransportContext(self._c, appender, reader, identity, descriptor, ring, keep, self._codec, writes, None)

    def _load_threads(self, threads: int) -> JobThreads:
        return JobThreads("read", threads)

    def _unpin(self) -> None:
        """Release what the context has pinned; nothing, in host memory."""

    def _check(self, device_kvs: Sequence[DeviceKV]) -> dict[str, Attached]:
        layout = self._identity.layout
        attached: dict[str, Attached] = {}
        for device in device_kvs:
            group = device.check(layout)
            if group.name in attached:
                raise ConfigError(f"group {group.name} is attached twice: pass one DeviceKV with all of its buffers")
            part = device.part(group)
            number, size = layout.groups.index(group), group.part_bytes(part)
            attached[group.name] = Attached(number, group, part, device, size)
        if not attached:
            raise ConfigError("no buffers: pass a DeviceKV for each group that this rank holds")
        return attached

    # -- for callers -------------------------------------------------------------------------

    @property
    def parts(self) -> dict[str, Part]:
        """The rectangle of each attached group: pass it as ``part`` to ``match`` and ``plan_save``."""
        return {name: a.part for name, a in self._attached.items()}

    @property
    def namespace(self) -> bytes:
        """Digest of the namespace that the buffers belong to: that of its matches and plans."""
        return self._identity.digest

    def page_bytes(self, group: str) -> int:
        """Bytes of one page of an attached group, as far as this rank holds it. ConfigError for other groups."""
        if group not in self._attached:
            raise ConfigError(f"group {group!r} is not attached; attached are {list(self._attached)}")
        return self._attached[group].page_bytes

    @property
    def ring(self) -> StagingRing:
        return self._context.ring

    def save(
        self, plan: SavePlan, units: Units, after: Any = None, deadline: float = SAVE_SECONDS,
        ttl: float | str | None = None, store: bool = True, *, first_unit: int | Mapping[str, int] = 0,
        attempt: bytes = bytes(8), gentle: bool = False, on_page: OnPage = None, on_done: OnDone = None,
    ) -> Transfer:  # fmt: skip
        """Store the pages of ``plan`` that this rank is to write, out of ``units``.

        ``units[i]``: the unit with tokens [i * unit_tokens, (i + 1) * unit_tokens) of the prompt; for groups of one
        state per page, with the state at the end of chunk i; -1 where there is none: such a page is declined. Several
        groups: a mapping from group name. ``first_unit``: the i of the first id, where those before are not needed;
        for several groups it may be a mapping, too. Pages of keys follow one another as those of a prompt do.
        ``after``: None, or what to wait for before the units are read: an object with ``synchronize()`` or ``wait()``,
        or a callable. ``deadline`` (seconds from now): pages that are not copied by then, because slots or the event
        are missing, are declined. In groups of full attention the first decline ends the save, and nothing behind it
        is stored in any group, unless the plan is of keys. Among replicas page c is written by rank c % count.
        ``store=False``: only the callbacks.
        ``attempt``: 8 bytes that all ranks of one save share. ``gentle``: requests generate tokens meanwhile, so on a
        GPU a kernel copies: the copy engine would make the small copies of their steps wait for all of the save, 19 ms
        for each GiB. Next to a prefill the copy engine costs less.
        ``on_page`` and ``on_done`` are called on the threads of the transport, one call at a time: they must not wait
        for a transfer.
        Raises ConfigError for bad arguments and StoreReadOnlyError; everything else is in the result.
        """
        self._check_open()
        if plan.namespace != self._identity.digest:
            raise ConfigError("this plan is of another namespace: use plan_save of the one that is attached")
        if self._identity.layout.kind == "opaque" and not plan.keyed:  # pages of tokens share rows of the index
            raise ConfigError("this namespace holds opaque pages: make the plan with ns.prompt(keys=...).plan(...)")
        _check_plan(plan)
        if self._c.liveness is None and not self._c.declines:
            raise StoreReadOnlyError("the store is open read-only: open it without read_only=True to save")
        if len(attempt) != 8:
            raise ConfigError(f"attempt has {len(attempt)} bytes: pass 8 that all ranks of one save share")
        expires, segment_class = self._retention(ttl)
        ids = checked_units(self._attached, units, first_unit)
        order = sorted(self._attached.values(), key=lambda a: a.group.need.kind != "all")
        pages = [(a, a.device.written(plan.missing.get(a.group.name, ()))) for a in order]
        tokens = self._identity.layout.page_tokens
        task = self._task("save", pages, deadline, after, on_page, on_done, lambda done: (stored(done) * tokens, {}))
        transfer = TransferControl(task, self._forget)
        handle = Transfer(transfer)
        if self._c.declines:  # the store is switched off
            self._c.counters.add(f"pages_declined_{self._c.declines}", sum(len(chunks) for _, chunks in pages))
            return _refuse(handle, transfer, self._c.declines)
        if not store:
            return _refuse(handle, transfer, "disabled")
        save = self._save(
            self._context, transfer, _prompt_of(plan), pages, ids, after, expires, segment_class, attempt,
            [pool.put for pool in self._writes], gentle=gentle,
        )  # fmt: skip
        save.cut_to_source()
        return self._submit(handle, transfer, self._copies, save.run)

    def load(
        self, match: PrefixMatch, units: Units, after: Any = None, deadline: float = LOAD_SECONDS,
        first_token: int = 0, *, first_unit: int | Mapping[str, int] = 0, layerwise: bool = False,
        gentle: bool = False, on_page: OnPage = None, on_done: OnDone = None,
    ) -> Transfer:  # fmt: skip
        """Load the pages of ``match`` into ``units`` (as in ``save``; -1 = leave alone), from ``first_token`` on.

        ``result.tokens`` says how many tokens from 0 on are restored, if the units hold those before ``first_token``
        and those of units -1 already. Behind it each state is either untouched or the verified one: unverified bytes
        never reach a unit. Pages of keys are loaded one by one, also behind one that fails: ``on_page`` tells which.
        The match may have been made for larger parts, or in another process. ``layerwise``: the first layers of all
        pages come first, where the transport can do that (``Transfer.layer_ready``). ``gentle``: as in ``save``, for
        what comes whole out of registered memory; it takes a tenth longer.
        """
        self._check_open()
        _check_first(first_token)
        pages, ids = self._pages_of(match, units, first_token, first_unit)
        begun = None if gentle else self._begin_load(match, pages, after, layerwise=layerwise)
        try:
            tiers, names = TierAccounting(), {a.number: a.group.name for a in self._attached.values()}
            task = self._task(
                "load", pages, deadline, after, on_page, on_done,
                lambda done: restored(match, names, done, tiers, first_token),
            )  # fmt: skip
            hold = match.hold if match.hold is not None and match.hold.acquire() else None
            transfer = TransferControl(task, partial(self._forget_load, hold))
            handle = Transfer(transfer)
            request = LoadRequest(
                self._context, transfer, match, pages, ids, after, first_token, tiers, layerwise, begun=begun,
                gentle=gentle,
            )  # fmt: skip
            job = self._load(request)
            return self._submit(handle, transfer, self._reads, job.run, job.run_now)
        finally:
            if begun is not None:
                begun.drop()

    def _begin_load(self, match: PrefixMatch, pages: Pages, after: Any, *, layerwise: bool) -> BegunLoad | None:
        """Begin what needs no transfer; None if there is nothing of that kind."""
        return None

    def restore(
        self, token_ids: TokensLike, units: Units, after: Any = None, deadline: float = LOAD_SECONDS,
        first_token: int = 0, *, leave: int = 0, extra: ExtraKeys | None = None, on_page: OnPage = None,
        on_done: OnDone = None,
    ) -> Transfer:  # fmt: skip
        """``match`` and ``load`` in one: look a prompt up and load its longest prefix that can be restored.

        Returns before anything is looked up; on a GPU the first pages move while the rest of the prompt is looked up.
        ``units`` of every attached group, for as much of the prompt as may be restored; ``leave`` and ``extra`` as in
        ``match``, the rest as in ``load``. How much is restored is only known at the end: units behind
        ``result.tokens`` may have been written to, with verified KV of this prompt that cannot be used.
        """
        self._check_open()
        _check_first(first_token)
        ids = checked_units(self._attached, units)
        lacking = [name for name, a in self._attached.items() if a.number not in ids]
        if lacking:
            raise ConfigError(f"units lacks group {lacking[0]!r}: pass ids for each of {list(self._attached)}")
        chain = chain_of(self._c, self._identity, token_ids, leave, extra)
        chunks = min([chain.chunks, *(chunks_covered(a, ids[a.number], chain.chunks) for a in self._attached.values())])
        wants = [self.parts.get(g.name, g.full) for g in self._identity.layout.groups]
        lookahead = Lookahead(self._c, self._matcher, self._identity, chain, wants, chunks)
        order = sorted(self._attached.values(), key=lambda a: a.group.need.kind != "all")
        behind = range(first_token // self._identity.layout.page_tokens, chunks)
        pages = [(a, to_load(a, ids[a.number], behind)) for a in order]
        task = self._task("load", [], deadline, after, on_page, on_done, lambda _: (0, {}))  # until more is known
        transfer = TransferControl(task, partial(self._forget_load, None))
        handle = Transfer(transfer)
        request = LoadRequest(
            self._context, transfer, lookahead.match, pages, ids, after, first_token, TierAccounting(),
            lookahead=lookahead,
        )  # fmt: skip
        return self._submit(handle, transfer, self._reads, self._load(request).run)

    def load_at_once(self, loads: Sequence[tuple[PrefixMatch, Units]], seconds: float) -> list[TransferResult | None]:
        """Load in the caller's thread, for about ``seconds``: for an engine that computes nothing meanwhile. All units
        of a load from token 0 on, as in ``load``. Waits for no disk.

        The result of each load that is whole. None of the others, which ``load`` is to do: large ones, those with pages
        that the page cache lacks or that do not verify, those that there was no time for. Some of their pages may have
        been copied. Raises ConfigError.
        """
        self._check_open()
        end = self._c.files.monotonic() + seconds
        small = [SmallLoad(match, *self._pages_of(match, units)) for match, units in loads]
        with self._copying:
            results = self._at_once.run(small, -math.inf if self._closed else end)
        tokens, loaded = Counter[Tier](), [result for result in results if result is not None]
        for result in loaded:
            tokens.update(result.tiers)
        self._count_loaded(tokens)
        self._c.counters.add(f"loads_{TransferState.DONE.value}", len(loaded))
        return results

    def warm(self, match: PrefixMatch, deadline: float = WARM_SECONDS) -> int:
        """Register what a match needs ahead of its load, on a GPU; bytes of it that need not go through the ring then.

        Stops after ``deadline`` seconds. Raises ConfigError.
        """
        self._check_process()
        self._check_deadline(deadline)
        return 0

    def warm_hottest(self, nbytes: int | str, deadline: float = WARM_SECONDS) -> int:
        """Register the pages that were used last, on a GPU, before traffic: else a process's first loads do that.

        Of this namespace's pages those that are stored as this rank wants them, up to ``nbytes`` in whole regions of
        segments; without those that the page cache does not hold (``store.warm`` brings them there), or that exceed
        ``registered_bytes`` together with what is pinned. Walks the index. Stops after ``deadline`` seconds. Returns
        the bytes that are pinned for loads then. Raises ConfigError.
        """
        self._check_open()
        parse_size(nbytes, "nbytes")
        self._check_deadline(deadline)
        return 0

    def release(self) -> None:
        """Unpin at once what no load reads from, on a GPU; later loads go through the ring.

        For an engine's own signal handler: unpinning many GiB takes the kernel long when the process dies.
        """

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Finish what was accepted, at most ``timeout`` seconds; what is left then ends as declined ("closed").

        A save whose disk hangs ends when the disk answers, and keeps its slots until then.
        """
        if self._pid != os.getpid():
            return
        end = time.monotonic() + timeout
        with self._lock:
            self._closed = True
        if self._copying.acquire(timeout=timeout):  # a caller that loads at once has ended
            self._copying.release()
        left = self._unfinished.wait(max(0.0, end - time.monotonic()))
        for transfer in left:
            transfer.stop("closed")
        self.ring.close()
        for pool in (self._copies, self._reads, *self._writes):
            pool.close(max(0.1, end - time.monotonic()))
        for transfer in left:
            transfer.try_end()
        self._unfinished.dismiss()
        self._c.attached.discard(self)

    def __enter__(self) -> HostIO:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- helpers -----------------------------------------------------------------------------

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise ConfigError("this HostIO belongs to the parent process: call ns.attach(...) in this one")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise ConfigError("this HostIO was closed: call ns.attach(...) again")

    def _pages_of(
        self, match: PrefixMatch, units: Units, first_token: int = 0, first_unit: int | Mapping[str, int] = 0
    ) -> tuple[Pages, dict[int, UnitIds]]:
        """The pages of a load, and its units by group number. ConfigError."""
        if match.namespace != self._identity.digest:
            raise ConfigError("this match is of another namespace: use the one that is attached")
        ids = checked_units(self._attached, units, first_unit)
        return [
            (a, self._wanted(match, a, ids.get(a.number, UnitIds("q")), first_token)) for a in self._whole_last
        ], ids

    def _wanted(self, match: PrefixMatch, a: Attached, ids: UnitIds, first_token: int) -> list[int]:
        """Chunks of a match that have a unit to load into."""
        gm = match.group(a.group.name)
        if not gm.want.contains(a.part):
            raise ConfigError(
                f"the match is for {gm.want} of group {gm.name}, attached is {a.part}: match with io.parts"
            )
        chunks = range(max(gm.first, first_token // match.page_tokens), gm.first + gm.count)
        check_enough(a, ids, chunks)
        return to_load(a, ids, chunks)

    def _task(
        self, kind: str, pages: Sequence[tuple[Attached, list[int]]], deadline: float, after: Any, on_page: OnPage,
        on_done: OnDone, summarise: Summary,
    ) -> TransferTask:  # fmt: skip
        self._check_deadline(deadline)
        self._check_after(after)
        groups = {a.number: (a.group.name, a.group.layers, a.page_bytes) for a in self._attached.values()}
        end = self._c.files.monotonic() + deadline
        offered = {a.number: bits_of(chunks) for a, chunks in pages}
        return TransferTask(kind, offered, groups, end, summarise, on_page, on_done)

    def _check_deadline(self, deadline: float) -> None:
        if not isinstance(deadline, (int, float)) or not deadline >= 0:
            raise ConfigError(f"deadline is {deadline!r}: pass seconds from now, 0 or more")

    def _check_after(self, after: Any) -> None:
        if not (after is None or callable(after) or hasattr(after, "wait") or hasattr(after, "synchronize")):
            raise ConfigError(
                f"after is {type(after).__name__}: pass an event with synchronize() or wait(), or a callable"
            )

    def sweep(self) -> None:
        """Upkeep, every second; none in host memory."""

    def _submit(
        self, handle: Transfer, transfer: TransferControl, pool: JobThreads, run: Callable[[], None],
        run_now: Callable[[], bool] = lambda: False,
    ) -> Transfer:  # fmt: skip
        if pool is self._reads and self._context.read_hangs():
            return _refuse(handle, transfer, "disk")
        with self._lock:
            busy = self._backlog(pool) >= self._queue_max or self._closed
            if not busy:
                self._unfinished.add(transfer)
        if busy:
            return _refuse(handle, transfer, "busy")
        began = False
        try:
            began = not pool.waiting and run_now()
        except BaseException:  # an interrupt: the caller has no handle, so nothing more is to reach its units
            transfer.stop("cancelled")
            raise
        finally:
            if not began:
                pool.put(run)
        return handle

    def _backlog(self, pool: JobThreads) -> int:
        """Transfers that have not ended, or that are still in a queue; batches of ended ones hold no slots."""
        writes = [one.waiting - self.ring.slots for one in self._writes] if pool is self._copies else []
        return max(len(self._unfinished), pool.waiting, *writes)

    def _forget(self, transfer: TransferControl) -> None:
        self._unfinished.discard(transfer)
        self._c.counters.add(f"{transfer.task.kind}s_{transfer.state.value}")

    def _forget_load(self, hold: Hold | None, transfer: TransferControl) -> None:
        """Release the match's segments, which are held from the call of ``load`` on; count its tokens."""
        if hold is not None:
            hold.release()
        if transfer.result is not None:
            self._count_loaded(transfer.result.tiers)
        self._forget(transfer)

    def _count_loaded(self, tokens: Mapping[Tier, int]) -> None:
        """Count tokens that loads restored; among several ranks one does."""
        first = next(iter(self._attached.values()))
        if first.part.head == first.part.layer == 0 and first.device.writes(0):
            self._c.counters.loaded(self._identity.digest, tokens)


def _refuse(handle: Transfer, transfer: TransferControl, reason: str) -> Transfer:
    transfer.stop(reason)
    transfer.end()
    return handle


def _check_plan(plan: SavePlan) -> None:
    """ConfigError for a plan of pages that it does not name."""
    for name, chunks in plan.missing.items():
        if any(not 0 <= chunk < len(plan.hashes) for chunk in chunks[:1] + chunks[-1:]):
            raise ConfigError(f"the plan names page {chunks[-1]} of group {name}, it has {len(plan.hashes)} hashes")


def _prompt_of(plan: SavePlan) -> Prompt:
    return Prompt(plan.namespace, plan.hashes, run_length=1) if plan.keyed else Prompt(plan.namespace, plan.hashes)


def _check_first(first_token: int) -> None:
    if type(first_token) is not int or first_token < 0:
        raise ConfigError(f"first_token is {first_token!r}: pass the number of a token, 0 or more")


def _number(name: str, value: object, high: int) -> int:
    if type(value) is int and 1 <= value <= high:
        return value
    raise ConfigError(f"{name} is {value!r}: pass 1 to {high}")
