"""Purging: purged pages stay away after rebuilds and kills; the others are served."""

from __future__ import annotations

import errno
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import ConfigError, StoreAccessError, StoreReadOnlyError
from kvfs.format import segment as fmt
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, SEALED, SegmentRow
from kvfs.maintenance import purge as purge_module
from kvfs.maintenance.purge import _Segment, select
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, counted, load, restored, run_child, scanned, seeded, segment_files, tiny, tokens_of

CHUNKS = 40  # more than a run
SECRET = "correct horse battery staple"


@pytest.fixture
def path(memory_path: Path) -> Path:
    return memory_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(path, capacity="32MiB") as made:
        yield made


def space(store: kvfs.Store, name: str = "m", **how: Any) -> kvfs.Namespace:
    return store.namespace(name, tiny(), **{"revision": "r1", **how})


def pages_of(seed: int, chunks: int = CHUNKS) -> bytes:
    return seeded(seed, chunks * TINY_BYTES)


def put(ns: kvfs.Namespace, seed: int, chunks: int = CHUNKS) -> None:
    assert ns.put(tokens_of(seed, chunks), pages_of(seed, chunks)).stored == chunks


def found(ns: kvfs.Namespace, seed: int, chunks: int = CHUNKS) -> int:
    """Chunks of a prompt that are served, with the right bytes."""
    for _ in range(100):
        before = unanswered(ns)
        data = restored(ns, tokens_of(seed, chunks))
        assert data == pages_of(seed, chunks)[: len(data)]
        if unanswered(ns) == before:
            break  # otherwise the lookup timed out on a loaded machine, which proves nothing
    return len(data) // TINY_BYTES


def unanswered(ns: kvfs.Namespace) -> int:
    return sum(n for name, n in ns._c.counters.snapshot().items() if name.startswith("lookup_unavailable"))


def reopened(path: Path, *, rebuilt: bool = True) -> kvfs.Store:
    if rebuilt:
        (path / "index" / "CURRENT").unlink()
    store = kvfs.open(path)
    assert store.wait_ready()
    return store


def seal(store: kvfs.Store) -> None:
    store._shared.services().active.finish_all()


def resume(store: kvfs.Store) -> None:
    """Let the background tasks finish what is pending; they may be running already."""
    marks, deadline = store._shared.c.marks, time.monotonic() + 10
    while any(mark and mark.pending for mark in map(marks.read, marks.ids())):
        assert time.monotonic() < deadline, "a purge was not finished"
        store._shared.services().purger.resume()


# ---------------------------------------------------------------- what is purged, what stays


@pytest.mark.parametrize("how", ["object", "name", "digest", "hex digest", "salt", "name and salt"])
def test_what_is_named_is_purged_permanently_and_the_rest_is_served(path: Path, how: str) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        mine, other, plain = space(store, salt=SECRET), space(store, salt="another tenant"), space(store, "n")
        for number, ns in enumerate((mine, other, plain)):
            put(ns, number)
        name: Any = {
            "object": mine, "name": "m", "digest": mine.identity.digest, "hex digest": mine.identity.digest.hex(),
            "salt": None, "name and salt": "m",
        }[how]  # fmt: skip
        result = store.purge(name, salt=SECRET if "salt" in how else None)
        left = 0 if how == "name" else CHUNKS
        assert result.pages == (2 if how == "name" else 1) * CHUNKS
        assert [found(mine, 0), found(other, 1), found(plain, 2)] == [0, left, CHUNKS]
        assert store.purge(name, salt=SECRET if "salt" in how else None).pages == 0
    with reopened(path) as store:
        mine, other, plain = space(store, salt=SECRET), space(store, salt="another tenant"), space(store, "n")
        assert [found(mine, 0), found(other, 1), found(plain, 2)] == [0, left, CHUNKS]
        put(mine, 0)  # what is stored after the purge is served
        assert found(mine, 0) == CHUNKS
        assert store.verify().ok
    with reopened(path) as store:
        assert found(space(store, salt=SECRET), 0) == CHUNKS


def test_a_secret_salt_is_written_nowhere(path: Path) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        put(space(store, salt=SECRET), 1)
        put(space(store), 2)
        store.purge(salt=SECRET)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert any(file.parent.name == "purged" for file in files)
    assert not [file for file in files if SECRET.encode() in file.read_bytes()]


