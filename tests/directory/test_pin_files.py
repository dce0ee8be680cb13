"""The files of pins: what is a pin, what is none, and that nothing is taken for unpinned on a doubt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory.pin_files import PIN_BYTES_MAX, Pin, list_pins, pinned_segments, read_pin
from kvfs.directory.root import Directory
from kvfs.testing import Fault, FaultyFiles

FILE = "0123456789abcdef"
SEGMENTS = ("11" * 16, "22" * 16)
BODY = {"name": "b", "namespace": "aa" * 32, "tokens": 64, "created_us": 5, "segments": list(SEGMENTS)}
PIN = Pin("b", "aa" * 32, 64, 5, SEGMENTS)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def folder(memory_path: Path) -> Path:
    kvfs.open(memory_path / "store", capacity="16MiB").close()
    return memory_path / "store" / "pins"


@pytest.fixture
def directory(folder: Path, files: FaultyFiles) -> Iterator[Directory]:
    with contextlib.closing(Directory(str(folder.parent), files, read_only=False)) as made:
        yield made


def write(folder: Path, file: str, **changes: Any) -> None:
    (folder / file).write_text(json.dumps({**BODY, **changes}))


def test_pins_are_listed_by_name_with_the_segments_that_they_protect(directory: Directory, folder: Path) -> None:
    assert list_pins(directory) == [] and pinned_segments(directory) == set()
    write(folder, FILE)
    write(folder, "f" * 16, name="a", segments=[])
    for other in ("notes", "f" * 17, "." + "f" * 16, "F" * 16):
        write(folder, other, name=other)
    assert list_pins(directory) == [PIN._replace(name="a", segments=()), PIN]
    assert pinned_segments(directory) == {b"\x11" * 16, b"\x22" * 16}
    assert read_pin(directory, "0" * 16) is None, "there is no such file"


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 5}, {"namespace": None}, {"tokens": "64"}, {"tokens": True}, {"tokens": 1.0}, {"created_us": "5"},
        {"segments": 5}, {"segments": ["11" * 15]}, {"segments": ["11" * 17]}, {"segments": ["x" * 32]},
        {"segments": [5]}, {"segments": [*SEGMENTS, ""]},
    ],
)  # fmt: skip
def test_a_file_of_other_content_is_no_pin(directory: Directory, folder: Path, changes: dict[str, Any]) -> None:
    write(folder, FILE, **changes)
    assert read_pin(directory, FILE) is None and list_pins(directory) == []


@pytest.mark.parametrize("missing", BODY)
def test_a_file_that_lacks_a_key_is_no_pin(directory: Directory, folder: Path, missing: str) -> None:
    (folder / FILE).write_text(json.dumps({key: value for key, value in BODY.items() if key != missing}))
    assert read_pin(directory, FILE) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"5", b"{", b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_no_pin(directory: Directory, folder: Path, content: bytes) -> None:
    (folder / FILE).write_bytes(content)
    assert read_pin(directory, FILE) is None


def test_a_file_that_is_too_large_or_no_file_is_no_pin(directory: Directory, folder: Path) -> None:
    (folder / FILE).mkdir()
    assert read_pin(directory, FILE) is None
    text = json.dumps(BODY)
    (folder / ("1" * 16)).write_text(text.ljust(PIN_BYTES_MAX))
    (folder / ("2" * 16)).write_text(text.ljust(PIN_BYTES_MAX + 1))
    assert list_pins(directory) == [PIN]


@pytest.mark.parametrize("kind", ["listdir", "open", "preadv"])
def test_pins_that_cannot_be_read_are_an_error(
    directory: Directory, folder: Path, files: FaultyFiles, kind: str
) -> None:
    write(folder, FILE)
    directory.sub("pins")
    files.arm(Fault(files.calls[kind] + 1, kind))
    with pytest.raises(OSError, match="injected"):
        pinned_segments(directory)
