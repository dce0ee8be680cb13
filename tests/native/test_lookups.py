"""Lookups by the native library find what the Python code finds, row by row and match by match."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.format.checksums import checksum
from kvfs.index.environment import Index
from kvfs.index.native_session import NativeSession
from kvfs.index.rows import CLAIM_SECONDS, RUN, Place, claim, pack_row
from kvfs.index.session import Session
from kvfs.index.tables import ACTIVE, DROPPED, SEALED, SegmentRow, segment_key
from kvfs.lookup.gaps import read_behind_gaps
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.lookup.search import GroupLookup, Prompt, prefix_length, search, walk_all
from kvfs.native import library
from kvfs.native.index_walker import HandOverError, IndexWalker, MovedError
from kvfs.pages.layout import Cell, Group, Need, PageLayout, Part
from kvfs.system.files import Files
from tests.stores import counters, load, run_child, seeded, tiny, tokens_of

NOW = 1_800_000_000
PAGE = 16
WHOLE, LEFT, RIGHT, LOWER = Part(0, 2, 0, 2), Part(0, 1, 0, 2), Part(1, 1, 0, 2), Part(0, 2, 0, 1)
CELL = Cell("bf16", 2)
LAYOUTS = {
    "full": tiny(),
    "hybrid": PageLayout.of(
        [
            Group("full", (0, 1), 2, CELL, Need.all(), PAGE),
            Group("window", (2,), 2, CELL, Need.window_of(5 * PAGE), PAGE),
            Group("state", (3,), 1, CELL, Need.exact(), 1),
        ],
        PAGE,
    ),
    "window": PageLayout.of([Group("window", (3,), 1, CELL, Need.window_of(40 * PAGE), PAGE)], PAGE),
}


@pytest.fixture
def store(native: library.Library, memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="256MiB", segment_bytes="1MiB") as made:
        made._shared.background.stop()
        yield made


def index_of(store: kvfs.Store) -> Index:
    return store._shared.c.index


def fresh(index: Index) -> NativeSession:
    """A native session that knows the last commit."""
    session = index.native_session()
    assert session is not None
    session.walker.last_commit()
    session = index.native_session()
    assert session is not None
    return session


@contextlib.contextmanager
def only(monkeypatch: pytest.MonkeyPatch, how: str) -> Iterator[None]:
    """Lookups of this thread by Python alone, or by the native library alone."""
    mine = threading.get_ident()
    with monkeypatch.context() as patch:
        if how == "python":
            patch.setattr(library, "_paused", True)
        else:
            real = Index.read

            def refused(self: Index, *args: Any) -> Any:
                assert threading.get_ident() != mine, "handed over"
                return real(self, *args)

            patch.setattr(Index, "read", refused)
        yield


# ---------------------------------------------------------------- rows of all kinds


class Shelf:
    """Random rows of one prompt, as writers, faults and time leave them."""

    def __init__(self, seed: int, run_length: int) -> None:
        self.draw = random.Random(seed)
        self.chunks = self.draw.choice([1, 5, 31, 32, 33, 64, 100])
        self.hashes = [hashlib.sha256(b"%d %d" % (seed, i)).digest() for i in range(self.chunks)]
        self.prompt = Prompt(hashlib.sha256(b"%d" % seed).digest(), self.hashes, run_length)
        self.group = Group("full", (0, 1), 2, CELL, Need.all(), PAGE)
        self.length = run_length

    def place(self, chunk: int, segments: Sequence[int]) -> Place:
        draw = self.draw
        name = self.hashes[chunk] if draw.random() < 0.9 else draw.randbytes(32)
        segment = draw.choice(segments) if draw.random() < 0.97 else 10**6
        if draw.random() < 0.3:
            owner = segments[0] if draw.random() < 0.7 else segment  # that one is appended to
            return claim(name, owner, NOW + draw.choice([-1, 0, 1, 2, CLAIM_SECONDS, CLAIM_SECONDS + 1]))
        codec = draw.choice([0] * 12 + [1, 2, 3])
        expires = draw.choice([0] * 8 + [NOW - 1, NOW, NOW + 1])
        return Place(name, draw.randbytes(16), codec, 0, segment, 16 + chunk, 4096, 8 * chunk, chunk, expires)

    def store(self, session: Session, segments: Sequence[int]) -> None:
        draw, last = self.draw, self.chunks - 1
        for _ in range(draw.randrange(12)):
            first = draw.randrange(self.chunks)
            run = first // self.length * self.length
            head = draw.choice([run, run, first])
            slots = range(head, min(run + self.length, last + 1))
            some = list(slots) if draw.random() < 0.6 else sorted(draw.sample(slots, draw.randrange(1, len(slots) + 1)))
            same = self.place(head, segments)
            places = {
                chunk - run: same._replace(chunk_hash=self.hashes[chunk], block=16 + chunk, leaf=8 * chunk, seq=chunk)
                if draw.random() < 0.8 and not same.flags else self.place(chunk, segments)
                for chunk in some
            }  # fmt: skip
            key = self.prompt.key(self.group, draw.choice([WHOLE, WHOLE, LEFT, RIGHT, LOWER]), head)
            value = pack_row(key, places, draw.choice([1, 8, 2**30]))
            session.put_row(key, self.damaged(key, value))

    def damaged(self, key: bytes, value: bytes) -> bytes:
        """The row, seldom damaged; half of the damages have a right checksum, as a writer with a fault would leave."""
        draw = self.draw
        if draw.random() < 0.8:
            return value
        raw = bytearray(value)
        for _ in range(draw.randrange(1, 4)):
            raw[draw.randrange(8, min(len(raw), 60))] = draw.randrange(256)
        raw = raw[: draw.randrange(len(raw))] if draw.random() < 0.1 else raw
        if draw.random() < 0.5 and len(raw) > 8:
            raw[:8] = checksum(bytes(raw[8:]), seed=int.from_bytes(key[:8], "little")).to_bytes(8, "little")
        return bytes(raw) or b"\0"

    def lookup(self, known: Sequence[Part], want: Part) -> GroupLookup:
        lookup = GroupLookup(self.prompt, self.group, want)
        lookup.use_parts(tuple(known))
        return lookup


def add_segments(session: Session) -> list[int]:
    numbers = []
    for state in (ACTIVE, SEALED, SEALED, DROPPED):
        n = len(numbers)
        row = SegmentRow(bytes([n + 1] * 16), bytes(16), bytes(16), state, 0, 1, 5, 4096, 1000 + n, 0, 0)
        numbers.append(session.add_segment(row))
    session.txn.put(segment_key(999_999), b"no row", db=session.db.segments)
    return [*numbers, 999_999]


Runner = Callable[[Callable[[Any], Any]], Any]


def walked(lookup: GroupLookup, run: Runner, how: str, at: tuple[int, int]) -> list[Any]:
    """One kind of walk, and all that it leaves behind."""
    results: list[Any] = []
    if how == "search":
        results.append(search([lookup], PAGE, len(lookup.prompt.hashes), run))
    elif how == "runs":
        last, end = at[0], lookup.prompt.runs()
        while last < end:
            last, found = run(lambda session, last=last: lookup.read_runs(session, last, end, stop_at_gap=True))
            assert found.whole == (found.covered == (1 << lookup.prompt.run(last - 1)[1]) - 1)
    else:
        walk_all(lookup, *at, run, to_first_gap=how == "to a gap")
        if how == "all":
            read_behind_gaps(lookup, run, orphans=bool(at[0] % 2), native=None)
    hits = {
        number: [(hit.run, hit.part, hit.key, hit.value, hit.bits) for hit in found]
        for number in lookup.found.hits
        for found in [lookup.found.hits_of(number)]
    }
    segments, tails = dict(lookup.segments), {number: lookup.tails[number] for number in lookup.segments}
    return [*results, lookup.found.present, lookup.found.claimed, hits, segments, tails, sorted(set(lookup.gapped))]


@pytest.mark.parametrize("run_length", [RUN, 1])
def test_rows_of_all_kinds_are_judged_alike(
    store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, run_length: int
) -> None:
    monkeypatch.setattr(Files, "now_us", lambda self: NOW * 1_000_000)
    index, outcomes = index_of(store), set[str]()
    segments = index.write(add_segments, 5.0)
    shelves = [Shelf(seed + 1000 * run_length, run_length) for seed in range(150)]

    def fill(session: Session) -> None:
        for shelf in shelves:
            shelf.store(session, segments)

    index.write(fill, 5.0)
    for shelf in shelves:
        draw = shelf.draw
        for how in ("search", "runs", "to a gap", "all"):
            known = draw.choice(
                [[WHOLE], [WHOLE, LEFT, RIGHT], [LEFT, RIGHT], [LEFT, RIGHT, LOWER, WHOLE], [LOWER], []]
            )
            want = draw.choice([WHOLE, WHOLE, LEFT, LOWER])
            first = draw.randrange(shelf.chunks)
            at = first // run_length if how == "runs" else first, draw.randrange(first, shelf.chunks) + 1
            session = fresh(index)
            expected = walked(shelf.lookup(known, want), lambda f: index.read(f, 5.0), how, at)

            def native(function: Callable[[Any], Any], session: NativeSession = session) -> Any:
                try:
                    return function(session)
                except HandOverError as exc:
                    assert str(exc) == "busy"  # keys of rows: see NativeSession.keys_there
                    return index.read(function, 5.0)

            found = walked(shelf.lookup(known, want), native, how, at)
            assert found == expected, (shelf.prompt.digest, how, known, want, at)
            outcomes.add("hit" if any(expected[-4].values()) else "miss")
            outcomes.add("claimed" if expected[-5] else "free")
            if how == "all" and known:
                behind = shelf.lookup(known, want)
                behind.generation = session.generation
                walk_all(behind, *at, native, to_first_gap=False)
                read_behind_gaps(behind, native, orphans=bool(at[0] % 2), native=session)
                assert content(behind.found) == content(shelf_found(shelf, known, want, index, at))
        known, want, to = draw.choice([[WHOLE], [WHOLE, LEFT, RIGHT], [LEFT, RIGHT], []]), WHOLE, (0, shelf.chunks)
        leading = prefix_length(shelf_found(shelf, known, want, index, to).present)
        for run in (native, lambda f: index.read(f, 5.0)):
            begun = shelf.lookup(known, want)
            if not walk_all(begun, *to, run, to_first_gap=False, prefix=True):
                read_behind_gaps(begun, run, native=None)
            assert prefix_length(begun.found.present) == leading
    assert outcomes == {"hit", "miss", "claimed", "free"}


def content(found: Any) -> Any:
    return found.present, found.claimed, {run: list(found.hits_of(run)) for run in found.hits}


def shelf_found(shelf: Shelf, known: Sequence[Part], want: Part, index: Index, at: tuple[int, int]) -> Any:
    lookup = shelf.lookup(known, want)
    walk_all(lookup, *at, lambda f: index.read(f, 5.0), to_first_gap=False)
    read_behind_gaps(lookup, lambda f: index.read(f, 5.0), orphans=bool(at[0] % 2))
    return lookup.found


def test_parts_of_many_ranks_are_read_in_order(store: kvfs.Store) -> None:
    index, digest = index_of(store), b"\x07" * 32

    def fill(session: Session) -> None:
        for other in (b"\x06" * 32, digest, b"\x08" * 32):
            for group in (0, 1):
                for n in range(200):
                    session.put_namespace(other, b"descriptor" * 9, group, Part(n, 1, group, 1).pack())
        session.txn.put(digest + b"\0\1", b"", db=session.db.namespaces)  # no part
        session.txn.put(digest + b"\0\1" + b"123456789", b"", db=session.db.namespaces)

    index.write(fill, 5.0)
    session = fresh(index)
    for group in (0, 1, 2):
        expected = [part for part in index.read(lambda s, g=group: s.parts(digest, g), 5.0) if len(part) == 8]
        assert session.parts(digest, group) == expected
        assert len(expected) == (200 if group < 2 else 0)
    assert session.parts(b"\xff" * 32, 0) == []


# ---------------------------------------------------------------- stores


def same(found: PrefixMatch, expected: PrefixMatch) -> bool:
    def content(match: PrefixMatch) -> list[Any]:
        hits = [[(h.run, h.part, h.key, h.value, h.bits) for h in g.hits] for g in match.groups]
        spans = [(g.name, g.first, g.count) for g in match.groups]
        return [match.tokens, match.last_hash, match.segments, match.tails, hits, spans]

    return content(found) == content(expected)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_random_stores_answer_alike(
    native: library.Library, memory_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    """Prompts that share beginnings, part anywhere, have gaps, are stored in parts, and are evicted."""
    draw, layout, prompts = random.Random(seed), LAYOUTS[name], list[list[int]]()
    capacity = "64MiB" if seed else "16MiB"  # seed 0 evicts
    outcomes = set[str]()
    with kvfs.open(memory_path / "store", capacity=capacity, segment_bytes="256KiB") as store:
        store._shared.background.stop()  # its commits would take the gate
        ns = store.namespace("m", layout, revision="r1")
        for turn in range(90):
            base = draw.choice(prompts) if prompts and draw.random() < 0.8 else []
            tokens = base[: draw.randrange(len(base) + 1)] + tokens_of(100 * seed + turn, draw.randrange(1, 90))
            prompts.append(tokens)
            chunks = len(tokens) // PAGE
            end = draw.randrange(1, chunks + 1)
            if draw.random() < 0.9:
                extra = {0: b"image"} if draw.random() < 0.1 else None
                pages = {}
                starts = {}
                for g in layout.groups:
                    starts[g.name] = 0 if g.need.kind == "all" else draw.randrange(end)
                    part = draw.choice([LEFT, RIGHT]) if name == "full" and turn % 3 == 0 else g.full
                    pages[g.name] = seeded(turn, (end - starts[g.name]) * g.part_bytes(part))
                how: dict[str, Any] = {"part": part} if name == "full" else {}
                ns.put(tokens, pages, starts, extra=extra, **how)
            for _ in range(2):
                asked = draw.choice(prompts)
                asked = asked[: draw.randrange(PAGE, len(asked) + 1)] if draw.random() < 0.7 else asked
                leave, part_wanted = draw.randrange(20), draw.choice([None, None, LEFT])
                wanted: dict[str, Any] = {"part": part_wanted} if name == "full" else {}
                got = []
                for mode in ("python", "native", "python"):
                    store._shared.c.chains.forget()
                    with only(monkeypatch, mode):
                        got.append(ns.match(asked, leave, **wanted))
                if same(got[0], got[2]):  # nothing was evicted meanwhile
                    assert same(got[1], got[0]), (turn, len(asked))
                    if got[1].tokens:
                        assert load(ns, got[1]) == load(ns, got[0])
                    outcomes.add("hit" if got[1].tokens else "miss")
                    planned = []
                    for mode in ("python", "native"):
                        with only(monkeypatch, mode):
                            pages_of = ns.prompt(asked)
                            pages_of.look()
                            planned.append((ns.plan_save(asked).missing, pages_of.stored, pages_of.writing))
                    assert planned[0] == planned[1]
                for one in got:
                    one.close()
        assert outcomes == {"hit", "miss"}
        assert not [key for key in counters(store) if key.startswith("native_")]


def test_opaque_keys_are_found_alike(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ns = store.namespace("m", PageLayout.opaque(page_bytes=4096, page_tokens=16), revision="r1")
    draw, keys = random.Random(3), [b"key %d" % n for n in range(60)]
    for _ in range(6):
        some = draw.sample(keys, 10)
        ns.put_keys(some, seeded(1, 10 * 4096))
    for _ in range(20):
        asked = draw.sample(keys, 20)
        found = []
        for mode in ("python", "native"):
            with only(monkeypatch, mode), ns.match_keys(asked) as match:
                found.append((match.tokens, match.segments, ns.present_keys(asked)))
        assert found[0] == found[1]


def test_what_is_being_written_is_in_flight(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ns, tokens = store.namespace("m", tiny(), revision="r1"), tokens_of(1, 70)
    assert ns.put(tokens[: 40 * PAGE], seeded(1, 40 * tiny().page_bytes)).stored == 40
    hashes, group = ns.chunk_hashes(tokens), tiny().groups[0]
    prompt = Prompt(ns.identity.digest, hashes)
    index = index_of(store)
    (segment,) = index.read(lambda s: [n for n, _ in s.segments_in(ACTIVE)], 5.0)
    expires = store._shared.c.files.now_us() // 1_000_000 + CLAIM_SECONDS
    monkeypatch.setattr(Files, "now_us", lambda self: (expires - 1) * 1_000_000)

    def write(session: Session) -> None:
        key = prompt.key(group, group.full, 64)
        session.put_row(key, pack_row(key, {n: claim(hashes[64 + n], segment, expires) for n in range(3)}, 1))

    index.write(write, 5.0)
    for mode in ("python", "native"):
        with only(monkeypatch, mode):
            pages = ns.prompt(tokens)
            pages.look()
            assert pages.stored == {"full": (1 << 40) - 1} and pages.writing == {"full": 7 << 64}
            assert ns.match(tokens).chunks == 40


# ---------------------------------------------------------------- handing over


def test_a_taken_gate_delays_no_lookup(store: kvfs.Store, memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that commits, or is stopped while it does: what was committed before is found meanwhile."""
    ns, tokens = store.namespace("m", tiny(), revision="r1"), tokens_of(1, 40)
    ns.put(tokens, seeded(1, 40 * tiny().page_bytes))
    fresh(index_of(store))
    with contextlib.ExitStack() as stack:
        for name in ("gate", "main"):
            fcntl.flock(stack.enter_context(open(memory_path / "store" / name)), fcntl.LOCK_EX)
        with only(monkeypatch, "native"):
            assert ns.match(tokens).chunks == 40
        assert not any(name.startswith("native_") for name in counters(store))


