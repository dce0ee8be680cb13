from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
if os.environ.get("LIGHTLLM_SOURCE"):
    os.environ.setdefault("LIGHTLLM_LOG_LEVEL", "error")
    stubs, shim = Path(__file__).with_name("stubs"), ROOT / "kvfs" / "integrations" / "lightllm" / "shim"
    sys.path[:0] = [os.environ["LIGHTLLM_SOURCE"], str(shim), str(stubs)]
