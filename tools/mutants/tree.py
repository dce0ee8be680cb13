"""A copy of the source tree in which bugs are planted, and the tests of that copy, run in forked processes.

A fork starts with the libraries that tests need: a test run costs the tests and not a second of imports. Tests that
have noticed most so far run first. No process of a test run outlives it.
"""

from __future__ import annotations

import compileall
import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import py_compile
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tools.mutants.reach import Noted, Reach

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "kvfs", "tools", "tests", "docs", "native", "pyproject.toml", "hatch_build.py", "constraints.txt", "README.md",
    "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "Makefile", "LICENSE",
)  # fmt: skip
LIBRARIES = ("pytest", "pytest_timeout", "hypothesis", "numpy", "lmdb", "xxhash", "click", "rich.console")
TEST_SECONDS = 20  # of one test: a mutant that waits for ever is noticed
LEARN_SECONDS = 20  # of one test without a bug; those that take longer are not asked
SLOW_FACTOR, SLOW_SECONDS = 4.0, 60.0  # a run may take so much longer than its tests did without a bug
DATA_BYTES_MAX = 8 << 30
TOOL_FAILED = 70  # the exit status of a test run that ended in this file: it says nothing about the mutant
PR_SET_CHILD_SUBREAPER = 36


class ToolError(RuntimeError):
    """The tests could not be run."""


class Verdict(NamedTuple):
    noticed: bool
    by: str  # the first test that failed, or what happened in its place
    ran: frozenset[str]
    seconds: float


@dataclass
class Experience:
    """What earlier runs have shown of each test: its seconds, and which modules' bugs it noticed. Kept in a file."""

    path: Path
    seconds: dict[str, float] = field(default_factory=dict)
    noticed: dict[str, Counter[str]] = field(default_factory=dict)
    failing: list[str] = field(default_factory=list)  # without a bug: these tests are not asked

    @classmethod
    def load(cls, path: Path) -> Experience:
        if not path.exists():
            return cls(path)
        data = json.loads(path.read_text())
        noticed = {module: Counter(tests) for module, tests in data["noticed"].items()}
        return cls(path, data["seconds"], noticed, data["failing"])

    def save(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"seconds": self.seconds, "noticed": self.noticed, "failing": self.failing}))
        new.replace(self.path)

    def learn(self, file: str, seconds: dict[str, float], failing: list[str]) -> None:
        """What a run of a file without a bug has shown, in place of what an earlier one had."""
        self.seconds = {t: s for t, s in self.seconds.items() if t.partition("::")[0] != file} | seconds
        self.failing = [t for t in self.failing if t.partition("::")[0] != file] + failing
        self.save()

    def rank(self, module: str, test: str) -> tuple[int, bool, int, float]:
        """Tests that noticed bugs of this module, then those named for it, those that noticed others, fast ones."""
        return (
            -self.noticed.get(module, Counter())[test],
            not Path(test.partition("::")[0]).name.startswith(f"test_{Path(module).stem}"),
            -min(sum(tests[test] for tests in self.noticed.values()), 3),
            self.seconds.get(test, 1.0),
        )


