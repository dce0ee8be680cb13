"""Fixtures of all tests of the transports."""

from __future__ import annotations

import pytest

from kvfs.lookup import matcher
from kvfs.write import active_segments, appender


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves and lookups wait for the index though the machine may be slow: no test here is about their limits."""
    for module in (appender, active_segments):
        monkeypatch.setattr(module, "COMMIT_SECONDS", 30.0)
    monkeypatch.setattr(matcher, "LOOKUP_SECONDS", 30.0)
