"""Loading the pages of a file: what the loads need to be fast."""

from __future__ import annotations

from pathlib import Path

import kvfs
from kvfs.format import segment as fmt
from kvfs.mount.chunks import BATCH_BYTES, Chunks
from kvfs.mount.spool import Spool
from kvfs.system.memory_views import address_of


def test_a_batch_is_loaded_where_reads_past_the_page_cache_may_go(store: kvfs.Store, tmp_path: Path) -> None:
    chunks = Chunks(store, Spool(str(tmp_path), 1 << 20))
    buffer = chunks._buffer()
    assert len(buffer) == BATCH_BYTES
    assert address_of(buffer) % fmt.BLOCK == 0
    chunks.close()
