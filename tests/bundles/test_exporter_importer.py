"""Bundles: pages exported from one store are matched and loaded in another, byte for byte; changed ones are refused."""

from __future__ import annotations

import os
import random
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.bundles.exporter import MANIFEST, BundleError, Member, UnsignedError, _tar_header
from kvfs.bundles.importer import Importer
from kvfs.directory import config_file
from kvfs.index import ledger
from kvfs.index.ledger import StaleWriterError
from kvfs.index.tables import ACTIVE
from kvfs.segments.writer import SegmentWriter
from kvfs.system.files import Files
from tests.stores import TINY_BYTES, restored, seeded, tiny, tokens_of


@pytest.fixture
def source(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="32MiB") as store:
        ns = store.namespace("alpha", tiny(), "1a")
        for seed in range(4):
            r = ns.put(tokens_of(seed, 40), seeded(seed, 40 * TINY_BYTES))
            assert r.stored == 40, r
        yield store


@pytest.fixture
def target(tmp_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(tmp_path / "elsewhere", capacity="64MiB") as made:
        yield made


def test_another_store_serves_the_same_pages(source: kvfs.Store, target: kvfs.Store, tmp_path: Path) -> None:
    done = source.export(str(tmp_path / "b"), ["alpha"])
    assert (done.pages, done.nbytes, done.left_out) == (160, 160 * TINY_BYTES, 0)
    got = target.import_bundle(str(tmp_path / "b"), digest=done.digest)
    assert (got.pages, got.stored, got.skipped, got.bad) == (160, 160, 0, 0)
    ns = target.namespace("alpha", tiny(), "1a")
    for seed in range(4):
        assert restored(ns, tokens_of(seed, 40)) == seeded(seed, 40 * TINY_BYTES)
    assert target.verify().ok and target.catalog.namespaces()[0].pages == 160
    again = target.import_bundle(str(tmp_path / "b"))
    assert (again.stored, again.skipped) == (0, 160)


def test_a_prompt_alone(source: kvfs.Store, target: kvfs.Store, tmp_path: Path) -> None:
    ns = source.namespace("alpha", tiny(), "1a")
    with ns.match(tokens_of(2, 40)) as match:
        assert source.export(str(tmp_path / "b"), match=match).pages == 40
    target.import_bundle(str(tmp_path / "b"))
    there = target.namespace("alpha", tiny(), "1a")
    assert restored(there, tokens_of(2, 40)) == seeded(2, 40 * TINY_BYTES)
    assert there.match(tokens_of(1, 40)).tokens == 0


def test_an_export_of_nothing_is_a_mistake(source: kvfs.Store, tmp_path: Path) -> None:
    with pytest.raises(kvfs.ConfigError, match="nothing is chosen"):
        source.export(str(tmp_path / "b"))
    assert not list(tmp_path.glob("b*"))


@pytest.mark.parametrize("order", [0, 1, 2])
def test_forks_are_reachable_in_a_store_that_has_some_of_them(
    source: kvfs.Store, target: kvfs.Store, tmp_path: Path, order: int
) -> None:
    """Continuations of one head, stored in different orders in the two stores, so that their rows differ."""
    trunk = tokens_of(50, 70)
    forks = [trunk[: at * 16] + tokens_of(60 + at, 70 - at) for at in (0, 3, 5, 31, 32, 33, 40)] + [trunk]
    content = {i: [f"{tuple(p[: (c + 1) * 16])}" for c in range(70)] for i, p in enumerate(forks)}

    def data(i: int) -> bytes:
        return b"".join(seeded(hash(text), TINY_BYTES) for text in content[i])

    here, there = source.namespace("forks", tiny(), "2b"), target.namespace("forks", tiny(), "2b")
    shuffled = random.Random(order).sample(range(len(forks)), len(forks))
    for i in shuffled[:6]:
        assert here.put(forks[i], data(i)).declined == 0
    for i in reversed(shuffled[4:]):
        assert there.put(forks[i], data(i)).declined == 0
    source.export(str(tmp_path / "b"), ["forks"])
    target.import_bundle(str(tmp_path / "b"))
    for i in range(len(forks)):
        assert restored(there, forks[i]) == data(i), i
    assert target.verify().ok


def test_hybrids_parts_and_opaque_pages(source: kvfs.Store, target: kvfs.Store, tmp_path: Path) -> None:
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
    source.namespace("hybrid", layout, "3c").put(tokens, pages)
    halves = [kvfs.Part(h, 1, 0, 2) for h in (0, 1)]
    for rank, part in enumerate(halves):
        source.namespace("ranks", tiny(), "3c").put(tokens, seeded(rank, 40 * TINY_BYTES // 2), part=part)
    opaque = kvfs.PageLayout.opaque(1000, 16)
    keys = [b"%d" % i for i in range(50)]
    source.namespace("keys", opaque, "3c").put_keys(keys, seeded(9, 50_000))
    wanted = restored(source.namespace("ranks", tiny(), "3c"), tokens)
    source.export(str(tmp_path / "b"), ["hybrid", "ranks", "keys"])
    assert target.import_bundle(str(tmp_path / "b")).bad == 0
    there = target.namespace("hybrid", layout, "3c")
    with there.match(tokens) as match:
        outs = {g.name: bytearray(g.nbytes) for g in match.groups}
        assert match.tokens == 640 and there.get(match, outs) == 40
    assert outs["full"] == pages["full"] and outs["window"] == pages["window"][-2 * sizes["window"] :]
    assert restored(target.namespace("ranks", tiny(), "3c"), tokens) == wanted
    there = target.namespace("keys", opaque, "3c")
    with there.match_keys(keys) as match:
        out = bytearray(match.nbytes)
        assert there.get(match, out) == 50 and out == seeded(9, 50_000)


def test_imports_survive_a_rebuild(source: kvfs.Store, target: kvfs.Store, tmp_path: Path) -> None:
    source.export(str(tmp_path / "b"), ["alpha"])
    target.import_bundle(str(tmp_path / "b"))
    target.close()
    (tmp_path / "elsewhere" / "index" / "CURRENT").unlink()
    with kvfs.open(tmp_path / "elsewhere") as again:
        assert again.wait_ready()
        ns = again.namespace("alpha", tiny(), "1a")
        for seed in range(4):
            assert restored(ns, tokens_of(seed, 40)) == seeded(seed, 40 * TINY_BYTES)


def test_a_changed_bundle_is_refused_whole_and_never_gives_wrong_bytes(source: kvfs.Store, tmp_path: Path) -> None:
    source.export(str(tmp_path / "b"), ["alpha"])
    whole = (tmp_path / "b").read_bytes()
    draw = random.Random(0)
    with kvfs.open(tmp_path / "t", capacity="64MiB") as target:
        ns = target.namespace("alpha", tiny(), "1a")
        for _ in range(60):
            data = bytearray(whole)
            at = draw.randrange(len(data) - 1024)
            data[at] ^= 1 << draw.randrange(8)
            (tmp_path / "c").write_bytes(data)
            with pytest.raises(BundleError):
                target.import_bundle(str(tmp_path / "c"))
            assert target.catalog.namespaces() == []
        for _ in range(25):
            data = bytearray(whole)
            for _ in range(20):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            (tmp_path / "c").write_bytes(data)
            try:
                target.import_bundle(str(tmp_path / "c"), partial=True)
            except BundleError:
                continue
        for seed in range(4):
            got = restored(ns, tokens_of(seed, 40))
            assert seeded(seed, 40 * TINY_BYTES).startswith(got)
        assert target.verify().ok


@pytest.mark.parametrize("cut", [0, 100, 512, 20_000, -1024, -2000])
def test_a_bundle_cut_short_is_refused(source: kvfs.Store, target: kvfs.Store, tmp_path: Path, cut: int) -> None:
    source.export(str(tmp_path / "b"), ["alpha"])
    data = (tmp_path / "b").read_bytes()
    (tmp_path / "b").write_bytes(data[:cut])
    for partial in (False, True):
        with pytest.raises(BundleError):
            target.import_bundle(str(tmp_path / "b"), partial=partial)
    assert target.catalog.namespaces() == []


def test_a_partial_import_names_the_page_that_was_changed(
    source: kvfs.Store, target: kvfs.Store, tmp_path: Path
) -> None:
    source.export(str(tmp_path / "b"), ["alpha"])
    data = bytearray((tmp_path / "b").read_bytes())
    data[data.index(seeded(2, TINY_BYTES)) + 5] ^= 1  # its first page
    (tmp_path / "b").write_bytes(data)
    got = target.import_bundle(str(tmp_path / "b"), partial=True)
    assert (got.stored, got.bad) == (159, 1) and "payload and leaf checksums disagree" in got.problems[-1]
    ns = target.namespace("alpha", tiny(), "1a")
    assert ns.match(tokens_of(2, 40)).tokens == 0 and ns.match(tokens_of(1, 40)).tokens == 640


def test_other_tars_other_files_and_another_digest_are_refused(
    source: kvfs.Store, target: kvfs.Store, tmp_path: Path
) -> None:
    (tmp_path / "evil.kvs").write_bytes(b"x" * 5000)
    with tarfile.open(tmp_path / "tar", "w") as tar:
        tar.add(tmp_path / "evil.kvs", "../../evil.kvs")
    (tmp_path / "text").write_text("hello " * 1000)
    (tmp_path / "empty").write_bytes(b"")
    for name in ("tar", "text", "empty"):
        with pytest.raises(BundleError):
            target.import_bundle(str(tmp_path / name))
    with pytest.raises(kvfs.ConfigError):
        target.import_bundle(str(tmp_path / "nothing"))
    source.export(str(tmp_path / "b"), ["alpha"])
    with pytest.raises(BundleError, match="digest"):
        target.import_bundle(str(tmp_path / "b"), digest="00" * 32)


def test_a_bundle_is_a_tar_that_others_can_list(source: kvfs.Store, tmp_path: Path) -> None:
    done = source.export(str(tmp_path / "b"), ["alpha"])
    with tarfile.open(tmp_path / "b") as tar:
        names = tar.getnames()
    assert names[-1] == "kvfs-bundle.json" and len(names) == done.segments + 1


def test_pages_that_do_not_verify_are_left_out(source: kvfs.Store, store_path: Path, tmp_path: Path) -> None:
    for file in (store_path / "segments").glob("*.kvs"):
        data = bytearray(file.read_bytes())
        at = data.find(seeded(1, TINY_BYTES))
        if at >= 0:
            data[at] ^= 1
            file.write_bytes(data)
    done = source.export(str(tmp_path / "b"), ["alpha"])
    assert (done.pages, done.left_out) == (159, 1)


def test_an_import_keeps_within_the_limit(source: kvfs.Store, tmp_path: Path) -> None:
    ns = source.namespace("alpha", tiny(), "1a")
    for seed in range(10, 110):
        r = ns.put(tokens_of(seed, 40), seeded(seed, 40 * TINY_BYTES))
        assert r.stored == 40, r
    source.export(str(tmp_path / "b"), ["alpha"])
    with kvfs.open(tmp_path / "small", capacity="16MiB") as small:
        small.import_bundle(str(tmp_path / "b"))
        stats = small.stats()
        assert stats["used_bytes"] + small.settings.index_bytes <= stats["capacity_bytes"]
        assert small.verify().ok


def active_rows(store: kvfs.Store) -> int:
    return len(store._shared.c.index.read(lambda s: s.segments_in(ACTIVE), 2.0))


def test_an_index_that_is_replaced_during_an_import_is_an_error_of_kvfs(
    source: kvfs.Store, target: kvfs.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.export(str(tmp_path / "b"), ["alpha"])

    def stale(*args: object) -> None:
        raise StaleWriterError

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "own_segment", stale)
        with pytest.raises(kvfs.KvfsError, match="import again"):
            target.import_bundle(str(tmp_path / "b"))
    assert not target._shared.services().active.active_numbers() and not active_rows(target)
    assert target.import_bundle(str(tmp_path / "b")).stored == 160 and target.verify().ok


def test_a_write_error_of_an_import_leaves_no_segment_that_cannot_be_reclaimed(
    source: kvfs.Store, target: kvfs.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.export(str(tmp_path / "b"), ["alpha"])

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentWriter, "append", full)
        with pytest.raises(kvfs.KvfsError):
            target.import_bundle(str(tmp_path / "b"))
    assert not target._shared.services().active.active_numbers() and not active_rows(target)
    assert target.import_bundle(str(tmp_path / "b")).stored == 160 and target.verify().ok


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return new_key(tmp_path / "key")


def new_key(path: Path) -> str:
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return str(path)


def require(store: kvfs.Store, key_file: str) -> kvfs.Store:
    """The store, opened again with ``bundle_key``."""
    store.close()
    config_file.change(store.path, "bundle_key", key_file, Files())
    return kvfs.open(store.path)


def test_only_the_chosen_namespaces_of_a_bundle_are_imported(
    source: kvfs.Store, target: kvfs.Store, tmp_path: Path
) -> None:
    beta = source.namespace("beta", tiny(), "1a")
    assert beta.put(tokens_of(0, 40), seeded(9, 40 * TINY_BYTES)).stored == 40
    source.export(str(tmp_path / "b"), ["alpha", "beta"])
    with pytest.raises(kvfs.ConfigError, match="'gamma' is not in this bundle"):
        target.import_bundle(str(tmp_path / "b"), namespaces=["alpha", "gamma"])
    assert target.catalog.namespaces() == []
    got = target.import_bundle(str(tmp_path / "b"), namespaces=["beta@1a"])
    assert (got.stored, got.left_out, got.namespaces) == (40, 160, {"beta@1a": 40})
    assert [i.name for i in target.catalog.namespaces()] == ["beta"]
    assert restored(target.namespace("beta", tiny(), "1a"), tokens_of(0, 40)) == seeded(9, 40 * TINY_BYTES)
    assert target.import_bundle(str(tmp_path / "b")).namespaces == {"alpha@1a": 160, "beta@1a": 40}


def test_a_store_with_a_bundle_key_refuses_bundles_without_its_signature(
    source: kvfs.Store, target: kvfs.Store, tmp_path: Path, key_file: str
) -> None:
    source.export(str(tmp_path / "unsigned"), ["alpha"])
    source.export(str(tmp_path / "foreign"), ["alpha"], key_file=new_key(tmp_path / "other"))
    source.export(str(tmp_path / "signed"), ["alpha"], key_file=key_file)
    signed = (tmp_path / "signed").read_bytes()
    target.import_bundle(str(tmp_path / "signed"))  # others ignore the signature
    target.purge("alpha")
    target = require(target, key_file)
    for name in ("unsigned", "foreign"):
        for partial in (False, True):
            with pytest.raises(UnsignedError, match="not signed with the key"):
                target.import_bundle(str(tmp_path / name), partial=partial)
    at = signed.index(b'"pages": 160')
    (tmp_path / "manifest").write_bytes(signed.replace(b'"pages": 160', b'"pages": 161'))
    assert at and len(signed) == (tmp_path / "manifest").stat().st_size
    changed = bytearray(signed)
    changed[changed.index(seeded(2, TINY_BYTES)) + 5] ^= 1
    (tmp_path / "page").write_bytes(changed)
    for name, why in (("manifest", "not signed"), ("page", "changed after it was signed")):
        with pytest.raises(BundleError, match=why):
            target.import_bundle(str(tmp_path / name), partial=True)
    assert target.catalog.namespaces() == []
    assert target.import_bundle(str(tmp_path / "signed")).stored == 160


def test_a_signed_bundle_that_changes_while_it_is_imported_is_refused(
    source: kvfs.Store, target: kvfs.Store, tmp_path: Path, key_file: str
) -> None:
    """A forged segment with right checksums, put in place after the digest was verified."""
    bundle, forged = tmp_path / "signed", tmp_path / "forged"
    source.export(str(bundle), ["alpha"], key_file=key_file)
    target = require(target, key_file)
    source.export(str(forged), ["alpha"])
    original, other = bundle.read_bytes(), forged.read_bytes()
    importer = Importer(target._shared.c, target._shared.services().active, partial_=True)
    intact = importer._is_intact

    def swapped(fd: int, member: Member, copy: int | None = None) -> bool:
        assert copy is not None
        found = intact(fd, member, copy)
        bundle.write_bytes(other[: len(other) // 2] + original[len(other) // 2 :])
        return found

    importer._is_intact = swapped  # type: ignore[method-assign]
    with pytest.raises(BundleError, match="changed after it was signed"):
        importer.run(str(bundle), lambda done, total: None)
    assert target.catalog.namespaces() == []


def test_a_key_file_is_a_secret(source: kvfs.Store, tmp_path: Path, key_file: str) -> None:
    for name, content, mode in (("short", b"x" * 15, 0o600), ("long", b"x" * 5000, 0o600), ("open", b"x" * 32, 0o644)):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(mode)
        with pytest.raises(kvfs.ConfigError, match="key file"):
            source.export(str(tmp_path / "b"), ["alpha"], key_file=str(tmp_path / name))
    with pytest.raises(kvfs.ConfigError, match="key file"):
        source.export(str(tmp_path / "b"), ["alpha"], key_file=str(tmp_path))
    assert not (tmp_path / "b").exists()
    with pytest.raises(kvfs.ConfigError, match="absolute path"):
        config_file.change(source.path, "bundle_key", "key", Files())


def test_the_size_of_a_manifest_is_bounded_by_its_members(
    source: kvfs.Store, target: kvfs.Store, tmp_path: Path
) -> None:
    """60 MB of empty lists took 1.6 GB of memory."""
    body = b"[" + b"[]," * (2 << 20) + b"[]]"
    (tmp_path / "b").write_bytes(_tar_header(MANIFEST, len(body)) + body + bytes(-len(body) % 512 + 1024))
    with pytest.raises(BundleError, match="no manifest"):
        target.import_bundle(str(tmp_path / "b"))


@pytest.mark.parametrize(("store_mode", "mode"), [(0o700, 0o600), (0o2770, 0o640)])
def test_a_bundle_of_a_private_store_is_private_in_a_folder_of_a_group(
    tmp_path: Path, store_mode: int, mode: int
) -> None:
    for name, bits in (("s", store_mode), ("out", 0o2770)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(bits)
    with kvfs.open(tmp_path / "s", capacity="16MiB") as store:
        ns = store.namespace("alpha", tiny(), "1a")
        ns.put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
        store.export(str(tmp_path / "out" / "b"), ["alpha"])
        with ns.match(tokens_of(1, 4)) as match:
            store.export_tensors(str(tmp_path / "out" / "t"), match)
    assert [stat.S_IMODE((tmp_path / "out" / n).stat().st_mode) for n in "bt"] == [mode, mode]
