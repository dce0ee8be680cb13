"""What the saves and loads of the GPU transport share; ``kvfs.gpu.save`` and ``kvfs.gpu.load`` are the jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfs.gpu.device import Device, Event, Memory
from kvfs.gpu.lane import DmaLane
from kvfs.gpu.registration_cache import RegistrationCache
from kvfs.gpu.turns import Turns
from kvfs.kernels.work_list import Shape
from kvfs.system.thread_pool import Pool
from kvfs.transfer.control import TransferControl
from kvfs.transfer.workers import JobThreads, TransportContext, wait_for
from kvfs.types import TransferState

POLL_SECONDS = 20e-6  # between two queries of an event
SAVE_POLL_SECONDS = 1e-3  # the same of a save: each query takes the GIL, and nothing waits for the end of a save
UNDER_WAY = 3  # loads between their first copy and their end
SWITCH_SECONDS = 1e-6  # a sleep that hands the GIL to another thread that wants it
EARLY = 0.8  # of the time that a load takes at the least: until then nothing asks whether it has arrived
YIELD_SECONDS = 200e-6  # a sleep in which a waiter wakes up, before deferrable work takes the GIL again


class Manner(NamedTuple):
    """What a load takes from the process of its engine."""

    registers: bool  # what the page cache holds; the engine's launches wait meanwhile
    poll_seconds: float  # between two queries of an event; each takes the GIL
    read_bytes: int  # of one read into the ring; each takes the GIL


QUICK = Manner(registers=True, poll_seconds=POLL_SECONDS, read_bytes=4 << 20)
#: Next to requests that generate tokens: these lose less than half of what they lose next to a quick one
#: (docs/decisions/0059).
GENTLE = Manner(registers=False, poll_seconds=500e-6, read_bytes=16 << 20)


class LinkPace:
    """The highest rate at which a load has arrived. Each look at an event costs CPU time and the GIL."""

    def __init__(self) -> None:
        self._best = 0.0  # bytes per second

    def early(self, nbytes: int, seconds: float) -> float:
        """How long so many bytes, ``seconds`` after their first copy was enqueued, need not be looked for."""
        return EARLY * nbytes / self._best - seconds if self._best else 0.0

    def arrived(self, nbytes: int, seconds: float) -> None:
        if seconds > 0:
            self._best = max(self._best, nbytes / seconds)


@dataclass(frozen=True)
class GpuTransportContext(TransportContext):
    """What all jobs of one GpuIO share. Each lane is used by one thread at a time."""

    device: Device
    shapes: Mapping[int, Shape]  # by group number
    tables: Mapping[int, Memory]  # buffer tables, likewise
    saves: DmaLane
    loads: DmaLane
    regions: RegistrationCache | None  # None: everything comes through the ring
    readers: Pool
    ring_address: int
    batch_bytes: int  # of loads, at most; scratch holds several
    turns: Turns  # of loads
    pace: LinkPace  # for the end thread alone
    arriving: deque[Callable[[], bool]]  # of the loads that were handed over and have not ended: whether they arrived
    later: deque[Callable[[], None]]  # deferred cleanup of loads; for the end thread alone
    ends: JobThreads  # the end thread: ends loads, one after the other
    callbacks: JobThreads  # the callback thread: ends loads with callbacks, which may cancel the next one


def wait_until(context: GpuTransportContext, event: Event, poll_seconds: float = POLL_SECONDS) -> None:
    """Poll an event: the driver would take 180 us to wake the thread up, this takes 40."""
    while not event.query():
        context.store.files.sleep(poll_seconds)


def wait_for_event(
    context: GpuTransportContext, transfer: TransferControl, after: Any, poll_seconds: float = POLL_SECONDS
) -> bool:
    """Wait for the engine's event until the deadline; False, and the reason noted, if it has not come by then.

    The host polls it: a stream that waited for it could neither be cancelled nor give up.
    """
    query: Callable[[], bool] | None = getattr(after, "query", None)
    if query is None:
        wait_for(transfer, after)
        return not transfer.stopped
    if not query():
        transfer.enter(TransferState.WAITING)
        while not query():
            if transfer.stopped or context.late(transfer):
                return False
            context.store.files.sleep(poll_seconds)
    return not transfer.stopped
