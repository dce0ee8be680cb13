"""Publishing: the leaves of pages in this rank's units are summed by its GPU, then the pages enter its table."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

from kvfs.gpu.device import Event, Memory
from kvfs.gpu.gpu_io import GpuPools
from kvfs.gpu.lane import ALIGN, Lane
from kvfs.kernels.work_list import GRANULE_WORDS, HEAD_WORDS, WORD, pack, words_of
from kvfs.ranks.geometry import granule_tokens, page_of, sub_of, units_of
from kvfs.ranks.shared_files import OwnTable
from kvfs.transfer.workers import Attached

POLL_SECONDS = 1e-3  # nothing waits for the end of a publication
BATCH_BYTES = 1 << 30  # of pages that are summed by one launch: 1 ms of a part of an H100


@dataclass
class _Batch:
    attached: Attached
    hashes: bytes
    subs: array[int]
    units: array[int]
    epochs: list[int]  # of the units, when the engine published them


class Publisher:
    """Owns the entries of this rank. ``run`` on one thread; ``announce`` and ``retract`` on any."""

    def __init__(self, pools: GpuPools, lane: Lane, table: OwnTable, unit_tables: Mapping[int, Memory]) -> None:
        self._pools, self._lane, self._table, self._unit_tables = pools, lane, table, unit_tables
        self._lock = threading.Lock()
        #: Of each unit, how often it was retracted. Peers read those of token slots, whose copies they do not sum.
        self._epochs: dict[str, MutableSequence[int] | memoryview[int]] = {
            name: table.generations if table.token_slots else array("Q", [0]) * a.device.units
            for name, a in pools.attached.items()
        }
        self._closed = False

    def announce(
        self, hashes: Sequence[bytes], units: dict[int, Any], first: int, after: Any, deadline: float
    ) -> Callable[[], None]:
        """What ``run`` on the thread does: publish the chunks from ``first`` on whose units are all there."""
        batches = []
        for a in self._pools.attached.values():
            ids, page = units.get(a.number, ()), page_of(a)
            held = [(c, units_of(a, ids, c)) for c in range(first, len(hashes))]
            held = [(c, some) for c, some in held if some]
            most = max(1, BATCH_BYTES // a.page_bytes)
            for at in range(0, len(held), most):
                some = held[at : at + most]
                flat = array("I", [unit for _, each in some for unit in each])
                epochs = self._epochs[a.group.name]
                batches.append(_Batch(
                    a, b"".join(hashes[c] for c, _ in some), array("I", [sub_of(page, c) for c, _ in some]), flat,
                    [epochs[unit] for unit in flat],
                ))  # fmt: skip
        return lambda: self._run(batches, after, deadline)

    def _run(self, batches: Sequence[_Batch], after: Any, deadline: float) -> None:
        clock, device = self._pools.files.monotonic, self._pools.device
        device.enter()
        if device.orders(after):
            self._lane.kernels.after(after)
        else:
            while after is not None and not after.query():
                if clock() >= deadline:
                    self._pools.counters.add("publications_late")
                    return
                self._pools.files.sleep(POLL_SECONDS)
        for batch in batches:
            leaves = self._summed(batch)
            self._enter(batch, leaves)

    def _summed(self, batch: _Batch) -> bytes:
        """The leaf tables of a batch of pages, one behind the other."""
        pools, lane, a = self._pools, self._lane, batch.attached
        shape, page, count = pools.shapes[a.number], page_of(a), len(batch.subs)
        nbytes = count * page.leaves * WORD
        lists = (count * a.group.granules * GRANULE_WORDS + HEAD_WORDS + len(batch.units)) * WORD
        commands = lane.commands(lists + nbytes + 4 * ALIGN)
        try:
            ids = commands.put(array("q", batch.units))
            table = commands.room(nbytes)
            tokens = granule_tokens(a, page, batch.subs)
            work = commands.put(pack(
                shape, words_of(tokens, tokens, [0] * count, a.group.granules), scratch=0,
                unit_ids=commands.address(ids), units=len(batch.units), flags=0, leaves=commands.address(table),
                buffers=self._unit_tables[a.number].address,
            ))  # fmt: skip
            commands.send(lane.kernels, ids)
            lane.kernels.sum_units(commands.work(work, commands.words(ids, len(batch.units))), shape, check=False)
            commands.fetch(lane.kernels, table, nbytes, into=table)
            self._await(lane.kernels.record())
            return bytes(commands.back(table, nbytes))
        except BaseException:
            lane.wait()
            raise
        finally:
            lane.give_back(commands)

    def _await(self, event: Event) -> None:
        while not event.query():
            self._pools.files.sleep(POLL_SECONDS)

    def _enter(self, batch: _Batch, leaves: bytes) -> None:
        """The pages whose units have not been retracted since."""
        name, page = batch.attached.group.name, page_of(batch.attached)
        with self._lock:
            if self._closed:
                return
            epochs = self._epochs[name]
            same = [epochs[unit] == was for unit, was in zip(batch.units, batch.epochs, strict=True)]
            if all(same):
                self._table.publish(name, batch.hashes, batch.subs, batch.units, leaves)
            else:
                for i, sub in enumerate(batch.subs):
                    at = i * page.units
                    if all(same[at : at + page.units]):
                        self._table.publish(
                            name, batch.hashes[32 * i : 32 * (i + 1)], array("I", [sub]),
                            batch.units[at : at + page.units],
                            leaves[i * page.leaves * WORD : (i + 1) * page.leaves * WORD],
                        )  # fmt: skip
        self._pools.counters.add("pages_published", len(batch.subs))

    def retract(self, units: dict[int, Any]) -> array[int]:
        """Retract all pages in these units, and what token slots hold; what ``leased`` takes."""
        entries = array("I")
        with self._lock:
            for a in self._pools.attached.values():
                mine = array("I", [unit for unit in units.get(a.number, ()) if unit >= 0])
                epochs = self._epochs[a.group.name]
                for unit in mine:
                    epochs[unit] += 1
                entries.extend(self._table.retract(a.group.name, mine))  # fences behind the epochs, too
                entries.extend(self._table.lease_numbers(mine))
        return entries

    def close(self) -> None:
        """Retract everything: pulls that are under way end with a shorter prefix."""
        with self._lock:
            self._closed = True
            for name, a in self._pools.attached.items():
                self._table.retract(name, array("I", range(a.device.units)))

    def leased(self, entries: array[int]) -> bool:
        return self._table.leased(entries)
