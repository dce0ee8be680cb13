"""Codecs: an encoded page decodes to the same bytes on every way to read it, and nothing else ever comes out."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import kvfs
from kvfs import Cell, Group, Need, PageLayout, Part
from kvfs.format import codec
from kvfs.format import segment as fmt
from kvfs.format.codec import CodecError
from kvfs.read import reader
from kvfs.segments.open_segments import SegmentFiles
from kvfs.segments.scan import scan_segment
from tests.stores import counted, restored, seeded, segment_files, tokens_of
from tools.torture.case import allocated_bytes

PAGE = 32 << 10
CODECS = ("zstd", "planes")
LAYOUT = PageLayout.kv(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16)
assert LAYOUT.page_bytes == PAGE


def bf16(seed: int, nbytes: int) -> bytes:
    """Numbers as in a KV cache: normally distributed, with one scale per channel."""
    draw = random.Random(seed)
    scales = [2.0 ** draw.uniform(-3, 3) for _ in range(64)]
    words = (struct.pack("<f", draw.gauss(0, 1) * scales[i % 64])[2:] for i in range(-(-nbytes // 2)))
    return b"".join(words)[:nbytes]


PAGES = bf16(7, 6 * PAGE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(tmp_path / "store", capacity="64MiB") as opened:
        yield opened


def entries_of(store: kvfs.Store) -> list[fmt.Entry]:
    found: list[fmt.Entry] = []
    for path in segment_files(Path(store.path)):
        with path.open("rb") as file:
            scan = scan_segment(file.fileno(), store._shared.c.files)
            assert scan is not None
            found += scan.parts()
    return found


# -- the codec alone -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*codec.CODECS])
@pytest.mark.parametrize("element", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("nbytes", [0, 1, 2, 7, 4096, 4097, 12288, 65536 + 8])
@pytest.mark.parametrize("kind", ["noise", "zeros", "numbers"])
def test_what_is_encoded_is_decoded(name: str, element: int, nbytes: int, kind: str) -> None:
    page = {"noise": seeded(1, nbytes), "zeros": bytes(nbytes), "numbers": bf16(1, nbytes)}[kind]
    used, stored = codec.encode(page, codec.CODECS[name], element)
    assert used in (fmt.CODEC_RAW, codec.CODECS[name], fmt.CODEC_ZSTD)
    assert used == fmt.CODEC_RAW or fmt.align(len(stored)) < fmt.align(nbytes)
    guarded = bytearray(b"\xa5" * (nbytes + 16))
    codec.decode(stored, used, memoryview(guarded)[:nbytes])
    assert guarded == page + b"\xa5" * 16
    assert codec.decoded(bytes(stored), used, nbytes) == page


def test_planes_beat_zstd_on_numbers_of_two_bytes() -> None:
    sizes = {name: len(codec.encode(PAGES, codec.CODECS[name], 2)[1]) for name in CODECS}
    assert sizes["planes"] < 0.72 * len(PAGES) < sizes["zstd"] < 0.9 * len(PAGES)


def test_without_numpy_the_bytes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for element in (1, 2, 4, 8):
        with_numpy = codec.encode(PAGES, fmt.CODEC_PLANES, element)
        with monkeypatch.context() as without:
            without.setattr(codec, "_numpy", lambda: None)
            assert codec.encode(PAGES, fmt.CODEC_PLANES, element) == with_numpy
            assert codec.decoded(with_numpy[1], with_numpy[0], len(PAGES)) == PAGES


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("bf16 k128+v128", 2), ("f32 latent 512+64 halves", 4), ("float8_e4m3fn k64+v64 static unit", 1),
     ("int4 k8+v8", 1), ("int8 k8+v8+f32 scale 2", 1), ("opaque", 0), ("ssm f32 96", 0)],
)  # fmt: skip
def test_the_encoding_of_a_cell_says_how_long_its_numbers_are(encoding: str, expected: int) -> None:
    assert Cell(encoding, 64).element_bytes == expected


def frame(data: bytes, **how: Any) -> bytes:
    return zstandard.ZstdCompressor(**how).compress(data)


def without_size(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


def planes(*stored: bytes, count: int | None = None, pad: bytes = bytes(3)) -> bytes:
    lengths = b"".join(len(s).to_bytes(4, "little") for s in stored)
    return bytes([len(stored) if count is None else count]) + pad + lengths + b"".join(stored)


HALF = frame(bytes(PAGE // 2))
BOMB = frame(bytes(64 << 20))  # a few KiB that decode to 64 MiB
assert len(BOMB) < PAGE // 2


@pytest.mark.parametrize(
    ("number", "stored"),
    [
        (fmt.CODEC_ZSTD, b""),
        (fmt.CODEC_ZSTD, b"no frame at all"),
        (fmt.CODEC_ZSTD, frame(bytes(PAGE - 1))),
        (fmt.CODEC_ZSTD, frame(bytes(PAGE + 1))),
        (fmt.CODEC_ZSTD, BOMB),
        (fmt.CODEC_ZSTD, without_size(bytes(PAGE))),
        (fmt.CODEC_ZSTD, frame(bytes(PAGE))[:-1]),
        (fmt.CODEC_ZSTD, frame(bytes(PAGE)) + b"\0"),
        (fmt.CODEC_ZSTD, frame(bytes(PAGE)) + frame(bytes(PAGE))),
        (fmt.CODEC_ZSTD, b"\x50\x2a\x4d\x18" + PAGE.to_bytes(4, "little") + bytes(100)),  # a skippable frame
        (fmt.CODEC_ZSTD, bytes(PAGE)),
        (fmt.CODEC_RAW, bytes(PAGE - 1)),
        (fmt.CODEC_RAW, bytes(PAGE + 1)),
        (3, frame(bytes(PAGE))),
        (255, bytes(PAGE)),
        (fmt.CODEC_PLANES, b"\2"),
        (fmt.CODEC_PLANES, planes(HALF, HALF)[:11]),
        (fmt.CODEC_PLANES, planes(HALF, HALF)[:-1]),
        (fmt.CODEC_PLANES, planes(HALF, HALF) + b"\0"),
        (fmt.CODEC_PLANES, planes(HALF, HALF, pad=b"\1\0\0")),
        (fmt.CODEC_PLANES, planes(HALF, HALF, count=0)),
        (fmt.CODEC_PLANES, planes(HALF, HALF, count=255)),
        (fmt.CODEC_PLANES, planes(HALF, HALF, HALF)),
        (fmt.CODEC_PLANES, planes(HALF, b"")),
        (fmt.CODEC_PLANES, planes(HALF, frame(bytes(PAGE)))),
        (fmt.CODEC_PLANES, planes(HALF, bytes(PAGE // 2 - 1))),
        (fmt.CODEC_PLANES, b"\2\0\0\0" + b"\xff\xff\xff\xff" * 2 + HALF),
    ],
)
def test_what_is_not_exactly_one_page_is_refused(number: int, stored: bytes) -> None:
    with pytest.raises(CodecError):
        codec.decode(stored, number, memoryview(bytearray(PAGE)))
    with pytest.raises(CodecError):
        codec.decoded(stored, number, PAGE)


def test_a_bomb_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        for number, stored in ((fmt.CODEC_ZSTD, BOMB), (fmt.CODEC_PLANES, planes(HALF, BOMB))):
            with pytest.raises(CodecError):
                codec.decode(stored, number, memoryview(bytearray(PAGE)))
        assert tracemalloc.get_traced_memory()[1] < 8 * PAGE
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300), st.integers(0, 3), st.integers(0, 400))
def test_any_bytes_are_a_page_or_a_codec_error(stored: bytes, number: int, nbytes: int) -> None:
    guarded = bytearray(nbytes + 16)
    with contextlib.suppress(CodecError):
        codec.decode(stored, number, memoryview(guarded)[:nbytes])
    assert guarded[nbytes:] == bytes(16)


@pytest.mark.parametrize("name", ["lz4", "", "RAW", 1, None, "x" * 100])
def test_unknown_names_are_refused(name: Any, store: kvfs.Store) -> None:
    with pytest.raises(kvfs.ConfigError, match="choose one of raw, zstd, planes"):
        codec.parse(name)
    if name is not None:
        with pytest.raises(kvfs.ConfigError, match="choose one of raw, zstd, planes"):
            store.namespace("model", LAYOUT, "1", codec=name)


# -- stores ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
def test_pages_are_stored_smaller_and_restored(store: kvfs.Store, name: str) -> None:
    ns, tokens = store.namespace("model", LAYOUT, "1", codec=name), tokens_of(1, 6)
    assert ns.codec == name
    with counted(store) as moved:
        assert ns.put(tokens, PAGES).stored == 6
        assert moved("pages_encoded") == 6
        assert moved("bytes_saved") + moved("bytes_written") == 6 * PAGE
        assert moved("bytes_saved") > 0.15 * 6 * PAGE
    entries = entries_of(store)
    assert {e.codec for e in entries} == {codec.CODECS[name]}
    assert {e.raw_bytes for e in entries} == {PAGE} and max(e.stored_bytes for e in entries) < PAGE
    with counted(store) as moved:
        assert restored(ns, tokens) == PAGES
        assert (moved("pages_decoded"), moved("pages_corrupt")) == (6, 0)
    with ns.match(tokens) as match:
        views = ns.view(match)
        assert b"".join(views) == PAGES and all(view.readonly for view in views)
    report = store.verify()
    assert report.ok and report.pages == 6, report.problems
    [info] = store.catalog.namespaces()
    assert info.nbytes == sum(e.stored_bytes for e in entries)


def test_roots_and_names_do_not_depend_on_the_codec(store: kvfs.Store, tmp_path: Path) -> None:
    tokens, roots = tokens_of(1, 6), {}
    for name in codec.CODECS:
        with kvfs.open(tmp_path / name, capacity="64MiB", codec=name) as other:
            other.namespace("model", LAYOUT, "1").put(tokens, PAGES)
            roots[name] = [(e.chunk_hash, e.root) for e in entries_of(other)]
    assert roots["raw"] == roots["zstd"] == roots["planes"]


def test_pages_of_all_codecs_share_a_namespace(store: kvfs.Store) -> None:
    tokens = tokens_of(1, 6)
    for chunk, name in enumerate(("raw", "zstd", "planes", "raw", "raw", "zstd")):
        ns = store.namespace("model", LAYOUT, "1", codec=name)
        page = PAGES[chunk * PAGE : (chunk + 1) * PAGE]
        assert ns.put(tokens, page, start=chunk).stored == 1
    assert [e.codec for e in entries_of(store)] == [0, 1, 2, 0, 0, 1]
    assert restored(ns, tokens) == PAGES
    with ns.match(tokens) as match:
        assert b"".join(ns.view(match)) == PAGES
    assert ns.put(tokens, PAGES).skipped == 6


def test_what_does_not_shrink_is_stored_raw_after_one_sample(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns, noise = store.namespace("model", LAYOUT, "1", codec="planes"), seeded(3, 6 * PAGE)
    calls: list[int] = []
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda *args: calls.append(1) or encode(*args))
    with counted(store) as moved:
        ns.put(tokens_of(1, 6), noise)
        assert (moved("pages_incompressible"), moved("pages_encoded"), len(calls)) == (6, 0, 1)
    assert {e.codec for e in entries_of(store)} == {0}
    assert restored(ns, tokens_of(1, 6)) == noise


def test_single_pages_of_a_batch_that_do_not_shrink_are_raw(store: kvfs.Store) -> None:
    ns, pages = store.namespace("model", LAYOUT, "1", codec="zstd"), PAGES[:PAGE] + seeded(3, PAGE) + bytes(PAGE)
    with counted(store) as moved:
        ns.put(tokens_of(1, 3), pages)
        assert (moved("pages_incompressible"), moved("pages_encoded")) == (1, 2)
    assert [e.codec for e in entries_of(store)] == [1, 0, 1]
    assert restored(ns, tokens_of(1, 3)) == pages


def test_the_setting_of_the_store_is_the_default_of_its_namespaces(tmp_path: Path) -> None:
    with kvfs.open(tmp_path / "store", capacity="64MiB", codec="planes") as store:
        assert store.settings.codec == "planes"
        assert store.namespace("model", LAYOUT, "1").codec == "planes"
        assert store.namespace("model", LAYOUT, "1", codec="raw").codec == "raw"
        assert store.namespace("model", LAYOUT, "1", codec="zstd").new_epoch().codec == "zstd"
    with pytest.raises(kvfs.ConfigError, match="choose one of"):
        kvfs.open(tmp_path / "other", capacity="64MiB", codec="gzip")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", CODECS)
def test_parts_of_any_degree_are_read_from_encoded_ones(store: kvfs.Store, name: str) -> None:
    group, tokens = LAYOUT.groups[0], tokens_of(1, 2)
    ns = store.namespace("model", LAYOUT, "1", codec=name)
    ns.put(tokens, PAGES[: 2 * PAGE])
    step = group.granule_states * group.cell.nbytes
    for part in (Part(0, 1, 0, 4), Part(1, 1, 1, 2), Part(0, 2, 3, 1)):
        expected = b"".join(
            PAGES[at + ((layer * 2) + head) * step :][:step]
            for at in (0, PAGE)
            for layer in range(part.layer, part.layer + part.layers)
            for head in range(part.head, part.head + part.heads)
        )
        assert restored(ns, tokens, part=part) == expected
    other = store.namespace("other", LAYOUT, "1", codec=name)
    for head in range(2):
        part = Part(head, 1, 0, 4)
        own = b"".join(
            PAGES[at + ((layer * 2) + head) * step :][:step] for at in (0, PAGE) for layer in range(4)
        )  # fmt: skip
        assert other.put(tokens, own, part=part).stored == 2
    assert restored(other, tokens) == PAGES[: 2 * PAGE]


def flip(store: kvfs.Store, record: int, change: Callable[[bytearray], None]) -> None:
    """Change the stored payload of a record in its file."""
    [path] = segment_files(Path(store.path))
    entry = entries_of(store)[record]
    with path.open("r+b") as file:
        file.seek(entry.payload)
        data = bytearray(file.read(entry.stored_bytes))
        change(data)
        file.seek(entry.payload)
        file.write(data)


def _bit(data: bytearray) -> None:
    data[len(data) // 2] ^= 4


def _header(data: bytearray) -> None:
    data[0] ^= 1


def _zero(data: bytearray) -> None:
    data[:] = bytes(len(data))


@pytest.mark.parametrize("policy", ["always", "first", "off"])
@pytest.mark.parametrize("change", [_bit, _header, _zero])
@pytest.mark.parametrize("name", CODECS)
def test_a_damaged_page_is_refused_and_can_be_stored_again(
    tmp_path: Path, name: str, change: Callable[[bytearray], None], policy: str
) -> None:
    tokens = tokens_of(1, 6)
    with kvfs.open(tmp_path / "store", capacity="64MiB", verify=policy) as store:
        ns = store.namespace("model", LAYOUT, "1", codec=name)
        ns.put(tokens, PAGES)
        flip(store, 4, change)
        assert not store.verify().ok
        with ns.match(tokens) as match:
            with counted(store) as moved:
                assert len(ns.view(match)) == 4
                assert moved("pages_corrupt") == 1
            out = bytearray(match.nbytes)
            with counted(store) as moved:  # the match still names the page, the index does not
                assert ns.get(match, out) == 4 and out[: 4 * PAGE] == PAGES[: 4 * PAGE]
                assert moved("pages_corrupt") == 1
        assert ns.match(tokens).chunks == 4
        assert ns.put(tokens, PAGES).stored == 1
        assert restored(ns, tokens) == PAGES


@pytest.mark.parametrize("number", [3, 200])
def test_an_unknown_codec_is_a_miss(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    ns, tokens = store.namespace("model", LAYOUT, "1", codec="zstd"), tokens_of(1, 6)
    encode = codec.encode
    with monkeypatch.context() as later:
        later.setattr(codec, "encode", lambda *args: (number, encode(*args)[1]))
        ns.put(tokens, PAGES)
    assert {e.codec for e in entries_of(store)} == {number}
    assert restored(ns, tokens) == b""
    with ns.match(tokens) as match:
        assert ns.view(match) == []
    assert f"codec {number} is unknown" in store.verify().problems[0]


def test_pages_of_an_unknown_codec_do_not_block_their_own_replacement(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns, tokens = store.namespace("model", LAYOUT, "1", codec="zstd"), tokens_of(1, 6)
    encode = codec.encode
    with monkeypatch.context() as later:
        later.setattr(codec, "encode", lambda *args: (200, encode(*args)[1]))
        ns.put(tokens, PAGES)
    assert ns.match(tokens).chunks == 0
    assert ns.put(tokens, PAGES).stored == 6
    assert restored(ns, tokens) == PAGES
    assert codec.NAMES.keys() == fmt.KNOWN_CODECS


def test_a_large_page_is_not_decoded_into_two_buffers() -> None:
    nbytes = 16 << 20
    used, stored = codec.encode(bytes(nbytes), fmt.CODEC_ZSTD, 2)
    tracemalloc.start()
    try:
        assert len(codec.decoded(stored, used, nbytes)) == nbytes
        assert tracemalloc.get_traced_memory()[1] < 1.5 * nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", CODECS)
def test_a_lack_of_memory_is_a_codec_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    used, stored = codec.encode(PAGES, codec.CODECS[name], 2)
    monkeypatch.setattr(codec, "bytearray" if name == "planes" else "_tools", full, raising=False)
    if name == "zstd":
        tools = SimpleNamespace(
            error=zstandard.ZstdError, parameters=zstandard.get_frame_parameters,
            decompressor=SimpleNamespace(decompress=full),
        )  # fmt: skip
        monkeypatch.setattr(codec, "_tools", lambda: tools)
    with pytest.raises(CodecError, match="no memory"):
        codec.decoded(bytes(stored), used, len(PAGES))


@pytest.mark.parametrize("level", ["cache", "batch"])
def test_a_rebuild_finds_encoded_pages_and_drops_torn_ones(tmp_path: Path, level: str) -> None:
    path, tokens = tmp_path / "store", tokens_of(1, 6)
    with kvfs.open(path, capacity="64MiB", codec="planes", sync=level, segment_bytes="4MiB") as store:
        store.namespace("model", LAYOUT, "1").put(tokens, PAGES)
        flip(store, 5, _bit)
        stored = sum(e.stored_bytes for e in entries_of(store))
    os.unlink(path / "index" / "CURRENT")
    with kvfs.open(path) as store:
        assert store.wait_ready()
        ns = store.namespace("model", LAYOUT, "1")
        assert ns.match(tokens).chunks == (6 if level == "cache" else 5)
        if level == "cache":
            assert store.catalog.namespaces()[0].nbytes == stored
        assert restored(ns, tokens) == PAGES[: 5 * PAGE]


@pytest.mark.parametrize("name", CODECS)
def test_bundles_carry_encoded_pages(store: kvfs.Store, tmp_path: Path, name: str) -> None:
    ns, tokens = store.namespace("model", LAYOUT, "1", codec=name), tokens_of(1, 6)
    ns.put(tokens, PAGES)
    done = store.export(str(tmp_path / "bundle"), ["model"])
    assert (done.pages, done.left_out) == (6, 0)
    with kvfs.open(tmp_path / "second", capacity="64MiB") as second:
        report = second.import_bundle(str(tmp_path / "bundle"))
        assert (report.stored, report.nbytes) == (6, sum(e.stored_bytes for e in entries_of(store)))
        assert restored(second.namespace("model", LAYOUT, "1"), tokens) == PAGES
        assert second.verify().ok
        assert second.catalog.namespaces()[0].nbytes == report.nbytes


def test_capacity_is_kept_and_holds_more_pages_than_raw(tmp_path: Path) -> None:
    held = {}
    for name in ("raw", "planes"):
        with kvfs.open(tmp_path / name, capacity="16MiB", codec=name) as store:
            ns = store.namespace("model", LAYOUT, "1")
            for prompt in range(160):
                assert ns.put(tokens_of(prompt, 6), PAGES).declined == 0
                used = store.stats()["used_bytes"]
                files = allocated_bytes(tmp_path / name)
                assert max(used, files) <= 16 << 20
            held[name] = sum(ns.match(tokens_of(prompt, 6)).chunks for prompt in range(160))
            assert store.verify().ok
    assert held["planes"] > 1.25 * held["raw"]


def test_the_transport_of_an_engine_stores_and_loads_encoded_pages(store: kvfs.Store) -> None:
    import numpy as np

    ns, tokens = store.namespace("model", LAYOUT, "1", codec="planes"), tokens_of(1, 6)
    shape = (4, 8, 16, 2, 128)
    source = np.frombuffer(bf16(5, 4 * 8 * 16 * 2 * 128 * 2), "uint16").reshape(shape).copy()
    target = np.zeros(shape, "uint16")
    order = "layer,block,token,head,2*dim"
    with ns.attach(kvfs.describe(LAYOUT.groups[0], source, order)) as io:
        result = io.save(ns.plan_save(tokens), range(6)).wait(10.0)
        assert result is not None and result.pages == 6
    assert {e.codec for e in entries_of(store)} == {fmt.CODEC_PLANES}
    with ns.attach(kvfs.describe(LAYOUT.groups[0], target, order)) as io, ns.match(tokens) as match:
        result = io.load(match, range(6)).wait(10.0)
        assert result is not None and result.tokens == 96
    assert (target[:, :6] == source[:, :6]).all() and not target[:, 6:].any()


def test_opaque_pages_are_zstd_only(store: kvfs.Store) -> None:
    ns = store.namespace("engine", PageLayout.opaque(PAGE, 16), "1", codec="planes")
    assert ns.put_keys([b"a", b"b"], PAGES[: 2 * PAGE]).stored == 2
    assert {e.codec for e in entries_of(store)} == {fmt.CODEC_ZSTD}
    with ns.match_keys([b"a", b"b"]) as match:
        out = bytearray(match.nbytes)
        assert ns.get(match, out) == 2 and out == PAGES[: 2 * PAGE]


def test_windows_and_snapshots_are_encoded(store: kvfs.Store) -> None:
    layout = PageLayout.of(
        [
            Group("window", (0,), 1, Cell("bf16 k256+v256", 1024), Need.window_of(32), 16),
            Group("state", (1,), 1, Cell("f32 state 8192", PAGE), Need.exact(), 1),
        ],
        16,
    )
    ns, tokens = store.namespace("hybrid", layout, "1", codec="planes"), tokens_of(1, 4)
    pages = {"window": bf16(1, 4 * 16384), "state": b"".join(bf16(i, PAGE) for i in range(4))}
    ns.put(tokens, pages)
    with ns.match(tokens) as match:
        outs = {g.name: bytearray(g.nbytes) for g in match.groups}
        assert ns.get(match, outs) == 4
    assert outs == {"window": pages["window"][2 * 16384 :], "state": pages["state"][3 * PAGE :]}
    assert fmt.CODEC_PLANES in {e.codec for e in entries_of(store)}


def test_a_view_of_a_damaged_page_forgets_it(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended every later view at that page, and the page could not be stored again."""
    ns, tokens = store.namespace("model", LAYOUT, "1", codec="zstd"), tokens_of(1, 6)
    assert ns.put(tokens, PAGES).stored == 6
    with ns.match(tokens) as match, monkeypatch.context() as patch:
        patch.setattr(reader, "decode_page", lambda *args: False)
        assert ns.view(match) == []
    assert ns.put(tokens, PAGES).stored == 1
    with ns.match(tokens) as match:
        assert b"".join(ns.view(match)) == PAGES


