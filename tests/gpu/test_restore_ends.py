"""Restores that end while their prompt is looked up, or whose lookup fails."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU transport needs triton")

import kvfs
from kvfs import TransferState
from kvfs.errors import IndexUnavailableError
from kvfs.lookup.incremental import Lookahead
from kvfs.lookup.matcher import Matcher
from tests.gpu.test_gpu_io import LATE, NOW, PAGE, SECONDS, Engine, attach, prompt, saved
from tests.gpu.test_restore import CHUNKS, UNITS, Looking, restored, small_windows
from tests.stores import counted

__all__ = ["small_windows"]  # a fixture


def half_looked_up(io: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[kvfs.Transfer, Looking]:
    """A restore whose first two pages have been found."""
    looking = Looking(monkeypatch, 2)
    transfer = io.restore(prompt(CHUNKS), UNITS, NOW, LATE)
    assert looking.reached.wait(SECONDS)
    return transfer, looking


def test_a_restore_that_is_cancelled_while_it_is_looked_up_moves_nothing_more(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = saved(ns, CHUNKS), Engine()
    with attach(ns, target.kv) as io:
        transfer, looking = half_looked_up(io, monkeypatch)
        assert not transfer.cancel(0.05)
        looking.go.set()
        assert transfer.cancel(SECONDS)
        result = transfer.wait(SECONDS)
        assert result is not None and transfer.state is TransferState.CANCELLED and result.reason == "cancelled"
        assert result.tokens == 2 * PAGE
        assert target.tokens(range(4)) == source.tokens(range(4)) and (target.memory[:, 4:] == 0xA5A5).all()


@pytest.mark.parametrize("when", ["queued", "waiting"])
def test_a_restore_that_is_cancelled_before_it_is_looked_up_is_cancelled(ns: kvfs.Namespace, when: str) -> None:
    saved(ns, 2)
    target, go = Engine(), threading.Event()

    class After:
        def query(self) -> bool:
            return go.is_set()

    with attach(ns, target.kv) as io:
        first = io.restore(prompt(2), UNITS, After(), LATE)
        transfer = first if when == "waiting" else io.restore(prompt(2), UNITS, NOW, LATE)
        assert transfer.cancel(SECONDS)
        go.set()
        assert first.wait(SECONDS) is not None and transfer.state is TransferState.CANCELLED
        result = transfer.result
        assert result is not None and (result.tokens, result.pages, result.reason) == (0, 0, "cancelled")
        assert restored(io, prompt(2)).tokens == 2 * PAGE


def test_a_deadline_that_passes_during_the_lookup_leaves_the_pages_that_were_found(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = saved(ns, CHUNKS), Engine()
    with attach(ns, target.kv) as io:
        transfer, looking = half_looked_up(io, monkeypatch)
        monkeypatch.setattr(type(io._gpu_context), "late", lambda _, transfer: transfer.note("deadline") or True)
        looking.go.set()
        result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.reason) == (2 * PAGE, "deadline"), result
        assert target.tokens(range(4)) == source.tokens(range(4)) and (target.memory[:, 4:] == 0xA5A5).all()


@pytest.mark.parametrize("found", [0, 2, 6])
def test_an_index_that_stops_answering_leaves_the_pages_that_were_found(
    ns: kvfs.Namespace, store: kvfs.Store, monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    source, target = saved(ns, CHUNKS), Engine()
    more, read = Lookahead.more, ns._matcher.read

    def unavailable(*_: Any) -> Any:
        raise IndexUnavailableError("timeout")

    def until(lookahead: Lookahead, number: int, chunks: int) -> int:
        monkeypatch.setattr(ns._matcher, "read", unavailable if chunks > found else read)
        return more(lookahead, number, chunks)

    monkeypatch.setattr(Lookahead, "more", until)
    with counted(store) as moved, attach(ns, target.kv) as io:
        result = restored(io, prompt(CHUNKS))
        assert (result.tokens, result.declined, moved("lookup_unavailable_timeout")) == (found * PAGE, 0, 1)
    assert target.tokens(range(2 * found)) == source.tokens(range(2 * found))


@pytest.mark.parametrize("again", [False, True], ids=["purged", "stored again"])
def test_pages_whose_row_was_dropped_during_the_lookup_are_a_miss(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    source, target, more = saved(ns, CHUNKS), Engine(), Lookahead.more
    with ns.match(prompt(CHUNKS)) as match:
        pages = b"".join(bytes(page) for page in ns.view(match))

    def after_a_change(lookahead: Lookahead, number: int, chunks: int) -> int:
        if chunks == 6:
            ns._c.index.write(lambda session: session.txn.drop(session.db.pages, delete=False), SECONDS)
            if again:
                assert ns.put(prompt(CHUNKS), pages).stored == CHUNKS
        return more(lookahead, number, chunks)

    monkeypatch.setattr(Lookahead, "more", after_a_change)
    with attach(ns, target.kv) as io:
        result = restored(io, prompt(CHUNKS))
    assert (result.tokens, result.declined) == (CHUNKS * PAGE if again else 0, 0), result
    if again:
        assert target.tokens(UNITS) == source.tokens(UNITS)


def test_an_error_behind_the_lookup_leaves_no_token_restored(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(ns, CHUNKS)

    def fails(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(Matcher, "count", fails)
    with attach(ns, Engine().kv) as io:
        transfer = io.restore(prompt(CHUNKS), UNITS, NOW, LATE)
        result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.pages, result.tiers) == (0, 0, {})
        assert transfer.state is TransferState.FAILED
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["no memory"]


def test_a_lookup_with_a_bug_fails_its_restore_and_no_other(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, more = saved(ns, CHUNKS), Engine(), Lookahead.more

    def fails(lookahead: Lookahead, number: int, chunks: int) -> int:
        if chunks > 2:
            raise RuntimeError("a bug")
        return more(lookahead, number, chunks)

    with attach(ns, target.kv) as io:
        with monkeypatch.context() as patched:
            patched.setattr(Lookahead, "more", fails)
            transfer = io.restore(prompt(CHUNKS), UNITS, NOW, LATE)
            result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.reason) == (0, "error")
        assert transfer.state is TransferState.FAILED
        assert restored(io, prompt(CHUNKS)).tokens == CHUNKS * PAGE
        assert target.tokens(UNITS) == source.tokens(UNITS)
