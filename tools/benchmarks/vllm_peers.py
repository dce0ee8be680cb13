"""vLLM's own file-system tier on a machine without a GPU, for comparison only.

Its worker copies between GPU and pinned memory by CUDA streams, and its spec refuses other platforms. Here the CPU
makes the copies at the same points; the tiers and their files are vLLM's.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuCopies(OffloadingWorker):
    """Copies synchronously, on the engine's thread."""

    def __init__(self, tensors: list[torch.Tensor], rows: np.ndarray[Any, Any], blocks_per_chunk: int) -> None:
        self._tensors, self._rows, self._per = [t.numpy() for t in tensors], rows, blocks_per_chunk
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, engine: Any, host: Any, *, store: bool) -> bool:
        began, moved = time.monotonic(), 0
        first = engine.block_indices[0] % self._per if engine.block_indices is not None else 0
        for number, block in enumerate(engine.block_ids.tolist(), start=first):
            row, at = self._rows[host.block_ids[number // self._per]], 0
            for tensor in self._tensors:
                size = tensor.shape[1]
                piece = row[at + (number % self._per) * size :][:size]
                if store:
                    piece[:] = tensor[block].view(np.uint8)
                else:
                    tensor[block] = piece.view(np.int8)
                at += size * self._per
                moved += size
        self._done.append(TransferResult(job_id, True, moved, time.monotonic() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
        )  # fmt: skip
        self._region = region
        rows = np.frombuffer(region.mmap_obj, dtype=np.uint8).reshape(self.num_chunks, -1)
        return CpuCopies([t.tensor for t in kv_caches.tensors], rows, self.blocks_per_chunk)
