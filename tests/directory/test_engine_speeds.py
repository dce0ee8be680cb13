"""The speeds of engines: the last measurement of each namespace, bounded, whatever the file holds."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory.engine_speeds import ENGINES_MAX, TOKENS_PER_SECOND_MAX, EngineSpeeds
from kvfs.directory.root import Directory
from kvfs.directory.slot_file import SLOT_BYTES_MIN, SlotFile
from kvfs.errors import ConfigError
from kvfs.system.files import Files
from kvfs.testing import Fault, FaultyFiles
from tests.stores import tiny


@pytest.fixture
def path(store_path: Path) -> Path:
    with kvfs.open(store_path, capacity="64MiB", counted=False):
        pass
    return store_path


def speeds(path: Path, files: Files | None = None, *, read_only: bool = False) -> EngineSpeeds:
    return EngineSpeeds(Directory(str(path), files or Files(), read_only=read_only))


def digest(n: int) -> bytes:
    return n.to_bytes(32, "big")


def test_the_last_measurement_of_each_namespace_is_read_by_others(path: Path) -> None:
    mine, other = speeds(path), speeds(path, read_only=True)
    assert other.read(digest(1)) is None
    mine.note(digest(1), 26_500.4)
    mine.note(digest(2), 900)
    mine.note(digest(1), 31_000)
    other.note(digest(1), 5)  # it only reads
    assert [other.read(digest(n)) for n in (1, 2, 3)] == [31_000, 900, None]


def test_the_file_keeps_the_namespaces_that_were_measured_last(path: Path) -> None:
    mine = speeds(path)
    for n in range(ENGINES_MAX + 5):
        mine.note(digest(n), TOKENS_PER_SECOND_MAX * 2.0)
    known = [mine.read(digest(n)) for n in range(ENGINES_MAX + 5)]
    assert known == [None] * 5 + [TOKENS_PER_SECOND_MAX] * ENGINES_MAX
    assert (path / "run/engines").stat().st_size == 2 * SLOT_BYTES_MIN


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        [],
        [1],
        ["x", 1],
        [0, 1],
        [-1, 1],
        [True, 1],
        [5, -1],
        [5, True],
        [1 << 80, 1],
        [1, 1 << 62],
        [1, 1 << 70],
        {"a": 1},
        [1.5, 2],
    ],
)
def test_what_is_no_measurement_is_left_out(path: Path, value: object) -> None:
    file = SlotFile(Directory(str(path), Files(), read_only=False), "engines", SLOT_BYTES_MIN)
    good = digest(9).hex()
    file.update(
        lambda body, room: json.loads(json.dumps({"engines": {digest(1).hex(): value, good: [5, 6], "x": [1, 2]}}))
    )
    mine = speeds(path)
    assert (mine.read(digest(1)), mine.read(digest(9))) == (None, 5)
    mine.note(digest(1), 12)
    assert (mine.read(digest(1)), mine.read(digest(9))) == (12, 5)


@pytest.mark.parametrize("kind", ["open", "pwritev", "preadv", "flock"])
def test_a_disk_that_fails_says_nothing(path: Path, kind: str) -> None:
    files = FaultyFiles()
    mine = speeds(path, files)
    mine.note(digest(1), 10)
    files.arm(Fault(nth=files.calls[kind] + 1, kind=kind, action="error", error=errno.EIO, persistent=True))
    mine.note(digest(1), 20)
    assert mine.read(digest(1)) in (None, 10)
    files.arm()
    assert mine.read(digest(1)) == 10


def test_measurements_from_a_future_do_not_keep_others_out(path: Path) -> None:
    """The clock was years ahead once, and has been set right."""
    ahead = {digest(n).hex(): [5, 1 << 60] for n in range(1, ENGINES_MAX + 1)}
    SlotFile(Directory(str(path), Files(), read_only=False), "engines", SLOT_BYTES_MIN).update(
        lambda body, room: {"engines": ahead}
    )
    mine = speeds(path)
    mine.note(digest(0), 700)
    assert mine.read(digest(0)) == 700


@pytest.mark.parametrize("value", [[1, 0], [TOKENS_PER_SECOND_MAX, (1 << 62) - 1]])
def test_figures_at_their_limits_are_measurements(path: Path, value: list[int]) -> None:
    file = SlotFile(Directory(str(path), Files(), read_only=False), "engines", SLOT_BYTES_MIN)
    file.update(lambda body, room: {"engines": {digest(1).hex(): value}})
    assert speeds(path).read(digest(1)) == value[0]


@pytest.mark.parametrize("speed", [0, -1.0, math.nan, math.inf, "fast", None])
def test_a_speed_that_is_no_positive_number_is_refused(tmp_path: Path, speed: Any) -> None:
    with kvfs.open(tmp_path / "store", capacity="16MiB") as store:
        ns = store.namespace("m", tiny(), revision="r1")
        with pytest.raises(ConfigError, match="tokens_per_second"):
            ns.note_compute_speed(speed)
        assert ns.compute_speed() is None
