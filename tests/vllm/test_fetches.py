"""Requests that wait for the bucket: as long as that beats computing, with the tokens of an engine that computes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs.directory import config_file
from kvfs.integrations.vllm.costs import Costs
from kvfs.integrations.vllm.fetches import ASK_SHARE, LIMIT_SECONDS, OBSERVED_SHARE, RATE_SECONDS, Fetches
from kvfs.integrations.vllm.requests import Waiting
from kvfs.remote.bucket_process import Fetch
from kvfs.remote.upkeep import verify
from kvfs.system.files import Files
from tests.vllm.engine import Engine

Models = Callable[[str], Path]
Prompt = Callable[..., list[int]]
PAGE_TOKENS, PAGE_BYTES, CHUNKS = 64, 8 << 20, 512
SPEED = 32_768.0  # tokens per second: the prompt is computed in a second


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("kvfs.remote.bucket_process.time.monotonic", clock)
    return clock


def fetches(clock: Clock, speed: float | None = SPEED, seconds: float | None = None) -> Fetches:
    costs = Costs(clock=clock)
    if speed is not None:
        costs.note_speed(speed)
    remote = SimpleNamespace(url="s3://bucket/x", read_through="on")
    store: Any = SimpleNamespace(settings=SimpleNamespace(remote=remote), start_bucket_process=lambda: None)
    return Fetches(store, costs, seconds, clock)


def waiting(first: int = 0) -> Waiting:
    return Waiting(Fetch(1, first, lambda number: None), CHUNKS)


def goes_on(of: Fetches, one: Waiting, computed: int = 0) -> bool:
    return of.goes_on(one, computed, PAGE_TOKENS, PAGE_BYTES)


def test_a_bucket_without_an_answer_is_waited_for_a_small_part_of_the_time_to_compute(clock: Clock) -> None:
    of, one = fetches(clock), waiting()
    assert goes_on(of, one)
    clock.now += ASK_SHARE * 0.9
    assert goes_on(of, one)
    clock.now += ASK_SHARE * 0.2
    assert not goes_on(of, one)


def test_the_time_in_the_queue_is_no_wait(clock: Clock) -> None:
    of, one = fetches(clock), waiting()
    clock.now += 10.0
    assert goes_on(of, one)
    clock.now += ASK_SHARE / 2
    assert goes_on(of, one)
    assert of.end(one) == pytest.approx(ASK_SHARE / 2)


def test_a_prompt_that_the_bucket_lacks_is_computed(clock: Clock) -> None:
    of, one = fetches(clock), waiting(first=8)
    one.fetch.reach = 8
    assert not goes_on(of, one)


def test_a_pull_that_is_faster_than_computing_is_waited_for_to_its_end(clock: Clock) -> None:
    of, one = fetches(clock), waiting()
    one.fetch.reach, one.fetch.answered = CHUNKS, clock.now
    for tenth in range(1, 10):
        clock.now += 0.07
        one.fetch.share = tenth / 10
        assert goes_on(of, one)
    one.fetch.end()
    assert not goes_on(of, one)


def test_a_pull_that_is_slower_than_computing_is_given_up_soon(clock: Clock) -> None:
    of, one = fetches(clock), waiting()
    one.fetch.reach, one.fetch.answered = CHUNKS, clock.now
    assert goes_on(of, one)
    clock.now += OBSERVED_SHARE * 0.9
    assert goes_on(of, one)
    clock.now += OBSERVED_SHARE * 0.2
    one.fetch.share = OBSERVED_SHARE
    assert not goes_on(of, one)


def test_a_part_of_a_prompt_is_waited_for_as_long_as_that_part_takes_to_compute(clock: Clock) -> None:
    of, one = fetches(clock), waiting()
    one.fetch.reach, one.fetch.share = CHUNKS // 4, 1.0
    assert goes_on(of, one)
    clock.now += 0.24
    assert goes_on(of, one)
    clock.now += 0.02
    assert not goes_on(of, one)


def test_what_the_engine_has_itself_is_not_waited_for(clock: Clock) -> None:
    of, one = fetches(clock), waiting()
    one.fetch.reach = CHUNKS // 2
    assert goes_on(of, one)
    assert not goes_on(of, one, computed=CHUNKS // 2 * PAGE_TOKENS)
    assert not goes_on(of, one, computed=CHUNKS * PAGE_TOKENS - 64)


def test_a_bucket_that_was_slow_a_moment_ago_is_not_waited_for(clock: Clock) -> None:
    of, one, other = fetches(clock), waiting(), waiting()
    one.fetch.nbytes, one.fetch.answered = 64 << 20, clock.now
    clock.now += 1.0
    one.fetch.end()
    clock.now += 30.0  # in the engine's queue
    assert of.end(one) == 0.0
    other.fetch.reach = CHUNKS  # 4 GiB, in a minute
    assert not goes_on(of, other)
    clock.now += RATE_SECONDS
    assert goes_on(of, waiting())


def test_an_engine_that_does_not_know_its_speed_waits_a_second_at_most(clock: Clock) -> None:
    of, one = fetches(clock, speed=None), waiting()
    assert goes_on(of, one)
    one.fetch.reach = CHUNKS
    clock.now += LIMIT_SECONDS * 0.9
    assert goes_on(of, one)
    clock.now += LIMIT_SECONDS * 0.2
    assert not goes_on(of, one)


def test_a_wait_that_was_set_is_kept(clock: Clock) -> None:
    of, one = fetches(clock, seconds=5.0), waiting()
    assert goes_on(of, one)
    clock.now += 4.9
    assert goes_on(of, one)
    clock.now += 0.2
    assert not goes_on(of, one)
    assert not fetches(clock, seconds=0.0).in_use


# -- the real engine ---------------------------------------------------------------------------


def shared(store: Path, bucket: Path, upload: str = "off") -> Path:
    kvfs.open(store, capacity="256MiB").close()
    for key, value in (("url", f"file://{bucket}"), ("upload", upload)):
        config_file.change(str(store), f"remote.{key}", value, Files())
    return store


def wait_for_pages(store: Path, pages: int) -> None:
    """Until the bucket of a store holds so many pages."""
    end = time.monotonic() + 100
    with kvfs.open(store) as opened, opened.bucket() as bucket:
        while verify(bucket, repair=False, requests=2).pages < pages:
            assert time.monotonic() < end, "they were not uploaded"
            time.sleep(0.2)


def test_a_second_host_answers_from_the_bucket(model: Models, prompt: Prompt, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    here, there = shared(tmp_path / "here", bucket, upload="all"), shared(tmp_path / "there", bucket)
    with Engine(model("llama"), here) as one:
        expected = one.generate(prompt(1, 1500), prompt(2, 1500))
        wait_for_pages(here, 2 * 23)
    with Engine(model("llama"), there, extra={"bucket_seconds": 100}) as two:
        assert two.generate(prompt(1, 1500), prompt(2, 1500)) == [(1472, tokens) for _, tokens in expected]
        counted = two.metrics()
        assert counted["kvfs_fetches"] == 2 and counted["kvfs_pages_fetched"] == 2 * 23
        assert counted["external_prefix_cache_hits"] == 2 * 1472
        fresh = two.generate(prompt(3, 1500))
        assert fresh[0][0] == 0, "the bucket lacks it"
    with Engine(model("llama"), there) as two:  # what was pulled is of this host now
        shutil.rmtree(bucket)
        assert two.generate(prompt(1, 1500)) == [(1472, expected[0][1])]


def test_a_bucket_that_is_away_costs_a_request_nothing_but_a_short_wait(
    model: Models, prompt: Prompt, tmp_path: Path
) -> None:
    (tmp_path / "bucket").write_text("no directory")
    with Engine(model("llama"), shared(tmp_path / "store", tmp_path / "bucket")) as engine:
        first = engine.generate(prompt(1, 1500))
        assert engine.generate(prompt(1, 1500)) == [(1472, first[0][1])]
        assert engine.metrics().get("kvfs_fetches", 0) == 0
