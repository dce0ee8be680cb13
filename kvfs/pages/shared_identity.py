"""One identity of a model's pages for all engines, so that a prefix that one computed is found by another.

Without it each engine's adapter builds an identity of its own, which names the engine: kernels of two engines round
differently, so their KV for equal tokens is not equal bit by bit. To share it is therefore a choice of the operator.
With shared pages an output may differ from the one without a store as much as outputs of the two engines differ from
each other: each continues from KV that the other would have rounded a little differently. What is stored is still
verified byte by byte; what differs is which engine computed it.

All that decides whether KV means the same is in here or follows from the weights. An engine that was started with
changed fields of the config, that quantises weights as it loads them, or whose cells have another order must not share.
"""

from __future__ import annotations

from typing import Any

from kvfs.errors import ConfigError
from kvfs.pages.hf_config import model_type, rope_identity
from kvfs.pages.layout import PageLayout

VERSION = 1  # changes with what is in the identity


def shared_identity(
    config: Any, weights: str, *, dtype: str, kv_dtype: object = None, page_tokens: int = 64, **cell: Any
) -> dict[str, Any]:
    """Arguments of ``Store.namespace`` that are equal for every engine that serves a model.

    ``config``: of the Hugging Face model, as for ``PageLayout.from_hf_config``. ``weights``: the commit of the model,
    or a digest of its weight files and config that all engines compute alike. ``dtype``: in which the engine computes;
    ``kv_dtype``: of its cache, default the same. ``cell``: further arguments of ``from_hf_config`` (``rope``: the
    order of the rotary part of MLA). UnsupportedModelError where the cache is not understood, ConfigError for a bad
    value.
    """
    computes = str(dtype).removeprefix("torch.")
    if computes not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"dtype is {computes!r}: pass the dtype in which the engine computes, such as 'bfloat16'")
    layout = PageLayout.from_hf_config(config, page_tokens, dtype=kv_dtype or computes, **cell)
    return {
        "name": model_type(config),
        "layout": layout,
        "revision": weights,
        "rope": rope_identity(config),
        "extra": {"shared": VERSION, "dtype": computes},
    }
