"""LightMem's own test scripts, with kvfs in its place. Most print failures and exit with 0, so their lines are read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "LIGHTMEM_SOURCE"
COMMIT = "3616be41a3c26134da116df6dedf3a5d2ff6e56d"
SCRIPTS = Path(os.environ.get(VARIABLE, "")) / "tests"
#: write.py and read.py are left out: they store and load 16 GB and more, and check one round trip.
NAMES = (
    "error_handling",
    "boundary",
    "query",
    "data_integrity",
    "task_management",
    "abort",
    "concurrency",
    "mixed_lru",
)

pytestmark = pytest.mark.skipif(
    not (SCRIPTS / "abort.py").is_file(),
    reason=f"{VARIABLE} names no checkout of https://github.com/ModelTC/LightMem at {COMMIT} (branch hash_128)",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_of_lightmem_passes(memory_path: Path, name: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("LIGHTLLM_START_ARGS", "KVFS_DIR")}
    places = (ROOT / "kvfs" / "integrations" / "lightllm" / "shim", SCRIPTS, ROOT)
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "KVFS_LIGHTLLM": '{"weights_id": "0123abcd", "ring_bytes": "64MiB"}',
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py")],
        cwd=memory_path, env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓" in done.stdout and "✗" not in done.stdout, done.stdout
    for good, total in re.findall(r": (\d+)/(\d+)$", done.stdout, re.MULTILINE):
        assert good == total, done.stdout