@pytest.mark.parametrize(("error", "stored"), [(errno.EIO, 6), (errno.ENOMEM, 0)], ids=["disk", "memory"])
def test_an_encoded_page_that_cannot_be_read_is_not_served(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, error: int, stored: int
) -> None:
    """After an error of the disk it leaves the index; for lack of memory it stays."""

    def fail(*_: object, **__: object) -> bytes:
        raise OSError(error, "x")

    ns, tokens = store.namespace("model", LAYOUT, "1", codec="zstd"), tokens_of(1, 6)
    assert ns.put(tokens, PAGES).stored == 6
    with ns.match(tokens) as match, monkeypatch.context() as patch:
        patch.setattr(SegmentFiles, "read_bytes", fail)
        out = bytearray(match.nbytes)
        assert ns.get(match, out) == 0 and not any(out)
    assert ns.put(tokens, PAGES).stored == stored


@pytest.mark.parametrize("name", ["zstd", "planes"])
def test_a_reader_that_is_short_of_memory_removes_no_page(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All processes share the index; that a page cannot be decoded now concerns this reader alone."""

    def short(*_: object, **__: object) -> bytes:
        raise MemoryError

    ns, tokens = store.namespace("model", LAYOUT, "1", codec=name), tokens_of(1, 6)
    assert ns.put(tokens, PAGES).stored == 6
    with ns.match(tokens) as match:
        out = bytearray(match.nbytes)
        for owner, what in ((codec, "_unzip"), (SegmentFiles, "read_bytes")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, what, short)
                assert ns.get(match, out) == 0 and ns.view(match) == []
        assert ns.get(match, out) == 6 and out == PAGES
    assert not ns.put(tokens, PAGES).stored


def test_a_repair_that_is_short_of_memory_removes_no_page(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It called every encoded page bad that it could not decode, and removed it from the index."""

    def short(*_: object) -> bytes:
        raise codec.CodecMemoryError

    ns, tokens = store.namespace("model", LAYOUT, "1", codec="zstd"), tokens_of(1, 6)
    assert ns.put(tokens, PAGES).stored == 6
    with monkeypatch.context() as patch:
        patch.setattr(codec, "_unzip", short)
        with pytest.raises(kvfs.KvfsError, match="too little memory to check a page; verify when more is free"):
            store.verify(repair=True)
    assert restored(ns, tokens) == PAGES and store.verify().ok


# -- what a record looks like ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "stored", "raw", "fine"),
    [
        (fmt.CODEC_RAW, 100, 100, True), (fmt.CODEC_RAW, 99, 100, False), (fmt.CODEC_RAW, 101, 100, False),
        (fmt.CODEC_ZSTD, 1, 100, True), (fmt.CODEC_ZSTD, 0, 100, False), (fmt.CODEC_ZSTD, 99, 100, True),
        (fmt.CODEC_ZSTD, 100, 100, False), (fmt.CODEC_PLANES, 99, 100, True), (77, 50, 100, False),
        (77, 100, 100, False),
    ],
)  # fmt: skip
def test_a_record_is_smaller_than_its_page_unless_it_is_raw(number: int, stored: int, raw: int, fine: bool) -> None:
    assert codec.fits(number, stored, raw) is fine


