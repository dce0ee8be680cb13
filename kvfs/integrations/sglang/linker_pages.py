"""Pages between SGLang's device pool and a store, for the external linker of its radix tree.

A linker is told the hashes of a prompt's tail, or of a node, without those before. So a page is stored under its hash
as a key, in an index row of its own, and not under the chunk hash that other engines know. What touches a disk or waits
for the device runs on threads of kvfs; the scheduler's thread looks keys up and queues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from kvfs.integrations.sglang.attachment import GRACE_SECONDS, Attachment, digest
from kvfs.integrations.sglang.pools import GROUP
from kvfs.integrations.sglang.settings import SGLangSettings
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.transfer.handle import Transfer
from kvfs.transfer.workers import JobThreads
from kvfs.types import PageDone, PageOutcome

log = logging.getLogger("sglang.kvfs")
#: A node stays locked in the device pool until its offload is reported: no longer than this once its slots are free,
#: however long the disk takes.
PUBLISH_SECONDS = 2.0
OFFLOADS_MAX = 256  # unreported: more are refused, and the tree offers the node again later


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
    lost: set[int] = field(default_factory=set)  # pages that this rank writes and that are not stored yet
    saving: Transfer | None = None
    free_at: float | None = None  # when its slots were seen to be free
    result: bool | None = None

    def ended(self) -> bool:
        """Whether there is a result."""
        if self.result is not None or self.saving is None:
            return self.result is not None
        if self.saving.done.is_set():
            self.result = not self.lost
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


class LinkerPages:
    """The linker of one rank. SGLang's scheduler calls it on one thread.

    Owns the queues of loads and offloads; the layers of a batch of loads are reported to ``counter``.
    """

    def __init__(self, attached: Attachment, settings: SGLangSettings, counter: LayerCounter, first_layer: int) -> None:
        self._attached, self._settings, self._counter, self._first_layer = attached, settings, counter, first_layer
        self._layers = sum(part.layers for part in attached.io.parts.values())
        self._queued: dict[str, _Load] = {}
        self._offloads: deque[_Offload] = deque()
        self._loading, self._saving = JobThreads("load", 1), JobThreads("offload", 1)

    # -- called by the scheduler -------------------------------------------------------------

    def lookup(self, keys: Sequence[str]) -> int:
        """How many leading pages can be restored: one walk over the index, which waits a quarter second at most."""
        pages = self._attached.space.prompt(keys=[digest(key) for key in keys])
        pages.look()
        there = pages.stored[GROUP]
        found = (~there & there + 1).bit_length() - 1
        if self._saving.waiting < OFFLOADS_MAX:  # access times of many rows take as long as the walk
            self._saving.put(partial(pages.note_lookup, found * self._attached.page_tokens))
        return found

    def load(self, rid: str, keys: Sequence[str], slots: Any) -> bool:
        """Queue a load for the next ``start``. Always true: all ranks must give the same answer."""
        self._queued[rid] = _Load(rid, list(keys), slots)
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

    # -- on threads of their own -------------------------------------------------------------

    def _load(self, index: int, loads: Sequence[_Load], after: Any) -> None:
        """Load a batch, and report its layers. A page that is lost fails the batch: SGLang aborts its requests."""
        matches, transfers = list[PrefixMatch](), list[Transfer]()
        try:
            _synchronize(after)
            for one in loads:
                pages = self._attached.space.prompt(keys=[digest(key) for key in one.keys])
                matches.append(pages.select({GROUP: 0}, pages.chunks))
                transfers.append(self._attached.io.load(
                    matches[-1], self._attached.units(one.keys, one.slots), after, self._settings.load_seconds,
                    layerwise=True,
                ))  # fmt: skip
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

    def _offload(self, one: _Offload) -> None:
        try:
            _synchronize(one.after)
            units = self._attached.units(one.keys, one.slots)
            pages = self._attached.space.prompt(keys=[digest(key) for key in one.keys])
            pages.look()
            there = pages.stored[GROUP] | pages.writing[GROUP]
            missing = [n for n in range(pages.chunks) if not there >> n & 1]
            one.lost = set(self._attached.kv.written(missing))
            if not one.lost:
                one.result = True
                return
            one.saving = self._attached.io.save(
                pages.plan({GROUP: missing}), units, one.after, self._settings.store_seconds, self._settings.ttl,
                on_page=_noting(one.lost),
            )  # fmt: skip
        except Exception:
            log.exception("kvfs: an offload failed")
            one.result = False


def _synchronize(after: Any) -> None:
    """Wait for the device: the slots of a request are a tensor on it, which may not be computed yet."""
    if after is not None:
        after.synchronize()


def _noting(lost: set[int]) -> Callable[[PageDone], None]:
    """A callback that takes pages out of ``lost`` once they are stored."""

    def page(done: PageDone) -> None:
        if done.outcome in (PageOutcome.STORED, PageOutcome.SKIPPED):
            lost.discard(done.chunk)

    return page


def _withdraw(transfer: Transfer) -> None:
    """No byte of the pool moves after it. It waits for a copy, and on a GPU for a read, never for ``after``."""
    while not transfer.withdraw(GRACE_SECONDS):
        log.error("kvfs: a copy of a %s does not end; its pages of the pool are held back", transfer.kind)


def _tiers(transfer: Transfer) -> str:
    """``loaded 4096 tokens: host 4032, disk 64``, by the slowest tier of a token's pages."""
    result = transfer.result
    assert result is not None
    return f"loaded {result.tokens} tokens: " + ", ".join(f"{t.name.lower()} {n}" for t, n in result.tiers.items())
