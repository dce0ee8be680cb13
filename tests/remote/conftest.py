"""Stores of two hosts that share a bucket, which is a directory unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.directory import config_file
from kvfs.system.files import Files


@pytest.fixture(autouse=True)
def patient_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups would give up after 0.25 s on a loaded machine."""
    monkeypatch.setattr("kvfs.system.worker.GRACE_SECONDS", 60.0)


@pytest.fixture
def bucket_path(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def store_at(path: Path, url: str, capacity: str = "64MiB") -> kvfs.Store:
    kvfs.open(path, capacity=capacity).close()
    config_file.change(str(path), "remote.url", url, Files())
    return kvfs.open(path)


@pytest.fixture
def here(tmp_path: Path, bucket_path: Path) -> Iterator[kvfs.Store]:
    with store_at(tmp_path / "here", f"file://{bucket_path}") as store:
        yield store


@pytest.fixture
def there(tmp_path: Path, bucket_path: Path) -> Iterator[kvfs.Store]:
    with store_at(tmp_path / "there", f"file://{bucket_path}") as store:
        yield store
