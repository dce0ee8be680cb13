"""Ceph's S3 gateway that is killed, throttles, is asked through a bad network, by a wrong clock, with old credentials.

No byte is wrong, no local page is lost, and what failed goes on later. ``make test-remote`` runs these.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.directory.config import Remote
from kvfs.remote import reachable, upkeep
from kvfs.remote.object_store import ObjectStore
from kvfs.remote.uploads import Uploader
from tests.remote.conftest import BUCKET, CEPH_ROOT
from tests.remote.faulty_proxy import FaultyProxy
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of
from tools.ceph import Ceph

pytestmark = [
    pytest.mark.skipif(not CEPH_ROOT, reason="needs Ceph: make test-remote sets it up"),
    pytest.mark.timeout(300),
]
PROMPTS, CHUNKS = 12, 70  # 3 objects each
PAGES = PROMPTS * CHUNKS


@pytest.fixture
def proxy(gateway: Ceph, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    made = FaultyProxy(gateway.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    yield made
    made.close()


@pytest.fixture
def filled(proxy: FaultyProxy, here: kvfs.Store) -> kvfs.Store:
    ns = here.namespace("chat", tiny(), "1a")
    for seed in range(PROMPTS):
        ns.put(tokens_of(seed, CHUNKS), seeded(seed, CHUNKS * TINY_BYTES))
    return here


def stored_tokens(store: kvfs.Store) -> int:
    """Chunks of all prompts that are restored, each with its right bytes."""
    ns, chunks = store.namespace("chat", tiny(), "1a"), 0
    for seed in range(PROMPTS):
        got = restored(ns, tokens_of(seed, CHUNKS))
        assert seeded(seed, CHUNKS * TINY_BYTES).startswith(got), f"wrong bytes of prompt {seed}"
        chunks += len(got) // TINY_BYTES
    return chunks


def pulled(store: kvfs.Store) -> int:
    """Pull all prompts; what ``stored_tokens`` says then."""
    ns = store.namespace("chat", tiny(), "1a")
    for seed in range(PROMPTS):
        store.pull(ns, tokens_of(seed, CHUNKS))
    return stored_tokens(store)


def at_request(number: int, method: str, do: Callable[[], None]) -> Callable[[str, str, int], str]:
    """A fault: ``do``, when this request for pages has come."""
    seen: list[str] = []

    def fault(of: str, key: str, _: int) -> str:
        if of == method and "/pages/" in key:
            seen.append(key)
            if len(seen) == number:
                do()
        return ""

    return fault


def test_a_gateway_that_is_killed_during_uploads_has_all_pages_in_the_end(
    gateway: Ceph, proxy: FaultyProxy, filled: kvfs.Store, there: kvfs.Store
) -> None:
    proxy.fault = at_request(10, "PUT", gateway.kill_gateway)
    done = filled.push(["chat"])
    assert done.failed and done.problems and done.stored < PAGES
    assert stored_tokens(filled) == PAGES, "the local pages"
    gateway.start_gateway()
    done = filled.push(["chat"])
    assert not done.failed and done.present + done.stored == PAGES
    with filled.bucket() as bucket:
        found = upkeep.verify(bucket, repair=False, requests=4)
    assert (found.bad, found.failed, found.pages) == (0, 0, PAGES)
    assert pulled(there) == PAGES and there.verify().ok


def test_a_gateway_that_is_killed_during_downloads_gives_shorter_prefixes(
    gateway: Ceph, proxy: FaultyProxy, filled: kvfs.Store, there: kvfs.Store
) -> None:
    filled.push(["chat"])
    proxy.fault = at_request(10, "GET", gateway.kill_gateway)
    ns, chunks = there.namespace("chat", tiny(), "1a"), 0
    failed = 0
    for seed in range(PROMPTS):
        try:
            failed += there.pull(ns, tokens_of(seed, CHUNKS)).failed
        except kvfs.KvfsError as exc:  # the marker was asked for with the first objects
            assert "127.0.0.1" in str(exc) or BUCKET in str(exc)
            failed += 1
            break
    chunks = stored_tokens(there)
    assert failed and 0 < chunks < PAGES
    gateway.start_gateway()
    assert pulled(there) == PAGES and there.verify().ok


def test_faults_in_each_twentieth_request_lose_nothing(
    proxy: FaultyProxy, filled: kvfs.Store, there: kvfs.Store
) -> None:
    hit = []

    def fault(method: str, key: str, number: int) -> str:
        draw = random.Random(f"{method} {key.partition('/')[2]} {number}")  # whichever thread comes first
        which = draw.choice(("503", "drop", "lost", "cut", "flip")) if draw.random() < 0.05 else ""
        hit.extend([which] if which else [])
        return which

    proxy.fault = fault
    for _ in range(20):
        with contextlib.suppress(kvfs.KvfsError):  # the marker came changed: it has no sum, and the push is refused
            if not filled.push(["chat"]).failed:
                break
    for _ in range(20):
        with contextlib.suppress(kvfs.KvfsError):
            if pulled(there) == PAGES:
                break
    proxy.fault = lambda *_: ""
    assert hit and pulled(there) == PAGES and there.verify().ok
    with filled.bucket() as bucket:
        assert upkeep.verify(bucket, repair=False, requests=4).bad == 0


@pytest.mark.parametrize("fault", ["503", "cut", "flip", "drop"])
def test_an_object_that_never_comes_right_ends_the_prefix_before_it(
    proxy: FaultyProxy, filled: kvfs.Store, there: kvfs.Store, fault: str
) -> None:
    filled.push(["chat"])
    ns, tokens = there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS)
    second = ns.chunk_hashes(tokens)[32].hex()
    proxy.fault = lambda method, key, number: fault if key.endswith(second) else ""
    got = there.pull(ns, tokens)
    assert got.failed + got.refused == 1 and 32 <= got.stored < CHUNKS  # pages of later objects may have come meanwhile
    found = restored(ns, tokens)
    assert 32 <= len(found) // TINY_BYTES < 64 and seeded(1, CHUNKS * TINY_BYTES).startswith(found)
    proxy.fault = lambda *_: ""
    assert there.pull(ns, tokens).stored == CHUNKS - got.stored
    assert restored(ns, tokens) == seeded(1, CHUNKS * TINY_BYTES)


def test_an_object_that_is_removed_between_the_question_and_the_load_ends_the_prefix(
    objects: ObjectStore, proxy: FaultyProxy, filled: kvfs.Store, there: kvfs.Store
) -> None:
    filled.push(["chat"])
    ns, tokens = there.namespace("chat", tiny(), "1a"), tokens_of(1, CHUNKS)
    last = f"{ns.chunk_hashes(tokens)[64].hex()}"

    def fault(method: str, key: str, number: int) -> str:
        if method == "GET" and key.endswith(last) and number == 2:  # the first was the question
            (name,) = [found.name for found in objects.listing("") if found.name.endswith(last)]
            objects.delete(name)
        return ""

    proxy.requests.clear()
    proxy.fault = fault
    fetch = there.fetch(ns, tokens)
    assert fetch is not None and fetch.wait(100)
    assert (fetch.reach, fetch.failed) == (CHUNKS, "")
    assert restored(ns, tokens) == seeded(1, 64 * TINY_BYTES)


def test_two_hosts_that_push_the_same_prompts_at_once_store_each_object_once(
    proxy: FaultyProxy, filled: kvfs.Store, there: kvfs.Store, stored_pages: Callable[[], list[str]]
) -> None:
    ns = there.namespace("chat", tiny(), "1a")
    for seed in range(PROMPTS):
        ns.put(tokens_of(seed, CHUNKS), seeded(seed, CHUNKS * TINY_BYTES))
    both, results = threading.Barrier(2), []

    def push(store: kvfs.Store) -> None:
        both.wait(60)
        results.append(store.push(["chat"]))

    threads = [threading.Thread(target=push, args=(store,)) for store in (filled, there)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert len(results) == 2 and not any(r.failed for r in results)
    assert len(stored_pages()) == 3 * PROMPTS == sum(r.objects for r in results)
    assert sum(r.stored for r in results) == PAGES and all(r.stored + r.present == PAGES for r in results)


@pytest.mark.parametrize("shift", ["-1h", "+1h"])
def test_a_host_whose_clock_is_an_hour_off_is_told_and_keeps_its_pages(
    gateway: Ceph, filled: kvfs.Store, tmp_path: Path, bucket_url: str, shift: str
) -> None:
    environment = os.environ | {
        "LD_PRELOAD": str(gateway.faketime), "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "AWS_ENDPOINT_URL": gateway.endpoint, "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    filled.close()
    done = subprocess.run(
        [sys.executable, "-m", "kvfs.cli.main", "-C", str(tmp_path / "here"), "push", "chat", "--json"],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "clock" in done.stderr, done
    with kvfs.open(tmp_path / "here") as store:
        assert stored_tokens(store) == PAGES
        assert store.push(["chat"]).stored == PAGES


def test_credentials_that_end_are_named_and_new_ones_go_on(
    gateway: Ceph, filled: kvfs.Store, there: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.add_key("short-lived", "secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "short-lived")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    ns = filled.namespace("chat", tiny(), "1a")
    with ns.match(tokens_of(0, CHUNKS)) as match:
        assert filled.push(match=match).stored == CHUNKS
    gateway.remove_key("short-lived")
    with pytest.raises(kvfs.KvfsError, match="credentials"):
        filled.push(["chat"])
    with pytest.raises(kvfs.KvfsError, match="credentials"):
        there.pull("chat")
    assert stored_tokens(filled) == PAGES
    for name, value in gateway.environment().items():
        monkeypatch.setenv(name, value)
    assert filled.push(["chat"]).failed == 0 and pulled(there) == PAGES


def test_uploads_whose_credentials_end_complete_once_the_file_is_renewed(
    gateway: Ceph, proxy: FaultyProxy, filled: kvfs.Store, there: kvfs.Store, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With one client throughout, as a bucket process has it."""
    file, lasting = tmp_path / "credentials", gateway.environment()
    gateway.add_key("short-lived", "secret")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    file.write_text(text.format("short-lived", "secret"))
    proxy.fault = at_request(10, "PUT", lambda: gateway.remove_key("short-lived"))
    uploader = Uploader(filled._shared.c)
    with filled.bucket() as bucket:
        for _ in range(2):
            done = uploader.run(bucket, "all", lambda nbytes: None).done
        assert done.failed and "credentials" in done.problems[0]
        assert stored_tokens(filled) == PAGES, "the local pages"
        file.write_text(text.format(lasting["AWS_ACCESS_KEY_ID"], lasting["AWS_SECRET_ACCESS_KEY"]))
        time.sleep(0.2)  # the client asks for credentials ten times a second at most
        for _ in range(4):
            assert not uploader.run(bucket, "all", lambda nbytes: None).done.failed
    uploader.close()
    assert pulled(there) == PAGES and there.verify().ok


def test_wrong_credentials_and_a_missing_bucket_are_named(
    gateway: Ceph, bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reachable.problem(Remote(bucket_url), seconds=60) == ""
    assert "is the bucket there?" in reachable.problem(Remote("s3://no-such-bucket/p"), seconds=60)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "credentials" in reachable.problem(Remote(bucket_url), seconds=60)
