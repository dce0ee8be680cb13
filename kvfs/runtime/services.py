"""The services of an open store: what reads, writes, evicts and rebuilds. A process that only inspects has none."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable

import lmdb

from kvfs.bundles.drop_folder import DropFolder
from kvfs.context import Context
from kvfs.directory.watch import DROPS, Heard, Watch
from kvfs.eviction.evictor import Evictor
from kvfs.index.environment import Index
from kvfs.maintenance.pins import Pins
from kvfs.maintenance.purge import Purger
from kvfs.maintenance.rebuild import Report, build, rebuild
from kvfs.read.reader import Reader
from kvfs.remote.rooms import ROOMS
from kvfs.write.active_segments import ActiveSegments
from kvfs.write.appender import Appender
from kvfs.write.relocate import Relocator


class StoreServices:
    """Owns the services of one open store. ``background_tasks.py`` lists what of them runs periodically."""

    def __init__(self, context: Context, wake: Callable[[str], None]) -> None:
        self._c = context
        self._wake = wake
        self.reader = Reader(context)
        self.evictor = Evictor(context)
        self.active = ActiveSegments(context, self.evictor.make_room)
        self.appender = Appender(context, self.active, self.evictor.budget.stored)
        self.evictor.relocator = Relocator(context, self.appender)
        self.pins = Pins(context, self.active, self.evictor.relocator, self.evictor.make_room_locked)
        self.evictor.victims.pinned = self.pins.segments
        self.purger = Purger(context, self.evictor, self.active, self.pins)
        self.listen()

    def listen(self) -> None:
        """Begin to notice what other processes change; again in a forked child."""
        self.drops = DropFolder(self._c, self.active)
        self.watch = Watch(self._c.directory, self._heard, adopts=not self._c.directory.read_only)

    def _heard(self, heard: Heard) -> None:
        if heard.task == DROPS and heard.renamed:
            self.drops.arrived(heard.name)
        self._wake(heard.task)

    # -- a new index -------------------------------------------------------------------------

    def rebuild(self, cancelled: Callable[[], bool]) -> Report | None:
        """Build an index and make it current; None if another process is rebuilding or has already finished."""
        c = self._c
        assert c.liveness is not None
        # a segment that this process may be appending to must not be taken over either
        alone = not c.liveness.others() and not self.active.active_numbers()
        return rebuild(c.directory, c.index, c.settings, c.store_id, alone=alone, cancelled=cancelled)

    def private_index(self, cancelled: Callable[[], bool]) -> Index:
        """An index outside the store. IndexUnavailableError once ``cancelled()`` is true."""
        c = self._c
        with tempfile.TemporaryFile() as file:  # has no name: it vanishes with the process, however that ends
            try:
                build(c.directory, file.fileno(), c.settings, c.store_id, alone=False, cancelled=cancelled)
                index = Index(c.directory, c.settings.index_bytes, private=True)
                index.open_private(file.fileno())
            except lmdb.Error as exc:  # no space for it, for example
                raise OSError(errno.EIO, f"no private index can be made there ({exc})", tempfile.gettempdir()) from None
        return index

    def sync(self) -> None:
        if self._c.settings.sync == "batch":
            self.active.sync_dirty()
            self.active.sync_for_the_dead()

    def stop(self) -> None:
        """End the threads of the watch and the drop folder. The scheduler has stopped."""
        self.watch.stop()
        self.drops.join()

    def close(self) -> bool:
        """False if a write hangs: this process then keeps its segment."""
        free = self._c.directory.read_only or self.active.close()
        self.reader.close()
        ROOMS.rest()  # no background does it any more, and the process may go on
        return free

    def abandon(self) -> None:
        """In a forked child: drop what was inherited, without touching the parent's files."""
        self.active.abandon()
        self.evictor.reclaimer.abandon()
        self.reader.abandon()
