"""Loading from the disk against computing: rates are those of whole prompts, and a load takes only what gains time."""

from __future__ import annotations

import random

import pytest

from kvfs.integrations.vllm.costs import LOAD_SECONDS, RATES, READ_BYTES_MIN, Costs

PAGE_TOKENS, PAGE_BYTES = 64, 8 << 20


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def known(tokens_per_second: float, bytes_per_second: float) -> Costs:
    clock = Clock()
    costs = Costs(clock=clock)
    costs.note_step(8192)
    clock.now += 8192 / tokens_per_second
    costs.note_idle()
    costs.note_read(READ_BYTES_MIN, READ_BYTES_MIN / bytes_per_second)
    return costs


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_rate_of_a_prompt_is_that_of_its_steps(ahead: int) -> None:
    """``ahead``: how many steps the engine schedules before the first has ended."""
    clock = Clock()
    costs = Costs(clock=clock)
    ends: list[float] = []
    for n, (tokens, seconds) in enumerate([(8192, 0.2), (8192, 0.3), (8192, 0.4), (16, 0.006), (1, 0.006), (1, 0.006)]):
        if n > ahead:
            clock.now = ends[n - 1 - ahead]
        costs.note_step(tokens)
        ends.append(max(clock.now, ends[-1] if ends else 0.0) + seconds)
    assert costs.tokens_per_second == pytest.approx(3 * 8192 / 0.9, rel=0.02)


def test_an_answer_of_one_token_ends_a_measurement() -> None:
    clock = Clock()
    costs = Costs(clock=clock)
    costs.note_step(4096)
    clock.now += 0.25
    costs.note_idle()
    clock.now += 1000.0  # nothing runs
    costs.note_step(1)
    assert costs.tokens_per_second == pytest.approx(4096 / 0.25)


def test_a_wait_of_all_requests_is_no_computing() -> None:
    clock = Clock()
    costs = Costs(clock=clock)
    costs.note_step(8192)
    clock.now += 0.5
    costs.note_step(0)
    costs.note_wait()
    clock.now += 3.0
    costs.note_step(1)
    costs.note_step(1)
    assert costs.tokens_per_second is None


def test_steps_without_tokens_and_short_prompts_say_nothing() -> None:
    clock = Clock()
    costs = Costs(clock=clock)
    costs.note_step(1500)
    costs.note_step(0)  # waits for a load: returns at once
    costs.note_step(0)
    clock.now += 1.0
    costs.note_idle()
    assert costs.tokens_per_second is None


def test_an_engine_that_never_rests_is_measured() -> None:
    clock = Clock()
    costs = Costs(clock=clock)
    for _ in range(100):
        costs.note_step(8192)
        clock.now += 0.5
    assert costs.tokens_per_second == pytest.approx(8192 / 0.5)


def test_few_bytes_say_nothing_about_the_disk_and_old_measurements_are_forgotten() -> None:
    costs = Costs()
    costs.note_read(READ_BYTES_MIN - 1, 1.0)
    assert costs.bytes_per_second is None
    for seconds in [1.0] + [0.01] * RATES:
        costs.note_read(READ_BYTES_MIN, seconds)
    assert costs.bytes_per_second == pytest.approx(READ_BYTES_MIN / 0.01)


def test_what_is_not_known_keeps_no_page_from_being_loaded() -> None:
    everything = (1 << 512) - 1
    assert Costs().best_end(0, 512, everything, PAGE_TOKENS, PAGE_BYTES) == 512
    costs = Costs()
    costs.note_read(READ_BYTES_MIN, 10.0)
    assert costs.best_end(0, 512, everything, PAGE_TOKENS, PAGE_BYTES) == 512


@pytest.mark.parametrize(
    ("bytes_per_second", "cold", "end"),
    [
        (1.5e9, (1 << 512) - 1, 0),  # an H200 computes 32k tokens in 1.2 s, this disk reads them in 2.9 s
        (6.0e9, (1 << 512) - 1, 512),  # in 0.7 s
        (1.5e9, 0, 512),  # all of it is in the page cache
        (1.5e9, (1 << 7) - 1, 512),  # a few pages are not
        (1.5e9, ((1 << 512) - 1) & ~((1 << 100) - 1), 100),  # its end is not
        (1.5e9, (1 << 100) - 1, 512),  # its begin is not: the rest makes up for it
        (1.5e9, (1 << 400) - 1, 0),  # or it does not
        (1.5e9, ((1 << 512) - 1) & ~0b111, 0),  # three pages are not worth a load
    ],
)
def test_a_load_ends_where_it_gains_most(bytes_per_second: float, cold: int, end: int) -> None:
    costs = known(27_000, bytes_per_second)
    assert costs.best_end(0, 512, cold, PAGE_TOKENS, PAGE_BYTES) == end


def test_no_other_end_is_faster() -> None:
    rng = random.Random(7)
    costs = known(27_000, 1.5e9)
    for _ in range(50):
        first, end = sorted(rng.sample(range(65), 2))
        shares = [rng.random() for _ in range(4)]
        cold = sum(1 << page for page in range(64) if rng.random() < shares[page // 16])
        got = costs.best_end(first, end, cold, PAGE_TOKENS, PAGE_BYTES)
        if (cold >> first).bit_count() * PAGE_BYTES < READ_BYTES_MIN:
            assert got == end
            continue

        def seconds(stop: int, cold: int = cold, first: int = first, end: int = end) -> float:
            read = sum(cold >> page & 1 for page in range(first, stop)) * PAGE_BYTES / 1.5e9
            return read + (end - stop) * PAGE_TOKENS / 27_000

        fastest = min(map(seconds, range(first, end + 1)))
        if seconds(first) - fastest > LOAD_SECONDS:
            assert seconds(got) == pytest.approx(fastest)
        else:
            assert got == first
