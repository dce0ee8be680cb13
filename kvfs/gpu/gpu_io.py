"""GpuIO: asynchronous saves and loads between an engine's GPU memory and the store.

One thread enqueues saves, one loads, one waits for the ends of loads, one calls back, a few write to the store; others
read segments into the ring where the GPU cannot read them in place. All kernels are compiled and run once when a GpuIO
is made.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvfs.context import Counters
from kvfs.directory.config import parse_size
from kvfs.errors import ConfigError
from kvfs.gpu.device import IN_PROGRAMS, OUT_PROGRAMS, Device, Memory, Pinned
from kvfs.gpu.head_start import HeadStart
from kvfs.gpu.lane import BATCHES, DmaLane, aligned
from kvfs.gpu.load import GpuLoad
from kvfs.gpu.preregister import register_hottest, register_match
from kvfs.gpu.registration import Arena, PinnedBudget, Probe, RegisteredMaps, probe
from kvfs.gpu.registration_cache import MAKING_SECONDS, REGION_BYTES, RegistrationCache
from kvfs.gpu.resources import UNDER_WAY, GpuTransportContext, LinkPace
from kvfs.gpu.save import BATCH_BYTES, GpuSave
from kvfs.gpu.turns import Turns
from kvfs.kernels.driver import CudaError
from kvfs.kernels.work_list import Shape, pack, pack_pieces, shape_of
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.pages.layout import PageLayout
from kvfs.read.reader import Reader
from kvfs.segments.writer import file_name
from kvfs.system.files import Files
from kvfs.system.memory_limits import memory_limit
from kvfs.system.thread_pool import Pool
from kvfs.transfer import append_process
from kvfs.transfer.control import TransferControl
from kvfs.transfer.host_io import CLOSE_SECONDS, WARM_SECONDS, HostIO
from kvfs.transfer.load import Pages
from kvfs.transfer.units import Units
from kvfs.transfer.workers import Attached, JobThreads, Writes, make_ring
from kvfs.types import TransferResult
from kvfs.write.active_segments import LANES
from kvfs.write.appender import Appender

log = logging.getLogger("kvfs")
READ_THREADS = 16
TRANSPORTS = ("in_place", "arena", "ring")
REGISTERED_SHARE = 4  # all processes together may register one byte in so many of the host's memory, or the cgroup's
PROBE_BYTES = 64 << 10


@dataclass(frozen=True)
class GpuPools:
    """The buffers of one rank on its GPU, for what copies between GPUs (``kvfs.ranks``)."""

    device: Device
    namespace: bytes  # digest
    layout: PageLayout
    attached: Mapping[str, Attached]
    shapes: Mapping[int, Shape]  # by group number
    tables: Mapping[int, Memory]  # buffer tables, likewise
    upload: Callable[[bytes], Memory]
    files: Files
    counters: Counters


class GpuIO(HostIO):
    """One rank's attached buffers on a GPU. Made by ``Namespace.attach``; any thread may use it.

    ``transport``: "in_place" (the GPU reads segments in the page cache), "arena" (it reads pinned copies of them) or
    "ring" (through pinned slots). ``append_elsewhere``: in an append process (``kvfs.transfer.append_process``).
    """

    _save = GpuSave
    _load = GpuLoad
    _write_lanes = LANES
    kernels = "triton"  # or "torch", where Triton does not work
    _has_closed = _unpinned = False

    def __init__(
        self, device: Device, *args: Any, scratch_bytes: int | str, registered_bytes: int | str | None,
        transport: str | None = None, append_elsewhere: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        self._device, self._append_elsewhere = device, append_elsewhere
        self._scratch_bytes = parse_size(scratch_bytes, "scratch_bytes")
        share = (memory_limit() or 0) // REGISTERED_SHARE
        self._registered_bytes = share if registered_bytes is None else parse_size(registered_bytes, "registered_bytes")
        if transport not in (None, *TRANSPORTS):
            raise ConfigError(
                f"transport is {transport!r}: pass one of {', '.join(TRANSPORTS)}, or None to have it chosen"
            )
        self._asked_for = transport
        with device.current():
            super().__init__(*args, **{**kwargs, "threads": 1})

    def _make_context(
        self, appender: Appender, reader: Reader, ring_bytes: int | str, dirty_bytes: int | str | None
    ) -> GpuTransportContext:
        device, attached = self._device, self._attached.values()
        for a in attached:
            if not device.owns(a.device.memory):
                raise ConfigError(
                    f"group {a.group.name} is in {a.device.memory}, others on {device.name}: attach one device"
                )
        page = max(aligned(a.page_bytes + 4096) for a in attached)
        load_bytes = max(self._scratch_bytes, BATCHES * page)
        save_bytes = max(min(self._scratch_bytes, BATCHES * BATCH_BYTES), BATCHES * page)
        with contextlib.ExitStack() as undo:
            shared = self._shared_memory() if self._append_elsewhere else -1
            if shared >= 0:
                undo.callback(os.close, shared)

            def allocate(nbytes: int) -> memoryview:
                if shared >= 0:
                    os.ftruncate(shared, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
                try:
                    self._pinned = device.pinned(nbytes, shared)
                except CudaError as exc:
                    raise ConfigError(f"ring_bytes is {ring_bytes}: it cannot be pinned ({exc}); pass less") from None
                undo.callback(self._pinned.close)
                return self._pinned.view

            ring, keep = make_ring(self._c, attached, ring_bytes, dirty_bytes, allocate)
            shapes = {a.number: shape_of(a.group, a.part, a.device) for a in attached}
            tables = {number: self._upload(shape.table) for number, shape in shapes.items()}
            saves = DmaLane(device, save_bytes)
            undo.callback(saves.close)
            loads = DmaLane(device, load_bytes)
            undo.callback(loads.close)
            buffers = [loads.commands(1) for _ in range(UNDER_WAY)]  # now: making one takes as long as a short load
            for buffer in buffers:
                loads.give_back(buffer)
            shapes = self._working_shapes(loads, shapes, tables)
            readers = Pool(READ_THREADS, "kvfs-ring")
            undo.callback(readers.close)
            regions = self._make_regions(readers) if any(shape.sums for shape in shapes.values()) else None
            if regions is not None:
                undo.callback(regions.close)
            self.transport = "ring" if regions is None else regions.source.name
            callbacks, later = JobThreads("tell", 1), deque[Callable[[], None]]()
            descriptor, process = self._identity.descriptor_bytes(), None
            if shared >= 0:
                process = append_process.started(self._c, descriptor, shared, self._pinned.nbytes, LANES)
            context = GpuTransportContext(
                self._c, appender, reader, self._identity, descriptor, ring, keep, self._codec,
                Writes(self._c.files.monotonic), process, device, shapes, tables, saves, loads, regions, readers,
                self._pinned.address, load_bytes // BATCHES, Turns(UNDER_WAY), LinkPace(), deque(),
                later, JobThreads("end", 1, partial(_clean_up_rest, later, callbacks)), callbacks,
            )  # fmt: skip
            undo.pop_all()
            if shared >= 0:
                os.close(shared)  # the maps keep the memory
        self._finalizer = weakref.finalize(self, _collected, context, self._pinned, os.getpid())
        self._finalizer.atexit = False
        return context

    def _shared_memory(self) -> int:
        """A descriptor of memory for the ring that an append process can map; negative where saves need none."""
        if self._c.liveness is None or self._c.declines:
            return -1
        try:
            return os.memfd_create("kvfs-ring")
        except OSError as exc:
            log.warning("no memory that processes share (%s): saves are written in this process", exc)
            return -1

    def _working_shapes(self, lane: DmaLane, shapes: dict[int, Shape], tables: dict[int, Memory]) -> dict[int, Shape]:
        """The shapes, for Triton's kernels if all of them compile and run, else for torch."""
        try:
            for number, shape in shapes.items():
                _warm_up(lane, shape, tables[number])
        except CudaError:
            raise
        except Exception as exc:  # of a compiler, or of a missing package
            if self._asked_for not in (None, "ring"):
                raise ConfigError(
                    f"transport is {self._asked_for!r}, which needs Triton's kernels, and they do not work here "
                    f"({type(exc).__name__}: {exc}): repair Triton, or pass None"
                ) from exc
            log.warning(
                "Triton's kernels do not work on %s (%s: %s): torch moves the cells, and the CPU verifies pages in the "
                "ring, which is slower", self._device.name, type(exc).__name__, exc,
            )  # fmt: skip
            self.kernels = "torch"
            return {number: replace(shape, kernels=False) for number, shape in shapes.items()}
        return shapes

    def _upload(self, data: bytes) -> Memory:
        memory, pinned, stream = self._device.memory(len(data)), self._device.pinned(len(data)), self._device.stream()
        try:
            pinned.view[: len(data)] = data
            stream.copy_in(memory.address, pinned.address, len(data))
            stream.synchronize()
        finally:
            pinned.close()
        return memory

    def _make_regions(self, readers: Pool) -> RegistrationCache | None:
        """The regions that loads copy from; None: they use the ring alone."""
        off = self._c.declines == "disabled"
        if off or not self._registered_bytes or self._asked_for == "ring" or not self._c.mode.maps:
            return None
        files = self._c.files
        budget = PinnedBudget(self._c.pinned, files, self._registered_bytes)
        if self._asked_for != "arena":
            result = self._probe()
            if result.works:
                return RegistrationCache(RegisteredMaps(self._device, files, budget), files)
            if self._asked_for == "in_place":
                raise ConfigError(f"transport is 'in_place': {self._device.name} cannot: {result.reason}; pass None")
            log.warning("%s does not read segments in place: %s", self._device.name, result.reason)
        return RegistrationCache(Arena(self._device, files, budget, readers, REGION_BYTES), files)

    def _probe(self) -> Probe:
        """Whether the device reads a map of a file in this store correctly."""
        files, directory = self._c.files, self._c.directory
        if self._c.liveness is None:
            return Probe(True)  # nothing may be written: the first load will tell
        name = f"probe-{os.urandom(8).hex()}"
        try:
            run = directory.sub("run")
            fd = files.create(name, directory.file_mode, dir_fd=run)
        except OSError as exc:
            return Probe(False, f"no file for the probe: {exc}")
        try:
            files.unlink(name, dir_fd=run)
            files.write_all(fd, [os.urandom(PROBE_BYTES)], 0)
            return probe(self._device, fd, files, PROBE_BYTES)
        except OSError as exc:
            return Probe(False, f"no file for the probe: {exc}")
        finally:
            files.close(fd)

    def _load_threads(self, threads: int) -> JobThreads:
        context = self._gpu_context
        return JobThreads("read", threads, partial(_last_load, context.turns, context.ends))

    def _begin_load(self, match: PrefixMatch, pages: Pages, after: Any, *, layerwise: bool) -> HeadStart | None:
        if self._closed or self._reads.waiting:
            return None
        begun = HeadStart(self._gpu_context, match, pages, layerwise=layerwise)
        kept = False
        try:
            kept = begun.begin(after)
        finally:
            if not kept:
                begun.drop()
        return begun if kept else None

    # -- for callers -------------------------------------------------------------------------

    def load_at_once(self, loads: Sequence[tuple[PrefixMatch, Units]], seconds: float) -> list[TransferResult | None]:
        """None of them: their copies take no thread's time."""
        return [None] * len(loads)

    def warm(self, match: PrefixMatch, deadline: float = WARM_SECONDS) -> int:
        super().warm(match, deadline)
        regions, end = self._gpu_context.regions, self._c.files.monotonic() + deadline
        if regions is None:
            return 0
        ready = list[int]()
        self._register(partial(register_match, regions, self._gpu_context.reader, match, ready), end)
        return sum(ready)

    def warm_hottest(self, nbytes: int | str, deadline: float = WARM_SECONDS) -> int:
        super().warm_hottest(nbytes, deadline)
        regions, end = self._gpu_context.regions, self._c.files.monotonic() + deadline
        if regions is None:
            return 0
        limit, attached = parse_size(nbytes, "nbytes"), self._attached.values()
        self._register(partial(register_hottest, self._c, regions, self._identity.digest, attached, limit, end), end)
        return regions.nbytes

    def _register(self, work: Callable[[Callable[[], bool]], None], end: float) -> None:
        """Call ``work`` in a thread of its own: an interrupt would leave a half-made region pinned permanently.

        ``work`` is passed a call that says whether to stop. ``end``: monotonic; MAKING_SECONDS later the thread is no
        longer waited for, since a disk may hang.
        """
        pool, stop, over, clock = Pool(1, "kvfs-pin"), threading.Event(), threading.Event(), self._c.files.monotonic

        def register() -> None:
            try:
                self._device.enter()
                work(lambda: stop.is_set() or clock() >= end)
            finally:
                over.set()

        try:
            begun = pool.begin([register])
            if over.wait(max(0.0, end - clock()) + MAKING_SECONDS):
                begun.wait()
        finally:
            stop.set()
            pool.close(0.0)

    def release(self) -> None:
        """Free the regions that no load copies from, and make no more: before the process ends.

        May run in a signal handler: the locks inside are reentrant.
        """
        regions = self._gpu_context.regions
        if regions is not None and self._pid == os.getpid():
            with self._device.current():
                regions.close()

    @property
    def pools(self) -> GpuPools:
        """Its buffers, for copies between GPUs."""
        self._check_open()
        context, layout = self._gpu_context, self._identity.layout
        return GpuPools(
            self._device, self.namespace, layout, self._attached, context.shapes, context.tables, self._upload,
            self._c.files, self._c.counters,
        )  # fmt: skip

    @property
    def _gpu_context(self) -> GpuTransportContext:
        assert isinstance(self._context, GpuTransportContext)
        return self._context

    def sweep(self) -> None:
        """Also free the regions of dropped segments, and pin blocks that loads have lacked.

        Makes no call of the driver while there is nothing to do: while another thread captures a graph, a call may be
        refused, and may end the capture.
        """
        super().sweep()
        regions = self._gpu_context.regions
        if regions is None:
            return
        dropped = regions.dropped(self._is_dropped)
        if dropped or regions.short:
            with self._device.current():
                regions.sweep(dropped)

    def _is_dropped(self, segment_id: bytes) -> bool:
        try:
            self._c.files.stat(file_name(segment_id), dir_fd=self._c.directory.sub("segments"))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False

    def _check_after(self, after: Any) -> None:
        if after is None:
            raise ConfigError(
                "after is None: pass a torch.cuda.Event that was recorded behind the work that writes (save) or last "
                "reads (load) these units"
            )
        if not hasattr(after, "query"):
            super()._check_after(after)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        end = time.monotonic() + timeout
        super().close(timeout)
        if self._pid == os.getpid():
            for threads in (self._gpu_context.ends, self._gpu_context.callbacks):
                threads.join(max(0.1, end - time.monotonic()))
            if self._gpu_context.append_process is not None:
                self._gpu_context.append_process.close(max(0.1, end - time.monotonic()))
            self._has_closed = True
            self._unpin()

    def _forget(self, transfer: TransferControl) -> None:
        super()._forget(transfer)
        if self._has_closed:  # before this transfer ended
            self._unpin()

    def _unpin(self) -> None:
        """Release lanes, ring and readers when the last transfer has ended; regions that none copies from at once."""
        context = self._gpu_context
        with self._lock:
            over = not self._unfinished and not self._unpinned
            self._unpinned = self._unpinned or over
        if over:
            self._finalizer.detach()
            _release_all(context, self._pinned)
        elif context.regions is not None:
            with self._device.current():
                context.regions.close()


