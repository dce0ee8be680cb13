"""What the Store objects of one directory share in this process. ``kvfs.runtime.registry`` opens and closes it.

The services that read, write, evict and rebuild (``kvfs.runtime.services``) are made when the store is opened. A
process that only inspects the store gets them, and their periodic tasks, with the first call that needs them: their
imports take longer than a whole ``kvfs inspect``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvfs.context import CLOSED, Context, living
from kvfs.directory import config_file, io_mode, root
from kvfs.directory.access_times import AccessTimes
from kvfs.directory.config import Settings
from kvfs.directory.event_log import NOTED_COUNTS
from kvfs.directory.liveness import Liveness
from kvfs.directory.purge_marks import PurgeMarks
from kvfs.directory.root import Directory
from kvfs.directory.shared_counters import SharedCounters
from kvfs.errors import IndexUnavailableError
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.environment import Index
from kvfs.runtime.background import BackgroundScheduler
from kvfs.runtime.background_tasks import PeriodicTask, tasks_of_services, tasks_of_store
from kvfs.runtime.read_only_index import ReadOnlyIndex
from kvfs.segments.open_segments import SegmentFiles
from kvfs.system import descriptors
from kvfs.system.files import Files
from kvfs.types import Verify

if TYPE_CHECKING:
    from kvfs.maintenance.rebuild import Report
    from kvfs.remote.bucket_process import BucketProcess
    from kvfs.remote.kept_bucket import KeptBucket
    from kvfs.runtime.services import StoreServices

log = logging.getLogger("kvfs")
READY_SECONDS = 5.0  # how long open waits for a rebuild, by this process or another; after that lookups miss meanwhile
READY_POLL_SECONDS = 0.02
BUCKET_SECONDS = 2.0  # how long close waits for the bucket process, which may wait for the bucket
NOTED_SECONDS = 60.0  # within which a change of settings that another process has noted is not noted again
CLOSE_SECONDS = 10.0  # how long close waits for transfers, for a rebuild to notice that it is cancelled, for a task
MOMENT_SECONDS = 0.1  # for transfers after that: those that no disk holds up end at once
THREADS_MAX = 4  # default of OpenOptions.threads, where there are as many cores


@dataclass(frozen=True)
class OpenOptions:
    """How this process opens a store."""

    path: str
    files: Files
    read_only: bool = False
    verify: Verify | None = None  # None: ALWAYS, or what the store is open with already
    threads: int | None = None  # of one ``get``; None: one per core, at most THREADS_MAX, or as it is open already
    declines: str = ""  # why puts decline, if they do; see Context
    inspect_only: bool = False  # ``counted=False``: no services until a call needs them


class OpenStore:
    """Owns the parts of one open directory: its context, background tasks and, once needed, its services.

    The services do the work; the registry decides when an OpenStore is started, restarted in a forked child and closed.
    """

    disabled = False
    c: Context

    def __init__(self, options: OpenOptions) -> None:
        self.path = os.path.abspath(options.path)
        self.read_only = options.read_only
        self.users = 0  # Store objects
        self.forgotten: list[None] = []  # one entry for each Store that was garbage-collected without close()
        self.notes_counts = True  # False: another process is told of its counts, and notes them
        self._noted: dict[str, int] = {}  # counts at the last call of _note_counts
        self.on_forgotten: Callable[[], None] = lambda: None  # called by the background thread in every tick
        self.rebuilt: Report | None = None
        self._bucket_process: BucketProcess | None = None
        self._kept_bucket: KeptBucket | None = None
        self._options = options
        self._files = options.files
        self._closing = False
        self._rebuilder: threading.Thread | None = None
        self._rebuild_failed = False
        self._making = threading.Lock()
        self._services: StoreServices | None = None
        self._background: BackgroundScheduler | None = None

    @property
    def settings(self) -> Settings:
        """The settings in force; they change with kvfs.toml."""
        return self.c.settings

    def start(self, inherited: Directory | None = None) -> None:
        """Open the directory, its index and the background thread. ``inherited``: the parent's, in a forked child."""
        with contextlib.ExitStack() as undo, root.translate_os_errors(self.path):
            self._make_context(undo, inherited)
            if not self.c.inspect_only:
                if not self.read_only:
                    self.c.shared_counters.reserve()
                self.services()
            self._become_ready()
            tasks = tasks_of_store(
                self.c,
                release=self._release_forgotten,
                expire_holds=self._expire_holds,
                follow_settings=self._follow_settings,
                follow_index=self._read_only_index.follow,
                rebuild=self._rebuild_quietly,
            )
            if self._services is not None:
                if inherited is not None:
                    self._services.listen()
                tasks += self._service_tasks(self._services)
            self._background = BackgroundScheduler(self.c, tasks)
            undo.pop_all()

    def _make_context(self, undo: contextlib.ExitStack, inherited: Directory | None) -> None:
        """What every open store needs; ``undo`` closes it if a later step fails."""
        files, options = self._files, self._options
        # the path may name another store by now
        here = None if inherited is None else inherited.root
        directory = Directory(self.path, files, read_only=self.read_only, root=here)
        undo.callback(directory.close)
        store_id = directory.store_id()
        loaded = config_file.load(directory)
        if inherited is None:
            io_mode.check(self.path, loaded, files, read_only=self.read_only)
        root.check_layout(directory)
        if not self.read_only:
            root.tighten(directory)
        liveness = None if self.read_only else Liveness(directory, loaded.process_files_bytes)
        if liveness is not None:
            undo.callback(liveness.close)
            liveness.refuse_foreign_kernel()
        self.directory, self._follower = directory, config_file.Follower(directory, loaded)
        index = Index(directory, loaded.index_bytes)

        def close_index() -> None:
            current = getattr(self, "c", None)  # its index may be another one by then; no context after an interrupt
            (current.index if current is not None and current.directory is directory else index).close()

        undo.callback(close_index)
        context = Context(
            directory, files, loaded, store_id, index, liveness, AccessTimes(directory),
            SegmentFiles(directory, io_mode.of(loaded)), PurgeMarks(directory), options.verify or Verify.ALWAYS,
            options.threads or min(THREADS_MAX, os.cpu_count() or 1),
            SharedCounters(directory, loaded.namespace_slot_bytes), options.declines,
            options.inspect_only if inherited is None else self.c.inspect_only,
        )  # fmt: skip
        if inherited is not None:
            self.c.__dict__.update(context.__dict__)  # the child's namespaces refer to this context
        else:
            self.c = context
        self._read_only_index = ReadOnlyIndex(self.c, lambda: self.services().private_index(lambda: self._closing))

    # -- services ----------------------------------------------------------------------------

    def services(self) -> StoreServices:
        """What reads, writes and evicts. With the first call this process takes part in the upkeep of the store."""
        if self._services is None:
            with self._making:
                if self._services is None:
                    from kvfs.runtime.services import StoreServices

                    made = StoreServices(self.c, self._wake)
                    if self._background is not None:
                        self._background.add(self._service_tasks(made))
                    self._services = made
        return self._services

    def bucket_process(self) -> BucketProcess | None:
        """What asks the bucket of the settings; it is made with the first call, its child when it is needed. None if
        the store is being closed, or where there is no thread or descriptor left."""
        from kvfs.remote.bucket_process import BucketProcess

        with self._making:
            if self._bucket_process is None and not self._closing:
                try:
                    self._bucket_process = BucketProcess(self.c)
                except (OSError, RuntimeError):
                    self.c.counters.add("bucket_processes_lost")
            return self._bucket_process

    def kept_bucket(self) -> KeptBucket:
        """What asks the bucket in this process: pushes and pulls of the callers."""
        with self._making:
            if self._kept_bucket is None:
                from kvfs.remote.kept_bucket import KeptBucket

                self._kept_bucket = KeptBucket()
            return self._kept_bucket

    @property
    def background(self) -> BackgroundScheduler:
        assert self._background is not None
        return self._background

    def _wake(self, task: str) -> None:
        self.background.wake(task)

    # -- readiness ---------------------------------------------------------------------------

    def _become_ready(self) -> None:
        deadline = self.c.files.monotonic() + READY_SECONDS
        if self.is_ready():
            return
        if self.read_only:
            self._read_only_index.open_own()
            return
        self._rebuilder = threading.Thread(target=self._rebuild_quietly, name="kvfs-rebuild", daemon=True)
        self._rebuilder.start()
        self._rebuilder.join(max(0.0, deadline - self.c.files.monotonic()))
        while not self._rebuild_failed and self.c.files.monotonic() < deadline and self._may_become_ready():
            self.c.files.sleep(READY_POLL_SECONDS)  # another process builds it

    def _may_become_ready(self) -> bool:
        """Whether the index is missing, or does not answer: another process may be making one current."""
        try:
            self.c.index.read(lambda s: None, COMMIT_SECONDS)
        except IndexUnavailableError as exc:
            return str(exc) in ("rebuilding", "timeout")
        return False

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
        """Build a new index if no index may be trusted. One that does not answer in time may be intact."""
        if self.read_only or not self.c.index.is_missing(COMMIT_SECONDS):
            return
        report = self.services().rebuild(lambda: self._closing)
        if report is not None:
            self.rebuilt = report
            self.c.counters.add("rebuilds")
            if report.segments or report.unreadable_segments:  # else the store is new
                self.c.events.add("index rebuilt", segments=report.segments, pages=report.pages)
            with contextlib.suppress(IndexUnavailableError):
                rows = self.c.index.read(lambda s: s.segments(), COMMIT_SECONDS)
                self.c.access_times.sweep({row.segment_id for _, row in rows})
            if self.c.verify is Verify.OFF and (report.segments or report.unreadable_segments):
                self.c.verify = Verify.FIRST  # unchecked reads never follow an unclean stop

    # -- periodic tasks ----------------------------------------------------------------------

    def _service_tasks(self, services: StoreServices) -> list[PeriodicTask]:
        return tasks_of_services(services, self.c, self._publish, self._note_counts)

    def _release_forgotten(self) -> None:
        self.on_forgotten()

    def _follow_settings(self) -> None:
        found = self._follower.look()
        if found == config_file.REFUSED:
            self.c.counters.add("settings_refused")
        elif found == config_file.NEW:
            self.c.counters.add("settings_taken_up")
            self._note_settings(self.c.settings, self._follower.settings)
            self.c.settings = self._follower.settings
            if self._services is not None:
                self._services.evictor.budget.segment_bytes = self.c.settings.segment_bytes
            self.background.wake("evict")

    def _note_settings(self, before: Settings, now: Settings) -> None:
        """Note the change, unless another process has: all of them notice it at about the same time."""
        changed = [f.name for f in fields(now) if getattr(before, f.name) != getattr(now, f.name)]
        details = {name: f"{getattr(before, name)} -> {getattr(now, name)}" for name in changed}
        if details:
            self.c.events.add_once("settings changed", NOTED_SECONDS, **details)

    def _note_counts(self) -> None:
        """Note what happened often, or by itself, once for the time since the last call."""
        if not self.notes_counts:
            return
        counts = self.c.counters.snapshot()
        gained = {what: counts.get(name, 0) - self._noted.get(name, 0) for name, what in NOTED_COUNTS.items()}
        self._noted = counts
        for what, n in gained.items():
            if n:
                self.c.events.add(what, count=n)

    @property
    def watching(self) -> str:
        """How this process learns what others change: by "inotify", or by "polling"."""
        return "inotify" if self._services is not None and self._services.watch.works else "polling"

    def _publish(self) -> None:
        """Add what this process has counted to the sums of the store, unless it only inspects the store."""
        if not self.c.inspect_only and self.c.liveness is not None:
            self.c.liveness.say_watching(self.watching)
            self.c.shared_counters.add(self.c.counters.snapshot(), self.c.counters.by_namespace())

    def _expire_holds(self) -> None:
        descriptors.sweep()
        self.c.segments.sweep()
        now = self._files.monotonic()
        for hold in living(self.c.holds):
            if hold.expires_at <= now:
                hold.close()
        for io in living(self.c.attached):
            io.sweep()
        self.c.pinned.say()

    # -- close and fork ----------------------------------------------------------------------

    def end_transfers(self) -> None:
        """End the transfers of all engines within CLOSE_SECONDS: what hangs for one of them would hang for each."""
        end = self._files.monotonic() + CLOSE_SECONDS
        for io in living(self.c.attached):
            io.close(max(MOMENT_SECONDS, end - self._files.monotonic()))

    def leave(self) -> None:
        """The caller of the close goes on although the disk hangs: every later call on the store is declined."""
        self.c.declines = CLOSED
        self.c.counters.add("closes_left")
        log.warning(
            "%s: the disk hangs: the close goes on in a thread when it answers; if the process ends first, the next "
            "open may rebuild the index", self.path,
        )  # fmt: skip

    def close(self) -> None:
        self._closing = True  # a rebuild in progress ends; it must not outlive the descriptors that it uses
        if self._services is not None:
            self._services.drops.cancel()
        with self._making:
            bucket_process, kept_bucket = self._bucket_process, self._kept_bucket
        if bucket_process is not None:
            bucket_process.close(BUCKET_SECONDS)
        if kept_bucket is not None:
            kept_bucket.forget()
        self.end_transfers()
        self.c.calls.join(CLOSE_SECONDS)
        self.background.stop()
        if self._services is not None:
            self._services.stop()
        if self._rebuilder is not None:
            self._rebuilder.join(CLOSE_SECONDS)
        free = self._services is None or self._services.close()
        for hold in living(self.c.holds):
            hold.close()
        self.c.declines = CLOSED
        self.c.segments.close()
        self.c.index.close()
        self.c.access_times.close()
        self._note_counts()
        if not self.c.inspect_only:
            self.c.shared_counters.add(self.c.counters.snapshot(), self.c.counters.by_namespace())
        if not free:
            log.warning("%s: a write hangs; this process owns the segments that it writes to until it ends", self.path)
            return
        if self.c.liveness is not None:
            self.c.liveness.close()
        # a thread that the deadlines above have left uses numbers of descriptors, which may be other files' once closed
        if not (self.background.is_running() or (self._rebuilder is not None and self._rebuilder.is_alive())):
            self.directory.close()

    def release_in_child(self) -> Directory:
        """After a fork: drop what was inherited, without touching the parent's files, except the returned directory."""
        for hold in living(self.c.holds):
            hold.detach()
        self.c.segments.abandon()
        self.c.access_times.abandon()
        if self._services is not None:
            self._services.abandon()
        self.c.index.abandon()
        self._rebuilder = None
        self._bucket_process = None
        self._kept_bucket = None
        return self.directory

    def restart_in_child(self) -> None:
        """After a fork: open the store again as a process with its own identity, locks, threads and active segments."""
        inherited = self.release_in_child()
        self._making = threading.Lock()
        self.start(inherited)
        inherited.close()
