"""The cost of registering segments: for kernel launches of this and of another process, and after a kill.

Files in the page cache are mapped read-only and registered in regions as loads do, and unregistered. Meanwhile this
process (other threads of it) and a second one launch one small kernel after the other and wait for each; the baseline
is the time before that. Then a process registers files, takes the lock of a store's index, and is killed with SIGKILL,
while this one puts and matches in the same store.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import kvfs
from kvfs.gpu.device import Gpu
from kvfs.gpu.registration_cache import REGION_BYTES
from kvfs.pages.layout import PageLayout
from kvfs.system.files import Files
from kvfs.system.memory_views import address_of_readonly
from tools.benchmarks.gpu_engine import torch_with_cuda
from tools.benchmarks.measure import BenchError, percentile
from tools.benchmarks.report import Report, Table, Value

FILE_BYTES, THREADS = 2 << 30, 8
ALONE_SECONDS = 2.0
RECOVERY_SECONDS = 60.0  # after which a store whose lock holder was killed must take pages again
LAYOUT = PageLayout.kv(layers=2, kv_heads=2, head_dim=16, dtype="bfloat16", page_tokens=16)


@dataclass(frozen=True)
class Plan:
    nbytes: int  # registered while launches are timed
    held_bytes: int  # registered by the process that is killed

    @property
    def need_bytes(self) -> int:
        return max(self.nbytes, self.held_bytes) + FILE_BYTES


def run(report: Report, folder: Path, plan: Plan) -> None:
    torch = torch_with_cuda()
    torch.zeros(1, device="cuda")
    files = fill(folder, max(plan.nbytes, plan.held_bytes))
    _launches(report, torch, files, plan.nbytes)
    _killed(report, folder, files, plan.held_bytes)


def fill(folder: Path, nbytes: int) -> list[Path]:
    """Files in the page cache, of zeros that were never written to a disk: only the kind of page matters."""
    paths = [folder / f"file-{i}" for i in range(-(-nbytes // FILE_BYTES))]
    calls = Files()

    def one(path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, FILE_BYTES)
        for at in range(0, FILE_BYTES, REGION_BYTES):
            made = calls.map(fd, REGION_BYTES, at)
            calls.populate(made)
            made.close()
        os.close(fd)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, paths))
    return paths


class Registered:
    """Maps of the first ``nbytes`` of files, region by region, as ``kvfs.gpu.registration`` makes them."""

    def __init__(self, files: Sequence[Path], nbytes: int) -> None:
        self._gpu = Gpu("cuda:0")
        self._gpu.enter()
        self._maps: list[mmap.mmap] = []
        for path in files:
            fd = os.open(path, os.O_RDONLY)
            left = min(FILE_BYTES, nbytes - len(self._maps) * REGION_BYTES)
            for at in range(0, left, REGION_BYTES):
                made = mmap.mmap(fd, REGION_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=at)
                self._gpu.register(address_of_readonly(made), REGION_BYTES, read_only=True)
                self._maps.append(made)
            os.close(fd)

    def release(self) -> None:
        for made in self._maps:
            self._gpu.unregister(address_of_readonly(made))
            made.close()


# -- launches --------------------------------------------------------------------------------


class Launch(NamedTuple):
    at: float  # on the host's monotonic clock, which all processes share
    launched: float  # seconds until the call returned
    done: float  # seconds until the kernel had run


class Window(NamedTuple):
    name: str
    begin: float
    end: float


def launch_until(torch: Any, stop: Callable[[], bool]) -> list[Launch]:
    found, stream = [], torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(64, device="cuda")
        while not stop():
            begin = time.monotonic()
            x.add_(1)
            launched = time.monotonic()
            stream.synchronize()
            found.append(Launch(begin, launched - begin, time.monotonic() - begin))
    return found


def summed_up(launches: Sequence[Launch], windows: Sequence[Window]) -> list[dict[str, Value]]:
    """A row for each window."""
    rows: list[dict[str, Value]] = []
    for name, begin, end in windows:
        inside = [launch for launch in launches if begin <= launch.at < end]
        if not inside:
            raise BenchError(f"no kernel was launched {name}")
        row: dict[str, Value] = {"meanwhile": name, "launches": len(inside)}
        for what in ("launched", "done"):
            times = [getattr(launch, what) * 1e6 for launch in inside]
            row |= {f"{what} us p50": percentile(times, 50), "p99 " + what: percentile(times, 99)}
            row["most " + what] = max(times)
        rows.append(row)
    return rows


def _launches(report: Report, torch: Any, files: Sequence[Path], nbytes: int) -> None:
    other = Child("launches")
    over, mine = threading.Event(), []

    def launch() -> None:
        torch.cuda.set_device(0)
        mine.extend(launch_until(torch, over.is_set))

    thread = threading.Thread(target=launch)
    thread.start()
    begin = time.monotonic()
    time.sleep(ALONE_SECONDS)
    registering = time.monotonic()
    held = Registered(files, nbytes)
    middle = time.monotonic()
    time.sleep(ALONE_SECONDS)
    unregistering = time.monotonic()
    held.release()
    end = time.monotonic()
    over.set()
    thread.join()
    windows = [
        Window("nothing", begin, registering), Window("registering", registering, middle),
        Window("nothing, registered", middle, unregistering), Window("unregistering", unregistering, end),
    ]  # fmt: skip
    gib = nbytes / 2**30
    table = Table(
        f"Launches of a small kernel while {gib:.0f} GiB are registered in regions of {REGION_BYTES >> 20} MiB",
        notes=[f"registered in {middle - registering:.2f} s, unregistered in {end - unregistering:.2f} s"],
    )
    for process, rows in (("this", summed_up(mine, windows)), ("another", other.ask(windows))):
        for row in rows:
            table.add(process=process, **row)
    report.show(table)


# -- kills -----------------------------------------------------------------------------------


def _killed(report: Report, folder: Path, files: Sequence[Path], nbytes: int) -> None:
    """From the kill of a process that has registered much and holds the index's lock until a put is stored."""
    path = folder / "store"
    table = Table(f"A process with {nbytes / 2**30:.0f} GiB registered is killed while it holds the index's lock")
    with kvfs.open(path, capacity="64MiB") as store:
        ns = store.namespace("killed", LAYOUT, "1")
        page = os.urandom(ns.layout.groups[0].page_bytes)
        assert ns.put(range(16), page).stored == 1
        holder = Child("holder", str(path), str(nbytes), *map(str, files))
        holder.expect("holding")
        longest, calls, stored = {"put": 0.0, "match": 0.0}, 0, False
        os.kill(holder.pid, signal.SIGKILL)
        begin = time.monotonic()
        while not stored and time.monotonic() - begin < RECOVERY_SECONDS:
            calls += 1
            tokens = range(1000 * calls, 1000 * calls + 16)
            for name, call in (
                ("put", lambda tokens=tokens: ns.put(tokens, page).stored),
                ("match", lambda tokens=tokens: ns.match(tokens).tokens),
            ):
                started = time.monotonic()
                result = call()
                longest[name] = max(longest[name], time.monotonic() - started)
                stored = stored or (name == "put" and result == 1)
        recovered = time.monotonic() - begin
        ended = holder.wait()
        if not stored:
            raise BenchError(f"no page was stored within {RECOVERY_SECONDS} s after the kill")
        table.add(
            until_a_put_was_stored_s=recovered, puts=calls, longest_put_s=longest["put"],
            longest_match_s=longest["match"], process_gone_s=ended - begin,
        )  # fmt: skip
    report.show(table)


