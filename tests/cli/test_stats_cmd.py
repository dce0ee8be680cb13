"""`kvfs stats --watch`: rates of the processes that serve; redrawn on a terminal, a line each in a pipe."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import kvfs
from kvfs.cli.text import Heading
from kvfs.metrics.live import Rates
from tests.cli.commands import called, environment, on_a_terminal
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of

#: Counts 50 lookups ten times a second, and prints when, on the clock that processes publish
LOAD = """
import sys, time
import kvfs
with kvfs.open(sys.argv[1]) as store:
    counters = store._shared.c.counters
    while True:
        print(time.time(), flush=True)
        counters.add("lookups", 50)
        counters.add("tokens_queried", 200)
        counters.add("tokens_matched", 150)
        time.sleep(0.1)
"""


def test_the_rate_of_a_steady_load_is_right_from_the_second_sample_on(store: Path) -> None:
    """Against what the load says itself: a busy machine slows both."""
    load = subprocess.Popen(
        [sys.executable, "-c", LOAD, str(store)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert load.stdout is not None
    for _ in range(25):  # its first publications are of the time before it counted
        load.stdout.readline()
    begin = time.time()
    done = called("-C", str(store), "stats", "--watch", "--interval", "1.2s", "--times", "4", "--json")
    end = time.time()
    load.kill()
    times = [float(line) for line in load.communicate()[0].splitlines() if line]
    samples = [json.loads(line)["per_second"] for line in done.stdout.splitlines()]
    assert len(samples) == 4 and samples[0] is None
    known = [s for s in samples if s is not None]
    assert len(known) >= 2 and set(known[0]) == set(Rates._fields)
    within = [t for t in times if begin <= t <= end]
    windows = [[t for t in within if at <= t < at + 1.0] for at in within if at + 1.0 <= within[-1]]
    slowest, fastest = min(map(len, windows)) * 50, max(map(len, windows)) * 50
    assert all(0.9 * slowest - 50 <= s["lookups"] <= 1.1 * fastest + 50 for s in known), (known, slowest, fastest)
    assert all(abs(s["tokens_matched"] / s["tokens_queried"] - 0.75) < 0.01 for s in known)


def test_a_pipe_gets_a_line_each_and_a_terminal_is_redrawn(store: Path) -> None:
    arguments = ["-C", str(store), "stats", "--watch", "--interval", "0.1s", "--times", "3"]
    lines = called(*arguments).stdout.splitlines()
    assert len(lines) == 3 and all("no rate yet" in line and "used " in line for line in lines)
    code, seen = on_a_terminal(arguments, columns=60, rows=8, NO_COLOR="1")
    frames = [frame.replace("\x1b[K", "").splitlines() for frame in seen.split("\x1b[H")[1:]]
    assert code == 0 and len(frames) == 3 and seen.rstrip().endswith("\x1b[?1049l")
    for frame in frames:
        shown = [line for line in frame if not line.startswith("\x1b")]
        assert len(shown) == 7 and all(len(line) <= 60 for line in shown), shown
    assert called(*arguments, "-q").stdout == "-\n-\n-\n"


def test_headings_stay_headings_on_a_screen(store: Path) -> None:
    assert "\x1b[1mPID" not in called("-C", str(store), "top", "--times", "1").stdout
    seen = on_a_terminal(["-C", str(store), "top", "--times", "1"], columns=60)[1]
    assert f"\x1b[1m{Heading(str(store))[:20]}" in seen, seen


def test_a_namespace_has_counts_of_its_own(store: Path) -> None:
    with kvfs.open(store) as s:
        beta = s.namespace("beta", tiny(), "77fe01b")
        beta.put(tokens_of(2, 4), seeded(2, 4 * TINY_BYTES))
        tokens = tokens_of(2, 4)
        for asked in (tokens, [5, *tokens[1:]]):
            with beta.match(asked) as match:
                beta.get(match, bytearray(match.nbytes))
    data = json.loads(called("-C", str(store), "stats", "beta", "--json").stdout)
    assert (data["lookups"], data["hit_rate"], data["pages_stored"]) == (2, 0.5, 4)
    assert data["tokens_loaded_host"] + data["tokens_loaded_disk"] == len(tokens)
    assert json.loads(called("-C", str(store), "stats", "alpha", "--json").stdout)["lookups"] == 0
    assert called("-C", str(store), "stats", "gamma").returncode != 0
    assert called("-C", str(store), "stats", "beta", "--watch").returncode == 2
