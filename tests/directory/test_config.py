"""What the settings of a store may be, what their defaults are, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvfs.directory.config import (
    Quota,
    Remote,
    Settings,
    default_path,
    make_settings,
    parse_duration,
    parse_size,
    parse_toml,
    store_path,
    switch,
    to_toml,
)  # fmt: skip
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
        ({"bundle_key": "/a\nb"}, "absolute"),
        ({"quotas": {5: Quota()}}, "kvfs.Quota"),
        ({"quotas": {"a": Quota(guaranteed_bytes=32 * MIB + 1)}}, "half the capacity"),
        ({"quotas": {"a": 5}}, "kvfs.Quota"),
        ({"quotas": ["a"]}, r"quotas is \['a'\]: map names"),
        ({"quotas": {"a": Quota(guaranteed_bytes=-1)}}, 'quota "a" guaranteed is -1'),
        ({"quotas": {"a": Quota(cap_bytes=1.5)}}, 'quota "a" cap is 1.5'),  # type: ignore[arg-type]
        ({"quotas": {"a": Quota(ttl_seconds=-1)}}, 'quota "a" ttl is -1'),
        ({"index": "63MiB"}, "lower segment_bytes or index_bytes"),
    ],
)
def test_settings_beyond_their_limits_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_settings(**{"capacity": "64MiB", **settings})


def test_a_quota_takes_sizes_and_durations_as_texts_like_a_file_does() -> None:
    quota: Any = Quota("1MiB", "8MiB", "1h")  # type: ignore[arg-type]
    assert make_settings("64MiB", quotas={"a": quota}).quotas == {"a": Quota(MIB, 8 * MIB, 3600)}


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
    [("1", 1), ("3k", 3000), ("3KiB", 3 * KIB), (" 1.5 GiB ", 3 * GIB // 2), ("2T", 2 * 10**12), ("1ti", TIB), (7, 7),
     ("5MB", 5 * 10**6), ("5mib", 5 * MIB), ("6g", 6 * 10**9), ("0", 0), ((1 << 62) - 1, (1 << 62) - 1), ("8b", 8),
     (f"{(1 << 60) + 1}", (1 << 60) + 1)],
)  # fmt: skip
def test_sizes_are_decimal_or_binary(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.", "5 apples", "1e3", -1, 1 << 62, True, 1.5])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("2m", 120), ("1.5h", 5400), ("1d", 86400), ("2w", 1209600), (3, 3), (0.5, 0.5), ("4 S", 4), (0, 0),
     (999_999_999_999, 999_999_999_999)],
)  # fmt: skip
def test_durations_have_units(text: Any, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "1y", "-1", -1, 1e12, float("nan"), True, 1 << 53])
def test_what_is_no_duration_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="duration"):
        parse_duration(text)


REMOTE = Remote(
    "s3://bucket/prefix", requests=3, timeout_seconds=7.5, retention_seconds=604800.0, retention_from="use",
    read_through="off", upload="reused", upload_rate=123456, codec="zstd", key_file="/keys",
)  # fmt: skip
EVERYTHING = f"""capacity = {64 * MIB}
segment_bytes = {MIB}
index_bytes = {4 * MIB}
sync = "sync"
mode = "staging"
codec = "planes"
bundle_key = "/a\\u0022b"

[remote]
url = "s3://bucket/prefix"
requests = 3
timeout = 7.5
retention = 604800.0
retention_from = "use"
read_through = "off"
upload = "reused"
upload_rate = 123456
codec = "zstd"
key_file = "/keys"

[quota."a"]
guaranteed = 1000

