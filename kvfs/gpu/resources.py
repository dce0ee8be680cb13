"""What the saves and loads of the GPU transport share; ``kvfs.gpu.save`` and ``kvfs.gpu.load`` are the jobs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvfs.gpu.device import Device, Event, Memory
from kvfs.gpu.lane import DmaLane
from kvfs.gpu.registration_cache import RegistrationCache
from kvfs.kernels.work_list import Shape
from kvfs.system.thread_pool import Pool
from kvfs.transfer.control import TransferControl
from kvfs.transfer.workers import JobThreads, TransportContext, wait_for
from kvfs.types import TransferState

POLL_SECONDS = 20e-6
UNDER_WAY = 3  # loads, from the first copy that is enqueued until all of it has come
SWITCH_SECONDS = 1e-6  # another thread that wants the interpreter has it then
YIELD_SECONDS = 200e-6  # for whoever waits to go on, before work that can wait takes the interpreter again


@dataclass(frozen=True)
class GpuTransportContext(TransportContext):
    """What all jobs of one GpuIO share. The lanes are of one thread each."""

    device: Device
    shapes: Mapping[int, Shape]  # by group number
    tables: Mapping[int, Memory]  # buffer tables, likewise
    saves: DmaLane
    loads: DmaLane
    in_place: RegistrationCache | None
    readers: Pool
    ring_address: int
    batch_bytes: int  # of loads, at most; scratch holds several
    under_way: threading.Semaphore  # loads: UNDER_WAY at most
    arriving: deque[Callable[[], bool]]  # of the loads whose ends are waited for: whether they have come
    later: deque[Callable[[], None]]  # what is left to do of loads that have ended; of that thread alone
    ends: JobThreads  # waits for the ends of loads, one after the other
    callbacks: JobThreads  # of loads: these may want to cancel the next one


def wait_until(desk: GpuTransportContext, event: Event) -> None:
    """Wait for something that was enqueued. To be woken by the driver takes 180 microseconds, this 40."""
    while not event.query():
        desk.context.files.sleep(POLL_SECONDS)


def wait_for_event(desk: GpuTransportContext, transfer: TransferControl, after: Any) -> bool:
    """Wait for the engine's event until the deadline; False, and the reason noted, if it has not come by then.

    Asked from here rather than left to a stream, which could neither be cancelled nor give up.
    """
    query: Callable[[], bool] | None = getattr(after, "query", None)
    if query is None:
        wait_for(transfer, after)
        return not transfer.stopped
    if not query():
        transfer.enter(TransferState.WAITING)
        while not query():
            if transfer.stopped or desk.late(transfer):
                return False
            desk.context.files.sleep(POLL_SECONDS)
    return not transfer.stopped
