"""Pages between SGLang's device pool and a store, for the external linker of its radix tree.

A linker is told the hashes of a prompt's tail, or of a node, without those before. So a page is stored under its hash
as a key, in an index row of its own, and not under the chunk hash that other engines know. What touches a disk or waits
for the device runs on threads of kvfs; the scheduler's thread looks keys up and queues. These threads hand the
interpreter to it after each step: at its next call that gives the interpreter up, it would wait for all of their work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kvfs.integrations.sglang.attachment import GRACE_SECONDS, Attachment, digests
from kvfs.integrations.sglang.pools import GROUP
from kvfs.integrations.sglang.settings import SGLangSettings
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.lookup.prompt_pages import PromptPages
from kvfs.lookup.search import prefix_length
from kvfs.pages.chunk_set import members, span
from kvfs.transfer.handle import Transfer
from kvfs.transfer.workers import JobThreads

log = logging.getLogger("sglang.kvfs")
#: A node stays locked in the device pool until its offload is reported: no longer than this once its slots are free,
#: however long the disk takes.
PUBLISH_SECONDS = 2.0
OFFLOADS_MAX = 256  # unreported: more are refused, and the tree offers the node again later
#: A sleep that hands the interpreter to the scheduler: otherwise that waits for it five milliseconds, or until a thread
#: here has to wait for something.
YIELD_SECONDS = 1e-6
LOOKUPS_MAX = 64  # kept for the loads that follow them: some 250 bytes for each page


class LayerCounter(Protocol):
    """SGLang's ``LayerWiseLoadCounter``."""

    def update_producer(self) -> int: ...
    def complete(self, index: int, layer: int) -> None: ...
    def fail(self, index: int, error: BaseException) -> None: ...
    def reset(self) -> None: ...


@dataclass
class _Offload:
    keys: list[str]
    slots: Any
    after: Any
    pages: int = 0  # that this rank writes
    saving: Transfer | None = None
    free_at: float | None = None  # when its slots were seen to be free
    result: bool | None = None

    def ended(self) -> bool:
        """Whether there is a result."""
        if self.result is not None or self.saving is None:
            return self.result is not None
        if self.saving.done.is_set():
            done = self.saving.result
            self.result = done is not None and done.pages + done.skipped == self.pages
        elif self.saving.source_free.is_set():
            self.free_at = self.free_at or time.monotonic()
            if time.monotonic() - self.free_at > PUBLISH_SECONDS:
                self.result = False  # it may still be stored: the tree offers it again, and then it is there
        return self.result is not None


@dataclass
class _Load:
    rid: str
    keys: list[str]
    slots: Any
    found: PromptPages | None  # of a lookup that began with these pages


