"""Credentials that expire while uploads run: what was refused goes on with those that replace them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.directory.config import Remote
from kvfs.remote import aws_credentials_file, reachable, upkeep
from kvfs.remote.object_store import RemoteError
from kvfs.remote.uploads import Uploader
from kvfs.remote.urls import open_object_store
from tests.remote.conftest import store_at
from tests.remote.s3_server import S3Server
from tests.stores import TINY_BYTES, counters, restored, seeded, tiny, tokens_of

PROMPTS, CHUNKS = 6, 40  # 2 objects each


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    return tmp_path / "credentials"


@pytest.fixture
def s3(credentials: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that accepts the credentials of the file, as long as it likes."""
    pytest.importorskip("obstore", reason="needs the extra remote: pip install 'kvfs[remote]'")
    server = S3Server()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    write(credentials, "first")
    server.accepted = "first"
    yield server
    server.close()


def write(path: Path, key: str, profile: str = "default") -> None:
    """As a program does that renews them: the file is replaced."""
    new = path.with_suffix(".new")
    text = f"[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = %secret\naws_session_token = token\n"
    new.write_text(f"[other]\nrole_arn = x\n\n{text}")
    new.replace(path)


def expire_at(s3: S3Server, number: int, call: str = "PUT") -> None:
    """The credentials end with the ``number``-th upload (GET: request) of pages from now on."""
    seen: list[str] = []

    def fault(method: str, key: str, _: int) -> None:
        if method == call and "/pages/" in key:
            seen.append(key)
            if len(seen) == number:
                s3.accepted = "second"

    s3.fault = fault


def test_a_push_whose_credentials_expire_is_complete_once_they_are_renewed(
    s3: S3Server, credentials: Path, tmp_path: Path
) -> None:
    with store_at(tmp_path / "here", "s3://bucket/p") as here, store_at(tmp_path / "there", "s3://bucket/p") as there:
        ns, other = (store.namespace("chat", tiny(), "1a") for store in (here, there))
        for seed in range(PROMPTS):
            ns.put(tokens_of(seed, CHUNKS), seeded(seed, CHUNKS * TINY_BYTES))
        expire_at(s3, 5)
        done = here.push(["chat"])
        assert done.failed and done.stored < PROMPTS * CHUNKS
        assert "the credentials have expired" in done.problems[0]
        assert here._shared.kept_bucket()._bucket is None, "its client may use the old ones for a moment"
        assert "the credentials have expired" in reachable.problem(here.settings.remote, seconds=60)
        write(credentials, "second")
        done = here.push(["chat"])
        assert not done.failed and done.stored + done.present == PROMPTS * CHUNKS
        for seed in range(PROMPTS):
            there.pull(other, tokens_of(seed, CHUNKS))
            assert restored(other, tokens_of(seed, CHUNKS)) == seeded(seed, CHUNKS * TINY_BYTES)


def test_a_pull_whose_credentials_expire_is_complete_once_they_are_renewed(
    s3: S3Server, credentials: Path, tmp_path: Path
) -> None:
    with store_at(tmp_path / "here", "s3://bucket/p") as here, store_at(tmp_path / "there", "s3://bucket/p") as there:
        ns, other = (store.namespace("chat", tiny(), "1a") for store in (here, there))
        for seed in range(PROMPTS):
            ns.put(tokens_of(seed, CHUNKS), seeded(seed, CHUNKS * TINY_BYTES))
        assert not here.push(["chat"]).failed
        expire_at(s3, 5, "GET")
        done = there.pull("chat")
        assert done.failed and done.stored < PROMPTS * CHUNKS
        assert "the credentials have expired" in done.problems[0]
        assert there._shared.kept_bucket()._bucket is None, "its client may use the old ones for a moment"
        write(credentials, "second")
        again = there.pull("chat")
        assert not again.failed and done.stored + again.stored == PROMPTS * CHUNKS
        for seed in range(PROMPTS):
            assert restored(other, tokens_of(seed, CHUNKS)) == seeded(seed, CHUNKS * TINY_BYTES)


def test_uploads_go_on_in_the_same_process_when_the_file_is_renewed(
    s3: S3Server, credentials: Path, tmp_path: Path
) -> None:
    """The client of a bucket process lives for days, and must not keep the first token."""
    with store_at(tmp_path / "here", "s3://bucket/p") as here:
        ns, uploader = here.namespace("chat", tiny(), "1a"), Uploader(here._shared.c)
        for seed in range(PROMPTS):
            ns.put(tokens_of(seed, CHUNKS), seeded(seed, CHUNKS * TINY_BYTES))
        expire_at(s3, 5)
        with here.bucket() as bucket:
            uploader.run(bucket, "all", lambda nbytes: None)
            done = uploader.run(bucket, "all", lambda nbytes: None).done
            assert done.failed and counters(here)["remote_errors"]
            write(credentials, "second")
            time.sleep(0.2)  # the client asks for credentials ten times a second at most
            for _ in range(4):
                assert not uploader.run(bucket, "all", lambda nbytes: None).done.failed
            found = upkeep.verify(bucket, repair=False, requests=4)
        assert (found.pages, found.bad, found.failed) == (PROMPTS * CHUNKS, 0, 0)
        uploader.close()


def test_a_renewal_before_the_end_costs_nothing(s3: S3Server, credentials: Path) -> None:
    store = open_object_store(Remote("s3://bucket/p"))
    assert store.put_new("a", b"1")
    write(credentials, "second")
    time.sleep(0.2)
    s3.accepted = "second"
    assert store.put_new("b", b"1")
    store.close()


def test_a_file_that_is_written_at_that_moment_is_an_error_that_passes(s3: S3Server, credentials: Path) -> None:
    store = open_object_store(Remote("s3://bucket/p"))
    store.put_new("a", b"1")
    credentials.write_text("[defau")
    time.sleep(0.2)
    with pytest.raises(RemoteError):
        store.put_new("b", b"1")
    write(credentials, "first")
    time.sleep(0.2)
    assert store.put_new("b", b"1")
    store.close()


@pytest.mark.parametrize(
    ("environment", "used"),
    [
        ({}, True),
        ({"AWS_PROFILE": "other"}, False),
        ({"AWS_PROFILE": "missing"}, False),
        ({"AWS_ACCESS_KEY_ID": "key"}, False),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}, False),
        ({"AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}, False),
    ],
)
def test_the_file_is_used_if_nothing_else_is_named(credentials: Path, environment: dict[str, str], used: bool) -> None:
    write(credentials, "first")
    found = aws_credentials_file.provider({"AWS_SHARED_CREDENTIALS_FILE": str(credentials), **environment})
    assert (found is not None) is used
    if found is not None:
        said = found()
        assert (said["access_key_id"], said["secret_access_key"], said["token"]) == ("first", "%secret", "token")
