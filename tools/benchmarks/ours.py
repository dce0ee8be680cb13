"""The store's side of each comparison with bare system calls."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import kvfs
from kvfs.format.segment import BLOCK, parse_seal
from tools.benchmarks.bare import touch
from tools.benchmarks.case import Case, Payload, cached_share, out_buffer, write_back
from tools.benchmarks.measure import BenchError, Sample, Stopwatch


def segment_paths(store: Path) -> list[Path]:
    return sorted((store / "segments").glob("*.kvs"))


def segment_states(store: Path) -> str:
    """Number of segments with and without a seal page, as "7 sealed 1 active"."""
    sealed = 0
    paths = segment_paths(store)
    for path in paths:
        with path.open("rb") as file:
            file.seek(-BLOCK, 2)
            sealed += parse_seal(file.read(BLOCK)) is not None
    return f"{sealed} sealed {len(paths) - sealed} active"


def remove(store: Path) -> None:
    shutil.rmtree(store)


def put_all(path: Path, case: Case, payload: Payload, *, mode: str = "cache", durable: bool = False) -> Sample:
    """All prompts into a new store, one ``put`` each; opening and closing are not timed.

    ``durable``: until all of it is on the disk.
    """
    watch = Stopwatch()
    with case.store(path, mode=mode) as store:
        namespace = case.namespace(store)
        for prompt in range(case.prompts):
            ids, data = case.tokens(prompt), payload.of(prompt)
            with watch:
                result = namespace.put(ids, data)
            if result.stored != case.prompt_pages:
                raise BenchError(f"put stored {result.stored} of {case.prompt_pages} pages: {result}")
        if durable:
            with watch:
                write_back(segment_paths(path))
    return watch.sample(case.size_bytes)


def check_all(path: Path, case: Case, payload: Payload) -> None:
    """BenchError unless every prompt is read back unchanged."""
    out = out_buffer(case.prompt_bytes)
    with case.store(path) as store:
        namespace = case.namespace(store)
        for prompt in range(case.prompts):
            get_prompt(namespace, case, case.tokens(prompt), out)
            payload.check(out, prompt)


def get_prompt(namespace: kvfs.Namespace, case: Case, ids: Any, out: memoryview) -> None:
    """Look up and load a whole prompt."""
    with namespace.match(ids) as match:
        _load(namespace, case, match, out)


def _load(namespace: kvfs.Namespace, case: Case, match: kvfs.PrefixMatch, out: memoryview) -> None:
    loaded = namespace.get(match, out)
    if loaded != case.prompt_pages:
        raise BenchError(f"get returned {loaded} of {case.prompt_pages} pages")


class _StoreJob(AbstractContextManager["_StoreJob"]):
    """Opens the store for each run, since a process opens a store with one verify policy. Only calls are timed.

    ``warm``: a prompt is looked up before, so that no call includes one-time costs. ``apart``: only ``get`` or
    ``view`` is timed, between the match and its close.
    """

    case: Case
    path: Path
    verify: str
    warm: bool
    apart: bool

    def __enter__(self) -> _StoreJob:
        out_buffer(self.case.prompt_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run(self, _order: Any = None) -> Sample:
        watch, cached = Stopwatch(), cached_share(segment_paths(self.path))
        with self.case.store(self.path, verify=self.verify) as store:
            namespace = self.case.namespace(store)
            if self.warm:
                namespace.match(self.case.tokens(0)).close()
            for prompt in range(self.case.prompts):
                ids = self.case.tokens(prompt)
                if self.apart:
                    with namespace.match(ids) as match, watch:
                        self._use(namespace, match)
                else:
                    with watch, namespace.match(ids) as match:
                        self._use(namespace, match)
        return watch.sample(self.case.size_bytes, cached)

    def _use(self, namespace: kvfs.Namespace, match: kvfs.PrefixMatch) -> None:
        raise NotImplementedError


@dataclass
class StoreGet(_StoreJob):
    """``match`` and ``get`` of every prompt into the one buffer."""

    case: Case
    path: Path
    verify: str = "always"
    warm: bool = True
    apart: bool = False

    def _use(self, namespace: kvfs.Namespace, match: kvfs.PrefixMatch) -> None:
        _load(namespace, self.case, match, out_buffer(self.case.prompt_bytes))


@dataclass
class StoreView(_StoreJob):
    """``match`` and ``view`` of every prompt, then every byte touched; unmapping is included in the time."""

    case: Case
    path: Path
    verify: str = "always"
    warm: bool = True
    apart: bool = False

    def _use(self, namespace: kvfs.Namespace, match: kvfs.PrefixMatch) -> None:
        seen = _touch_views(namespace, match)
        if seen != self.case.prompt_pages:
            raise BenchError(f"view gave {seen} of {self.case.prompt_pages} pages")


def _touch_views(namespace: kvfs.Namespace, match: kvfs.PrefixMatch) -> int:
    """Touch every byte of every view, and unmap them. Returns their number."""
    views = namespace.view(match)
    for view in views:
        touch(view)
    return len(views)