def _hold(path: str, nbytes: int, files: Sequence[Path]) -> None:
    """The process that will be killed."""
    torch_with_cuda().zeros(1, device="cuda")
    with kvfs.open(path) as store:
        store.wait_ready(30.0)
        held = Registered(files, nbytes)

        def hold(session: object) -> None:
            print("holding", flush=True)
            time.sleep(600.0)

        store._shared.c.index.write(hold, 600.0)
        held.release()


# -- processes -------------------------------------------------------------------------------


class Child:
    """Another process of this module."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        self.pid = self._process.pid
        if arguments[0] == "launches":
            self.expect("launching")

    def expect(self, line: str) -> None:
        assert self._process.stdout is not None
        if (got := self._process.stdout.readline().strip()) != line:
            raise BenchError(f"the other process said {got!r}, not {line!r}")

    def ask(self, windows: Sequence[Window]) -> list[dict[str, Value]]:
        out, _ = self._process.communicate(json.dumps(windows) + "\n", timeout=60.0)
        rows: list[dict[str, Value]] = json.loads(out)
        return rows

    def wait(self) -> float:
        """When it had ended, on the monotonic clock."""
        self._process.wait(120.0)
        return time.monotonic()


def _launch(torch: Any) -> None:
    """Launch until standard input names the windows to report."""
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(sys.stdin.readline()))
    warm_until = time.monotonic() + 0.5
    launch_until(torch, lambda: time.monotonic() > warm_until)
    print("launching", flush=True)
    reader.start()
    found = launch_until(torch, lambda: bool(lines))
    print(json.dumps(summed_up(found, [Window(*window) for window in json.loads(lines[0])])))


if __name__ == "__main__":
    if sys.argv[1] == "launches":
        _launch(torch_with_cuda())
    else:
        _hold(sys.argv[2], int(sys.argv[3]), [Path(name) for name in sys.argv[4:]])
