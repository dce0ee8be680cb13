"""What the vLLM connector adds to ranks, without vLLM: blocks that are reused, lookups, plans, copies."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="ranks need the GPU transport")

import kvfs
from kvfs.integrations.vllm import peers
from kvfs.integrations.vllm.peers import PeerCopies, PeerLookups, PeerPlace, Reused, ReusedBlocks, join, place_of
from kvfs.ranks import RankTables
from kvfs.types import Tier
from tests.ranks.simulated import LAYOUT, NOW, PAGE, SECONDS, Rank, closing, prompt, wait_until

UNITS = [2 * i + 1 for i in range(12)]
OTHERS = [30 - i for i in range(12)]


def parallel(**changes: Any) -> Any:
    told = {
        "data_parallel_size_local": 1, "data_parallel_index": 0, "data_parallel_master_ip": "127.0.0.1",
        "data_parallel_master_port": 29501, "rank": 0, "world_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**{**told, **changes})


def step(**changes: Any) -> Any:
    """What vLLM's scheduler has planned: ``grown``, the new blocks of running requests by their ids."""
    grown = changes.pop("grown", {})
    cached = SimpleNamespace(
        req_ids=list(grown), new_block_ids=list(grown.values()), resumed_req_ids=changes.pop("resumed", set())
    )
    nothing = {"new_block_ids_to_zero": None, "kv_cache_block_copies": None}
    return SimpleNamespace(scheduled_cached_reqs=cached, **{**nothing, **changes})


def request(name: str, computed: int) -> Any:
    return SimpleNamespace(request_id=name, num_computed_tokens=computed)


class TestReusedBlocks:
    """Every block that a step writes to, and none that it only reads."""

    def test_a_new_request_fills_what_is_behind_the_hit_of_the_engines_own_cache(self) -> None:
        reused = ReusedBlocks()
        reused.asked("a", 32)
        reused.admitted(request("a", 96), ([7, 8, 9, 10, 11, 12, 13],))  # of which 64 tokens come from a load
        assert reused.take(step(), {0: 16}) == Reused((9, 10, 11, 12, 13))
        assert reused.take(step(), {0: 16}) is None

    def test_a_hit_that_the_engine_drops_after_it_has_asked_does_not_count(self) -> None:
        reused = ReusedBlocks()
        reused.asked("a", 32)
        reused.admitted(request("a", 0), ([7, 8, 9],))
        assert reused.take(step(), {0: 16}) == Reused((7, 8, 9))

    def test_a_request_whose_load_has_ended_goes_on_behind_it(self) -> None:
        reused = ReusedBlocks()
        reused.admitted(request("a", 32), ([7, 8, 9],))
        assert reused.take(step(), {0: 16}) == Reused((9,))

    def test_running_requests_fill_their_new_blocks(self) -> None:
        taken = ReusedBlocks().take(step(grown={"a": ([4, 5],), "b": None, "c": ([6], [8])}), {0: 16, 1: 16})
        assert taken is not None and set(taken.blocks) == {4, 5, 6, 8}

    def test_a_resumed_request_does_not_lose_what_the_prefix_cache_kept(self) -> None:
        """vLLM lists all of its blocks as new ones."""
        reused = ReusedBlocks()
        reused.asked("a", 16)
        reused.admitted(request("a", 16), ([4, 5],))
        assert reused.take(step(grown={"a": ([4, 5],)}, resumed={"a"}), {0: 16}) == Reused((5,))

    def test_groups_count_in_blocks_of_their_own_and_unknown_ones_in_full(self) -> None:
        reused = ReusedBlocks()
        reused.asked("a", 64)
        reused.admitted(request("a", 64), ([1, 2, 3], [4, 5, 6, 7, 8], [9]))
        taken = reused.take(step(), {0: 32, 1: 16})
        assert taken is not None and set(taken.blocks) == {3, 8, 9}

    def test_blocks_that_are_zeroed_or_copied_to_count(self) -> None:
        copy = SimpleNamespace(src_block_id=1, dst_block_id=2)
        taken = ReusedBlocks().take(step(new_block_ids_to_zero=[3], kv_cache_block_copies=[copy]), {})
        assert taken is not None and set(taken.blocks) == {2, 3}

    def test_a_reset_takes_everything_back_once(self) -> None:
        reused = ReusedBlocks()
        reused.forget_all()
        assert reused.take(step(), {}) == Reused((), True)
        assert reused.take(step(), {}) is None

    def test_what_was_asked_in_an_earlier_step_is_forgotten(self) -> None:
        reused = ReusedBlocks()
        reused.asked("a", 32)
        reused.take(step(), {})
        reused.admitted(request("a", 0), ([7, 8],))
        assert reused.take(step(), {0: 16}) == Reused((7, 8))


def test_ranks_of_one_engine_meet_and_others_do_not() -> None:
    one, two = (place_of(parallel(data_parallel_index=n), {}) for n in (0, 1))
    assert (one.name, one.ranks) == (two.name, two.ranks) and (one.rank, two.rank) == (0, 1)
    assert place_of(parallel(data_parallel_master_port=29502), {}).name != one.name
    assert place_of(parallel(rank=1, world_size=2), {}).name != one.name
    assert place_of(parallel(rank=1, world_size=2), {}).worker == 1
    assert place_of(parallel(world_size=8), {}).ranks == 2
    assert place_of(parallel(data_parallel_size_local=24), {}).ranks == 24
    assert place_of(parallel(data_parallel_index=17, data_parallel_size_local=8), {}).rank == 1  # of the second host
    assert pickle.loads(pickle.dumps(one)) == one


