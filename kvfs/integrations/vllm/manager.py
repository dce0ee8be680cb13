"""The scheduler's half: which pages are there, what a load takes, what a save should store.

One walk over the index per request; vLLM's calls per key are answered from its result. Nothing is kept about what is
stored: workers publish their pages, other engines publish and evict theirs, the index knows. A page that is not there
any more when it is loaded makes the load fail, and its request is computed.
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
TIER_PAGES_MAX = 1024  # the kernel is asked where each page of a load lies; of longer loads the engine is told nothing
FRESH_SECONDS = 0.5  # a request that waits in the queue is looked up again after this
_SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}


@dataclass
class LoadSpec(LoadStoreSpec):
    """To the workers: the pages to load. The segments are held by the scheduler meanwhile."""

    match: PrefixMatch


@dataclass
class SaveSpec(LoadStoreSpec):
    """To the workers: the pages to save. ``chunks``: per group of the engine, in the order of the blocks sent along."""

    plan: SavePlan
    chunks: dict[int, tuple[int, ...]]
    attempt: bytes


class KvfsManager(OffloadingManager):
    """Runs in the scheduler's process, on its thread. No call raises, and none waits for a disk: the index's
    deadline (a quarter of a second, then at once until it answers again) is the longest that a step is held up."""

    def __init__(self, store: Store, namespace: Namespace, model: EngineModel, settings: VllmSettings) -> None:
        self._store, self._ns, self._model, self._settings = store, namespace, model, settings
        self._names = {group.index: group.name for group in model.groups}
        self._requests: dict[str, RequestPages] = {}
        self._epoch = 0  # of this engine: in the chain of every prompt
        #: blocks in use hold KV of weights before the last reset: nothing is stored
        self.tainted = False
        self.metrics = Metrics()

    # -- called by the connector -------------------------------------------------------------

    def announce(self, request: Any) -> None:
        """A new request; ``on_new_request`` follows, and sees its id only."""
        if not cacheable(request, items_hashed=self._model.items_hashed):
            self.metrics.add("requests_bypassed")
            return
        tokens = request.num_prompt_tokens
        generated = 0 if self._settings.offload_prompt_only else request.max_tokens  # at most, that may be stored
        if tokens < self._settings.min_tokens or tokens + generated < self._model.page_tokens:
            return
        self._requests[request.request_id] = RequestPages(request, self._ns, self._epoch, self._settings.max_tokens)

    def refresh(self, req_id: str) -> None:
        """The scheduler is about to ask for the keys of this request."""
        state = self._requests.get(req_id)
        if state is not None and not state.failed:
            self._look(state)

    def admitted(self, req_id: str) -> None:
        """It has its blocks. If they are taken away again, what was stored meanwhile is worth another lookup."""
        state = self._requests.get(req_id)
        if state is not None:
            state.looked_at = float("-inf")

    def is_loading(self, req_id: str) -> bool:
        state = self._requests.get(req_id)
        return state is not None and state.match is not None

    def load_failed(self, req_id: str) -> None:
        """Its next lookups miss, so that it is computed; what is computed may be stored anew."""
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
        """Ask the index: of chunks from ``first`` on, or of all if the last answer is old."""
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
        """(group, chunk) that a key stands for."""
        end = req_context.get_offload_key_position(key)
        assert end is not None and end % self._model.page_tokens == 0
        return self._names[get_offload_group_idx(key)], end // self._model.page_tokens - 1

    # -- loads -------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        state = req_context.get_state(RequestPages)
        assert state is not None, "the engine loads pages of a request that missed"
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
        """All that is missing, or nothing: what is left out here is never offered again by this request."""
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
        """The engine's blocks are free. What became of the pages, the index knows."""
        state = req_context.get_state(RequestPages)
        if state is not None:
            for name, chunk in (self._page(key, req_context) for key in keys):
                state.storing[name] = state.storing.get(name, 0) & ~(1 << chunk)

    # -- the rest ----------------------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """What was preempted had been computed for a while: a load that failed before that is no reason any more."""
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
        """The weights changed in place, or the operator says so: nothing stored before is found by this engine.

        It stays in the store for engines that start with the weights as they were.
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
