"""pack and unpack: the canonical order, for every order of an engine's dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs.errors import ConfigError
from kvfs.pages.layout import Cell, Group, Need, PageLayout

LAYERS, HEADS, DIM, PAGE, TOKENS = 3, 2, 4, 32, 107
LAYOUT = PageLayout.kv(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", page_tokens=PAGE)
RANDOM = np.random.default_rng(7)


def canonical(kv: Any) -> bytes:
    """Of an array [layer, kv, head, token, dim]: [granule][layer][head][token][K, V], written down independently."""
    pages = kv.shape[3] // PAGE
    whole = kv[:, :, :, : pages * PAGE]
    cut = whole.reshape(LAYERS, 2, HEADS, pages, PAGE // 16, 16, DIM)
    return bytes(np.ascontiguousarray(cut.transpose(3, 4, 0, 2, 5, 1, 6)).tobytes())


def array(tokens: int = TOKENS) -> Any:
    return RANDOM.integers(0, 2**16, (LAYERS, 2, HEADS, tokens, DIM), dtype=np.uint16)


@pytest.mark.parametrize("order", ["layer,kv,head,token,dim", "layer,token,kv,head,dim", "token,layer,head,kv,dim"])
def test_any_order_gives_the_canonical_pages_and_comes_back(order: str) -> None:
    kv = array()
    names = ["layer", "kv", "head", "token", "dim"]
    turned = np.ascontiguousarray(kv.transpose([names.index(name) for name in order.split(",")]))
    pages = kvfs.pack(LAYOUT, turned, order)
    assert bytes(pages) == canonical(kv) and len(pages) == 3 * LAYOUT.page_bytes
    back = np.full_like(turned, 0x5555)
    assert kvfs.unpack(LAYOUT, pages, back, order) == 3
    at = order.split(",").index("token")
    kept = np.moveaxis(back, at, 0)
    assert (kept[: 3 * PAGE] == np.moveaxis(turned, at, 0)[: 3 * PAGE]).all() and (kept[3 * PAGE :] == 0x5555).all()


def test_tensors_of_each_layer_with_separate_k_and_v() -> None:
    kv = array(64)
    layers = [(np.ascontiguousarray(kv[i, 0][None]), np.ascontiguousarray(kv[i, 1][None])) for i in range(LAYERS)]
    assert bytes(kvfs.pack(LAYOUT, layers, "batch,head,token,dim")) == canonical(kv)


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    kv = array(64)
    tensor = torch.from_numpy(kv.view(np.int16)).view(torch.bfloat16)
    assert bytes(kvfs.pack(LAYOUT, tensor, "layer,kv,head,token,dim")) == canonical(kv)


def test_a_prompt_shorter_than_a_page_has_none() -> None:
    assert kvfs.pack(LAYOUT, array(PAGE - 1), "layer,kv,head,token,dim") == b""


def test_a_group_of_several_is_named_and_a_snapshot_has_one_state_per_page() -> None:
    layout = PageLayout.of(
        [
            Group("full", (0, 2), HEADS, Cell("bf16 k4+v4", 16), Need.all(), PAGE),
            Group("state", (1,), 1, Cell("f32 8", 32), Need.exact(), 1),
        ],
        page_tokens=PAGE,
    )
    states = RANDOM.random((1, 5, 8), dtype=np.float32)  # layer, one per page, numbers
    assert bytes(kvfs.pack(layout, states, "layer,slot,dim", group="state")) == states.tobytes()
    with pytest.raises(ConfigError, match=r"group=.*'full', 'state'"):
        kvfs.pack(layout, states, "layer,slot,dim")
    with pytest.raises(ConfigError, match="no group 'other'"):
        kvfs.pack(layout, states, "layer,slot,dim", group="other")


@pytest.mark.parametrize(
    ("change", "order", "said"),
    [
        (lambda kv: kv[:2], "layer,kv,head,token,dim", "2 entries for 3 layers"),
        (lambda kv: kv[:, :, :1], "layer,kv,head,token,dim", "all of"),
        (lambda kv: kv, "layer,kv,head,dim", "name 'block'"),
        (lambda kv: kv[0], "layer,kv,head,token,dim", "4 dimensions"),
        (lambda kv: kv, "layer,kv,head,token,colour", "colour"),
        (lambda kv: kv.tolist(), "layer,kv,head,token,dim", "numpy array"),
        (lambda kv: np.ascontiguousarray(kv[..., :2]), "layer,kv,head,token,dim", "bytes"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, order: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kvfs.pack(LAYOUT, change(array()), order)


def test_pages_that_do_not_fit_the_tensors_are_refused_before_a_byte_moves() -> None:
    pages, small = (
        kvfs.pack(LAYOUT, array(), "layer,kv,head,token,dim"),
        np.zeros((LAYERS, 2, HEADS, 64, DIM), np.uint16),
    )
    with pytest.raises(ConfigError, match="3 pages, the tensors have room for 2"):
        kvfs.unpack(LAYOUT, pages, small, "layer,kv,head,token,dim")
    with pytest.raises(ConfigError, match="no multiple of a page"):
        kvfs.unpack(LAYOUT, pages[:-1], small, "layer,kv,head,token,dim")
    assert not small.any()
