"""Loads of the native library against reading, verifying and ``scatter_pages`` without it."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvfs.format.checksums import ROOT_BYTES, leaf_table, root_of
from kvfs.native import library
from kvfs.native.loads import CachedLoad, LoadRun
from kvfs.pages.host_copy import scatter_pages, targets
from tests.cells import ORDERS, Case
from tests.stores import seeded

PAGE, LEAF, STRIDE = 32, 512, 4096 * 3


def stored(case: Case, folder: Path) -> tuple[int, list[bytes]]:
    """The two pages of a case in a file, STRIDE bytes apart."""
    size = case.group.part_bytes(case.part)
    assert size <= STRIDE
    pages = [seeded(n, size) for n in range(2)]
    (folder / "file").write_bytes(b"".join(page.ljust(STRIDE, b"-") for page in pages))
    return os.open(folder / "file", os.O_RDONLY), pages


def run_of(
    case: Case, fd: int, pages: Sequence[bytes], load: int = 0, first: int = 0, *, leaf: int = LEAF, token: int = 0
) -> LoadRun:
    """Pages from ``first`` on, ``pages`` being what they should be."""
    roots = b"".join(root_of(leaf_table(page, LEAF)) for page in pages)
    return LoadRun(
        load, fd, first * STRIDE, STRIDE, len(pages[0]), leaf, roots, len(pages), first * case.group.states,
        array("q", case.ids), targets(case.group, case.part, case.kv, token),
    )  # fmt: skip


def copied(native: library.Library, runs: Sequence[LoadRun], loads: int = 1) -> set[int]:
    """Numbers of the loads that are left, after two threads have done their work in turns."""
    load = CachedLoad(native, runs, loads, 2)
    load.work(load.share)
    load.work(load.share)
    return load.left()


@pytest.fixture(autouse=True)
def _tells_what_is_cached(native: library.Library, tmp_path: Path) -> None:
    case = Case("slot,head,dim", PAGE, 0)
    fd, pages = stored(case, tmp_path)
    left = copied(native, [run_of(case, fd, pages)])
    os.close(fd)
    if left:
        pytest.skip("the file system does not say what is in the page cache")


@pytest.mark.parametrize("token", [0, 5, 37])
@pytest.mark.parametrize(("order", "block"), ORDERS)
def test_the_same_cells_are_copied(native: library.Library, tmp_path: Path, order: str, block: int, token: int) -> None:
    case, other = Case(order, PAGE, block), Case(order, PAGE, block)
    if not token:
        case.ids[-1] = other.ids[-1] = -1
    fd, pages = stored(case, tmp_path)
    assert copied(native, [run_of(case, fd, pages, token=token)]) == set()
    with library.paused():
        scatter_pages(pages, other.group, other.part, other.kv, other.ids, [0, 1], first_token=token)
    assert case.snapshot() == other.snapshot() != Case(order, PAGE, block).snapshot()
    os.close(fd)


def test_runs_of_many_loads_are_copied_in_one_call(native: library.Library, tmp_path: Path) -> None:
    draw, case, other = random.Random(3), Case("slot,head,dim", PAGE, 0), Case("slot,head,dim", PAGE, 0)
    fd, pages = stored(case, tmp_path)
    chosen = [draw.randrange(2) for _ in range(20)]
    assert copied(native, [run_of(case, fd, pages[n : n + 1], i, n) for i, n in enumerate(chosen)], 20) == set()
    scatter_pages(pages, other.group, other.part, other.kv, other.ids, [0, 1])
    assert set(chosen) == {0, 1} and case.snapshot() == other.snapshot()
    os.close(fd)


def test_a_page_with_another_root_is_not_copied_and_leaves_its_load(native: library.Library, tmp_path: Path) -> None:
    case, other = Case("slot,head,dim", PAGE, 0), Case("slot,head,dim", PAGE, 0)
    fd, pages = stored(case, tmp_path)
    flipped = bytes([pages[1][0] ^ 1]) + pages[1][1:]
    bad, good = run_of(case, fd, [flipped], 0, 1), run_of(case, fd, pages[:1], 1)
    assert copied(native, [bad, good], 3) == {0}, "load 2 has no pages"
    scatter_pages(pages[:1], other.group, other.part, other.kv, other.ids, [0])
    assert case.snapshot() == other.snapshot()
    assert copied(native, [run_of(case, fd, [pages[0], flipped])]) == {0}
    assert copied(native, [run_of(case, fd, [pages[0], flipped], leaf=0)]) == set(), "not to be verified"
    assert len(bad.roots) == ROOT_BYTES
    os.close(fd)


@pytest.mark.parametrize("why", ["behind the end", "closed"])
def test_a_page_that_cannot_be_read_leaves_its_load(native: library.Library, tmp_path: Path, why: str) -> None:
    case = Case("slot,head,dim", PAGE, 0)
    before = case.snapshot()
    fd, pages = stored(case, tmp_path)
    run = run_of(case, fd, pages)
    run = run._replace(fd=-1) if why == "closed" else run._replace(offset=3 * STRIDE)
    assert copied(native, [run]) == {0} and case.snapshot() == before
    os.close(fd)


def test_what_no_thread_came_to_is_left(native: library.Library, tmp_path: Path) -> None:
    """As when an interrupt takes the share away, or the library stops in the middle."""
    case = Case("slot,head,dim", PAGE, 0)
    fd, pages = stored(case, tmp_path)
    load = CachedLoad(native, [run_of(case, fd, pages[:1]), run_of(case, fd, pages[1:], 1, 1)], 2, 1)
    load._most = 1
    load.work(iter([0]))
    assert load.left() == {1}
    os.close(fd)
