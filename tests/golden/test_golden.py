"""Stores that earlier versions wrote, kept in the tree: every later version must read them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.errors import FormatError
from kvfs.format import segment as fmt
from kvfs.format.checksums import checksum
from kvfs.segments.scan import Scan, scan_segment
from tests.test_store_open import features, rewrite_super
from tools import golden
from tools.golden import CASES, GQA, PINNED, Case, get, unpack

ARCHIVE = Path(__file__).parent / "format1.tar.xz"
#: Digests of the archive as it was committed, and of all pages that it must hold: neither may change after a release.
ARCHIVE_SHA256 = "ae5c98ee35dec21c23b97922aa9bec9123f8288c05841e0fc7f501fceded9436"
PAGES_SHA256 = "89a42caa69eae261dc494b470193a130357500b55b83b56ecb1fb37a2203281f"
LIVE = [case for case in CASES if case.ttl is None]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "store"
    unpack(ARCHIVE, path)
    return path


@pytest.fixture
def path(unpacked: Path, memory_path: Path) -> Path:
    """A store of format 1, without an index."""
    shutil.copytree(unpacked, memory_path / "store")
    return memory_path / "store"


def scans(path: Path) -> dict[str, Scan]:
    found = {}
    for file in sorted((path / "segments").iterdir()):
        with file.open("rb") as opened:
            scan = scan_segment(opened.fileno(), kvfs.system.files.Files())
        assert scan is not None
        found[file.name] = scan
    return found


def everything(store: kvfs.Store) -> None:
    """All live pages are found, verify, and have the bytes that follow from their names."""
    assert store.wait_ready(20)
    for case in LIVE:
        pages, chunks = case.pages(), case.chunks
        for group, first, data in get(store, case):
            size = case.layout.group(group).page_bytes
            assert data == pages[group][first * size : chunks * size], f"{case.name}: {group}"


def persistent(path: Path) -> set[str]:
    """Segments with pages that have not expired; a background task drops the others."""
    return {
        name
        for name, scan in scans(path).items()
        if any(e.kind == fmt.KIND_PART and not e.expires for e in scan.entries)
    }


def test_the_archive_and_what_it_must_hold_never_change() -> None:
    assert hashlib.sha256(ARCHIVE.read_bytes()).hexdigest() == ARCHIVE_SHA256
    pages = hashlib.sha256()
    for case in CASES:
        for name, data in case.pages().items():
            pages.update(f"{case.name} {case.tokens} {name} ".encode() + data)
    assert pages.hexdigest() == PAGES_SHA256


def test_the_archive_holds_segments_of_every_kind(path: Path) -> None:
    found = scans(path).values()
    assert {scan.seal is None for scan in found} == {True, False}
    assert {scan.header.flags for scan in found} == {0, fmt.FLAG_PINNED, fmt.FLAG_CARRIED}
    kinds = {entry.kind for scan in found for entry in scan.entries}
    assert kinds == {fmt.KIND_PART, fmt.KIND_NAMESPACE, fmt.KIND_CHAIN}
    assert any(entry.expires for scan in found for entry in scan.entries)


@pytest.mark.parametrize("read_only", [False, True], ids=["for_writing", "read_only"])
def test_every_page_of_format_1_is_found_and_correct(path: Path, read_only: bool) -> None:
    with kvfs.open(path, read_only=read_only) as store:
        everything(store)
        report = store.verify()
        assert report.ok, report.problems
        assert report.pages >= sum(case.chunks for case in LIVE)
        assert [pin.name for pin in store.pins()] == [PINNED]


def test_expired_pages_are_not_served_and_are_dropped(path: Path) -> None:
    (expired,) = (case for case in CASES if case.ttl is not None)
    with kvfs.open(path) as store:
        assert store.wait_ready(20)
        assert expired.namespace(store).match(expired.tokens).tokens == 0
        store._shared.services().evictor.expire()
        everything(store)


def test_pages_of_format_1_are_read_at_other_degrees(path: Path) -> None:
    group = GQA.groups[0]
    with kvfs.open(path) as store:
        assert store.wait_ready(20)
        for case in (c for c in CASES if c.parts or c.name == "gqa"):
            for part in (kvfs.Part(1, 1, 0, 2), kvfs.Part(0, 2, 1, 1), kvfs.Part(1, 1, 1, 1), group.full):
                ((_, first, data),) = get(store, case, part)
                assert (first, data) == (0, case.part_of(case.pages()["full"], part)), (case.name, part)


def test_a_store_of_format_1_takes_new_pages(path: Path) -> None:
    """New pages go to the segment that was left active; earlier ones stay correct, also after a rebuild."""
    before = {name: (path / "segments" / name).read_bytes() for name in persistent(path)}
    new = Case("new", GQA, 7)
    with kvfs.open(path) as store:
        assert store.wait_ready(20)
        golden.put(store, new)
    for name, data in before.items():  # published bytes have not changed: only a table may have new entries
        now = (path / "segments" / name).read_bytes()
        assert now[: fmt.FIRST_TABLE] == data[: fmt.FIRST_TABLE]
        assert now[fmt.FIRST_PAYLOAD : len(data)] == data[fmt.FIRST_PAYLOAD :]
    assert persistent(path) == set(before)
    shutil.rmtree(path / "index")
    with kvfs.open(path) as store:
        everything(store)
        ((_, _, data),) = get(store, new)
        assert data == new.pages()["full"]


def test_a_pin_of_format_1_protects_its_pages(path: Path) -> None:
    (pinned,) = (case for case in CASES if case.name == "pinned")
    with kvfs.open(path) as store:
        assert store.wait_ready(20)
        store.gc(target_bytes=0)
        ((_, _, data),) = get(store, pinned)
        assert data == pinned.pages()["full"]
        assert store.unpin(PINNED)


# ---------------------------------------------------------------- formats and features of later versions


def test_another_format_is_refused_and_nothing_is_touched(path: Path) -> None:
    rewrite_super(path, format=2)
    for read_only in (False, True):
        with pytest.raises(FormatError, match="format 2"):
            kvfs.open(path, read_only=read_only)
    assert not list((path / "run").glob("*.live")) and not (path / "index").joinpath("CURRENT").exists()


@pytest.mark.parametrize(
    ("kind", "for_writing", "read_only"),
    [("compatible", True, True), ("read_only_compatible", False, True), ("incompatible", False, False)],
)
def test_unknown_features_of_the_store_decide_who_may_open_it(
    path: Path, kind: str, for_writing: bool, read_only: bool
) -> None:
    rewrite_super(path, features=features(**{kind: ["from the future"]}))
    for how, allowed in ((False, for_writing), (True, read_only)):
        if allowed:
            with kvfs.open(path, read_only=how) as store:
                everything(store)
        else:
            with pytest.raises(FormatError, match="from the future"):
                kvfs.open(path, read_only=how)


def set_feature(file: Path, offset: int) -> None:
    """Set an unknown feature bit in the header page of a segment."""
    page = bytearray(file.read_bytes()[: fmt.HEADER_BYTES])
    page[offset + 7] |= 0x80
    page[-8:] = checksum(bytes(page[:-8])).to_bytes(8, "little")
    with file.open("r+b") as opened:
        opened.write(page)


@pytest.fixture
def active(path: Path) -> Iterator[Path]:
    """The segment for any page that is not sealed."""
    (name,) = (name for name, scan in scans(path).items() if scan.seal is None and not any(scan.header.class_id))
    yield path / "segments" / name


def test_a_segment_with_unknown_compatible_bits_is_used_as_any_other(path: Path, active: Path) -> None:
    set_feature(active, 16)
    before = persistent(path)
    with kvfs.open(path) as store:
        everything(store)
        golden.put(store, Case("new", GQA, 2))
    assert persistent(path) == before


def test_a_segment_with_unknown_read_only_bits_is_read_and_never_appended_to(path: Path, active: Path) -> None:
    set_feature(active, 24)
    before = active.read_bytes()
    with kvfs.open(path) as store:
        everything(store)
        golden.put(store, Case("new", GQA, 2))
    assert active.read_bytes() == before


def test_a_segment_with_unknown_incompatible_bits_is_not_read(path: Path, active: Path) -> None:
    set_feature(active, 32)
    last = CASES[-1]
    with kvfs.open(path) as store:
        assert store.wait_ready(20)
        assert last.namespace(store).match(last.tokens).tokens < last.chunks * GQA.page_tokens
        ((_, _, data),) = get(store, CASES[0])
        assert data == CASES[0].pages()["full"]
