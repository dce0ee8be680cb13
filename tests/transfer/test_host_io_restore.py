"""Restores to host memory: looked up and loaded in one, on the threads of loads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs import PageOutcome, TransferState
from kvfs.errors import ConfigError
from kvfs.lookup.matcher import Matcher
from kvfs.transfer.control import TransferControl, TransferTask
from tests.stores import counted, segment_files
from tests.transfer.test_host_io_hybrid import CHUNKS, LATE, PAGE, PROMPT, SECONDS, UNITS, Engine, hybrid

LAYOUT = hybrid(2, 3)
WINDOW = 8


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="64MiB") as opened:
        yield opened


@pytest.fixture
def ns(store: kvfs.Store) -> kvfs.Namespace:
    return store.namespace("hybrid", LAYOUT, "1")


def save(ns: kvfs.Namespace, chunks: int) -> Engine:
    engine = Engine(LAYOUT, seed=1)
    with ns.attach(engine.kvs) as io:
        result = io.save(ns.plan_save(PROMPT[: chunks * PAGE]), UNITS, deadline=LATE).wait(SECONDS)
        assert result is not None and result.pages == 2 * chunks
    return engine


def same(source: Engine, target: Engine, chunks: int) -> bool:
    """All of the full group and the last pages of the other one are equal, and nothing else was written."""
    first = 2 * max(0, chunks - WINDOW)
    end = 2 * chunks
    return (
        (target.memory[0][:, :end] == source.memory[0][:, :end]).all()
        and (target.memory[1][:, first:end] == source.memory[1][:, first:end]).all()
        and (target.memory[0][:, end:] == 0xA5A5).all()
        and (target.memory[1][:, :first] == 0xA5A5).all()
    )


@pytest.mark.parametrize("stored", [0, 1, WINDOW, CHUNKS - 1, CHUNKS])
def test_what_is_stored_of_a_prompt_is_restored(ns: kvfs.Namespace, store: kvfs.Store, stored: int) -> None:
    source, target, told = save(ns, stored) if stored else Engine(LAYOUT), Engine(LAYOUT), list[object]()
    with counted(store) as moved, ns.attach(target.kvs) as io:
        transfer = io.restore(PROMPT, UNITS, on_page=told.append, on_done=told.append)
        result = transfer.wait(SECONDS)
        assert result is not None
        pages = stored + min(stored, WINDOW)
        assert (result.tokens, result.pages, result.declined) == (stored * PAGE, pages, 0), result
        assert [page.outcome for page in told[:-1]] == [PageOutcome.LOADED] * pages  # type: ignore[attr-defined]
        assert told[-1] is transfer
        assert [moved(name) for name in ("lookups", "tokens_queried", "tokens_matched", "tokens_loaded")] == [
            1, CHUNKS * PAGE, stored * PAGE, stored * PAGE,
        ]  # fmt: skip
        assert io.ring.free == io.ring.slots
    assert same(source, target, stored)
    assert not [hold for hold in ns._c.holds if hold.held]


def test_it_is_looked_up_when_its_turn_comes_and_cancelled_before(ns: kvfs.Namespace) -> None:
    source, target, go = save(ns, 3), Engine(LAYOUT), threading.Event()
    with ns.attach(target.kvs, threads=1) as io:
        first = io.restore(PROMPT, UNITS, go.wait)
        second, third = io.restore(PROMPT, UNITS), io.restore(PROMPT[: 2 * PAGE], UNITS)
        assert second.cancel(SECONDS) and second.state is TransferState.CANCELLED
        go.set()
        results = [transfer.wait(SECONDS) for transfer in (first, second, third)]
        assert [result is not None and result.tokens for result in results] == [3 * PAGE, 0, 2 * PAGE]
    assert same(source, target, 3)


def test_a_restore_that_is_cancelled_right_after_its_lookup_restores_nothing(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(ns, CHUNKS)
    target, begun, count = Engine(LAYOUT), threading.Event(), Matcher.count

    def cancelled(*args: Any) -> None:
        assert begun.wait(SECONDS) and transfer.cancel(SECONDS)
        count(*args)

    monkeypatch.setattr(Matcher, "count", cancelled)
    with ns.attach(target.kvs) as io:
        transfer = io.restore(PROMPT, UNITS)
        begun.set()
        result = transfer.wait(SECONDS)
        assert result is not None and (result.tokens, result.pages, result.tiers) == (0, 0, {}), result
        assert transfer.state is TransferState.CANCELLED
    assert same(target, target, 0)


def test_pages_that_are_offered_while_a_transfer_ends_are_too_late() -> None:
    class Late:
        """Released when the transfer has ended, and has not been summed up."""

        def release(self) -> None:
            transfer.offer({0: 1}, lambda _: (PAGE, {}))

    task = TransferTask("load", {}, {0: ("full", (0,), 8)}, LATE, lambda _: (0, {}))
    transfer = TransferControl(task, lambda _: None)
    transfer._leases.add(Late())  # type: ignore[arg-type]
    transfer.end()
    assert transfer.result is not None and (transfer.result.tokens, transfer.result.declined) == (0, 0)


def test_extra_keys_are_those_of_the_call(ns: kvfs.Namespace) -> None:
    """The engine may use its mapping again, for the next request."""
    images, target, go = (
        {b"cat": Engine(LAYOUT, seed=1), b"dog": Engine(LAYOUT, seed=2)},
        Engine(LAYOUT),
        threading.Event(),
    )
    for image, engine in images.items():
        with ns.attach(engine.kvs) as io:
            result = io.save(ns.plan_save(PROMPT, extra={0: image}), UNITS, deadline=LATE).wait(SECONDS)
            assert result is not None and not result.declined
    with ns.attach(target.kvs, threads=1) as io:
        first, extra = io.restore(PROMPT[:PAGE], UNITS, go.wait), {0: b"cat"}
        transfer = io.restore(PROMPT, UNITS, extra=extra)
        extra[0] = b"dog"
        go.set()
        assert first.wait(SECONDS) is not None
        result = transfer.wait(SECONDS)
        assert result is not None and result.tokens == CHUNKS * PAGE
    assert same(images[b"cat"], target, CHUNKS)


def test_a_damaged_page_shortens_it(ns: kvfs.Namespace, store: kvfs.Store) -> None:
    source, target = save(ns, 5), Engine(LAYOUT)
    with ns.match(PROMPT) as match:
        page = bytes(memoryview(ns.view(match, "full")[4])[:64])
    for path in segment_files(Path(store.path)):
        at = path.read_bytes().find(page)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([page[0] ^ 4]))
    with ns.attach(target.kvs) as io:
        result = io.restore(PROMPT, UNITS).wait(SECONDS)
        assert result is not None and (result.tokens, result.reason) == (4 * PAGE, "unreadable")
        assert (target.memory[0][:, :8] == source.memory[0][:, :8]).all()
        assert (target.memory[1][:, :8] == source.memory[1][:, :8]).all()


def test_units_of_every_group_bound_the_restored_length(ns: kvfs.Namespace) -> None:
    save(ns, CHUNKS)
    with ns.attach(Engine(LAYOUT).kvs) as io:
        for units, expected in (({**UNITS, "window": range(7)}, 3), ({**UNITS, "full": []}, 0)):
            result = io.restore(PROMPT, units).wait(SECONDS)
            assert result is not None and result.tokens == expected * PAGE
        with pytest.raises(ConfigError, match=r"units lacks group 'window': pass ids for each of \['full', 'window'\]"):
            io.restore(PROMPT, {"full": UNITS["full"]})
        with pytest.raises(ConfigError, match="leave is 'two': pass the number of tokens to compute"):
            io.restore(PROMPT, UNITS, leave="two")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="was closed"):
        io.restore(PROMPT, UNITS)
