"""The service that LightLLM's disk worker imports from ``light_mem``: pages of its CPU cache to a store, and back.

LightLLM names a page by a hash of all tokens up to its end. A worker that is patched also tells the tokens: then pages
have the names and the order of bytes that every engine of kvfs knows, else they are opaque, under LightLLM's hash.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvfs.errors import ConfigError, KvfsError, UnsupportedModelError
from kvfs.integrations.lightllm.model import Server
from kvfs.integrations.lightllm.prompts import HASH_BITS, Prompts
from kvfs.integrations.lightllm.settings import VARIABLE, LightLLMSettings, settings_of
from kvfs.integrations.lightllm.tasks import PyTask
from kvfs.lookup.prompt_pages import PromptPages
from kvfs.namespace import Namespace
from kvfs.pages.chunk_set import members
from kvfs.pages.describe import describe
from kvfs.pages.device_kv import DeviceKV
from kvfs.pages.layout import Group
from kvfs.store import open_store
from kvfs.transfer.handle import Transfer
from kvfs.types import PageDone, PageOutcome, SavePlan, TokensLike

log = logging.getLogger("lightllm.kvfs")
TRANSFERS_MAX = 1024  # unfinished ones; LightLLM loads on 500 threads
MODES = ("r", "w")


class PyLocalCacheService:
    """Owns the store and the transport of one LightLLM server. Thread-safe. No call raises because of a disk.

    ``kvcache_tensor``: uint8 [pages, bytes of a page], contiguous, in host memory: LightLLM's CPU cache.
    ``file``: a path in --disk_cache_dir; ``storage_size``: of a new store, in bytes. ``num_shard`` and ``num_worker``
    have no meaning here. ``prompts``: the caller calls ``tell_prompt``. ConfigError or UnsupportedModelError names the
    flag or setting to change, before a store is made.
    """

    def __init__(
        self, kvcache_tensor: Any, file: str, storage_size: int = 32 << 30, num_shard: int = 32, num_worker: int = 16,
        prompts: bool = False,
    ) -> None:  # fmt: skip
        self._settings, server = settings_of(), Server()
        _check_tensor(kvcache_tensor)
        server.check()
        self._pages, page_bytes = (int(n) for n in kvcache_tensor.shape)
        arguments = _namespace_arguments(server, self._settings, page_bytes, prompts)
        path = self._settings.path or _path_by(server, file)
        self._prompts = Prompts() if arguments["layout"].kind != "opaque" else None
        capacity = self._settings.capacity or storage_size
        self._store = open_store(path, capacity=capacity)
        try:
            self._space: Namespace = self._store.namespace(**arguments, codec=self._settings.codec)
            (self._group,) = self._space.layout.groups
            kv = _describe(self._group, kvcache_tensor, server)
            self._io = self._space.attach(
                kv, ring_bytes=self._settings.ring_bytes, threads=self._settings.threads, queue_max=TRANSFERS_MAX
            )
        except BaseException:
            self._store.close()
            raise
        self._page_tokens = self._space.layout.page_tokens
        self._lock = threading.Lock()
        self._active: dict[str, set[PyTask]] = {mode: set() for mode in MODES}
        # what LightLLM reads: a block, the unit of its disk cache, is one page, so that any tail can be loaded
        self._n, self._page_size, self._block_size = 1, page_bytes, page_bytes

    # -- for LightLLM ------------------------------------------------------------------------

    def tell_prompt(self, hash_128s: Sequence[int], token_ids: TokensLike) -> None:
        """Tell the tokens of a prompt, and LightLLM's hashes of its pages. Without meaning where pages are opaque."""
        if self._prompts is None or len(self._prompts.chunks(hash_128s)) == len(hash_128s):
            return
        try:
            chunks = self._space.chunk_hashes(token_ids)
        except KvfsError as exc:
            log.warning("kvfs: a prompt is not stored: %s", exc)
            return
        if not self._prompts.tell(hash_128s, chunks):
            log.warning("kvfs: two prompts have one hash of LightLLM: pages under it are not stored and not loaded")

    def query(self, hash_128s: Sequence[int]) -> list[bool]:
        """Which pages are stored. ``hash_128s``: of a prompt, from its first page on."""
        if not len(hash_128s):
            return []
        pages = self._prompt(hash_128s)
        pages.look()
        there = pages.stored[self._group.name]
        return [bool(there >> n & 1) for n in range(len(hash_128s))]

    def create(self, hash_128s: Sequence[int], kv_page_indexer: Any, mode: str, start_pos: int = 0) -> PyTask:
        """Save ("w") or load ("r") the pages of a prompt from number ``start_pos`` on; returns at once.

        ``kv_page_indexer``: for each hash the page of the tensor. ConfigError for what does not fit.
        """
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}: pass 'r' to load or 'w' to save")
        units = [int(n) for n in kv_page_indexer]
        if len(units) != len(hash_128s):
            raise ConfigError(f"{len(units)} pages for {len(hash_128s)} hashes: pass one for each")
        if type(start_pos) is not int or not 0 <= start_pos <= len(units):
            raise ConfigError(f"start_pos is {start_pos!r}: pass the number of a page, at most {len(units)}")
        wrong = next((n for n in units[start_pos:] if not 0 <= n < self._pages), None)
        if wrong is not None:
            raise ConfigError(f"there is no page {wrong}: the tensor has 0 to {self._pages - 1}")
        pages = self._prompt(hash_128s)
        return self._save(pages, units, start_pos) if mode == "w" else self._load(pages, units, start_pos)

    def active_threads(self, mode: str) -> int:
        """How many tasks of a mode have not ended."""
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}: pass 'r' for loads or 'w' for saves")
        with self._lock:
            return len(self._active[mode])

    def abort(self, t: PyTask) -> None:
        """End a task: when this returns, no byte of its pages is read or written any more."""
        t.abort()

    # -- for tests and tools -----------------------------------------------------------------

    def counters(self) -> Mapping[str, int]:
        """The counters of the store, of this process."""
        return self._store.stats()["counters"]

    @property
    def identity(self) -> bytes:
        """Digest of the namespace."""
        return self._space.identity.digest

    def close(self) -> None:
        """End what is under way, and close the store. May be called again; LightLLM does not."""
        self._io.close()
        self._store.close()

    def _hash(self, hash_128s: Sequence[int]) -> list[str]:
        """The names of blocks, which LightMem's own test scripts count."""
        return [format(name, "032x") for name in hash_128s]

    # -- helpers -----------------------------------------------------------------------------

    def _prompt(self, hash_128s: Sequence[int]) -> PromptPages:
        """The pages under these hashes, as far as their names are known."""
        if self._prompts is not None:
            return self._space.prompt(hashes=self._prompts.chunks(hash_128s))
        return self._space.prompt(keys=[_key(name) for name in hash_128s])

    def _save(self, pages: PromptPages, units: Sequence[int], first: int) -> PyTask:
        name, end = self._group.name, max(first, pages.chunks)
        pages.look(min(first, pages.chunks))
        there = (pages.stored[name] | pages.writing[name]) >> first << first
        already, missing = list(members(there)), [c for c in range(first, end) if not there >> c & 1]
        task = self._task("w", len(units) - first, [units[c] for c in already])
        for c in already:
            task.finished(c - first)
        if not missing:  # nothing to do; pages whose names are not known stay without
            task.end()
            return task
        seconds = self._settings.store_seconds
        plan: SavePlan = pages.plan({name: missing})
        saving = self._io.save(
            plan, units[first:end], first_unit=first, deadline=seconds, ttl=self._settings.ttl,
            on_page=partial(_page_done, task, first), on_done=partial(_over, task),
        )  # fmt: skip
        task.follow(saving, seconds)
        return task

    def _load(self, pages: PromptPages, units: Sequence[int], first: int) -> PyTask:
        task, end = self._task("r", len(units) - first, []), pages.chunks
        if end <= first:
            task.end()
            return task
        seconds = self._settings.load_seconds
        with pages.select({self._group.name: first}, end) as match:  # the transfer holds the pages from here on
            loading = self._io.load(
                match, units[first:end], first_unit=first, first_token=first * self._page_tokens, deadline=seconds,
                on_page=partial(_page_done, task, first), on_done=partial(_over, task),
            )  # fmt: skip
        task.follow(loading, seconds)
        return task

    def _task(self, mode: str, pages: int, already: Sequence[int]) -> PyTask:
        def ended(task: PyTask) -> None:
            with self._lock:
                self._active[mode].discard(task)

        task = PyTask(pages, already, ended)
        with self._lock:
            self._active[mode].add(task)
        return task


