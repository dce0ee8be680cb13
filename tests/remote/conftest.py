"""Stores of two hosts that share a bucket: a directory, or one of Ceph's S3 gateway below ``make test-remote``.

With KVFS_CEPH, the folder that ``python -m tools.ceph install`` has made, one cluster serves all tests, and each test
has a prefix of its own. Tests that look into the files of a directory are skipped then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.directory import config_file
from kvfs.directory.config import Remote
from kvfs.remote.object_store import ObjectStore
from kvfs.remote.urls import open_object_store
from kvfs.system.files import Files
from tools.ceph import Ceph

CEPH_ROOT = os.environ.get("KVFS_CEPH", "")
BUCKET = "kvfs-tests"
PREFIXES = itertools.count()


@pytest.fixture(autouse=True)
def patient_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups would give up after 0.25 s on a loaded machine."""
    monkeypatch.setattr("kvfs.system.worker.GRACE_SECONDS", 60.0)


@pytest.fixture(autouse=True)
def rooms_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small objects and pages of tests are in memory that is used again, in place, and stored as they come, as
    large ones are."""
    monkeypatch.setattr("kvfs.remote.pull.ROOM_BYTES_MIN", 0)
    monkeypatch.setattr("kvfs.remote.page_object.EARLY_BYTES", 1)
    monkeypatch.setattr("kvfs.remote.directory_store.READ_BYTES", 5000)
    monkeypatch.setattr("kvfs.remote.page_object.IN_PLACE_BYTES", 0)


@pytest.fixture(scope="session")
def ceph() -> Iterator[Ceph]:
    """A cluster that runs, with the bucket BUCKET."""
    if not CEPH_ROOT:
        pytest.skip("needs Ceph: make test-remote sets it up")
    pytest.importorskip("obstore", reason="needs the extra remote: pip install 'kvfs[remote]'")
    with contextlib.closing(Ceph(Path(CEPH_ROOT))) as cluster:
        cluster.make_bucket(BUCKET)
        yield cluster


@pytest.fixture
def gateway(ceph: Ceph, monkeypatch: pytest.MonkeyPatch) -> Ceph:
    """The gateway runs, and the environment names it."""
    ceph.start_gateway()
    for name, value in ceph.environment().items():
        monkeypatch.setenv(name, value)
    return ceph


@pytest.fixture
def gateway_url(gateway: Ceph) -> str:
    return f"s3://{BUCKET}/{os.getpid()}-{next(PREFIXES)}"


@pytest.fixture
def bucket_path(tmp_path: Path) -> Path:
    """The bucket of tests that look at its files."""
    if CEPH_ROOT:
        pytest.skip("looks at the files of a directory")
    return tmp_path / "bucket"


@pytest.fixture
def bucket_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The bucket of the tests' stores, which is empty."""
    return str(request.getfixturevalue("gateway_url")) if CEPH_ROOT else f"file://{tmp_path / 'bucket'}"


@pytest.fixture
def objects(bucket_url: str) -> Iterator[ObjectStore]:
    """What the bucket holds."""
    opened = open_object_store(Remote(bucket_url))
    yield opened
    opened.close()


@pytest.fixture
def stored_pages(objects: ObjectStore) -> Callable[[], list[str]]:
    """Names of the objects with pages."""
    return lambda: sorted(found.name for found in objects.listing("") if "/pages/" in found.name)


def store_at(path: Path, url: str, capacity: str = "64MiB") -> kvfs.Store:
    kvfs.open(path, capacity=capacity).close()
    config_file.change(str(path), "remote.url", url, Files())
    return kvfs.open(path)


@pytest.fixture
def here(tmp_path: Path, bucket_url: str) -> Iterator[kvfs.Store]:
    with store_at(tmp_path / "here", bucket_url) as store:
        yield store


@pytest.fixture
def there(tmp_path: Path, bucket_url: str) -> Iterator[kvfs.Store]:
    with store_at(tmp_path / "there", bucket_url) as store:
        yield store
