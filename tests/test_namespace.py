"""What the public calls promise: put, match, get and view, for every kind of layout, and on damaged files."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs import Cell, ConfigError, Group, Need, NoSpaceError, PageLayout, Part, StoreReadOnlyError
from kvfs.format.checksums import LEAF_BYTES
from kvfs.lookup.search import Prompt
from kvfs.segments import writer as segment
from kvfs.segments.scan import scan_segment
from kvfs.system.files import Files
from kvfs.write import encode
from tests.stores import TINY_BYTES, counted, load, restored, seeded, segment_files, tiny, tokens_of

T = 16
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvfs.Store]:
    """One store for the tests that only need a namespace of their own."""
    with kvfs.open(tmp_path_factory.mktemp("namespace") / "store", capacity="64MiB") as store:
        yield store


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    """A store of the test's own, whose files it may damage."""
    with kvfs.open(memory_path / "store", capacity="16MiB") as made:
        yield made


@pytest.fixture
def ns(shared: kvfs.Store, request: pytest.FixtureRequest) -> kvfs.Namespace:
    return shared.namespace(request.node.name, tiny(), revision="r1")


def fill(ns: kvfs.Namespace, seed: int, chunks: int) -> tuple[list[int], bytes]:
    """Store a prompt; returns its tokens and pages."""
    tokens, pages = tokens_of(seed, chunks), seeded(seed, chunks * ns.layout.page_bytes)
    assert ns.put(tokens, pages) == (chunks, 0, 0, 0, "")
    return tokens, pages


# ---------------------------------------------------------------- every kind of layout

BASE: dict[str, Any] = {"layers": 3, "kv_heads": 2, "head_dim": 8, "page_tokens": T}
LAYOUTS: dict[str, Callable[[], PageLayout]] = {
    "GQA": lambda: PageLayout.kv(**BASE, dtype="bfloat16"),
    "MQA with other values": lambda: PageLayout.kv(**{**BASE, "kv_heads": 1}, v_head_dim=4, dtype="float16"),
    "pages of 4096 bytes": lambda: PageLayout.kv(**{**BASE, "layers": 4, "head_dim": 8}, dtype="bfloat16"),
    "odd head_dim": lambda: PageLayout.kv(**{**BASE, "head_dim": 7}, dtype="bfloat16"),
    "long pages": lambda: PageLayout.kv(**{**BASE, "page_tokens": 128}, dtype="float32"),
    "MLA": lambda: PageLayout.mla(layers=3, kv_lora_rank=32, rope_dim=6, dtype="bfloat16", page_tokens=T),
    "fp8, static scales": lambda: PageLayout.kv(**BASE, dtype="float8_e4m3fn", scale_digest="unit"),
    "int8 and scales": lambda: PageLayout.kv(**BASE, dtype="int8", scale="float32"),
    "int4 and scales": lambda: PageLayout.kv(**BASE, dtype="int4", scale="float16", scales=4),
    "one byte per cell": lambda: PageLayout.of([Group("g", (0,), 1, Cell("u8", 1), Need.all(), T)], T),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_pages_of_every_layout_come_back(shared: kvfs.Store, kind: str) -> None:
    layout = LAYOUTS[kind]()
    ns = shared.namespace(kind, layout, revision="r1")
    tokens = tokens_of(1, 5, layout.page_tokens)
    pages = seeded(2, 5 * layout.page_bytes)
    assert ns.put(tokens, pages) == (5, 0, 0, 0, "")
    with ns.match(tokens + [7] * 3) as match:
        assert (match.tokens, match.chunks, match.nbytes) == (5 * layout.page_tokens, 5, len(pages))
        assert load(ns, match) == {layout.groups[0].name: pages}
        views = ns.view(match)
        assert b"".join(views) == pages and all(v.readonly for v in views)


def test_one_store_keeps_the_layouts_apart(shared: kvfs.Store) -> None:
    tokens = tokens_of(3, 2)
    spaces = [shared.namespace("one model", make(), revision="r1") for make in LAYOUTS.values()]
    spaces = [ns for ns in spaces if ns.layout.page_tokens == T]
    for number, ns in enumerate(spaces):
        assert ns.match(tokens).tokens == 0
        ns.put(tokens, seeded(number, 2 * ns.layout.page_bytes))
    for number, ns in enumerate(spaces):
        assert restored(ns, tokens) == seeded(number, 2 * ns.layout.page_bytes)


def hybrid() -> PageLayout:
    cell = Cell("bf16 k4+v4", 16)
    return PageLayout.of(
        [
            Group("full", (0, 5), 2, cell, Need.all(), T),
            Group("window", (1, 2, 3), 2, cell, Need.window_of(2 * T), T),
            Group("state", (4,), 3, Cell("f32 state", 40), Need.exact(), 1),
        ],
        T,
    )


def hybrid_pages(layout: PageLayout, chunks: int) -> dict[str, bytes]:
    return {g.name: seeded(n, chunks * g.page_bytes) for n, g in enumerate(layout.groups)}


def test_a_hybrid_model_restores_what_each_group_needs(shared: kvfs.Store) -> None:
    layout = hybrid()
    ns = shared.namespace("hybrid", layout, revision="r1")
    tokens, pages = tokens_of(4, 6), hybrid_pages(layout, 6)
    assert ns.put(tokens, pages).stored == 18
    with ns.match(tokens) as match:
        assert match.tokens == 6 * T
        assert [(g.name, g.first, g.count) for g in match.groups] == [("full", 0, 6), ("window", 4, 2), ("state", 5, 1)]
        assert (match.first_page("window"), match.page_count("window")) == (4, 2)
        got = load(ns, match)
        for group in layout.groups:
            first = match.first_page(group.name)
            assert got[group.name] == pages[group.name][first * group.page_bytes :]
            assert b"".join(ns.view(match, group.name)) == got[group.name]


def test_a_hybrid_model_restores_the_lengths_that_its_states_allow(shared: kvfs.Store) -> None:
    """Lengths 2 and 5 can be restored, 3, 4 and 6 not."""
    layout = hybrid()
    ns = shared.namespace("hybrid with holes", layout, revision="r1")
    tokens, pages = tokens_of(5, 6), hybrid_pages(layout, 6)
    state = layout.group("state").page_bytes
    ns.put(tokens, {"full": pages["full"], "window": pages["window"]})
    for chunk in (1, 4):
        put = ns.put(tokens, {"state": pages["state"][chunk * state :][:state]}, start={"state": chunk})
        assert put.stored == 1
    for chunks, expected in ((6, 5), (5, 5), (4, 2), (3, 2), (2, 2), (1, 0)):
        assert ns.match(tokens[: chunks * T]).tokens == expected * T
    assert ns.match(tokens, leave=T + 1).tokens == 2 * T
    with ns.match(tokens) as match:
        assert load(ns, match)["state"] == pages["state"][4 * state : 5 * state]


def test_opaque_keys_come_back_by_key(shared: kvfs.Store) -> None:
    layout = PageLayout.opaque(1000, T)
    ns = shared.namespace("opaque", layout, revision="r1")
    keys = [f"block {i}".encode() for i in range(5)]
    pages = seeded(6, 5000)
    assert ns.put_keys(keys, pages).stored == 5
    assert ns.put_keys(keys, pages) == (0, 5, 0, 0, "")
    assert ns.present_keys([keys[0], b"other", keys[4]]) == [True, False, True]
    with ns.match_keys(keys) as match:
        assert match.chunks == 5 and load(ns, match)["opaque"] == pages
    for chosen in ([keys[3]], keys[::-1], keys[1:3]):  # opaque keys have no order
        with ns.match_keys(chosen) as match:
            expected = b"".join(pages[1000 * keys.index(k) :][:1000] for k in chosen)
            assert match.chunks == len(chosen) and load(ns, match)["opaque"] == expected
    assert ns.match_keys([keys[0], b"other", keys[1]]).chunks == 1
    for keys_of in (b"not a list", ["text"], [b""], [1]):
        with pytest.raises(ConfigError, match="keys"):
            ns.match_keys(keys_of)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="opaque"):
        ns.match([1] * T)


