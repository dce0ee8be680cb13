"""What the settings of a store may be, what their defaults are, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvfs.directory.config import Quota, make_settings, parse_duration, parse_size
from kvfs.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


@pytest.mark.parametrize(
    ("capacity", "segment", "index"),
    [("16MiB", 256 * KIB, 2 * MIB), ("1GiB", 2 * MIB, 8 * MIB), ("512GiB", 256 * MIB, 4 * GIB),
     ("16TiB", 256 * MIB, 64 * GIB)],
)  # fmt: skip
def test_the_sizes_of_segments_and_index_follow_the_capacity(capacity: str, segment: int, index: int) -> None:
    settings = make_settings(capacity)
    assert (settings.segment_bytes, settings.index_bytes) == (segment, index)


def test_a_capacity_is_divided_without_a_rest() -> None:
    settings = make_settings("64MiB", segment="1MiB", index="4MiB")
    assert settings.reserve_bytes == 2 * MIB
    assert settings.segments_bytes_max == 64 * MIB - 4 * MIB - MIB - (64 + 4 + 8) * KIB
    assert settings.process_files_bytes == 512 * KIB + 4 * KIB
    small = 2 * (settings.event_file_bytes + settings.namespace_slot_bytes)
    assert small <= 8 * KIB + 64 * KIB
    assert settings.pin_files_bytes == 256 * KIB + 64 * KIB
    assert make_settings("64MiB", segment=MIB + 4095, index=4 * MIB + 1).segment_bytes == MIB


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": 16 * MIB - 1}, "at least"),
        ({"segment": 256 * KIB - 1}, "segment_bytes"),
        ({"segment": 4 * GIB + 1, "capacity": "1TiB"}, "segment_bytes"),
        ({"index": 2 * MIB - 1}, "index_bytes"),
        ({"index": 64 * GIB + 1, "capacity": "1TiB"}, "index_bytes"),
        ({"segment": 8 * MIB}, "too small"),
        ({"sync": "always"}, "sync"),
        ({"mode": "disk"}, "mode"),
        ({"mode": "memory", "sync": "batch"}, "nothing survives"),
        ({"codec": "zip"}, "codec"),
        ({"bundle_key": "key"}, "absolute"),
        ({"quotas": {"a": Quota(guaranteed_bytes=32 * MIB + 1)}}, "half the capacity"),
        ({"quotas": {"a": 5}}, "kvfs.Quota"),
    ],
)
def test_settings_beyond_their_limits_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_settings(**{"capacity": "64MiB", **settings})


def test_settings_at_their_limits_are_accepted() -> None:
    assert make_settings(16 * MIB, segment=256 * KIB, index=2 * MIB).capacity_bytes == 16 * MIB
    assert make_settings("1TiB", segment=4 * GIB, index=64 * GIB).index_bytes == 64 * GIB
    assert make_settings("64MiB", quotas={"a": Quota(guaranteed_bytes=32 * MIB)}).quotas["a"].cap_bytes is None
    assert make_settings("64MiB", codec="planes", bundle_key="/key", mode="memory").codec == "planes"
    eighth = (16 - 2 - 1) * MIB // 8  # without index and small files
    assert make_settings("16MiB", segment=eighth, index=2 * MIB).segment_bytes == eighth
    with pytest.raises(ConfigError, match="eight"):
        make_settings("16MiB", segment=eighth + 4096, index=2 * MIB)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("3k", 3000), ("3KiB", 3 * KIB), (" 1.5 GiB ", 3 * GIB // 2), ("2T", 2 * 10**12), ("1ti", TIB), (7, 7)],
)
def test_sizes_are_decimal_or_binary(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.", "5 apples", "1e3", -1, 1 << 62, True, 1.5])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("2m", 120), ("1.5h", 5400), ("1d", 86400), ("2w", 1209600), (3, 3), (0.5, 0.5)]
)
def test_durations_have_units(text: Any, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "1y", "-1", -1, 1e12, float("nan"), True, 1 << 53])
def test_what_is_no_duration_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="duration"):
        parse_duration(text)
