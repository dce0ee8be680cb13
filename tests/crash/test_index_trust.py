"""A current index that may be trusted is neither discarded nor replaced because one process has an error."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

import kvfs
from kvfs.errors import IndexUnavailableError
from kvfs.index.environment import Index
from kvfs.index.lmdb_files import check_size, extend_to_last_page, open_environment
from kvfs.maintenance.rebuild import rebuild
from kvfs.native import library
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, restored, run_child, seeded, tiny, tokens_of
from tools.torture.case import PROMPTS, get, namespace, open_store, put
from tools.torture.judge import Judge


@pytest.fixture
def judge() -> Iterator[Judge]:
    found = Judge()
    yield found
    assert not found.failed, "\n".join([found.line(), *found.notes])


def test_an_index_that_is_only_locked_is_not_rebuilt(
    tmp_path: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen holder of the gate made every other process rebuild: what was published meanwhile was lost."""
    monkeypatch.setattr(library, "loaded", lambda: None)  # native lookups need no lock
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


@pytest.mark.parametrize("size", [0, 4096, 8192, 16384])
@pytest.mark.parametrize("then", ["match", "put", "close"])
def test_an_index_that_is_truncated_ends_no_process(tmp_path: Path, size: int, then: str) -> None:
    """LMDB would read behind the end of the file: SIGBUS, in each process that has the store open."""
    path = tmp_path / "store"

    def use() -> bool:
        store = kvfs.open(path, capacity="16MiB")
        store._shared.background.stop()
        ns = store.namespace("m", tiny(), revision="r1")
        for n in range(20):
            ns.put(tokens_of(n, 2), seeded(n, 2 * TINY_BYTES))
        os.truncate(path / "index" / (path / "index" / "CURRENT").read_text() / "data.mdb", size)
        if then == "match":
            assert not restored(ns, tokens_of(1, 2))
        elif then == "put":
            assert ns.put(tokens_of(50, 2), seeded(50, 2 * TINY_BYTES)).declined == 2
        else:
            store.close()
            return True
        store._shared.rebuild_if_needed()
        return restored(ns, tokens_of(1, 2)) == seeded(1, 2 * TINY_BYTES)

    assert run_child(use)
    with kvfs.open(path) as store:
        ns = store.namespace("m", tiny(), revision="r1")
        assert restored(ns, tokens_of(1, 2)) == seeded(1, 2 * TINY_BYTES)


def test_an_index_file_covers_all_of_its_pages(tmp_path: Path) -> None:
    """A page that a transaction allocates and frees is not written: the file must not seem to be truncated."""
    short, files, dice = 0, Files(), random.Random(2)
    with open(tmp_path / "data.mdb", "x+b") as file:
        env = open_environment(file.fileno(), 1 << 26)
        table = env.open_db(b"pages")
        for _ in range(300):
            with env.begin(write=True) as txn:
                for _ in range(dice.choice((1, 5, 60))):
                    key = dice.randrange(dice.choice((5, 300))).to_bytes(4, "big")
                    if dice.random() < 0.5:
                        txn.put(key, bytes(dice.choice((10, 5000, 20000))), db=table)
                    else:
                        txn.delete(key, db=table)
            try:
                check_size(env, files, file.fileno())
            except lmdb.CorruptedError:
                short += 1
            extend_to_last_page(env, files, file.fileno())
            check_size(env, files, file.fileno())
        env.close()
    assert short, "no transaction of these ended with a page that was not written"


def test_a_generation_that_a_stopped_process_maps_takes_no_space(tmp_path: Path) -> None:
    with kvfs.open(tmp_path / "store", capacity="16MiB") as store:
        index = store._shared.c.index
        held = os.open(tmp_path / "store" / "index" / index.generation / "data.mdb", os.O_RDONLY)
        index.keep_slack()
        assert os.fstat(held).st_blocks > 0
        index.retire()
        assert os.fstat(held).st_blocks == 0
        os.close(held)


def test_a_reader_does_not_map_an_index_that_was_damaged_after_its_close(tmp_path: Path) -> None:
    """LMDB trusts what it maps: one changed page number ended each process that read it."""
    path = tmp_path / "store"
    with kvfs.open(path, capacity="16MiB") as store:
        ns = store.namespace("m", tiny(), revision="r1")
        for n in range(20):
            ns.put(tokens_of(n, 2), seeded(n, 2 * TINY_BYTES))
    data = path / "index" / (path / "index" / "CURRENT").read_text() / "data.mdb"

    def read() -> str:
        with kvfs.open(path, read_only=True) as store:
            ns = store.namespace("m", tiny(), revision="r1")
            assert all(restored(ns, tokens_of(n, 2)) == seeded(n, 2 * TINY_BYTES) for n in range(20))
            return str(store.stats()["index"]["generation"])

    assert read() == data.parent.name
    for seed in range(3):
        content = bytearray(data.read_bytes())
        content[random.Random(seed).randrange(2 * 4096, len(content))] ^= 0xFF
        data.write_bytes(content)
        assert run_child(read).startswith("private-")
