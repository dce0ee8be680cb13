"""One process of a torture run: ``python -m tools.torture.actor ROLE FOLDER NAME SEED [key=value ...]``.

After every operation it writes its counts to ``FOLDER/status/NAME``, so that they survive its death. Prompts whose
pages were all published go to ``FOLDER/acks``, one line each: from then on they must be served.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kvfs
from tools.torture.case import PAGE_BYTES, PROMPTS, get, namespace, open_store, put
from tools.torture.judge import Judge

CHUNKS_MAX = 20
HELD_MAX = 6  # views at a time: the segments of held views cannot be reclaimed
FORKS = (None, 3, 7, 12)


class Actor:
    """The state of this process."""

    def __init__(self, folder: Path, name: str, seed: int, options: dict[str, str]) -> None:
        self.folder = folder
        self.store_path = Path(options.get("store", folder / "store"))
        self.judge = Judge(context=f"{name} (seed {seed}): ")
        self.random = random.Random(seed)
        self.first = int(options.get("first", "0"))
        self.families = int(options.get("families", "60"))
        self.settings = {"capacity": options.get("capacity", "512MiB"), "sync": options.get("sync", "cache")}
        self.settings["mode"] = options.get("mode", "cache")
        self.strict = options.get("strict", "1") == "1"  # every acknowledged prompt must be served
        self.ending = False  # Python drops exceptions of signal handlers in fork hooks and in finalizers
        self._status = os.open(folder / "status" / name, os.O_CREAT | os.O_RDWR, 0o666)
        self._acks = os.open(folder / "acks", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)

    def report(self) -> None:
        data = json.dumps([dict(self.judge.counts), self.judge.notes[:10]]).encode()
        os.pwrite(self._status, data.ljust(8192)[:8192], 0)

    def pick(self) -> tuple[int, int, int | None]:
        family = self.first + self.random.randrange(self.families)
        return family, self.random.randint(1, CHUNKS_MAX), self.random.choice(FORKS)

    def put_one(self, ns: kvfs.Namespace) -> None:
        family, chunks, fork = self.pick()
        result = put(ns, PROMPTS.tokens(family, chunks, fork), self.judge)
        if result is not None and result.stored + result.skipped == chunks:
            os.write(self._acks, f"{family} {chunks} {-1 if fork is None else fork}\n".encode())
        self.count(result)

    def count(self, result: kvfs.PutResult | None) -> None:
        if result is not None:
            self.judge.counts["stored"] += result.stored
            self.judge.counts["stored_bytes"] += result.stored * PAGE_BYTES
            self.judge.counts["declined"] += result.declined

    def get_one(self, ns: kvfs.Namespace) -> None:
        tokens = PROMPTS.tokens(*self.pick())
        self.judge.counts["chunks_served"] += get(ns, tokens, self.judge, views=self.random.random() < 0.3)

    def open(self) -> kvfs.Store | None:
        return self.judge.call("open", lambda: open_store(self.store_path, **self.settings), may_raise=True)


def end(actor: Actor) -> None:
    """On SIGTERM: end through all ``with`` blocks."""
    actor.ending = True
    sys.exit(0)


def repeat(actor: Actor, step: Callable[[kvfs.Namespace], None], *, reopen: float = 0.01) -> None:
    """Do ``step`` until the end of the process; sometimes close the store and open it again."""
    while True:
        store = actor.open()
        if store is None:
            actor.judge.counts["refused"] += 1
            actor.report()
            time.sleep(0.05)
            continue
        with store:
            ns = namespace(store)
            while actor.random.random() > reopen:
                step(ns)
                actor.report()
                if actor.ending:
                    return


def writer(actor: Actor) -> None:
    repeat(actor, actor.put_one)


def reader(actor: Actor) -> None:
    repeat(actor, actor.get_one)


def mixed(actor: Actor) -> None:
    repeat(actor, lambda ns: actor.put_one(ns) if actor.random.random() < 0.5 else actor.get_one(ns))


def collector(actor: Actor) -> None:
    """Collects garbage, asks for statistics, verifies."""

    def step(ns: kvfs.Namespace) -> None:
        store = actor.open()
        if store is not None:
            with store:
                actor.judge.call("gc", store.gc, may_raise=True)
                actor.judge.call("stats", store.stats)
        actor.get_one(ns)
        time.sleep(0.02)

    repeat(actor, step, reopen=0.1)


def forker(actor: Actor) -> None:
    """Forks children that use the open store; some exit without closing it."""

    def step(ns: kvfs.Namespace) -> None:
        actor.put_one(ns)
        child = os.fork()
        if actor.ending:
            sys.exit(0) if child else os._exit(0)
        if child == 0:
            try:
                actor.random.seed(os.getpid())
                for _ in range(actor.random.randrange(1, 6)):
                    actor.put_one(ns)
                    actor.get_one(ns)
            finally:
                if actor.judge.failed:
                    actor.report()
                if actor.random.random() < 0.3:
                    os.kill(os.getpid(), signal.SIGKILL)
                os._exit(1 if actor.judge.failed else 0)
        actor.get_one(ns)
        actor.judge.counts["forks"] += 1
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            actor.judge.found("raised", "in a forked child")
        if os.WIFSIGNALED(status):
            actor.judge.counts["kills"] += 1

    repeat(actor, step, reopen=0.05)


def filler(actor: Actor) -> None:
    """Puts new prompts as fast as possible."""

    def step(ns: kvfs.Namespace) -> None:
        family = actor.random.randrange(1 << 30)
        actor.count(put(ns, PROMPTS.tokens(family, 24), actor.judge))
        if actor.random.random() < 0.1:
            get(ns, PROMPTS.tokens(family, 24), actor.judge)

    repeat(actor, step, reopen=0.0)


def holder(actor: Actor) -> None:
    """Keeps views of its pages long after they were evicted, and compares them again."""
    kept: list[tuple[int, list[memoryview]]] = []

    def step(ns: kvfs.Namespace) -> None:
        family = actor.random.randrange(1 << 30)
        tokens = PROMPTS.tokens(family, 8)
        actor.count(put(ns, tokens, actor.judge))
        with ns.match(tokens) as match:
            kept.append((family, actor.judge.call("view", lambda: ns.view(match)) or []))
        old, views = actor.random.choice(kept)
        if wrong := PROMPTS.wrong(PROMPTS.tokens(old, 8), views):
            actor.judge.found("wrong", f"{wrong} views of family {old} changed", wrong)
        del kept[:-HELD_MAX]
        time.sleep(0.05)

    repeat(actor, step, reopen=0.0)


def closer(actor: Actor) -> None:
    """Opens the store, uses it, closes it; ends."""
    store = actor.open()
    if store is not None:
        with store:
            for _ in range(5):
                actor.put_one(namespace(store))
    actor.report()


def checker(actor: Actor) -> None:
    """The store opens, and every acknowledged prompt is there; ends."""
    store = actor.open()
    if store is None or not store.wait_ready(60.0):
        actor.judge.found("unopenable", "the store does not open")
        actor.report()
        return
    with store:
        ns = namespace(store)
        lines = set((actor.folder / "acks").read_text().splitlines()) if (actor.folder / "acks").exists() else set()
        for line in sorted(lines):
            family, chunks, fork = map(int, line.split())
            tokens = PROMPTS.tokens(family, chunks, None if fork < 0 else fork)
            found = get(ns, tokens, actor.judge, views=actor.random.random() < 0.3)
            if found < chunks and actor.strict:
                actor.judge.found("lost", f"{found} of {chunks} pages of family {family}, fork {fork}")
        actor.judge.counts["acknowledged"] += len(lines)
        fresh = random.SystemRandom().randrange(1 << 30, 1 << 31)  # not of an earlier check, which may be torn since
        if (
            put(ns, PROMPTS.tokens(fresh, 5), actor.judge) is None
            or get(ns, PROMPTS.tokens(fresh, 5), actor.judge) != 5
        ):
            actor.judge.found("unopenable", f"no new pages: {store.stats()}")
        store.wait_ready(60.0)  # a starved machine may have opened the breaker
        if not store._shared.c.index.read(lambda s: s.check_ledger(), 5.0):
            actor.judge.found("raised", "the ledger does not add up")
    actor.report()


ROLES = {f.__name__: f for f in (writer, reader, mixed, collector, forker, filler, holder, closer, checker)}


def main(arguments: list[str]) -> None:
    role, folder, name, seed = arguments[:4]
    options = dict(a.split("=", 1) for a in arguments[4:])
    actor = Actor(Path(folder), name, int(seed), options)
    signal.signal(signal.SIGTERM, lambda *_: end(actor))
    ROLES[role](actor)


if __name__ == "__main__":
    main(sys.argv[1:])