class Order:
    """A pytest plugin: which tests run, in which order; writes what happened to a file."""

    def __init__(
        self, module: str, known: Experience, seconds_max: float, only: Collection[str] | None,
        skip: Collection[str], log: Path,
    ) -> None:  # fmt: skip
        self._module, self._known, self._seconds_max, self._only, self._log = module, known, seconds_max, only, log
        self._skip = {*skip, *known.failing}
        self._seconds: dict[str, float] = {}
        self._failed: list[str] = []

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        known = self._known.seconds
        chosen = [i for i in items if i.nodeid not in self._skip and known.get(i.nodeid, 0.0) <= self._seconds_max]
        if self._only is not None:
            chosen = [i for i in chosen if i.nodeid in self._only]
        items[:] = sorted(chosen, key=lambda i: self._known.rank(self._module, i.nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and report.nodeid not in self._failed:
            self._failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._failed.append(report.nodeid or "collection")

    def pytest_sessionfinish(self) -> None:
        self._log.write_text(json.dumps([self._seconds, self._failed]))


class Tree:
    """``folder/tree`` is the copy; one process at a time may use it."""

    def __init__(self, folder: Path) -> None:
        folder = folder.resolve()  # a test run changes its directory
        self.root = folder / "tree"
        self._work = folder / "work"
        self._log = folder / "last.json"
        self.output = folder / "last.txt"
        self.known = Experience.load(folder / "tests.json")
        self.reach = Reach.load(folder / "reach.json")
        self._reached = folder / "reached.json"
        self._changed = folder / "changed.json"
        self._restore()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a test run become ours, and end

    def copy(self, names: Sequence[str] = SOURCES) -> None:
        """Copy the sources as they are now."""
        for name in names:
            source, target = ROOT / name, self.root / name
            if target.is_dir():
                shutil.rmtree(target)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "mutants"))
            elif source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        # The hash of its source decides whether bytecode is used: a mutant has the size, and may have the time, of
        # the original.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.root / "kvfs", quiet=2, invalidation_mode=mode)

    def digest(self, file: str) -> str:
        """Of a file's text: what was noted of its tests holds until it changes."""
        return hashlib.sha256((self.root / file).read_bytes()).hexdigest()[:16]

    @contextlib.contextmanager
    def changed(self, path: str, text: str) -> Iterator[None]:
        """A file of the copy has another text; if this process is killed, until a ``Tree`` is made of it again."""
        file = self.root / path
        self._changed.write_text(json.dumps([path, file.read_text(encoding="utf-8")]), encoding="utf-8")
        file.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        if self._changed.exists():
            path, before = json.loads(self._changed.read_text(encoding="utf-8"))
            (self.root / path).write_text(before, encoding="utf-8")
            self._changed.unlink()

    def run(
        self,
        tests: Sequence[str],
        module: str = "",
        *,
        seconds_max: float = 1e9,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
        learn: bool = False,
        limit: float | None = None,
    ) -> Verdict:
        """Run tests of the copy until one fails; of those collected, ``only`` these. ``learn``: run all of one file,
        and note their seconds, their failures and what they run.

        Raises ToolError if the tests could not be run.
        """
        self._log.unlink(missing_ok=True)
        self._reached.unlink(missing_ok=True)
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        started = time.monotonic()
        limit = limit or self._limit(tests if only is None else only, seconds_max)
        if (child := os.fork()) == 0:
            status = TOOL_FAILED
            try:
                plugins: list[Any] = [Order(module, self.known, seconds_max, only, skip, self._log)]
                if learn:
                    plugins.append(Noted(self.root, self._reached))
                status = self._test(tests, plugins, learn)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        status = _wait(child, started + (1e9 if learn else limit))
        _end_all()
        took = time.monotonic() - started
        seconds, failed = json.loads(self._log.read_text()) if self._log.exists() else ({}, [])
        # of pytest: 0 and 1: it ran to its end, 5: without a test, as of a file of slow ones
        if status == TOOL_FAILED or (learn and status not in (0, 1, 5)):
            raise ToolError(f"the tests could not be run (exit status {status}): see {self.output}")
        if learn:
            (file,) = tests
            self.known.learn(file, seconds, failed)
            reached = json.loads(self._reached.read_text()) if self._reached.exists() else {}
            self.reach.note(file, self.digest(file), reached)
        ran = frozenset(seconds)
        if status is None:
            return Verdict(True, f"no end within {limit:.0f} s", ran, took)
        if status in (0, 5):  # 5: no test was left to run
            return Verdict(False, "", ran, took)
        by = failed[0] if failed else f"exit status {status}"
        if not learn:
            self.known.noticed.setdefault(module, Counter())[by] += 1
            self.known.save()
        return Verdict(True, by, ran, took)

    def _limit(self, tests: Collection[str], seconds_max: float) -> float:
        known = (s for t, s in self.known.seconds.items() if s <= seconds_max and t.startswith(tuple(tests)))
        return SLOW_SECONDS + SLOW_FACTOR * sum(known)

    def _test(self, tests: Sequence[str], plugins: Sequence[Any], learn: bool) -> int:
        """In the child: forget the tool's own modules, and run pytest in the copy."""
        import resource

        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES_MAX, DATA_BYTES_MAX))
        fd = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for number in (1, 2):
            os.dup2(fd, number)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.chdir(self.root)
        sys.path[:] = [str(self.root), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
        os.environ.update(PYTHONPATH=str(self.root), PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(self._work))
        sys.dont_write_bytecode = not learn
        for name in [n for n in sys.modules if n.partition(".")[0] in ("kvfs", "tools", "tests")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        import tempfile

        tempfile.tempdir = None
        pytest = importlib.import_module("pytest")
        options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "--tb=short"]
        options += [
            f"--timeout={LEARN_SECONDS if learn else TEST_SECONDS}",
            f"--basetemp={self._work / 'tests'}",
            *([] if learn else ["-x"]),
        ]
        return int(pytest.main([*options, *tests], plugins=[*plugins]))


def load_libraries() -> None:
    """Import what tests need, once for all forks."""
    for name in LIBRARIES:
        importlib.import_module(name)


def _wait(child: int, until: float) -> int | None:
    """The exit status of a child; None if it did not end in time."""
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def _end_all() -> None:
    """Kill what is left of a test run: children of this process, and what becomes one when its parent ends."""
    while True:
        try:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        except OSError:
            return
        if not children:
            return
        for pid in map(int, children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
