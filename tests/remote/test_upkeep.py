"""What is in a bucket, whether it verifies, and what is removed from it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvfs
from kvfs.pages.identity import salt_digest
from kvfs.remote import upkeep
from tests.cli.commands import called
from tests.remote.test_push_pull import objects_of
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of


@pytest.fixture
def filled(here: kvfs.Store) -> kvfs.Store:
    for name in ("chat", "code"):
        here.namespace(name, tiny(), "1a").put(tokens_of(1, 70), seeded(1, 70 * TINY_BYTES))
    here.push(["chat", "code"])
    return here


def test_the_namespaces_and_their_sums(filled: kvfs.Store, bucket_path: Path) -> None:
    with filled.bucket() as bucket:
        found = upkeep.namespaces(bucket)
    assert [(n.described.name, n.objects) for n in found] == [("chat", 3), ("code", 3)]
    assert sum(n.nbytes for n in found) == sum(p.stat().st_size for p in objects_of(bucket_path))
    assert all(time.time() - 600 < n.oldest <= n.newest < time.time() + 600 for n in found)


def test_a_verification_names_what_is_damaged_and_repair_removes_only_that(
    filled: kvfs.Store, bucket_path: Path
) -> None:
    files = objects_of(bucket_path)
    damaged = bytearray(files[0].read_bytes())
    damaged[20_480] ^= 1  # the first byte of its first page
    files[0].write_bytes(damaged)
    files[1].write_bytes(files[1].read_bytes()[:-4096])
    (bucket_path / "foreign.txt").write_text("mine")
    with filled.bucket() as bucket:
        seen = upkeep.verify(bucket, repair=False, requests=2)
        assert (seen.objects, seen.bad, seen.removed, seen.foreign, seen.failed) == (6, 2, 0, 1, 0)
        assert files[0].name in "".join(seen.problems)
        done = upkeep.verify(bucket, repair=True, requests=2)
        assert (done.bad, done.removed) == (2, 2)
        assert upkeep.verify(bucket, repair=False, requests=2).bad == 0
    assert objects_of(bucket_path) == files[2:] and (bucket_path / "foreign.txt").exists()


def test_pages_that_are_larger_than_the_local_store_allows_are_not_damaged(
    filled: kvfs.Store, bucket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.index.ledger.page_limit", lambda settings: 1)
    with filled.bucket() as bucket:
        assert upkeep.verify(bucket, repair=True, requests=2).bad == 0
    assert len(objects_of(bucket_path)) == 6


def test_only_what_is_older_than_the_retention_is_removed(filled: kvfs.Store, bucket_path: Path) -> None:
    files, now = objects_of(bucket_path), time.time()
    for file in files[:2]:
        os.utime(file, (now - 100_000,) * 2)
    (bucket_path / "foreign.txt").write_text("mine")
    os.utime(bucket_path / "foreign.txt", (now - 100_000,) * 2)
    with filled.bucket() as bucket:
        plan = upkeep.collect(bucket, now - 50_000, apply=False)
        assert (plan.objects, plan.kept) == (2, 4) and objects_of(bucket_path) == files
        done = upkeep.collect(bucket, now - 50_000, apply=True)
        assert (done.objects, done.nbytes, done.kept) == (2, plan.nbytes, 4)
        assert objects_of(bucket_path) == files[2:] and (bucket_path / "foreign.txt").exists()
        assert [n.described.name for n in upkeep.namespaces(bucket)] == ["chat", "code"]
    assert filled.push(["chat", "code"]).objects == 2, "a host that has them stores them again"


def test_a_namespace_is_removed_and_no_other(filled: kvfs.Store, there: kvfs.Store, bucket_path: Path) -> None:
    with filled.bucket() as bucket:
        described = bucket.find("chat")
        assert upkeep.remove(bucket, described, apply=False).objects == 3 and len(objects_of(bucket_path)) == 6
        assert upkeep.remove(bucket, described, apply=True).objects == 3
        assert [n.described.name for n in upkeep.namespaces(bucket)] == ["code"]
    assert not any(described.digest.hex() in str(p) for p in bucket_path.rglob("*") if p.is_file())
    assert there.pull(there.namespace("chat", tiny(), "1a"), tokens_of(1, 70)).objects == 0
    assert there.pull("code").stored == 70


def test_a_tenant_is_removed_and_no_other(
    here: kvfs.Store, there: kvfs.Store, tmp_path: Path, stored_pages: Callable[[], list[str]]
) -> None:
    for salt in ("", "ours", "theirs"):
        here.namespace("chat", tiny(), "1a", salt).put(tokens_of(1, 40), seeded(1, 40 * TINY_BYTES))
    here.push([d.digest.hex() for d in here.catalog.described()])
    before = stored_pages()
    command = ("-C", str(tmp_path / "here"), "remote", "rm", "--tenant", "--json")
    shown = called(*command, KVFS_SALT="ours")
    assert json.loads(shown.stdout)["objects"] == 2 and stored_pages() == before
    assert json.loads(called(*command, "--yes", KVFS_SALT="ours").stdout)["objects"] == 2
    assert not any(salt_digest("ours") in name for name in stored_pages()) and len(stored_pages()) == 4
    pulled = {s: there.pull(there.namespace("chat", tiny(), "1a", s), tokens_of(1, 40)) for s in ("ours", "theirs", "")}
    assert {salt: done.stored for salt, done in pulled.items()} == {"ours": 0, "theirs": 40, "": 40}
    refused = called(*command)
    assert refused.returncode == 2 and "KVFS_SALT" in refused.stderr
    assert called("-C", str(tmp_path / "here"), "remote", "rm", "chat", "--tenant").returncode == 2


def test_a_bucket_lies_about_a_namespace(filled: kvfs.Store, bucket_path: Path) -> None:
    with filled.bucket() as bucket:
        digest = bucket.find("chat").digest.hex()
    file = bucket_path / "open" / digest / "namespace"
    file.write_bytes(file.read_bytes().replace(b"chat", b"cha2"))
    with filled.bucket() as bucket:
        assert [d.name for d in bucket.namespaces()] == ["code"]
        assert upkeep.verify(bucket, repair=False, requests=2).bad == 3
