"""What the Store objects of one directory share in a process. ``kvfs.runtime.registry`` makes, restarts and closes it.

What reads, writes, evicts and rebuilds is ``kvfs.runtime.services``. It is made when the store is opened, but for those
who only look: they get it, and the upkeep that comes with it, with the first call that needs it. Its imports would
take a command longer than all that it does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvfs.context import COMMIT_SECONDS, Context, living
from kvfs.directory import config_file, io_mode, root
from kvfs.directory.access_times import AccessTimes
from kvfs.directory.config import Settings
from kvfs.directory.liveness import HEARTBEAT_SECONDS, Liveness
from kvfs.directory.purge_marks import PurgeMarks
from kvfs.directory.root import Directory
from kvfs.directory.shared_counters import EVERY_SECONDS, SharedCounters
from kvfs.directory.watch import HOLDS, SETTINGS
from kvfs.errors import IndexUnavailableError
from kvfs.index.environment import Index
from kvfs.runtime.background import BackgroundScheduler, PeriodicTask
from kvfs.runtime.read_only_index import ReadOnlyIndex
from kvfs.segments.open_segments import SegmentFiles
from kvfs.system import descriptors
from kvfs.system.files import Files
from kvfs.types import Verify

if TYPE_CHECKING:
    from kvfs.bundles.drop_folder import DropFolder
    from kvfs.directory.watch import Watch
    from kvfs.eviction.evictor import Evictor
    from kvfs.maintenance.pins import Pins
    from kvfs.maintenance.purge import Purger
    from kvfs.maintenance.rebuild import Report
    from kvfs.read.reader import Reader
    from kvfs.runtime.services import StoreServices
    from kvfs.write.active_segments import ActiveSegments
    from kvfs.write.appender import Appender

READY_SECONDS = 5.0  # how long open waits for a rebuild, its own or another's; a large one goes on beside serving
READY_POLL_SECONDS = 0.02
log = logging.getLogger("kvfs")
CLOSE_SECONDS = 10.0


class OpenStore:
    """Everything that the Store objects of one directory share in this process."""

    disabled = False

    def __init__(
        self, path: str, read_only: bool, verify: Verify | None, threads: int | None, files: Files, declines: str = "",
        *, inspect_only: bool = False,
    ) -> None:  # fmt: skip
        self.path = os.path.abspath(path)
        self.read_only = read_only
        self.users = 0
        self.abandoned: list[None] = []  # one for each Store that was forgotten and not closed
        self.on_abandoned: Callable[[OpenStore], None] = lambda core: None  # called by its thread, now and then
        self.rebuilt: Report | None = None
        self._files = files
        self._declines = declines
        self._verify = verify or Verify.ALWAYS
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._closing = False
        self._rebuilder: threading.Thread | None = None
        self._rebuild_failed = False
        self._making = threading.Lock()
        self._services: StoreServices | None = None
        self._background: BackgroundScheduler | None = None
        self._start(inspect_only=inspect_only)

    c: Context

    @property
    def settings(self) -> Settings:
        """Those in force: they change with kvfs.toml."""
        return self.c.settings

    def _start(self, *, inspect_only: bool, again: bool = False) -> None:
        with contextlib.ExitStack() as undo, root.translate_os_errors(self.path):
            self._make_parts(undo, self.c.inspect_only if again else inspect_only, again=again)
            if not inspect_only:
                self.work()
            self._become_ready()
            tasks = self._tasks()
            if self._services is not None:
                if again:
                    self._services.listen()
                tasks += self._upkeep(self._services)
            self._background = BackgroundScheduler(self.c, tasks)
            undo.pop_all()

    def _make_parts(self, undo: contextlib.ExitStack, inspect_only: bool, *, again: bool) -> None:
        """Everything that an open store needs; ``undo`` takes it away if some of it cannot be had."""
        files = self._files
        directory = Directory(self.path, files, read_only=self.read_only)
        undo.callback(directory.close)
        store_id = directory.store_id()
        loaded = config_file.load(directory)
        io_mode.check(self.path, loaded, files, read_only=self.read_only)
        root.check_layout(directory)
        if not self.read_only:
            root.tighten(directory)
        liveness = None if self.read_only else Liveness(directory)
        if liveness is not None:
            undo.callback(liveness.close)
            liveness.refuse_foreign_kernel()
        self.directory, self._follower = directory, config_file.Follower(directory, loaded)
        index = Index(directory, loaded.index_bytes)

        def close_index() -> None:
            current = getattr(self, "c", None)  # which may have another one by then; or none, after an interrupt
            (current.index if current is not None and current.directory is directory else index).close()

        undo.callback(close_index)
        context = Context(
            directory, files, loaded, store_id, index, liveness, AccessTimes(directory),
            SegmentFiles(directory, io_mode.of(loaded)), PurgeMarks(directory), self._verify, self._threads,
            SharedCounters(directory), self._declines, inspect_only,
        )  # fmt: skip
        if again:
            self.c.__dict__.update(context.__dict__)  # a forked child: its namespaces go on with the new parts
        else:
            self.c = context
        self._guest = ReadOnlyIndex(self.c, lambda: self.work().private_index(lambda: self._closing))

    # -- what reads, writes and evicts -------------------------------------------------------

    def work(self) -> StoreServices:
        """The workshop. Whoever only looked takes part in the upkeep from now on."""
        if self._services is None:
            with self._making:
                if self._services is None:
                    from kvfs.runtime.services import StoreServices

                    made = StoreServices(self.c, self._wake)
                    if self._background is not None:
                        self._background.add(self._upkeep(made))
                    self._services = made
        return self._services

    @property
    def background(self) -> BackgroundScheduler:
        assert self._background is not None
        return self._background

    def _wake(self, task: str) -> None:
        self.background.wake(task)

    @property
    def reader(self) -> Reader:
        return self.work().reader

    @property
    def evictor(self) -> Evictor:
        return self.work().evictor

    @property
    def active(self) -> ActiveSegments:
        return self.work().active

    @property
    def appender(self) -> Appender:
        return self.work().appender

    @property
    def pins(self) -> Pins:
        return self.work().pins

    @property
    def purger(self) -> Purger:
        return self.work().purger

    @property
    def drops(self) -> DropFolder:
        return self.work().drops

    @property
    def watch(self) -> Watch:
        return self.work().watch

    # -- readiness ---------------------------------------------------------------------------

    def _become_ready(self) -> None:
        if self.is_ready():
            return
        if self.read_only:
            self._guest.open_own()
            return
        self._rebuilder = threading.Thread(target=self._rebuild_quietly, name="kvfs-rebuild", daemon=True)
        deadline = self.c.files.monotonic() + READY_SECONDS
        self._rebuilder.start()
        self._rebuilder.join(READY_SECONDS)
        while (
            not self._rebuild_failed
            and self.c.files.monotonic() < deadline
            and self.c.index.is_missing(READY_POLL_SECONDS)
        ):
            self.c.files.sleep(READY_POLL_SECONDS)  # another process builds it

    def is_ready(self) -> bool:
        try:
            self.c.index.read(lambda s: None, COMMIT_SECONDS)
        except IndexUnavailableError:
            return False
        return True

    def _rebuild_quietly(self) -> None:
        try:
            self.rebuild_if_needed()
        except (OSError, IndexUnavailableError) as exc:
            self._rebuild_failed = True
            self.c.counters.add("rebuild_failed")
            self.c.counters.add(f"rebuild_failed_{type(exc).__name__.lower()}")

    def rebuild_if_needed(self) -> None:
        """Build a new index if there is none to trust. One that cannot be asked now may be as good as ever."""
        if self.read_only or not self.c.index.is_missing(COMMIT_SECONDS):
            return
        report = self.work().rebuild(lambda: self._closing)
        if report is not None:
            self.rebuilt = report
            self.c.counters.add("rebuilds")
            with contextlib.suppress(IndexUnavailableError):
                rows = self.c.index.read(lambda s: s.segments(), COMMIT_SECONDS)
                self.c.access_times.sweep({row.segment_id for _, row in rows})
            if self.c.verify is Verify.OFF and (report.segments or report.unreadable_segments):
                self.c.verify = Verify.FIRST  # unchecked reads never follow an unclean stop

    # -- upkeep ------------------------------------------------------------------------------

    def _tasks(self) -> list[PeriodicTask]:
        tasks = [
            PeriodicTask("leave", 0.0, self._leave),
            PeriodicTask(HOLDS, 1.0, self._expire_holds),
            PeriodicTask(SETTINGS, 2.0, self._follow_settings),
        ]
        if self.read_only:
            tasks.append(PeriodicTask("follow", 1.0, self._guest.follow))
        if self.c.liveness is not None:
            tasks += [
                PeriodicTask("rebuild", 1.0, self._rebuild_quietly),
                PeriodicTask("heartbeat", HEARTBEAT_SECONDS, self.c.liveness.beat),
            ]
        return tasks

    def _upkeep(self, services: StoreServices) -> list[PeriodicTask]:
        """What those who only look leave to others."""
        return services.tasks() + ([] if self.read_only else [PeriodicTask("counters", EVERY_SECONDS, self._publish)])

    def _leave(self) -> None:
        self.on_abandoned(self)

    def _follow_settings(self) -> None:
        found = self._follower.look()
        if found == config_file.REFUSED:
            self.c.counters.add("settings_refused")
        elif found == config_file.NEW:
            self.c.counters.add("settings_taken_up")
            self.c.settings = self._follower.settings
            if self._services is not None:
                self._services.evictor.budget.segment_bytes = self.c.settings.segment_bytes
            self.background.wake("evict")

    @property
    def watching(self) -> str:
        """How this process learns what others change: by "inotify", or by "polling"."""
        return "inotify" if self._services is not None and self._services.watch.works else "polling"

    def _publish(self) -> None:
        """Add what this process has counted to the sums of the store, unless it only inspects the store."""
        if not self.c.inspect_only and self.c.liveness is not None:
            self.c.liveness.say_watching(self.watching)
            self.c.shared_counters.add(self.c.counters.snapshot())

    def _expire_holds(self) -> None:
        descriptors.sweep()
        now = self._files.monotonic()
        for hold in living(self.c.holds):
            if hold.expires_at <= now:
                hold.release()
        for io in living(self.c.attached):
            io.sweep()
        self.c.pinned.say()

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        self._closing = True  # a rebuild in progress ends; it must not outlive the descriptors that it uses
        if self._services is not None:
            self._services.drops.cancel()
        for io in living(self.c.attached):
            io.close()
        self.background.stop()
        if self._services is not None:
            self._services.stop()
        if self._rebuilder is not None:
            self._rebuilder.join(CLOSE_SECONDS)
        free = self._services is None or self._services.close()
        for hold in living(self.c.holds):
            hold.release()
        self.c.segments.close()
        self.c.index.close()
        self.c.access_times.close()
        if not self.c.inspect_only:
            self.c.shared_counters.add(self.c.counters.snapshot())
        if not free:
            log.warning("%s: a write hangs; what it writes to stays this process's until it ends", self.path)
            return
        if self.c.liveness is not None:
            self.c.liveness.close()
        self.directory.close()

    def release_in_child(self) -> Directory:
        """After a fork: nothing of the parent's is touched any more, but for the directory that is returned."""
        for hold in living(self.c.holds):
            hold.detach()
        self.c.segments.abandon()
        self.c.access_times.abandon()
        if self._services is not None:
            self._services.abandon()
        if self.c.liveness is not None:
            self.c.liveness.forget()
        self.c.index.abandon()
        self._rebuilder = None
        return self.directory

    def restart_in_child(self) -> None:
        """After a fork: this process is somebody else, with its own locks, threads and active segments."""
        inherited = self.release_in_child()
        self._making = threading.Lock()
        self._start(inspect_only=self._services is None, again=True)
        inherited.close()
