"""SGLang's pools as kvfs sees them: shape, and a descriptor for transfers. Pools are told by name; none is imported."""

from __future__ import annotations

from typing import Any

from kvfs.errors import UnsupportedModelError
from kvfs.integrations.sglang.ranks import Rank
from kvfs.pages.describe import describe
from kvfs.pages.device_kv import DeviceKV
from kvfs.pages.layout import GRANULE_TOKENS, Group, PageLayout

GROUP = "full"
#: Layout of a host pool -> its dimensions with whole pages as units; K and V are separate tensors, MLA has one.
_ORDERS = {
    "layer_first": "layer,block,token,head,dim",
    "page_first": "block,token,layer,head,dim",
    "page_first_direct": "block,layer,token,head,dim",
    "page_head": "block,head,token,layer,dim",
}
_DTYPES = ("bfloat16", "float16", "float32")


class Pool:
    """A pool of plain MHA or MLA that has passed the checks; a unit of its descriptor is a page. Made by ``of``."""

    def __init__(self, pool: Any, order: str, tensors: Any) -> None:
        self.pool, self._order, self._tensors = pool, order, tensors
        self.latent = type(pool).__name__.startswith("MLA")

    @property
    def page_tokens(self) -> int:
        return int(self.pool.page_size)

    @property
    def dtype(self) -> str:
        return _name(self.pool.dtype)

    @property
    def layers(self) -> tuple[int, ...]:
        """Model layer ids."""
        first = int(self.pool.start_layer)
        return tuple(range(first, first + int(self.pool.layer_num)))

    def layout(self, layers: int, kv_heads: int) -> PageLayout:
        """Of a model with so many layers and KV heads on all ranks together."""
        pool = self.pool
        if self.latent:
            return PageLayout.mla(
                layers=layers, kv_lora_rank=pool.kv_lora_rank, rope_dim=pool.qk_rope_head_dim, dtype=self.dtype,
                page_tokens=self.page_tokens,
            )  # fmt: skip
        return PageLayout.kv(
            layers=layers, kv_heads=kv_heads, head_dim=pool.head_dim, v_head_dim=pool.v_head_dim, dtype=self.dtype,
            page_tokens=self.page_tokens,
        )  # fmt: skip

    def device_kv(self, group: Group, rank: Rank, replica: tuple[int, int] = (0, 1)) -> DeviceKV:
        """The pool as buffers of ``group``. UnsupportedModelError if it is not a rank's share.

        ``replica``: of MLA, which all ranks hold, if more than one of them writes.
        """
        if self.layers[-1] not in group.layers or self.layers[0] not in group.layers:
            _refuse(f"its pool has layers {self.layers[0]} to {self.layers[-1]} of {len(group.layers)}: correct layers")
        if self.latent:
            return describe(group, self._tensors, self._order, layers=self.layers, replica=replica)
        first, heads, replica = rank.heads(group.heads)
        if heads != self.pool.head_num:
            _refuse(
                f"its pool holds {self.pool.head_num} KV heads, and {group.heads} on {rank.tp_size} ranks are {heads} "
                "each: correct kv_heads"
            )
        return describe(group, self._tensors, self._order, layers=self.layers, first_head=first, replica=replica)


def host_pool(pool: Any) -> Pool:
    """A host pool of the hierarchical cache. UnsupportedModelError names the flag to change."""
    _check_kind(pool, "MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
    if pool.layout not in _ORDERS:
        _refuse(f"--hicache-mem-layout is {pool.layout}: pass one of {', '.join(_ORDERS)}")
    if pool.target_layer_num != pool.layer_num:
        _refuse("its pool also holds layers of a draft model: start it without --speculative-algorithm")
    _check_numbers(pool)
    if type(pool).__name__.startswith("MLA"):
        tensors = _paged(pool, pool.kv_buffer)
    else:
        tensors = _paged(pool, pool.k_buffer), _paged(pool, pool.v_buffer)
    return Pool(pool, _ORDERS[pool.layout], tensors)


def device_pool(pool: Any) -> Pool:
    """A pool of the device: a tensor of slots for each layer. UnsupportedModelError names the flag to change."""
    _check_kind(pool, "MHATokenToKVPool", "MLATokenToKVPool")
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        _refuse(f"its pool is in the order {pool.kv_cache_layout}: start it without SGLANG_USE_HND_KVCACHE")
    _check_numbers(pool)

    def pages(tensor: Any) -> Any:
        slots, *rest = tensor.shape
        return tensor.reshape(slots // pool.page_size, pool.page_size, *rest)

    if type(pool).__name__.startswith("MLA"):
        return Pool(pool, "block,token,head,dim", [pages(tensor) for tensor in pool.kv_buffer])
    both = zip(pool.k_buffer, pool.v_buffer, strict=True)
    return Pool(pool, "block,token,head,dim", [(pages(k), pages(v)) for k, v in both])


def _check_kind(pool: Any, *kinds: str) -> None:
    if type(pool).__name__ not in kinds:
        _refuse(f"its pool is a {type(pool).__name__}; plain MHA and MLA are supported")


def _check_numbers(pool: Any) -> None:
    if pool.page_size % GRANULE_TOKENS:
        _refuse(f"pages have {pool.page_size} tokens: pass --page-size 64, or another multiple of {GRANULE_TOKENS}")
    if _name(pool.dtype) not in _DTYPES:
        _refuse(
            f"its cache holds {_name(pool.dtype)}, with scales that are not in the pool: pass --kv-cache-dtype auto"
        )
    if type(pool).__name__.startswith("MLA") and pool.kv_cache_dim != pool.kv_lora_rank + pool.qk_rope_head_dim:
        _refuse("rows of its MLA pool hold more than latents and their rotary part")


def _paged(pool: Any, tensor: Any) -> Any:
    """A host pool's tensor with its slots cut into pages: page n has the slots from n * page_size on."""
    if pool.layout == "layer_first":
        layers, slots, *rest = tensor.shape
        return tensor.reshape(layers, slots // pool.page_size, pool.page_size, *rest)
    if pool.layout == "page_first":
        slots, *rest = tensor.shape
        return tensor.reshape(slots // pool.page_size, pool.page_size, *rest)
    return tensor


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse(why: str) -> None:
    raise UnsupportedModelError(f"kvfs cannot keep the KV of this engine: {why}")
