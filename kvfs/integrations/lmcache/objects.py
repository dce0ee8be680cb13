"""Objects of LMCache in a store: what a store task, a lookup task and a load task do.

Keys and objects are told by their attributes; LMCache is not imported. A task may end while a disk still has a call of
it, and then the memory of its objects belongs to LMCache again. So bytes that a disk may have to be waited for pass
through memory of the adapter, a piece at a time; what the page cache has is loaded straight into the objects.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvfs.errors import ConfigError, KvfsError
from kvfs.integrations.lmcache.kinds import Kind, Kinds, layout_name, log, stored_bytes
from kvfs.integrations.lmcache.locks import Held, Locks
from kvfs.integrations.lmcache.settings import LMCacheSettings
from kvfs.integrations.lmcache.tasks import Task, TaskQueue
from kvfs.namespace import Namespace
from kvfs.pages.chunk_set import members
from kvfs.store import Store, open_store
from kvfs.system.thread_pool import Team

GROUP = "opaque"
PIECE_BYTES = 8 << 20  # copied and stored, or loaded, in one step, unless one object is larger: fits a core's cache
AT_ONCE_BYTES = 128 << 20  # loaded out of the page cache in one step: 10 to 30 ms, after which a task may end
LANES = min(4, os.cpu_count() or 1)  # parts of a store task that are stored in parallel
SLICE_KEYS = 256  # of one match: a load cuts its pieces out of it
SWEEP_SECONDS = 0.25
CLOSE_SECONDS = 10.0


class Stored(NamedTuple):
    """Result of a store task."""

    good: bool = False  # all objects are stored, or another process stores them
    nbytes: int = 0
    keys: tuple[Any, ...] = ()  # those that were not stored before, with their sizes
    sizes: tuple[int, ...] = ()


@dataclass
class Keys:
    """Result of a lookup or load task: which of its ``count`` keys are locked, or have a complete object."""

    count: int
    numbers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Events:
    """What is called when tasks of a kind have ended."""

    store: Callable[[], object]
    lookup: Callable[[], object]
    load: Callable[[], object]


class Objects:
    """Owns the store, the threads and the locks of one adapter. Thread-safe."""

    def __init__(self, settings: LMCacheSettings, events: Events) -> None:
        self._settings = settings
        self.store: Store = open_store(settings.path, capacity=settings.capacity)
        self._kinds = Kinds(self.store, settings)
        self.locks = Locks()
        self._pieces, self._lanes = Pieces(), Lanes()
        self._team = Team(LANES - 1, "kvfs-put")
        threads = settings.threads
        self.stores = TaskQueue[Stored]("store", threads, settings.store_seconds, events.store)
        self.lookups = TaskQueue[Keys]("lookup", 1, settings.load_seconds, events.lookup)
        self.loads = TaskQueue[Keys]("load", threads, settings.load_seconds, events.load)
        self._queues: tuple[TaskQueue[Any], ...] = (self.stores, self.lookups, self.loads)
        self._stop = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="kvfs-deadlines", daemon=True)
        self._sweeper.start()

    # -- tasks -------------------------------------------------------------------------------

    def submit_store(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        self._check(keys, objects)
        return self.stores.submit(lambda task: self._store(task, keys, objects), Stored())

    def submit_lookup(self, keys: Sequence[Any], layouts: Mapping[int, Any]) -> int:
        """``layouts``: object group -> shapes and dtypes of its objects, before a serializer."""
        return self.lookups.submit(lambda task: self._look(task, keys, layouts), Keys(len(keys)))

    def submit_load(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        self._check(keys, objects)
        return self.loads.submit(lambda task: self._load(task, keys, objects), Keys(len(keys)))

    def _check(self, keys: Sequence[Any], objects: Sequence[Any]) -> None:
        if len(keys) != len(objects):
            raise ConfigError(f"{len(objects)} objects for {len(keys)} keys: pass one for each")

    # -- store -------------------------------------------------------------------------------

    def _store(self, task: Task[Stored], keys: Sequence[Any], objects: Sequence[Any]) -> None:
        groups = dict[tuple[str, str, Kind], dict[bytes, int]]()
        with task.alive() as alive:
            if not alive:
                return
            sizes = [_length(obj) for obj in objects]
            for n, key in enumerate(keys):
                kind, names = _kind(objects[n], sizes[n]), _name(key)
                groups.setdefault((key.model_name, key.cache_salt, kind), {}).setdefault(names, n)
        good, new = True, list[int]()
        for (model, salt, kind), numbers in groups.items():
            stored = self._store_kind(task, self._kinds.namespace(model, salt, kind), kind, numbers, objects, sizes)
            if stored is None:
                return
            good &= stored[0]
            new += stored[1]
        value = Stored(good, sum(sizes[n] for n in new), tuple(keys[n] for n in new), tuple(sizes[n] for n in new))
        with task.alive():
            task.value = value

    def _store_kind(
        self, task: Task[Stored], space: Namespace, kind: Kind, numbers: Mapping[bytes, int], objects: Sequence[Any],
        sizes: Sequence[int],
    ) -> tuple[bool, list[int]] | None:  # fmt: skip
        """Store objects of one kind; whether all are stored, and which were not before. None: the task has ended."""
        names = list(numbers)
        pages = space.prompt(keys=names)
        pages.look()
        have = pages.stored[GROUP] | pages.writing[GROUP]
        parts = _parts([name for n, name in enumerate(names) if not have >> n & 1], kind.nbytes)

        def store(share: Iterator[Sequence[bytes]]) -> list[tuple[bool, list[int]] | None]:
            with self._lanes.one() as lane:
                return [self._store_part(task, space, kind, numbers, objects, sizes, part, lane) for part in share]

        share = iter(parts)
        done = [one for some in self._team.each(store, [share] * min(len(parts), LANES)) for one in some]
        if len(done) < len(parts) or None in done:
            return None
        stored = [one for one in done if one is not None]
        return all(good for good, _ in stored), sorted(n for _, new in stored for n in new)

    def _store_part(
        self, task: Task[Stored], space: Namespace, kind: Kind, numbers: Mapping[bytes, int], objects: Sequence[Any],
        sizes: Sequence[int], part: Sequence[bytes], lane: int,
    ) -> tuple[bool, list[int]] | None:  # fmt: skip
        """Store the objects of some names; whether all are stored, and which were not before. None: the task has
        ended."""
        with self._pieces.one(len(part) * kind.nbytes) as piece:
            with task.alive() as alive:
                if not alive:
                    return None
                for n, name in enumerate(part):
                    one, size = piece[n * kind.nbytes : (n + 1) * kind.nbytes], sizes[numbers[name]]
                    _copy(_bytes(objects[numbers[name]])[:size], one)
                    one[size:] = bytes(kind.nbytes - size)  # what another object left there is no part of this one
            done = space.put_keys(part, piece, ttl=self._settings.ttl, lane=lane)
        if done.stored == len(part):
            return True, [numbers[name] for name in part]
        there = space.present_keys(part)
        return not done.declined, [numbers[name] for name, yes in zip(part, there, strict=True) if yes]

    # -- lookup ------------------------------------------------------------------------------

    def _look(self, task: Task[Keys], keys: Sequence[Any], layouts: Mapping[int, Any]) -> None:
        found = list(self._found(keys, layouts))
        with task.alive() as alive:
            if alive:
                self.locks.add((keys[n], held, page) for n, held, page in found)
                task.value.numbers = sorted({n for n, _, _ in found})
                return
        for _, held, _ in found:
            held.match.close()

    def _found(self, keys: Sequence[Any], layouts: Mapping[int, Any]) -> Iterator[tuple[int, Held, int]]:
        """The keys that are stored: number, match, page of the match."""
        tenants = dict[tuple[str, str], list[int]]()
        for n, key in enumerate(keys):
            tenants.setdefault((key.model_name, key.cache_salt), []).append(n)
        told = {_kind_of_arrays(one.shapes, one.dtypes) for one in layouts.values()}
        for (model, salt), left in tenants.items():
            asked = set[Kind]()
            while left:
                kinds = [k for k in (*told, *self._kinds.known(model)) if k not in asked and k.nbytes]
                if not kinds and not (self._kinds.refresh() and set(self._kinds.known(model)) - asked):
                    break
                for kind in kinds:
                    asked.add(kind)
                    here = list(self._in_kind(model, salt, kind, left, keys))
                    yield from here
                    there = {n for n, _, _ in here}
                    left = [n for n in left if n not in there]

    def _in_kind(
        self, model: str, salt: str, kind: Kind, numbers: Sequence[int], keys: Sequence[Any]
    ) -> Iterator[tuple[int, Held, int]]:
        """Of the keys ``numbers`` those with an object of one kind."""
        try:
            space = self._kinds.namespace(model, salt, kind)
        except KvfsError:  # a kind that this store cannot keep: nothing of it is stored
            return
        for first in range(0, len(numbers), SLICE_KEYS):
            mine = numbers[first : first + SLICE_KEYS]
            match = space.prompt(keys=[_name(keys[n]) for n in mine]).select({GROUP: 0}, len(mine))
            there = members(match.group(GROUP).present)
            held = Held(space, kind, match)
            yield from ((mine[page], held, page) for page in there)

    # -- load --------------------------------------------------------------------------------

    def _load(self, task: Task[Keys], keys: Sequence[Any], objects: Sequence[Any]) -> None:
        """Load into the objects that are locked or stored. What one has that is not in the result is undefined."""
        rooms = [_length(obj) for obj in objects]
        layouts = [_layout(obj) for obj in objects]
        by_match = dict[Held, list[tuple[int, int]]]()  # page of the match, number of the key

        def fits(held: Held, n: int) -> bool:
            return held.kind.nbytes <= rooms[n] and held.kind.layout == layouts[n]

        unlocked = list[int]()
        for n, key in enumerate(keys):
            lock = self.locks.of(key)
            if lock is not None and fits(lock[0], n):
                by_match.setdefault(lock[0], []).append((lock[1], n))
            else:
                unlocked.append(n)
        found = list(self._found([keys[n] for n in unlocked], {}))
        for n, held, page in found:
            if fits(held, unlocked[n]):
                by_match.setdefault(held, []).append((page, unlocked[n]))
        try:
            for held, pages in by_match.items():
                for part in _streaks(pages, held.kind.nbytes, AT_ONCE_BYTES):
                    rest = self._load_at_once(task, held, part, objects)
                    for some in _streaks(rest, held.kind.nbytes, PIECE_BYTES):
                        if not self._load_part(task, held, some, objects):
                            return
        finally:
            for _, held, _ in found:
                held.match.close()

    def _load_at_once(
        self, task: Task[Keys], held: Held, part: Sequence[tuple[int, int]], objects: Sequence[Any]
    ) -> Sequence[tuple[int, int]]:
        """Load what the page cache has of consecutive pages of a match straight into the objects; the other pages.

        The task cannot end meanwhile, and need not: nothing waits for a disk."""
        match = held.match.cut(part[0][0], len(part))
        with task.alive() as alive:
            if not alive:
                return part
            buffers = [_bytes(objects[n])[: held.kind.nbytes] for _, n in part]
            good = held.space.get_pages(match, buffers, wait=False)[GROUP]
            task.value.numbers += [n for page, n in part if good >> page & 1]
        return [one for one in part if not good >> one[0] & 1]

    def _load_part(self, task: Task[Keys], held: Held, part: Sequence[tuple[int, int]], objects: Sequence[Any]) -> bool:
        """Load consecutive pages of a match; False if the task has ended."""
        nbytes = held.kind.nbytes
        with task.alive() as alive:
            if not alive:
                return False
        with self._pieces.one(len(part) * nbytes) as piece:
            match = held.match.cut(part[0][0], len(part))
            good = held.space.get_pages(match, piece)[GROUP]
            with task.alive() as alive:
                if not alive:
                    return False
                for at, (page, n) in enumerate(part):
                    if good >> page & 1:
                        _copy(piece[at * nbytes : (at + 1) * nbytes], _bytes(objects[n]))
                        task.value.numbers.append(n)
        return True

    # -- the rest ----------------------------------------------------------------------------

    def delete(self, keys: Sequence[Any]) -> list[tuple[Any, int]]:
        """Remove the objects of keys permanently; those that were stored, with their sizes."""
        found = list(self._found(keys, {}))
        by_match = dict[Held, list[int]]()
        for n, held, _ in found:
            by_match.setdefault(held, []).append(n)
        removed = list[tuple[Any, int]]()
        for held, numbers in by_match.items():
            held.match.close()
            try:
                self.store.purge(held.space, keys=[_name(keys[n]) for n in numbers])
            except KvfsError as exc:
                log.warning("kvfs: %d objects were not deleted: %s", len(numbers), exc)
                continue
            removed += [(keys[n], held.kind.nbytes) for n in numbers]
        return removed

    def close(self) -> None:
        """End all tasks, release all locks, and close the store. May be called again."""
        end = time.monotonic() + CLOSE_SECONDS
        for queue in self._queues:
            queue.close(max(0.0, end - time.monotonic()))
        self._team.close()
        self._stop.set()
        self._sweeper.join()
        self.locks.clear()
        self.store.close()

    def _sweep(self) -> None:
        while not self._stop.wait(SWEEP_SECONDS):
            for queue in self._queues:
                queue.sweep()


class Lanes:
    """Write lanes that are free: each has an active segment, so the same ones are used again and again. Thread-safe."""

    def __init__(self) -> None:
        self._free = list(range(LANES))[::-1]

    @contextmanager
    def one(self) -> Iterator[int]:
        """The lane that was used last of those that no thread uses; the first one if there is none."""
        try:
            lane = self._free.pop()
        except IndexError:
            yield 0
            return
        try:
            yield lane
        finally:
            self._free.append(lane)


class Pieces:
    """Memory through which objects pass, as many pieces as threads use at a time. Thread-safe."""

    def __init__(self) -> None:
        self._free = list[memoryview]()  # the last one used is taken first: it is in a core's cache, and not new

    @contextmanager
    def one(self, nbytes: int) -> Iterator[memoryview]:
        """A piece of at least so many bytes, cut to them; what it holds is of no use."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = memoryview(b"")
        if len(memory) < nbytes:
            memory = memoryview(bytearray(max(nbytes, PIECE_BYTES)))
        try:
            yield memory[:nbytes]
        finally:
            self._free.append(memory)


