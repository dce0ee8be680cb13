"""What runs in the background of an open store, and how often."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvfs.context import Context
from kvfs.directory.access_times import FLUSH_SECONDS
from kvfs.directory.liveness import HEARTBEAT_SECONDS
from kvfs.directory.shared_counters import EVERY_SECONDS
from kvfs.directory.watch import DROPS, HOLDS, SETTINGS
from kvfs.remote.rooms import REST_SECONDS, ROOMS

if TYPE_CHECKING:
    from kvfs.runtime.services import StoreServices

EVENTS_SECONDS = 60.0  # evictions, say, are noted as one event for this time
STATUS_SECONDS = 1.0  # between two updates of what a view of the processes shows; one takes some 30 us
WATCH_AFTER_SECONDS = 1.0  # a process that opens a store only for a moment starts no watch, and adopts no bundle


class PeriodicTask(NamedTuple):
    """What to run every ``every`` seconds, for the first time after ``after`` seconds."""

    name: str
    every: float
    run: Callable[[], None]
    after: float = 0.0


def tasks_of_store(
    context: Context,
    *,
    release: Callable[[], None],
    expire_holds: Callable[[], None],
    follow_settings: Callable[[], None],
    follow_index: Callable[[], None],
    rebuild: Callable[[], None],
) -> list[PeriodicTask]:
    """Of every open store, also of a process that only inspects it."""
    tasks = [
        PeriodicTask("release", 0.0, release),
        PeriodicTask(HOLDS, 1.0, expire_holds),
        PeriodicTask(SETTINGS, 2.0, follow_settings),
    ]
    if context.directory.read_only:
        tasks.append(PeriodicTask("follow", 1.0, follow_index))
    if context.liveness is not None:
        tasks += [
            PeriodicTask("rebuild", 1.0, rebuild),
            PeriodicTask("heartbeat", HEARTBEAT_SECONDS, context.liveness.beat),
        ]
    return tasks


def tasks_of_services(
    services: StoreServices, context: Context, publish: Callable[[], None], note_counts: Callable[[], None]
) -> list[PeriodicTask]:
    """Of a store with services.

    ``publish`` adds the counts of this process to those of the store, ``note_counts`` what matters of them to the log.
    """
    watch = PeriodicTask("watch", 30.0, services.watch.keep, after=WATCH_AFTER_SECONDS)
    if context.directory.read_only:
        return [watch]

    def say_counts() -> None:
        if context.liveness is not None and not context.inspect_only:
            context.liveness.say_counts(context.counters.snapshot())

    return [
        watch,
        PeriodicTask("stamps", FLUSH_SECONDS, context.access_times.flush),
        PeriodicTask("evict", 0.25, services.evictor.background),
        PeriodicTask("expire", 5.0, services.evictor.expire),
        PeriodicTask("missing", 1.0, services.evictor.drop_missing, after=1.0),
        PeriodicTask("unknown", 60.0, services.evictor.charge_unknown, after=5.0),
        PeriodicTask("sync", 1.0, services.sync),
        PeriodicTask("tidy", 2.0, services.active.tidy),
        PeriodicTask("sweep", 0.5, services.evictor.sweep),
        PeriodicTask("purge", 5.0, services.purger.resume),
        PeriodicTask("slack", 5.0, context.index.keep_slack),
        PeriodicTask(DROPS, 1.0, services.drops.look, after=WATCH_AFTER_SECONDS),
        PeriodicTask("counters", EVERY_SECONDS, publish),
        PeriodicTask("events", EVENTS_SECONDS, note_counts, after=EVENTS_SECONDS),
        PeriodicTask("status", STATUS_SECONDS, say_counts),
        PeriodicTask("rooms", REST_SECONDS / 2, partial(ROOMS.rest, REST_SECONDS), after=REST_SECONDS),
    ]
