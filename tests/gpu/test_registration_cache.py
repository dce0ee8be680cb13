"""Regions that are replaced while copies use them. What loads do with regions is tested with the transport."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.gpu.registration import FullError, RegisteredRegion
from kvfs.gpu.registration_cache import RegionLease, RegistrationCache
from kvfs.system.files import Files

REGION = 4096


class Source:
    """Regions at addresses that are never used twice, ``most`` at a time."""

    name, short, fills = "source", False, False
    budget: Any = None

    def __init__(self, most: int = 1 << 30) -> None:
        self.most, self.made = most, dict[int, int]()
        self.closed = False
        self._next = 0

    def ready(self) -> bool:
        return True

    def lacks(self, segment_id: bytes, number: int) -> None:
        raise AssertionError("the source is never asked to grow")

    def grow(self, seconds: float) -> None:
        raise AssertionError("the source is never asked to grow")

    def cost(self, nbytes: int) -> int:
        return nbytes

    def make(self, held: Any, start: int, nbytes: int, *, ahead: bool) -> RegisteredRegion:
        if len(self.made) == self.most:
            raise FullError
        self._next += 1 << 20
        self.made[self._next] = nbytes
        return RegisteredRegion(held, self._next, nbytes, None)

    def free(self, region: RegisteredRegion) -> None:
        del self.made[region.address]

    def close(self) -> None:
        assert not self.made
        self.closed = True


@pytest.fixture
def held(tmp_path: Path) -> Any:
    with (tmp_path / "segment").open("wb+") as file:  # empty: it is not sealed
        yield SimpleNamespace(fd=file.fileno(), segment_id=b"a")


def test_a_region_that_grows_while_copies_use_it_is_freed_with_its_last_user(held: Any) -> None:
    source, early, late = Source(), RegionLease(), RegionLease()
    cache = RegistrationCache(source, Files(), REGION)
    [short] = cache.ranges(held, 0, 100, 100, early, register=True) or ()
    [long] = cache.ranges(held, 0, 300, 300, early, register=True) or ()
    assert source.made == {short.address: 100, long.address: 300} and cache.nbytes == 300
    [again] = cache.ranges(held, 0, 100, 300, late, register=False) or ()
    assert again.address == long.address
    cache.release(early)
    assert source.made == {long.address: 300}
    cache.close()
    assert source.made and not source.closed
    cache.release(late)
    assert not source.made and source.closed


def test_a_close_waits_for_the_users_of_a_replaced_region(held: Any) -> None:
    source, early = Source(), RegionLease()
    cache = RegistrationCache(source, Files(), REGION)
    [short] = cache.ranges(held, 0, 100, 100, early, register=True) or ()
    assert cache.warm(held, 0, 300, 300) == 300
    cache.close()
    assert source.made == {short.address: 100} and not source.closed
    cache.release(early)
    assert not source.made and source.closed


def test_a_spare_region_replaces_none_that_copies_use(held: Any) -> None:
    source, lease = Source(), RegionLease()
    cache = RegistrationCache(source, Files(), REGION)
    [short] = cache.ranges(held, 0, 100, 100, lease, register=True) or ()
    assert cache.warm(held, 0, 300, 300, spare=True) == 0 and source.made == {short.address: 100}
    cache.release(lease)
    assert cache.warm(held, 0, 300, 300, spare=True) == 300 and list(source.made.values()) == [300]


def test_a_region_is_not_replaced_where_the_budget_is_spent(held: Any) -> None:
    source, lease = Source(most=1), RegionLease()
    cache = RegistrationCache(source, Files(), REGION)
    [short] = cache.ranges(held, 0, 100, 100, lease, register=True) or ()
    assert cache.ranges(held, 0, 300, 300, lease, register=True) is None
    assert source.made == {short.address: 100}
    cache.release(lease)
    assert cache.ranges(held, 0, 300, 300, lease, register=True)