class LinkerPages:
    """The linker of one rank. SGLang's scheduler calls it on one thread.

    Owns the queues of loads and offloads; the layers of a batch of loads are reported to ``counter``.
    """

    def __init__(self, attached: Attachment, settings: SGLangSettings, counter: LayerCounter, first_layer: int) -> None:
        self._attached, self._settings, self._counter, self._first_layer = attached, settings, counter, first_layer
        self._layers = sum(part.layers for part in attached.io.parts.values())
        self._queued: dict[str, _Load] = {}
        self._looked_up: OrderedDict[str, tuple[tuple[str, ...], PromptPages]] = OrderedDict()  # by first key
        self._offloads: deque[_Offload] = deque()
        self._loading, self._saving = JobThreads("load", 1), JobThreads("offload", 1)

    # -- called by the scheduler -------------------------------------------------------------

    def lookup(self, keys: Sequence[str]) -> int:
        """How many leading pages can be restored: one walk over the index, which waits a quarter second at most."""
        pages = self._prompt(keys)
        pages.look(prefix=True)
        found = prefix_length(pages.stored[GROUP])
        if found:
            self._looked_up[keys[0]] = tuple(keys), pages
            if len(self._looked_up) > LOOKUPS_MAX:
                self._looked_up.popitem(last=False)
        if self._saving.waiting < OFFLOADS_MAX:  # access times of many rows take as long as the walk
            self._saving.put(partial(pages.note_lookup, found * self._attached.page_tokens))
        return found

    def load(self, rid: str, keys: Sequence[str], slots: Any) -> bool:
        """Queue a load for the next ``start``. Always true: all ranks must give the same answer."""
        self._queued[rid] = _Load(rid, list(keys), slots, self._found(keys))
        return True

    def cancel(self, rid: str) -> bool:
        """Whether a load was queued that has not started."""
        return self._queued.pop(rid, None) is not None

    def start(self, after: Any) -> int:
        """Start what is queued, once ``after`` has passed; the counter's index of this batch, -1 for nothing."""
        loads, self._queued = list(self._queued.values()), {}
        if not loads:
            return -1
        index = self._counter.update_producer()
        self._loading.put(lambda: self._load(index, loads, after))
        return index

    def offload(self, keys: Sequence[str], slots: Any, after: Any) -> bool:
        """Queue the pages of a node to be stored, once ``after`` has passed. False if too many are under way."""
        if len(self._offloads) >= OFFLOADS_MAX:
            return False
        one = _Offload(list(keys), slots, after)
        self._offloads.append(one)
        self._saving.put(lambda: self._offload(one))
        return True

    def completed(self) -> int:
        """How many of the oldest offloads have ended."""
        done = 0
        for one in self._offloads:
            if not one.ended():
                break
            done += 1
        return done

    def pop(self) -> bool:
        """Whether the oldest offload is stored, or being stored by another rank or process."""
        one = self._offloads.popleft()
        return one.ended() and bool(one.result)

    def reset(self) -> None:
        """Forget what is queued; on return no byte of the pool moves any more."""
        self._queued.clear()
        self._looked_up.clear()
        for threads in (self._loading, self._saving):
            idle = threading.Event()
            threads.put(idle.set)
            while not idle.wait(GRACE_SECONDS):  # each load and save in front of it has a deadline
                log.warning("kvfs: a reset of the linker waits for transfers")
        for one in self._offloads:
            if one.saving is not None:
                _withdraw(one.saving)
        self._offloads.clear()
        self._counter.reset()

    def close(self) -> None:
        """Reset, and close the store."""
        self.reset()
        for threads in (self._loading, self._saving):
            threads.close(GRACE_SECONDS)
        self._attached.close()

    def _found(self, keys: Sequence[str]) -> PromptPages | None:
        """What the last lookup that began with ``keys`` found, for one load."""
        looked_up, pages = self._looked_up.pop(keys[0], ((), None)) if keys else ((), None)
        return pages if looked_up[: len(keys)] == tuple(keys) else None

    # -- on threads of their own -------------------------------------------------------------

    def _load(self, index: int, loads: Sequence[_Load], after: Any) -> None:
        """Load a batch, and report its layers. A page that is lost fails the batch: SGLang aborts its requests."""
        matches, transfers = list[PrefixMatch](), list[Transfer]()
        try:
            _synchronize(after)
            for one in loads:
                pages = one.found or self._prompt(one.keys)
                matches.append(pages.select({GROUP: 0}, len(one.keys), known=one.found is not None))
                _give_way()
                units = self._attached.units(one.keys, one.slots)
                _give_way()
                transfers.append(
                    self._attached.io.load(matches[-1], units, after, self._settings.load_seconds, layerwise=True)
                )
                _give_way()
            end = time.monotonic() + self._settings.load_seconds + GRACE_SECONDS
            for layer in range(self._layers):
                for one, transfer in zip(loads, transfers, strict=True):
                    self._wait(transfer, layer, end, len(one.keys))
                self._counter.complete(index, layer)
            for one, transfer in zip(loads, transfers, strict=True):
                log.debug("kvfs: request %s: %s", one.rid, _tiers(transfer))
        except BaseException as exc:
            log.warning("kvfs: a load was not completed, its requests are aborted: %s", exc)
            for transfer in transfers:
                _withdraw(transfer)  # the slots are free when the failure is known
            self._counter.fail(index, exc)
        finally:
            for match in matches:
                match.close()

    def _wait(self, transfer: Transfer, layer: int, end: float, pages: int) -> None:
        """Until a layer has arrived; RuntimeError if a page did not."""
        model_layer = self._first_layer + layer
        if not transfer.layer_ready(model_layer).wait(max(0.0, end - time.monotonic())):
            raise RuntimeError(f"layer {model_layer} did not arrive in time")
        last = layer == self._layers - 1
        result = transfer.wait(max(0.0, end - time.monotonic())) if last else transfer.result
        if (last and result is None) or (result is not None and result.pages < pages):
            why = result.reason if result is not None else "deadline"
            raise RuntimeError(f"{pages - (result.pages if result else 0)} pages are lost ({why})")

    def _prompt(self, keys: Sequence[str]) -> PromptPages:
        return self._attached.space.prompt(keys=digests(keys))

    def _offload(self, one: _Offload) -> None:
        try:
            _synchronize(one.after)
            units = self._attached.units(one.keys, one.slots)
            pages = self._prompt(one.keys)
            _give_way()
            pages.look()
            _give_way()
            there = pages.stored[GROUP] | pages.writing[GROUP]
            missing = members(span(0, pages.chunks) & ~there)
            one.pages = len(self._attached.kv.written(missing))
            if not one.pages:
                one.result = True
                return
            plan = pages.plan({GROUP: missing})
            _give_way()
            one.saving = self._attached.io.save(
                plan, units, one.after, self._settings.store_seconds, self._settings.ttl
            )
        except Exception:
            log.exception("kvfs: an offload failed")
            one.result = False


def _synchronize(after: Any) -> None:
    """Wait for the device: the slots of a request are a tensor on it, which may not be computed yet."""
    if after is not None:
        after.synchronize()


def _give_way() -> None:
    time.sleep(YIELD_SECONDS)


def _withdraw(transfer: Transfer) -> None:
    """No byte of the pool moves after it. It waits for a copy, and on a GPU for a read, never for ``after``."""
    while not transfer.withdraw(GRACE_SECONDS):
        log.error("kvfs: a copy of a %s does not end; its pages of the pool are held back", transfer.kind)


def _tiers(transfer: Transfer) -> str:
    """``loaded 4096 tokens: host 4032, disk 64``, by the slowest tier of a token's pages."""
    result = transfer.result
    assert result is not None
    return f"loaded {result.tokens} tokens: " + ", ".join(f"{t.name.lower()} {n}" for t, n in result.tiers.items())
