"""Processes that are killed and frozen: the CI size of ``python -m tools.torture kill``, and holders of the gate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.index.deadlines import COMMIT_SECONDS, LOOKUP_SECONDS
from kvfs.native import library
from kvfs.system.worker import GRACE_SECONDS
from tools.torture import kill
from tools.torture.case import PROMPTS, get, namespace, open_store, put
from tools.torture.crew import ROOT
from tools.torture.judge import Judge

#: A call may wait for its deadline and for a commit in progress; the rest allows for a slow machine.
BOUND_SECONDS = COMMIT_SECONDS + GRACE_SECONDS + 7.0
HOLD_THE_GATE = """
import os, signal, sys, time
from tools.torture.case import PROMPTS, get, namespace, open_store
from tools.torture.judge import Judge
store = open_store(sys.argv[1])
assert get(namespace(store), PROMPTS.tokens(1, 4), Judge()) == 4
def freeze(session):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3)  # another thread may be the one that stops the process
    return session.generation
print("ready", flush=True)
print(store._shared.c.index.write(freeze, 60.0), flush=True)
assert get(namespace(store), PROMPTS.tokens(1, 4), Judge()) == 4
store.close()
"""


@pytest.fixture
def judge() -> Iterator[Judge]:
    found = Judge()
    yield found
    assert not found.failed, "\n".join([found.line(), *found.notes])


@pytest.mark.slow
def test_nothing_is_lost_or_wrong_when_processes_are_killed(tmp_path: Path, judge: Judge) -> None:
    kill.run(tmp_path, seed=3, seconds=15.0, judge=judge)
    assert judge.counts["kills"] > 20
    assert judge.counts["acknowledged"] > 20


def test_a_frozen_holder_of_the_index_blocks_no_other_process(
    tmp_path: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "loaded", lambda: None)  # native lookups need no lock
    path = tmp_path / "store"
    with open_store(path) as store:
        ns = namespace(store)
        put(ns, PROMPTS.tokens(1, 4), judge)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", HOLD_THE_GATE, str(path)]
        holder = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
            _wait_for_state(holder.pid, "T")
            calls = quick = 0
            end = time.monotonic() + 40.0
            while quick < 10:
                start = time.monotonic()
                assert start < end, "the breaker did not open: each call waited for its deadline"
                assert get(ns, PROMPTS.tokens(1, 4), judge) == 0
                result = put(ns, PROMPTS.tokens(2 + calls, 2), judge)
                assert result is not None and (result.declined, result.reason) == (2, "index")
                took = time.monotonic() - start
                assert took < BOUND_SECONDS
                calls += 1
                quick += took < LOOKUP_SECONDS
            os.kill(holder.pid, signal.SIGCONT)
            generation = holder.stdout.readline().strip()
            assert store.wait_ready(60.0)
            assert store.stats()["index"]["generation"] == generation, "the index was replaced meanwhile"
            assert get(ns, PROMPTS.tokens(1, 4), judge) == 4
            result = put(ns, PROMPTS.tokens(2, 2), judge)
            assert result is not None and result.stored == 2
            assert holder.wait(60.0) == 0
        finally:
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()


def test_a_killed_holder_of_the_index_leaves_no_lock(tmp_path: Path, judge: Judge) -> None:
    path = tmp_path / "store"
    with open_store(path) as store:
        ns = namespace(store)
        put(ns, PROMPTS.tokens(1, 4), judge)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        holder = subprocess.Popen([sys.executable, "-c", HOLD_THE_GATE, str(path)], cwd=ROOT, env=environment)
        _wait_for_state(holder.pid, "T")
        holder.kill()
        holder.wait()
        assert store.wait_ready(60.0)
        assert get(ns, PROMPTS.tokens(1, 4), judge) == 4


def _wait_for_state(pid: int, state: str) -> None:
    for _ in range(2000):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == state:
            return
        time.sleep(0.01)
    pytest.fail(f"the process did not reach state {state}")
