"""One rank's share of LightLLM's pool as token slots, attached to a store: lookups, loads and saves of whole prompts.

Each ``Restore`` and ``Save`` is made and asked by the inference loop, which never waits for it; hashing, lookups and
checks of slot numbers run on two threads here, copies on those of the transport.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvfs.errors import UnsupportedModelError
from kvfs.integrations.lightllm.model import Server
from kvfs.integrations.lightllm.settings import LightLLMSettings, warm_bytes
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.namespace import Namespace
from kvfs.pages.describe import describe
from kvfs.pages.device_kv import DeviceKV
from kvfs.pages.layout import Group
from kvfs.store import Store, open_store
from kvfs.transfer.handle import Transfer
from kvfs.transfer.host_io import HostIO
from kvfs.transfer.workers import JobThreads
from kvfs.types import Tier

log = logging.getLogger("lightllm.kvfs")
UNKNOWN = -1  # a count of tokens that is not known yet
WARM_SECONDS = 10.0
POLL_SECONDS = 1e-3
CLOSE_SECONDS = 10.0
TRANSFERS_MAX = 1024  # unfinished ones
#: On which the engine enqueues what uses slots. What is enqueued there later may be waited for, too.
Streams = tuple[Any, ...]


@dataclass(frozen=True)
class Shard:
    """What one rank holds of the KV heads: [layer, slot, its K heads then its V heads, dim]."""

    buffer: torch.Tensor
    rank: int
    ranks: int

    def device_kv(self, group: Group) -> DeviceKV:
        """The buffer as buffers of ``group``. UnsupportedModelError if it is not a rank's share of the model."""
        layers, _, heads, dim = self.buffer.shape
        copies, mine = max(1, self.ranks // group.heads), max(1, group.heads // self.ranks)
        cell = 2 * dim * self.buffer.element_size()
        if (layers, heads, cell, mine * self.ranks) != (
            len(group.layers), 2 * mine, group.cell.nbytes, group.heads * copies,
        ):  # fmt: skip
            raise UnsupportedModelError(
                f"its pool holds {layers} layers of {heads} heads of K and V of {dim} {self.buffer.dtype}, and by "
                f"config.json rank {self.rank} of {self.ranks} has a share of {len(group.layers)} layers of "
                f"{group.heads} KV heads, of {group.cell.nbytes} bytes each: leave \"device\" in KVFS_LIGHTLLM out"
            )  # fmt: skip
        return describe(
            group, self.buffer, "layer,slot,2*head,dim", first_head=self.rank // copies * mine,
            replica=(self.rank % copies, copies),
        )  # fmt: skip


@dataclass(frozen=True)
class DevicePages:
    """Owns the store and the transport of one rank."""

    settings: LightLLMSettings
    store: Store
    space: Namespace
    io: HostIO
    buffer: torch.Tensor
    on_gpu: bool
    lookups: JobThreads = field(default_factory=lambda: JobThreads("load", 1))
    offloads: JobThreads = field(default_factory=lambda: JobThreads("offload", 1))

    @classmethod
    def open(cls, settings: LightLLMSettings, server: Server, shard: Shard) -> DevicePages:
        """ConfigError or UnsupportedModelError names the flag or setting to change, before a store is made."""
        path, capacity, arguments = server.device(settings)
        kv = shard.device_kv(arguments["layout"].groups[0])
        on_gpu = kv.memory.startswith("cuda")
        store = open_store(path, capacity=capacity)
        try:
            space = store.namespace(**arguments, codec=settings.codec)
            io = space.attach(
                kv, ring_bytes=settings.ring_bytes, threads=settings.threads, queue_max=TRANSFERS_MAX,
                append_elsewhere=on_gpu,
            )  # fmt: skip
            if on_gpu:  # now: registering blocks the kernels of a running engine
                io.warm_hottest(warm_bytes(settings, shard.ranks), WARM_SECONDS)
        except BaseException:
            store.close()
            raise
        return cls(settings, store, space, io, shard.buffer, on_gpu)

    @property
    def page_tokens(self) -> int:
        return self.space.layout.page_tokens

    def after(self, streams: Streams) -> Any:
        """An event behind all that uses slots now; None in host memory, where nothing is asynchronous."""
        return self._behind(streams) if self.on_gpu else None

    def to_host(self, row: torch.Tensor, streams: Streams) -> tuple[torch.Tensor, Any]:
        """Slot numbers that are in GPU memory: on their way to the host, and the event with which they have come."""
        if not self.on_gpu:
            return row.clone(), None
        host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        return host, self._behind(streams, lambda: host.copy_(row, non_blocking=True))

    def _behind(self, streams: Streams, enqueue: Callable[[], object] = lambda: None) -> Any:
        """An event behind all that the engine has enqueued, and what is enqueued on a stream behind that."""
        with torch.cuda.device(self.buffer.device):
            mine = torch.cuda.Stream()
            for stream in streams:
                mine.wait_stream(stream)
            with torch.cuda.stream(mine):
                enqueue()
                event = torch.cuda.Event()
                event.record()
        return event

    def close(self) -> None:
        """End what is under way, and close the store."""
        for threads in (self.lookups, self.offloads):
            threads.close(CLOSE_SECONDS)
        self.io.close()
        self.store.close()


class Restore:
    """The prefix of one request: looked up, then loaded.

    ``tokens`` is UNKNOWN while either is under way; then what was found, later what is restored. Once the load has
    ended, no byte of its slots is written any more.
    """

    def __init__(self, pages: DevicePages, token_ids: Any) -> None:
        self.tokens = UNKNOWN
        self.tiers: Mapping[Tier, int] = {}
        self._pages, self._ids = pages, token_ids
        self._match: PrefixMatch | None = None
        self._transfer: Transfer | None = None
        self._stopped = False
        pages.lookups.put(self._look)

    def load(self, slots: torch.Tensor, first: int, streams: Streams) -> None:
        """Load tokens from number ``first`` on, one for each slot, behind what ``streams`` do."""
        self.tokens = UNKNOWN
        self._pages.lookups.put(partial(self._load, slots, first, streams))

    def stop(self) -> None:
        """Its request is aborted: the load ends soon. Does not wait."""
        if not self._stopped:
            self._stopped = True
            if self._transfer is not None:
                self._transfer.cancel(0.0)

    def close(self) -> None:
        """Release what the lookup holds."""
        self._pages.lookups.put(self._release)

    def _look(self) -> None:
        found = 0
        try:
            if not self._stopped:
                self._match = self._pages.space.match(self._ids, part=self._pages.io.parts)
                found = self._match.tokens
        except Exception:
            log.exception("kvfs: a lookup failed")
        self.tokens = found

    def _load(self, slots: torch.Tensor, first: int, streams: Streams) -> None:
        io, seconds = self._pages.io, self._pages.settings.load_seconds
        try:
            assert self._match is not None
            size = self._pages.page_tokens
            whole = first // size * size  # the page that the radix tree ends in: its first tokens stay as they are
            others = self._match.tokens - first - len(slots)  # that another rank has not found
            units = [*[-1] * (first - whole), *slots.tolist(), *[-1] * others]
            self._transfer = io.load(
                self._match, units, self._pages.after(streams), seconds, first, first_unit=whole, on_done=self._loaded,
            )  # fmt: skip
            if self._stopped:
                self._transfer.cancel(0.0)
        except Exception:
            log.exception("kvfs: a load failed")
            if self._transfer is None:
                self.tokens = 0
        self._release()

    def _loaded(self, transfer: Transfer) -> None:
        result = transfer.result
        if result is not None:
            self.tiers = result.tiers
        self.tokens = result.tokens if result is not None else 0

    def _release(self) -> None:
        if self._match is not None:
            self._match.close()  # a transfer holds the pages itself


class Save:
    """The prompt of one request, to be stored. ``free``: no byte of its slots is read any more."""

    def __init__(
        self, pages: DevicePages, token_ids: Any, row: Callable[[], torch.Tensor], streams: Streams
    ) -> None:  # fmt: skip
        """``row``: the slot numbers, in the memory of the pool, which hold until ``free``."""
        self._pages, self._ids, self._row, self._streams = pages, token_ids, row, streams
        self._over = False
        self._saving: Transfer | None = None
        self._end = time.monotonic() + pages.settings.store_seconds
        pages.offloads.put(self._run)

    @property
    def free(self) -> bool:
        return self._over or (self._saving is not None and self._saving.source_free.is_set())

    def _run(self) -> None:
        try:
            pages, settings = self._pages, self._pages.settings
            slots, after = pages.to_host(self._row(), self._streams)
            plan = pages.space.plan_save(self._ids, part=pages.io.parts)
            if any(plan.missing.values()):
                if self._came(after):
                    left = max(POLL_SECONDS, self._end - time.monotonic())
                    self._saving = pages.io.save(plan, slots, after, left, settings.ttl)
                    return
                log.warning("kvfs: a prompt is not stored: the GPU has not computed it within store_seconds")
        except Exception:
            log.exception("kvfs: a save failed")
        self._over = True

    def _came(self, after: Any) -> bool:
        """Wait for the slot numbers; False if they have not come in time."""
        while after is not None and not after.query():
            if time.monotonic() >= self._end:
                return False
            time.sleep(POLL_SECONDS)
        return True