# -- keys and objects, by their attributes -----------------------------------------------------


def _name(key: Any) -> bytes:
    """What names the page of a key in its namespace, which has the model and the salt."""
    head = f"{int(key.kv_rank)} {int(key.object_group_id)} "
    return head.encode() + bytes(key.chunk_hash)


def _shapes(obj: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    meta = obj.metadata
    if meta.shapes is not None and meta.dtypes is not None:
        return meta.shapes, meta.dtypes
    return [meta.shape], [meta.dtype]


def _layout(obj: Any) -> str:
    return _kind_of_arrays(*_shapes(obj)).layout


def _kind_of_arrays(shapes: Sequence[Any], dtypes: Sequence[Any]) -> Kind:
    return _kind_of(tuple(map(tuple, shapes)), tuple(dtypes))


@functools.lru_cache(256)  # the objects of a task have one layout or a few
def _kind_of(shapes: tuple[Any, ...], dtypes: tuple[Any, ...]) -> Kind:
    return Kind(layout_name(shapes, dtypes), sum(_room(s, t) for s, t in zip(shapes, dtypes, strict=True)))


def _room(shape: Any, dtype: Any) -> int:
    """Bytes of an array."""
    count = 1
    for n in shape:
        count *= int(n)
    return count * int(dtype.itemsize)


def _kind(obj: Any, nbytes: int) -> Kind:
    """The kind under which an object of so many bytes is stored."""
    whole = _kind_of_arrays(*_shapes(obj))
    return whole._replace(nbytes=stored_bytes(nbytes, whole.nbytes))


def _bytes(obj: Any) -> memoryview:
    return memoryview(obj.byte_array).cast("B")


def _length(obj: Any) -> int:
    nbytes = int(obj.get_size())
    if nbytes <= 0:
        raise ConfigError(f"an object has {nbytes} bytes: kvfs stores objects of at least one byte")
    return nbytes


def _parts(names: Sequence[bytes], nbytes: int) -> list[Sequence[bytes]]:
    """Names of objects of ``nbytes`` in parts that fit a piece."""
    step = max(1, PIECE_BYTES // nbytes)
    return [names[first : first + step] for first in range(0, len(names), step)]


def _streaks(pages: Sequence[tuple[int, int]], nbytes: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """(page, number of its key), in streaks of consecutive pages of ``most`` bytes. A page may be wanted twice."""
    step, streak = max(1, most // nbytes), list[tuple[int, int]]()
    for one in sorted(pages):
        if streak and (one[0] != streak[-1][0] + 1 or len(streak) == step):
            yield streak
            streak = []
        streak.append(one)
    if streak:
        yield streak


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy to the beginning of ``target``, which is not shorter, without the interpreter's lock."""
    if source.readonly:
        target[: len(source)] = source
        return
    ctypes.memmove(_address(target), _address(source), len(source))


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
