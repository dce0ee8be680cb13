"""A current index that may be trusted is neither discarded nor replaced because one process has an error."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError
from kvfs.index.environment import Index
from kvfs.maintenance.rebuild import rebuild
from kvfs.system.files import Files
from tools.torture.case import PROMPTS, get, namespace, open_store, put
from tools.torture.judge import Judge


@pytest.fixture
def judge() -> Iterator[Judge]:
    found = Judge()
    yield found
    assert not found.failed, "\n".join([found.line(), *found.notes])


def test_an_index_that_is_only_locked_is_not_rebuilt(tmp_path: Path, judge: Judge) -> None:
    """A frozen holder of the gate made every other process rebuild: what was published meanwhile was lost."""
    path = tmp_path / "store"
    with open_store(path) as store:
        ns = namespace(store)
        put(ns, PROMPTS.tokens(1, 5), judge)
        generation = store.stats()["index"]["generation"]
        fd = os.open(path / "main", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            store._shared.rebuild_if_needed()
            assert get(ns, PROMPTS.tokens(1, 5), judge) == 0
        finally:
            os.close(fd)
        assert store.wait_ready()
        assert store.stats()["index"]["generation"] == generation
        assert get(ns, PROMPTS.tokens(1, 5), judge) == 5


def test_a_second_rebuild_finds_the_first_one_done(tmp_path: Path, judge: Judge) -> None:
    """Two processes saw no index; the slower one replaced the faster one's, and what had been published in it."""
    path = tmp_path / "store"
    with open_store(path) as store:
        ns = namespace(store)
        put(ns, PROMPTS.tokens(1, 5), judge)
        c = store._shared.c
        done = rebuild(c.directory, c.index, c.settings, c.store_id, alone=False, cancelled=lambda: False)
        assert done is None
        os.mkdir(path / "index" / "00000000000000aa")
        with pytest.raises(IndexUnavailableError, match="current"):
            c.index.install("00000000000000aa", 5.0)
        assert get(ns, PROMPTS.tokens(1, 5), judge) == 5


@contextmanager
def of_others(store: kvfs.Store, path: Path) -> Iterator[Index]:
    """The index of the store, which another process uses while this one closes it; its generation must not change."""
    generation, index = store.stats()["index"]["generation"], store._shared.c.index
    other = os.open(path / "index" / generation / "users", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_SH)
        index._worker.call(index._close_environment, 5.0)
        yield index
        assert store.stats()["index"]["generation"] == generation
    finally:
        os.close(other)


@pytest.mark.parametrize("name", ["CURRENT", "users", "state"])
def test_a_process_that_lacks_its_last_descriptor_leaves_the_index_alone(
    tmp_path: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It took a state that it could not read for none, and removed the index that all others were using."""
    path = tmp_path / "store"
    with open_store(path) as store:
        store._shared.background.stop()
        ns = namespace(store)
        put(ns, PROMPTS.tokens(1, 5), judge)
        files = store._shared.c.files

        def fail(wanted: str, flags: int, mode: int = 0o600, **where: Any) -> int:
            if wanted == name:
                raise OSError(errno.EMFILE, "Too many open files")
            return Files.open(files, wanted, flags, mode, **where)

        with of_others(store, path) as index:
            with monkeypatch.context() as patch:
                patch.setattr(files, "open", fail)
                assert get(ns, PROMPTS.tokens(1, 5), judge) == 0
                assert not index.is_missing(1.0), "and would build another one"
            assert get(ns, PROMPTS.tokens(1, 5), judge) == 5


def test_a_process_without_descriptors_leaves_the_index_alone(tmp_path: Path, judge: Judge) -> None:
    path = tmp_path / "store"
    with open_store(path) as store:
        ns = namespace(store)
        put(ns, PROMPTS.tokens(1, 5), judge)
        with of_others(store, path):
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
            try:
                assert get(ns, PROMPTS.tokens(1, 5), judge) == 0
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            assert get(ns, PROMPTS.tokens(1, 5), judge) == 5
