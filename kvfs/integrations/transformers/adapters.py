"""PEFT adapters of a model, as far as KV depends on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: attributes of PEFT's modules that say which adapters are active, and how
_SWITCHES = ("active_adapters", "active_adapter", "disable_adapters", "merged_adapters", "scaling")


def has_adapters(model: Any) -> bool:
    """Whether PEFT has changed the model, by its integration or as a wrapper."""
    marked = getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False)
    return bool(marked) or any(_modules(model))


def unfit(model: Any) -> str:
    """Why the KV of a column depends on more than the tokens up to it with these adapters; "" if it does not."""
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        if getattr(config, "is_prompt_learning", False):
            return "an adapter inserts columns before the tokens"
        kind = getattr(config, "peft_type", "")
        if getattr(config, "alora_invocation_tokens", None) or getattr(kind, "value", kind) == "XLORA":
            return "an adapter makes the KV of a token depend on later tokens"
    return ""


def switches(model: Any) -> tuple[str, ...]:
    """Changes when an adapter is switched on or off, merged, unmerged, scaled, added or removed."""
    return tuple(
        f"{type(module).__qualname__} {[str(getattr(module, name, None)) for name in _SWITCHES]}"
        for module in _modules(model)
    )


def _modules(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if type(module).__module__.partition(".")[0] == "peft")
