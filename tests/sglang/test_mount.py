"""SGLang's own file backend, pointed at files/ of a mount: what one controller saved, another one loads."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.runtime_context import get_parallel

import kvfs
from tests.mount.real import needs_fuse, serving
from tests.sglang.engine import RealEngine, host_pool
from tests.sglang.test_hicache import contents, tokens_of


class FileEngine(RealEngine):
    """One rank: a HiCacheController with SGLang's backend ``file``."""

    def __init__(self, folder: Path) -> None:
        self.device, self.pool = host_pool()
        self._pass_prefix, self.page = True, self.pool.page_size
        self._free = list(range(self.pool.size // self.page))[::-1]
        allocator = PagedTokenToKVPoolAllocator(self.device.size, self.page, torch.bfloat16, "cpu", self.device, False)
        with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
            self.controller = HiCacheController(
                allocator, self.pool, self.page, tp_group=None, load_cache_event=threading.Event(),
                storage_backend="file", model_name="org/model",
                storage_backend_extra_config={"file_storage_path": str(folder)},
            )  # fmt: skip


@needs_fuse
def test_the_file_backend_of_sglang_in_a_mount(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    store, folder = tmp_path / "store", tmp_path / "mnt" / "files" / "hicache"
    kvfs.open(store, capacity="64MiB").close()
    tokens = tokens_of(1, 20)
    with serving(store, tmp_path / "mnt"):
        first = FileEngine(folder)
        pages = contents(first.pool, 20)
        assert first.put(tokens, pages) == 20
        first.close()
    with serving(store, tmp_path / "mnt"):
        second = FileEngine(folder)
        assert second.lookup(tokens) == 20
        assert second.get(tokens, 20) == pages
        second.close()
