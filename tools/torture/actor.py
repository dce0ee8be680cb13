"""One process of a torture run: ``python -m tools.torture.actor ROLE FOLDER NAME SEED [key=value ...]``.

After every operation it writes its counts to ``FOLDER/status/NAME``, so that they survive its death. What it was
promised goes to files of FOLDER, one line each: ``acks`` (prompts whose pages were all published: they must be served),
``pinned`` (they must be served although others are evicted) and ``purged`` (they must never be served again).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import kvfs
from tools.torture.case import (
    CLOCK_SECONDS_MAX,
    HUGE_BYTES,
    HUGE_CHUNKS_MAX,
    PROMPTS,
    JumpingClock,
    get,
    namespaces,
    open_store,
    page_bytes,
    put,
)
from tools.torture.judge import Judge
from tools.torture.mounter import mounter

CHUNKS_MAX = 20
HELD_MAX = 6  # views at a time: the segments of held views cannot be reclaimed
FORKS = (None, 3, 7, 12)
STATUS_BYTES = 1 << 16
REPORT_SECONDS = 0.05  # between two reports of a process that has found nothing
HOT, BUNDLED = range(1000, 1012), range(5000, 5008)  # families that are used all the time; of the bundle
GC_SHARE = 0.6  # of the capacity: a witness makes room first, so that what it reads is not evicted afterwards
PINS_MAX = 8  # of a store: each takes at least a segment of its own
BATCH_SECONDS = 3.0  # after which level batch has synced

Spaces = Sequence[kvfs.Namespace]


class Actor:
    """The state of this process."""

    def __init__(self, folder: Path, name: str, seed: int, options: dict[str, str]) -> None:
        self.folder = folder
        self.options = options
        self.judge = Judge(context=f"{name} (seed {seed}): ", stops=True, fault=options.get("fault", "no fault"))
        self.judge.delayed = self._stopped
        self.random = random.Random(seed)
        self.first = int(options.get("first", "0"))
        self.families = int(options.get("families", "60"))
        self.settings = {"capacity": options.get("capacity", "512MiB"), "sync": options.get("sync", "cache")}
        self.settings["mode"] = options.get("mode", "cache")
        self.strict = options.get("strict", "1") == "1"  # every acknowledged prompt must be served
        self.strict_pins = options.get("strict_pins", "1") == "1"
        self.mixed = options.get("pages") == "mixed"
        clock = options.get("clock", "right")
        self.clock = JumpingClock(folder / "clock" if clock == "shared" else None) if clock != "right" else None
        self._jumps = clock == "own"
        self.ending = False  # Python drops exceptions of signal handlers in fork hooks and in finalizers
        self._status = os.open(folder / "status" / name, os.O_CREAT | os.O_RDWR, 0o666)
        self._stops = folder / "status" / f"{name}.stopped"
        self._reported = 0.0

    def _where(self) -> tuple[Path, str]:
        """Where the store is now and its id: the file ``where`` says so if the store moves."""
        where = self.folder / "where"
        if not where.exists():
            return Path(self.options.get("store", self.folder / "store")), ""
        path, store_id = where.read_text().split("\n")
        return Path(path), store_id

    def _stopped(self) -> float:
        """Seconds for which this process was stopped, in sum."""
        try:
            return float(self._stops.read_text() or "0")
        except (OSError, ValueError):
            return 0.0

    def report(self, *, now: bool = True) -> None:
        """Write the counts down. ``now=False``: unless that was done a moment ago and nothing was found since."""
        if not now and not self.judge.failed and time.monotonic() - self._reported < REPORT_SECONDS:
            return
        self._reported = time.monotonic()
        data = json.dumps([dict(self.judge.counts), self.judge.notes[:10], self.judge.times.packed()]).encode()
        os.pwrite(self._status, data.ljust(STATUS_BYTES)[:STATUS_BYTES], 0)

    def promise(self, file: str, *lines: str) -> None:
        """Note what this process was promised."""
        fd = os.open(self.folder / file, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
        os.write(fd, "".join(f"{line}\n" for line in lines).encode())
        os.close(fd)

    def promised(self, file: str) -> list[list[int]]:
        path = self.folder / file
        lines = set(path.read_text().splitlines()) if path.exists() else set()
        return [list(map(int, line.split())) for line in sorted(lines)]

    def pick(self) -> tuple[int, int, int | None]:
        family = self.first + self.random.randrange(self.families)
        return family, self.random.randint(1, CHUNKS_MAX), self.random.choice(FORKS)

    def space(self, spaces: Spaces, family: int, chunks: int) -> tuple[kvfs.Namespace, int]:
        """The namespace of a family, and how many of ``chunks`` its prompts have."""
        ns = spaces[family % len(spaces)]
        return ns, min(chunks, HUGE_CHUNKS_MAX) if page_bytes(ns) > HUGE_BYTES else chunks

    def put_one(self, spaces: Spaces) -> None:
        family, chunks, fork = self.pick()
        ns, chunks = self.space(spaces, family, chunks)
        if self.store(ns, family, chunks, fork):
            self.promise("acks", f"{family} {chunks} {-1 if fork is None else fork}")

    def store(self, ns: kvfs.Namespace, family: int, chunks: int, fork: int | None = None) -> bool:
        """Put a prompt; whether all of its pages are acknowledged."""
        result = put(ns, PROMPTS.tokens(family, chunks, fork), self.judge)
        if result is None:
            return False
        self.judge.counts["stored"] += result.stored
        self.judge.counts["stored_bytes"] += result.stored * page_bytes(ns)
        self.judge.counts["declined"] += result.declined
        return result.stored + result.skipped == chunks

    def get_one(self, spaces: Spaces) -> None:
        family, chunks, fork = self.pick()
        ns, chunks = self.space(spaces, family, chunks)
        tokens = PROMPTS.tokens(family, chunks, fork)
        self.judge.counts["chunks_served"] += get(ns, tokens, self.judge, views=self.random.random() < 0.3)

    def open(self) -> kvfs.Store | None:
        if self._jumps and self.clock is not None:
            self.clock.offset_us = int(self.random.uniform(-1, 1) * CLOCK_SECONDS_MAX * 1e6)
        create = {} if self.options.get("create", "1") == "1" else {"create": False}
        path, store_id = self._where()
        opened = lambda: open_store(path, self.clock, **self.settings, **create)  # noqa: E731
        store = self.judge.call("open", opened, may_raise=True)
        if store is not None and store_id and store._shared.c.store_id.hex() != store_id:
            store.close()
            self.judge.counts["strangers"] += 1
            return None
        return store

    def namespaces(self, store: kvfs.Store) -> Spaces:
        return namespaces(store, mixed=self.mixed)


def end(actor: Actor) -> None:
    """On SIGTERM: end through all ``with`` blocks."""
    actor.ending = True
    sys.exit(0)


def repeat(actor: Actor, step: Callable[[kvfs.Store, Spaces], None], *, reopen: float = 0.01) -> None:
    """Do ``step`` until the end of the process; sometimes close the store and open it again."""
    while True:
        store = actor.open()
        if store is None:
            actor.judge.counts["refused"] += 1
            actor.report()
            time.sleep(0.05)
            continue
        with store:
            spaces = actor.namespaces(store)
            while actor.random.random() > reopen:
                step(store, spaces)
                actor.report(now=False)
                if actor.ending:
                    return


def writer(actor: Actor) -> None:
    repeat(actor, lambda _, spaces: actor.put_one(spaces))


def reader(actor: Actor) -> None:
    repeat(actor, lambda _, spaces: actor.get_one(spaces))


def mixed(actor: Actor) -> None:
    repeat(actor, lambda _, s: actor.put_one(s) if actor.random.random() < 0.5 else actor.get_one(s))


def collector(actor: Actor) -> None:
    """Collects garbage, asks for statistics, verifies."""

    def step(_: kvfs.Store, spaces: Spaces) -> None:
        store = actor.open()
        if store is not None:
            with store:
                actor.judge.call("gc", store.gc, may_raise=True)
                actor.judge.call("stats", store.stats)
        actor.get_one(spaces)
        time.sleep(0.02)

    repeat(actor, step, reopen=0.1)


def forker(actor: Actor) -> None:
    """Forks children that use the open store; some exit without closing it."""

    def step(_: kvfs.Store, spaces: Spaces) -> None:
        actor.put_one(spaces)
        child = os.fork()
        if actor.ending:
            sys.exit(0) if child else os._exit(0)
        if child == 0:
            try:
                actor.random.seed(os.getpid())
                for _ in range(actor.random.randrange(1, 6)):
                    actor.put_one(spaces)
                    actor.get_one(spaces)
            finally:
                if actor.judge.failed:
                    actor.report()
                if actor.random.random() < 0.3:
                    os.kill(os.getpid(), signal.SIGKILL)
                os._exit(1 if actor.judge.failed else 0)
        actor.get_one(spaces)
        actor.judge.counts["forks"] += 1
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            actor.judge.found("raised", "in a forked child")
        if os.WIFSIGNALED(status):
            actor.judge.counts["kills"] += 1

    repeat(actor, step, reopen=0.05)


def filler(actor: Actor) -> None:
    """Puts new prompts as fast as possible."""

    def step(_: kvfs.Store, spaces: Spaces) -> None:
        family = actor.random.randrange(1 << 30)
        ns, chunks = actor.space(spaces, family, 24)
        actor.store(ns, family, chunks)
        if actor.random.random() < 0.1:
            get(ns, PROMPTS.tokens(family, chunks), actor.judge)

    repeat(actor, step, reopen=0.0)


def holder(actor: Actor) -> None:
    """Keeps views of its pages long after they were evicted, and compares them again."""
    kept: list[tuple[int, list[memoryview]]] = []

    def step(_: kvfs.Store, spaces: Spaces) -> None:
        family = actor.random.randrange(1 << 30)
        tokens = PROMPTS.tokens(family, 8)
        ns = spaces[0]
        actor.store(ns, family, 8)
        with ns.match(tokens) as match:
            kept.append((family, actor.judge.call("view", lambda: ns.view(match)) or []))
        old, views = actor.random.choice(kept)
        if wrong := PROMPTS.wrong(PROMPTS.tokens(old, 8), views):
            actor.judge.found("wrong", f"{wrong} views of family {old} changed", wrong)
        del kept[:-HELD_MAX]
        time.sleep(0.05)

    repeat(actor, step, reopen=0.0)


def user(actor: Actor) -> None:
    """Uses the same few prompts all the time, and stores what is missing of them: eviction relocates these."""

    def step(_: kvfs.Store, spaces: Spaces) -> None:
        family = actor.random.choice(HOT)
        ns, chunks = actor.space(spaces, family, 8)
        actor.judge.counts["hot_chunks"] += chunks
        actor.judge.counts["hot_served"] += get(ns, PROMPTS.tokens(family, chunks), actor.judge)
        actor.store(ns, family, chunks)
        time.sleep(0.005)

    repeat(actor, step)


def exporter(actor: Actor) -> None:
    """Writes the bundle that managers import: a store of its own, away from what loses its power; ends."""
    with open_store(actor.folder / "source", capacity="64MiB") as store:
        spaces = actor.namespaces(store)
        for family in BUNDLED:
            ns, chunks = actor.space(spaces, family, 8)
            actor.store(ns, family, chunks)
        store.export(str(actor.folder / "bundle"), [ns.name for ns in spaces])
    actor.report()


def manager(actor: Actor) -> None:
    """Does what an operator does: pins, purges, imports, recompresses, evicts, verifies."""
    judge = actor.judge
    number = actor.random.randrange(1 << 20)

    def pin(store: kvfs.Store, spaces: Spaces) -> None:
        nonlocal number
        number += 1
        family = 10_000_000 + number
        ns, chunks = actor.space(spaces, family, 4)
        if actor.store(ns, family, chunks):
            tokens = PROMPTS.tokens(family, chunks)
            name = f"{family} {chunks} -1"
            if judge.call("pin", lambda: store.pin(name, ns, tokens), may_raise=True) == len(tokens):
                actor.promise("pinned", name)
        for old in (judge.call("pins", store.pins, may_raise=True) or [])[:-PINS_MAX]:
            actor.promise("unpinned", old.name)
            judge.call("unpin", lambda: store.unpin(old.name), may_raise=True)  # noqa: B023

    def purge(store: kvfs.Store, spaces: Spaces) -> None:
        nonlocal number
        number += 1
        family = 20_000_000 + number
        ns, chunks = actor.space(spaces, family, 4)
        actor.store(ns, family, chunks)
        tokens = PROMPTS.tokens(family, chunks)
        if judge.call("purge", lambda: store.purge(ns, prefix=tokens), may_raise=True) is not None:
            actor.promise("purged", f"{family} {chunks} -1")
            if found := get(ns, tokens, judge):
                judge.found("wrong", f"{found} purged pages of family {family} were served")

    def bring(store: kvfs.Store, spaces: Spaces) -> None:
        if (actor.folder / "bundle").exists():
            judge.call("import", lambda: store.import_bundle(str(actor.folder / "bundle")), may_raise=True)

    def shrink(store: kvfs.Store, spaces: Spaces) -> None:
        judge.call("recompress", lambda: store.recompress("planes", idle=0.0, seconds=0.5), may_raise=True)

    def collect(store: kvfs.Store, spaces: Spaces) -> None:
        target = int(actor.random.choice((0.5, 0.8)) * store.settings.capacity_bytes)
        judge.call("gc", lambda: store.gc(target, seconds=1.0), may_raise=True)

    def verify(store: kvfs.Store, spaces: Spaces) -> None:
        judge.call("verify", lambda: store.verify(0.2), may_raise=True)

    acts = (pin, pin, purge, purge, bring, shrink, collect, verify)
    repeat(actor, lambda store, spaces: actor.random.choice(acts)(store, spaces), reopen=0.05)


def witness(actor: Actor) -> None:
    """Makes room, then stores and reads the hot and the bundled prompts once more, notes those that it was told are
    stored, and holds the store open. It runs alone: what was evicted is not blamed on the cut that follows.
    """
    store = actor.open()
    if store is None or not store.wait_ready(60.0):
        actor.judge.found("unopenable", "the store does not open before the cut")
        actor.report()
        return
    spaces = actor.namespaces(store)
    actor.judge.call("gc", lambda: store.gc(int(GC_SHARE * store.settings.capacity_bytes)), may_raise=True)
    actor.judge.call("import", lambda: store.import_bundle(str(actor.folder / "bundle")), may_raise=True)
    told = [(f, *actor.space(spaces, f, 8)) for f in (*HOT, *BUNDLED)]
    told = [(f, ns, chunks) for f, ns, chunks in told if actor.store(ns, f, chunks)]
    told = [(f, ns, chunks) for f, ns, chunks in told if get(ns, PROMPTS.tokens(f, chunks), actor.judge) == chunks]
    if actor.settings["sync"] == "batch":
        time.sleep(BATCH_SECONDS)
    actor.promise("acks", *(f"{family} {chunks} -1" for family, _, chunks in told))
    actor.judge.counts["witnessed"] += len(told)
    actor.report()
    (actor.folder / "ready").touch()
    while not actor.ending:
        time.sleep(0.1)
    os._exit(0)


def closer(actor: Actor) -> None:
    """Opens the store, uses it, closes it; ends."""
    store = actor.open()
    if store is not None:
        with store:
            for _ in range(5):
                actor.put_one(actor.namespaces(store))
    actor.report()


def checker(actor: Actor) -> None:
    """The store opens, what was acknowledged or pinned is there, and what was purged is not; ends."""
    store = actor.open()
    if store is None or not store.wait_ready(60.0):
        actor.judge.found("unopenable", "the store does not open")
        actor.report()
        return
    with store:
        spaces = actor.namespaces(store)
        check(actor, spaces, actor.promised("acks"), "acknowledged", strict=actor.strict)
        unpinned = actor.promised("unpinned")
        pinned = [line for line in actor.promised("pinned") if line not in unpinned]
        check(actor, spaces, pinned, "pinned", strict=actor.strict_pins)
        for family, chunks, _ in actor.promised("purged"):
            if get(actor.space(spaces, family, chunks)[0], PROMPTS.tokens(family, chunks), actor.judge):
                actor.judge.found("wrong", f"purged pages of family {family} are back")
            actor.judge.counts["purged"] += 1
        fresh = random.SystemRandom().randrange(1 << 30, 1 << 31)  # not of an earlier check, which may be torn since
        if (
            put(spaces[0], PROMPTS.tokens(fresh, 5), actor.judge) is None
            or get(spaces[0], PROMPTS.tokens(fresh, 5), actor.judge) != 5
        ):
            actor.judge.found("unopenable", f"no new pages: {store.stats()}")
        store.wait_ready(60.0)  # a starved machine may have opened the breaker
        if not store._shared.c.index.read(lambda s: s.check_ledger(), 5.0):
            actor.judge.found("raised", "the ledger does not add up")
    actor.report()


def check(actor: Actor, spaces: Spaces, lines: Iterable[Sequence[int]], what: str, *, strict: bool) -> None:
    """Read the prompts that were promised; all of their pages must come if ``strict``, the right ones in any case."""
    for family, chunks, fork in lines:
        tokens = PROMPTS.tokens(family, chunks, None if fork < 0 else fork)
        found = get(actor.space(spaces, family, chunks)[0], tokens, actor.judge, views=actor.random.random() < 0.3)
        if found < chunks and strict:
            actor.judge.found("lost", f"{found} of {chunks} {what} pages of family {family}, fork {fork}")
        actor.judge.counts[what] += 1


ROLES = {
    f.__name__: f
    for f in (
        writer, reader, mixed, collector, forker, filler, holder, user, exporter, manager, witness, closer, checker,
        mounter,
    )
}  # fmt: skip


def main(arguments: list[str]) -> None:
    role, folder, name, seed = arguments[:4]
    options = dict(a.split("=", 1) for a in arguments[4:])
    actor = Actor(Path(folder), name, int(seed), options)
    signal.signal(signal.SIGTERM, lambda *_: end(actor))
    ROLES[role](actor)


if __name__ == "__main__":
    main(sys.argv[1:])
