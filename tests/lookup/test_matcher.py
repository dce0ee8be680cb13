"""Matcher: what a lookup counts, how long it holds, what it does where the index or a segment is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.errors import IndexUnavailableError
from kvfs.lookup.matcher import NATIVE_TRIES, Matcher, SearchRunner, later
from kvfs.lookup.search import GroupLookup, Prompt
from kvfs.native.index_walker import HandOverError, MovedError
from kvfs.pages import chunk_hash
from kvfs.system.files import Files
from kvfs.testing import FakeClock
from tests.stores import PAGE_TOKENS, TINY_BYTES, counted, seeded, segment_files, tiny, tokens_of

CHUNKS = 40  # two runs


class Clock(FakeClock, Files):
    """The file system under a clock that is set by hand."""


@pytest.fixture
def store(memory_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(memory_path / "store", capacity="32MiB", files=Clock()) as made:
        made._shared.background.stop()
        yield made


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("m", tiny(), "1")


def clock(ns: kvfs.Namespace) -> Clock:
    files = ns._c.files
    assert isinstance(files, Clock)
    return files


def put(ns: kvfs.Namespace, seed: int, chunks: int) -> list[int]:
    tokens = tokens_of(seed, chunks)
    assert ns.put(tokens, seeded(seed, chunks * TINY_BYTES)).stored == chunks
    return tokens


def prompt_of(ns: kvfs.Namespace, tokens: list[int]) -> Prompt:
    return Prompt(ns.identity.digest, chunk_hash.ChunkHashes(b"".join(ns.chunk_hashes(tokens))))


def test_a_lookup_counts_what_was_asked_and_what_was_found(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    tokens = put(ns, 1, 5)
    asked = [*tokens, *tokens_of(2, 3), 7, 7]
    with counted(store) as moved:
        ns.match(asked).close()
        assert (moved("lookups"), moved("tokens_queried"), moved("tokens_matched")) == (
            1, 8 * PAGE_TOKENS, 5 * PAGE_TOKENS,
        )  # fmt: skip
        assert sum(moved(f"match_us_{n}") for n in range(41)) == 1
        ns.match(tokens_of(3, 2)).close()
        ns.match([]).close()
        assert (moved("lookups"), moved("tokens_queried"), moved("tokens_matched")) == (
            3, 10 * PAGE_TOKENS, 5 * PAGE_TOKENS,
        )  # fmt: skip
    assert ns._c.counters.by_namespace()[ns.identity.digest]["lookups"] == 3


def test_the_time_of_a_lookup_is_counted(
    store: kvfs.Store, ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = put(ns, 1, 5)
    read = Matcher.read

    def slow(self: Matcher, function: Any) -> Any:
        clock(ns).advance(0.003)
        return read(self, function)

    monkeypatch.setattr(Matcher, "read", slow)
    with counted(store) as moved:
        ns.match(tokens).close()
        assert moved("match_us") == pytest.approx(3000, abs=1) and moved("match_us_12") == 1


def test_an_index_that_does_not_answer_is_a_miss_and_is_counted(
    store: kvfs.Store, ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = put(ns, 1, 5)

    def fail(*_: Any) -> Any:
        raise IndexUnavailableError("timed out: after 0.25 s")

    monkeypatch.setattr(Matcher, "read", fail)
    with counted(store) as moved:
        with ns.match(tokens) as match:
            assert not match and match.groups[0].count == 0
        assert (moved("lookups"), moved("lookup_unavailable_timed_out")) == (1, 1)
        assert moved("tokens_queried") == 5 * PAGE_TOKENS and moved("tokens_matched") == 0
    assert ns._matcher.stored(prompt_of(ns, tokens)) == [False] * 5


def test_a_match_ends_its_hold_after_a_minute_and_remembers_when_it_was_made(ns: kvfs.Namespace) -> None:
    tokens = put(ns, 1, 5)
    clock(ns).advance(5.0)
    with ns.match(tokens) as match:
        assert match.hold is not None and match.hold in ns._c.holds
        assert match.hold.expires_at == clock(ns).monotonic() + 60.0
        assert match.at_us == clock(ns).now_us()
        assert ns._c.access_times.request_of(match.last_hash) == match.at_us
    clock(ns).advance(5.0)
    unknown = tokens_of(9, 1)
    ns.match(unknown).close()
    assert ns._c.access_times.request_of(ns.chunk_hashes(unknown)[0]) is None, "a miss is no use"


class Moves:
    """A native session whose calls end as a list says."""

    def __init__(self, ends: list[Exception]) -> None:
        self.ends, self.calls = ends, 0

    def step(self, session: Any) -> str:
        if session is not self:
            return "by the index thread"
        self.calls += 1
        if self.ends:
            raise self.ends.pop(0)
        return "natively"


@pytest.mark.parametrize(
    ("ends", "calls", "answer", "reason"),
    [
        ([], 1, "natively", None),
        ([MovedError("moved")] * (NATIVE_TRIES - 1), NATIVE_TRIES, "natively", None),
        ([MovedError("moved")] * NATIVE_TRIES, NATIVE_TRIES, "by the index thread", None),
        ([MovedError("moved"), HandOverError("busy")], 2, "by the index thread", "native_busy"),
    ],
    ids=["at once", "moved meanwhile", "moved each time", "handed over"],
)
def test_a_step_that_the_library_cannot_end_is_run_by_the_index_thread(
    store: kvfs.Store, ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, ends: list[Exception], calls: int,
    answer: str, reason: str | None,
) -> None:  # fmt: skip
    moves = Moves(list(ends))
    monkeypatch.setattr(ns._c.index, "native_session", lambda: moves)
    with counted(store) as moved:
        assert ns._matcher.read(moves.step) == answer and moves.calls == calls
        assert moved("native_busy") == (reason == "native_busy") and not moved("native_moved")
    monkeypatch.setattr(ns._c.index, "native_session", lambda: None)
    assert ns._matcher.read(moves.step) == "by the index thread" and moves.calls == calls


def test_a_lookup_ends_when_the_index_is_replaced_meanwhile(ns: kvfs.Namespace) -> None:
    """In another generation, a segment's number names another segment."""
    tokens = put(ns, 1, 5)
    lookup = GroupLookup(prompt_of(ns, tokens), ns.layout.groups[0], ns.layout.groups[0].full)
    run = SearchRunner(ns._matcher, {0: lookup})
    assert run(lambda session: session.generation) == run.generation == lookup.generation != ""
    run.generation = "another"
    with pytest.raises(IndexUnavailableError, match="replaced meanwhile"):
        run(lambda session: None)


