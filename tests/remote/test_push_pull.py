"""What one host pushes, another pulls, byte for byte; what does not verify is missing."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory import config_file
from kvfs.remote.bucket import Bucket
from kvfs.remote.names import MARKER
from kvfs.remote.object_store import ObjectStore
from kvfs.remote.page_object import decode, encode
from kvfs.remote.pull import Puller
from kvfs.remote.push import Piece, Pusher
from kvfs.remote.urls import open_bucket
from kvfs.system.files import Files
from kvfs.system.memory_views import address_of
from tests.remote.conftest import store_at
from tests.stores import TINY_BYTES, counters, restored, seeded, tiny, tokens_of


def objects_of(bucket: Path) -> list[Path]:
    return sorted(p for p in bucket.rglob("*") if p.is_file() and p.parent.parent.name == "pages")


def test_a_prompt_of_one_host_is_restored_on_another(
    here: kvfs.Store, there: kvfs.Store, stored_pages: Callable[[], list[str]]
) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    for seed in range(3):
        assert ns.put(tokens_of(seed, 70), seeded(seed, 70 * TINY_BYTES)).stored == 70
    done = here.push(["chat"])
    assert (done.pages, done.stored, done.present, done.failed, done.left_out) == (210, 210, 0, 0, 0)
    assert len(stored_pages()) == done.objects == 9, "an object holds up to 32 small pages"
    other = there.namespace("chat", tiny(), "1a")
    got = there.pull(other, tokens_of(1, 70))
    assert (got.stored, got.skipped, got.refused, got.failed, got.objects) == (70, 0, 0, 0, 3)
    assert restored(other, tokens_of(1, 70)) == seeded(1, 70 * TINY_BYTES)
    assert other.match(tokens_of(2, 70)).tokens == 0
    assert there.verify().ok
    again = there.pull(other, tokens_of(1, 70))
    assert (again.stored, again.objects) == (0, 0), "nothing is fetched that is here"


def test_a_pull_asks_for_the_marker_and_the_shapes_at_once(
    here: kvfs.Store, there: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(0, 3), seeded(0, 3 * TINY_BYTES))
    here.push(["chat"])
    both, check, shapes = threading.Barrier(2, timeout=10.0), Bucket.check, Bucket.shapes

    def meet_and_check(bucket: Bucket) -> None:
        both.wait()  # it breaks if one of the two waits for the other
        check(bucket)

    def meet_and_list(bucket: Bucket, *args: Any) -> Any:
        both.wait()
        return shapes(bucket, *args)

    monkeypatch.setattr(Bucket, "check", meet_and_check)
    monkeypatch.setattr(Bucket, "shapes", meet_and_list)
    assert there.pull(there.namespace("chat", tiny(), "1a"), tokens_of(0, 3)).stored == 3


def test_a_second_pull_fetches_while_it_waits_for_the_marker(
    here: kvfs.Store, there: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns, other = (store.namespace("chat", tiny(), "1a") for store in (here, there))
    for seed in range(2):
        ns.put(tokens_of(seed, 3), seeded(seed, 3 * TINY_BYTES))
    here.push(["chat"])
    assert there.pull(other, tokens_of(0, 3)).stored == 3
    begun, check, fetch = threading.Event(), Bucket.check, Puller._fetch
    fetched, met = [], []

    def wait_and_check(bucket: Bucket) -> None:
        met.append(begun.wait(10.0))
        check(bucket)

    def tell_and_fetch(puller: Puller, wanted: Any, *request: Any) -> Any:
        fetched.append(wanted)
        begun.set()
        return fetch(puller, wanted, *request)

    monkeypatch.setattr(Bucket, "check", wait_and_check)
    monkeypatch.setattr(Puller, "_fetch", tell_and_fetch)
    assert there.pull(other, tokens_of(1, 3)).stored == 3
    assert restored(other, tokens_of(1, 3)) == seeded(1, 3 * TINY_BYTES)
    assert met == [True]
    assert len(fetched) == 1, "no object is fetched twice"


def test_a_second_pull_stores_nothing_of_a_bucket_that_lost_its_marker(
    here: kvfs.Store, there: kvfs.Store, objects: ObjectStore
) -> None:
    ns, other = (store.namespace("chat", tiny(), "1a") for store in (here, there))
    for seed in range(2):
        ns.put(tokens_of(seed, 3), seeded(seed, 3 * TINY_BYTES))
    here.push(["chat"])
    there.pull(other, tokens_of(0, 3))
    objects.delete(MARKER)
    with pytest.raises(kvfs.ConfigError, match="holds no pages of kvfs"):
        there.pull(other, tokens_of(1, 3))
    assert other.match(tokens_of(1, 3)).tokens == 0


def test_one_client_serves_the_pushes_and_pulls_of_a_store(here: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    ns.put(tokens_of(0, 3), seeded(0, 3 * TINY_BYTES))
    opened = []
    monkeypatch.setattr("kvfs.remote.kept_bucket.open_bucket", lambda *a, **k: opened.append(1) or open_bucket(*a, **k))
    here.push(["chat"])
    here.pull(ns, tokens_of(0, 3))
    here.pull("chat")
    assert len(opened) == 1
    monkeypatch.setenv("AWS_PROFILE", "another")  # it may name other credentials
    here.pull("chat")
    assert len(opened) == 2
    with pytest.raises(kvfs.KvfsError, match="no such namespace"):
        here.pull("no such namespace")
    here.pull("chat")
    assert len(opened) == 3, "after a failure"


def test_a_push_asks_what_is_there_while_it_waits_for_the_marker(
    here: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(0, 3), seeded(0, 3 * TINY_BYTES))
    asked, prepare, there = threading.Event(), Bucket.prepare, Pusher._there
    met = []

    def wait_and_prepare(bucket: Bucket) -> None:
        met.append(asked.wait(10.0))
        prepare(bucket)

    def tell_and_ask(pusher: Pusher, piece: Piece) -> int:
        asked.set()
        return there(pusher, piece)

    monkeypatch.setattr(Bucket, "prepare", wait_and_prepare)
    monkeypatch.setattr(Pusher, "_there", tell_and_ask)
    assert here.push(["chat"]).stored == 3
    assert met == [True]


def test_the_next_object_is_sent_while_another_one_is_still_on_its_way(
    here: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = here.settings.remote.requests
    here.namespace("chat", tiny(), "1a").put(tokens_of(0, (most + 1) * 32), seeded(0, (most + 1) * 32 * TINY_BYTES))
    begun, put, met = [], Pusher._put, []
    one_more = threading.Event()

    def slow_if_second(pusher: Pusher, *args: Any) -> bool:
        begun.append(args[0].name)
        if len(begun) == most + 1:
            one_more.set()
        elif args[0].name in begun[1:2]:
            met.append(one_more.wait(10.0))
        return put(pusher, *args)

    monkeypatch.setattr(Pusher, "_put", slow_if_second)
    assert here.push(["chat"]).objects == most + 1
    assert met == [True]


def test_the_next_object_is_fetched_while_those_that_came_wait_to_be_stored(
    here: kvfs.Store, there: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = there.settings.remote.requests
    tokens = tokens_of(0, (most + 1) * 32)
    here.namespace("chat", tiny(), "1a").put(tokens, seeded(0, (most + 1) * 32 * TINY_BYTES))
    here.push(["chat"])
    begun, fetch, store, met = [], Puller._fetch, Puller._store, []
    one_more = threading.Event()

    def tell_and_fetch(puller: Puller, wanted: Any, *request: Any) -> Any:
        begun.append(wanted)
        if len(begun) == most + 1:
            one_more.set()
        return fetch(puller, wanted, *request)

    def wait_and_store(puller: Puller, *args: Any) -> bool:
        met.append(one_more.wait(10.0))
        return store(puller, *args)

    monkeypatch.setattr(Puller, "_fetch", tell_and_fetch)
    monkeypatch.setattr(Puller, "_store", wait_and_store)
    assert there.pull(there.namespace("chat", tiny(), "1a"), tokens).objects == most + 1
    assert met == [True] * (most + 1)


def test_what_announces_a_namespace_is_stored_once_by_a_push_of_many_objects(
    here: kvfs.Store, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(0, 8 * 32), seeded(0, 8 * 32 * TINY_BYTES))
    said, kind = [], type(objects)
    put_new = kind.put_new

    def note(objects: Any, name: str, data: Any) -> bool:
        if "/pages/" not in name:
            said.append(name)
        return bool(put_new(objects, name, data))

    monkeypatch.setattr(kind, "put_new", note)
    assert here.push(["chat"]).objects == 8
    assert len(said) == len(set(said)) == 3, "the marker, the descriptor and the shape"


def test_a_namespace_is_pulled_as_a_whole(here: kvfs.Store, there: kvfs.Store) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    for seed in range(3):
        ns.put(tokens_of(seed, 40), seeded(seed, 40 * TINY_BYTES))
    here.push(["chat"])
    got = there.pull("chat")
    assert got.stored == 120
    other = there.namespace("chat", tiny(), "1a")
    for seed in range(3):
        assert restored(other, tokens_of(seed, 40)) == seeded(seed, 40 * TINY_BYTES)
    assert there.pull("chat").stored == 0


def test_a_known_namespace_is_listed_while_the_marker_is_asked_for(
    here: kvfs.Store, there: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns, other = (store.namespace("chat", tiny(), "1a") for store in (here, there))
    ns.put(tokens_of(0, 40), seeded(0, 40 * TINY_BYTES))
    here.push(["chat"])
    both, check, listing = threading.Barrier(2, timeout=10.0), Bucket.check, Bucket.listing

    def meet_and_check(bucket: Bucket) -> None:
        both.wait()  # it breaks if one of the two waits for the other
        check(bucket)

    def meet_and_list(bucket: Bucket, prefix: str) -> Any:
        both.wait()
        return listing(bucket, prefix)

    monkeypatch.setattr(Bucket, "check", meet_and_check)
    monkeypatch.setattr(Bucket, "listing", meet_and_list)
    monkeypatch.delattr(Bucket, "namespaces")  # it is not searched for
    assert there.pull(other).stored == 40
    assert restored(other, tokens_of(0, 40)) == seeded(0, 40 * TINY_BYTES)


def test_a_namespace_that_the_bucket_lacks_is_not_found(here: kvfs.Store, there: kvfs.Store) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(0, 3), seeded(0, 3 * TINY_BYTES))
    here.push(["chat"])
    for ref in (there.namespace("chat", tiny(), "2b"), "chit"):
        with pytest.raises(kvfs.KvfsError, match="in "):
            there.pull(ref)


def test_a_second_push_sends_no_page(here: kvfs.Store) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    ns.put(tokens_of(0, 40), seeded(0, 40 * TINY_BYTES))
    here.push(["chat"])
    told = []
    again = here.push(["chat"], progress=lambda done, total: told.append((done, total)))
    assert (again.stored, again.present, again.nbytes) == (0, 40, 0)
    assert len(told) == 2 and told[-1] == (40, 40), "it can be ended between two objects that are there"


def test_a_prompt_that_grew_is_pushed_from_where_it_grew(here: kvfs.Store, there: kvfs.Store) -> None:
    ns, tokens, data = here.namespace("chat", tiny(), "1a"), tokens_of(0, 70), seeded(0, 70 * TINY_BYTES)
    for chunks in (5, 20, 33, 70):
        ns.put(tokens[: chunks * 16], data[: chunks * TINY_BYTES])
        here.push(["chat"])
    other = there.namespace("chat", tiny(), "1a")
    got = there.pull(other, tokens)
    assert got.stored == 70 and got.objects == 6, "0-4, 5-19, 20-31, 32, 33-63, 64-69"
    assert restored(other, tokens) == data


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("whole", [False, True], ids=["prompts", "namespace"])
def test_forks_of_two_hosts_are_found(
    here: kvfs.Store, there: kvfs.Store, tmp_path: Path, bucket_url: str, order: int, whole: bool
) -> None:
    """Continuations of one head, stored in different orders on two hosts, which both push."""
    trunk = tokens_of(50, 70)
    forks = [trunk[: at * 16] + tokens_of(60 + at, 70 - at) for at in (0, 3, 5, 31, 32, 33, 40)] + [trunk]

    def data(i: int) -> bytes:
        return b"".join(seeded(hash(tuple(forks[i][: (c + 1) * 16])), TINY_BYTES) for c in range(70))

    shuffled = random.Random(order).sample(range(len(forks)), len(forks))
    first, second = here.namespace("forks", tiny(), "2b"), there.namespace("forks", tiny(), "2b")
    for i in shuffled[:6]:
        first.put(forks[i], data(i))
    for i in reversed(shuffled[4:]):
        second.put(forks[i], data(i))
    assert here.push(["forks"]).failed == there.push(["forks"]).failed == 0
    with store_at(tmp_path / "third", bucket_url) as third:
        ns = third.namespace("forks", tiny(), "2b")
        if whole:
            third.pull("forks")
        for i in range(len(forks)):
            if not whole:
                third.pull(ns, forks[i])
            assert restored(ns, forks[i]) == data(i), i
        assert third.verify().ok


def test_hybrids_parts_and_opaque_pages(here: kvfs.Store, there: kvfs.Store) -> None:
    layout = kvfs.PageLayout.of(
        [
            kvfs.Group("full", (0, 2), 4, kvfs.Cell("bf16 k4+v4", 16), kvfs.Need.all(), 16),
            kvfs.Group("window", (1, 3), 4, kvfs.Cell("bf16 k4+v4", 16), kvfs.Need.window_of(32), 16),
        ],
        page_tokens=16,
    )
    sizes = {g.name: g.page_bytes for g in layout.groups}
    tokens = tokens_of(7, 40)
    pages = {"full": seeded(1, 40 * sizes["full"]), "window": seeded(2, 40 * sizes["window"])}
    here.namespace("hybrid", layout, "3c").put(tokens, pages)
    for rank, part in enumerate([kvfs.Part(h, 1, 0, 2) for h in (0, 1)]):
        here.namespace("ranks", tiny(), "3c").put(tokens, seeded(rank, 40 * TINY_BYTES // 2), part=part)
    keys = [b"%d" % i for i in range(50)]
    here.namespace("keys", kvfs.PageLayout.opaque(1000, 16), "3c").put_keys(keys, seeded(9, 50_000))
    wanted = restored(here.namespace("ranks", tiny(), "3c"), tokens)
    assert here.push(["hybrid", "ranks", "keys"]).failed == 0
    hybrid, ranks = there.namespace("hybrid", layout, "3c"), there.namespace("ranks", tiny(), "3c")
    assert there.pull(hybrid, tokens).stored == 40 + 2, "of the window, only what the end of the prompt needs"
    with hybrid.match(tokens) as match:
        outs = {g.name: bytearray(g.nbytes) for g in match.groups}
        assert match.tokens == 640 and hybrid.get(match, outs) == 40
    assert outs["full"] == pages["full"] and outs["window"] == pages["window"][-2 * sizes["window"] :]
    there.pull(ranks, tokens)
    assert restored(ranks, tokens) == wanted
    there.pull("keys")
    opaque = there.namespace("keys", kvfs.PageLayout.opaque(1000, 16), "3c")
    with opaque.match_keys(keys) as match:
        out = bytearray(match.nbytes)
        assert opaque.get(match, out) == 50 and out == seeded(9, 50_000)


@pytest.mark.parametrize("codec", ["zstd", "planes"])
def test_encoded_pages_travel_as_they_are_stored(here: kvfs.Store, there: kvfs.Store, codec: str) -> None:
    layout = tiny(page_tokens=256, head_dim=64)
    data, tokens = bytes(range(256)) * (4 * layout.page_bytes // 256), tokens_of(3, 4, 256)
    assert here.namespace("chat", layout, "1a", codec=codec).put(tokens, data).stored == 4
    done = here.push(["chat"])
    assert done.stored == 4 and done.nbytes < len(data) / 2
    other = there.namespace("chat", layout, "1a")
    there.pull(other, tokens)
    assert restored(other, tokens) == data


@pytest.mark.parametrize("codec", ["zstd", "planes"])
def test_raw_pages_are_encoded_on_the_way_up(here: kvfs.Store, there: kvfs.Store, tmp_path: Path, codec: str) -> None:
    layout = tiny(page_tokens=256, head_dim=64)
    data, tokens = bytes(range(256)) * (4 * layout.page_bytes // 256), tokens_of(3, 4, 256)
    # before: a page that is encoded here, in the other codec
    first = {"zstd": "planes", "planes": "zstd"}[codec]
    here.namespace("chat", layout, "1a", codec=first).put(tokens[:256], data[: layout.page_bytes])
    here.namespace("chat", layout, "1a").put(tokens, data)
    config_file.change(str(tmp_path / "here"), "remote.codec", codec, Files())
    here.close()
    with kvfs.open(tmp_path / "here") as store:
        done = store.push(["chat"])
        assert done.stored == 4 and done.nbytes < len(data) / 2
        assert "pages_encoded" not in counters(store), "they tell what a store saves itself"
        assert restored(store.namespace("chat", layout, "1a"), tokens) == data
    other = there.namespace("chat", layout, "1a")
    there.pull(other, tokens)
    assert restored(other, tokens) == data and there.verify().ok


def test_a_prefix_and_a_match_alone(here: kvfs.Store, there: kvfs.Store) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    for seed in range(2):
        ns.put(tokens_of(seed, 40), seeded(seed, 40 * TINY_BYTES))
    with ns.match(tokens_of(1, 40)) as match:
        assert here.push(match=match).stored == 40
    other = there.namespace("chat", tiny(), "1a")
    there.pull(other, tokens_of(1, 40))
    assert restored(other, tokens_of(1, 40)) == seeded(1, 40 * TINY_BYTES)
    assert there.pull(other, tokens_of(0, 40)).objects == 0
    with pytest.raises(kvfs.ConfigError, match="nothing is chosen"):
        here.push()


@pytest.mark.parametrize("by_match", [False, True], ids=["namespace", "match"])
@pytest.mark.parametrize("layout", [tiny(), kvfs.PageLayout.opaque(TINY_BYTES, 16)], ids=["kv", "opaque"])
def test_pages_of_keys_travel_one_by_one(
    here: kvfs.Store, there: kvfs.Store, layout: kvfs.PageLayout, by_match: bool
) -> None:
    keys, data = [b"key %d" % n for n in range(40)], seeded(3, 40 * TINY_BYTES)
    ns = here.namespace("keys", layout, "1")
    ns.put_keys(keys, data)
    with ns.match_keys(keys) as match:
        assert here.push([] if by_match else ["keys"], match=match if by_match else None).objects == 40
    assert there.pull("keys").stored == 40
    out = bytearray(len(data))
    with there.namespace("keys", layout, "1").match_keys(keys) as match:
        assert there.namespace("keys", layout, "1").get(match, out) == 40 and out == data


def test_pages_with_a_lifetime_stay_here(here: kvfs.Store, stored_pages: Callable[[], list[str]]) -> None:
    ns = here.namespace("chat", tiny(), "1a")
    ns.put(tokens_of(0, 40), seeded(0, 40 * TINY_BYTES), ttl="1h")
    done = here.push(["chat"])
    assert (done.stored, done.left_out, done.failed) == (0, 40, 0) and not stored_pages()


def test_tenants_have_prefixes_of_their_own(here: kvfs.Store, there: kvfs.Store, bucket_path: Path) -> None:
    tokens = tokens_of(0, 5)
    for salt in ("", "secret"):
        here.namespace("chat", tiny(), "1a", salt).put(tokens, seeded(1, 5 * TINY_BYTES))
    here.push([d.digest.hex() for d in here.catalog.described()])
    tenants = {p.name for p in bucket_path.iterdir() if p.is_dir()}
    assert len(tenants) == 2 and "open" in tenants
    assert not any(b"secret" in p.read_bytes() or "secret" in str(p) for p in bucket_path.rglob("*") if p.is_file())
    stranger = there.namespace("chat", tiny(), "1a", "guess")
    assert there.pull(stranger, tokens).objects == 0


def test_a_page_that_was_damaged_here_is_not_pushed(here: kvfs.Store, there: kvfs.Store, tmp_path: Path) -> None:
    ns, data = here.namespace("chat", tiny(), "1a"), seeded(0, 40 * TINY_BYTES)
    ns.put(tokens_of(0, 40), data)
    file = next((tmp_path / "here" / "segments").glob("*.kvs"))
    at = file.read_bytes().index(data[20 * TINY_BYTES : 21 * TINY_BYTES])
    with file.open("r+b") as opened:
        opened.seek(at + 5)
        opened.write(b"damaged")
    done = here.push(["chat"])
    assert (done.stored, done.left_out) == (39, 1)
    other = there.namespace("chat", tiny(), "1a")
    there.pull(other, tokens_of(0, 40))
    assert restored(other, tokens_of(0, 40)) == data[: 20 * TINY_BYTES]


def test_a_namespace_that_is_larger_than_the_store_is_refused_before_anything_is_stored(
    here: kvfs.Store, tmp_path: Path, bucket_url: str
) -> None:
    ns = here.namespace("chat", kvfs.PageLayout.opaque(1 << 20, 16), "1a")
    ns.put_keys([b"%d" % i for i in range(20)], seeded(1, 20 << 20))
    here.push(["chat"])
    with store_at(tmp_path / "small", bucket_url, "16MiB") as small:
        with pytest.raises(kvfs.NoSpaceError, match="this store holds"):
            small.pull("chat")
        assert small.catalog.namespaces() == []


def test_an_object_has_no_bytes_of_the_one_that_used_its_buffer_before(
    here: kvfs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be those of another tenant."""
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, 100), seeded(1, 100 * TINY_BYTES))
    monkeypatch.setattr(Files, "now_us", lambda self: 1)
    compared = []

    def encode_twice(context: Any, shape: Any, descriptor: bytes, records: Any, buffer: memoryview) -> memoryview:
        copies = [record._replace(payload=bytes(record.payload)) for record in records]
        fresh = encode(context, shape, descriptor, copies, memoryview(bytearray(len(buffer))))
        buffer[:] = b"\xaa" * len(buffer)
        for record, copy in zip(records, copies, strict=True):  # they are in the buffer, too
            record.payload[:] = copy.payload
        compared.append(bytes(encode(context, shape, descriptor, records, buffer)) == bytes(fresh))
        return fresh

    monkeypatch.setattr("kvfs.remote.push.encode", encode_twice)
    here.push(["chat"])
    assert compared == [True] * 4


def test_raw_pages_are_read_to_where_they_are_in_the_object(here: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    here.namespace("chat", tiny(), "1a").put(tokens_of(1, 100), seeded(1, 100 * TINY_BYTES))
    offsets = []

    def encode_and_look(context: Any, shape: Any, descriptor: bytes, records: Any, buffer: memoryview) -> memoryview:
        begin = address_of(buffer)
        offsets.append([address_of(record.payload) - begin for record in records])
        made = encode(context, shape, descriptor, records, buffer)
        pages = decode(made, shape, records[0].chunk_hash)
        assert [page.entry.payload for page in pages] == offsets[-1]
        return made

    monkeypatch.setattr("kvfs.remote.push.encode", encode_and_look)
    here.push(["chat"])
    assert len(offsets) == 4