[quota."b.\\u007fc"]
guaranteed = 0
cap = 2000
ttl = 60.0
"""


def everything() -> Settings:
    quotas = {"b.\x7fc": Quota(cap_bytes=2000, ttl_seconds=60), "a": Quota(guaranteed_bytes=1000)}
    return make_settings(
        64 * MIB, segment=MIB, index=4 * MIB, sync="sync", mode="staging", quotas=quotas, codec="planes",
        bundle_key='/a"b', remote=REMOTE,
    )  # fmt: skip


def test_every_setting_is_written_and_read_again() -> None:
    text = to_toml(everything()).decode()
    assert [line.partition("    #")[0] for line in text.splitlines()[1:]] == EVERYTHING.splitlines()
    assert text.startswith("# Settings of this kvfs store") and text.count("    # ") == 2
    assert parse_toml(text.encode(), "x") == everything()


def test_settings_at_their_defaults_are_not_written() -> None:
    short = to_toml(make_settings("64MiB")).decode()
    assert [line.split()[0] for line in short.splitlines()[1:]] == [
        "capacity", "segment_bytes", "index_bytes", "sync", "mode",
    ]  # fmt: skip
    bucket = to_toml(make_settings("64MiB", remote=Remote("file:///b"))).decode().partition("[remote]\n")[2]
    expected = 'url = "file:///b"\nrequests = 8\ntimeout = 30.0\nread_through = "on"\nupload = "off"\n'
    assert bucket == expected
    assert parse_toml(b'capacity = "64MiB"', "x") == make_settings("64MiB")
    assert parse_toml(b'capacity = "64MiB"\n[remote]\nurl = "file:///b"', "x").remote == Remote("file:///b")
    assert parse_toml(b"capacity = 16777216\n[quota.a]", "x").quotas == {"a": Quota(0, None, None)}


@pytest.mark.parametrize(
    ("capacity", "segments", "pins", "processes", "events", "slots"),
    [  # of the capacity: without index, 1 MiB, 1/1024, 1/16384 and 1/8192
        ("16MiB", 13 * MIB - 19 * KIB, 272 * KIB, 513 * KIB, 16 * KIB, 16 * KIB),
        ("1GiB", 1015 * MIB - 1216 * KIB, 1280 * KIB, 576 * KIB, 48 * KIB, 32 * KIB),
        ("1TiB", TIB - 8 * GIB - MIB - 1216 * MIB, GIB + 256 * KIB, 64 * MIB + 512 * KIB, MIB, 256 * KIB),
    ],
)
def test_what_small_files_may_take_follows_the_capacity(
    capacity: str, segments: int, pins: int, processes: int, events: int, slots: int
) -> None:
    s = make_settings(capacity)
    assert (s.segments_bytes_max, s.pin_files_bytes, s.process_files_bytes) == (segments, pins, processes)
    assert (s.event_file_bytes, s.namespace_slot_bytes) == (events, slots)


@pytest.mark.parametrize(
    ("remote", "message"),
    [
        ({"url": "http://a/b"}, "remote.url is 'http://a/b'"),
        ({"url": "s3://a b"}, "remote.url is"),
        ({"url": "s3://ä/b"}, "remote.url is"),
        ({"url": "s3://user:secret@bucket/b"}, "credentials"),
        ({"requests": 0}, "choose 1 to 64"),
        ({"requests": 65}, "choose 1 to 64"),
        ({"requests": True}, "choose 1 to 64"),
        ({"timeout_seconds": 0.09}, "between 0.1s and 10m"),
        ({"timeout_seconds": 600.5}, "between 0.1s and 10m"),
        ({"retention_seconds": 3599.0}, "at least 1h"),
        ({"retention_seconds": 172799.0, "retention_from": "use"}, "at least 2d"),
        ({"key_file": "keys"}, "absolute path"),
        ({"key_file": "/a\nb"}, "absolute path"),
        ({"upload_rate": 99_999}, "at least 100KB"),
        ({"read_through": "yes"}, "choose one of on, off"),
        ({"upload": "yes"}, "choose one of off, "),
        ({"retention_from": "now"}, "choose one of upload, use"),
        ({"codec": "zip"}, "remote.codec is 'zip'"),
    ],
)
def test_remotes_beyond_their_limits_are_refused(remote: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_settings("64MiB", remote=Remote(**{"url": "s3://a/b", **remote}))


@pytest.mark.parametrize(
    "remote",
    [
        {"url": "az://a/b@c"}, {"url": ""}, {"requests": 1}, {"requests": 64}, {"timeout_seconds": 0.1},
        {"timeout_seconds": 600}, {"retention_seconds": 3600.0}, {"upload_rate": 100_000}, {"retention_from": "use"},
        {"retention_seconds": 172800.0, "retention_from": "use"},
    ],
)  # fmt: skip
def test_remotes_at_their_limits_are_accepted(remote: dict[str, Any]) -> None:
    made = Remote(**{"url": "s3://a/b", **remote})
    assert make_settings("64MiB", remote=made).remote == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"capacity = 1\nsync = $\nb = 1", "(at line 2, column 8) ('sync = $'); correct the file"),
        (b'capacity = "1', "(at the end, line 1)"),
        (b"sync = 'sync'", "capacity is missing"),
        (b"capacity = 1\nbig = 1", "unknown setting 'big'; known are bundle_key, capacity, codec, index_bytes, mode, "),
        (b"capacity = 16777216\nsync = 1", "x: sync is 1, not a text"),
        (b"capacity = 16777216\nquota = 1", "x: quota must hold tables"),
        (b"capacity = 16777216\n[quota]\na = 1", "x: quota must hold tables"),
        (b"capacity = 16777216\n[quota.a]\nsize = 1", "has unknown key 'size'; known are guaranteed, cap, ttl"),
        (b"capacity = 16777216\n[quota.a]\ncap = -1", 'quota "a" cap is -1'),
        (b"capacity = 16777216\n[quota.a]\nguaranteed = -1", 'quota "a" guaranteed is -1'),
        (b"capacity = 16777216\n[quota.a]\nttl = -1", 'quota "a" ttl is -1'),
        (b"capacity = 16777216\nremote = 1", "x: remote must be a table [remote]"),
        (b"capacity = 16777216\n[remote]\nbucket = 1", "remote has unknown key 'bucket'; known are codec, key_file"),
        (b"capacity = 16777216\n[remote]\nurl = 1", "x: url is 1, not a text"),
        (b"capacity = 16777216\n[remote]\ntimeout = 'x'", "remote.timeout is 'x'"),
        (b"capacity = 16777216\n[remote]\nretention = 'x'", "remote.retention is 'x'"),
        (b"capacity = 16777216\n[remote]\nupload_rate = 'x'", "remote.upload_rate is 'x'"),
        (b"a = 1" + b"." * 101, "a line has more than 100 dots"),
        (b"capacity = " + b"1" * 5000, "x: "),
    ],
)
def test_a_file_that_is_refused_says_where_and_why(text: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_toml(text, "x")


def test_a_line_of_as_many_dots_as_may_be_is_read() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'a'"):
        parse_toml(b"a." * 100 + b"b = 1", "x")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1 << 64, "a huge integer"), ((1 << 64) - 1, str((1 << 64) - 1)), ([10**5000], "a list with a huge integer")],
)
def test_a_value_that_is_refused_is_shown_short(value: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"size is {shown}: give bytes")):
        parse_size(value)


@pytest.mark.parametrize(
    ("environment", "path"),
    [({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/kvfs"), ({"HOME": "/h"}, "/h/.cache/kvfs"),
     ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/kvfs"), ({"XDG_CACHE_HOME": "c"}, None)],
)  # fmt: skip
def test_the_default_path(environment: dict[str, str], path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if path is not None:
        assert default_path() == path
        return
    with pytest.raises(ConfigError, match="no path given"):
        default_path()


@pytest.mark.parametrize(("path", "message"), [(5, "path is int"), ("", "path is empty"), ("a\0", "a zero byte")])
def test_what_is_no_path_is_refused(path: object, message: str) -> None:
    assert store_path(b"a") == "a"
    with pytest.raises(ConfigError, match=message):
        store_path(path)


@pytest.mark.parametrize(
    ("value", "on"),
    [(None, False), ("", False), ("0", False), ("no", False), ("Off", False), ("false", False), (" 1 ", True),
     ("yes", True), ("ON", True), ("true", True)],
)  # fmt: skip
def test_switches(value: str | None, on: bool) -> None:
    assert switch("X", value) is on
    with pytest.raises(ConfigError, match="X is 'maybe': set it to 1 or 0"):
        switch("X", "maybe")
