"""GpuIO: asynchronous saves and loads between an engine's GPU memory and the store.

One thread enqueues saves, one loads, one writes to the store; a few read segments into the ring where the GPU cannot
read them in place. All kernels are compiled and run once when it is made.
"""

from __future__ import annotations

import contextlib
import logging
import os
from array import array
from typing import Any

from kvfs.config import parse_size
from kvfs.cuda import CudaError
from kvfs.errors import ConfigError
from kvfs.gpu import Device, Memory
from kvfs.gpujobs import GpuDesk
from kvfs.gpulane import BATCHES, Lane, aligned
from kvfs.gpuload import GpuLoad
from kvfs.gpusave import BATCH_BYTES, GpuSave
from kvfs.hostio import CLOSE_SECONDS, HostIO
from kvfs.hostjobs import make_ring
from kvfs.inplace import InPlace, Use, probe
from kvfs.kernels.work import Shape, pack, shape_of
from kvfs.match import PrefixMatch
from kvfs.pool import Pool
from kvfs.reader import Reader
from kvfs.reads import plan_runs, published
from kvfs.segment import file_name
from kvfs.writer import Appender

log = logging.getLogger("kvfs")
READ_THREADS = 16
PROBE_BYTES = 64 << 10


class GpuIO(HostIO):
    """One rank's attached buffers on a GPU. Made by ``Namespace.attach``; any thread may use it.

    ``transport``: "in_place" (the GPU reads segments in the page cache) or "ring" (through pinned slots).
    """

    _save = GpuSave
    _load = GpuLoad

    def __init__(
        self, device: Device, *args: Any, scratch_bytes: int | str, registered_bytes: int | str, **kwargs: Any
    ) -> None:
        self._device = device
        self._scratch_bytes = parse_size(scratch_bytes, "scratch_bytes")
        self._registered_bytes = parse_size(registered_bytes, "registered_bytes")
        device.enter()
        super().__init__(*args, **{**kwargs, "threads": 1})

    def _make_desk(
        self, appender: Appender, reader: Reader, ring_bytes: int | str, dirty_bytes: int | str | None
    ) -> GpuDesk:
        device, attached = self._device, self._attached.values()
        for a in attached:
            if not device.owns(a.device.memory):
                raise ConfigError(
                    f"group {a.group.name} lies in {a.device.memory}, others on {device.name}: attach one device"
                )
        page = max(aligned(a.page_bytes + 4096) for a in attached)
        load_bytes = max(self._scratch_bytes, BATCHES * page)
        save_bytes = max(min(self._scratch_bytes, BATCHES * BATCH_BYTES), BATCHES * page)
        with contextlib.ExitStack() as undo:

            def allocate(nbytes: int) -> memoryview:
                try:
                    self._pinned = device.pinned(nbytes)
                except CudaError as exc:
                    raise ConfigError(f"ring_bytes is {ring_bytes}: it cannot be pinned ({exc}); pass less") from None
                undo.callback(self._pinned.close)
                return self._pinned.view

            ring, keep = make_ring(self._c, attached, ring_bytes, dirty_bytes, allocate)
            shapes = {a.number: shape_of(a.group, a.part, a.device) for a in attached}
            tables = {number: self._upload(shape.table) for number, shape in shapes.items()}
            in_place = self._probe() if self._registered_bytes and self._c.mode.maps else None
            if in_place is not None:
                undo.callback(in_place.close)
            self.transport = "ring" if in_place is None else "in_place"
            readers = Pool(READ_THREADS, "kvfs-ring")
            undo.callback(readers.close)
            desk = GpuDesk(
                self._c, appender, reader, self._identity, self._identity.descriptor_bytes(), ring, keep,
                self._codec, device, shapes, tables, Lane(device, save_bytes), Lane(device, load_bytes),
                in_place, readers, self._pinned.address, load_bytes // BATCHES,
            )  # fmt: skip
            undo.callback(desk.loads.close)  # the only lane that warms up
            for number, shape in shapes.items():
                _warm_up(desk, shape, tables[number])
            undo.pop_all()
        return desk

    def _upload(self, data: bytes) -> Memory:
        memory, pinned, stream = self._device.memory(len(data)), self._device.pinned(len(data)), self._device.stream()
        pinned.view[: len(data)] = data
        stream.copy_in(memory.address, pinned.address, len(data))
        stream.record().synchronize()
        pinned.close()
        return memory

    def _probe(self) -> InPlace | None:
        """Registered maps, if the device reads a map of a file in this store right."""
        files, directory = self._c.files, self._c.directory
        if self._c.liveness is None:
            return InPlace(self._device, files, self._registered_bytes)  # nothing may be written: the first load shows
        name = f"probe-{os.urandom(8).hex()}"
        run = directory.sub("run")
        try:
            fd = files.create(name, directory.file_mode, dir_fd=run)
        except OSError:
            return None
        try:
            files.unlink(name, dir_fd=run)
            files.write_all(fd, [os.urandom(PROBE_BYTES)], 0)
            result = probe(self._device, fd, files, PROBE_BYTES)
        except OSError:
            return None
        finally:
            files.close(fd)
        if not result.works:
            log.warning("%s does not read segments in place: %s", self._device.name, result.reason)
            return None
        return InPlace(self._device, files, self._registered_bytes)

    # -- for everybody -----------------------------------------------------------------------

    def warm(self, match: PrefixMatch) -> int:
        """Register the segments of a match ahead of its load; bytes of it that can be read in place now."""
        maps = self._gpu_desk.in_place
        self._device.enter()
        use, ready = Use(), 0
        if maps is not None:
            with self._gpu_desk.reader.held(match) as held:
                for gm in match.groups:
                    runs = plan_runs(gm, held)[0]
                    ends = published(runs)
                    for run in runs:
                        got = maps.stretches(run.held, run.offset, run.span, ends[run.segment], use, register=True)
                        ready += run.span if got is not None else 0
            maps.release(use)
        return ready

    @property
    def _gpu_desk(self) -> GpuDesk:
        assert isinstance(self._desk, GpuDesk)
        return self._desk

    def sweep(self) -> None:
        """Let go of maps whose segments were dropped. Called every second."""
        maps = self._gpu_desk.in_place
        if maps is not None:
            self._device.enter()
            maps.sweep(self._gone)
            maps.work()

    def _gone(self, segment_id: bytes) -> bool:
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
        closed = self._closed
        super().close(timeout)
        if closed or self._pid != os.getpid():
            return
        desk = self._gpu_desk
        desk.readers.close()
        with contextlib.suppress(CudaError):
            self._device.enter()
            for lane in (desk.saves, desk.loads):
                lane.quiet()
                lane.close()
            if desk.in_place is not None:
                desk.in_place.close()
            self._pinned.close()


def _warm_up(desk: GpuDesk, shape: Shape, table: Memory) -> None:
    """Compile and run every kernel once, on no granules."""
    lane = desk.loads
    sheet = lane.sheet(1 << 16)
    work = sheet.put(pack(
        shape, array("q"), scratch=0, unit_ids=0, units=0, flags=0, leaves=0, buffers=table.address
    ))  # fmt: skip
    sheet.send(lane.kernels, work)
    with lane.kernels.use():
        for to_page in (False, True):
            lane.kernels.move(sheet.words(work), shape, to_page=to_page)
        if shape.sums:
            for check in (False, True):
                lane.kernels.sums(sheet.words(work), shape, check=check)
    lane.quiet()
