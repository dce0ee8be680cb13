"""kvfs below vLLM: a connector that keeps KV over restarts and shares it between engines. See docs/vllm.md.

``register`` is the package's entry point of the group ``vllm.general_plugins``: vLLM calls it in each of its processes,
so that ``--kv-transfer-config '{"kv_connector": "KvfsConnector", "kv_role": "kv_both", ...}'`` is all a user writes.
It imports nothing of an engine that does not use it.
"""

from __future__ import annotations

import importlib
import logging

CONNECTOR, SPEC, TIER = "KvfsConnector", "KvfsOffloadingSpec", "kvfs"
MODULE = "kvfs.integrations.vllm.plugin"
#: vLLM's module, its factory and the method that adds to it; our name, module and class
_PLACES = (
    ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory", "register_connector",
     CONNECTOR, MODULE, CONNECTOR),
    ("vllm.v1.kv_offload.factory", "OffloadingSpecFactory", "register_spec", SPEC, MODULE, SPEC),
    ("vllm.v1.kv_offload.tiering.factory", "SecondaryTierFactory", "register_tier",
     TIER, "kvfs.integrations.vllm.tier", "KvfsTier"),
)  # fmt: skip


def register() -> None:
    """Make the connector, its spec and the tier known to vLLM by name. May be called any number of times.

    Every engine of the environment calls this, those without kvfs too: one of another version must not fail here.
    """
    for place, factory, method, name, module, cls in _PLACES:
        try:
            known = getattr(importlib.import_module(place), factory)
            if name not in known._registry:
                getattr(known, method)(name, module, cls)
        except (ImportError, AttributeError, TypeError) as exc:
            from kvfs.integrations.vllm.versions import warning

            logging.getLogger("vllm.kvfs").warning("kvfs: %s cannot be used here (%s). %s", name, exc, warning())
