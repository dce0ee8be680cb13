"""A setting is changed in whatever form of TOML the file is written; nothing else in it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.directory import config, config_file
from kvfs.errors import ConfigError
from kvfs.system.files import Files

#: what is in the file -> what it is after ``quota.chat.cap`` was set to 64MiB
FORMS = {
    "dotted key": (
        'capacity = "1GiB"\nquota.chat.cap = "32MiB"  # ours\n',
        'capacity = "1GiB"\nquota.chat.cap = "64MiB"  # ours\n',
    ),
    "table": ('capacity = "1GiB"\n[quota.chat]\ncap = 1 # x\n', 'capacity = "1GiB"\n[quota.chat]\ncap = "64MiB" # x\n'),
    "quoted key": (
        '"capacity" = "1GiB"\n[quota."chat"]\n"cap"=1\n', '"capacity" = "1GiB"\n[quota."chat"]\n"cap"="64MiB"\n'
    ),
    "spaces": (
        'capacity = "1GiB"\n[ quota . chat ]\ncap = 1\n',
        'capacity = "1GiB"\n[ quota . chat ]\ncap = "64MiB"\n',
    ),
    "inline table": (
        'capacity = "1GiB"\nquota = { chat = { ttl = "1h", cap = 1 } }\n',
        'capacity = "1GiB"\nquota = { chat = { ttl = "1h", cap = "64MiB" } }\n',
    ),
    "inline table of another": (
        'capacity = "1GiB"\nquota = { code = { cap = 1 } }\n',
        'capacity = "1GiB"\nquota = { code = { cap = 1 }, chat = {cap = "64MiB"}}\n',
    ),
    "dotted key of another": (
        'capacity = "1GiB"\nquota.code.cap = 1\nsync = "batch"\n',
        'capacity = "1GiB"\nquota.code.cap = 1\nquota.chat.cap = "64MiB"\nsync = "batch"\n',
    ),
    "no quota": ('# ours\ncapacity = "1GiB"\n', '# ours\ncapacity = "1GiB"\n\n[quota.chat]\ncap = "64MiB"\n'),
    "text of lines": (
        'capacity = """\n1GiB"""\n[quota.chat]\ncap = """\\\n  1MiB"""\n',
        'capacity = """\n1GiB"""\n[quota.chat]\ncap = "64MiB"\n',
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_quota_is_changed_in_every_form(store_path: Path, form: str) -> None:
    with kvfs.open(store_path, capacity="64MiB"):
        pass
    before, after = FORMS[form]
    (store_path / "kvfs.toml").write_text(before)
    config_file.change(str(store_path), "quota.chat.cap", "64MiB", Files())
    assert (store_path / "kvfs.toml").read_text() == after


@pytest.mark.parametrize("form", FORMS)
def test_a_quota_is_removed_in_every_form(store_path: Path, form: str) -> None:
    with kvfs.open(store_path, capacity="64MiB"):
        pass
    (store_path / "kvfs.toml").write_text("# first\n" + FORMS[form][1])
    before = config_file.read(str(store_path), Files())
    config_file.change(str(store_path), "quota.chat.cap", None, Files())
    after = config_file.read(str(store_path), Files())
    assert after == [s for s in before if s.name != "quota.chat.cap"] != before
    assert (store_path / "kvfs.toml").read_text().startswith("# first\n")
    assert config_file.find(str(store_path), "quota.chat.cap", Files()).value is None
    with pytest.raises(ConfigError, match=r"does not set quota\.chat\.cap"):
        config_file.change(str(store_path), "quota.chat.cap", None, Files())


def test_what_has_no_default_is_not_removed(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB"):
        pass
    before = (store_path / "kvfs.toml").read_bytes()
    with pytest.raises(ConfigError, match="capacity is missing"):
        config_file.change(str(store_path), "capacity", None, Files())
    assert (store_path / "kvfs.toml").read_bytes() == before
    with pytest.raises(ConfigError, match="no setting 'colour'"):
        config_file.find(str(store_path), "colour", Files())


def test_an_invalid_value_can_be_corrected_and_a_file_that_is_not_toml_is_named_with_its_line(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB"):
        pass
    settings = store_path / "kvfs.toml"
    settings.write_text('# ours\ncapacity = "lots"\n')
    config_file.change(str(store_path), "capacity", "128MiB", Files())
    assert settings.read_text() == '# ours\ncapacity = "128MiB"\n'
    settings.write_text('# ours\ncapacity = "128MiB\nsync = "batch"\n')
    with pytest.raises(ConfigError, match=r"line 2.*capacity = \"128MiB.*lines look like capacity = \"200GiB\""):
        config_file.change(str(store_path), "capacity", "256MiB", Files())
    assert settings.read_text() == '# ours\ncapacity = "128MiB\nsync = "batch"\n'


@pytest.mark.parametrize("quota", ["quota = 5", "quota = [1]", "[quota]\nchat = 5"])
def test_quotas_that_are_no_tables_are_named(store_path: Path, quota: str) -> None:
    with kvfs.open(store_path, capacity="64MiB"):
        pass
    (store_path / "kvfs.toml").write_text(f'capacity = "64MiB"\n{quota}\n')
    with pytest.raises(ConfigError, match="quota must hold tables"):
        config_file.change(str(store_path), "quota.chat.cap", "1MiB", Files())


def test_a_remote_that_is_no_table_is_named(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB"):
        pass
    (store_path / "kvfs.toml").write_text('capacity = "64MiB"\nremote = "s3://bucket"\n')
    with pytest.raises(ConfigError, match="remote must be a table"):
        config_file.change(str(store_path), "remote.url", "file:///srv", Files())


def test_an_editor_that_would_change_more_than_the_setting_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    import tomlkit

    def dumps(document: Any) -> str:
        return 'capacity = "2GiB"\nsync = "sync"\n'

    monkeypatch.setattr(tomlkit, "dumps", dumps)
    with pytest.raises(ConfigError, match="set capacity with an editor"):
        config_file.set_value(b'capacity = "1GiB"\nsync = "batch"\n', "", "capacity", "2GiB", "kvfs.toml")


def test_the_largest_file_is_edited_in_time() -> None:
    lines = [b'[quota."n%d"]\ncap = 1\n' % n for n in range(config.TOML_BYTES_MAX // 26)]
    data = b'capacity = "1TiB"\n' + b"".join(lines)
    assert len(data) > config.TOML_BYTES_MAX * 0.8
    edited = config_file.set_value(data, "", "capacity", "2TiB", "kvfs.toml")
    assert edited == data.replace(b"1TiB", b"2TiB", 1)


@pytest.mark.parametrize("key", ["requests", "url", "remote.size", "quota.a.size", "remote.", "capacities"])
def test_a_setting_that_there_is_not_is_named(store_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no setting '{key}': known are capacity, segment_bytes, "):
        config_file.find(str(store_path), key, Files())


@pytest.fixture
def made(store_path: Path) -> Path:
    """A new store's settings."""
    with kvfs.open(store_path, capacity="64MiB"):
        pass
    return store_path / "kvfs.toml"


