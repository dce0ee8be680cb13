"""The benchmarks of adapters' calls run at tiny sizes and print a row for each call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("module", "options", "calls"),
    [
        ("lightllm_calls", ("--rounds", "1"), ("begin_save", "update, saving", "begin_loads", "ready")),
        (
            "linker_calls", ("--rounds", "2", "--page", "16", "--layers", "2", "--store", "{store}"),
            ("lookup", "offload", "num_completed_offloads", "start_layer_wise_loading", "a call of the engine's own"),
        ),
    ],
)  # fmt: skip
def test_each_call_has_a_row(module: str, options: tuple[str, ...], calls: tuple[str, ...], memory_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"tools.benchmarks.{module}", "--tokens", "1024",
         *(option.format(store=memory_path) for option in options)],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if " calls, ms: wall min " in line and "; CPU min " in line]
    assert not [call for call in calls if not any(row.startswith(call) for row in rows)], done.stdout
    assert list(memory_path.iterdir()) == []
