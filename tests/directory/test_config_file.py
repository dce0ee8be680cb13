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