def listed(file: Path) -> dict[str, tuple[Any, str]]:
    return {s.name: (s.value, s.origin) for s in config_file.read(str(file.parent), Files())}


STORE_KEYS = ["capacity", "segment_bytes", "index_bytes", "sync", "mode", "codec", "bundle_key"]


def test_settings_of_a_bucket_are_listed_if_there_is_one_or_if_they_are_set(made: Path) -> None:
    made.write_text('capacity = "64MiB"\n')
    assert list(listed(made)) == [*STORE_KEYS, "remote.url"]
    assert listed(made)["remote.url"] == ("", "default") and listed(made)["sync"] == ("cache", "default")
    assert listed(made)["capacity"] == (64 << 20, "kvfs.toml")
    made.write_text('capacity = "64MiB"\n[remote]\nrequests = 5\n')
    assert list(listed(made)) == [*STORE_KEYS, "remote.url", "remote.requests"]
    assert listed(made)["remote.requests"] == (5, "kvfs.toml")
    made.write_text('capacity = "64MiB"\n[remote]\nurl = "file:///b"\nretention = "2d"\n')
    remote = {name.removeprefix("remote."): s for name, s in listed(made).items() if name.startswith("remote.")}
    assert remote == {
        "url": ("file:///b", "kvfs.toml"), "requests": (8, "default"), "timeout": (30.0, "default"),
        "retention": (172800.0, "kvfs.toml"), "retention_from": ("upload", "default"),
        "read_through": ("on", "default"), "upload": ("off", "default"), "upload_rate": (None, "default"),
        "codec": ("raw", "default"), "key_file": ("", "default"),
    }  # fmt: skip


