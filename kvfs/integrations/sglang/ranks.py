"""Where a rank stands, as SGLang's ``HiCacheStorageConfig`` says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvfs.errors import UnsupportedModelError


@dataclass(frozen=True)
class Rank:
    """A rank of tensor and pipeline parallelism. With attention data parallelism ``tp`` is within its group."""

    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1

    @classmethod
    def of(cls, config: Any) -> Rank:
        """``config``: a HiCacheStorageConfig. UnsupportedModelError for ranks that hold shares of a page's tokens."""
        if config.attn_cp_size > 1 or config.dcp_size > 1:
            raise UnsupportedModelError(
                "context parallelism splits the tokens of a page over ranks: start SGLang without --attn-cp-size and "
                "--dcp-size, or without kvfs"
            )
        return cls(config.tp_rank, config.tp_size, config.pp_rank, config.pp_size)

    def heads(self, total: int) -> tuple[int, int, tuple[int, int]]:
        """(first head, heads, replica) of this rank, if the model has ``total`` KV heads.

        SGLang gives each rank total / tp_size heads; where there are fewer heads than ranks, several ranks hold the
        same one. UnsupportedModelError if the heads do not share the ranks evenly.
        """
        if total % self.tp_size and self.tp_size % total:
            raise UnsupportedModelError(f"{total} KV heads do not share {self.tp_size} ranks evenly: correct kv_heads")
        copies = max(1, self.tp_size // total)
        heads = max(1, total // self.tp_size)
        return self.tp // copies * heads, heads, (self.tp % copies, copies)
