"""Prefixes that a GPU holds, and leases on them, in memory that the ranks of a host share: native/ranks.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvfs.native import library
from kvfs.native.library import LeaseSlots, Library, Prefixes, PullPages

WAYS, NONCE_BITS = 8, 24  # of native/kvfs_native.h
NONE = 0xFFFFFFFF
HASH_BYTES = 32
LEAF_BYTES = 8
SLOT_HEAD_BYTES = 8


class Page(NamedTuple):
    """What the entries of a group hold. ``per_unit``: pages of a unit that holds several; else 1."""

    units: int
    leaves: int
    per_unit: int


class Found(NamedTuple):
    """Entries of chunks, and the seq of each; NONE where a chunk has none."""

    entries: array[int]  # u32
    seqs: array[int]  # u64


def native() -> Library | None:
    """The library that these tables need; None if it is off."""
    return library.loaded()


def entry_bytes(native: Library, page: Page) -> int:
    return int(native.held.kvfs_entry_bytes(page.units, page.leaves))


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


class SharedPrefixes:
    """The entries of one group of one rank, at an address that stays mapped. Calls hold the interpreter."""

    def __init__(self, native: Library, address: int, buckets: int, page: Page) -> None:
        self.page, self.entries = page, buckets * WAYS
        self._native = native.held
        self._table = Prefixes(address, buckets, entry_bytes(native, page), page.units, page.leaves, page.per_unit)

    def publish(
        self, holders: array[int], hashes: bytes, subs: array[int], units: array[int], leaves: bytes, stamp: int
    ) -> None:
        """``holders``: units * per_unit of the owner, NONE at first. ``units``: u32, ``page.units`` of each page."""
        count = len(subs)
        assert len(hashes) == HASH_BYTES * count and len(units) == self.page.units * count
        assert len(leaves) == LEAF_BYTES * self.page.leaves * count
        assert not units or max(units) * self.page.per_unit + max(subs) < len(holders)
        self._native.kvfs_publish(
            self._table, _address(holders), hashes, _address(subs), _address(units), leaves, count, stamp
        )

    def retract(self, holders: array[int], units: array[int]) -> array[int]:
        """The entries of all pages in ``units``, which no lookup finds from now on."""
        assert not units or (max(units) + 1) * self.page.per_unit <= len(holders)
        out = array("I", bytes(4 * len(units) * self.page.per_unit))
        count = self._native.kvfs_retract(self._table, _address(holders), _address(units), len(units), _address(out))
        return out[:count]

    def held(self, hashes: bytes, misses_max: int) -> Found:
        """Look chunks up, until ``misses_max`` of them are not there."""
        count = len(hashes) // HASH_BYTES
        entries, seqs = array("I", bytes(4 * count)), array("Q", bytes(8 * count))
        looked = self._native.kvfs_held(self._table, hashes, count, misses_max, _address(entries), _address(seqs))
        return Found(entries[:looked], seqs[:looked])

    def pull_list(
        self, pull: PullPages, found: Found, chunks: array[int], first: int, batches: array[int], units: int,
        leaves: int, words: int,
    ) -> int:  # fmt: skip
        """Of the pages from number ``first`` of ``found`` and ``chunks`` (u32) on, as many as ``batches`` (u32) adds up
        to, those that are as they were found, until one that is not: how many. ``units``, ``leaves``, ``words``:
        addresses with room for i64 units, leaf tables, and a work list for each batch (``kvfs.kernels.pull``)."""
        entries, seqs = found
        count = sum(batches)
        assert first + count <= len(entries) == len(seqs) == len(chunks) and 0 not in batches
        return int(self._native.kvfs_pull_list(
            self._table, pull, _address(entries) + 4 * first, _address(seqs) + 8 * first, _address(chunks) + 4 * first,
            count, first, _address(batches), units, leaves, words,
        ))  # fmt: skip

    def unchanged(self, found: Found, count: int, flags: int = 0) -> bytearray | None:
        """1 for each of the first ``count`` pages that is as it was found, and whose flag is 0; None: all are.

        ``flags``: address of one i32 for each page; 0: none.
        """
        assert count <= len(found.entries)
        good = bytearray(count)
        if not count:
            return None
        entries, seqs = _address(found.entries), _address(found.seqs)
        same = self._native.kvfs_unchanged(self._table, entries, seqs, flags or None, count, _writable(good))
        return good if same < count else None


def _writable(data: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data))


def slot_bytes(entries: int) -> int:
    """Of one lease on a table of so many entries."""
    return SLOT_HEAD_BYTES + 8 * -(-entries // 64)


class SharedLeases:
    """The leases on the entries of one rank, at an address that stays mapped."""

    def __init__(self, native: Library, address: int, slots: int, entries: int) -> None:
        self._native = native.held
        self._slots = LeaseSlots(address, slots, slot_bytes(entries))

    def take(
        self, nonce: int, now_ms: int, deadline_ms: int, entries: Sequence[tuple[int, array[int]]]
    ) -> tuple[int, int] | None:
        """A lease until ``deadline_ms`` (CLOCK_MONOTONIC) on ``entries``, u32 from a first number on each: what ``end``
        takes; None if all slots are taken. Ask ``SharedPrefixes.unchanged`` afterwards."""
        state = deadline_ms << NONCE_BITS | (nonce & (1 << NONCE_BITS) - 1)
        slot = self._native.kvfs_lease(self._slots, state, now_ms)
        if slot < 0:
            return None
        for first, numbers in entries:
            self._native.kvfs_lease_entries(self._slots, slot, first, _address(numbers), len(numbers))
        return slot, state

    def end(self, lease: tuple[int, int]) -> None:
        self._native.kvfs_end_lease(self._slots, *lease)

    def busy(self, now_ms: int, entries: array[int]) -> bytearray:
        """1 for each entry on which a lease is in force."""
        busy = bytearray(len(entries))
        if busy:
            self._native.kvfs_leased(self._slots, now_ms, _address(entries), len(busy), _writable(busy))
        return busy
