"""Pages written at one degree of tensor and pipeline parallelism are read at any other, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvfs
from kvfs import Cell, Group, Need, PageLayout, Part
from kvfs.lookup.part_cover import useful_parts
from tests.stores import counted, restored, seeded, tokens_of

T, LAYERS, CHUNKS = 16, 4, 3
SECONDS = 60.0  # of waits that end at once unless something is wrong
TP, PP, HEADS = (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvfs.Store]:
    with kvfs.open(tmp_path_factory.mktemp("parts") / "store", capacity="64MiB") as made:
        yield made


def layout_of(heads: int, granules: int = 1) -> PageLayout:
    """Cells of 4 bytes."""
    pages = T * granules
    return PageLayout.of([Group("full", tuple(range(LAYERS)), heads, Cell("u32", 4), Need.all(), pages)], pages)


def ranks_of(heads: int, tp: int, pp: int) -> dict[Part, list[int]]:
    """What each rank holds: rectangle -> the ranks that hold it (more than one where heads are replicated)."""
    ranks: dict[Part, list[int]] = {}
    share, layers = max(1, heads // tp), LAYERS // pp
    for stage in range(pp):
        for rank in range(tp):
            part = Part(rank * heads // tp, share, stage * layers, layers)
            ranks.setdefault(part, []).append(stage * tp + rank)
    return ranks


def cut(pages: bytes, group: Group, part: Part) -> bytes:
    """The part of each page, from the definition of the order: granule, layer, head, token, cell."""
    cell, tokens = group.cell.nbytes, group.granule_states
    step = tokens * cell
    out = []
    for at in range(0, len(pages), group.page_bytes):
        for granule in range(group.granules):
            for layer in range(part.layer, part.layer + part.layers):
                for head in range(part.head, part.head + part.heads):
                    row = (granule * len(group.layers) + layer) * group.heads + head
                    out.append(pages[at + row * step :][:step])
    return b"".join(out)


def write(ns: kvfs.Namespace, tokens: list[int], pages: bytes, ranks: dict[Part, list[int]]) -> int:
    """Every rank stores what it holds; of ranks with the same heads, the page number elects the writer."""
    group, stored = ns.layout.groups[0], 0
    for part, replicas in ranks.items():
        mine = cut(pages, group, part)
        size = group.part_bytes(part)
        for chunk in range(CHUNKS):
            writer = replicas[chunk % len(replicas)]
            for rank in replicas:
                if rank == writer:
                    put = ns.put(tokens, mine[chunk * size :][:size], start=chunk, part=part)
                    assert put.declined == 0, put
                    stored += put.stored
    return stored


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("granules", [1, 2])
def test_every_degree_reads_what_any_other_wrote(store: kvfs.Store, heads: int, granules: int) -> None:
    layout = layout_of(heads, granules)
    group = layout.groups[0]
    pages = seeded(heads, CHUNKS * layout.page_bytes)
    tokens = tokens_of(heads, CHUNKS, layout.page_tokens)
    degrees = [(tp, pp) for tp in TP for pp in PP]
    for tp, pp in degrees:
        ns = store.namespace(f"tp{tp} pp{pp}", layout, revision="r1")
        ranks = ranks_of(heads, tp, pp)
        assert write(ns, tokens, pages, ranks) == CHUNKS * len(ranks)
        for want in {part for degree in degrees for part in ranks_of(heads, *degree)}:
            assert restored(ns, tokens, part=want) == cut(pages, group, want), f"written {tp}x{pp}, wanted {want}"


def test_replicated_heads_are_stored_once(store: kvfs.Store) -> None:
    """Eight ranks, two heads: four ranks hold each head, one of them writes."""
    layout = layout_of(2)
    ns = store.namespace("replicas", layout, revision="r1")
    pages, tokens = seeded(1, CHUNKS * layout.page_bytes), tokens_of(1, CHUNKS)
    with counted(store) as moved:
        write(ns, tokens, pages, ranks_of(2, 8, 1))
        assert moved("bytes_written") == len(pages)
    for part, replicas in ranks_of(2, 8, 1).items():
        assert len(replicas) == 4
        assert ns.put(tokens, cut(pages, layout.groups[0], part), part=part) == (0, CHUNKS, 0, 0, "")


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_latents_that_all_tp_ranks_hold_are_written_once_and_read_at_any_degree(
    store: kvfs.Store, readers: int
) -> None:
    """MLA: two pipeline ranks of two layers each, and of each two tensor ranks with the same latents."""
    layout = PageLayout.mla(layers=4, kv_lora_rank=32, rope_dim=16, dtype="bfloat16", page_tokens=16)
    group, tokens = layout.groups[0], tokens_of(3, CHUNKS)
    ns = store.namespace(f"latents {readers}", layout, revision="r1")
    source = np.random.default_rng(3).integers(0, 65536, (4, CHUNKS, 16, 48), dtype="uint16")

    def attached(memory: np.ndarray[Any, Any], first: int, replica: tuple[int, int]) -> kvfs.DeviceKV:
        layers = list(range(first, first + len(memory)))
        return kvfs.describe(group, memory, "layer,block,token,dim", layers=layers, replica=replica)

    with counted(store) as moved:
        plans = {pp: ns.plan_save(tokens, part=Part(0, 1, 2 * pp, 2)) for pp in range(2)}
        for pp, tp in product(range(2), range(2)):
            with ns.attach(attached(source[2 * pp : 2 * pp + 2], 2 * pp, (tp, 2))) as io:
                result = io.save(plans[pp], range(CHUNKS)).wait(SECONDS)
                assert result is not None and result.pages == [2, 1][tp] and not result.declined
        assert moved("bytes_written") == CHUNKS * layout.page_bytes
    each = 4 // readers
    for first in range(0, 4, each):
        memory = np.zeros((each, CHUNKS, 16, 48), dtype="uint16")
        with ns.attach(attached(memory, first, (0, 1))) as io, ns.match(tokens, part=io.parts) as match:
            result = io.load(match, range(CHUNKS)).wait(SECONDS)
        assert result is not None and result.tokens == len(tokens)
        assert (memory == source[first : first + each]).all()


def test_whole_pages_are_not_stored_again_as_parts(store: kvfs.Store) -> None:
    layout = layout_of(4)
    ns = store.namespace("whole first", layout, revision="r1")
    pages, tokens = seeded(1, CHUNKS * layout.page_bytes), tokens_of(1, CHUNKS)
    assert ns.put(tokens, pages).stored == CHUNKS
    with counted(store) as moved:
        assert write(ns, tokens, pages, ranks_of(4, 2, 2)) == 0
        assert moved("bytes_written") == 0


@pytest.mark.parametrize("dead", range(4))
def test_a_page_that_one_rank_did_not_write_is_a_miss(store: kvfs.Store, dead: int) -> None:
    layout = layout_of(4)
    group = layout.groups[0]
    ns = store.namespace(f"rank {dead} died", layout, revision="r1")
    pages, tokens = seeded(1, CHUNKS * layout.page_bytes), tokens_of(1, CHUNKS)
    ranks = ranks_of(4, 4, 1)
    for rank, part in enumerate(ranks):
        mine = cut(pages, group, part)
        if rank == dead:  # died after the first page
            mine = mine[: group.part_bytes(part)]
        ns.put(tokens, mine, part=part)
    assert restored(ns, tokens) == pages[: layout.page_bytes]
    for rank, part in enumerate(ranks):  # readers of other heads get all pages
        count = 1 if rank == dead else CHUNKS
        assert ns.match(tokens, part=part).chunks == count
        assert restored(ns, tokens, part=part) == cut(pages[: count * layout.page_bytes], group, part)


def test_a_second_attempt_completes_what_a_dead_rank_left(store: kvfs.Store) -> None:
    layout = layout_of(2)
    group = layout.groups[0]
    ns = store.namespace("attempts", layout, revision="r1")
    pages, tokens = seeded(1, CHUNKS * layout.page_bytes), tokens_of(1, CHUNKS)
    first, second = ranks_of(2, 2, 1)
    assert ns.put(tokens, cut(pages, group, first), part=first, attempt=b"attempt1").stored == CHUNKS
    assert ns.match(tokens).tokens == 0
    assert ns.put(tokens, cut(pages, group, first), part=first, attempt=b"attempt2").skipped == CHUNKS
    assert ns.put(tokens, cut(pages, group, second), part=second, attempt=b"attempt2").stored == CHUNKS
    assert restored(ns, tokens) == pages


def test_overlapping_parts_of_two_degrees_make_a_page(store: kvfs.Store) -> None:
    """A rank of TP 2 and three of TP 4: together they hold everything, partly twice."""
    layout = layout_of(4)
    group = layout.groups[0]
    ns = store.namespace("overlap", layout, revision="r1")
    pages, tokens = seeded(1, CHUNKS * layout.page_bytes), tokens_of(1, CHUNKS)
    for part in (Part(0, 2, 0, 4), Part(1, 1, 0, 4), Part(2, 1, 0, 4)):
        ns.put(tokens, cut(pages, group, part), part=part)
        assert ns.match(tokens).tokens == 0
    last = Part(3, 1, 0, 4)
    assert ns.put(tokens, cut(pages, group, last), part=last).stored == CHUNKS
    assert restored(ns, tokens) == pages
    assert restored(ns, tokens, part=Part(1, 2, 1, 2)) == cut(pages, group, Part(1, 2, 1, 2))


def test_parts_survive_a_new_index(memory_path: Path) -> None:
    layout = layout_of(4, granules=2)
    group = layout.groups[0]
    pages, tokens = seeded(1, CHUNKS * layout.page_bytes), tokens_of(1, CHUNKS, layout.page_tokens)
    with kvfs.open(memory_path / "store", capacity="16MiB") as store:
        ns = store.namespace("m", layout, revision="r1")
        write(ns, tokens, pages, ranks_of(4, 4, 2))
    (memory_path / "store" / "index" / "CURRENT").unlink()
    with kvfs.open(memory_path / "store") as store:
        assert store.wait_ready()
        ns = store.namespace("m", layout, revision="r1")
        assert restored(ns, tokens) == pages
        want = Part(2, 2, 1, 3)
        assert restored(ns, tokens, part=want) == cut(pages, group, want)


def test_parts_that_appear_later_are_found_by_a_reader_that_looked_before(store: kvfs.Store) -> None:
    """The parts of a namespace are remembered between lookups, until the next commit."""
    layout = layout_of(2)
    group, pages, tokens = layout.groups[0], seeded(7, CHUNKS * layout.page_bytes), tokens_of(7, CHUNKS)
    reader, writer = (store.namespace("parts that appear", layout, revision="r1") for _ in range(2))
    for part in (Part(0, 1, 0, LAYERS), Part(1, 1, 0, LAYERS)):
        assert restored(reader, tokens) == b""
        assert writer.put(tokens, cut(pages, group, part), part=part).stored == CHUNKS
    assert restored(reader, tokens) == pages


def test_the_parts_that_help_come_the_most_useful_first() -> None:
    """The wanted part itself, then what contains it, then the smaller ones; equal ones in a fixed order."""
    want = Part(1, 1, 0, 4)
    whole, wide, left, right, other = (
        Part(0, 4, 0, 4),
        Part(0, 2, 0, 4),
        Part(1, 1, 0, 2),
        Part(1, 1, 2, 2),
        Part(3, 1, 0, 4),
    )
    for known in ((whole, other, right, want, left, wide), (left, wide, want, other, whole, right)):
        found = useful_parts(want, known)
        assert found.parts == (want, wide, whole, left, right) and found.first_is_enough
        assert found.packed == tuple(part.pack() for part in found.parts)
    assert useful_parts(want, (right, left)).parts == (left, right) and not useful_parts(want, (left,)).first_is_enough
    assert useful_parts(want, (right, left)).cells == ((0,), (1,)) and useful_parts(want, (other,)).parts == ()
