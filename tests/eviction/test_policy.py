"""The eviction policy: which segment goes, which records stay."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from kvfs.eviction.policy import BUDGET_SEGMENTS, WRITE_BUDGET, EvictionPlan, Policy, WriteBudget
from kvfs.eviction.usage import Summary, group

SECOND = 1_000_000
NOW = 10_000 * SECOND


def use(
    number: int,
    ages: Sequence[int | None],
    chunks: Sequence[int] | None = None,
    *,
    lived: int = 0,
    evictable: bool = True,
    held: bool = False,
) -> Summary:
    """A segment of 100-byte records, used ``ages`` seconds ago (None is dead), ``lived`` seconds after the writing."""
    count = len(ages)
    fragments = group(
        [0 if age is None else NOW - age * SECOND for age in ages],
        [100] * count,
        list(range(count)) if chunks is None else chunks,
        [lived * SECOND] * count,
    )
    return Summary(number, 100 * count, evictable, held, fragments)


def choose(segments: Iterable[Summary], now_us: int, budget_bytes: int) -> EvictionPlan | None:
    """A single choice, with nothing kept."""
    return Policy().choose(segments, now_us, budget_bytes)


def test_nothing_to_evict() -> None:
    assert choose([], NOW, 1000) is None
    assert choose([use(1, [5, 5], evictable=False)], NOW, 1000) is None
    assert choose([use(1, [])], NOW, 1000) is not None


def test_the_oldest_segment_goes_and_its_hot_pages_are_relocated() -> None:
    old = use(1, [5000, 10, 5000, 5000], [3, 0, 4, 5])
    chosen = choose([old, use(2, [100] * 4), use(3, [50] * 4)], NOW, 200)
    assert chosen is not None
    assert (chosen.victim, chosen.relocate, chosen.relocate_bytes) == (1, (1,), 100)


def test_records_that_claim_no_bytes_stop_no_eviction() -> None:
    forged = Summary(1, 4096, True, False, group([NOW - 5 * SECOND] * 2, [0, 0], [0, 1], [0] * 2))
    assert choose([forged, use(2, [100] * 4)], NOW, 200) is not None


def test_the_write_budget_is_respected() -> None:
    segments = [use(n, [1, 2, 3, 4, 9000, 9000, 9000, 9000], [0] * 8) for n in (1, 2)]
    for budget in (0, 99, 100, 250, 10_000):
        chosen = choose(segments, NOW, budget)
        assert chosen is not None
        assert chosen.relocate_bytes == 100 * len(chosen.relocate) <= budget
        assert chosen.relocate_bytes < 800


def test_pinned_and_active_segments_never_go_and_held_ones_last() -> None:
    stale = [9000] * 4
    free, held, pinned = use(1, [1] * 4), use(2, stale, held=True), use(3, stale, evictable=False)
    for segments, victim in (([free, held, pinned], 1), ([held, pinned], 2)):
        chosen = choose(segments, NOW, 0)
        assert chosen is not None and chosen.victim == victim
        assert ("held" in chosen.reason) == (victim == 2)


def test_a_store_that_is_hot_throughout_still_finds_a_victim() -> None:
    chosen = choose([use(n, [1] * 8) for n in range(1, 6)], NOW, 10_000)
    assert chosen is not None
    assert chosen.relocate_bytes < 800


def test_dead_records_are_worth_nothing_and_never_relocated() -> None:
    chosen = choose([use(1, [1, None, None, None]), use(2, [2] * 4)], NOW, 1000)
    assert chosen is not None
    assert chosen.victim == 1
    assert set(chosen.relocate) <= {0}
    emptied = choose([use(3, [None] * 4), use(4, [9000] * 4)], NOW, 1000)
    assert emptied is not None and (emptied.victim, emptied.relocate) == (3, ())


def test_tails_go_before_the_heads_that_they_need() -> None:
    head, tail = use(1, [60] * 4, [0, 1, 2, 3]), use(2, [60] * 4, [4, 5, 6, 7])
    chosen = choose([head, tail], NOW, 0)
    assert chosen is not None and chosen.victim == 2


def test_what_is_behind_a_gap_goes_first_and_is_never_relocated() -> None:
    head, tail = use(1, [60] * 4, [0, 1, 2, 3]), use(2, [60] * 4, [5, 6, 7, 8])
    other = use(3, [5000] * 4)
    chosen = choose([head, tail, other], NOW, 1000)
    assert chosen is not None and (chosen.victim, chosen.relocate) == (2, ())


@pytest.mark.parametrize(("lived", "worth"), [(150, 2), (1200, 5)])
def test_what_was_used_again_long_after_it_was_written_outlives_what_was_used_once(lived: int, worth: int) -> None:
    """Worth: the root of 1 + life / 50 s. Hazard falls with (age + 50 s) ** 1.5."""
    age = (300 + 50) * worth ** (2 / 3) - 50
    for ahead, victim in ((-5, 1), (5, 2)):
        chosen = choose([use(1, [300] * 4), use(2, [int(age) + ahead] * 4, lived=lived), use(3, [5] * 4)], NOW, 0)
        assert chosen is not None and chosen.victim == victim


def test_a_life_of_decades_counts_as_an_hour() -> None:
    """Records that were written while the clock said 1970, or whose time of writing is forged."""
    worth = (1 + 3600 / 50) ** 0.5
    age = (10 + 50) * worth ** (2 / 3) - 50
    for ahead, victim in ((5, 1), (-5, 2)):
        decades = use(1, [int(age) + ahead] * 4, lived=50 * 365 * 86400)
        chosen = choose([decades, use(2, [10] * 4), use(3, [5] * 4)], NOW, 0)
        assert chosen is not None and chosen.victim == victim


def test_times_of_writing_in_the_future_do_no_harm() -> None:
    chosen = choose([use(1, [300] * 4, lived=-500), use(2, [301] * 4)], NOW, 0)
    assert chosen is not None and chosen.victim == 2


def test_a_store_that_turns_over_in_seconds_tells_old_from_new() -> None:
    """A fresh page and a stale one that is worth nothing: at a scale of 50 s, the mixed segment would go."""
    chosen = choose([use(1, [0, 9, 9, 9]), use(2, [6] * 4)], NOW, 0)
    assert chosen is not None and chosen.victim == 2


def test_an_access_time_in_the_future_is_older_than_all_others() -> None:
    chosen = choose([use(1, [-500] * 4), use(2, [900] * 4)], NOW, 500)
    assert chosen is not None and (chosen.victim, chosen.relocate) == (1, ())


def test_a_page_that_was_used_during_the_survey_is_the_newest() -> None:
    chosen = choose([use(1, [-1] * 4), use(2, [1] * 4)], NOW, 0)
    assert chosen is not None and chosen.victim == 2


def test_the_order_of_summaries_does_not_matter() -> None:
    rng = random.Random(7)
    segments = [use(n, [rng.randrange(3000) for _ in range(16)]) for n in range(1, 20)]
    first = choose(segments, NOW, 300)
    rng.shuffle(segments)
    assert first is not None and choose(segments, NOW, 300) == first


def test_a_policy_that_is_kept_chooses_like_a_new_one() -> None:
    rng, policy = random.Random(9), Policy()
    summaries = {n: use(n, [rng.randrange(40) for _ in range(16)]) for n in range(60)}
    for step in range(50):
        now = NOW + step * SECOND
        kept, new = policy.choose(summaries.values(), now, 500), choose(summaries.values(), now, 500)
        assert kept is not None and kept == new
        del summaries[kept.victim]
        if step % 3 == 0:
            summaries[100 + step] = use(100 + step, [rng.randrange(40) for _ in range(16)])


def test_the_budget_is_a_fraction_of_what_was_stored() -> None:
    budget = WriteBudget(segment_bytes=1000)
    assert budget.available == 0
    budget.stored(10_000)
    assert budget.available == WRITE_BUDGET * 10_000
    budget.relocated(600)
    assert budget.available == 0  # a debt is paid before anything more is relocated
    budget.stored(10**9)
    assert budget.tokens == BUDGET_SEGMENTS * 1000
    assert budget.available == 1000


def worth_by_hand(segments: Sequence[Summary], now_us: int, budget: int) -> list[EvictionPlan]:
    """The module's text, one sum after the other; chains of single fragments only."""
    stamps = [t for s in segments for t in s.fragments.stamps]
    scale = max(1, min(50_000_000, (now_us - min(stamps, default=now_us)) // 4))
    lost: dict[int, list[float]] = {}
    for s in segments:
        hazards = [0.0 if t > now_us + SECOND else (1 + max(0, now_us - t) / scale) ** -1.5 for t in s.fragments.stamps]
        lost[s.number] = [h * w for h, w in zip(hazards, s.fragments.weights, strict=True)]
    live = sum(sum(s.fragments.nbytes) for s in segments)
    average = sum(sum(losses) for losses in lost.values()) / live if live else 0.0
    plans = []
    for s in (s for s in segments if s.evictable):
        losses, sizes, taken, spent = lost[s.number], s.fragments.nbytes, [], 0
        best = sorted(range(len(losses)), key=lambda i: (-losses[i] / sizes[i], s.fragments.first[i]))
        for i in (i for i in best if losses[i] > 2 * average * sizes[i]):
            if spent + sizes[i] <= min(budget, s.nbytes - 1):
                spent, taken = spent + sizes[i], [*taken, i]
        score = (sum(losses) - sum(losses[i] for i in taken)) / (s.nbytes - spent)
        reason = f"loss {score / average:.3f} of average" + (", held" if s.held else "")
        copied = tuple(sorted(o for i in taken for o in s.fragments.ordinals_of(i)))
        plans.append((s.held, round(score, 9), s.number, EvictionPlan(s.number, copied, spent, reason)))
    return [plan for *_, plan in sorted(plans, key=lambda p: p[:3])]


@pytest.mark.parametrize("budget", [0, 100, 250, 1599, 1600, 10_000])
@pytest.mark.parametrize("oldest", [3, 40, 5000])
def test_victims_and_copies_are_those_of_a_calculation_by_hand(oldest: int, budget: int) -> None:
    rng, stamps = random.Random(oldest * 10_007 + budget), iter(range(10**9))
    segments = []
    for number in range(1, 12):
        # times of their own, down to the microsecond: no chains between segments
        ages = [rng.choice([0, 1, rng.randrange(oldest), oldest, -2, -1]) * SECOND + next(stamps) for _ in range(16)]
        lives = [rng.choice([-5, 0, 100, 4000]) * SECOND for _ in ages]
        fragments = group([NOW - a for a in ages], [100] * 16, [0] * 16, lives)
        segments.append(Summary(number, 1600, number % 5 != 0, number % 4 == 0, fragments))
    assert list(Policy().ranked(segments, NOW, budget)) == worth_by_hand(segments, NOW, budget)


def test_a_reason_says_what_is_lost_and_whether_a_reader_holds_the_segment() -> None:
    segments = [use(1, [9000] * 4, held=True), use(2, [])]
    ranked = list(Policy().ranked(segments, NOW, 0))
    assert [plan.victim for plan in ranked] == [2, 1], "held ones come last"
    assert ranked[0].reason == "loss 0.000 of average" and ranked[1].reason.endswith(" of average, held")
    (empty,) = Policy().ranked([use(3, [])], NOW, 0)
    assert empty.reason == "loss 0.000 of average", "where nothing has a worth"
    (alone,) = Policy().ranked([use(4, [50] * 4)], NOW, 0)
    assert alone.reason == "loss 1.000 of average"
