"""A connector that loads within a step, fails and reports it. vLLM loads it by ``kv_connector_module_path``."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata


class FailingConnector(ExampleConnector):
    """Finds what ExampleConnector has stored, and fills the blocks with other values."""

    _failed: frozenset[int] = frozenset()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        for request in metadata.requests:
            if not request.is_store:
                blocks = sorted(set((request.slot_mapping // self._block_size).tolist()))
                self._failed = frozenset(blocks)
                for layer in forward_context.no_compile_layers.values():
                    if getattr(layer, "kv_cache", None) is not None:
                        layer.kv_cache[blocks] = 7.0

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, frozenset()
        return set(failed)
