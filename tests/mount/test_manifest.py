"""Manifests: what was packed is parsed, and damage or a lie about the stream is no manifest."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.format.checksums import checksum
from kvfs.mount import cells
from kvfs.mount.manifest import DAMAGED, PAGE_BYTES, Manifest, Piece, State, last_page_bytes, parse
from tests.stores import seeded

RUNS = st.lists(st.integers(0, 5 * PAGE_BYTES), max_size=6)


def made(runs: list[int]) -> Manifest:
    plan = cells.arrange(runs)
    count = plan.whole_pages + (1 if plan.last_page else 0)
    keys = tuple(seeded(n, 32) for n in range(count))
    return Manifest(sum(runs), plan.pieces, keys, plan.last_bytes, plan.last_page, State(3, 4))


@given(RUNS)
def test_what_was_packed_is_parsed(runs: list[int]) -> None:
    manifest = made(runs)
    found = parse(manifest.pack())
    assert found == manifest
    assert found is not None
    assert found.check == manifest.checked().check


@given(RUNS, st.data())
def test_a_changed_byte_is_noticed(runs: list[int], data: st.DataObject) -> None:
    packed = bytearray(made(runs).pack())
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    found = parse(bytes(packed))
    if 8 <= at < 32:  # hits and lifetime have a check of their own: the lifetime has ended
        assert found is not None
        assert found.state == DAMAGED
    else:
        assert found is None


@given(st.binary(max_size=300))
def test_any_bytes_are_no_manifest(data: bytes) -> None:
    assert parse(data) is None
    assert parse(b"kvfsfil1" + data) is None


@pytest.mark.parametrize(
    "change",
    [
        {"size": 1}, {"last_bytes": 99}, {"last_page": 1 << 16}, {"last_bytes": 0, "last_page": 0},
        {"pieces": (Piece(PAGE_BYTES, PAGE_BYTES + 100),)}, {"pieces": (Piece(0, PAGE_BYTES),)},
        {"pieces": (Piece(2**64 - 100, PAGE_BYTES + 100),)}, {"keys": (b"k" * 32,)},
    ],
)  # fmt: skip
def test_a_manifest_with_a_right_check_may_still_point_nowhere_else(change: dict[str, object]) -> None:
    manifest = made([PAGE_BYTES + 100])
    packed = bytearray(replace(manifest, **change).pack())  # type: ignore[arg-type]
    struct.pack_into("<Q", packed, 56, checksum(bytes(packed[32:56]) + bytes(packed[64:])))
    assert parse(bytes(packed)) is None


@pytest.mark.parametrize(("nbytes", "page"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192), (65_535, 65_536)])
def test_the_last_page_is_the_next_power_of_two(nbytes: int, page: int) -> None:
    assert last_page_bytes(nbytes) == page