def frames_of(stored: bytes) -> list[bytes]:
    """The planes of a record, as they are stored."""
    count, at, planes = stored[0], 4 + 4 * stored[0], []
    assert stored[1:4] == bytes(3)
    for n in range(count):
        length = int.from_bytes(stored[4 + 4 * n : 8 + 4 * n], "little")
        planes.append(stored[at : at + length])
        at += length
    assert at == len(stored)
    return planes


def test_a_frame_has_its_size_and_neither_a_checksum_nor_a_dictionary() -> None:
    import zstandard

    page = bytes(range(256)) * 64
    number, whole = codec.encode(page, fmt.CODEC_ZSTD, 0)
    assert number == fmt.CODEC_ZSTD
    number, planes = codec.encode(page, fmt.CODEC_PLANES, 2)
    assert number == fmt.CODEC_PLANES
    for frame, nbytes in ((whole, len(page)), *((plane, len(page) // 2) for plane in frames_of(planes))):
        found = zstandard.get_frame_parameters(frame)
        assert (found.content_size, found.has_checksum, found.dict_id) == (nbytes, False, 0)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_planes_that_do_not_shrink_are_stored_as_they_are(count: int) -> None:
    noise, even = seeded(1, 16384 // count), bytes([7]) * (16384 // count)
    planes = [noise if n % 2 == 0 and count > 1 else even for n in range(count)]
    page = bytes(byte for one in zip(*planes, strict=True) for byte in one)
    number, stored = codec.encode(page, fmt.CODEC_PLANES, count)
    assert number == fmt.CODEC_PLANES
    for plane, kept in zip(planes, frames_of(stored), strict=True):
        assert (kept == plane) if plane is noise else len(kept) < len(plane) // 10
    assert bytes(codec.decoded(stored, number, len(page))) == page


@pytest.mark.parametrize(
    ("nbytes", "element", "number"),
    [
        (16384, 2, fmt.CODEC_PLANES), (16384, 1, fmt.CODEC_PLANES), (16384, 0, fmt.CODEC_ZSTD),
        (16384, 3, fmt.CODEC_ZSTD), (16384 + 2, 4, fmt.CODEC_ZSTD), (16384 + 4, 4, fmt.CODEC_PLANES),
        (4097, 1, fmt.CODEC_PLANES), (4096, 1, fmt.CODEC_RAW), (100, 1, fmt.CODEC_RAW),
    ],
)  # fmt: skip
def test_planes_are_of_whole_numbers_and_save_a_block(nbytes: int, element: int, number: int) -> None:
    page = bytes(nbytes)
    found, stored = codec.encode(page, fmt.CODEC_PLANES, element)
    assert found == number and (stored is page) is (number == fmt.CODEC_RAW)
    assert codec.encode(page, fmt.CODEC_RAW, element) == (fmt.CODEC_RAW, page)


@pytest.mark.parametrize(("blocks", "kept"), [(1, False), (2, True), (3, True)])
def test_a_record_that_takes_as_many_blocks_as_its_page_is_raw(blocks: int, kept: bool) -> None:
    """Noise that fills all of its blocks but the last one."""
    noise = seeded(1, 4096 * blocks - 100)
    page = noise + bytes(4096 if kept else 60)
    number, stored = codec.encode(page, fmt.CODEC_ZSTD, 0)
    assert (number == fmt.CODEC_ZSTD) is kept
    assert fmt.align(len(stored)) < fmt.align(len(page)) if kept else stored is page
