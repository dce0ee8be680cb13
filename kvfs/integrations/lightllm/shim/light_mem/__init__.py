"""kvfs under the name by which LightLLM's disk worker imports LightMem. See docs/lightllm.md of kvfs."""

from kvfs.integrations.lightllm.service import PyLocalCacheService
from kvfs.integrations.lightllm.tasks import PyState, PyTask

__all__ = ["PyLocalCacheService", "PyState", "PyTask"]