def _page_done(task: PyTask, first: int, done: PageDone) -> None:
    if done.outcome in (PageOutcome.STORED, PageOutcome.SKIPPED, PageOutcome.LOADED):
        task.finished(done.chunk - first)


def _over(task: PyTask, _: Transfer) -> None:
    task.end()


def _key(hash_128: int) -> bytes:
    if not 0 <= hash_128 < 1 << HASH_BITS:
        raise ConfigError(
            f"hash {hash_128} has more than {HASH_BITS} bits, or a sign: pass hashes as LightLLM makes them"
        )
    return int(hash_128).to_bytes(HASH_BITS // 8, "little")


def _check_tensor(tensor: Any) -> None:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if len(shape) != 2 or dtype != "uint8" or 0 in shape:
        raise ConfigError(f"kvcache_tensor is {dtype} {list(shape)}: pass uint8 [pages, bytes of a page]")
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError(f"kvcache_tensor is on {tensor.device}, or has gaps: pass a contiguous tensor in host memory")


def _namespace_arguments(server: Server, settings: LightLLMSettings, page_bytes: int, prompts: bool) -> dict[str, Any]:
    if prompts:
        try:
            return server.canonical(settings, page_bytes)
        except UnsupportedModelError as exc:
            if settings.share:
                raise
            log.info("kvfs: pages are opaque, under hashes of LightLLM: %s", exc)
    return server.opaque(settings, page_bytes)


def _path_by(server: Server, file: str) -> str:
    """Where the store is if nothing else says so."""
    if server and not server.argument("disk_cache_dir"):  # LightLLM makes a new directory at each start
        raise ConfigError(
            f'no directory of the store: pass --disk_cache_dir, or write "path" into {VARIABLE}, or set KVFS_DIR'
        )
    return f"{file}.kvfs"


def _describe(group: Group, tensor: Any, server: Server) -> DeviceKV:
    """LightLLM's tensor as buffers of ``group``: opaque pages, or [page, layer, token, K heads then V heads, dim]."""
    if group.cell.encoding == "opaque":
        return describe(group, [tensor], "slot,dim")
    import torch

    whole = tensor.view(getattr(torch, server.dtype))
    dim = group.cell.nbytes // (2 * whole.element_size())
    shape = (tensor.shape[0], len(group.layers), server.page_tokens, 2 * group.heads, dim)
    return describe(group, whole.view(shape), "block,layer,token,2*head,dim")
