"""What vLLM loads by name. Where another version of vLLM lacks something, that is said before it fails."""

from __future__ import annotations

from kvfs.integrations.vllm import versions

try:
    from kvfs.integrations.vllm.connector import KvfsConnector, KvfsOffloadingSpec
except (ImportError, AttributeError) as exc:
    raise ImportError(f"kvfs: {versions.warning() or 'this vLLM is incomplete'}: {exc}") from exc

__all__ = ["KvfsConnector", "KvfsOffloadingSpec"]