def test_a_lookup_is_of_one_commit_only_if_nothing_was_read_before(ns: kvfs.Namespace) -> None:
    tokens = put(ns, 1, 5)
    group = ns.layout.groups[0]
    lookup = GroupLookup(prompt_of(ns, tokens), group, group.full)
    run = SearchRunner(ns._matcher, {0: lookup})
    run(lambda session: lookup.read_run(session, 0, stop_at_gap=False))
    state = lookup.state
    assert state is not None and lookup.rows_read
    run(lambda session: None)
    assert lookup.state == state, "no commit since"
    put(ns, 2, 1)
    run(lambda session: None)
    assert lookup.state is None, "what was read is of an older commit"


def test_what_a_match_lacks_a_segment_for_is_cut_off(store: kvfs.Store, ns: kvfs.Namespace) -> None:
    """Pages 0 to 9 are in one segment, 10 to 19 in the next, whose file is gone."""
    tokens = tokens_of(1, 20)
    ns.put(tokens[: 10 * PAGE_TOKENS], seeded(1, 10 * TINY_BYTES))
    store._shared.services().active.finish_all()
    before = set(segment_files(Path(store.path)))
    ns.put(tokens, seeded(2, 10 * TINY_BYTES), start=10)
    (gone,) = set(segment_files(Path(store.path))) - before
    store._shared.services().active.finish_all()
    for hold in list(ns._c.holds):
        hold.close()
    ns._c.segments.close()
    gone.unlink()
    with counted(store) as moved:
        with ns.match(tokens) as match:
            assert (match.chunks, match.groups[0].count) == (10, 10)
        assert moved("lookup_segments_missing") == 1 and moved("tokens_matched") == 10 * PAGE_TOKENS


