"""Read-only processes: which index they use, and when they change it."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.runtime.read_only_index import MISSING_SECONDS
from kvfs.system.files import Files
from kvfs.testing import FakeClock
from tests.maintenance.test_purge import CHUNKS, found, path, put, space
from tests.stores import restored, tokens_of

__all__ = ["path"]


def put_and_distrust(path: Path) -> None:
    """A store with a prompt, and without an index that may be trusted."""
    with kvfs.open(path, capacity="32MiB") as store:
        put(space(store), 1)
    (path / "index" / "CURRENT").unlink()


@pytest.mark.parametrize("trusted", [True, False])
def test_a_reader_with_a_private_index_follows(path: Path, trusted: bool) -> None:
    """After others purged and stored: the shared index replaces the private one, or a new private one does."""
    with kvfs.open(path, capacity="32MiB") as store:
        put(space(store), 1)
        put(space(store, "n"), 2)
    (path / "index" / "CURRENT").unlink()
    with kvfs.open(path, read_only=True) as reader:
        reader._shared.background.stop()
        assert found(space(reader), 1) == CHUNKS
        reader._shared._read_only_index.follow()
        assert reader._shared.c.index.generation.startswith("private-")
        with another_process(path) as writer:
            assert writer('store.purge("m").pages') == str(CHUNKS)
            assert writer('put(space(store, "n"), 3)') == "None"
        if not trusted:
            (path / "index" / "CURRENT").unlink()
        reader._shared._read_only_index.follow()
        assert reader._shared.c.index.generation.startswith("private-") is not trusted
        assert [found(space(reader), 1), found(space(reader, "n"), 2), found(space(reader, "n"), 3)] == [
            0,
            CHUNKS,
            CHUNKS,
        ]


def test_a_reader_builds_a_private_index_only_if_no_writer_rebuilds_the_shared_one(path: Path) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        put(space(store), 1)
    files = Clock()
    with kvfs.open(path, read_only=True, files=files) as reader:
        core = reader._shared
        core.background.stop()
        store_index = core.c.index
        assert found(space(reader), 1) == CHUNKS
        (path / "index" / "CURRENT").rename(path / "index" / "aside")
        for passed in (0.0, MISSING_SECONDS / 2):
            files.advance(passed)
            core._read_only_index.follow()
            assert core.c.index is store_index
        (path / "index" / "aside").rename(path / "index" / "CURRENT")
        core._read_only_index.follow()
        assert found(space(reader), 1) == CHUNKS
        (path / "index" / "CURRENT").unlink()
        for passed in (MISSING_SECONDS, MISSING_SECONDS):
            assert core.c.index is store_index
            files.advance(passed)
            core._read_only_index.follow()
        assert core.c.index.generation.startswith("private-")
        assert found(space(reader), 1) == CHUNKS


class Clock(FakeClock, Files):
    """The real file system under a clock that the test sets."""


@contextlib.contextmanager
def another_process(path: Path) -> Iterator[Callable[[str], str]]:
    """A writer that evaluates lines, with ``store``, ``put`` and ``space``, and prints each result."""
    code = (
        "import sys, kvfs\nfrom pathlib import Path\nfrom tests.maintenance.test_purge import put, space\n"
        "with kvfs.open(Path(sys.argv[1])) as store:\n    assert store.wait_ready()\n"
        "    for line in sys.stdin:\n        print(eval(line), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        lines, answers = writer.stdin, writer.stdout

        def ask(line: str) -> str:
            print(line, file=lines, flush=True)
            return answers.readline().strip()

        yield ask
    assert writer.returncode == 0


def test_a_reader_returns_to_the_index_of_an_active_writer(path: Path) -> None:
    put_and_distrust(path)
    with kvfs.open(path, read_only=True) as reader:
        ns = space(reader)
        with ns.match(tokens_of(1, CHUNKS)) as match, another_process(path) as writer:
            assert writer("put(space(store), 2)") == "None"
            deadline = time.monotonic() + 20
            while found(ns, 2) == 0 and time.monotonic() < deadline:
                time.sleep(0.05)  # its background thread checks once a second
            assert writer("put(space(store), 3)") == "None"
            assert [found(ns, seed) for seed in (1, 2, 3)] == [CHUNKS] * 3
            assert match.pages and ns.get(match, bytearray(match.nbytes)) == CHUNKS


def test_a_reader_whose_new_index_fails_tries_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_and_distrust(path)
    with kvfs.open(path, read_only=True) as reader:
        reader._shared.background.stop()
        code = "import sys, kvfs; kvfs.open(sys.argv[1]).purge('m')"
        with space(reader).match(tokens_of(1, CHUNKS)) as held:  # so that its segment stays
            assert held.tokens
            subprocess.run([sys.executable, "-c", code, str(path)], check=True)
        (path / "index" / "CURRENT").unlink()  # the index that the other process left may not be trusted either
        private_index = reader._shared.services().private_index

        def fail(cancelled: Callable[[], bool]) -> None:
            monkeypatch.setattr(reader._shared.services(), "private_index", private_index)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(reader._shared.services(), "private_index", fail)
        with pytest.raises(OSError, match="space"):
            reader._shared._read_only_index.follow()
        index = reader._shared.c.index
        reader._shared._read_only_index.follow()
        assert reader._shared.c.index is not index
        assert found(space(reader), 1) == 0


@pytest.mark.parametrize("lacking", ["CURRENT", "users", "state"])
def test_a_reader_that_lacks_a_descriptor_returns_to_the_shared_index_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    put_and_distrust(path)
    files = Files()
    with kvfs.open(path, read_only=True, files=files) as reader:
        reader._shared.background.stop()
        with another_process(path) as writer:
            assert writer("put(space(store), 2)") == "None"

        def fail(name: str, flags: int, mode: int = 0o600, **where: Any) -> int:
            if name == lacking:
                raise OSError(errno.EMFILE, "Too many open files")
            return Files.open(files, name, flags, mode, **where)

        with monkeypatch.context() as patch:
            patch.setattr(files, "open", fail)
            reader._shared._read_only_index.follow()
        assert [found(space(reader), seed) for seed in (1, 2)] == [CHUNKS, 0]
        reader._shared._read_only_index.follow()
        assert [found(space(reader), seed) for seed in (1, 2)] == [CHUNKS, CHUNKS]


def test_a_close_cancels_the_build_of_a_private_index(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_and_distrust(path)
    files, begun = Files(), threading.Event()
    reader = kvfs.open(path, read_only=True, files=files)
    core, index = reader._shared, reader._shared.c.index
    monkeypatch.setattr(core.c.marks, "version", lambda: (1,))  # as after a purge: the index is rebuilt

    def slow(name: str, flags: int, mode: int = 0o600, **where: Any) -> int:
        if name.endswith(".kvs"):
            begun.set()
            while not core._closing:
                time.sleep(0.01)
        return Files.open(files, name, flags, mode, **where)

    monkeypatch.setattr(files, "open", slow)
    assert begun.wait(20)  # the reader's background thread checks once a second
    reader.close()
    assert core.c.index is index and core.c.counters.snapshot()["task_follow_failed"] == 1


def test_lookups_miss_while_a_private_index_is_closed(path: Path) -> None:
    put_and_distrust(path)
    with kvfs.open(path, read_only=True) as reader:
        reader._shared.background.stop()
        ns, index = space(reader), reader._shared.c.index
        index._worker.call(index._close_environment, 5.0)  # as between two steps of a lookup, or after an error
        assert not restored(ns, tokens_of(1, CHUNKS))
        assert reader._shared.c.counters.snapshot()["lookup_unavailable_rebuilding"] == 1
        reader._shared._read_only_index.follow()
        assert found(ns, 1) == CHUNKS and reader._shared.c.index is not index
