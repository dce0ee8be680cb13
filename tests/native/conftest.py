"""The native library against the Python code that it stands for. Skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from kvfs.native import library


@pytest.fixture(scope="session")
def native() -> library.Library:
    loaded = library.loaded()
    if loaded is None:
        pytest.skip(f"the native library is {library.state()}")
    return loaded
