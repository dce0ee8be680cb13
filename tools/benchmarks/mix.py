"""The work of each process of the procs benchmark, on a store and on bare files."""

from __future__ import annotations

import random
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from tools.benchmarks.bare import BareRead, BareWriter
from tools.benchmarks.case import Case, Payload, out_buffer
from tools.benchmarks.measure import BenchError, Stopwatch
from tools.benchmarks.ours import get_prompt

SHARED = 4  # prompts that every process gets
OWN_STRIDE = 1 << 20  # prompt numbers per process


@dataclass(frozen=True)
class MixResult:
    seconds: float
    cpu_seconds: float
    puts: list[float]  # seconds of each call
    gets: list[float]


class _Mix(AbstractContextManager["_Mix"]):
    """The loop; subclasses move the bytes. ``own`` and ``shared`` prompts are numbered from 0."""

    case: Case
    folder: Path
    number: int
    puts_max: int

    def __enter__(self) -> _Mix:
        self._stack = ExitStack()
        self._payload = Payload(self.case)
        self._out = out_buffer(self.case.prompt_bytes)
        self._open()
        self._prepare(0)
        self._put(0)  # the warm-up
        self._get_own(0)
        self._get_shared(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, order: Any) -> MixResult:
        choose, puts, gets = random.Random(f"{self.case.seed}/{self.number}"), list[float](), list[float]()
        start = time.perf_counter()
        watch = Stopwatch()
        with watch:
            while time.perf_counter() < start + order and len(puts) < self.puts_max:
                own = 1 + len(puts)
                self._prepare(own)
                puts.append(_seconds(self._put, own))
                for _ in range(2):
                    gets.append(self._checked(self._get_own, choose.randrange(own + 1), self._first_page))
                    gets.append(self._checked(self._get_shared, choose.randrange(SHARED), 0))
        return MixResult(watch.seconds, watch.cpu_seconds, puts, gets)

    @property
    def _first_page(self) -> int:
        """Number of the first page of prompt 0 of this process."""
        return self._own(0) * self.case.prompt_pages

    def _own(self, prompt: int) -> int:
        return (self.number + 1) * OWN_STRIDE + prompt

    def _prepare(self, prompt: int) -> None:
        self._data = self._payload.of(self._own(prompt))

    def _checked(self, get: Any, prompt: int, base: int) -> float:
        seconds = _seconds(get, prompt)
        found, wanted = int.from_bytes(self._out[:8], "little"), base + prompt * self.case.prompt_pages
        if found != wanted:
            raise BenchError(f"page {wanted} came back as {found}")
        return seconds

    def _open(self) -> None:
        raise NotImplementedError

    def _put(self, prompt: int) -> None:
        raise NotImplementedError

    def _get_own(self, prompt: int) -> None:
        raise NotImplementedError

    def _get_shared(self, prompt: int) -> None:
        raise NotImplementedError


def _seconds(call: Any, *args: Any) -> float:
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


@dataclass
class BareMix(_Mix):
    case: Case
    folder: Path
    number: int
    puts_max: int

    def _open(self) -> None:
        mine = self.folder / f"own-{self.number}"
        self._writer = BareWriter(mine, self.case)
        self._stack.callback(self._writer.close)
        self._mine, self._shared = (
            self._stack.enter_context(BareRead(self.case, folder, self.case.threads))
            for folder in (mine, self.folder / "shared")
        )

    def _put(self, prompt: int) -> None:
        self._writer.write(prompt, self._data)

    def _get_own(self, prompt: int) -> None:
        self._mine.read(prompt)

    def _get_shared(self, prompt: int) -> None:
        self._shared.read(prompt)


@dataclass
class StoreMix(_Mix):
    case: Case
    folder: Path
    number: int
    puts_max: int

    def _open(self) -> None:
        self._namespace = self.case.namespace(self._stack.enter_context(self.case.store(self.folder, scale=2)))

    def _put(self, prompt: int) -> None:
        result = self._namespace.put(self.case.tokens(self._own(prompt)), self._data)
        if result.stored != self.case.prompt_pages:
            raise BenchError(f"put stored {result.stored} of {self.case.prompt_pages} pages: {result}")

    def _get_own(self, prompt: int) -> None:
        get_prompt(self._namespace, self.case, self.case.tokens(self._own(prompt)), self._out)

    def _get_shared(self, prompt: int) -> None:
        get_prompt(self._namespace, self.case, self.case.tokens(prompt), self._out)


@dataclass(frozen=True)
class SameResult:
    stored: int
    skipped: int
    in_flight: int
    declined: int
    seconds: float


@dataclass
class SamePuts(AbstractContextManager["SamePuts"]):
    """Puts all prompts of the case, concurrently with another process that does the same."""

    COUNTS: ClassVar[tuple[str, ...]] = ("stored", "skipped", "in_flight", "declined")
    case: Case
    folder: Path

    def __enter__(self) -> SamePuts:
        self._stack = ExitStack()
        self._payload = Payload(self.case)
        self._namespace = self.case.namespace(self._stack.enter_context(self.case.store(self.folder)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, _order: Any) -> SameResult:
        watch, counts = Stopwatch(), dict.fromkeys(self.COUNTS, 0)
        for prompt in range(self.case.prompts):
            ids, data = self.case.tokens(prompt), self._payload.of(prompt)
            with watch:
                result = self._namespace.put(ids, data)
            for name in self.COUNTS:
                counts[name] += getattr(result, name)
        return SameResult(**counts, seconds=watch.seconds)
