"""The scheduler's half: which pages are stored, which of them a load takes, which pages to save.

Each request walks the index once; vLLM's calls per key are answered from the result. No copy of the index is kept:
workers publish their pages, and other engines publish and evict theirs. If a page was evicted before it is loaded, the
load fails and the request is computed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

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

from kvfs.integrations.vllm.adapters import CALL_SECONDS, Adapters, Reading
from kvfs.integrations.vllm.costs import READ_BYTES_MIN, Costs
from kvfs.integrations.vllm.fetches import Fetches
from kvfs.integrations.vllm.metrics import Metrics
from kvfs.integrations.vllm.model import EngineModel
from kvfs.integrations.vllm.peers import PeerLookups
from kvfs.integrations.vllm.prefetch import Prefetcher
from kvfs.integrations.vllm.requests import RequestPages, cacheable
from kvfs.integrations.vllm.settings import VllmSettings
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.lookup.prompt_pages import TOKENS_MAX
from kvfs.namespace import Namespace, random_epoch
from kvfs.pages.chunk_set import bits_of, members, span
from kvfs.ranks import RankPlan
from kvfs.store import Store
from kvfs.system.memory_limits import memory_limit
from kvfs.types import SavePlan, Tier

logger = init_logger(f"vllm.{__name__}")
#: Pages of a load whose tier is reported: about 1 ms of the scheduler's thread, and up to 2 for each GiB that the page
#: cache has in small pieces.
TIER_PAGES_MAX = 512
COMPARED_PAGES_MAX = 4096  # pages of a load that is compared with computing, for the same reason
AHEAD_MAX = 2  # tasks of the prefetcher, beyond which no request of the queue is read ahead
AHEAD_SHARE = 16  # of the memory: longer prompts are not read ahead, since they may push out what others need sooner
FRESH_SECONDS = 0.5  # a queued request is looked up again when its last lookup is older
_SOURCES = {Tier.PEER: CacheHitSource.P2P, Tier.HOST: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}


@dataclass
class LoadSpec(LoadStoreSpec):
    """For the workers: the pages to load. The scheduler holds their segments until the load ends."""

    match: PrefixMatch | None  # None: ``plans`` tell
    chunks: int  # at which the load ends
    #: by worker, if a part comes from GPUs of other ranks; a plan may be shorter
    plans: dict[int, RankPlan] = field(default_factory=dict)
    hashes: bytes = b""  # of the chunks, one behind the other, if they are published once they are loaded


@dataclass
class SaveSpec(LoadStoreSpec):
    """For the workers: the pages to save. ``chunks``: numbers of the engine's chunks by its group, in the order of
    their blocks."""

    plan: SavePlan
    chunks: dict[int, tuple[int, ...]]
    attempt: bytes
    publish: bool = False  # these chunks, whether saved or not, to the other ranks


class _Unread(NamedTuple):
    """A request whose adapter is being read."""

    request: Any
    reading: Reading
    context: list[ReqContext]  # of the request, once ``on_new_request`` was called


class KvfsManager(OffloadingManager):
    """Owns the state of requests (``RequestPages``); delegates lookups and plans to the namespace.

    Runs on the scheduler's thread. No call raises, and none waits for a disk. The longest delay of a step is the
    deadline of the index: a quarter of a second, then none until the index answers again.
    """

    def __init__(self, store: Store, namespace: Namespace, model: EngineModel, settings: VllmSettings) -> None:
        self._store, self._ns, self._model, self._settings = store, namespace, model, settings
        self._groups = {group.index: group for group in model.groups}
        self._note_needs(namespace)
        self._adapters = Adapters(model.adapters)
        self._requests: dict[str, RequestPages] = {}
        self._unread: dict[str, _Unread] = {}
        self._queued: dict[str, RequestPages] = {}  # of ``_requests``: those that the engine has not asked about
        self._ahead_bytes = (memory_limit() or 0) // AHEAD_SHARE
        self._epoch = 0  # of this engine; part of the chain of every prompt
        #: nothing is stored: the engine's blocks hold KV of weights before a reset, or of a failed load of another
        #: connector
        self.tainted = False
        self.metrics = Metrics()
        self.costs = Costs()
        self._live: set[str] = set()  # requests, also those that kvfs does not serve
        self._loading: dict[str, RequestPages] = {}  # in engines with one cache group; also requests that were aborted
        self._prefetcher = Prefetcher(store, namespace, self.costs)
        self._prefetcher.begin(namespace)
        self._holds = False  # whether a request waits for the bucket in this step
        self._fetches = Fetches(store, self.costs, settings.bucket_seconds)
        self._peers: PeerLookups | None = None
        self._warm_up()

    def _warm_up(self) -> None:
        """Look up a prompt that no engine has: the first lookups of a process take several times as long, which the
        first requests need not wait for."""
        for _ in range(2):
            pages = self._ns.prompt([0] * self._ns.layout.page_tokens, extra={0: b"warm up"})
            pages.look()
            pages.restorable()

    # -- called by the connector -------------------------------------------------------------

    def use(self, namespace: Namespace, model: EngineModel) -> None:
        """Another namespace, before the first request: the workers have told what the scheduler did not know."""
        assert not self._requests
        self._ns, self._model = namespace, model
        self._prefetcher.begin(namespace)
        self._groups = {group.index: group for group in model.groups}
        self._note_needs(namespace)

    def _note_needs(self, namespace: Namespace) -> None:
        """Whether all groups, or some, restore a prompt only from all of their pages."""
        whole = [group.need.kind == "all" for group in namespace.layout.groups]
        self._all_needed, self._some_needed = all(whole), any(whole)

    @property
    def block_tokens(self) -> dict[int, int]:
        """Of a block, by cache group of the engine."""
        return {index: group.block_tokens for index, group in self._groups.items()}

    def use_peers(self, peers: PeerLookups) -> None:
        """The workers are ranks whose pages others of this host pull, before the first request."""
        assert self._peers is None and not self._requests
        self._peers = peers

    def announce(self, request: Any) -> None:
        """A new request. ``on_new_request`` follows, and sees only its id."""
        self._live.add(request.request_id)
        lora = request.lora_request
        reading = self._adapters.begin(lora) if lora is not None else None
        if reading is not None and not reading.ended.wait(CALL_SECONDS):
            self._unread[request.request_id] = _Unread(request, reading, [])
            return
        self._begin(request, b"" if lora is None else self._adapters.digest(lora, reading) if reading else None)

    def _begin(self, request: Any, adapter: bytes | None) -> None:
        """Keep the state of a request, if kvfs serves it. ``adapter``: its digest; None if that is unknown."""
        if not cacheable(request, items_hashed=self._model.items_hashed, adapter=adapter):
            self.metrics.add("requests_bypassed")
            return
        tokens = request.num_prompt_tokens
        output = 0 if self._settings.offload_prompt_only else request.max_tokens  # at most, that may be stored
        if tokens < self._settings.min_tokens or tokens + output < self._model.page_tokens:
            return
        state = RequestPages(request, self._ns, self._epoch, self._settings.max_tokens, adapter or b"")
        self._requests[request.request_id] = self._queued[request.request_id] = state
        if self._fetches.in_use and self._look(state):
            state.waiting = self._fetches.begin(self._ns, state)

    def refresh(self, req_id: str, computed: int = 0) -> bool:
        """The scheduler is about to look up the keys of this request, of which it has ``computed`` tokens.

        Whether the request waits for the bucket, or for its adapter: then it is asked again with the next step.
        """
        if req_id in self._unread and self._waits_for_adapter(req_id):
            self._holds = True
            return True
        self._queued.pop(req_id, None)
        state = self._requests.get(req_id)
        if state is None or state.failed:
            return False
        if state.waiting is not None:
            if self._fetches.goes_on(state.waiting, computed, state.page_tokens, self._ns.layout.page_bytes):
                self._holds = True
                return True
            self._stop_waiting(state)
        if self._look(state, prefix=not computed and self._prefix_suffices):
            self._compare(state, computed)
        return False

    def _waits_for_adapter(self, req_id: str) -> bool:
        """Whether the adapter of a request is still being read. If not, the request has its state or bypasses kvfs."""
        request, reading, context = self._unread[req_id]
        if not reading.ended.is_set() and not reading.late:
            return True
        del self._unread[req_id]
        self._begin(request, self._adapters.digest(request.lora_request, reading))
        if context and (state := self._requests.get(req_id)) is not None:
            context[0].set_state(state)
        return False

    def note_step(self, tokens: int) -> None:
        """The scheduler has scheduled a step."""
        self.costs.note_step(tokens)
        if self._holds and not tokens:
            self.costs.note_wait()
        self._holds = False
        if self._queued and self._prefetcher.waiting < AHEAD_MAX:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """The engine has not asked about the oldest request of its queue, which waits for others to end: read what the
        page cache lacks of it. Once, and in the prefetcher's thread."""
        state = self._queued.pop(next(iter(self._queued)))
        nbytes = state.pages.chunks * self._ns.layout.page_bytes
        if READ_BYTES_MIN <= nbytes <= self._ahead_bytes and self._store.settings.mode == "cache":
            self._prefetcher.ask_prompt(state.pages.hashes)

    def admitted(self, req_id: str) -> None:
        """The request got its blocks. If it is preempted, the next lookup must see what was stored until then."""
        state = self._requests.get(req_id)
        if state is not None:
            state.looked_at = float("-inf")

    def is_loading(self, req_id: str) -> bool:
        state = self._requests.get(req_id)
        return state is not None and state.loads

    def loads_into(self, req_id: str, blocks: Iterable[int]) -> None:
        """The blocks that the load of a request fills, in an engine with one cache group."""
        state = self._requests.get(req_id)
        if state is not None and state.loads:
            state.blocks = frozenset(blocks)
            self._loading[req_id] = state

    def shortened(self, lost: set[int]) -> dict[str, frozenset[int]]:
        """Requests whose load has not filled some of the blocks ``lost``, and their blocks. What they compute may be
        stored again."""
        found = {req_id: state for req_id, state in self._loading.items() if state.blocks & lost}
        for state in found.values():
            self.metrics.add("loads_shortened", not state.failed)
            state.failed = True
            state.forget()
        return {req_id: state.blocks for req_id, state in found.items()}

    def load_failed(self, req_id: str) -> None:
        """Its next lookups miss, so that it is computed; what it computes may be stored again."""
        self.metrics.add("loads_failed")
        state = self._requests.get(req_id)
        if state is not None:
            state.failed = True
            state.release()
            state.forget()

    # -- lookups -----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        state = self._requests.get(req_context.req_id)
        if state is not None:
            req_context.set_state(state)
        elif (unread := self._unread.get(req_context.req_id)) is not None:
            unread.context.append(req_context)
        return RequestOffloadingContext()

    def leading_tokens(self, index: int, req_context: ReqContext) -> int:
        """Up to where all chunks of a group of the engine are hits, at least. Asked before ``lookup``, which takes
        1 us for each chunk of the engine together with its caller."""
        state: RequestPages | None = req_context.get_state(RequestPages)
        stored = self._groups[index].stored
        if state is None or state.failed or any(each.kind == "state" for each in stored):
            return 0
        return min([state.worth_tokens, *(state.leading_tokens(each.name) for each in stored)])

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state, end = req_context.get_state(RequestPages), req_context.get_offload_key_position(key)
        if state is None or state.failed or end is None or end > state.worth_tokens:
            return LookupResult.MISS
        group = self._groups[get_offload_group_idx(key)]
        for stored in group.stored:
            if stored.kind != "state" and end <= state.leading_tokens(stored.name):
                continue
            pages = group.pages(stored, end, state.page_tokens)
            whole = (1 << len(pages)) - 1
            if not pages or state.has(stored.name) >> pages.start & whole != whole:
                return LookupResult.MISS
        return LookupResult.HIT

    def load_source(self, req_id: str) -> CacheHitSource | None:
        """Where all pages of a request's load are; None where they are in several places, or not all tokens have pages.

        Asked before ``get_load_source``, which takes 10 us for each chunk of the engine.
        """
        state = self._requests.get(req_id)
        if state is None or not self._some_needed:
            return None
        if not state.tiers:
            state.tiers = _tiers(state)
        places = [tier for tier, groups in state.tiers.items() if any(groups.values())]
        return _SOURCES.get(places[0]) if len(places) == 1 else None

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        state = req_context.get_state(RequestPages)
        if state is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        if not state.tiers:
            state.tiers = _tiers(state)
        end = req_context.get_offload_key_position(key)
        wanted = (
            {name: span(pages.start, len(pages)) for name, pages in self._pages(key, end)} if end is not None else {}
        )
        slowest = None
        for tier, groups in sorted(state.tiers.items()):
            some = {name: bits & groups.get(name, 0) for name, bits in wanted.items()}
            slowest = tier if any(some.values()) else slowest
            wanted = {name: bits & ~some[name] for name, bits in wanted.items()}
        known = slowest is not None and not any(wanted.values())
        return _SOURCES[slowest] if slowest is not None and known else CacheHitSource.EXTERNAL_UNSPECIFIED

    def _stop_waiting(self, state: RequestPages) -> None:
        """The next lookup sees what has come from the bucket; nothing more is asked of it."""
        if (waiting := state.waiting) is None:
            return
        state.waiting, state.looked_at = None, float("-inf")
        self.metrics.add("fetch_seconds", self._fetches.end(waiting))
        self.metrics.add("fetches", bool(waiting.fetch.pages))
        self.metrics.add("pages_fetched", waiting.fetch.pages)

    @property
    def _prefix_suffices(self) -> bool:
        """Whether a request of which the engine has nothing can use no page behind one that the store lacks."""
        return self._all_needed and self._peers is None and not self._fetches.in_use

    def _look(self, state: RequestPages, first: int | None = None, *, prefix: bool = False) -> bool:
        """Look up the chunks from ``first`` on, or all of them if the last lookup is old; False if it is not.

        ``prefix``: of all of them, those before the first that is missing.
        """
        now = time.monotonic()
        if first is None and now - state.looked_at <= FRESH_SECONDS and (prefix or not state.prefix):
            return False
        state.grow()
        state.look(first or 0, prefix=prefix)
        if first is None and self._peers is not None:
            state.use_peers(self._peers.held(state.pages))
        done = time.monotonic()
        if first is None:
            state.looked_at = done
        self.metrics.add("lookup_seconds", done - now)
        return True

    def _compare(self, state: RequestPages, computed: int) -> None:
        """Decide how much of what is stored is loaded: where the disk is slower than computing, only what gains time.

        Of engines with several groups all or nothing: what a shorter length needs is not a part of what a longer needs.
        """
        before, state.worth_tokens, state.tiers = state.worth_tokens, TOKENS_MAX, {}
        size, layout = state.page_tokens, self._ns.layout
        if state.pages.chunks * layout.page_bytes < READ_BYTES_MIN:
            return
        first, end = computed // size, state.pages.restorable()
        if not 0 < end - first <= COMPARED_PAGES_MAX or (end - first) * layout.page_bytes < READ_BYTES_MIN:
            return
        if not self.costs.disk_loses(size, layout.page_bytes):
            return
        with state.pages.select(state.pages.needed(first, end), end) as match:
            state.tiers = _tiers_of([match])
        slow = {name: bits & ~state.peers.get(name, 0) for name, bits in state.tiers[Tier.DISK].items()}
        cold = reduce(or_, slow.values())
        if self._all_needed:
            worth = self.costs.best_end(first, end, cold, size, layout.page_bytes)
        else:
            nbytes = sum(match.group(name).part_bytes * bits.bit_count() for name, bits in slow.items())
            worth = first if nbytes >= READ_BYTES_MIN and self.costs.disk_loses((end - first) * size, nbytes) else end
        if worth < end:
            state.worth_tokens = worth * size
            if before == TOKENS_MAX:  # a request that waits is asked again and again
                self.metrics.add("loads_not_worth")
                self.metrics.add("tokens_not_worth", (end - worth) * size)
            self._prefetcher.ask(state.pages.select(state.pages.needed(worth, end), end))

    def _pages(self, key: OffloadKey, end: int) -> list[tuple[str, range]]:
        return self._pages_of(get_offload_group_idx(key), end)

    def _pages_of(self, index: int, end: int) -> list[tuple[str, range]]:
        """(group of the layout, pages) of a chunk of a group of the engine that ends at token ``end``; no pages where
        none can hold it."""
        group = self._groups[index]
        return [(stored.name, group.pages(stored, end, self._model.page_tokens)) for stored in group.stored]

    # -- loads -------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        state = req_context.get_state(RequestPages)
        assert state is not None, "vLLM loads pages of a request without a hit"
        ends: dict[int, list[int]] = {}  # of the chunks, by group of the engine
        for key in keys:
            end = req_context.get_offload_key_position(key)
            assert end is not None
            ends.setdefault(get_offload_group_idx(key), []).append(end)
        first: dict[str, int] = {}
        last = 0
        for index, some in ends.items():
            for name, pages in (each for end in (min(some), max(some)) for each in self._pages_of(index, end)):
                first[name] = min(pages.start, first.get(name, pages.start))
                last = max(last, pages.stop)
        state.release()
        begin = min(first.values(), default=last)
        if self._peers is not None and any(state.peers.values()):
            state.plans = self._peers.plans(state.pages, begin, last)
        if state.plans:
            state.tiers = {}
        else:
            state.match = state.pages.select(first, last, known=True)
        if not state.counted:
            state.counted = True
            state.pages.note_lookup((last - begin) * state.page_tokens, state.match)
        hashes = state.pages.joined_hashes(last) if self._peers is not None else b""
        return LoadSpec(state.match, last, state.plans, hashes)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        state = req_context.get_state(RequestPages)
        self._loading.pop(req_context.req_id, None)
        if state is not None:
            state.release()

    # -- saves -------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """All missing pages. vLLM offers each page of a request once: what is left out here is not stored by it."""
        state = req_context.get_state(RequestPages)
        saves, publishes = not self._settings.read_only, self._peers is not None
        if state is None or not keys or not (saves or publishes) or self.tainted:
            return PrepareStoreOutput([], LoadStoreSpec(), [])
        offered = {key: end for key in keys if (end := req_context.get_offload_key_position(key)) is not None}
        wanted = self._missing(state, offered) if saves else {}
        chosen = list(offered) if publishes else [
            key for key, end in offered.items()
            if any(wanted.get(name, 0) >> pages.start & (1 << len(pages)) - 1 for name, pages in self._pages(key, end))
        ]  # fmt: skip
        return PrepareStoreOutput(chosen, self._save_spec(state, wanted, {key: offered[key] for key in chosen}), [])

    def _missing(self, state: RequestPages, offered: Mapping[OffloadKey, int]) -> dict[str, int]:
        """Pages by group, as bits, that the offered chunks fill and that nothing has stored or is storing."""
        filled: dict[str, list[int]] = {}  # pages of each group, once for each chunk
        size = self._model.page_tokens
        for key, end in offered.items():
            group = self._groups[get_offload_group_idx(key)]
            for stored in group.stored:
                filled.setdefault(stored.name, []).extend(group.pages(stored, end, size))
        whole = {}
        for group in self._groups.values():
            for stored in group.stored:
                pages = filled.get(stored.name, [])
                if group.chunk_tokens < size and stored.kind != "state":  # several chunks make a page
                    pages = [page for page, n in Counter(pages).items() if n * group.chunk_tokens >= size]
                whole[stored.name] = bits_of(sorted(pages))
        if not any(whole.values()):
            return {}
        self._look(state, first=min((bits & -bits).bit_length() - 1 for bits in whole.values() if bits))
        known, kept = state.pages, span(0, state.pages.chunks)
        there = {name: known.stored[name] | known.writing[name] | state.storing.get(name, 0) for name in whole}
        return {name: bits & ~there[name] & kept for name, bits in whole.items()}

    def _save_spec(
        self, state: RequestPages, wanted: Mapping[str, int], chosen: Mapping[OffloadKey, int]
    ) -> LoadStoreSpec:
        if not chosen:
            return LoadStoreSpec()
        for name, bits in wanted.items():
            state.storing[name] = state.storing.get(name, 0) | bits
        chunks: dict[int, list[int]] = {}
        for key, end in chosen.items():
            index = get_offload_group_idx(key)
            chunks.setdefault(index, []).append((end - 1) // self._groups[index].chunk_tokens)
        plan = state.pages.plan({name: members(bits) for name, bits in wanted.items() if bits})
        numbers = {index: tuple(some) for index, some in chunks.items()}
        return SaveSpec(plan, numbers, state.attempt, self._peers is not None)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """The engine's blocks are free; the pages may or may not have been published."""
        state = req_context.get_state(RequestPages)
        for key in keys if state is not None else ():
            end = req_context.get_offload_key_position(key)
            for name, pages in self._pages(key, end) if end is not None and state is not None else ():
                state.storing[name] = state.storing.get(name, 0) & ~span(pages.start, len(pages))

    # -- the rest ----------------------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A preempted request had been running, so a load that failed before no longer prevents its lookups."""
        for req_id in context.preempted_req_ids:
            state = self._requests.get(req_id)
            if state is not None:
                state.failed = False

    def on_request_finished(self, req_context: ReqContext) -> None:
        state = self._requests.pop(req_context.req_id, None)
        self._unread.pop(req_context.req_id, None)
        self._queued.pop(req_context.req_id, None)
        self._live.discard(req_context.req_id)
        if not self._live:
            self.costs.note_idle()
        self._prefetcher.note_speed()
        if state is not None:
            self._stop_waiting(state)
        if state is not None and not state.counted:
            state.counted = True
            state.pages.note_lookup(0)

    def reset_cache(self) -> None:
        """After a change of weights in place: this engine no longer finds what was stored before.

        The pages stay in the store for engines that start with the previous weights.
        """
        self._epoch = random_epoch()
        self._loading.clear()  # their ends are not reported any more
        for state in self._requests.values():
            self._stop_waiting(state)
            state.restart(self._ns, self._epoch)

    def get_stats(self) -> Any:
        return self.metrics.take()

    def shutdown(self) -> None:
        for state in (*self._requests.values(), *self._loading.values()):
            self._stop_waiting(state)
            state.release()
        self._requests.clear()
        self._queued.clear()
        self._loading.clear()
        self._prefetcher.stop()
        if self._peers is not None:
            self._peers.close()
        self._store.close()


def _tiers(state: RequestPages) -> dict[Tier, dict[str, int]]:
    """Of the pages of a load; empty for loads of too many pages."""
    matches = [state.match, *(plan.match for plan in state.plans.values())]
    known = [match for match in matches if match is not None]
    if any(match.chunks > TIER_PAGES_MAX for match in known):
        return {}
    tiers = _tiers_of(known)
    for pages in (pages for plan in state.plans.values() for pages in plan.peers.values()):
        for name, (chunks, _) in pages.groups.items():
            peers = bits_of(chunks)
            for groups in tiers.values():
                peers &= ~groups.get(name, 0)
            tiers[Tier.PEER][name] = tiers[Tier.PEER].get(name, 0) | peers
    return tiers


def _tiers_of(matches: Sequence[PrefixMatch]) -> dict[Tier, dict[str, int]]:
    """Of the pages of matches, as a prompt's ``tiers``: the slowest one of pages that several name."""
    tiers: dict[Tier, dict[str, int]] = {tier: {} for tier in _SOURCES}
    for match in matches:
        cold, disk, host = match.cold(), tiers[Tier.DISK], tiers[Tier.HOST]
        for gm in match.groups:
            disk[gm.name] = disk.get(gm.name, 0) | cold[gm.name]
            host[gm.name] = (host.get(gm.name, 0) | span(gm.first, gm.count)) & ~disk[gm.name]
    return tiers
