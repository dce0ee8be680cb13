"""Runs a workload against a target: so many sessions at a time, or sessions that begin at a rate."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kvfs.bench.target import Answer, Target
from kvfs.bench.workload import VOCABULARY, Session

PROGRESS_SECONDS = 1.0
RUNNING_MAX = 4096  # sessions at once at a rate: a server that hangs must not fill the memory


class Done(NamedTuple):
    """One request that has ended."""

    session: int
    turn: int
    answer: Answer


class Progress(NamedTuple):
    """What a run has done so far."""

    seconds: float
    requests: int
    failed: int
    running: int


class Run:
    """One run of a benchmark. ``done`` has every request that has ended, in the order in which they did."""

    def __init__(self, target: Target, seed: int, progress: Callable[[Progress], None]) -> None:
        self._target = target
        self._seed = seed
        self._progress = progress
        self._running = 0
        self.done: list[Done] = []
        self.late_seconds = 0.0  # how much later than it should a session began, at most
        self.began = self.ended = 0.0

    async def closed(self, sessions: Iterable[Session], concurrency: int) -> None:
        """``concurrency`` users, each with one session after the other."""
        queue = enumerate(sessions)
        await self._all(self._user(queue) for _ in range(concurrency))

    async def open(self, sessions: Iterable[Session], rate: float | None) -> None:
        """Sessions that begin at their own times, or ``rate`` per second with exponential gaps (Poisson arrivals)."""
        await self._all([self._arrivals(enumerate(sessions), rate)])

    async def _all(self, jobs: Iterable[object]) -> None:
        self.began = time.perf_counter()
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.gather(*jobs)  # type: ignore[call-overload]
        finally:
            self.ended = time.perf_counter()
            watch.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            failed = sum(bool(d.answer.error) for d in self.done)
            self._progress(Progress(time.perf_counter() - self.began, len(self.done), failed, self._running))

    async def _user(self, queue: Iterator[tuple[int, Session]]) -> None:
        for number, session in queue:  # shared by all users: each takes the next one
            await self._session(number, session)

    async def _arrivals(self, queue: Iterator[tuple[int, Session]], rate: float | None) -> None:
        draw, at = random.Random(self._seed), 0.0
        running: set[asyncio.Task[None]] = set()
        try:
            for number, session in queue:
                at = at + draw.expovariate(rate) if rate is not None else session.at
                wait = self.began + at - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                self.late_seconds = max(self.late_seconds, time.perf_counter() - self.began - at)
                while len(running) >= RUNNING_MAX:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.ensure_future(self._session(number, session))
                running.add(task)
                task.add_done_callback(running.discard)
            if running:
                await asyncio.wait(running)
        finally:
            for task in running:
                task.cancel()

    async def _session(self, number: int, session: Session) -> None:
        """All turns; a turn that fails ends the session, since its answer is part of the next prompt."""
        prompt: list[int] = []
        draw = random.Random(f"{self._seed} {number}")
        self._running += 1
        try:
            for turn, (tokens, output_tokens) in enumerate(session.turns):
                prompt += tokens
                answer = await self._target.send(prompt, output_tokens)
                self.done.append(Done(number, turn, answer))
                if answer.error:
                    return
                made = answer.generated or draw.choices(range(1, VOCABULARY), k=answer.output_tokens)
                prompt += itertools.islice(made, output_tokens)
        finally:
            self._running -= 1
