"""An engine's arrays as canonical pages and back, for callers that use ``put`` and ``get`` without attached buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvfs.errors import ConfigError
from kvfs.pages.describe import describe
from kvfs.pages.device_kv import DeviceKV
from kvfs.pages.host_copy import gather, scatter
from kvfs.pages.layout import Group, PageLayout
from kvfs.system.memory_views import byte_view
from kvfs.types import BufferLike


def pack(layout: PageLayout, tensors: Any, order: str | Sequence[str], *, group: str | None = None) -> bytearray:
    """The whole pages of a prompt, in canonical order, as ``Namespace.put`` takes them.

    ``tensors`` hold the prompt from a chunk's first token on: numpy arrays or CPU tensors, with their dimensions named
    by ``order`` as in ``kvfs.describe``, for example "layer,kv,head,token,dim". A tail shorter than a page is left out.
    bf16 in numpy: an array of uint16. ``group``: needed if the layout has several. ConfigError for tensors that do not
    fit the layout.
    """
    mine, kv = _described(layout, tensors, order, group)
    size, units = mine.page_bytes, range(kv.units)
    pages = bytearray(_chunks(layout, kv) * size)
    view = memoryview(pages)
    for chunk in range(len(pages) // size):
        gather(view[chunk * size : (chunk + 1) * size], mine, mine.full, kv, units, chunk)
    return pages


def unpack(
    layout: PageLayout, pages: BufferLike, tensors: Any, order: str | Sequence[str], *, group: str | None = None
) -> int:
    """The reverse of ``pack``: copy pages, as ``Namespace.get`` gives them, into tensors; returns how many they are."""
    mine, kv = _described(layout, tensors, order, group)
    view, size = byte_view(pages, "pages"), mine.page_bytes
    chunks, rest = divmod(len(view), size)
    if rest:
        raise ConfigError(f"pages has {len(view)} bytes, no multiple of a page of group {mine.name} ({size} bytes)")
    if chunks > _chunks(layout, kv):
        raise ConfigError(
            f"pages has {chunks} pages, the tensors have room for {_chunks(layout, kv)}: pass longer ones"
        )
    for chunk in range(chunks):
        scatter(view[chunk * size : (chunk + 1) * size], mine, mine.full, kv, range(kv.units), chunk)
    return chunks


def _described(
    layout: PageLayout, tensors: Any, order: str | Sequence[str], group: str | None
) -> tuple[Group, DeviceKV]:
    if group is None and len(layout.groups) > 1:
        raise ConfigError(f"this layout has several groups: pass group=, one of {[g.name for g in layout.groups]}")
    mine = layout.groups[0] if group is None else layout.group(group)
    kv = describe(mine, tensors, order)
    kv.check(layout)
    if kv.memory.startswith("cuda"):
        raise ConfigError(f"the tensors are on {kv.memory}: attach them (Namespace.attach), or copy them with .cpu()")
    if kv.part(mine) != mine.full:
        raise ConfigError(f"the tensors hold {kv.part(mine)} of group {mine.name}: pass all of {mine.full}")
    return mine, kv


def _chunks(layout: PageLayout, kv: DeviceKV) -> int:
    """Whole pages that the tensors hold."""
    return kv.units * kv.unit_tokens // layout.page_tokens if kv.unit_tokens else kv.units
