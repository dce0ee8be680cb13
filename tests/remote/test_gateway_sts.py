"""Credentials of a real STS, that of Ceph's gateway, which end after seconds. ``make test-remote`` runs these."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvfs
from kvfs.remote import upkeep
from kvfs.remote.uploads import Uploader
from tests.remote.conftest import CEPH_ROOT
from tests.remote.sts import Session, assume_role
from tests.remote.test_gateway_faults import PAGES, FaultyProxy, filled, proxy, pulled, stored_tokens
from tests.stores import counters
from tools.ceph import Ceph

__all__ = ["filled", "proxy"]
pytestmark = [
    pytest.mark.skipif(not CEPH_ROOT, reason="needs Ceph: make test-remote sets it up"),
    pytest.mark.timeout(300),
]
SHORT, RENEWED_AFTER = 5, 1.0  # seconds of a session, and after which it is replaced
PACE_SECONDS = 0.15  # of each request for pages, one after the other


@pytest.fixture(scope="session")
def role(ceph: Ceph) -> str:
    return ceph.add_role("kvfs-host")


@pytest.fixture
def renew(gateway: Ceph, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Session]:
    """Put a new session into the file of credentials, the only ones of the environment."""
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(seconds: int) -> Session:
        made = assume_role(gateway.endpoint, gateway.ACCESS_KEY, gateway.SECRET_KEY, role, seconds)
        new = file.with_suffix(".new")
        new.write_text(made.profile())
        new.replace(file)
        return made

    return write


def test_uploads_whose_session_ends_complete_once_there_is_another(
    renew: Callable[[int], Session], proxy: FaultyProxy, filled: kvfs.Store, there: kvfs.Store
) -> None:
    """With one client throughout, as a bucket process has it."""
    seen: list[str] = []

    def fault(method: str, key: str, _: int) -> str:
        if method == "PUT" and "/pages/" in key:
            seen.append(key)
            if len(seen) == 10:
                time.sleep(max(0.0, first.ends + 1.5 - time.time()))
        return ""

    proxy.fault = fault
    uploader = Uploader(filled._shared.c)
    first = renew(SHORT)
    with filled.bucket() as bucket:
        for _ in range(2):
            done = uploader.run(bucket, "all", lambda nbytes: None).done
        assert done.failed and "credentials" in done.problems[0]
        assert stored_tokens(filled) == PAGES, "the local pages"
        assert 9 <= len(seen) < 36
        renew(900)
        time.sleep(0.2)  # the client asks for credentials ten times a second at most
        for _ in range(4):
            assert not uploader.run(bucket, "all", lambda nbytes: None).done.failed
        found = upkeep.verify(bucket, repair=False, requests=4)
    uploader.close()
    assert (found.pages, found.bad, found.failed) == (PAGES, 0, 0)
    assert pulled(there) == PAGES and there.verify().ok


def test_a_push_and_pulls_that_outlast_their_sessions_lose_nothing_while_those_are_renewed(
    renew: Callable[[int], Session], proxy: FaultyProxy, filled: kvfs.Store, there: kvfs.Store
) -> None:
    """As where a program of the host replaces them ahead of their end."""
    sessions: list[Session] = []

    def fault(method: str, key: str, _: int) -> str:
        if "/pages/" in key and method in ("PUT", "GET"):
            time.sleep(PACE_SECONDS)
            if time.time() > sessions[-1].ends - SHORT + RENEWED_AFTER:
                sessions.append(renew(SHORT))
        return ""

    sessions.append(renew(SHORT))
    proxy.fault = fault
    done = filled.push(["chat"])
    assert (done.failed, done.stored) == (0, PAGES)
    assert time.time() > sessions[0].ends
    before = sessions[-1]
    assert pulled(there) == PAGES
    assert time.time() > before.ends
    assert not counters(filled).get("remote_errors") and not counters(there).get("remote_errors")


def test_a_pull_whose_session_ends_keeps_what_came_and_another_one_brings_the_rest(
    renew: Callable[[int], Session], proxy: FaultyProxy, filled: kvfs.Store, there: kvfs.Store
) -> None:
    renew(900)
    assert filled.push(["chat"]).failed == 0
    seen: list[str] = []

    def fault(method: str, key: str, _: int) -> str:
        if method == "GET" and "/pages/" in key:
            seen.append(key)
            if len(seen) == 12:
                time.sleep(max(0.0, short.ends + 1.5 - time.time()))
        return ""

    short = renew(SHORT)
    proxy.fault = fault
    began = time.monotonic()
    done = there.pull("chat")
    assert done.failed and "credentials" in done.problems[0] and 0 < done.stored < PAGES
    assert time.monotonic() - began < 60
    assert there._shared.kept_bucket()._bucket is None, "another call looks for credentials again"
    renew(900)
    again = there.pull("chat")
    assert (again.failed, done.stored + again.stored) == (0, PAGES) and stored_tokens(there) == PAGES