def test_puts_of_two_lanes_append_to_two_segments(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB") as store:
        ns = store.namespace("opaque", PageLayout.opaque(4096, T), revision="r1")
        keys, pages = [b"%d" % n for n in range(4)], seeded(8, 4 * 4096)
        for n, lane in enumerate((0, 7, 0, 7)):
            assert ns.put_keys(keys[n : n + 1], pages[4096 * n : 4096 * (n + 1)], lane=lane).stored == 1
        assert ns.put_keys(keys, pages, lane=3) == (0, 4, 0, 0, ""), "what one lane has stored, others skip"
        files = [file.read_bytes() for file in segment_files(store_path)]
        having = [{n for n in range(4) if pages[4096 * n : 4096 * (n + 1)] in data} for data in files]
        assert sorted(sorted(one) for one in having if one) == [[0, 2], [1, 3]]
        with ns.match_keys(keys) as match:
            assert load(ns, match)["opaque"] == pages
        for lane in (-1, 8, True, "0", None):
            with pytest.raises(ConfigError, match="lane is"):
                ns.put_keys(keys, pages, lane=lane)  # type: ignore[arg-type]


def test_keys_name_pages_of_kv_too_and_never_those_of_tokens(ns: kvfs.Namespace) -> None:
    tokens, pages = fill(ns, 1, 2)
    names = ns.chunk_hashes(tokens)
    assert ns.present_keys(names) == [False, False]
    assert ns.put_keys(names, pages[::-1]).stored == 2
    out = bytearray(2 * TINY_BYTES)
    with ns.match_keys(names) as match:
        assert ns.get(match, out) == 2 and bytes(out) == pages[::-1]
    assert restored(ns, tokens) == pages


# ---------------------------------------------------------------- what is matched


def test_a_match_leaves_what_is_asked(ns: kvfs.Namespace) -> None:
    tokens, _ = fill(ns, 1, 4)
    lengths = {leave: ns.match(tokens, leave=leave).tokens // T for leave in (0, 1, T - 1, T, T + 1, 4 * T, 99 * T)}
    assert lengths == {0: 4, 1: 3, T - 1: 3, T: 3, T + 1: 2, 4 * T: 0, 99 * T: 0}
    for wrong in (-1, 1.0, "1", None, True):
        with pytest.raises(ConfigError, match="leave"):
            ns.match(tokens, leave=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [[], [1] * (T - 1)])
def test_a_prompt_without_a_whole_chunk_matches_nothing(ns: kvfs.Namespace, prompt: list[int]) -> None:
    match = ns.match(prompt)
    assert not match and match.tokens == 0 and ns.get(match, bytearray()) == 0 and ns.view(match) == []
    assert ns.put(prompt, b"") == (0, 0, 0, 0, "")


def test_prompts_that_part_share_their_beginning(ns: kvfs.Namespace) -> None:
    tokens, pages = fill(ns, 1, 6)
    other, theirs = tokens[: 3 * T] + tokens_of(2, 3), pages[: 3 * TINY_BYTES] + seeded(9, 3 * TINY_BYTES)
    assert ns.match(other).tokens == 3 * T
    assert ns.put(other, theirs)[:2] == (3, 3)
    assert restored(ns, tokens) == pages and restored(ns, other) == theirs


def test_the_first_of_two_writers_is_kept(ns: kvfs.Namespace) -> None:
    tokens, pages = fill(ns, 1, 2)
    assert ns.put(tokens, seeded(99, len(pages))) == (0, 2, 0, 0, "")
    assert restored(ns, tokens) == pages


def test_a_second_put_moves_no_bytes(shared: kvfs.Store, ns: kvfs.Namespace) -> None:
    tokens, pages = fill(ns, 1, 40)
    with counted(shared) as moved:
        assert ns.put(tokens, pages) == (0, 40, 0, 0, "")
        assert moved("bytes_written") == 0 and moved("pages_skipped") == 40
    assert not ns.plan_save(tokens)


@pytest.mark.parametrize(("codec", "started"), [("raw", 0), ("raw", 2), ("zstd", 0), ("zstd", 2)])
def test_a_process_that_may_have_no_more_threads_stores_large_pages(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, started: int
) -> None:
    """The put raised, and left the threads that it had started behind: more of them with each put."""
    monkeypatch.setattr(segment, "WRITERS", writers := segment._Writers())
    monkeypatch.setattr(encode, "WRITERS", writers)
    few, begin = iter(range(started)), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name != "kvfs-write" or next(few, None) is None:
            raise RuntimeError("can't start new thread")
        begin(thread)

    def writing() -> int:
        return sum(thread.name == "kvfs-write" for thread in threading.enumerate())

    with kvfs.open(memory_path / "store", capacity="256MiB", segment_bytes="16MiB") as made:
        ns, tokens = made.namespace("m", tiny(head_dim=2048), "1", codec=codec), tokens_of(1, 24)
        half = ns.layout.page_bytes // 2
        pages = b"".join(seeded(n, half) + bytes(half) for n in range(24))
        before = writing()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            assert [ns.put(tokens[: 16 * n], pages[: 2 * half * n]).stored for n in (12, 24)] == [12, 12]
        assert writing() == before + started
        assert restored(ns, tokens) == pages


def test_extra_keys_name_other_pages(ns: kvfs.Namespace) -> None:
    tokens, pages = fill(ns, 1, 4)
    image = {1: b"digest of an image"}
    assert ns.match(tokens, extra=image).tokens == T
    assert ns.match(tokens, extra={1: b""}).tokens == 4 * T
    assert ns.match(tokens, extra={9: b"behind the prompt"}).tokens == 4 * T
    theirs = pages[:TINY_BYTES] + seeded(5, 3 * TINY_BYTES)
    assert ns.put(tokens, theirs, extra=image)[:2] == (3, 1)
    assert restored(ns, tokens, extra=image) == theirs and restored(ns, tokens) == pages
    assert ns.match(tokens, extra={1: b"another image"}).tokens == T
    for wrong in ({-1: b"x"}, {"1": b"x"}, {1: "text"}, {True: b"x"}, [b"x"], "x"):
        with pytest.raises(ConfigError, match="extra"):
            ns.match(tokens, extra=wrong)  # type: ignore[arg-type]


CHANGES: dict[str, dict[str, Any]] = {
    "name": {"name": "m2"},
    "revision": {"revision": "r2"},
    "salt": {"salt": "tenant b"},
    "epoch": {"epoch": 1},
    "rope": {"rope": {"theta": 10000.0}},
    "adapter": {"adapter": "sha256:1234"},
    "extra": {"extra": {"quantisation": "awq"}},
    "layers": {"layout": tiny(layers=[1, 2])},
    "dtype": {"layout": tiny(dtype="float16")},
}


@pytest.mark.parametrize("what", CHANGES)
def test_identities_that_differ_share_nothing(store: kvfs.Store, what: str) -> None:
    identity: dict[str, Any] = {"name": "m", "layout": tiny(), "revision": "r1", "salt": "tenant a"}
    ours = store.namespace(**identity)
    theirs = store.namespace(**{**identity, **CHANGES[what]})
    tokens, pages = fill(ours, 1, 2)
    assert theirs.match(tokens).tokens == 0
    assert theirs.put(tokens, seeded(8, len(pages))).stored == 2
    assert restored(ours, tokens) == pages and restored(theirs, tokens) == seeded(8, len(pages))
    assert store.namespace(**identity).match(tokens).tokens == 2 * T
    with pytest.raises(ConfigError, match="another namespace"):
        theirs.get(ours.match(tokens), bytearray(len(pages)))


BAD_IDENTITIES: dict[str, dict[str, Any]] = {
    **{f"revision {r!r}": {"revision": r} for r in ("main", "LATEST", "", "none", None, 1, "a\nb", "x" * 300)},
    **{f"name {n!r}": {"name": n} for n in ("", " a", "ä", "a\0b", None, b"m")},
    **{f"epoch {e!r}": {"epoch": e} for e in (-1, 1.0, "1", True, 2**63)},
    "salt of bytes": {"salt": b"x"}, "salt of half a character": {"salt": "\ud800"},
    "adapter": {"adapter": None}, "no mapping": {"rope": []}, "a number": {"rope": 5}, "a text": {"extra": "x"},
    "no JSON": {"extra": {"x": object()}}, "infinite": {"rope": {"theta": float("inf")}},
    "mixed keys": {"extra": {1: 1, "a": 2}}, "too long": {"extra": {"x": "y" * 70_000}}, "layout": {"layout": None},
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_IDENTITIES)
def test_an_invalid_identity_is_refused(shared: kvfs.Store, what: str) -> None:
    identity: dict[str, Any] = {"name": "m", "layout": tiny(), "revision": "r1"}
    with pytest.raises(ConfigError):
        shared.namespace(**{**identity, **BAD_IDENTITIES[what]})


def test_a_page_larger_than_a_segment_is_refused_at_once(shared: kvfs.Store) -> None:
    with pytest.raises(NoSpaceError, match="page_tokens"):
        shared.namespace("big", PageLayout.opaque(1 << 24, T), revision="r1")


# ---------------------------------------------------------------- where a put begins and ends


def test_a_put_may_begin_after_what_is_stored(ns: kvfs.Namespace) -> None:
    tokens, pages = tokens_of(1, 5), seeded(1, 5 * TINY_BYTES)
    assert ns.put(tokens, pages[: 2 * TINY_BYTES]).stored == 2
    assert ns.plan_save(tokens).missing == {"full": (2, 3, 4)}
    assert ns.put(tokens, pages[TINY_BYTES:], start=1) == (3, 1, 0, 0, "")
    assert restored(ns, tokens) == pages


def test_a_plan_leaves_out_what_is_stored_behind_a_gap(ns: kvfs.Namespace) -> None:
    """The row that leads to a continuation may leave the index before the continuation does."""
    first, pages = fill(ns, 1, 40)
    fork = first[: 3 * T] + tokens_of(2, 37)
    assert ns.put(fork, pages).stored == 37
    group = ns.layout.groups[0]
    key = Prompt(ns.identity.digest, ns.chunk_hashes(fork)).key(group, group.full, 0)
    ns._c.index.write(lambda session: session.delete_row(key), 10.0)
    assert ns.plan_save(fork).missing == {"full": (0, 1, 2)}
    assert ns.plan_save(first).missing == {"full": tuple(range(32))}


@pytest.mark.usefixtures("python_only")
def test_a_plan_of_a_long_prompt_is_few_trips_to_the_index(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(ns, 1, 2)
    trips, read = [], ns._c.index.read
    monkeypatch.setattr(ns._c.index, "read", lambda *args: (trips.append(threading.get_ident()), read(*args))[1])
    assert len(ns.plan_save(tokens_of(2, 2048)).missing["full"]) == 2048
    mine = trips.count(threading.get_ident())  # upkeep reads, too
    assert mine == 2, "the heads of all runs, then what the first one may have without its head"


def test_nothing_is_stored_behind_a_gap(shared: kvfs.Store, ns: kvfs.Namespace) -> None:
    tokens, pages = tokens_of(1, 5), seeded(1, 5 * TINY_BYTES)
    with counted(shared) as moved:
        assert ns.put(tokens, pages[2 * TINY_BYTES :], start=2) == (0, 0, 3, 0, "gap")
        assert moved("bytes_written") == 0
    assert ns.match(tokens).tokens == 0 and ns.put(tokens, pages).stored == 5


def test_pages_behind_what_another_group_declined_are_declined(shared: kvfs.Store) -> None:
    ns = shared.namespace("declined", hybrid(), revision="r1")
    pages = {g.name: bytes(g.page_bytes) for g in ns.layout.groups}
    put = ns.put(tokens_of(1, 6), pages, start={"full": 3, "window": 4, "state": 5})
    assert put == (0, 0, 3, 0, "gap")


BAD_PUTS: dict[str, dict[str, Any]] = {
    "half a page": {"pages": bytes(TINY_BYTES // 2)},
    "a byte too many": {"pages": bytes(TINY_BYTES + 1)},
    "more pages than chunks": {"pages": bytes(5 * TINY_BYTES)},
    "more behind the start": {"pages": bytes(2 * TINY_BYTES), "start": 3},
    "no buffer": {"pages": None},
    "a text": {"pages": "x" * TINY_BYTES},
    "a list": {"pages": [0] * TINY_BYTES},
    "unknown group": {"pages": {"nope": bytes(TINY_BYTES)}},
    "not contiguous": {"pages": np.zeros((TINY_BYTES, 2), "uint8")[:, 0]},
    "dates": {"pages": np.zeros(TINY_BYTES // 8, "datetime64[s]")},
    "objects": {"pages": np.zeros(TINY_BYTES // 8, object)},
    "negative start": {"start": -1},
    "start of another kind": {"start": 1.0},
    "start of an unknown group": {"start": {"nope": 1}},
    "part of another kind": {"part": (0, 1, 0, 1)},
    "part outside": {"part": Part(0, 3, 0, 2)},
    "part of an unknown group": {"part": {"nope": Part(0, 1, 0, 1)}},
    "ttl": {"ttl": "soon"},
    "negative ttl": {"ttl": -1},
    "ttl of another kind": {"ttl": b"1"},
    "short attempt": {"attempt": b"x"},
    "attempt of text": {"attempt": "attempt!"},
    "attempt of a number": {"attempt": 12345678},
    "extra": {"extra": {0: "x"}},
}


@pytest.mark.parametrize("what", BAD_PUTS)
def test_an_invalid_put_is_refused_before_anything_is_written(
    shared: kvfs.Store, ns: kvfs.Namespace, what: str
) -> None:
    arguments: dict[str, Any] = {"token_ids": tokens_of(1, 4), "pages": bytes(4 * TINY_BYTES), **BAD_PUTS[what]}
    with counted(shared) as moved, pytest.raises(ConfigError):
        ns.put(**arguments)
    assert moved("bytes_written") == 0 and ns.match(tokens_of(1, 4)).tokens == 0


@pytest.mark.parametrize(
    "make",
    [
        bytes, bytearray, memoryview,
        lambda b: np.frombuffer(b, "uint8"), lambda b: np.frombuffer(b, "float16").reshape(5, -1),
        lambda b: np.frombuffer(b, ">f4"), lambda b: np.frombuffer(b, "complex64"),
        lambda b: np.frombuffer(b, [("k", "f2"), ("v", "f2")]), lambda b: memoryview(b).cast("I"),
    ],
)  # fmt: skip
def test_pages_may_be_any_contiguous_memory(ns: kvfs.Namespace, make: Callable[[bytes], Any]) -> None:
    tokens, pages = tokens_of(1, 5), seeded(1, 5 * TINY_BYTES)
    assert ns.put(tokens, make(pages)).stored == 5
    assert restored(ns, tokens) == pages


@pytest.mark.parametrize("empty", [b"", np.empty(0, "float16"), np.empty((0, 4), "float32")])
def test_no_pages_are_no_pages(ns: kvfs.Namespace, empty: Any) -> None:
    assert ns.put(tokens_of(1, 2), empty) == (0, 0, 0, 0, "")
    assert ns.get(ns.match(tokens_of(1, 2)), np.empty((0, 4))) == 0


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
def test_torch_tensors_go_in_and_out(ns: kvfs.Namespace, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tokens, pages = tokens_of(1, 3), seeded(1, 3 * TINY_BYTES)
    tensor = torch.frombuffer(bytearray(pages), dtype=torch.uint8).view(getattr(torch, dtype)).reshape(3, 2, -1)
    assert ns.put(torch.tensor(tokens), tensor).stored == 3
    out = torch.zeros_like(tensor)
    with ns.match(torch.tensor(tokens)) as match:
        assert ns.get(match, out) == 3
    assert out.view(torch.uint8).flatten().tolist() == list(pages)
    with pytest.raises(ConfigError, match="contiguous"):
        ns.get(ns.match(tokens), out.transpose(0, 2))


# ---------------------------------------------------------------- get and view

BAD_OUTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "too small": (lambda n: bytearray(n - 1), r"has 2047 bytes, 2048 are needed"),
    "read-only": (bytes, "read-only"),
    "read-only array": (lambda n: np.frombuffer(bytes(n), "uint8"), "read-only"),
    "not contiguous": (lambda n: np.zeros((n, 2), "uint8")[:, 1], "not contiguous"),
    "no buffer": (lambda n: [0] * n, "buffer 0, is int"),
    "a number": (lambda n: n, "int"),
    "a mapping without the group": (lambda n: {"nope": bytearray(n)}, "full"),
}


@pytest.mark.parametrize("what", BAD_OUTS)
def test_a_buffer_that_cannot_hold_the_pages_is_refused(ns: kvfs.Namespace, what: str) -> None:
    make, message = BAD_OUTS[what]
    tokens, pages = fill(ns, 1, 2)
    with ns.match(tokens) as match, pytest.raises(ConfigError, match=message):
        ns.get(match, make(len(pages)))


def test_a_larger_buffer_is_filled_from_its_beginning(ns: kvfs.Namespace) -> None:
    tokens, pages = fill(ns, 1, 2)
    out = bytearray(b"\xcc" * (len(pages) + 100))
    with ns.match(tokens) as match:
        assert ns.get(match, {"full": out}) == 2
    assert out == pages + b"\xcc" * 100


def test_several_groups_need_names(shared: kvfs.Store) -> None:
    layout = hybrid()
    ns = shared.namespace("names", layout, revision="r1")
    pages = hybrid_pages(layout, 2)
    ns.put(tokens_of(1, 2), pages)
    with ns.match(tokens_of(1, 2)) as match:
        for wrong in (bytearray(10_000), {"full": bytearray(10_000)}):
            with pytest.raises(ConfigError, match="group"):
                ns.get(match, wrong)
        with pytest.raises(ConfigError, match="group"):
            ns.view(match)
        with pytest.raises(ConfigError, match="nope"):
            ns.view(match, "nope")
        with pytest.raises(ConfigError, match="group"):
            ns.put(tokens_of(1, 2), pages["full"])


def test_an_object_that_is_no_match_is_refused(ns: kvfs.Namespace) -> None:
    for wrong in (None, 5, "match"):
        with pytest.raises(ConfigError, match="match"):
            ns.get(wrong, bytearray(5))  # type: ignore[arg-type]


def segments_open() -> int:
    """Descriptors of segments in this process, those of maps included."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{fd}").endswith(".kvs")
    return count


def test_a_view_takes_one_descriptor_per_segment_whatever_the_size_of_a_page(store: kvfs.Store) -> None:
    """Pages of 10 KiB, as of MLA models: there is a gap behind each of them."""
    layout = kvfs.PageLayout.kv(layers=1, kv_heads=2, head_dim=80, dtype="bfloat16", page_tokens=16)
    ns = store.namespace("gaps", layout, revision="r1")
    prompt, pages = list(range(200 * 16)), seeded(3, 200 * layout.page_bytes)
    assert ns.put(prompt[: 100 * 16], pages[: 100 * layout.page_bytes]).stored == 100
    assert ns.put(prompt, pages[100 * layout.page_bytes :], start=100).stored == 100
    with ns.match(prompt) as match:
        before = segments_open()
        views = ns.view(match)
        assert b"".join(views) == pages
        assert segments_open() - before <= len(match.segments) < 20


def test_a_view_stays_valid_after_its_segment_is_unlinked(store: kvfs.Store) -> None:
    ns = store.namespace("m", tiny(), revision="r1")
    tokens, pages = fill(ns, 1, 4)
    with ns.match(tokens) as match:
        views = ns.view(match)
    for file in segment_files(Path(store.path)):
        file.unlink()
    assert b"".join(views) == pages
    with pytest.raises(TypeError, match=r"read-only|readonly"):
        views[0][0] = 1  # type: ignore[index]


def test_a_match_holds_its_pages_after_the_segment_is_unlinked(store: kvfs.Store) -> None:
    ns = store.namespace("m", tiny(), revision="r1")
    tokens, pages = fill(ns, 1, 4)
    with ns.match(tokens) as match:
        for file in segment_files(Path(store.path)):
            file.unlink()
        assert load(ns, match)["full"] == pages
    assert load(ns, match)["full"] == b"", "a closed match holds nothing"
    assert ns.match(tokens).tokens == 0


@pytest.mark.parametrize("how", ["closed", "expired", "pickled"])
def test_a_match_loads_after_its_hold_is_over(ns: kvfs.Namespace, shared: kvfs.Store, how: str) -> None:
    tokens, pages = fill(ns, 1, 4)
    match = ns.match(tokens)
    if how == "closed":
        match.close()
    elif how == "expired":
        assert match.hold is not None
        match.hold.expires_at = 0.0
        shared._shared._expire_holds()
        assert not match.hold.acquire()
    else:
        match = pickle.loads(pickle.dumps(match))
    assert load(ns, match)["full"] == pages and b"".join(ns.view(match)) == pages
    assert len(match.pages) == 4


def test_a_match_that_is_made_meanwhile_ends_neither_the_upkeep_nor_a_close(store: kvfs.Store) -> None:
    store._shared.background.stop()
    ns = store.namespace("m", tiny(), "1")
    tokens, _ = fill(ns, 1, 4)

    class Growing(weakref.WeakSet[Any]):
        left = 0

        def __iter__(self) -> Iterator[Any]:
            for one in super().__iter__():
                if self.left:
                    self.left -= 1
                    made.append(ns.match(tokens))
                yield one

    store._shared.c.holds = holds = Growing()
    made = [ns.match(tokens) for _ in range(4)]
    for call in (store._shared._expire_holds, store.close):
        holds.left = 2
        call()
    assert len(made) == 8 and not any(match.hold and match.hold.acquire() for match in made)


def test_another_process_loads_a_pickled_match(shared: kvfs.Store, ns: kvfs.Namespace) -> None:
    tokens, pages = fill(ns, 1, 4)
    code = """
import pickle, sys
import kvfs
path, name, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
layout = kvfs.PageLayout.kv(layers=2, kv_heads=2, head_dim=4, dtype="bfloat16", page_tokens=16)
with kvfs.open(path) as store:
    ns = store.namespace(name, layout, revision="r1")
    match = pickle.load(sys.stdin.buffer)
    out = bytearray(size)
    assert ns.get(match, out) == 4
    sys.stdout.buffer.write(out)
"""
    with ns.match(tokens) as match:
        done = subprocess.run(
            [sys.executable, "-c", code, shared.path, ns.name, str(len(pages))], input=pickle.dumps(match),
            capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == pages


def test_nothing_stays_open_when_matches_end(store: kvfs.Store) -> None:
    ns = store.namespace("m", tiny(), revision="r1")
    tokens, _ = fill(ns, 1, 4)
    matches = [ns.match(tokens) for _ in range(3)]
    assert store._shared.c.segments.count() == 1
    matches[0].close()
    matches[0].close()
    del matches
    assert store._shared.c.segments.count() == 0


def test_calls_after_close_are_quick_misses(memory_path: Path) -> None:
    store = kvfs.open(memory_path / "store", capacity="16MiB")
    ns = store.namespace("m", tiny(), revision="r1")
    tokens, pages = fill(ns, 1, 2)
    match = ns.match(tokens)
    store.close()
    assert ns.get(match, bytearray(len(pages))) == 0 and ns.match(tokens).tokens == 0
    assert ns.put(tokens, pages).declined == 2
    with pytest.raises(ConfigError, match="closed"):
        store.stats()


def test_a_read_only_store_takes_no_puts(store: kvfs.Store) -> None:
    ns = store.namespace("m", tiny(), revision="r1")
    tokens, pages = fill(ns, 1, 2)
    store.close()
    with kvfs.open(store.path, read_only=True) as reader:
        ns = reader.namespace("m", tiny(), revision="r1")
        assert restored(ns, tokens) == pages
        with pytest.raises(StoreReadOnlyError):
            ns.put(tokens, pages)
        with pytest.raises(StoreReadOnlyError):
            reader.gc()


# ---------------------------------------------------------------- damaged files


class Damage:
    """Changes the bytes of pages on disk."""

    def __init__(self, store: kvfs.Store, pages: bytes, size: int = TINY_BYTES) -> None:
        self.pages = [pages[i : i + size] for i in range(0, len(pages), size)]
        self.size = size
        self.file = next(f for f in segment_files(Path(store.path)) if self.pages[0] in f.read_bytes())
        data = self.file.read_bytes()
        self.at = [data.index(page) for page in self.pages]

    def write(self, offset: int, data: bytes) -> None:
        fd = os.open(self.file, os.O_RDWR)
        try:
            os.pwrite(fd, data, offset)
        finally:
            os.close(fd)

    def flip(self, page: int, byte: int) -> None:
        self.write(self.at[page] + byte, bytes([self.pages[page][byte] ^ 0x10]))

    def leaf_tables(self) -> list[tuple[int, bytes]]:
        """(offset, bytes) of the leaf tables of the pages, in order."""
        fd = os.open(self.file, os.O_RDONLY)
        try:
            scan = scan_segment(fd, Files())
            assert scan is not None
            by_payload = {e.payload: e.leaves for e in scan.parts()}
            size = LEAF_BYTES * 2
            return [(by_payload[at], os.pread(fd, size, by_payload[at])) for at in self.at]
        finally:
            os.close(fd)

    def swap(self, a: int, b: int, *, with_tables: bool = False) -> None:
        self.write(self.at[a], self.pages[b])
        self.write(self.at[b], self.pages[a])
        if with_tables:
            tables = self.leaf_tables()
            self.write(tables[a][0], tables[b][1])
            self.write(tables[b][0], tables[a][1])


@pytest.fixture
def damaged(store: kvfs.Store) -> tuple[kvfs.Namespace, list[int], bytes, Damage]:
    ns = store.namespace("m", tiny(), revision="r1")
    tokens, pages = fill(ns, 1, 6)
    return ns, tokens, pages, Damage(store, pages)


@pytest.mark.parametrize("byte", [0, 511, TINY_BYTES - 1])
def test_a_page_with_a_flipped_byte_is_a_miss_and_stored_again(
    store: kvfs.Store, damaged: tuple[kvfs.Namespace, list[int], bytes, Damage], byte: int
) -> None:
    ns, tokens, pages, damage = damaged
    damage.flip(3, byte)
    with counted(store) as moved:
        with ns.match(tokens) as match:
            assert match.chunks == 6
            assert load(ns, match)["full"] == pages[: 3 * TINY_BYTES]
        assert moved("pages_corrupt") == 1 and moved("tokens_loaded") == 3 * T
    assert ns.match(tokens).chunks == 3, "a page found bad is not offered again"
    assert ns.put(tokens, pages) == (1, 5, 0, 0, "")
    assert restored(ns, tokens) == pages


def test_a_damaged_page_ends_the_views(damaged: tuple[kvfs.Namespace, list[int], bytes, Damage]) -> None:
    ns, tokens, pages, damage = damaged
    damage.flip(2, 7)
    with ns.match(tokens) as match:
        assert b"".join(ns.view(match)) == pages[: 2 * TINY_BYTES]


@pytest.mark.parametrize("tables", [False, True])
def test_two_swapped_records_are_two_misses(
    store: kvfs.Store, damaged: tuple[kvfs.Namespace, list[int], bytes, Damage], tables: bool
) -> None:
    """Each record is intact, with valid checksums: only the index says which page it is."""
    ns, tokens, pages, damage = damaged
    damage.swap(1, 4, with_tables=tables)
    with counted(store) as moved, ns.match(tokens) as match:
        assert load(ns, match)["full"] == pages[:TINY_BYTES]
        assert moved("pages_corrupt") == 2
    assert ns.put(tokens, pages) == (2, 4, 0, 0, "")
    assert restored(ns, tokens) == pages


@pytest.mark.parametrize("what", ["payload", "leaf table", "swapped"])
def test_damage_is_seen_by_a_reader_of_other_parts(
    store: kvfs.Store, damaged: tuple[kvfs.Namespace, list[int], bytes, Damage], what: str
) -> None:
    ns, tokens, _, damage = damaged
    part = Part(1, 1, 0, 2)  # the second head: copied out of whole pages
    group = ns.layout.groups[0]
    run = T * group.cell.nbytes
    expected = b"".join(page[run * (2 * x + 1) :][:run] for page in damage.pages for x in range(2))
    assert restored(ns, tokens, part=part) == expected
    if what == "payload":
        damage.flip(2, run)
    elif what == "leaf table":
        at, table = damage.leaf_tables()[2]
        damage.write(at, bytes([table[0] ^ 1]))
    else:
        damage.swap(2, 5, with_tables=True)
    with counted(store) as moved:
        assert restored(ns, tokens, part=part) == expected[: 2 * group.part_bytes(part)]
        assert moved("pages_corrupt") >= 1


def test_a_truncated_segment_serves_what_is_left(
    store: kvfs.Store, damaged: tuple[kvfs.Namespace, list[int], bytes, Damage]
) -> None:
    ns, tokens, pages, damage = damaged
    os.truncate(damage.file, damage.at[4] + 100)
    with counted(store) as moved:
        assert restored(ns, tokens) == pages[: 4 * TINY_BYTES]
        assert moved("read_errors") >= 1
    assert ns.match(tokens).chunks == 4
    with ns.match(tokens) as match:
        assert b"".join(ns.view(match)) == pages[: 4 * TINY_BYTES]


def test_damaged_states_shorten_to_a_length_that_is_whole(store: kvfs.Store) -> None:
    """The snapshot at the end is bad: without it the last chunks are of no use."""
    layout = hybrid()
    ns = store.namespace("hybrid", layout, revision="r1")
    tokens, pages = tokens_of(1, 4), hybrid_pages(layout, 4)
    ns.put(tokens, pages)
    state = layout.group("state").page_bytes
    damage = Damage(store, pages["state"], state)
    damage.flip(3, 5)
    with ns.match(tokens) as match:
        outs = {g.name: bytearray(g.nbytes) for g in match.groups}
        assert match.chunks == 4 and ns.get(match, outs) == 0
    with ns.match(tokens) as match:
        assert match.chunks == 3 and load(ns, match)["state"] == pages["state"][2 * state : 3 * state]


# ---------------------------------------------------------------- when bytes are checked


@pytest.mark.parametrize(("policy", "noticed"), [("always", True), ("first", False), ("off", False)])
def test_the_policy_says_when_bytes_are_checked(memory_path: Path, policy: str, noticed: bool) -> None:
    with kvfs.open(memory_path / "store", capacity="16MiB", verify=policy) as store:
        assert store.stats()["verify"] == policy
        ns = store.namespace("m", tiny(), revision="r1")
        tokens, pages = fill(ns, 1, 2)
        assert restored(ns, tokens) == pages
        damage = Damage(store, pages)
        damage.flip(1, 0)
        with counted(store) as moved:
            assert (len(restored(ns, tokens)) == TINY_BYTES) == noticed
            assert moved("pages_corrupt") == noticed


def test_the_first_touch_is_checked(memory_path: Path) -> None:
    with kvfs.open(memory_path / "store", capacity="16MiB", verify="first") as store:
        ns = store.namespace("m", tiny(), revision="r1")
        tokens, pages = fill(ns, 1, 2)
        Damage(store, pages).flip(1, 0)
        assert restored(ns, tokens) == pages[:TINY_BYTES]


# ---------------------------------------------------------------- many operations


def test_random_operations_equal_a_dict(memory_path: Path) -> None:
    """Prompts that fork, puts in pieces, damage, and reopening, against a model."""
    draw = random.Random(7)
    path = memory_path / "store"
    store = kvfs.open(path, capacity="32MiB")
    layout = tiny()
    prompts = [tokens_of(n, 70) for n in range(2)]
    page_of: dict[bytes, bytes] = {}
    try:
        ns = store.namespace("m", layout, revision="r1")
        for step in range(120):
            if draw.random() < 0.2:
                base = draw.choice(prompts)
                cut = draw.choice([1, 2, 5, 31, 32, 33, 40])
                prompts.append(base[: cut * T] + tokens_of(1000 + step, draw.randrange(1, 40)))
            tokens = draw.choice(prompts)
            chunks = len(tokens) // T
            hashes = ns.plan_save(tokens).hashes
            if draw.random() < 0.6:
                first = next((c for c in range(chunks) if hashes[c] not in page_of), chunks)
                end = draw.randrange(0, chunks + 1)
                for c in range(end):
                    page_of.setdefault(hashes[c], seeded(step * 1000 + c, layout.page_bytes))
                result = ns.put(tokens, b"".join(page_of[h] for h in hashes[:end]))
                assert result == (max(0, end - first), min(first, end), 0, 0, "")
            if draw.random() < 0.1:
                store.close()
                store = kvfs.open(path)
                ns = store.namespace("m", layout, revision="r1")
            stored = next((c for c in range(chunks) if hashes[c] not in page_of), chunks)
            with ns.match(tokens) as match:
                assert match.chunks == stored
                assert load(ns, match)["full"] == b"".join(page_of[h] for h in hashes[:stored])
    finally:
        store.close()


def test_a_namespace_keeps_its_pages_under_a_new_index(memory_path: Path) -> None:
    """The index is removed and rebuilt: everything is found again, forks included."""
    path = memory_path / "store"
    prompts = [tokens_of(1, 40)]
    prompts += [prompts[0][: cut * T] + tokens_of(cut, 9) for cut in (1, 3, 31, 32, 33)]
    prompts.append(prompts[2][: 5 * T] + tokens_of(77, 4))
    expected = []
    with kvfs.open(path, capacity="32MiB") as store:
        ns = store.namespace("m", tiny(), revision="r1")
        opaque = store.namespace("o", PageLayout.opaque(100, T), revision="r1")
        for n, tokens in enumerate(prompts):
            ns.put(tokens, seeded(n, len(tokens) // T * TINY_BYTES))
            expected.append(restored(ns, tokens))
            assert len(expected[-1]) == len(tokens) // T * TINY_BYTES
        opaque.put_keys([b"a", b"b", b"c"], seeded(1, 300))
    (path / "index" / "CURRENT").unlink()
    with kvfs.open(path) as store:
        assert store.wait_ready()
        ns = store.namespace("m", tiny(), revision="r1")
        assert [restored(ns, tokens) for tokens in prompts] == expected
        opaque = store.namespace("o", PageLayout.opaque(100, T), revision="r1")
        with opaque.match_keys([b"c", b"a"]) as match:
            assert load(opaque, match)["opaque"] == seeded(1, 300)[200:] + seeded(1, 300)[:100]


def test_identities_are_values() -> None:
    one = kvfs.Identity("m", tiny(), "r1", salt="s")
    assert one == kvfs.Identity("m", tiny(), "r1", salt="s") and replace(one, epoch=1) != one
    assert "salt" not in repr(one) and b'"s"' not in one.descriptor_bytes()


def test_arguments_of_another_kind_are_named(shared: kvfs.Store, ns: kvfs.Namespace) -> None:
    nothing: Any = None
    text: Any = "m"
    with pytest.raises(ConfigError, match="match is NoneType: pass what match"):
        ns.get(nothing, bytearray(1))
    with pytest.raises(ConfigError, match="device_kvs has None: pass"):
        ns.attach(nothing)
    with pytest.raises(ConfigError, match="namespace is 'm': pass what"):
        shared.pin("a", text, tokens_of(1, 1))
    assert shared.pins() == []
    with pytest.raises(ConfigError, match="sample is 'm': pass a share"):
        shared.verify(text)