def test_settings_of_quotas_are_listed_by_name_if_they_are_set(made: Path) -> None:
    made.write_text('capacity = "64MiB"\n[quota.b]\nttl = "1h"\ncap = 5\n[quota.a]\nguaranteed = 1\n[quota.c]\n')
    quotas = {name: s for name, s in listed(made).items() if name.startswith("quota.")}
    assert quotas == {
        "quota.a.guaranteed": (1, "kvfs.toml"), "quota.b.cap": (5, "kvfs.toml"), "quota.b.ttl": (3600.0, "kvfs.toml"),
    }  # fmt: skip
    assert list(quotas) == ["quota.a.guaranteed", "quota.b.cap", "quota.b.ttl"]


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("capacity", "67108864", "capacity = 67108864"), ("capacity", "128MiB", 'capacity = "128MiB"'),
        ("remote.requests", "5", "requests = 5"), ("remote.timeout", "7", "timeout = 7"),
        ("remote.timeout", "7.5", 'timeout = "7.5"'), ("remote.retention", "7200", "retention = 7200"),
        ("remote.retention", "2d", 'retention = "2d"'), ("remote.retention", "", 'retention = ""'),
        ("remote.upload_rate", "1MB", 'upload_rate = "1MB"'), ("remote.upload_rate", "", 'upload_rate = ""'),
        ("remote.upload_rate", "1000000", 'upload_rate = "1000000"'), ("remote.codec", "zstd", 'codec = "zstd"'),
        ("quota.a.ttl", "60", "ttl = 60"), ("quota.a.b.cap", "1k", 'cap = "1k"'), ("bundle_key", "", 'bundle_key = ""'),
    ],
)  # fmt: skip
def test_numbers_are_written_as_numbers_and_all_else_as_text(made: Path, key: str, value: str, line: str) -> None:
    config_file.change(str(made.parent), key, value, Files())
    assert line in made.read_text().splitlines()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("capacity", "", "capacity is ''"), ("capacity", "lots", "capacity is 'lots'"),
        ("remote.timeout", "", "remote.timeout is ''"), ("remote.timeout", "1y", "timeout is '1y'"),
        ("remote.retention", "1y", "retention is '1y'"), ("quota.a.ttl", "", "quota.a.ttl is ''"),
        ("quota.a.cap", "-1", "cap is '-1'"), ("remote.upload_rate", "slow", "upload_rate is 'slow'"),
        ("remote.requests", "many", "remote.requests is 'many': choose 1 to 64"),
        ("capacity", "٣", "capacity is '٣'"), ("sync", "\ud800", "no Unicode text"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused_and_changes_nothing(made: Path, key: str, value: str, message: str) -> None:
    before = made.read_bytes()
    with pytest.raises(ConfigError, match=message):
        config_file.change(str(made.parent), key, value, Files())
    assert made.read_bytes() == before


@pytest.mark.parametrize(
    ("before", "section", "after"),
    [
        ("a = 1\n", ("quota", "x"), 'a = 1\n\n[quota.x]\ncap = 5\n'),
        ("a = 1\n", ("remote",), "a = 1\n\n[remote]\ncap = 5\n"),
        ("a = 1\n", (), "a = 1\ncap = 5\n"),
        ("quota = {}\n", ("quota", "x"), "quota = {x = {cap = 5}}\n"),
        ("[quota]\n", ("quota", "x"), "[quota]\n[quota.x]\ncap = 5\n"),
    ],
)  # fmt: skip
def test_a_setting_gets_a_table_of_its_own_where_there_is_none(
    before: str, section: tuple[str, ...], after: str
) -> None:
    assert config_file.set_value(before.encode(), section, "cap", 5, "kvfs.toml").decode() == after
