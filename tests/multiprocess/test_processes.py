"""Several processes on one store: the same prompts at once, everything at random, full, seen through namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.torture import fill, full, kill, mounts, power
from tools.torture.case import PAGE_BYTES, PROMPTS, get, namespace, open_store
from tools.torture.crew import ROOT, Crew
from tools.torture.judge import Judge

SAME_PROMPTS = """
import json, sys, time
from tools.torture.case import PROMPTS, get, namespace, open_store, put
from tools.torture.judge import Judge
judge = Judge()
with open_store(sys.argv[1], capacity="64MiB") as store:
    ns = namespace(store)
    print("ready", flush=True)
    sys.stdin.readline()
    total = [0, 0, 0, 0]
    for family in range(60):
        result = put(ns, PROMPTS.tokens(family, 12), judge)
        total = [a + b for a, b in zip(total, result[:4])]
    deadline = time.monotonic() + 10
    served = [get(ns, PROMPTS.tokens(family, 12), judge) for family in range(60)]
    while min(served) < 12 and time.monotonic() < deadline:  # the other one may still be writing its last
        time.sleep(0.05)
        served = [get(ns, PROMPTS.tokens(family, 12), judge) for family in range(60)]
    print(json.dumps([total, min(served), judge.failed, judge.notes]))
"""


@pytest.fixture
def judge() -> Iterator[Judge]:
    found = Judge()
    yield found
    assert not found.failed, "\n".join([found.line(), *found.notes])


def start(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*prefix, sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_two_writers_of_the_same_prompts_store_each_page_once(tmp_path: Path, judge: Judge) -> None:
    path = tmp_path / "store"
    open_store(path, capacity="64MiB").close()
    writers = [start(SAME_PROMPTS, path) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        outputs = [writer.communicate(timeout=60)[0] for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    (one, served_one, failed_one, notes_one), (two, served_two, failed_two, notes_two) = map(json.loads, outputs)
    assert not failed_one and not failed_two, notes_one + notes_two
    stored, skipped, declined, in_flight = (a + b for a, b in zip(one, two, strict=True))
    assert stored == 60 * 12, (one, two)
    assert declined == 0
    assert skipped + in_flight == 60 * 12
    assert served_one == served_two == 12
    with open_store(path) as store:
        assert store.stats()["used_bytes"] < 2 * 60 * 12 * PAGE_BYTES
        assert all(get(namespace(store), PROMPTS.tokens(f, 12), judge) == 12 for f in range(60))


@pytest.mark.slow
def test_eight_processes_do_everything_and_some_are_killed(tmp_path: Path, judge: Judge) -> None:
    kill.run(tmp_path, seed=8, seconds=8.0, judge=judge, roles=("mixed",) * 5 + ("writer", "reader", "forker"))
    assert judge.counts["acknowledged"] > 20


@pytest.mark.needs_root("PID namespaces are made with unshare")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_equal_pids_in_two_containers(tmp_path: Path, judge: Judge) -> None:
    """Each process is pid 1 of its own namespace; none takes another for dead."""
    prefix = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc")
    with open_store(tmp_path / "store", capacity="64MiB") as store, Crew(tmp_path, 4, {"capacity": "64MiB"}) as crew:
        names = [crew.start("mixed", prefix=prefix) for _ in range(4)]
        owners: set[bytes] = set()
        end = time.monotonic() + 6.0
        while time.monotonic() < end:
            time.sleep(0.2)
            crew.check(judge)
            assert store._shared.c.liveness is not None
            owners |= set(store._shared.c.liveness.others())
        assert len(owners) >= len(names)
        for name in names[:2]:
            crew.kill(name)
        time.sleep(0.5)
        crew.check(judge)
        for name in names[2:]:
            crew.kill(name)
        crew.run("checker", judge)
        crew.collect(judge)
        assert judge.counts["acknowledged"] > 20


@pytest.mark.needs_root("a tmpfs of its own is mounted over /dev/shm in a mount namespace")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_a_private_dev_shm_of_64_kib(tmp_path: Path, judge: Judge) -> None:
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    prefix = ("unshare", "--mount", "--ipc", "sh", "-c", script, "sh")
    with Crew(tmp_path, 5, {"capacity": "64MiB"}) as crew:
        for role in ("mixed", "forker"):
            crew.start(role, prefix=prefix)
        crew.start("mixed")
        time.sleep(3.0)
        crew.check(judge)
        for name in list(crew.members):
            crew.kill(name)
        crew.run("checker", judge)
        crew.collect(judge)
        assert judge.counts["acknowledged"] > 10


@pytest.mark.slow
@pytest.mark.needs_root("a file system is mounted")
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_the_capacity_holds_at_every_moment(tmp_path: Path, judge: Judge, kind: str) -> None:
    _skip_without(kind)
    fill.run(tmp_path, seed=2, seconds=60.0, judge=judge, kind=kind, capacity="20MiB")
    assert judge.counts["samples"] > 50


@pytest.mark.needs_root("file systems are mounted")
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_does_no_harm(tmp_path: Path, judge: Judge, kind: str) -> None:
    _skip_without(kind)
    full.run(tmp_path, seed=6, seconds=1.0, judge=judge, kinds=(kind,))
    assert judge.counts["faults"] >= 1, "the disk was never full"


@pytest.mark.needs_root("file systems are mounted and shut down")
@pytest.mark.parametrize("mode", ["cache", "staging"])
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_power_cut_serves_no_wrong_bytes(tmp_path: Path, judge: Judge, kind: str, mode: str) -> None:
    _skip_without(kind)
    power.run(tmp_path, seed=9, seconds=5.0, judge=judge, kinds=(kind,), mode=mode)
    assert judge.counts[f"cuts_{kind}"] >= 1


def _skip_without(kind: str) -> None:
    if why := mounts.missing(kind):
        pytest.skip(why)
