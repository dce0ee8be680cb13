"""Objects that are encrypted before they leave the host: only the hosts with the key read them, or make them."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="needs the extra remote: pip install 'kvfs[remote]'")

import kvfs
from kvfs.directory import config_file
from kvfs.directory.config import Remote
from kvfs.doctor.bucket_check import diagnose_bucket
from kvfs.doctor.findings import OK, WARN
from kvfs.pages.identity import salt_digest
from kvfs.remote import encryption, reachable, upkeep
from kvfs.remote.directory_store import DirectoryStore
from kvfs.remote.encryption import EncryptedObjects, Keys, blocks, plain_size, read_keys, sealed_size
from kvfs.remote.names import MARKER
from kvfs.remote.object_store import ObjectStore
from kvfs.system.files import Files
from kvfs.testing import ObjectStoreContract
from tests.cli.commands import called
from tests.remote.conftest import store_at
from tests.remote.test_push_pull import objects_of
from tests.stores import TINY_BYTES, counters, restored, seeded, tiny, tokens_of

OLD, NEW, OTHER = (bytes([n]) * 32 for n in (1, 2, 3))
CHUNKS = 70  # 3 objects
PAGES = "open/" + "5a" * 32 + "/pages/0000-" + "01" * 8 + "/" + "7b" * 32  # the name of an object with pages
#: Of a key of bytes 100 to 131, and a salt of bytes 0 to 31.
GOLDEN_SMALL = (
    "4b564653454e4331971a593d48469a7b000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "348d97bcccaa96cd3f92b81d90b36c2d96f3ad36dd50bbe8cc0b38b29d58ad9259eb"
)
GOLDEN_NAME = (
    "open/5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a/pages/0000-0101010101010101/"
    "6573f23bde17c539c01b74f11cfff070b4ccbf6952db0f2f653d292b1e980737742614b7b2863eef296ac6960bbf8004"
)
GOLDEN_SHA256 = "6ab2b410f96860e89bd917f1cb0ed2f6cf482bf5d43545290fc3249b5b136c32"


def key_file(path: Path, *keys: bytes) -> str:
    path.write_text("# the newest first\n" + "".join(f"{key.hex()}\n" for key in keys))
    path.chmod(0o600)
    return str(path)


def set_keys(store: Path, file: str) -> None:
    config_file.change(str(store), "remote.key_file", file, Files())


@pytest.fixture
def keyed(tmp_path: Path, bucket_url: str) -> Iterator[kvfs.Store]:
    """A store whose bucket is encrypted, with a prompt in it."""
    store_at(tmp_path / "keyed", bucket_url).close()
    set_keys(tmp_path / "keyed", key_file(tmp_path / "key", OLD))
    with kvfs.open(tmp_path / "keyed") as store:
        store.namespace("chat", tiny(), "1a").put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))
        assert store.push(["chat"]).stored == CHUNKS
        yield store


def pulled(store: kvfs.Store, seed: int = 1) -> int:
    """Chunks of a prompt that are here after a pull, each with its right bytes."""
    ns = store.namespace("chat", tiny(), "1a")
    store.pull(ns, tokens_of(seed, CHUNKS))
    got = restored(ns, tokens_of(seed, CHUNKS))
    assert seeded(seed, CHUNKS * TINY_BYTES).startswith(got)
    return len(got) // TINY_BYTES


def other_host(tmp_path: Path, url: str, *keys: bytes, name: str = "other") -> kvfs.Store:
    store_at(tmp_path / name, url).close()
    if keys:
        set_keys(tmp_path / name, key_file(tmp_path / f"{name}.key", *keys))
    return kvfs.open(tmp_path / name)


class TestEncryptedDirectory(ObjectStoreContract):
    def start(self, place: Path) -> ObjectStore:
        return EncryptedObjects(DirectoryStore(str(place / "bucket")), Keys([NEW, OLD]))


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 16_385, 278_528, 278_529, 1_000_000])
def test_objects_of_all_sizes_come_back_as_a_whole_and_in_ranges(tmp_path: Path, size: int) -> None:
    inner, draw = DirectoryStore(str(tmp_path)), random.Random(size)
    store, data = EncryptedObjects(inner, Keys([OLD])), draw.randbytes(size)
    assert store.put_new(PAGES, data)
    (listed,) = inner.listing("")
    assert listed.size == sealed_size(size) and plain_size(listed.size) == size
    assert [(found.name, found.size) for found in store.listing("")] == [(PAGES, size)]
    assert sum(block.nbytes for block in blocks(size)) == size
    ranges = [(0, max(1, size)), (0, 16_384), (0, size + 100)]
    ranges += [(begin := draw.randrange(max(1, size)), draw.randrange(1, size - begin + 2)) for _ in range(10)]
    for begin, length in ranges:
        found = store.get(PAGES, begin, length)
        assert found is not None and (bytes(found.data), found.size) == (data[begin : begin + length], size)


def test_the_bytes_of_an_encrypted_object_never_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden: what kvfs 0.1 wrote, every later version reads. docs/format-remote.md tells how they are made."""
    monkeypatch.setattr(encryption.os, "urandom", lambda n: bytes(range(n)))
    inner, key = DirectoryStore(str(tmp_path)), bytes(range(100, 132))
    store = EncryptedObjects(inner, Keys([key]))
    data = b"".join(hashlib.sha256(bytes([i])).digest() for i in range(256)) * 64  # 512 KiB: three blocks
    assert store.put_new(PAGES, data) and store.put_new("a", b"the KV of a prompt")
    small, (large,) = inner.get("a", 0, 1000), [found for found in inner.listing("") if found.name != "a"]
    assert small is not None and bytes(small.data).hex() == GOLDEN_SMALL
    assert large.name == GOLDEN_NAME
    stored = inner.get(large.name, 0, large.size)
    assert stored is not None and hashlib.sha256(stored.data).hexdigest() == GOLDEN_SHA256
    monkeypatch.undo()
    assert by_the_page(key, "a", bytes(small.data)) == b"the KV of a prompt"
    assert by_the_page(key, large.name, bytes(stored.data)) == data
    for name, whole in ((PAGES, data), ("a", b"the KV of a prompt")):
        found = store.get(name, 0, 1 << 20)
        assert found is not None and bytes(found.data) == whole


