"""The data model: sizes, the algebra of parts, limits, and untrusted descriptors."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.errors import ConfigError
from kvfs.pages.layout import (
    CELL_BYTES_MAX,
    GRANULE_TOKENS,
    GROUPS_MAX,
    HEADS_MAX,
    LAYERS_MAX,
    PAGE_BYTES_MAX,
    Cell,
    Group,
    Need,
    PageLayout,
    Part,
)

LLAMA: dict[str, Any] = {"layers": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
MLA: dict[str, Any] = {"layers": 27, "kv_lora_rank": 512, "rope_dim": 64, "dtype": "bfloat16"}


class FakeTorchDtype:
    """Prints like torch.bfloat16, as torch dtypes are recognised by their name."""

    def __str__(self) -> str:
        return "torch.bfloat16"


def hybrid() -> PageLayout:
    cell = Cell("bf16 k64+v64", 256)
    return PageLayout.of(
        [
            Group("full", (5, 11), 4, cell, Need.all(), 64),
            Group("window", (0, 1, 2, 3, 4, 6), 4, cell, Need.window_of(1024), 64),
            Group("state", (7, 8), 16, Cell("f32 state 128x128", 65536), Need.exact(), 1),
        ],
        page_tokens=64,
    )


# ---------------------------------------------------------------- strategies

#: small, so that overlaps, containment and misses all turn up often
small_parts = st.builds(Part, st.integers(0, 5), st.integers(1, 6), st.integers(0, 5), st.integers(1, 6))
starts, extents = st.integers(0, HEADS_MAX - 1), st.integers(1, HEADS_MAX)
any_parts = st.tuples(starts, extents, starts, extents).map(
    lambda t: Part(t[0], min(t[1], HEADS_MAX - t[0]), t[2], min(t[3], LAYERS_MAX - t[2]))
)
windows = st.builds(Need.window_of, st.integers(1, 2**31 - 1))
needs = st.one_of(st.just(Need.all()), st.just(Need.exact()), windows)
cells = st.builds(Cell, st.from_regex(r"[a-z][a-z0-9 +]{0,20}[a-z0-9]", fullmatch=True), st.integers(1, 2048))


@st.composite
def layouts(draw: st.DrawFn) -> PageLayout:
    page_tokens = draw(st.sampled_from([16, 48, 64, 256]))
    ids = draw(st.lists(st.integers(0, 65535), min_size=1, max_size=12, unique=True))
    name = st.from_regex(r"[a-z0-9_.-]{1,64}", fullmatch=True)
    names = draw(st.lists(name, min_size=1, max_size=4, unique=True))[: len(ids)]
    groups = []
    for number, name in enumerate(names):
        need = draw(needs)
        states = 1 if need.kind == "exact" else draw(st.sampled_from([1, page_tokens]))
        layers = tuple(sorted(ids[number :: len(names)]))
        groups.append(Group(name, layers, draw(st.integers(1, 16)), draw(cells), need, states))
    return PageLayout.of(groups, page_tokens)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def cells_of(part: Part) -> set[tuple[int, int]]:
    heads, layers = range(part.head, part.head + part.heads), range(part.layer, part.layer + part.layers)
    return {(head, layer) for head in heads for layer in layers}


# ---------------------------------------------------------------- sizes


def test_a_page_of_llama_3_8b_has_the_size_of_its_keys_and_values() -> None:
    layout = PageLayout.kv(**LLAMA)
    assert layout.page_bytes == 64 * 32 * 8 * (128 + 128) * 2
    assert layout.groups[0].cell == Cell("bf16 k128+v128", 512)
    assert layout.groups[0].layers == tuple(range(32))


def test_a_leaf_is_one_layer_of_one_granule_of_a_part() -> None:
    group = PageLayout.kv(**LLAMA).group("full")
    part = Part(head=2, heads=2, layer=8, layers=16)
    assert (group.granule_states, group.granules) == (GRANULE_TOKENS, 4)
    assert group.leaf_bytes(part) == 16 * 2 * 512
    assert group.leaves(part) == 4 * 16
    assert group.part_bytes(part) == group.leaves(part) * group.leaf_bytes(part)
    assert group.part_bytes(group.full) == group.page_bytes


def test_a_snapshot_is_one_granule_of_one_state() -> None:
    group = hybrid().group("state")
    assert (group.granule_states, group.granules) == (1, 1)
    assert group.page_bytes == 2 * 16 * 65536
    assert group.leaves(group.full) == 2


@given(layouts())
def test_the_parts_of_any_split_add_up_to_the_page(layout: PageLayout) -> None:
    for group in layout.groups:
        heads, layers = group.heads, len(group.layers)
        split = [
            Part(head, count, layer, extent)
            for head, count in ((0, heads // 2), (heads // 2, heads - heads // 2))
            for layer, extent in ((0, layers // 2), (layers // 2, layers - layers // 2))
            if count and extent
        ]
        assert sum(group.part_bytes(part) for part in split) == group.page_bytes
    assert layout.page_bytes == sum(group.page_bytes for group in layout.groups)


def test_a_part_outside_its_group_has_no_size() -> None:
    group = PageLayout.kv(**LLAMA).groups[0]
    for part in (Part(7, 2, 0, 1), Part(0, 1, 31, 2)):
        with pytest.raises(ConfigError, match="reaches outside group full"):
            group.part_bytes(part)


@pytest.mark.parametrize(
    ("need", "chunks"),
    [
        (Need.all(), None),
        (Need.exact(), 1),
        (Need.window_of(1), 1),
        (Need.window_of(64), 1),
        (Need.window_of(65), 2),
        (Need.window_of(1024), 16),
    ],
)
def test_a_need_asks_for_trailing_chunks(need: Need, chunks: int | None) -> None:
    assert need.chunks(64) == chunks


# ---------------------------------------------------------------- encodings


@pytest.mark.parametrize(
    ("more", "encoding", "nbytes"),
    [
        ({"dtype": "float16"}, "f16 k128+v128", 512),
        ({"dtype": "float32", "v_head_dim": 64}, "f32 k128+v64", 768),
        ({"dtype": "int8", "scale": "float32"}, "int8 k128+v128+f32 scale 2", 264),
        ({"dtype": "int8", "scale": "f16", "scales": 4}, "int8 k128+v128+f16 scale 4", 264),
        ({"dtype": "int4", "scale": "float32"}, "int4 k128+v128+f32 scale 2", 136),
        ({"dtype": "float8_e4m3fn", "scale_digest": "unit"}, "float8_e4m3fn k128+v128 static unit", 256),
        ({"dtype": "float8_e5m2", "scale": "f32"}, "float8_e5m2 k128+v128+f32 scale 2", 264),
    ],
)
def test_cells_hold_keys_then_values_then_scales(more: dict[str, Any], encoding: str, nbytes: int) -> None:
    assert PageLayout.kv(**{**LLAMA, **more}).groups[0].cell == Cell(encoding, nbytes)


def test_every_spelling_of_a_dtype_is_the_same_layout() -> None:
    spellings = ["bfloat16", "bf16", "torch.bfloat16", FakeTorchDtype()]
    assert len({PageLayout.kv(**{**LLAMA, "dtype": dtype}).digest() for dtype in spellings}) == 1


def test_the_order_of_the_rotary_part_is_identity() -> None:
    vllm, hf = PageLayout.mla(**MLA), PageLayout.mla(**MLA, rope="halves")
    assert vllm.groups[0].cell == Cell("bf16 latent 512+64 interleaved", 1152)
    assert vllm.page_bytes == hf.page_bytes
    assert vllm.digest() != hf.digest()


def test_static_scales_are_identity() -> None:
    one, two = ({**LLAMA, "dtype": "float8_e4m3fn", "scale_digest": digest} for digest in ("aa", "bb"))
    assert PageLayout.kv(**one).digest() != PageLayout.kv(**two).digest()


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "float64"},
        {"dtype": None},
        {"dtype": "float8_e4m3fn"},  # whose scales?
        {"dtype": "int8"},
        {"dtype": "int8", "scale": "f32", "scale_digest": "unit"},
        {"dtype": "int8", "scale": "bf16"},
        {"dtype": "int8", "scale": "f32", "scales": 0},
        {"dtype": "float8_e4m3fn", "scale_digest": "NOT one word"},
        {"scale": "f32"},
        {"scale_digest": "unit"},
        {"dtype": "int4", "scale": "f32", "head_dim": 127},
        {"head_dim": 0},
        {"head_dim": 128.0},
        {"head_dim": CELL_BYTES_MAX},
        {"v_head_dim": 0},
        {"kv_heads": 0},
        {"kv_heads": True},
        {"kv_heads": HEADS_MAX + 1},
        {"layers": 0},
        {"layers": LAYERS_MAX + 1},
        {"layers": [3, 2]},
        {"layers": [3, 3]},
        {"layers": []},
        {"layers": [65536]},
        {"page_tokens": 0},
        {"page_tokens": 24},
        {"page_tokens": 4112},
        {"window": 0},
        {"layers": 4096, "page_tokens": 4096},  # more than 1 GiB
    ],
)
def test_a_wrong_argument_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="pass "):
        PageLayout.kv(**{**LLAMA, **wrong})


@pytest.mark.parametrize(
    ("name", "value"), [("layers", "2"), ("layers", numpy.int64(2)), ("kv_heads", 0), ("page_tokens", 0)]
)
def test_a_number_that_is_refused_has_the_name_of_its_argument(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is {re.escape(repr(value))}: pass "):
        PageLayout.kv(**{**LLAMA, name: value})
    with pytest.raises(ConfigError, match=r"^page_tokens is 17: pass "):
        PageLayout.mla(layers=1, kv_lora_rank=512, rope_dim=64, dtype="bfloat16", page_tokens=17)


def test_an_unknown_rope_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="rope is 'neox'"):
        PageLayout.mla(**MLA, rope="neox")


# ---------------------------------------------------------------- layouts


def test_a_window_makes_a_window_group() -> None:
    group = PageLayout.kv(**LLAMA, window=4096).group("window")
    assert group.need == Need.window_of(4096)


def test_an_opaque_page_is_one_leaf() -> None:
    layout = PageLayout.opaque(PAGE_BYTES_MAX, 256)
    group = layout.group("opaque")
    assert (layout.kind, layout.page_bytes, group.leaves(group.full)) == ("opaque", PAGE_BYTES_MAX, 1)
    assert group.leaf_bytes(group.full) == PAGE_BYTES_MAX
    with pytest.raises(ConfigError):
        PageLayout.opaque(PAGE_BYTES_MAX + 1, 256)
    with pytest.raises(ConfigError):
        replace(PageLayout.kv(**LLAMA), kind="opaque")


def test_a_group_is_found_by_name_or_refused() -> None:
    assert hybrid().group("window").need.window == 1024
    with pytest.raises(ConfigError, match=r"no group 'kv'.*'full', 'window', 'state'"):
        hybrid().group("kv")


def test_groups_share_neither_names_nor_layers() -> None:
    full, window, state = hybrid().groups
    with pytest.raises(ConfigError):
        PageLayout.of([full, replace(window, name="full"), state])
    with pytest.raises(ConfigError):
        PageLayout.of([full, replace(window, layers=(4, 5))])


def test_groups_have_one_state_per_token_or_one_in_all() -> None:
    full = hybrid().groups[0]
    for states in (0, 2, 17, 4112, True, 64.0):
        with pytest.raises(ConfigError):
            replace(full, states=states)
    with pytest.raises(ConfigError, match="states per page"):
        PageLayout.of([full], page_tokens=128)
    with pytest.raises(ConfigError):
        replace(full, need=Need.exact())


def test_the_number_of_groups_is_limited() -> None:
    full = hybrid().groups[0]
    groups = [replace(full, name=f"g{i}", layers=(i,)) for i in range(GROUPS_MAX + 1)]
    assert len(PageLayout.of(groups[:-1]).groups) == GROUPS_MAX
    for wrong in (groups, []):
        with pytest.raises(ConfigError, match="number of groups"):
            PageLayout.of(wrong)


@pytest.mark.parametrize("name", ["", "Full", "a" * 65, "a\n", "../a/b", 7])
def test_a_group_name_is_a_plain_word(name: Any) -> None:
    with pytest.raises(ConfigError, match="group name"):
        replace(hybrid().groups[0], name=name)


@pytest.mark.parametrize("encoding", ["", " bf16", "bf16 ", "bf16\n", "é", "x" * 193])
def test_an_encoding_is_plain_text(encoding: str) -> None:
    with pytest.raises(ConfigError, match="cell encoding"):
        Cell(encoding, 1)


# ---------------------------------------------------------------- parts


@given(any_parts)
def test_a_part_survives_packing(part: Part) -> None:
    packed = part.pack()
    assert len(packed) == 8
    assert Part.unpack(packed) == part


def test_a_packed_part_is_layer_layers_head_heads() -> None:
    assert Part(head=1, heads=2, layer=3, layers=4).pack() == bytes.fromhex("0300040001000200")


@given(st.binary(max_size=10))
def test_damaged_packed_parts_are_refused_or_valid(packed: bytes) -> None:
    try:
        part = Part.unpack(packed)
    except ConfigError:
        return
    assert part.pack() == packed


@pytest.mark.parametrize("args", [(0, 0, 0, 1), (0, 1, 0, 0), (-1, 1, 0, 1), (4095, 2, 0, 1), (0, 1, 4095, 2)])
def test_an_empty_or_outsized_part_is_refused(args: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError):
        Part(*args)


@given(small_parts, small_parts)
def test_parts_behave_like_sets_of_cells(one: Part, other: Part) -> None:
    common = one.intersect(other)
    assert (cells_of(common) if common else set()) == cells_of(one) & cells_of(other)
    assert one.contains(other) == (cells_of(other) <= cells_of(one))
    assert common == other.intersect(one)


@given(small_parts, small_parts, small_parts)
def test_intersection_is_associative_and_contained(a: Part, b: Part, c: Part) -> None:
    ab, bc = a.intersect(b), b.intersect(c)
    assert (ab and ab.intersect(c)) == (bc and a.intersect(bc))
    assert ab is None or (a.contains(ab) and b.contains(ab))
    assert a.intersect(a) == a


# ---------------------------------------------------------------- descriptors


@given(layouts())
def test_a_layout_survives_its_descriptor(layout: PageLayout) -> None:
    back = PageLayout.from_descriptor(json.loads(json.dumps(layout.descriptor())))
    assert back == layout
    assert back.digest() == layout.digest()
    assert list(back.descriptor()) == ["version", "kind", "page_tokens", "groups"]


@pytest.mark.parametrize(
    ("layout", "digest"),
    [
        (PageLayout.kv(**LLAMA), "be21a3622f11e44e69c799e4470726273b30f18299162d3242f08533c4c36dd4"),
        (PageLayout.mla(**MLA), "2f505742bd61dd78b0b4e380fcdac0a14fbd6701a459ce84bb25504fe6a4d558"),
        (hybrid(), "13750016d8d8ca232ffbf4b80156c6608d0ecb72248da24704ba2b54226bef5c"),
        (PageLayout.opaque(2 << 20, 256), "ce32bb8e3ed8a2bc4c509270a91b53d3dfb55bf0a4b3f15bd8b9428fa9f64c63"),
    ],
    ids=["kv", "mla", "hybrid", "opaque"],
)
def test_digests_never_change(layout: PageLayout, digest: str) -> None:
    assert layout.digest().hex() == digest


def test_every_difference_shows_in_the_digest() -> None:
    base = hybrid()
    full, window, state = base.groups
    others = [
        base,
        PageLayout.of([window, full, state]),
        PageLayout.of([full, window]),
        PageLayout.of([replace(full, name="f"), window, state]),
        PageLayout.of([replace(full, heads=8), window, state]),
        PageLayout.of([replace(full, layers=(5, 12)), window, state]),
        PageLayout.of([full, replace(window, need=Need.window_of(1023)), state]),
        PageLayout.of([replace(full, cell=Cell("f16 k64+v64", 256)), window, state]),
        PageLayout.of([replace(g, states=128 if g.states > 1 else 1) for g in base.groups], page_tokens=128),
    ]
    assert len({layout.digest() for layout in others}) == len(others)


@given(json_values)
def test_a_random_descriptor_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        PageLayout.from_descriptor(value)


def spots(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    keys: list[Any] = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        keys = list(range(len(value)))
    return [(value, key) for key in keys] + [spot for key in keys for spot in spots(value[key])]


@settings(max_examples=300)
@given(st.data(), json_values)
def test_a_damaged_descriptor_is_refused_or_exact(data: st.DataObject, value: Any) -> None:
    descriptor = hybrid().descriptor()
    container, key = data.draw(st.sampled_from(spots(descriptor)))
    if data.draw(st.booleans()):
        container[key] = value
    elif isinstance(container, dict) and data.draw(st.booleans()):
        container[data.draw(st.text(max_size=8))] = value
    else:
        del container[key]
    try:
        layout = PageLayout.from_descriptor(descriptor)
    except ConfigError:
        return
    assert json.dumps(layout.descriptor(), sort_keys=True) == json.dumps(descriptor, sort_keys=True)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": True},
        {"version": 1.0},
        {"more": 1},
        {"kind": "KV"},
        {"kind": 10**5000},
        {"groups": {}},
        {"groups": 10**5000},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_descriptor_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PageLayout.from_descriptor({**hybrid().descriptor(), **change})


def test_layouts_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(hybrid())) == hybrid()
