"""The classes that vLLM loads by name. With an untested vLLM that lacks something, the ImportError says so."""

from __future__ import annotations

from kvfs.integrations.vllm import versions

try:
    from kvfs.integrations.vllm.connector import KvfsConnector, KvfsOffloadingSpec
except (ImportError, AttributeError) as exc:
    raise ImportError(f"kvfs: {versions.warning() or 'this vLLM is incomplete'}: {exc}") from exc

__all__ = ["KvfsConnector", "KvfsOffloadingSpec"]
