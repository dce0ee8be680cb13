from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

VARIABLE = "LIGHTLLM_SOURCE"
COMMIT = "87881ae7ca9aa774db744ad38df22c95d80c0eb0"
SOURCE = os.environ.get(VARIABLE, "")

if not (Path(SOURCE) / "lightllm" / "server" / "multi_level_kv_cache" / "disk_cache_worker.py").is_file():
    pytest.skip(
        f"{VARIABLE} is {SOURCE!r}: set it to a checkout of https://github.com/ModelTC/LightLLM at {COMMIT}, which is "
        "in no package registry",
        allow_module_level=True,
    )
os.environ.setdefault("LIGHTLLM_LOG_LEVEL", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).with_name("stubs")))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kvfs" / "integrations" / "lightllm" / "shim"))
sys.path.insert(0, SOURCE)
