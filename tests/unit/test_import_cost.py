"""`import kvfs` is cheap: the heavy libraries load when something that needs them is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "triton", "numpy", "zstandard", "transformers", "vllm", "watchdog")


def loaded_after(statement: str) -> set[str]:
    names = "sorted({name.partition('.')[0] for name in sys.modules})"
    code = f"import json, sys\n{statement}\nprint(json.dumps({names}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{statement!r} failed:\n{done.stderr}"
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    names = loaded_after("import kvfs; assert kvfs.__file__, 'kvfs/__init__.py is missing'")
    assert "kvfs" in names
    return names


@pytest.mark.parametrize("heavy", HEAVY)
def test_import_kvfs_does_not_load(heavy: str, loaded: set[str]) -> None:
    assert heavy not in loaded, f"`import kvfs` loads {heavy}; see python -X importtime -c 'import kvfs'"
