"""Each object store keeps the contract; what an S3 gateway does wrong is an error after bounded retries."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import kvfs
from kvfs.directory.config import Remote
from kvfs.remote import directory_store
from kvfs.remote.directory_store import STALE_SECONDS, DirectoryStore
from kvfs.remote.object_store import ObjectStore, RemoteError
from kvfs.remote.urls import open_object_store
from kvfs.testing import ObjectStoreContract
from tests.remote.s3_server import S3Server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    pytest.importorskip("obstore", reason="needs the extra remote: pip install 'kvfs[remote]'")
    server = S3Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield server
    server.close()


class TestDirectory(ObjectStoreContract):
    def start(self, place: Path) -> ObjectStore:
        return DirectoryStore(str(place / "bucket"))


class TestS3(ObjectStoreContract):
    @pytest.fixture(autouse=True)
    def gateway(self, s3: S3Server) -> None: ...

    def start(self, place: Path) -> ObjectStore:
        return open_object_store(Remote("s3://bucket/some/prefix"))


class TestEncryptedS3(TestS3):
    def start(self, place: Path) -> ObjectStore:
        pytest.importorskip("cryptography", reason="needs the extra remote: pip install 'kvfs[remote]'")
        from kvfs.remote.encryption import EncryptedObjects, Keys

        return EncryptedObjects(super().start(place), Keys([bytes(32)]))


class TestCeph(ObjectStoreContract):
    @pytest.fixture(autouse=True)
    def prefix(self, gateway_url: str) -> None:
        self.url = gateway_url

    def start(self, place: Path) -> ObjectStore:
        return open_object_store(Remote(self.url))


def test_a_directory_follows_no_symlink_and_names_stay_inside(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path / "bucket"))
    store.put_new("a/b", b"1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_bytes(b"secret")
    (tmp_path / "bucket" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "bucket" / "file").symlink_to(tmp_path / "elsewhere" / "secret")
    for name in ("link/secret", "../elsewhere/secret", "/etc/passwd", "a//b", "a/../b", ".hidden", ""):
        for call in (partial(store.get, name, 0, 10), partial(store.put_new, name, b"x"), partial(store.delete, name)):
            with pytest.raises(RemoteError):
                call()
    with pytest.raises(RemoteError):
        store.get("file", 0, 10)
    assert not store.put_new("file", b"x")
    assert [found.name for found in store.listing("")] == ["a/b"]
    assert (tmp_path / "elsewhere" / "secret").read_bytes() == b"secret"


def test_a_directory_removes_what_a_killed_writer_left_after_a_day(tmp_path: Path) -> None:
    store = DirectoryStore(str(tmp_path))
    store.put_new("a/b", b"1")
    for name, age in (("0" * 16, 0.0), ("1" * 16, STALE_SECONDS + 10)):
        file = tmp_path / "a" / f".tmp-{name}"
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age,) * 2)
    assert [found.name for found in store.listing("")] == ["a/b"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [f".tmp-{'0' * 16}", "b"]


class Entry:
    """An entry of a directory whose file server fails."""

    name, path = "b", "/nowhere/b"

    def stat(self, *, follow_symlinks: bool) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_file_server_that_fails_within_a_listing_is_an_error_of_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_store.os, "scandir", lambda folder: contextlib.nullcontext([Entry()]))
    with pytest.raises(RemoteError, match=r"b: Stale file handle"):
        list(DirectoryStore(str(tmp_path)).listing(""))


@pytest.mark.parametrize("fault", ["503", "drop", "cut"])
def test_a_fault_that_passes_is_retried(s3: S3Server, fault: str) -> None:
    store = open_object_store(Remote("s3://bucket/p"))
    store.put_new("a", b"x" * 100_000)
    s3.fault = lambda method, key, number: fault if number % 2 == 0 else None
    for i in range(3):
        found = store.get("a", 0, 1 << 20)
        assert found is not None and bytes(found.data) == b"x" * 100_000
        assert store.put_new(f"b{i}", b"1") in (True, False), "a lost answer to a conditional put says: it is there"
        assert store.get(f"b{i}", 0, 1) is not None


@pytest.mark.parametrize("fault", ["503", "drop", "403", "skew"])
def test_a_fault_that_stays_is_an_error_after_bounded_retries(s3: S3Server, fault: str) -> None:
    store = open_object_store(Remote("s3://bucket/p", timeout_seconds=5.0))
    s3.fault = lambda method, key, number: fault
    began = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        store.get("a", 0, 10)
    assert s3.requests["GET"] <= 4 and time.monotonic() - began < 60
    assert len(str(caught.value)) < 600 and "Debug" not in str(caught.value)
    if fault == "403":
        assert "credentials" in str(caught.value)
    if fault == "skew":
        assert "clock of this host" in str(caught.value)


def test_a_gateway_that_hangs_ends_at_the_deadline(s3: S3Server) -> None:
    store = open_object_store(Remote("s3://bucket/p"), timeout=0.3, retries=1)
    s3.fault = lambda method, key, number: "hang"
    began = time.monotonic()
    with pytest.raises(RemoteError):
        store.get("a", 0, 10)
    assert time.monotonic() - began < 20


def test_an_endpoint_without_tls_is_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(RemoteError, match="AWS_ALLOW_HTTP"):
        open_object_store(Remote("s3://bucket/p")).get("a", 0, 10)


@pytest.mark.parametrize(
    "url", ["ftp://x/y", "s3:/bucket", "bucket", "file://relative/path", "s3://a b/c", "s3://x/?y=1"]
)
def test_an_url_that_is_none_is_refused_when_it_is_set(tmp_path: Path, url: str) -> None:
    from kvfs.directory import config_file
    from kvfs.system.files import Files

    kvfs.open(tmp_path / "s", capacity="16MiB").close()
    with pytest.raises(kvfs.ConfigError, match=r"remote\.url"):
        config_file.change(str(tmp_path / "s"), "remote.url", url, Files())


def test_credentials_in_an_url_are_refused(tmp_path: Path) -> None:
    from kvfs.directory import config_file
    from kvfs.system.files import Files

    kvfs.open(tmp_path / "s", capacity="16MiB").close()
    with pytest.raises(kvfs.ConfigError, match="use the environment"):
        config_file.change(str(tmp_path / "s"), "remote.url", "s3://key:secret@bucket/p", Files())


def test_no_bucket_and_no_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kvfs.ConfigError, match=r"kvfs config set remote\.url"):
        open_object_store(Remote())
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(kvfs.ConfigError, match=r"kvfs\[remote\]"):
        open_object_store(Remote("s3://bucket/p"))