def copies(rank: Rank) -> PeerCopies:
    place = PeerPlace(0, "", rank.rank, 2, rank.io.parts)
    return PeerCopies(rank.group, place, {"full": rank.units}, {"full": 1})


@pytest.fixture
def ranks(store: kvfs.Store, memory_path: Path) -> Iterator[tuple[Rank, Rank, PeerLookups]]:
    """A source, a reader, and the lookups of the reader's scheduler."""
    ns = store.namespace("model", LAYOUT, "1")
    source, reader = Rank(ns, 0, 2, memory_path, seed=1), Rank(ns, 1, 2, memory_path)
    with closing(source, reader), pytest.MonkeyPatch.context() as patch:
        assert reader.group.wait_for_peers(1, SECONDS)
        tables = RankTables
        patch.setattr(peers, "RankTables", lambda *a, **k: tables(*a, **k, directory=str(memory_path)))
        lookups = PeerLookups(ns.identity.digest, LAYOUT, [PeerPlace(0, "", 1, 2, reader.io.parts)])
        yield source, reader, lookups
        lookups.close()


def publish(rank: Rank, chunks: int) -> None:
    before = rank.counters().get("pages_published", 0)
    hashes = list(rank.ns.prompt(prompt(chunks)).hashes)
    copies(rank).publish(hashes, {"full": UNITS[: 2 * chunks]}, 0, NOW)
    wait_until(lambda: rank.counters().get("pages_published", 0) == before + chunks)


def test_a_lookup_finds_what_another_rank_holds_and_the_plan_loads_it(
    ranks: tuple[Rank, Rank, PeerLookups],
) -> None:
    source, reader, lookups = ranks
    publish(source, 6)
    pages = reader.pages(prompt(6))
    assert lookups.held(pages) == {"full": 0b111111} and not pages.stored["full"]
    plans = pickle.loads(pickle.dumps(lookups.plans(pages, 2, 5)))
    assert (plans[0].chunks, plans[0].sources("full")) == (5, [0, 0, 0])
    result = copies(reader).load(plans[0], {"full": [-1] * 4 + OTHERS[4:10]}, NOW, SECONDS, None).wait(SECONDS)
    assert result is not None and result.tokens == 5 * PAGE
    assert result.tiers == {Tier.DEVICE: 2 * PAGE, Tier.PEER: 3 * PAGE}
    assert reader.bytes(OTHERS[4:10]) == source.bytes(UNITS[4:10])
    assert reader.counters()["tokens_loaded_peer"] == 3 * PAGE == reader.counters()["tokens_loaded"]


def test_the_own_gpu_is_no_source(ranks: tuple[Rank, Rank, PeerLookups]) -> None:
    """The engine's own prefix cache has it, or is about to reuse the blocks."""
    _, reader, lookups = ranks
    publish(reader, 3)
    pages = reader.pages(prompt(3))
    assert lookups.held(pages) == {"full": 0}
    assert reader.group.longest(pages).sources("full") == [1, 1, 1]


def test_a_prompt_that_the_store_has_alone_needs_no_plan(ranks: tuple[Rank, Rank, PeerLookups]) -> None:
    source, reader, lookups = ranks
    saved = source.io.save(source.ns.plan_save(prompt(4)), UNITS[:8], NOW).wait(SECONDS)
    assert saved is not None and saved.pages == 4
    assert lookups.plans(reader.pages(prompt(4)), 0, 4) == {}


def test_blocks_that_a_step_writes_to_are_taken_back_before(ranks: tuple[Rank, Rank, PeerLookups]) -> None:
    source, reader, lookups = ranks
    publish(source, 6)
    pages = reader.pages(prompt(6))
    plans = lookups.plans(pages, 0, 6)
    copies(source).retract(Reused((UNITS[6], UNITS[7])))  # page 3
    source.memory[:, UNITS[6:8]] = 0x77  # by the engine
    assert lookups.held(pages) == {"full": 0b110111}
    assert lookups.plans(pages, 0, 6)[0].tokens == 3 * PAGE, "shorter than was looked up"
    result = copies(reader).load(plans[0], {"full": OTHERS}, NOW, SECONDS, None).wait(SECONDS)
    assert result is not None and result.tokens == 3 * PAGE
    assert reader.bytes(OTHERS[:6]) == source.bytes(UNITS[:6])
    assert reader.bytes(OTHERS[6:8]) != source.bytes(UNITS[6:8])
    copies(source).retract(Reused((10_000,)))  # of a group that this worker does not have
    copies(source).retract(Reused((), everything=True))
    assert lookups.held(pages) == {"full": 0}


def test_blocks_of_several_units_are_taken_back_whole(ranks: tuple[Rank, Rank, PeerLookups]) -> None:
    source, reader, lookups = ranks
    publish(source, 2)  # units 1, 3, 5, 7
    half = PeerCopies(source.group, copies(source).place, {"full": source.units}, {"full": 2})
    half.retract(Reused((3,)))  # units 6 and 7
    assert lookups.held(reader.pages(prompt(2))) == {"full": 0b01}


def test_an_engine_that_cannot_be_a_rank_goes_on_without(
    ranks: tuple[Rank, Rank, PeerLookups], caplog: pytest.LogCaptureFixture
) -> None:
    assert join(SimpleNamespace(parts={}), parallel(), {}, {}) is None
    assert "dp_pulls is off" in caplog.text
