from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed: make test-engines")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
