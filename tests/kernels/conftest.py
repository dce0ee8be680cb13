"""What all tests of the GPU transport want."""

from __future__ import annotations

import pytest

from kvfs import gpuload


@pytest.fixture(autouse=True)
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer-wise loads of a few pages come in as many bands as large ones."""
    monkeypatch.setattr(gpuload, "BAND_BYTES_MIN", 1)
