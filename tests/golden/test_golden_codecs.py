"""A store of format 1 whose pages are encoded, kept in the tree: every later version must read it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

import kvfs
from kvfs.format import segment as fmt
from tests.golden.test_golden import scans
from tools import golden
from tools.golden import BYTES, CODEC_CASES, WIDE, Case, get, unpack

ARCHIVE = Path(__file__).parent / "format1-codecs.tar.xz"
#: Digest of the archive as it was committed; it may not change after a release.
ARCHIVE_SHA256 = "383c0234ea0d71286ea285000963f3c79920838b83b8d5b382f7fc2a5a470656"


@pytest.fixture
def path(memory_path: Path) -> Path:
    unpack(ARCHIVE, memory_path / "store")
    return memory_path / "store"


def everything(store: kvfs.Store) -> None:
    assert store.wait_ready(20)
    for case in CODEC_CASES:
        ((group, first, data),) = get(store, case)
        assert (first, data) == (0, case.pages()[group]), case


def test_the_archive_never_changes_and_holds_records_of_every_codec(path: Path) -> None:
    assert hashlib.sha256(ARCHIVE.read_bytes()).hexdigest() == ARCHIVE_SHA256
    entries = [e for scan in scans(path).values() for e in scan.parts()]
    assert {e.codec for e in entries} == {fmt.CODEC_RAW, fmt.CODEC_ZSTD, fmt.CODEC_PLANES}
    assert {e.raw_bytes for e in entries} >= {WIDE.page_bytes, BYTES.page_bytes, 20000, 12289}


@pytest.mark.parametrize("read_only", [False, True], ids=["for_writing", "read_only"])
def test_every_encoded_page_is_found_and_correct(path: Path, read_only: bool) -> None:
    with kvfs.open(path, read_only=read_only) as store:
        everything(store)
        report = store.verify()
        assert report.ok and report.pages == len([e for s in scans(path).values() for e in s.parts()]), report.problems


def test_a_store_with_codecs_takes_new_pages(path: Path) -> None:
    new = Case("new", WIDE, 3, codec="planes")
    with kvfs.open(path) as store:
        assert store.wait_ready(20)
        golden.put(store, new)
    shutil.rmtree(path / "index")
    with kvfs.open(path) as store:
        everything(store)
        ((_, _, data),) = get(store, new)
        assert data == new.pages()["full"]


def test_encoded_pages_are_read_at_other_degrees(path: Path) -> None:
    with kvfs.open(path) as store:
        assert store.wait_ready(20)
        for case in (c for c in CODEC_CASES if c.layout is WIDE):
            for part in (kvfs.Part(1, 1, 0, 4), kvfs.Part(0, 2, 1, 2), kvfs.Part(1, 1, 3, 1), WIDE.groups[0].full):
                ((_, first, data),) = get(store, case, part)
                assert (first, data) == (0, case.part_of(case.pages()["full"], part)), (case.name, part)
