"""Saves whose appends run in a child process: stored by it, counted here, and nothing lost when either side dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.errors import ConfigError
from kvfs.gpu.gpu_io import GpuIO
from kvfs.transfer.append_process import AppendProcess
from kvfs.types import TransferResult
from tests.gpu.simulated import Pending
from tests.gpu.test_gpu_io import LAYOUT, NOW, PAGE, Engine, attach, prompt
from tests.stores import wait_until

SECONDS = 100.0  # of waits that end at once unless something is wrong


@pytest.fixture
def ns(store_path: Path) -> Iterator[kvfs.Namespace]:
    with kvfs.open(store_path, capacity="64MiB") as store:
        yield store.namespace("model", LAYOUT, "1")


def process_of(io: GpuIO) -> AppendProcess:
    process = io._context.append_process
    assert process is not None
    return process


def saved(ns: kvfs.Namespace, io: GpuIO, chunks: int) -> TransferResult:
    """The result of a save; again while another process of a busy machine has the index."""
    while True:
        result = io.save(ns.plan_save(prompt(chunks)), range(2 * chunks), NOW, deadline=SECONDS).wait(SECONDS)
        assert result is not None
        if result.reason != "index":
            return result


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def unread_bytes(connected: socket.socket) -> int:
    """Bytes that the other end has not taken yet."""
    return int.from_bytes(fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def loaded(ns: kvfs.Namespace, chunks: int) -> bytes:
    target = Engine()
    with attach(ns, target.kv) as io, ns.match(prompt(chunks)) as match:
        result = io.load(match, range(2 * chunks), NOW, deadline=SECONDS).wait(SECONDS)
        assert result is not None and result.tokens == chunks * PAGE
    return target.tokens(range(2 * chunks))


def test_pages_are_stored_by_the_child_and_counted_here(ns: kvfs.Namespace) -> None:
    engine = Engine(seed=5)
    with attach(ns, engine.kv, append_elsewhere=True) as io:
        assert saved(ns, io, 4).pages == 4
        again = saved(ns, io, 8)  # the first four are there
        assert (again.pages, again.declined) == (4, 0)
        counts = ns._c.counters.by_namespace()[ns.identity.digest]
        assert (counts["pages_stored"], counts["bytes_written"]) == (8, 8 * LAYOUT.page_bytes)
        assert not ns._c.counters.snapshot().get("append_processes_lost")
        pid = process_of(io).pid
    wait_until(lambda: not is_running(pid))
    assert loaded(ns, 8) == engine.tokens(range(16))


def test_tables_that_the_gpu_made_are_stored(ns: kvfs.Namespace) -> None:
    with attach(ns, Engine(seed=6).kv, append_elsewhere=True) as io:
        assert saved(ns, io, 3).pages == 3
    with kvfs.open(ns._c.directory.path) as store:
        report = store.verify()
    assert (report.pages, report.bad_pages) == (3, 0), report


def test_a_child_that_is_killed_is_replaced_by_this_process(
    ns: kvfs.Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(seed=7)
    with attach(ns, engine.kv, append_elsewhere=True) as io:
        assert saved(ns, io, 2).pages == 2
        os.kill(process_of(io).pid, signal.SIGKILL)
        result = saved(ns, io, 5)
        assert (result.pages, result.declined) == (3, 0)
        assert saved(ns, io, 6).pages == 1
        assert ns._c.counters.snapshot()["append_processes_lost"] == 1
    assert caplog.text.count("saves are written in this one from now on") == 1
    assert loaded(ns, 6) == engine.tokens(range(12))


def test_a_child_that_is_killed_within_a_request_costs_no_page(ns: kvfs.Namespace) -> None:
    engine = Engine(seed=8)
    with attach(ns, engine.kv, append_elsewhere=True) as io:
        pid = process_of(io).pid
        os.kill(pid, signal.SIGSTOP)
        transfer = io.save(ns.plan_save(prompt(4)), range(8), NOW, deadline=SECONDS)
        assert transfer.source_free.wait(SECONDS)
        assert transfer.result is None
        os.kill(pid, signal.SIGKILL)
        result = transfer.wait(SECONDS)
        assert result is not None
        if result.reason == "index":
            result = saved(ns, io, 4)
        assert not result.declined
    assert loaded(ns, 4) == engine.tokens(range(8))


def test_a_child_that_hangs_delays_neither_source_nor_close(ns: kvfs.Namespace) -> None:
    io = attach(ns, Engine(seed=9).kv, append_elsewhere=True)
    pid = process_of(io).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        transfer = io.save(ns.plan_save(prompt(4)), range(8), NOW, deadline=SECONDS)
        assert transfer.source_free.wait(SECONDS)
        io.close(timeout=0.2)
        result = transfer.wait(SECONDS)
        assert result is not None and result.pages == 0 and result.declined == 4
        assert not ns._c.counters.snapshot().get("append_processes_lost"), "it was told to end"
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not is_running(pid))


def test_what_was_gathered_is_stored_after_the_engine_was_killed(store_path: Path) -> None:
    kvfs.open(store_path, capacity="64MiB").close()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            store = kvfs.open(store_path)
            ns = store.namespace("model", LAYOUT, "1")
            io = attach(ns, Engine(seed=10).kv, append_elsewhere=True)
            process = process_of(io)
            wait_until(lambda: len(store.processes()) == 2)
            os.kill(process.pid, signal.SIGSTOP)
            io.save(ns.plan_save(prompt(4)), range(8), NOW, deadline=SECONDS).source_free.wait(SECONDS)
            wait_until(lambda: any(map(unread_bytes, process._sockets)))
            os.write(writer, str(process.pid).encode())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    pid = int(os.read(reader, 32))
    os.close(reader)
    os.waitpid(child, 0)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not is_running(pid))
    with kvfs.open(store_path) as store:
        ns = store.namespace("model", LAYOUT, "1")
        assert loaded(ns, 4) == Engine(seed=10).tokens(range(8))


def test_a_forked_child_of_the_engine_does_not_keep_it_running(ns: kvfs.Namespace) -> None:
    with attach(ns, Engine(seed=11).kv, append_elsewhere=True) as io:
        assert saved(ns, io, 1).pages == 1
        pid = process_of(io).pid
        sleeper = os.fork()
        if not sleeper:
            time.sleep(SECONDS)
            os._exit(0)
    try:
        wait_until(lambda: not is_running(pid))
    finally:
        os.kill(sleeper, signal.SIGKILL)
        os.waitpid(sleeper, 0)


def test_without_a_child_appends_run_here(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with attach(ns, Engine(seed=12).kv, append_elsewhere=True) as io:
        assert io._context.append_process is None
        assert saved(ns, io, 2).pages == 2
    assert "they run in this one" in caplog.text


def test_entries_of_the_path_that_python_ignores_are_left_out(
    ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    with attach(ns, Engine(seed=12).kv, append_elsewhere=True) as io:
        assert saved(ns, io, 2).pages == 2
        assert not ns._c.counters.snapshot().get("append_processes_lost")


def test_a_child_that_cannot_open_the_store_is_replaced(ns: kvfs.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ns._c, "store_id", bytes(16))
    with attach(ns, Engine(seed=13).kv, append_elsewhere=True) as io:
        assert saved(ns, io, 2).pages == 2
        assert ns._c.counters.snapshot()["append_processes_lost"] == 1


def test_host_buffers_have_none(ns: kvfs.Namespace) -> None:
    with pytest.raises(ConfigError, match="append_elsewhere is for buffers on a GPU, these are in host"):
        ns.attach(Engine().kv, append_elsewhere=True)


def test_a_save_that_the_gpu_orders_reads_its_units_behind_the_event(ns: kvfs.Namespace) -> None:
    """A step of the engine writes the units until its event comes; the save was enqueued before."""
    engine, after = Engine(), Pending()
    with attach(ns, engine.kv) as io:
        transfer = io.save(ns.plan_save(prompt(4)), range(8), after, deadline=SECONDS)
        assert after.awaited.wait(SECONDS)
        assert not transfer.source_free.is_set()
        engine.memory[...] = Engine(seed=14).memory
        after.happened.set()
        assert transfer.source_free.wait(SECONDS)
        result = transfer.wait(SECONDS)
        assert result is not None
        if result.reason == "index":
            saved(ns, io, 4)
    assert loaded(ns, 4) == Engine(seed=14).tokens(range(8))
