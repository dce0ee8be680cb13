"""Tests of this folder wait for the index on a loaded machine: their lookups would give up after 0.25 s."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patient_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.system.worker.GRACE_SECONDS", 60.0)