def _last_load(turns: Turns, ends: JobThreads) -> None:
    """Last call of the load thread: the end thread ends behind all loads that were enqueued."""
    turns.close(CLOSE_SECONDS)
    ends.dismiss()


def _clean_up_rest(later: deque[Callable[[], None]], callbacks: JobThreads) -> None:
    """Last call of the end thread."""
    try:
        while later:
            later.popleft()()
    finally:
        callbacks.dismiss()


def _collected(context: GpuTransportContext, pinned: Pinned, pid: int) -> None:
    """A GpuIO was not closed. No transfer is under way: each keeps its GpuIO. The collector may run in any thread."""
    if pid == os.getpid():
        with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is ending
            threading.Thread(target=_release_all, args=(context, pinned), name="kvfs-unpin", daemon=True).start()


def _release_all(context: GpuTransportContext, pinned: Pinned) -> None:
    steps = [context.saves.quiet, context.saves.close, context.loads.quiet, context.loads.close, pinned.close]
    if context.regions is not None:
        steps.insert(-1, context.regions.close)
    try:
        with context.device.current(), contextlib.ExitStack() as each:  # even if others fail
            for step in reversed(steps):
                each.callback(step)
    except Exception:  # a broken GPU must not keep the store open
        log.exception("%s could not be released", context.device.name)
    context.readers.close()
    if context.append_process is not None:
        context.append_process.close(0.0)


def _warm_up(lane: DmaLane, shape: Shape, table: Memory) -> None:
    """Compile and run every kernel once, on no granules."""
    commands = lane.commands(1 << 16)
    work = commands.put(pack(
        shape, array("q"), scratch=0, unit_ids=0, units=0, flags=0, leaves=0, buffers=table.address
    ))  # fmt: skip
    none = commands.put(pack_pieces([]))
    commands.send(lane.kernels, work)
    with lane.kernels.use():
        for programs in (OUT_PROGRAMS, IN_PROGRAMS):
            lane.kernels.copy_pieces(commands.work(none, commands.words(none, 0)), programs=programs)
        launch = commands.work(work, commands.words(0, 0))
        lane.kernels.gather(launch, shape)
        for check in {False, shape.sums}:
            lane.kernels.scatter(launch, shape, check=check)
    lane.quiet()
    lane.give_back(commands)
