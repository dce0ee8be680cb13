"""Print what to put on PYTHONPATH, so that LightLLM imports kvfs as ``light_mem``."""

from __future__ import annotations

from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).with_name("shim"))
