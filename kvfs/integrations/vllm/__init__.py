"""The vLLM connector: keeps KV across restarts and shares it between engines. See docs/vllm.md.

``register`` is the package's entry point of the group ``vllm.general_plugins``. vLLM calls it in each of its processes,
so a user writes only ``--kv-transfer-config '{"kv_connector": "KvfsConnector", "kv_role": "kv_both", ...}'``.
"""

from __future__ import annotations

import importlib
import logging

CONNECTOR, SPEC, TIER = "KvfsConnector", "KvfsOffloadingSpec", "kvfs"
MODULE = "kvfs.integrations.vllm.plugin"
#: vLLM's module, its factory and the method that registers a class; the name, module and class of kvfs
_PLACES = (
    ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory", "register_connector",
     CONNECTOR, MODULE, CONNECTOR),
    ("vllm.v1.kv_offload.factory", "OffloadingSpecFactory", "register_spec", SPEC, MODULE, SPEC),
    ("vllm.v1.kv_offload.tiering.factory", "SecondaryTierFactory", "register_tier",
     TIER, "kvfs.integrations.vllm.tier", "KvfsTier"),
)  # fmt: skip


def register() -> None:
    """Register the connector, its spec and the tier with vLLM. May be called any number of times.

    Every engine in the environment calls this, even if it does not use kvfs, so another version of vLLM must not fail.
    """
    for place, factory, method, name, module, cls in _PLACES:
        try:
            known = getattr(importlib.import_module(place), factory)
            if name not in known._registry:
                getattr(known, method)(name, module, cls)
        except (ImportError, AttributeError, TypeError) as exc:
            from kvfs.integrations.vllm.versions import warning

            logging.getLogger("vllm.kvfs").warning("kvfs: %s cannot be used here (%s). %s", name, exc, warning())
