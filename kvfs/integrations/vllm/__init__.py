"""kvfs below vLLM: a connector that keeps KV over restarts and shares it between engines. See docs/vllm.md.

``register`` is the package's entry point of the group ``vllm.general_plugins``: vLLM calls it in each of its processes,
so that ``--kv-transfer-config '{"kv_connector": "KvfsConnector", "kv_role": "kv_both", ...}'`` is all a user writes.
It imports nothing of an engine that does not use it.
"""

from __future__ import annotations

CONNECTOR, SPEC, TIER = "KvfsConnector", "KvfsOffloadingSpec", "kvfs"
MODULE = "kvfs.integrations.vllm.connector"


def register() -> None:
    """Make the connector, its spec and the tier known to vLLM by name. May be called any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    if SPEC not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC, MODULE, SPEC)
    if TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER, "kvfs.integrations.vllm.tier", "KvfsTier")