def commit(store: kvfs.Store, times: int) -> None:
    for n in range(times):
        index_of(store).write(lambda s, n=n: s.put_namespace(b"%032d" % n, b"d", 0, WHOLE.pack()), 5.0)  # type: ignore[misc]


def test_a_walk_that_other_commits_overtake_is_repeated(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ns, tokens = store.namespace("m", tiny(), revision="r1"), tokens_of(1, 40)
    ns.put(tokens, seeded(1, 40 * tiny().page_bytes))
    walk, overtaken = IndexWalker.walk, list[bool]()

    def overtake(self: IndexWalker, *args: Any, **kwargs: Any) -> Any:
        if len(overtaken) < 2:
            overtaken.append(True)
            self.last_txn = 0
            raise MovedError("moved")
        return walk(self, *args, **kwargs)

    monkeypatch.setattr(IndexWalker, "walk", overtake)
    with only(monkeypatch, "native"):
        assert ns.match(tokens).chunks == 40 and len(overtaken) == 2
    monkeypatch.undo()
    commit(store, 5)
    with only(monkeypatch, "native"):
        assert ns.match(tokens).chunks == 40


def test_after_a_commit_the_parts_are_read_again(store: kvfs.Store) -> None:
    ns, tokens = store.namespace("m", tiny(), revision="r1"), tokens_of(1, 40)
    assert ns.match(tokens).tokens == 0
    session = fresh(index_of(store))
    ns.put(tokens, seeded(1, 40 * tiny().page_bytes))
    for call in (session.check_last, lambda: session.parts(ns.identity.digest, 0)):
        with pytest.raises(MovedError):
            call()
    assert ns.match(tokens).chunks == 40 and "native_moved" not in counters(store)


def test_a_new_generation_is_read_after_the_index_thread_has_opened_it(store: kvfs.Store) -> None:
    ns, tokens = store.namespace("m", tiny(), revision="r1"), tokens_of(1, 40)
    ns.put(tokens, seeded(1, 40 * tiny().page_bytes))
    old = fresh(index_of(store))
    index_of(store).retire()
    store._shared.rebuild_if_needed()
    with pytest.raises(HandOverError, match="stale"):
        old.check_last()
    assert ns.match(tokens).chunks == 40
    new = fresh(index_of(store))
    assert new.generation != old.generation and new.check_last() is None


def test_a_generation_that_another_process_replaced_is_stale(store: kvfs.Store, memory_path: Path) -> None:
    session, folder = fresh(index_of(store)), memory_path / "store" / "index"
    shutil.copy(folder / "CURRENT", folder / "other")
    os.rename(folder / "other", folder / "CURRENT")
    with pytest.raises(HandOverError, match="stale"):
        session.check_last()


def test_an_index_that_is_not_in_memory_is_not_waited_for(native: library.Library, disk_path: Path) -> None:
    path = disk_path / "store"
    with kvfs.open(path, capacity="64MiB") as store:
        store.namespace("m", tiny(), revision="r1").put(tokens_of(1, 40), seeded(1, 40 * tiny().page_bytes))
        generation = index_of(store).generation
    with contextlib.ExitStack() as stack:

        def opened(name: str) -> int:
            fd = os.open(path / name, os.O_RDONLY)
            stack.callback(os.close, fd)
            return fd

        data = opened(f"index/{generation}/data.mdb")
        os.fsync(data)
        os.posix_fadvise(data, 0, 0, os.POSIX_FADV_DONTNEED)
        if Files().cached_bytes(data, 0, 8192) != 0:
            pytest.skip("the kernel keeps it in the page cache")
        st = os.stat(path / "index" / "CURRENT")
        walker = IndexWalker(
            native, opened("index/CURRENT"), data, (st.st_dev, st.st_ino, st.st_mtime_ns, st.st_ctime_ns)
        )
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        with contextlib.suppress(HandOverError):  # the read that does not wait has begun to read ahead; or it is there
            walker.last_commit()
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw == waits, "the thread gave up its core to wait"
        os.pread(data, os.fstat(data).st_size, 0)
        assert walker.last_commit() > 0
        walker.close()
        with pytest.raises(HandOverError, match="stale"):
            walker.last_commit()


def test_a_file_system_of_tests_is_left_to_python(native: library.Library, memory_path: Path) -> None:
    class Other(Files):
        pass

    with kvfs.open(memory_path / "store", capacity="64MiB", files=Other()) as store:
        assert index_of(store).native_session() is None
        ns = store.namespace("m", tiny(), revision="r1")
        ns.put(tokens_of(1, 3), seeded(1, 3 * tiny().page_bytes))
        assert ns.match(tokens_of(1, 3)).chunks == 3


# ---------------------------------------------------------------- forks, threads, other processes


def test_a_forked_child_looks_up_by_itself(store: kvfs.Store, memory_path: Path) -> None:
    ns, tokens = store.namespace("m", tiny(), revision="r1"), tokens_of(1, 40)
    ns.put(tokens, seeded(1, 40 * tiny().page_bytes))
    parents = fresh(index_of(store))

    def child() -> tuple[int, str]:
        chunks = ns.match(tokens).chunks
        try:
            parents.check_last()
        except HandOverError as exc:
            return chunks, str(exc)
        return chunks, "answered"

    assert run_child(child) == (40, "stale")
    parents.check_last()
    with open(memory_path / "store" / "gate") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_forks_and_lookups_of_other_threads_do_not_disturb_each_other(store: kvfs.Store) -> None:
    ns, tokens = store.namespace("m", tiny(), revision="r1"), tokens_of(1, 40)
    ns.put(tokens, seeded(1, 40 * tiny().page_bytes))
    over, wrong = threading.Event(), list[int]()

    def look() -> None:
        while not over.is_set():
            with ns.match(tokens) as match:
                if match.chunks != 40:
                    wrong.append(match.chunks)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        assert run_child(lambda: ns.match(tokens).chunks) == 40
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong


def write_more(path: Path, stop: Any) -> None:
    tokens = tokens_of(1, 1500)
    draw = random.Random(1)
    with kvfs.open(path, capacity="256MiB") as store:
        ns, at = store.namespace("m", tiny(), revision="r1"), 1
        while not stop.is_set() and at < 1490:
            count = draw.randrange(1, 8)
            ns.put(tokens[: (at + count) * PAGE], seeded(at, count * tiny().page_bytes), start=at)
            ns.put(tokens_of(1000 + at, 5), seeded(at, 5 * tiny().page_bytes))
            at += count


@pytest.mark.timeout(180)
def test_beside_a_writer_each_answer_lies_between_two_of_python(
    native: library.Library, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokens = memory_path / "store", tokens_of(1, 1500)
    context = multiprocessing.get_context("spawn")
    with kvfs.open(path, capacity="256MiB") as store:
        ns = store.namespace("m", tiny(), revision="r1")
        ns.put(tokens[:PAGE], seeded(0, tiny().page_bytes))
        stop = context.Event()
        writer = context.Process(target=write_more, args=(path, stop))
        writer.start()
        grew = looked = 0
        end = time.monotonic() + 60
        while time.monotonic() < end and (grew < 30 or looked < 200):
            with only(monkeypatch, "python"):
                before = ns.match(tokens).tokens
            between = ns.match(tokens).tokens  # handed over where the writer has the gate
            with only(monkeypatch, "python"):
                after = ns.match(tokens).tokens
            assert before <= between <= after
            looked += 1
            grew += after > before
            if after >= 1480 * PAGE:
                break
        stop.set()
        writer.join()
        assert looked > 20 and grew


def test_a_native_lookup_leaves_the_access_time_of_the_index_alone(native: library.Library, tmp_path: Path) -> None:
    """To write one a read waits for the journal of a file system that hangs, with the interpreter held."""
    with kvfs.open(tmp_path / "store", capacity="64MiB") as store:  # on a disk: tmpfs has no journal
        ns = store.namespace("m", tiny(), "1")
        assert ns.put(tokens_of(1, 4), seeded(1, 4 * tiny().page_bytes)).stored == 4
        walker = fresh(index_of(store)).walker
        (data,) = (tmp_path / "store" / "index").glob("*/data.mdb")
        os.utime(data, ns=(0, data.stat().st_mtime_ns))  # so old that the next read would write it
        for tokens in (tokens_of(1, 4), tokens_of(2, 4)):
            ns.match(tokens).close()
        assert walker.last_commit() > 0 and not counters(store).get("native_handed_over", 0)
        assert data.stat().st_atime_ns == 0


def test_a_member_of_the_group_who_does_not_own_the_index_looks_up_natively(
    native: library.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = Files.open, []

    def not_the_owner(self: Files, name: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_NOATIME:
            refused.append(name)
            raise PermissionError(1, "Operation not permitted", name)
        return real(self, name, flags, *args, **options)

    monkeypatch.setattr(Files, "open", not_the_owner)
    with kvfs.open(tmp_path / "store", capacity="64MiB") as store:
        store.namespace("m", tiny(), "1").match(tokens_of(1, 4)).close()
        assert refused and fresh(index_of(store)).walker.last_commit() > 0
