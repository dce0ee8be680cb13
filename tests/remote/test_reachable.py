"""A bucket that cannot be used is named within seconds, when it is set and by doctor; the store works without it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.directory.config import Remote
from kvfs.doctor.bucket_check import diagnose_bucket
from kvfs.doctor.findings import OK, WARN
from kvfs.remote import reachable
from kvfs.remote.directory_store import STALE_SECONDS, TEMPORARY, DirectoryStore
from kvfs.remote.names import MARKER
from kvfs.system.files import Files
from tests.cli.commands import called
from tests.remote.conftest import store_at
from tests.remote.s3_server import S3Server

URL = Remote("s3://bucket/p")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    pytest.importorskip("obstore", reason="needs the extra remote: pip install 'kvfs[remote]'")
    server = S3Server()
    for name, value in (
        ("AWS_ENDPOINT_URL", server.endpoint), ("AWS_ALLOW_HTTP", "true"), ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"), ("AWS_REGION", "us-east-1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    yield server
    server.close()


def test_an_empty_bucket_is_no_problem_and_stays_empty(s3: S3Server) -> None:
    assert reachable.problem(URL, seconds=60) == ""
    assert not s3.objects


def test_refused_credentials_are_named(s3: S3Server) -> None:
    s3.fault = lambda method, key, number: "403"
    assert "credentials" in reachable.problem(URL, seconds=60)


def test_a_missing_bucket_is_named(s3: S3Server) -> None:
    s3.fault = lambda method, key, number: "404"
    assert "is the bucket there?" in reachable.problem(URL, seconds=60)


def test_an_endpoint_without_tls_is_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    assert "AWS_ALLOW_HTTP" in reachable.problem(URL, seconds=60)


def test_a_gateway_that_hangs_is_named_after_the_deadline(s3: S3Server) -> None:
    s3.fault = lambda method, key, number: "hang"
    assert "does not answer within 0.2 s" in reachable.problem(URL, seconds=0.2)


def test_a_file_server_that_hangs_is_left_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(DirectoryStore, "get", lambda *_: answers.wait(60) and None)
    began = time.monotonic()
    assert "does not answer within 0.1 s" in reachable.problem(Remote(f"file://{tmp_path}"), seconds=0.1)
    assert time.monotonic() - began < 30
    answers.set()


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert "is a file: name a directory" in reachable.problem(Remote(f"file://{tmp_path}/file"))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("weights.bin", b"x", "another program"),
        (MARKER, json.dumps({"kvfs": "remote", "format": 99}).encode(), "format 99"),
        (MARKER, b"{", "damaged"),
    ],
)
def test_a_bucket_of_another_program_or_format_is_a_warning(
    tmp_path: Path, bucket_path: Path, name: str, data: bytes, said: str
) -> None:
    bucket_path.mkdir()
    (bucket_path / name).write_bytes(data)
    here = tmp_path / "here"
    kvfs.open(here, capacity="64MiB").close()
    done = called("-C", str(here), "config", "set", "remote.url", f"file://{bucket_path}")
    assert done.returncode == 0 and "is now" in done.stdout, done.stderr
    assert done.stderr.count("\n") == 1 and "warning" in done.stderr and said in done.stderr
    done = called("-C", str(here), "doctor", "--json")
    (found,) = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "bucket"]
    assert found["status"] == WARN and said in found["detail"] and found["remedy"]
    assert [entry.name for entry in bucket_path.iterdir()] == [name]
    with kvfs.open(here) as store:
        assert store.settings.remote.url == f"file://{bucket_path}"


def test_doctor_says_that_a_bucket_answers_and_nothing_without_one(tmp_path: Path, bucket_url: str) -> None:
    store_at(tmp_path / "here", bucket_url).close()
    (found,) = diagnose_bucket(str(tmp_path / "here"), Files())
    assert found.status == OK and "answers" in found.detail
    kvfs.open(tmp_path / "alone", capacity="64MiB").close()
    assert diagnose_bucket(str(tmp_path / "alone"), Files()) == []


def test_old_temporary_files_of_other_programs_stay(tmp_path: Path) -> None:
    import os

    old = time.time() - STALE_SECONDS - 60
    for name in (f"{TEMPORARY}{'0' * 16}", f"{TEMPORARY}theirs"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (old, old))
    assert list(DirectoryStore(str(tmp_path)).listing("")) == []
    assert [entry.name for entry in tmp_path.iterdir()] == [f"{TEMPORARY}theirs"]


def test_a_process_without_a_thread_left_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert reachable.problem(URL) == "s3://bucket/p cannot be asked: can't start new thread"
