"""Each benchmark runs at tiny sizes, prints its rows, writes its JSON and leaves no files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(660)  # a benchmark has no deadline, and the machine may be busy
BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench.py"
COMMANDS = {
    "host": (
        ("--size", "1MiB", "--page", "64KiB", "--call", "256KiB", "--rounds", "1", "--threads", "2"),
        ("put", "get warm", "get cold", "view+touch", "bare pwritev", "bare preadv+sums", "bare mmap+touch"),
    ),
    "host, modes": (
        ("--size", "1MiB", "--page", "64KiB", "--call", "256KiB", "--rounds", "1", "--mode", "cache,staging"),
        ("put, cache", "put to the disk, staging", "get cold, staging"),
    ),
    "match": (
        ("--tokens", "1024", "--pages", "16", "--index-pages", "64", "--rounds", "1", "--seconds", "0.1"),
        ("hashing+match", "matches, busy thread", "another: put of 1 page", "rebuild s"),
    ),
    "codecs": (
        ("--tokens", "64", "--page-tokens", "16", "--dtype", "bfloat16,int8", "--rounds", "1", "--threads", "1"),
        ("random weights", "encode to memcpy", "planes", "cold to raw"),
    ),
    "cli": (
        (
            "--index-pages",
            "64",
            "--writers",
            "1",
            "--rounds",
            "1",
            "--size",
            "1MiB",
            "--page",
            "64KiB",
            "--call",
            "256KiB",
        ),
        ("kvfs inspect", "kvfs ls", "kvfs stats", "bare buffered x1", "bare readahead x4, 8 MiB", "warm"),
    ),
    "procs": (
        ("--procs", "1", "--seconds", "0.1", "--rounds", "1", "--size", "1MiB", "--page", "64KiB", "--call", "256KiB"),
        ("bare", "store", "x first", "each once"),
    ),
}


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCH), *args], capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_prints_its_rows(command: str, disk_path: Path) -> None:
    options, expected = COMMANDS[command]
    command = command.partition(",")[0]
    result_path, place = disk_path / "result.json", disk_path / "place"
    place.mkdir()
    done = bench(command, *options, "--path", str(place), "--json", str(result_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [text for text in expected if text not in done.stdout], done.stdout
    result = json.loads(result_path.read_text(encoding="utf-8"))
    assert result["benchmark"] == command
    assert all(table["rows"] for table in result["tables"]) and result["tables"]
    assert list(place.iterdir()) == []


def test_too_little_space_is_refused(tmp_path: Path) -> None:
    done = bench("host", "--size", "1000TiB", "--path", str(tmp_path))
    assert done.returncode == 1
    assert "GiB free" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_odd_page_size_is_refused(tmp_path: Path) -> None:
    done = bench("host", "--page", "100KiB", "--path", str(tmp_path))
    assert done.returncode == 2 and "64KiB" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_files(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "procs", "--procs", "2", "--seconds", "600", "--path", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("*/bare/own-0/*")):
            assert process.poll() is None and time.monotonic() < deadline, "no child has written a file"
            time.sleep(0.01)
        os.kill(process.pid, number)
        assert process.wait(300) == 1
    assert list(tmp_path.iterdir()) == []
