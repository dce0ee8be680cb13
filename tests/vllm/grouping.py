"""vLLM's grouping of layers into cache groups: its place differs between versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

try:  # from 0.33 on
    from vllm.v1.core import kv_cache_planning
except ImportError:
    kv_cache_planning = None

Specs = Mapping[str, KVCacheSpec]


def groups_of(config: VllmConfig, specs: Specs) -> list[KVCacheGroupSpec]:
    """The groups of a model."""
    place: Any = kv_cache_planning or kv_cache_utils
    found: list[KVCacheGroupSpec] = place.get_kv_cache_groups(config, dict(specs))
    return found


def caches_of(config: VllmConfig, ranks: list[Specs], nbytes: int) -> list[KVCacheConfig]:
    """The caches of all ranks, each with ``nbytes`` of memory."""
    told, memory = [dict(specs) for specs in ranks], [nbytes] * len(ranks)
    found: list[KVCacheConfig]
    if kv_cache_planning is None:
        found = kv_cache_utils.get_kv_cache_configs(config, told, memory)
    else:
        merged = {name: spec for specs in told for name, spec in specs.items()}
        found = kv_cache_planning.get_kv_cache_configs(config, told, memory, groups_of(config, merged))
    return found
