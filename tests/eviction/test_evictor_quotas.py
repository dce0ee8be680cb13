"""Quotas and lifetimes: guarantees are kept, caps hold, expired pages are misses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import kvfs
from kvfs import Quota
from kvfs.errors import ConfigError
from kvfs.eviction.evictor import RELOCATED
from kvfs.format import segment as fmt
from kvfs.index.ledger import NO_QUOTA
from kvfs.pages.identity import salt_digest
from kvfs.segments.writer import SegmentWriter
from kvfs.system.files import Files
from kvfs.testing import FakeClock
from kvfs.write.active_segments import CLASSES_MAX, Active, Declined, SegmentClass
from kvfs.write.appender import Appender
from tests.stores import TINY_BYTES, restored, run_child, seeded, segment_files, tiny, tokens_of

CHUNKS = 40
MIB = 1 << 20
PAGES = seeded(1, CHUNKS * TINY_BYTES)
QUOTAS = {
    "kept": Quota(guaranteed_bytes=2 * MIB),
    "capped": Quota(cap_bytes=2 * MIB),
    "both": Quota(guaranteed_bytes=MIB, cap_bytes=MIB),
    "short": Quota(ttl_seconds=600),
    f"salt:{salt_digest('tenant')}": Quota(cap_bytes=MIB),
}


class Clock(FakeClock, Files):
    """The real file system under a clock that is set by hand."""


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    path = memory_path / "store"
    with kvfs.open(path, capacity="16MiB", segment_bytes="256KiB", quotas=QUOTAS, files=Clock()) as made:
        yield made


def clock(store: kvfs.Store) -> Clock:
    files = store._shared.c.files
    assert isinstance(files, Clock)
    return files


def space(store: kvfs.Store, name: str, **how: Any) -> kvfs.Namespace:
    return store.namespace(name, tiny(), revision="r1", **how)


def fill(ns: kvfs.Namespace, seeds: range, **how: Any) -> list[kvfs.PutResult]:
    results = []
    for seed in seeds:
        results.append(ns.put(tokens_of(seed, CHUNKS), PAGES, **how))
        files = ns._c.files
        assert isinstance(files, Clock)
        files.advance(0.01)
    return results


def there(ns: kvfs.Namespace, seeds: range) -> list[int]:
    """Prompts that are served whole, with the right bytes."""
    found = []
    for seed in seeds:
        data = restored(ns, tokens_of(seed, CHUNKS))
        assert data == PAGES[: len(data)]
        if len(data) == len(PAGES):
            found.append(seed)
    return found


def charged(store: kvfs.Store, name: str) -> int:
    from kvfs.directory.config import quota_id

    used: int = store._shared.c.index.read(lambda s: s.quota_used(quota_id(name)), 2.0)
    return used


# ---------------------------------------------------------------- guaranteed, cap


def test_what_is_guaranteed_outlives_any_churn_of_others(store: kvfs.Store) -> None:
    kept = space(store, "kept")
    assert all(r.stored == CHUNKS for r in fill(kept, range(9)))  # the oldest in the store
    assert charged(store, "kept") <= 2 * MIB
    fill(space(store, "other"), range(100, 450))
    assert store.stats()["counters"]["segments_evicted"] > 20
    assert there(kept, range(9)) == list(range(9))


def test_above_its_guarantee_a_quota_shrinks_to_it_and_no_further(store: kvfs.Store) -> None:
    kept = space(store, "kept")
    fill(kept, range(60))
    assert charged(store, "kept") > 4 * MIB
    fill(space(store, "other"), range(100, 600))
    assert 2 * MIB <= charged(store, "kept") < 3 * MIB
    assert len(there(kept, range(60))) >= 5


def test_a_quota_at_its_cap_evicts_its_own_pages_only(store: kvfs.Store) -> None:
    other = space(store, "other")
    fill(other, range(200, 205))
    capped = space(store, "capped")
    for seeds in (range(20), range(20, 40), range(40, 60)):
        assert all(r.stored == CHUNKS for r in fill(capped, seeds)), "a cap is no reason to store nothing new"
        assert charged(store, "capped") <= 2 * MIB
    assert there(capped, range(57, 60)) == [57, 58, 59]
    assert len(there(capped, range(60))) < 30
    assert there(other, range(200, 205)) == list(range(200, 205))


def test_a_quota_whose_cap_is_its_guarantee_still_takes_new_pages(store: kvfs.Store) -> None:
    both = space(store, "both")
    assert all(r.stored == CHUNKS for r in fill(both, range(40)))
    assert charged(store, "both") <= MIB
    assert 39 in there(both, range(40))


def test_pages_that_are_used_are_relocated_when_a_quota_evicts_at_its_cap(store: kvfs.Store) -> None:
    store._shared.background.stop()
    capped, hot = space(store, "capped"), tokens_of(1000, 4)
    assert capped.put(hot, PAGES[: 4 * TINY_BYTES]).stored == 4
    highest = 0
    for seed in range(60):
        assert restored(capped, hot) == PAGES[: 4 * TINY_BYTES], seed
        fill(capped, range(seed, seed + 1))
        clock(store).advance(10.0)
        highest = max(highest, charged(store, "capped"))
    counters = store.stats()["counters"]
    assert counters["pages_carried"] > 0 and "carry_errors" not in counters
    assert highest <= 2 * MIB, "the victim pays for the copies"


def test_a_tenants_namespaces_share_a_cap(store: kvfs.Store) -> None:
    mine = [space(store, name, salt="tenant") for name in ("a", "b", "capped")]
    for number, ns in enumerate(mine):
        assert all(r.stored == CHUNKS for r in fill(ns, range(100 * number, 100 * number + 12)))
    assert 0 < charged(store, f"salt:{salt_digest('tenant')}") <= MIB
    assert charged(store, "capped") == 0, "the tenant pays, not the name"


def test_quotas_survive_a_new_index(memory_path: Path) -> None:
    path = memory_path / "store"
    with kvfs.open(path, capacity="16MiB", segment_bytes="256KiB", quotas=QUOTAS, files=Clock()) as store:
        fill(space(store, "capped"), range(20))
        store._shared.services().active.finish_all()
        before = charged(store, "capped")
    (path / "index" / "CURRENT").unlink()
    with kvfs.open(path, files=Clock()) as store:
        assert store.wait_ready() and store.settings.quotas == QUOTAS
        assert abs(charged(store, "capped") - before) < 64 * 1024
        assert not [r for r in fill(space(store, "capped"), range(20, 50)) if r.stored != CHUNKS], store.stats()
        assert charged(store, "capped") <= 2 * MIB


# ---------------------------------------------------------------- lifetimes


def test_pages_are_misses_when_they_have_expired(store: kvfs.Store) -> None:
    short, long = space(store, "short"), space(store, "other")
    fill(short, range(2))
    fill(short, range(2, 4), ttl="1h")  # a put may set its own
    fill(long, range(2))
    clock(store).advance(590)
    assert there(short, range(4)) == [0, 1, 2, 3]
    clock(store).advance(15)
    assert (there(short, range(4)), there(long, range(2))) == ([2, 3], [0, 1])
    assert all(r.stored == CHUNKS for r in fill(short, range(2))), "what has expired can be stored again"
    clock(store).advance(3600)
    assert (there(short, range(4)), there(long, range(2))) == ([], [0, 1])


def test_expired_segments_are_dropped_though_their_owner_lives(store: kvfs.Store) -> None:
    short = space(store, "short")
    fill(short, range(3))
    fill(space(store, "other"), range(100, 101))
    clock(store).advance(20)
    store._shared.services().active.tidy()  # idle: sealed, since nothing more belongs to this lifetime
    clock(store).advance(580)
    store._shared.services().evictor.expire()
    assert len(segment_files(Path(store.path))) == 2 or there(short, range(3)) == []
    clock(store).advance(300)
    store._shared.services().evictor.expire()
    assert len(segment_files(Path(store.path))) == 1 and charged(store, "short") == 0
    assert there(space(store, "other"), range(100, 101)) == [100]


def test_pages_that_expire_after_they_were_relocated_are_worth_nothing_to_eviction(store: kvfs.Store) -> None:
    """They were relocated again and again, and better pages were evicted for them: their segments do not expire."""
    core, ns = store._shared, space(store, "other")
    core.background.stop()
    fill(ns, range(1), ttl=3000)
    core.services().active.finish_all()
    ((number, row),) = core.c.index.read(lambda s: s.segments(), 2.0)
    held = core.c.segments.acquire(number, row.segment_id, core.c.index.generation)
    assert held is not None
    target = SegmentClass(NO_QUOTA + RELOCATED, fmt.FLAG_CARRIED, evictor=True)
    assert core.services().evictor.relocator.copy(target, number, held, range(1, 1 + CHUNKS)) == CHUNKS
    core.services().evictor.reclaimer.drop(number)

    def valued() -> int:
        _, uses, _ = core.services().evictor.victims.survey()
        return sum(sum(use.fragments.nbytes) for use in uses)

    assert there(ns, range(1)) == [0] and valued() >= CHUNKS * fmt.BLOCK
    clock(store).advance(4000)
    assert there(ns, range(1)) == [] and valued() == 0


def test_expired_segments_of_the_dead_are_dropped(store: kvfs.Store) -> None:
    files = clock(store)

    def die() -> int:
        with kvfs.open(store.path) as mine:
            return fill(space(mine, "short"), range(1))[0].stored

    assert run_child(die) == CHUNKS
    files.advance(2000)
    store._shared.services().evictor.expire()
    assert not segment_files(Path(store.path)) and store.stats()["used_bytes"] == 0


def test_many_lifetimes_keep_few_segments_open(store: kvfs.Store) -> None:
    ns = space(store, "other")
    for seed in range(40):
        assert ns.put(tokens_of(seed, 1), PAGES[:TINY_BYTES], ttl=60.0 * 2**seed if seed < 20 else 100.0 * seed).stored
        clock(store).advance(0.01)
    store._shared.services().active.tidy()
    assert len(store._shared.services().active.active_numbers()) <= CLASSES_MAX
    assert all(restored(ns, tokens_of(seed, 1)) == PAGES[:TINY_BYTES] for seed in range(40))


def test_a_segment_that_is_made_meanwhile_does_not_break_active_numbers(store: kvfs.Store) -> None:
    """With several of them a put in another thread made background tasks and a rebuild crash."""
    active = store._shared.services().active

    class Growing:
        number = property(lambda _: active._writers.setdefault(SegmentClass(lane=2), Active(last, "")) and 1)

    first, last = cast(SegmentWriter, Growing()), cast(SegmentWriter, SimpleNamespace(number=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(active, "_writers", {SegmentClass(lane=n): Active(first, "") for n in range(2)})
        assert active.active_numbers() == {1}
        assert active.active_numbers() == {1, 3}


def test_many_resting_segments_do_not_seal_those_that_are_written(memory_path: Path) -> None:
    names = [f"quota {i}" for i in range(CLASSES_MAX + 4)]
    quotas = dict.fromkeys(names, Quota(cap_bytes=8 * MIB))
    path = memory_path / "store"
    with kvfs.open(path, capacity="64MiB", segment_bytes="2MiB", quotas=quotas, files=Clock()) as store:
        store._shared.background.stop()
        active, busy = store._shared.services().active, space(store, "other")
        for name in names:
            fill(space(store, name), range(1))
        clock(store).advance(20.0)
        active.tidy()
        resting = active.active_numbers()
        assert len(resting) == CLASSES_MAX
        fill(busy, range(1))
        mine = active.active_numbers() - resting
        for seed in range(1, 6):
            fill(busy, range(seed, seed + 1))
            active.tidy()
            assert len(active.active_numbers()) == CLASSES_MAX and mine <= active.active_numbers()
        for name in names:
            assert there(space(store, name), range(1)) == [0]


def test_lifetimes_in_a_store_of_few_segments_leave_something_to_evict(memory_path: Path) -> None:
    """32 segments that were open took all of it, and further puts were declined after five seconds each."""
    with kvfs.open(memory_path / "store", capacity="16MiB", segment_bytes="1600KiB", files=Clock()) as store:
        store._shared.background.stop()
        ns, stored = space(store, "other"), 0
        for seed in range(30):
            stored += ns.put(tokens_of(seed, 1), PAGES[:TINY_BYTES], ttl=100.0 * 1.5**seed).stored
            if seed % 4 == 3:
                store._shared.services().active.tidy()
        assert stored == 30


def test_a_segment_that_nothing_was_appended_to_gives_its_blocks_back(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def declines(*args: Any) -> Any:
        raise Declined("space")

    store._shared.background.stop()
    with monkeypatch.context() as patch:
        patch.setattr(Appender, "_claim", declines)
        assert space(store, "other").put(tokens_of(0, CHUNKS), PAGES).declined == CHUNKS
    used = store.stats()["used_bytes"]
    clock(store).advance(20.0)
    store._shared.services().active.tidy()
    assert 0 < store.stats()["used_bytes"] < used


def test_locks_of_closed_classes_take_no_memory(store: kvfs.Store) -> None:
    store._shared.background.stop()
    ns = space(store, "other")
    for seed in range(40):
        ns.put(tokens_of(seed, 1), PAGES[:TINY_BYTES], ttl=60.0 * (seed + 1))
    store._shared.services().active.finish_all()
    assert not store._shared.services().active._used_at and len(store._shared.services().active.class_locks._locks) == 0


def test_a_rebuild_brings_nothing_expired_back(memory_path: Path) -> None:
    path, files = memory_path / "store", Clock()
    with kvfs.open(path, capacity="16MiB", quotas=QUOTAS, files=files) as store:
        fill(space(store, "short"), range(1))
        fill(space(store, "other"), range(1))
    (path / "index" / "CURRENT").unlink()
    files.advance(1000)
    with kvfs.open(path, files=files) as store:
        assert store.wait_ready()
        assert there(space(store, "short"), range(1)) == []
        assert there(space(store, "other"), range(1)) == [0]


@pytest.mark.parametrize(
    ("quotas", "text"),
    [
        ({"a": Quota(guaranteed_bytes=9 * MIB)}, "at most half"),
        ({"a": {"cap": 5}}, "kvfs.Quota"),
    ],
)
def test_quotas_that_make_no_sense_are_refused(memory_path: Path, quotas: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        kvfs.open(memory_path / "store", capacity="16MiB", quotas=quotas)
    assert not (memory_path / "store").exists()
