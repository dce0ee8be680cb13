"""Child processes that are set up first, start together, and answer with figures.

Children are spawned, not forked, so they inherit none of the parent's stores, threads or page tables. They ignore
Ctrl-C, and exit when the parent closes its pipe or exits.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from tools.benchmarks.measure import BenchError

# longest waits for a child, far above what it needs on a busy machine: to be ready, to answer, to exit
SETUP_SECONDS = 600.0
ANSWER_SECONDS = 900.0
END_SECONDS = 120.0

Result = TypeVar("Result", covariant=True)


class Job(AbstractContextManager[Any], Protocol[Result]):
    """Work of one child: picklable, entered and exited in the child."""

    def run(self, order: Any) -> Result: ...


def _child(pipe: Connection, job: Job[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with job:
            pipe.send(("ready", None))
            while (order := pipe.recv()) is not None:
                pipe.send(("done", job.run(order[0])))
    except EOFError:
        pass
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


class Crew(Generic[Result]):
    """Owns one child per job. After entry all are ready; ``run`` sends an order to all and waits for their answers."""

    def __init__(self, jobs: Sequence[Job[Result]]) -> None:
        self._jobs = jobs
        self._members: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Crew[Result]:
        context = multiprocessing.get_context("spawn")
        try:
            for job in self._jobs:
                ours, theirs = context.Pipe()
                process = context.Process(target=_child, args=(theirs, job), daemon=True)
                self._members.append((process, ours))  # before start: an interrupt must not leave a child running
                process.start()
                theirs.close()
            for _, pipe in self._members:
                _answer(pipe, SETUP_SECONDS)
        except BaseException:
            self._end(wait=False)
            raise
        return self

    def start(self, order: object) -> None:
        for _, pipe in self._members:
            pipe.send((order,))

    def collect(self, seconds: float = ANSWER_SECONDS) -> list[Result]:
        return [_answer(pipe, seconds) for _, pipe in self._members]

    def run(self, order: object) -> list[Result]:
        self.start(order)
        return self.collect()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(wait=kind is None)

    def _end(self, *, wait: bool) -> None:
        for _, pipe in self._members:
            pipe.close()
        for process, _ in self._members:
            if wait:
                process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()


def _answer(pipe: Connection, seconds: float) -> Any:
    try:
        if not pipe.poll(seconds):
            raise BenchError(f"a child process gave no answer within {seconds:.0f} s")
        word, value = pipe.recv()
    except EOFError:
        raise BenchError("a child process died") from None
    if word == "failed":
        raise BenchError(f"a child process failed:\n{value}")
    return value
