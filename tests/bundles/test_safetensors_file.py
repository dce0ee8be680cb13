"""safetensors files of what is stored: the library reads them, and finds the tensors that were put."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs.bundles import safetensors_file
from kvfs.bundles.safetensors_file import UnverifiedError, components
from kvfs.errors import ConfigError, NoSpaceError
from kvfs.pages.layout import Cell, Group, Need, PageLayout, Part
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, restored, seeded, segment_files, tiny, tokens_of

safetensors = pytest.importorskip("safetensors")

CHUNKS = 10


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="64MiB") as made:
        yield made


def read(path: Path) -> tuple[dict[str, tuple[str, list[int], bytes]], dict[str, str]]:
    """Name -> (dtype, shape, bytes), and the metadata; by the library, which also checks the header."""
    found = dict(safetensors.deserialize(path.read_bytes()))
    size = struct.unpack("<Q", path.read_bytes()[:8])[0]
    about = json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]
    return {n: (t["dtype"], t["shape"], bytes(t["data"])) for n, t in found.items()}, about


def cells(data: bytes, group: Group, chunks: int) -> Any:
    """Canonical pages as [layer][state][head][byte of the cell]."""
    shape = (chunks, group.granules, len(group.layers), group.heads, group.granule_states, group.cell.nbytes)
    ordered = np.frombuffer(data, "u1").reshape(shape).transpose(2, 0, 1, 4, 3, 5)
    return ordered.reshape(len(group.layers), chunks * group.states, group.heads, group.cell.nbytes)


LAYOUTS: dict[str, tuple[PageLayout, dict[str, tuple[str, int, int, int]]]] = {
    # name -> dtype, first byte in the cell, bytes, numbers
    "bf16": (tiny(), {"k": ("BF16", 0, 8, 4), "v": ("BF16", 8, 8, 4)}),
    "f16, v wider": (tiny(dtype="float16", v_head_dim=6), {"k": ("F16", 0, 8, 4), "v": ("F16", 8, 12, 6)}),
    "f32, ids": (tiny(dtype="float32", layers=[3, 7]), {"k": ("F32", 0, 16, 4), "v": ("F32", 16, 16, 4)}),
    "fp8": (tiny(dtype="float8_e4m3fn", scale_digest="unit"), {"k": ("F8_E4M3", 0, 4, 4), "v": ("F8_E4M3", 4, 4, 4)}),
    "fp8 e5m2": (tiny(dtype="float8_e5m2", scale_digest="unit"), {"k": ("F8_E5M2", 0, 4, 4)}),
    "int8, scales": (
        tiny(dtype="int8", scale="float32", head_dim=5),
        {"k": ("I8", 0, 5, 5), "v": ("I8", 5, 5, 5), "scale": ("F32", 10, 8, 2)},
    ),
    "int4": (tiny(dtype="int4", scale="float16"), {"cell": ("U8", 0, 8, 8)}),
    "mla": (
        PageLayout.mla(layers=2, kv_lora_rank=12, rope_dim=4, dtype="bfloat16", page_tokens=16),
        {"latent": ("BF16", 0, 24, 12), "rope": ("BF16", 24, 8, 4)},
    ),
    "own cells": (
        PageLayout.of([Group("odd", (0, 1), 3, Cell("zigzag 7", 7), Need.all(), 16)], 16), {"cell": ("U8", 0, 7, 7)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 3 * TINY_BYTES, 8 << 20])
def test_the_library_reads_what_was_put(
    store: kvfs.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, batch: int
) -> None:
    monkeypatch.setattr(safetensors_file, "BATCH_BYTES", batch)
    layout, wanted = LAYOUTS[name]
    group = layout.groups[0]
    data, prompt = seeded(1, CHUNKS * layout.page_bytes), tokens_of(1, CHUNKS)
    ns = store.namespace("m", layout, "r1", rope={"theta": 1e4})
    assert ns.put(prompt, data).stored == CHUNKS
    with ns.match([*prompt, 5]) as match:
        done = store.export_tensors(str(tmp_path / "t"), match, [*prompt, 5])
    tensors, about = read(tmp_path / "t")
    expected = cells(data, group, CHUNKS)
    assert done.tensors == len(tensors) and done.file_bytes == (tmp_path / "t").stat().st_size
    for row, layer in enumerate(group.layers):
        for piece, (dtype, at, nbytes, numbers) in wanted.items():
            found = tensors[f"{group.name}.layer.{layer}.{piece}"]
            assert found[:2] == (dtype, [CHUNKS * 16, group.heads, numbers])
            assert found[2] == expected[row, :, :, at : at + nbytes].tobytes()
    assert about["namespace"] == ns.identity.digest.hex() and about["kvfs"] == kvfs.__version__
    assert json.loads(about["tokens"]) == prompt and about["token_count"] == str(16 * CHUNKS)
    assert json.loads(about["chunk_hashes"])[group.name] == [h.hex() for h in ns.chunk_hashes(prompt)]
    assert PageLayout.from_descriptor(json.loads(about["layout"])) == layout and json.loads(about["rope"])


def test_tensors_of_torch_are_those_that_were_put(store: kvfs.Store, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    layout = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=32)
    keys = torch.randn(2, 64, 2, 8).to(torch.bfloat16)  # [layer][token][head][dim]
    values = torch.randn(2, 64, 2, 8).to(torch.bfloat16)
    # canonical: [page][granule][layer][head][token][k then v]
    both = torch.cat([keys, values], -1).view(2, 2, 2, 16, 2, 16).permute(1, 2, 0, 4, 3, 5).contiguous()
    ns = store.namespace("m", layout, "r1")
    assert ns.put(range(64), both).stored == 2
    with ns.match(range(64)) as match:
        store.export_tensors(str(tmp_path / "t.safetensors"), match)
    found = load_file(str(tmp_path / "t.safetensors"))
    for layer in range(2):
        assert torch.equal(found[f"full.layer.{layer}.k"], keys[layer])
        assert torch.equal(found[f"full.layer.{layer}.v"], values[layer])


def test_hybrid_groups_say_where_they_begin(store: kvfs.Store, tmp_path: Path) -> None:
    layout = PageLayout.of(
        [
            Group("full", (0, 2), 2, Cell("bf16 k4+v4", 16), Need.all(), 16),
            Group("window", (1,), 2, Cell("bf16 k4+v4", 16), Need.window_of(40), 16),
            Group("state", (3,), 1, Cell("f32 state", 100), Need.exact(), 1),
        ], 16,
    )  # fmt: skip
    data = {g.name: seeded(i, CHUNKS * g.page_bytes) for i, g in enumerate(layout.groups)}
    ns = store.namespace("m", layout, "r1")
    assert ns.put(tokens_of(1, CHUNKS), data).stored == 3 * CHUNKS
    with ns.match(tokens_of(1, CHUNKS)) as match:
        store.export_tensors(str(tmp_path / "t"), match)
    tensors, about = read(tmp_path / "t")
    assert json.loads(about["first_tokens"]) == {"full": 0, "window": 7 * 16, "state": 9 * 16}
    assert [tensors[n][1] for n in ("full.layer.2.k", "window.layer.1.v", "state.layer.3.cell")] == [
        [160, 2, 4], [48, 2, 4], [1, 1, 100],
    ]  # fmt: skip
    window = cells(data["window"][7 * 16 * 2 * 16 :], layout.groups[1], 3)
    assert tensors["window.layer.1.v"][2] == window[0, :, :, 8:].tobytes()
    assert tensors["state.layer.3.cell"][2] == data["state"][900:]


def test_parts_of_several_ranks_become_one_tensor(store: kvfs.Store, tmp_path: Path) -> None:
    data, group = seeded(1, CHUNKS * TINY_BYTES), tiny().groups[0]
    ns = store.namespace("m", tiny(), "r1")
    whole = np.frombuffer(data, "u1").reshape(CHUNKS, 2, 2, 16 * 16)  # [page][layer][head]
    for head in range(2):
        part = np.ascontiguousarray(whole[:, :, head])
        assert ns.put(tokens_of(1, CHUNKS), part, part=Part(head, 1, 0, 2)).stored == CHUNKS
    with ns.match(tokens_of(1, CHUNKS)) as match:
        store.export_tensors(str(tmp_path / "t"), match)
    expected = cells(data, group, CHUNKS)
    for layer in range(2):
        assert read(tmp_path / "t")[0][f"full.layer.{layer}.k"][2] == expected[layer, :, :, :8].tobytes()


@pytest.mark.parametrize("part", [Part(1, 1, 0, 2), Part(0, 2, 1, 1)])
def test_a_rank_s_match_is_not_written_as_whole_pages(store: kvfs.Store, tmp_path: Path, part: Part) -> None:
    """Pages of a part are shorter: they were cut at the offsets of whole ones, without an error."""
    ns = store.namespace("m", tiny(), "r1")
    ns.put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))
    with ns.match(tokens_of(1, CHUNKS), part=part) as match:
        assert match.tokens == CHUNKS * 16
        with pytest.raises(ConfigError, match="without part="):
            store.export_tensors(str(tmp_path / "t"), match)
    assert not list(tmp_path.glob("t*"))


@pytest.mark.parametrize(
    ("token_ids", "says"),
    [
        ([1, 2], "has 2 of the match's 80 tokens"),
        ("a text", "is str"),
        ([0.5] * 80, "not an integer"),
        ([-1] * 80, "negative"),
    ],
)
def test_metadata_never_hold_ids_of_another_length_or_kind(
    store: kvfs.Store, tmp_path: Path, token_ids: Any, says: str
) -> None:
    ns = store.namespace("m", tiny(), "r1")
    ns.put(tokens_of(1, 5), seeded(1, 5 * TINY_BYTES))
    with ns.match(tokens_of(1, 5)) as match, pytest.raises(ConfigError, match=re.escape(says)):
        store.export_tensors(str(tmp_path / "t"), match, token_ids)
    assert not list(tmp_path.glob("t*"))


def test_ids_may_be_an_array(store: kvfs.Store, tmp_path: Path) -> None:
    ns = store.namespace("m", tiny(), "r1")
    ns.put(tokens_of(1, 5), seeded(1, 5 * TINY_BYTES))
    with ns.match(tokens_of(1, 5)) as match:
        store.export_tensors(str(tmp_path / "t"), match, array("q", tokens_of(1, 5)))
    assert json.loads(read(tmp_path / "t")[1]["tokens"]) == tokens_of(1, 5)


def test_a_prefix_by_its_id(store: kvfs.Store, tmp_path: Path) -> None:
    ns = store.namespace("m", tiny(), "r1")
    prompt = tokens_of(1, 40)
    ns.put(prompt, seeded(1, 40 * TINY_BYTES))
    (prefix,) = store.catalog.prefixes(store.catalog.find("m"))[0]
    with store.match_prefix(prefix.last_hash.hex()[:12]) as match:
        assert match.tokens == len(prompt)
        store.export_tensors(str(tmp_path / "t"), match)
    tensors, about = read(tmp_path / "t")
    assert len(tensors) == 4 and "tokens" not in about
    with ns.match(prompt[: 32 * 16]) as shorter:  # a later request uses the head
        ns.get(shorter, bytearray(shorter.nbytes))
    with pytest.raises(ConfigError, match="begins at chunk 32"):
        store.match_prefix(prefix.last_hash.hex())
    with pytest.raises(kvfs.KvfsError, match="no page has the id"):
        store.match_prefix("0123456789ab")


def test_a_damaged_page_leaves_no_file(store: kvfs.Store, tmp_path: Path) -> None:
    ns = store.namespace("m", tiny(), "r1")
    ns.put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))
    (tmp_path / "t").write_bytes(b"old")
    with ns.match(tokens_of(1, CHUNKS)) as match:
        (segment,) = segment_files(Path(store.path))
        content = bytearray(segment.read_bytes())
        at = content.find(seeded(1, CHUNKS * TINY_BYTES)[7 * TINY_BYTES :][:64])
        content[at] ^= 1
        with open(segment, "r+b") as file:
            file.write(content)
        with pytest.raises(UnverifiedError, match="does not verify"):
            store.export_tensors(str(tmp_path / "t"), match)
    assert (tmp_path / "t").read_bytes() == b"old" and sorted(p.name for p in tmp_path.iterdir()) == ["store", "t"]
    with ns.match(tokens_of(1, CHUNKS)) as match:  # what is left
        assert store.export_tensors(str(tmp_path / "t"), match).tokens == 7 * 16


@pytest.mark.parametrize("policy", ["off", "first"])
def test_a_damaged_page_is_not_exported_under_any_verify_policy(tmp_path: Path, policy: str) -> None:
    """The file is for other tools, which rely on its pages being verified."""
    with kvfs.open(tmp_path / "store", capacity="64MiB", verify=policy) as store:
        ns = store.namespace("m", tiny(), "r1")
        ns.put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))
        assert restored(ns, tokens_of(1, CHUNKS)) == seeded(1, CHUNKS * TINY_BYTES)  # "first" knows them now
        (segment,) = segment_files(Path(store.path))
        at = segment.read_bytes().find(seeded(1, CHUNKS * TINY_BYTES)[7 * TINY_BYTES :][:64])
        with open(segment, "r+b") as file:
            file.seek(at)
            file.write(b"damaged")
        with ns.match(tokens_of(1, CHUNKS)) as match, pytest.raises(UnverifiedError):
            store.export_tensors(str(tmp_path / "t"), match)
    assert not list(tmp_path.glob("t*"))


@pytest.mark.parametrize(("folder", "mode"), [(0o755, 0o600), (0o770, 0o600), (0o2770, 0o600)])
def test_an_export_of_a_private_store_is_not_readable_by_other_users(
    store: kvfs.Store, tmp_path: Path, folder: int, mode: int
) -> None:
    ns = store.namespace("m", tiny(), "r1")
    ns.put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(folder)
    before = os.umask(0o022)
    try:
        with ns.match(tokens_of(1, CHUNKS)) as match:
            store.export_tensors(str(tmp_path / "out" / "t"), match)
        store.export(str(tmp_path / "out" / "b"), ["m"])
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / "out" / n).stat().st_mode) for n in "tb"] == [mode, mode]


def test_a_full_disk_is_one_line_and_leaves_no_file(
    store: kvfs.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns = store.namespace("m", tiny(), "r1")
    ns.put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))

    def full(self: Files, fd: int, buffers: object, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with ns.match(tokens_of(1, CHUNKS)) as match, monkeypatch.context() as patch:
        patch.setattr(Files, "write_all", full)
        with pytest.raises(NoSpaceError, match="make room"):
            store.export_tensors(str(tmp_path / "t"), match)
    assert not list(tmp_path.glob("t*"))


def test_nothing_to_export(store: kvfs.Store, tmp_path: Path) -> None:
    ns = store.namespace("m", tiny(), "r1")
    with ns.match(tokens_of(1, CHUNKS)) as match, pytest.raises(ConfigError, match="no pages"):
        store.export_tensors(str(tmp_path / "t"), match)


@pytest.mark.parametrize(
    ("encoding", "nbytes"),
    [("bf16 k4+v4", 15), ("bf16 k4+v", 16), ("f64 k4+v4", 64), ("bf16 k999999999+v999999999", 8), ("int4 k4+v4", 4)],
)
def test_a_cell_that_contradicts_its_encoding_is_bytes(encoding: str, nbytes: int) -> None:
    (piece,) = components(Cell(encoding, nbytes))
    assert (piece.name, piece.dtype, piece.nbytes) == ("cell", "U8", nbytes)