def test_of_two_published_ends_of_a_segment_the_later_one_counts() -> None:
    tails = {1: 10, 2: 20}
    later(tails, {1: 5, 2: 25, 3: 30})
    assert tails == {1: 10, 2: 25, 3: 30}


def test_a_part_that_no_version_could_have_written_is_left_out(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = ns.layout.groups[0].full
    known: list[list[bytes]] = [[full.pack(), b"\xff" * 8, b"short"]]

    class Session:
        state = "one"

        def parts(self, digest: bytes, number: int) -> list[bytes]:
            assert digest == ns.identity.digest and number == 0
            return known.pop()

    session: Any = Session()
    assert ns._matcher._parts(session, 0) == (full,)
    assert ns._matcher._parts(session, 0) == (full,), "known until the next commit"
    session.state = "two"
    known.append([])
    assert ns._matcher._parts(session, 0) == ()


def test_a_use_without_a_load_is_stamped_for_what_was_found(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamped: list[tuple[int, int]] = []
    monkeypatch.setattr(
        ns._c.access_times, "stamp", lambda _, first, at: stamped.extend((first + n, t) for n, t in enumerate(at))
    )
    pages = ns.prompt([*put(ns, 1, 4), *tokens_of(2, 1)])
    pages.look()
    stamped.clear()
    clock(ns).advance(1.0)
    pages.note_lookup(3 * PAGE_TOKENS)
    assert len(stamped) == len({seq for seq, _ in stamped}) == 4, "four records, each once"
    assert {at for _, at in stamped} == {clock(ns).now_us()}


def test_the_pages_of_a_load_are_stamped_by_it(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the engine decides; what it has already, or leaves out, is."""
    stamped: list[int] = []
    monkeypatch.setattr(ns._c.access_times, "stamp", lambda _, first, at: stamped.extend(range(first, first + len(at))))
    pages = ns.prompt(put(ns, 1, 4))
    pages.look()
    stamped.clear()
    with pages.select({"full": 0}, 4, known=True) as match:
        pages.note_lookup(4 * PAGE_TOKENS, match)
        assert stamped == []
        ns.get(match, bytearray(match.nbytes))
        whole = sorted(stamped)
        assert len(whole) == 4
    stamped.clear()
    with pages.select({"full": 1}, 3) as match:
        pages.note_lookup(2 * PAGE_TOKENS, match)
        assert {whole[0], whole[3]} <= set(stamped), "at least: pages that are stored together have one stamp"


def test_what_is_not_asked_of_the_index_again(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit since a lookup makes it worthless for a match of pages that the caller has chosen."""
    tokens = put(ns, 1, 4)
    lookup = ns._matcher.present(
        prompt_of(ns, tokens), 0, ns.layout.groups[0], ns.layout.groups[0].full, 0, 4, whole=True
    )
    answer: list[Callable[[], Any]] = []

    class Native:
        @property
        def now_state(self) -> Any:
            return answer[0]()

    def busy() -> Any:
        raise HandOverError("busy")

    monkeypatch.setattr(ns._c.index, "native_session", Native)
    for state, current in ((lambda: lookup.state, True), (lambda: "another", False), (busy, False)):
        answer[:] = [state]
        assert ns._matcher._are_current([lookup]) is current
    monkeypatch.setattr(ns._c.index, "native_session", lambda: None)
    assert ns._matcher._are_current([lookup]) is False
