"""The scheduler's half: which pages are stored, which of them a load takes, which pages to save.

Each request walks the index once; vLLM's calls per key are answered from the result. No copy of the index is kept:
workers publish their pages, and other engines publish and evict theirs. If a page was evicted before it is loaded, the
load fails and the request is computed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvfs.integrations.vllm.metrics import Metrics
from kvfs.integrations.vllm.model import EngineModel
from kvfs.integrations.vllm.requests import RequestPages, cacheable
from kvfs.integrations.vllm.settings import VllmSettings
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.namespace import Namespace, random_epoch
from kvfs.store import Store
from kvfs.types import SavePlan, Tier

logger = init_logger(f"vllm.{__name__}")
TIER_PAGES_MAX = 1024  # pages of a load whose tier is reported: each costs a system call on the scheduler's thread
FRESH_SECONDS = 0.5  # a queued request is looked up again when its last lookup is older
_SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}


@dataclass
class LoadSpec(LoadStoreSpec):
    """For the workers: the pages to load. The scheduler holds their segments until the load ends."""

    match: PrefixMatch


@dataclass
class SaveSpec(LoadStoreSpec):
    """For the workers: the pages to save. ``chunks``: chunk numbers per engine group, in the order of its blocks."""

    plan: SavePlan
    chunks: dict[int, tuple[int, ...]]
    attempt: bytes


class KvfsManager(OffloadingManager):
    """Owns the state of requests (``RequestPages``); delegates lookups and plans to the namespace.

    Runs on the scheduler's thread. No call raises, and none waits for a disk. The longest delay of a step is the
    deadline of the index: a quarter of a second, then none until the index answers again.
    """

    def __init__(self, store: Store, namespace: Namespace, model: EngineModel, settings: VllmSettings) -> None:
        self._store, self._ns, self._model, self._settings = store, namespace, model, settings
        self._names = {group.index: group.name for group in model.groups}
        self._requests: dict[str, RequestPages] = {}
        self._epoch = 0  # of this engine; part of the chain of every prompt
        #: nothing is stored: the engine's blocks hold KV of weights before a reset, or of a failed load of another
        #: connector
        self.tainted = False
        self.metrics = Metrics()

    # -- called by the connector -------------------------------------------------------------

    def announce(self, request: Any) -> None:
        """A new request. ``on_new_request`` follows, and sees only its id."""
        if not cacheable(request, items_hashed=self._model.items_hashed):
            self.metrics.add("requests_bypassed")
            return
        tokens = request.num_prompt_tokens
        output = 0 if self._settings.offload_prompt_only else request.max_tokens  # at most, that may be stored
        if tokens < self._settings.min_tokens or tokens + output < self._model.page_tokens:
            return
        self._requests[request.request_id] = RequestPages(request, self._ns, self._epoch, self._settings.max_tokens)

    def refresh(self, req_id: str) -> None:
        """The scheduler is about to look up the keys of this request."""
        state = self._requests.get(req_id)
        if state is not None and not state.failed:
            self._look(state)

    def admitted(self, req_id: str) -> None:
        """The request got its blocks. If it is preempted, the next lookup must see what was stored until then."""
        state = self._requests.get(req_id)
        if state is not None:
            state.looked_at = float("-inf")

    def is_loading(self, req_id: str) -> bool:
        state = self._requests.get(req_id)
        return state is not None and state.match is not None

    def load_failed(self, req_id: str) -> None:
        """Its next lookups miss, so that it is computed; what it computes may be stored again."""
        self.metrics.add("loads_failed")
        state = self._requests.get(req_id)
        if state is not None:
            state.failed = True
            state.release()
            state.pages.forget()

    # -- lookups -----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        state = self._requests.get(req_context.req_id)
        if state is not None:
            req_context.set_state(state)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state, end = req_context.get_state(RequestPages), req_context.get_offload_key_position(key)
        if state is None or state.failed or end is None or end % state.page_tokens:
            return LookupResult.MISS
        stored = state.pages.stored[self._names[get_offload_group_idx(key)]]
        return LookupResult.HIT if stored >> end // state.page_tokens - 1 & 1 else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        state = req_context.get_state(RequestPages)
        if state is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        if not state.tiers and state.match is not None and state.match.chunks <= TIER_PAGES_MAX:
            state.tiers = {(page.group, page.chunk): page.tier for page in state.match.pages}
        tier = state.tiers.get(self._page(key, req_context))
        return _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED) if tier else CacheHitSource.EXTERNAL_UNSPECIFIED

    def _look(self, state: RequestPages, first: int | None = None) -> None:
        """Look up the chunks from ``first`` on, or all of them if the last lookup is old."""
        now = time.monotonic()
        if first is None and now - state.looked_at <= FRESH_SECONDS:
            return
        state.grow()
        state.pages.look(first or 0)
        done = time.monotonic()
        if first is None:
            state.looked_at = done
        self.metrics.add("lookup_seconds", done - now)

    def _page(self, key: OffloadKey, req_context: ReqContext) -> tuple[str, int]:
        """(group, chunk) of a key."""
        end = req_context.get_offload_key_position(key)
        assert end is not None and end % self._model.page_tokens == 0
        return self._names[get_offload_group_idx(key)], end // self._model.page_tokens - 1

    # -- loads -------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        state = req_context.get_state(RequestPages)
        assert state is not None, "vLLM loads pages of a request without a hit"
        first: dict[str, int] = {}
        end = 0
        for name, chunk in (self._page(key, req_context) for key in keys):
            first[name] = min(chunk, first.get(name, chunk))
            end = max(end, chunk + 1)
        state.release()
        state.match, state.tiers = state.pages.select(first, end), {}
        if not state.counted:
            state.counted = True
            state.pages.note_lookup((end - min(first.values(), default=end)) * state.page_tokens)
        return LoadSpec(state.match)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        state = req_context.get_state(RequestPages)
        if state is not None:
            state.release()

    # -- saves -------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """All missing pages. vLLM offers each page of a request once: what is left out here is not stored by it."""
        state = req_context.get_state(RequestPages)
        wanted: dict[OffloadKey, tuple[str, int]] = {}
        if state is not None and keys and not self._settings.read_only and not self.tainted:
            offered = {key: self._page(key, req_context) for key in keys}
            self._look(state, first=min(chunk for _, chunk in offered.values()))
            pages = state.pages
            for key, (name, chunk) in offered.items():
                there = pages.stored[name] | pages.writing[name] | state.storing.get(name, 0)
                if chunk < pages.chunks and not there >> chunk & 1:
                    wanted[key] = (name, chunk)
        return PrepareStoreOutput(list(wanted), self._save_spec(state, wanted.values()), [])

    def _save_spec(self, state: RequestPages | None, wanted: Iterable[tuple[str, int]]) -> LoadStoreSpec:
        chunks: dict[str, list[int]] = {}
        for name, chunk in wanted:
            chunks.setdefault(name, []).append(chunk)
        if state is None or not chunks:
            return LoadStoreSpec()
        for name, numbers in chunks.items():
            state.storing[name] = state.storing.get(name, 0) | sum(1 << n for n in numbers)
        by_index = {g.index: tuple(chunks[g.name]) for g in self._model.groups if g.name in chunks}
        return SaveSpec(state.pages.plan(chunks), by_index, state.attempt)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """The engine's blocks are free; the pages may or may not have been published."""
        state = req_context.get_state(RequestPages)
        if state is not None:
            for name, chunk in (self._page(key, req_context) for key in keys):
                state.storing[name] = state.storing.get(name, 0) & ~(1 << chunk)

    # -- the rest ----------------------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A preempted request had been running, so a load that failed before no longer prevents its lookups."""
        for req_id in context.preempted_req_ids:
            state = self._requests.get(req_id)
            if state is not None:
                state.failed = False

    def on_request_finished(self, req_context: ReqContext) -> None:
        state = self._requests.pop(req_context.req_id, None)
        if state is not None and not state.counted:
            state.counted = True
            state.pages.note_lookup(0)

    def reset_cache(self) -> None:
        """After a change of weights in place: this engine no longer finds what was stored before.

        The pages stay in the store for engines that start with the previous weights.
        """
        self._epoch = random_epoch()
        for state in self._requests.values():
            state.release()
            state.pages = RequestPages(state._request, self._ns, self._epoch, self._settings.max_tokens).pages
            state.storing.clear()

    def get_stats(self) -> Any:
        return self.metrics.take()

    def shutdown(self) -> None:
        for state in self._requests.values():
            state.release()
        self._requests.clear()
        self._store.close()