def by_the_page(key: bytes, name: str, stored: bytes) -> bytes:
    """An object as docs/format-remote.md tells to read it, in other words than those of kvfs."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    assert stored[:8] == b"KVFSENC1"
    assert stored[8:16] == HKDF(SHA256(), 8, b"", b"kvfs remote 1 key id").derive(key)
    cipher = AESGCM(HKDF(SHA256(), 32, stored[16:48], b"kvfs remote 1 object " + name.encode()).derive(key))
    pieces, rest, size = [], stored[48:], 16_384 + 16
    while rest:
        block, rest = rest[:size], rest[size:]
        nonce = len(pieces).to_bytes(11, "big") + (b"\1" if not rest else b"\0")
        pieces.append(cipher.decrypt(nonce, block, None))
        size = 262_144 + 16
    return b"".join(pieces)


def test_a_changed_byte_ends_the_object_before_its_block(tmp_path: Path) -> None:
    inner, data = DirectoryStore(str(tmp_path)), random.Random(7).randbytes(300_000)
    store = EncryptedObjects(inner, Keys([OLD]))
    store.put_new(PAGES, data)
    (listed,) = inner.listing("")
    whole = inner.get(listed.name, 0, listed.size)
    assert whole is not None
    file = tmp_path / listed.name
    for at, left in ((0, 0), (9, 0), (20, 0), (48, 0), (16_400, 0), (16_448 + 5, 16_384), (listed.size - 1, 278_528)):
        changed = bytearray(whole.data)
        changed[at] ^= 1
        file.write_bytes(changed)
        found = store.get(PAGES, 0, 1 << 20)
        assert found is not None and found.size == left and bytes(found.data) == data[:left], at
    for length in (0, 47, 48, 63, 64, 16_448, 16_449, 278_608, listed.size - 1):
        file.write_bytes(whole.data[:length])
        found = store.get(PAGES, 0, 1 << 20)
        assert found is not None and found.size < 300_000 and data.startswith(bytes(found.data)), length
    file.write_bytes(bytes(whole.data) + b"\0")
    found = store.get(PAGES, 0, 1 << 20)
    assert found is not None and found.size < 300_000


def test_no_change_of_an_object_gives_other_bytes(tmp_path: Path) -> None:
    """Flips, cuts, insertions, and blocks that are moved, doubled or of another object."""
    inner, draw = DirectoryStore(str(tmp_path)), random.Random(11)
    store, data = EncryptedObjects(inner, Keys([OLD])), draw.randbytes(700_000)
    store.put_new("a", draw.randbytes(700_000))
    store.put_new("b", data)
    file, other = tmp_path / "b", (tmp_path / "a").read_bytes()
    whole = file.read_bytes()
    edges = [0, 8, 16, 48, 16_448, 16_448 + 262_160, 16_448 + 2 * 262_160, len(whole)]
    for number in range(120):
        changed = bytearray(whole)
        first, second = sorted(draw.sample(edges, 2))
        match number % 6:
            case 0:
                changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            case 1:
                del changed[draw.randrange(len(whole)) :]
            case 2:
                changed[second:second] = draw.randbytes(draw.choice((1, 16, 262_160)))
            case 3:
                del changed[first:second]
            case 4:
                changed[second:second] = whole[first:second]
            case _:
                changed[first:second] = other[first:second]
        file.write_bytes(changed)
        found = store.get("b", 0, 1 << 20)
        assert found is not None and found.size == len(found.data)
        assert data.startswith(bytes(found.data)) and (found.size < len(data) or changed == whole), number


def test_an_answer_that_is_cut_short_is_no_damaged_object(tmp_path: Path) -> None:
    """A repair removes damaged objects, and must not remove this one."""
    from kvfs.remote.object_store import Fetched

    inner = DirectoryStore(str(tmp_path))
    EncryptedObjects(inner, Keys([OLD])).put_new(PAGES, bytes(300_000))

    class Cut(DirectoryStore):
        def get(self, name: str, start: int, length: int, *rest: Any) -> Fetched | None:
            found = super().get(name, start, length, *rest)
            return found if found is None else Fetched(found.data[:cut], found.size)

    for cut in (0, 30, 100, 16_448, 200_000, 278_608 + 47):
        found = EncryptedObjects(Cut(str(tmp_path)), Keys([OLD])).get(PAGES, 0, 1 << 20)
        assert found is not None and found.size == 300_000 and len(found.data) < 300_000, cut


def test_an_object_under_another_name_does_not_verify(tmp_path: Path) -> None:
    inner = DirectoryStore(str(tmp_path))
    store = EncryptedObjects(inner, Keys([OLD]))
    store.put_new("a", b"1" * 100)
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes())
    found = store.get("b", 0, 100)
    assert found is not None and (bytes(found.data), found.size) == (b"", 0)


def test_equal_objects_are_stored_as_different_bytes(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        EncryptedObjects(DirectoryStore(str(tmp_path / folder)), Keys([OLD])).put_new(PAGES, bytes(5000))
    one, two = ([found.name for found in DirectoryStore(str(tmp_path / f)).listing("")] for f in ("one", "two"))
    assert one == two, "two hosts agree on the name"
    assert (tmp_path / "one" / one[0]).read_bytes() != (tmp_path / "two" / two[0]).read_bytes()


# ---------------------------------------------------------------- hosts


def test_a_prompt_of_one_host_is_restored_on_another_with_the_key(
    keyed: kvfs.Store, tmp_path: Path, bucket_url: str
) -> None:
    with other_host(tmp_path, bucket_url, OLD) as other:
        assert pulled(other) == CHUNKS and other.verify().ok
        assert other.push(["chat"]).present == CHUNKS
    with other_host(tmp_path, bucket_url, OLD, name="third") as third:
        assert third.pull("chat").stored == CHUNKS and third.pull("chat").objects == 0
        assert pulled(third) == CHUNKS


def test_a_bucket_process_fetches_and_uploads_what_is_encrypted(
    keyed: kvfs.Store, tmp_path: Path, bucket_url: str
) -> None:
    with other_host(tmp_path, bucket_url, OLD) as other:
        ns = other.namespace("chat", tiny(), "1a")
        fetch = other.fetch(ns, tokens_of(1, CHUNKS))
        assert fetch is not None and fetch.wait(100) and not fetch.failed
        assert restored(ns, tokens_of(1, CHUNKS)) == seeded(1, CHUNKS * TINY_BYTES)


def test_two_hosts_with_one_key_store_each_object_once(tmp_path: Path, bucket_url: str, bucket_path: Path) -> None:
    data, done = seeded(1, CHUNKS * TINY_BYTES), []
    for name in ("one", "two"):
        with other_host(tmp_path, bucket_url, OLD, name=name) as store:
            store.namespace("chat", tiny(), "1a").put(tokens_of(1, CHUNKS), data)
            done.append(store.push(["chat"]))
    assert [(d.stored, d.present) for d in done] == [(CHUNKS, 0), (0, CHUNKS)]
    assert len(objects_of(bucket_path)) == 3


def test_the_bucket_shows_neither_pages_nor_tokens_nor_names(tmp_path: Path, bucket_path: Path) -> None:
    tokens, data = tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES)
    with other_host(tmp_path, f"file://{bucket_path}", OLD) as store:
        ns = store.namespace("secret-model", tiny(), "1a", salt="a tenant")
        ns.put(tokens, data)
        store.push([ns.identity.digest.hex()])
        chunks = list(ns.chunk_hashes(tokens))
    shown = b"".join(str(p).encode() + p.read_bytes() for p in bucket_path.rglob("*") if p.is_file())
    told = [data[i : i + 16] for i in range(0, len(data), 16)]
    told += [b"".join(t.to_bytes(width, "little") for t in tokens[i : i + 4]) for i in range(99) for width in (4, 8)]
    told += [*chunks, *(c.hex().encode() for c in chunks), b"secret-model", b"a tenant", b"bfloat16", b"KVFSEG1"]
    assert len(shown) > len(data) and not [t for t in told if t in shown]
    assert salt_digest("a tenant").encode() in shown, "a bucket policy can admit one tenant"


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "plain"])
def test_an_object_that_does_not_decrypt_is_a_shorter_prefix_and_is_repaired(
    keyed: kvfs.Store, tmp_path: Path, bucket_url: str, bucket_path: Path, damage: str
) -> None:
    files = objects_of(bucket_path)
    victim, other = files[0], files[1].read_bytes()
    whole = victim.read_bytes()
    victim.write_bytes(
        {"flip": whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:], "cut": whole[:-500], "swap": other}.get(
            damage, b"KVFSEG1\n" + bytes(100_000)
        )
    )
    with other_host(tmp_path, bucket_url, OLD) as host:
        assert pulled(host) in (0, 32, 64) and counters(host)["remote_objects_refused"] == 1
    with keyed.bucket() as bucket:
        done = upkeep.verify(bucket, repair=True, requests=2)
        assert (done.objects, done.bad, done.removed, done.failed, done.foreign) == (3, 1, 1, 0, 0)
    assert keyed.push(["chat"]).objects == 1
    with other_host(tmp_path, bucket_url, OLD, name="third") as host:
        assert pulled(host) == CHUNKS


def test_a_push_replaces_an_object_that_does_not_decrypt(
    keyed: kvfs.Store, tmp_path: Path, bucket_url: str, bucket_path: Path
) -> None:
    for file in (objects_of(bucket_path)[1], *bucket_path.rglob("namespace")):
        file.write_bytes(b"something else" * 50)
    assert keyed.push(["chat"]).objects == 1
    with other_host(tmp_path, bucket_url, OLD) as host:
        assert host.pull("chat").stored == CHUNKS


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("keys", [(), (OTHER,)], ids=["no key", "another key"])
def test_a_host_without_the_key_is_told_so_in_one_line(
    keyed: kvfs.Store, tmp_path: Path, bucket_url: str, keys: tuple[bytes, ...]
) -> None:
    before = {str(p): p.read_bytes() for p in (tmp_path / "bucket").rglob("*") if p.is_file()}
    with other_host(tmp_path, bucket_url, *keys) as host:
        said = reachable.problem(host.settings.remote, seconds=60)
        assert "is encrypted" in said and "remote.key_file" in said and "\n" not in said
        host.namespace("chat", tiny(), "1a").put(tokens_of(1, CHUNKS), seeded(1, CHUNKS * TINY_BYTES))
        for call in (lambda: host.push(["chat"]), lambda: host.pull("chat")):
            with pytest.raises(kvfs.ConfigError, match="is encrypted"):
                call()
    where = ("-C", str(tmp_path / "other"))
    done = called(*where, "config", "set", "remote.url", bucket_url)
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "is encrypted" in done.stderr
    done = called(*where, "doctor", "--json")
    (found,) = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "bucket"]
    assert found["status"] == WARN and "is encrypted" in found["detail"]
    done = called(*where, "remote", "verify")
    assert done.returncode == 2 and "is encrypted" in done.stderr
    done = called(*where, "config", "set", "remote.key_file", key_file(tmp_path / "right", OLD))
    assert done.returncode == 0 and not done.stderr
    (finding,) = diagnose_bucket(str(tmp_path / "other"), Files())
    assert finding.status == OK
    assert before == {str(p): p.read_bytes() for p in (tmp_path / "bucket").rglob("*") if p.is_file()}


@pytest.mark.parametrize("keys", [None, [], "", {}, 7])
def test_a_marker_without_ids_of_keys_is_damaged(keyed: kvfs.Store, bucket_path: Path, keys: object) -> None:
    (bucket_path / MARKER).write_bytes(json.dumps({"kvfs": "remote", "format": 2, "keys": keys}).encode())
    with pytest.raises(kvfs.FormatError):
        keyed.push(["chat"])


def test_an_engine_without_the_key_computes(keyed: kvfs.Store, tmp_path: Path, bucket_url: str) -> None:
    with other_host(tmp_path, bucket_url, OTHER) as host:
        ns = host.namespace("chat", tiny(), "1a")
        fetch = host.fetch(ns, tokens_of(1, CHUNKS))
        assert fetch is not None and fetch.wait(100) and "is encrypted" in fetch.failed
        assert ns.match(tokens_of(1, CHUNKS)).tokens == 0


def test_plain_and_encrypted_objects_do_not_mix(here: kvfs.Store, tmp_path: Path, bucket_url: str) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, 5), seeded(1, 5 * TINY_BYTES))
    here.push(["chat"])
    with other_host(tmp_path, bucket_url, OLD) as host:
        assert "is not encrypted" in reachable.problem(host.settings.remote, seconds=60)
        host.namespace("code", tiny(), "1a").put(tokens_of(1, 5), seeded(1, 5 * TINY_BYTES))
        with pytest.raises(kvfs.ConfigError, match="is not encrypted"):
            host.push(["code"])


def test_plain_objects_that_someone_puts_into_an_encrypted_bucket_are_not_read(
    keyed: kvfs.Store, tmp_path: Path, bucket_url: str, bucket_path: Path
) -> None:
    """A writer of the bucket without the key cannot say what the KV of a prompt is."""
    forged = tmp_path / "forged"
    with store_at(tmp_path / "forger", f"file://{forged}") as forger:
        forger.namespace("chat", tiny(), "1a").put(tokens_of(2, CHUNKS), seeded(99, CHUNKS * TINY_BYTES))
        forger.push(["chat"])
    for file in objects_of(forged):
        (bucket_path / file.relative_to(forged)).write_bytes(file.read_bytes())
    with other_host(tmp_path, bucket_url, OLD) as host:
        assert pulled(host, 2) == 0 and pulled(host, 1) == CHUNKS
        assert host.pull("chat").stored == 0
    (bucket_path / MARKER).write_bytes((forged / MARKER).read_bytes())
    third = other_host(tmp_path, bucket_url, OLD, name="third")
    with third, pytest.raises(kvfs.ConfigError, match="is not encrypted"):
        pulled(third, 2)


def test_keys_rotate_while_hosts_read_what_the_old_one_encrypted(
    keyed: kvfs.Store, tmp_path: Path, bucket_url: str, bucket_path: Path
) -> None:
    with other_host(tmp_path, bucket_url, NEW, OLD, name="rotated") as rotated:
        assert pulled(rotated) == CHUNKS
        ns = rotated.namespace("chat", tiny(), "1a")
        ns.put(tokens_of(2, CHUNKS), seeded(2, CHUNKS * TINY_BYTES))
        done = rotated.push(["chat"])
        assert (done.stored, done.present) == (CHUNKS, CHUNKS), "what the old key encrypted is not sent again"
        with rotated.bucket() as bucket:
            seen = upkeep.verify(bucket, repair=True, requests=2)
            assert (seen.objects, seen.bad, seen.foreign) == (6, 0, 0)
    ids = json.loads((bucket_path / MARKER).read_bytes())["keys"]
    assert ids == [Keys([key]).current.id.hex() for key in (OLD, NEW)]
    with other_host(tmp_path, bucket_url, OLD, NEW, name="next") as host:  # it has the new key, and uses the old one
        assert pulled(host, 1) == pulled(host, 2) == CHUNKS
        assert host.push(["chat"]).stored == 0
    with other_host(tmp_path, bucket_url, OLD, name="late") as late:  # it lacks the new key
        assert pulled(late, 1) == CHUNKS and pulled(late, 2) == 0
        with late.bucket() as bucket:
            seen = upkeep.verify(bucket, repair=True, requests=2)
            assert (seen.objects, seen.bad, seen.removed, seen.foreign) == (3, 0, 0, 3)
    with other_host(tmp_path, bucket_url, NEW, name="after") as after:  # the old key is gone
        with after.bucket() as bucket:
            seen = upkeep.verify(bucket, repair=True, requests=2)
            assert (seen.pages, seen.bad, seen.failed, seen.removed, seen.foreign) == (CHUNKS, 0, 0, 0, 3)
        assert pulled(after, 1) == 0 and pulled(after, 2) == CHUNKS
        after.namespace("chat", tiny(), "1a").put(tokens_of(3, 5), seeded(3, 5 * TINY_BYTES))
        after.push(["chat"])
        assert after.pull("chat").failed == 0, "its descriptor is of the new key now"


def test_a_bucket_process_reads_keys_again_when_their_file_changes(
    keyed: kvfs.Store, tmp_path: Path, bucket_url: str
) -> None:
    """Engines go on through a rotation."""
    with other_host(tmp_path, bucket_url, OLD) as engine:
        ns = engine.namespace("chat", tiny(), "1a")
        fetch = engine.fetch(ns, tokens_of(1, CHUNKS))
        assert fetch is not None and fetch.wait(100) and fetch.pages == CHUNKS
        with other_host(tmp_path, bucket_url, NEW, OLD, name="rotated") as rotated:
            new = rotated.namespace("chat", tiny(), "1a")
            new.put(tokens_of(2, CHUNKS), seeded(2, CHUNKS * TINY_BYTES))
            rotated.push(["chat"])
        key_file(tmp_path / "other.key", NEW, OLD)
        fetch = engine.fetch(ns, tokens_of(2, CHUNKS))
        assert fetch is not None and fetch.wait(100) and fetch.pages == CHUNKS
        assert restored(ns, tokens_of(2, CHUNKS)) == seeded(2, CHUNKS * TINY_BYTES)


def test_a_repair_removes_no_object_whose_namespace_it_cannot_read(
    keyed: kvfs.Store, bucket_path: Path, bucket_url: str
) -> None:
    (descriptor,) = bucket_path.rglob("namespace")
    descriptor.write_bytes(b"encrypted with a key that is not here")
    with keyed.bucket() as bucket:
        seen = upkeep.verify(bucket, repair=True, requests=2)
        assert (seen.objects, seen.bad, seen.removed, seen.failed) == (3, 0, 0, 3)
    assert len(objects_of(bucket_path)) == 3


def test_age_and_tenant_are_enough_to_remove_objects_without_the_key(
    keyed: kvfs.Store, tmp_path: Path, bucket_url: str, bucket_path: Path
) -> None:
    keyed.namespace("chat", tiny(), "1a", "ours").put(tokens_of(1, 5), seeded(1, 5 * TINY_BYTES))
    keyed.push([d.digest.hex() for d in keyed.catalog.described()])
    store_at(tmp_path / "janitor", bucket_url).close()
    where = ("-C", str(tmp_path / "janitor"), "remote")
    old = next(p for p in objects_of(bucket_path) if "/open/" in str(p))
    os.utime(old, (1, 1))
    assert json.loads(called(*where, "gc", "--older-than", "30d", "--json").stdout)["objects"] == 1
    assert called(*where, "gc", "--older-than", "30d", "--apply").returncode == 0
    assert not old.exists() and len(objects_of(bucket_path)) == 3
    done = called(*where, "rm", "--tenant", "--yes", "--json", KVFS_SALT="ours")
    assert json.loads(done.stdout)["objects"] == 1
    refused = called(*where, "rm", "chat", "--yes")
    assert refused.returncode == 2 and "is encrypted" in refused.stderr
    with keyed.bucket() as bucket:
        assert upkeep.remove(bucket, bucket.find("chat"), apply=True).objects == 2
    assert not objects_of(bucket_path)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0o600, "No such file"),
        (b"abc", 0o600, "no file of"),
        (b"x" * 64, 0o600, "64 hex digits"),
        (b"00" * 31 + b"0g", 0o600, "64 hex digits"),
        ((b"11" * 32 + b"\n") * 5, 0o600, "1 to 4 lines"),
        (b"11" * 32, 0o644, "other users have access"),
    ],
)
def test_a_key_file_that_is_missing_or_open_to_others_is_refused(
    tmp_path: Path, bucket_url: str, content: bytes | None, mode: int, said: str
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(kvfs.ConfigError, match=said) as caught:
        read_keys(str(file))
    assert content is None or content[:20].decode() not in str(caught.value)
    assert said in reachable.problem(Remote(bucket_url, key_file=str(file)), seconds=60)


def test_a_key_in_the_settings_is_no_path(tmp_path: Path, bucket_url: str) -> None:
    store_at(tmp_path / "s", bucket_url).close()
    with pytest.raises(kvfs.ConfigError, match="absolute path"):
        set_keys(tmp_path / "s", OLD.hex())


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = key_file(tmp_path / "key", OLD)
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(kvfs.ConfigError, match=r"kvfs\[remote\]"):
        read_keys(file)