def test_segments_that_hold_nothing_else_are_dropped_at_once(store: kvfs.Store) -> None:
    ns = space(store)
    put(ns, 1)
    result = store.purge(ns)
    assert (result.pages, result.segments_dropped) == (CHUNKS, 1)
    assert result.bytes_freed > CHUNKS * TINY_BYTES
    assert not segment_files(Path(store.path)) and not list((Path(store.path) / "purged").iterdir())
    assert store.stats()["used_bytes"] == 0


def test_a_purged_prefix_leaves_other_prompts_alone(path: Path) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        ns = space(store)
        common, long = tokens_of(1, 20), tokens_of(1, 20) + tokens_of(2, 20)
        fork = tokens_of(1, 20) + tokens_of(3, 20)
        bytes_of = {id(long): pages_of(7), id(fork): pages_of(7)[: 20 * TINY_BYTES] + pages_of(8, 20)}
        for prompt in (long, fork):
            ns.put(prompt, bytes_of[id(prompt)])
        put(ns, 4)
        assert store.purge(ns, chunks=ns.chunk_hashes(fork)[20:]).pages == 20
        assert (len(restored(ns, fork)), restored(ns, long)) == (20 * TINY_BYTES, bytes_of[id(long)])
        assert store.purge(ns, prefix=common).pages == 20
        assert restored(ns, long) == b"" and found(ns, 4) == CHUNKS
    with reopened(path) as store:
        ns = space(store)
        assert restored(ns, long) == restored(ns, fork) == b"" and found(ns, 4) == CHUNKS
        assert ns.put(long, bytes_of[id(long)]).stored == 20  # the tail was never purged
        assert restored(ns, long) == bytes_of[id(long)]


def test_opaque_pages_are_purged_by_namespace(store: kvfs.Store) -> None:
    ns = store.namespace("o", kvfs.PageLayout.opaque(4096, 16), revision="r1")
    keys = [b"a", b"b", b"c"]
    put(space(store), 1)
    ns.put_keys(keys, seeded(1, 3 * 4096))
    assert store.purge("o").pages == 3
    assert ns.match_keys(keys).tokens == 0 and found(space(store), 1) == CHUNKS


NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "nothing to purge"),
    "no salt": ({"salt": ""}, "salt is"),
    "half a character as salt": ({"salt": "\ud800"}, "not Unicode text"),
    "a number": ({"namespace": 7}, "namespace is 7"),
    "half a digest": ({"namespace": b"x" * 16}, "16 bytes"),
    "tokens without a namespace": ({"namespace": "m", "prefix": [1, 2]}, "need a Namespace"),
    "one hash": ({"namespace": "m", "chunks": b"x" * 32}, "list"),
    "a short hash": ({"namespace": "m", "chunks": [b"x"]}, "32 bytes"),
    "extra without tokens": ({"namespace": "m", "extra": {0: b"x"}}, "extra belongs"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_purge_that_makes_no_sense_is_refused(store: kvfs.Store, what: str) -> None:
    put(space(store), 1)
    arguments, text = NONSENSE[what]
    with pytest.raises(ConfigError, match=text):
        store.purge(**arguments)
    assert found(space(store), 1) == CHUNKS


def test_a_store_that_is_only_read_purges_nothing(path: Path) -> None:
    kvfs.open(path, capacity="32MiB").close()
    with kvfs.open(path, read_only=True) as store, pytest.raises(StoreReadOnlyError):
        store.purge("m")


# ---------------------------------------------------------------- pins, matches, views, other processes


def test_pins_are_named_and_nothing_changes(path: Path) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        ns = space(store)
        put(ns, 1)
        put(ns, 2)
        assert store.pin("system prompt", ns, tokens_of(1, CHUNKS)) == CHUNKS * 16
        for how in ({"namespace": "m"}, {"namespace": ns, "prefix": tokens_of(1, 3)}):
            with pytest.raises(ConfigError, match=r"'system prompt'.*unpin"):
                store.purge(**how)
        assert (found(ns, 1), found(ns, 2)) == (CHUNKS, CHUNKS)
        assert not list((path / "purged").iterdir())
        assert store.purge(ns, prefix=tokens_of(2, CHUNKS)).pages == CHUNKS
        store.unpin("system prompt")
        assert store.purge("m").pages >= CHUNKS  # the pinned copies, and what they were made from
        assert found(ns, 1) == 0
    with reopened(path) as store:
        assert (found(space(store), 1), found(space(store), 2)) == (0, 0)


def test_matches_and_views_stay_readable_until_they_end(store: kvfs.Store) -> None:
    ns = space(store)
    put(ns, 1)
    put(space(store, "n"), 2)
    match = ns.match(tokens_of(1, CHUNKS))
    sent = pickle.dumps(match)
    views = ns.view(match)
    store.purge("m")
    assert ns.match(tokens_of(1, CHUNKS)).tokens == 0
    assert next(iter(load(ns, match).values())) == pages_of(1)
    match.close()
    assert b"".join(views) == pages_of(1)
    assert ns.get(match, bytearray(match.nbytes)) == 0
    assert ns.get(pickle.loads(sent), bytearray(match.nbytes)) == 0, "the segment is still there, the pages are not"
    assert found(space(store, "n"), 2) == CHUNKS


def test_a_mapped_segment_is_charged_until_the_view_ends(store: kvfs.Store) -> None:
    ns = space(store)
    put(ns, 1)
    with ns.match(tokens_of(1, CHUNKS)) as match:
        views = ns.view(match)
    result = store.purge("m")
    assert (result.segments_dropped, result.bytes_freed) == (1, 0)
    assert store.stats()["used_bytes"] > CHUNKS * TINY_BYTES
    assert b"".join(views) == pages_of(1)
    views.clear()
    store.gc()
    assert store.stats()["used_bytes"] == 0 and not list((Path(store.path) / "purged").iterdir())


def test_pages_of_a_living_writer_are_purged_and_what_it_stores_later_stays(path: Path) -> None:
    """Its active segment is not taken over; a rebuild still distinguishes the purged records from the later ones."""
    with kvfs.open(path, capacity="32MiB") as store:
        ready, go = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            try:
                mine = kvfs.open(path)
                mine._shared.background.stop()  # a background task seals what was purged
                put(space(mine), 1)
                os.write(ready[1], b"1")
                os.read(go[0], 1)
                assert found(space(mine), 1) == 0
                put(space(mine), 1)
                os.write(ready[1], b"2")
                os.read(go[0], 1)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            assert os.read(ready[0], 1) == b"1"
            assert store.purge("m").pages == CHUNKS
            assert found(space(store), 1) == 0
            os.write(go[1], b"1")
            assert os.read(ready[0], 1) == b"2"
            assert found(space(store), 1) == CHUNKS
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    with reopened(path) as store:
        assert found(space(store), 1) == CHUNKS
        assert store._shared.rebuilt is not None and store._shared.rebuilt.purged == CHUNKS


def test_a_purged_active_segment_is_sealed_and_dropped_by_its_owner(path: Path) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        put(space(store), 1)
        assert run_child(lambda: kvfs.open(path).purge("m").pages) == CHUNKS
        assert found(space(store), 1) == 0
        store._shared.background.wake("purge")
        deadline = time.monotonic() + 10
        left = lambda: [*segment_files(path), *(path / "purged").iterdir()]  # noqa: E731 - the mark is removed last
        while left() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left()


def test_a_store_from_before_there_were_marks_opens(path: Path) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        put(space(store), 1)
    for rebuilt in (False, True):
        (path / "purged").rmdir()
        if rebuilt:
            (path / "index" / "CURRENT").unlink()
        with kvfs.open(path, read_only=True) as store:
            assert found(space(store), 1) == CHUNKS
        with kvfs.open(path) as store:
            assert store.wait_ready()
            assert found(space(store), 1) == CHUNKS


# ---------------------------------------------------------------- disasters


class Dying(Files):
    """A process that dies of SIGKILL before its n-th change of the file system, counted once it is armed."""

    left = -1

    def _count(self) -> None:
        if self.left >= 0:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def rename(self, *names: Any, **how: Any) -> None:
        self._count()
        super().rename(*names, **how)

    def unlink(self, *names: Any, **how: Any) -> None:
        self._count()
        super().unlink(*names, **how)

    def fsync(self, fd: int) -> None:
        self._count()
        super().fsync(fd)

    def pwritev(self, *arguments: Any) -> int:
        self._count()
        return super().pwritev(*arguments)


def ends_alive(work: Callable[[], object]) -> bool:
    """Run ``work`` in a child that may kill itself; whether it completed."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"the child failed: {status}"
    return status == 0


@pytest.mark.parametrize("index", ["lives on", "is rebuilt"])
def test_killed_at_any_step_of_a_purge(memory_path: Path, index: str) -> None:
    """No half-purged prompt is served as whole, the next process finishes the purge, and other pages stay."""
    for calls in range(200):
        path = memory_path / str(calls)
        with kvfs.open(path, capacity="32MiB") as store:
            put(space(store, "n"), 2)
            put(space(store, salt=SECRET), 1)
            seal(store)
            put(space(store, salt=SECRET), 3)
            seal(store)

        files = Dying()

        def work(path: Path = path, files: Dying = files, calls: int = calls) -> None:
            mine = kvfs.open(path, files=files)
            files.left = calls
            mine.purge(salt=SECRET)

        witness = kvfs.open(path, files=files) if index == "lives on" else None
        ended = ends_alive(work)
        store = witness or kvfs.open(path)
        with store:
            assert store.wait_ready()
            if ended:
                assert (found(space(store, salt=SECRET), 1), found(space(store, salt=SECRET), 3)) == (0, 0)
            marked = store._shared.c.marks.ids()
            resume(store)
            if marked:
                assert found(space(store, salt=SECRET), 1) == 0 or found(space(store, salt=SECRET), 3) == 0
            assert found(space(store, "n"), 2) == CHUNKS
            store.purge(salt=SECRET)
            assert (found(space(store, salt=SECRET), 1), found(space(store, salt=SECRET), 3)) == (0, 0)
            assert not [file for file in (path / "purged").iterdir() if file.name.startswith(".")]
            assert store.verify().ok
        with reopened(path) as store:
            assert (found(space(store, salt=SECRET), 1), found(space(store, salt=SECRET), 3)) == (0, 0)
            assert found(space(store, "n"), 2) == CHUNKS
        if ended:
            break
    assert 5 < calls < 199, "the purge never completed"


def test_a_purge_while_the_index_is_rebuilt_is_finished_later(path: Path) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        put(space(store), 1)
        put(space(store, "n"), 2)
        seal(store)
        store._shared.c.index.retire()
        with pytest.raises(kvfs.StoreLockedError, match="again"):
            store.purge("m")
        assert store.wait_ready()
        resume(store)
        assert (found(space(store), 1), found(space(store, "n"), 2)) == (0, CHUNKS)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * 36, b"KVFSPRG1" + b"\0" * 36])
def test_a_damaged_mark_means_the_whole_segment(path: Path, content: bytes) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        put(space(store), 1)
        put(space(store, "n"), 2)
        store.purge("m")
    (mark,) = (path / "purged").iterdir()
    mark.write_bytes(content)
    with reopened(path) as store:
        assert (found(space(store), 1), found(space(store, "n"), 2)) == (0, 0)
        put(space(store), 1)
        assert found(space(store), 1) == CHUNKS


@pytest.mark.parametrize("by", ["a purge", "the background"])
def test_a_mark_that_cannot_be_read_for_lack_of_descriptors_drops_no_segment(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    store._shared.background.stop()
    spaces = [space(store, name) for name in "abc"]
    for number, ns in enumerate(spaces):
        put(ns, number, 8)
    seal(store)
    (segment,) = segment_files(Path(store.path))
    assert store.purge(spaces[2]).pages == 8
    files = store._shared.c.files

    def fail(name: str, flags: int, mode: int = 0o600, **where: Any) -> int:
        if name == segment.stem:
            raise OSError(errno.EMFILE, "Too many open files")
        return Files.open(files, name, flags, mode, **where)

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", fail)
        with pytest.raises((OSError, StoreAccessError), match="open files"):
            store.purge(spaces[0]) if by == "a purge" else store._shared.services().purger.resume()
    assert found(spaces[1], 1, 8) == 8
    assert store.purge(spaces[0]).pages == 8
    assert [found(ns, number, 8) for number, ns in enumerate(spaces)] == [0, 8, 0]


def test_a_segment_whose_contents_are_unknown_is_dropped(path: Path) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        put(space(store), 1)
        seal(store)
        (file,) = segment_files(path)
        data = bytearray(file.read_bytes())
        data[4096 + 5 * 160 + 30] ^= 1  # the index still names the records after this entry
        file.write_bytes(data)
        assert found(space(store), 1) == CHUNKS
        store.purge("m")
        assert found(space(store), 1) == 0 and not segment_files(path)


def test_a_damaged_segment_of_a_living_writer_is_taken_over(path: Path) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        ready, go = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            try:
                mine = kvfs.open(path)
                mine._shared.background.stop()  # a background task would notice before the put does
                put(space(mine), 1)
                os.write(ready[1], b"1")
                os.read(go[0], 1)
                again = space(mine).put(tokens_of(2, CHUNKS), pages_of(2))
                os.write(ready[1], again.reason.encode() or b"-")
                put(space(mine), 3)
                os.write(ready[1], b"3")
                os.read(go[0], 1)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            assert os.read(ready[0], 1) == b"1"
            (file,) = segment_files(path)
            with file.open("r+b") as damaged:
                damaged.seek(4096 + 5 * 160)
                damaged.write(bytes(160))
            store.purge("m")
            assert found(space(store), 1) == 0
            os.write(go[1], b"1")
            assert os.read(ready[0], len(b"index")) == b"index", "the put that met it declines, the next one stores"
            assert os.read(ready[0], 1) == b"3"
            assert found(space(store), 3) == CHUNKS
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_strange_and_unfinished_files_stop_no_purge(path: Path) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        put(space(store), 1)
        put(space(store, "n"), 2)
        for name in ("z" * 32 + ".kvs", "0" * 32 + ".kvs", "1" * 32 + ".kvs", "notes.txt"):
            (path / "segments" / name).write_bytes(b"?" * 100)
        (path / "segments" / ("2" * 32 + ".kvs")).mkdir()
        store.purge("m")
        assert (found(space(store), 1), found(space(store, "n"), 2)) == (0, CHUNKS)
        assert len(list((path / "purged").iterdir())) == 1


def test_eviction_relocates_nothing_that_was_purged(path: Path) -> None:
    """A copy in another segment would come back in a rebuild."""
    with kvfs.open(path, capacity="16MiB", segment_bytes="256KiB") as store:
        ns, other = space(store), space(store, "n")
        kept: list[int] = []
        for seed in range(4):
            put(ns, seed)
            put(other, seed)
        store.purge(ns, prefix=tokens_of(0, CHUNKS))
        with counted(store) as moved:
            for seed in range(10, 130):
                other.put(tokens_of(seed, CHUNKS), pages_of(seed))
                found(ns, 1)
                found(ns, 2)  # hot: worth relocating
            assert moved("segments_evicted") and moved("pages_carried")
        assert found(ns, 0) == 0
        kept = [found(ns, 1), found(ns, 2)]
    with reopened(path) as store:
        assert [found(space(store), seed) for seed in range(3)] == [0, *kept]


def test_random_purges_equal_a_dict(path: Path) -> None:
    draw = random.Random(5)
    model: dict[tuple[str, int], int] = {}
    store = kvfs.open(path, capacity="64MiB")
    for step in range(120):
        name, seed, chunks = draw.choice("abc"), draw.randrange(6), draw.randrange(1, CHUNKS)
        ns = space(store, name, salt=f"salt {name}")
        action = draw.choice(["put", "put", "put", "purge prompt", "purge space", "rebuild", "seal"])
        if action == "put":
            ns.put(tokens_of(seed, chunks), pages_of(seed, chunks))
            model[name, seed] = max(chunks, model.get((name, seed), 0))
        elif action == "purge prompt":
            store.purge(ns, prefix=tokens_of(seed, CHUNKS))
            model.pop((name, seed), None)
        elif action == "purge space" and step % 3 == 0:
            store.purge(salt=f"salt {name}")
            model = {key: n for key, n in model.items() if key[0] != name}
        elif action == "rebuild":
            store.close()
            store = reopened(path)
        elif action == "seal":
            seal(store)
        for key in [(n, s) for n in "abc" for s in range(6)]:
            assert found(space(store, key[0], salt=f"salt {key[0]}"), key[1]) == model.get(key, 0), (step, key)
    assert store.verify().ok
    store.close()


@pytest.mark.parametrize(("state", "marked"), [(ACTIVE, False), (SEALED, True)])
def test_a_damaged_file_that_was_charged_without_records_is_marked(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, state: int, marked: bool
) -> None:
    """It was taken for a segment that its writer has just made, so a rebuild could bring its pages back."""
    purger = store._shared.services().purger
    monkeypatch.setattr(purger, "_read", lambda *_: _Segment(None, {}, damaged=True))
    row = SegmentRow(bytes(16), bytes(16), bytes(16), state, 0, 1, 0, 4096, 4096, 4096, 0)
    mark, _ = purger._mark_for(bytes(16), select(digest=None, name="m", salt=None, chunks=None), row)
    assert (mark is not None) is marked


# ---------------------------------------------------------------- many namespaces, long prompts


def _counting(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """The first arguments of all calls of a function from now on."""
    calls, function = list[Any](), getattr(owner, name)

    def call(*args: Any, **how: Any) -> Any:
        calls.append(args[0])
        return function(*args, **how)

    patch.setattr(owner, name, call)
    return calls


def test_a_purge_of_one_page_parses_no_other_namespace_and_no_other_segment(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It parsed all entries and all descriptors of the store: 9.6 s with 60,000 namespaces."""
    store._shared.background.stop()
    for number in range(40):
        put(space(store, f"m{number}"), number, 2)
        if number % 10 == 9:
            seal(store)
    scans = _counting(monkeypatch, purge_module, "scan_segment")
    namespaces = _counting(monkeypatch, purge_module, "read_namespace")
    walks = _counting(monkeypatch, Session, "contents")
    assert store.purge(space(store, "m7"), prefix=tokens_of(7, 2)).pages == 2
    assert len(scans) == 2, "to mark the records, and to remove them from the index"
    assert len(namespaces) == 2 and not walks
    assert [found(space(store, f"m{number}"), number, 2) for number in (6, 7, 8)] == [2, 0, 2]
    assert "m7" not in {i.name for i in store.catalog.namespaces()}


def test_a_purge_of_a_long_prompt_reads_each_of_its_segments_once_and_syncs_in_batches(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """62,500 pages of one prompt: 11.4 s, most of it for two scans and three syncs of each segment."""
    with kvfs.open(memory_path / "long", capacity="16MiB", segment_bytes="256KiB") as store:
        store._shared.background.stop()
        put(space(store), 1, 400)
        seal(store)
        segments = len(segment_files(Path(store.path)))
        assert segments > 6
        scans = _counting(monkeypatch, purge_module, "scan_segment")
        syncs = _counting(monkeypatch, store._shared.c.files, "fsync")
        result = store.purge(space(store), prefix=tokens_of(1, 400))
        assert (result.pages, result.segments_dropped) == (400, segments)
        assert len(scans) == segments and len(syncs) <= segments + 8
        assert not segment_files(Path(store.path)) and not store._shared.c.marks.ids()


def test_a_segment_whose_table_hides_a_record_is_not_taken_for_free_of_it(path: Path) -> None:
    """The fast look at chunk hashes ends at a damaged entry, as a scan does: then the rest is unknown."""
    with kvfs.open(path, capacity="32MiB") as store:
        put(space(store, "n"), 2, 10)
        put(space(store), 1, 10)
        seal(store)
        (file,) = segment_files(path)
        data = bytearray(file.read_bytes())
        data[4096 + 20 * 160 + 70] ^= 1  # the chunk hash of a record that the index names
        file.write_bytes(data)
        assert found(space(store), 1, 10) == 10
        store.purge(space(store), chunks=space(store).chunk_hashes(tokens_of(1, 10))[8:])
        assert found(space(store), 1, 10) == 0, "dropped: what is behind the damage is unknown"


@pytest.mark.parametrize("folder", ["segments", "doomed", ""])
def test_a_mark_stays_as_long_as_a_file_may_bring_its_records_back(store: kvfs.Store, path: Path, folder: str) -> None:
    """Of a segment that no row names."""
    segment_id = b"z" * 16
    if folder:
        (path / folder / f"{segment_id.hex()}.kvs").write_bytes(b"")
    marks = store._shared.c.marks
    marks.write(fmt.PurgeMark(segment_id, fmt.PURGE_ALL, 0, b""))
    store._shared.services().purger.resume()
    assert marks.has(segment_id) is bool(folder)


def test_a_purge_that_was_interrupted_is_finished_in_rows_of_runs_and_of_forks(path: Path) -> None:
    """The mark says which records; most have no row of their own, and those behind a fork may have one."""
    with kvfs.open(path, capacity="32MiB") as store:
        store._shared.background.stop()
        ns = space(store)
        put(ns, 1, 8)
        fork = tokens_of(1, 8)[: 2 * 16] + tokens_of(2, 6)
        assert ns.put(fork, pages_of(1, 2) + pages_of(2, 6)).stored == 6
        seal(store)
        (file,) = segment_files(path)
        wanted = set(ns.chunk_hashes(tokens_of(1, 8))[5:]) | set(ns.chunk_hashes(fork)[6:])
        seqs = [e.seq for e in scanned(file).parts() if e.chunk_hash in wanted]
        assert len(seqs) == 5
        mark = sum(1 << seq for seq in seqs).to_bytes(4, "little")
        store._shared.c.marks.write(fmt.PurgeMark(bytes.fromhex(file.stem), fmt.PURGE_PENDING, 1, mark))
        resume(store)
        with ns.match(tokens_of(1, 8)) as first, ns.match(fork) as second:
            assert (first.chunks, second.chunks) == (5, 6)
        report = store.verify()
        assert report.ok and report.index_pages == 14 - 5, report.problems
        [info] = store.catalog.namespaces()
        assert info.pages == 14 - 5, "they are not counted any more"
        assert ns.put(tokens_of(1, 8), pages_of(1, 8)).stored == 3


@pytest.mark.parametrize(("error", "dropped"), [(errno.EIO, True), (errno.EACCES, False), (errno.ENOMEM, False)])
def test_only_a_segment_that_the_disk_cannot_read_is_purged_as_a_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: int, dropped: bool
) -> None:
    with kvfs.open(path, capacity="32MiB") as store:
        store._shared.background.stop()
        put(space(store), 1)
        put(space(store, "n"), 2)
        seal(store)

        def fail(*_: object) -> None:
            raise OSError(error, os.strerror(error))

        with monkeypatch.context() as patch:
            patch.setattr(purge_module, "scan_segment", fail)
            if dropped:
                store.purge("m")
            else:
                with pytest.raises((OSError, StoreAccessError)):
                    store.purge("m")
        assert (found(space(store), 1), found(space(store, "n"), 2)) == ((0, 0) if dropped else (CHUNKS, CHUNKS))


def test_a_segment_is_free_of_what_none_of_its_names_can_mean(store: kvfs.Store, path: Path) -> None:
    """Found out without reading its records; where that is unknown it is looked at."""
    store._shared.background.stop()
    ns, purger = space(store), store._shared.services().purger
    put(ns, 1)
    seal(store)
    (file,) = segment_files(path)
    segment_id = bytes.fromhex(file.stem)
    row = next(row for _, row in store._shared.c.index.read(lambda s: s.segments(), 5.0))

    def free(digest: bytes | None, chunks: Iterable[bytes] | None = None, row: SegmentRow | None = row) -> bool:
        selection = select(digest=digest, name=None if digest else "m", salt=None, chunks=chunks)
        return purger._is_free_of(selection, segment_id, row)

    there, other = ns.chunk_hashes(tokens_of(1, CHUNKS))[5], ns.chunk_hashes(tokens_of(2, 1))[0]
    digest, unknown = ns.identity.digest, bytes(32)
    assert [free(digest), free(unknown), free(None)] == [False, True, False]
    assert [free(digest, [there]), free(digest, [other]), free(digest, [other, there])] == [False, True, False]
    assert [free(unknown, [there]), free(unknown, [other])] == [False, True]
    assert free(unknown, row=None) and not free(unknown, row=row._replace(records=row.records + 1))
    file.unlink()
    assert not free(unknown) and not free(unknown, row=None)


def test_what_a_purged_segment_still_holds_is_found_out_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mark stays as long as the segment: each look would read its tables again."""
    with kvfs.open(path, capacity="32MiB") as store:
        store._shared.background.stop()
        put(space(store), 1)
        put(space(store, "n"), 2)
        seal(store)
        assert store.purge("m").pages == CHUNKS
    with kvfs.open(path) as store:
        store._shared.background.stop()
        scans = _counting(monkeypatch, purge_module, "scan_segment")
        purger = store._shared.services().purger
        purger.resume()
        assert len(scans) == 1, "another process has purged it"
        purger.resume()
        assert len(scans) == 1
        assert found(space(store, "n"), 2) == CHUNKS and found(space(store), 1) == 0
        store.purge("n")
        assert not segment_files(path) and not store._shared.c.marks.ids()
