"""``kvfs.toml``: reading it, changing one setting without touching the rest, following changes of other processes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from kvfs.directory import config, io_mode
from kvfs.directory.config import Settings
from kvfs.directory.liveness import census
from kvfs.directory.root import Directory, translate_os_errors
from kvfs.errors import ConfigError, CorruptError, KvfsError, NoSpaceError, StoreLockedError
from kvfs.system.descriptors import opened
from kvfs.system.files import Files

log = logging.getLogger("kvfs")
NAME = "kvfs.toml"
LOCK_SECONDS = 2.0  # how long a change waits for another one
SAME, NEW, REFUSED = "same", "new", "refused"  # what ``Follower.look`` found
KEYS = ("capacity", "segment_bytes", "index_bytes", "sync", "mode", "codec", "bundle_key")
QUOTA_KEYS = ("guaranteed", "cap", "ttl")
_QUOTA = re.compile(r"quota\.(?P<name>.+)\.(?P<key>[a-z]+)\Z")
_SECTION = re.compile(r"\s*\[")


class Setting(NamedTuple):
    """One setting: its name, its value (bytes, seconds or a text), and where it comes from."""

    name: str
    value: Any
    origin: str  # "kvfs.toml" or "default"


def load(directory: Directory) -> Settings:
    """The settings of an open directory. ConfigError or CorruptError name the line or key."""
    return config.parse_toml(_read(directory), f"{directory.path}/{NAME}")


class Follower:
    """Takes up changes of ``kvfs.toml`` while a store is open. A file with an error changes nothing."""

    def __init__(self, directory: Directory, settings: Settings) -> None:
        self._directory = directory
        self.settings = settings
        self.problem = ""  # why the present file is not obeyed
        self._seen: tuple[int, ...] | None = None  # version of the file that was read; None: read it again

    def look(self) -> str:
        """``NEW`` if ``settings`` have changed, ``REFUSED`` if the file now has an error, else ``SAME``."""
        seen = self._version()
        if seen == self._seen:
            return SAME
        self._seen = seen
        before, known = self.settings, self.problem
        try:
            self.settings, self.problem = self._fitting(load(self._directory)), ""
        except KvfsError as exc:
            self.problem = str(exc)
        except OSError as exc:  # a symlink, no permission, a bad disk: it may pass
            self._seen, self.problem = None, f"{self._directory.path}/{NAME}: {exc.strerror}"
        if self.problem and self.problem != known:
            log.warning("kvfs keeps its present settings: %s", self.problem)
            return REFUSED
        return NEW if self.settings != before else SAME

    def _version(self) -> tuple[int, ...]:
        try:
            st = self._directory.files.stat(NAME, dir_fd=self._directory.root)
        except FileNotFoundError:
            return ()
        return st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns

    def _fitting(self, new: Settings) -> Settings:
        """The settings to use now. Size of the index, and mode, are fixed while the store is open."""
        kept = replace(new, index_bytes=self.settings.index_bytes, mode=self.settings.mode)
        if new.mode != self.settings.mode:
            kept = replace(kept, sync=self.settings.sync)  # levels belong to modes
        if kept.segments_bytes_max < config.SEGMENTS_MIN * kept.segment_bytes:
            raise NoSpaceError(
                f"capacity {kept.capacity_bytes} is too small for the index that is open ({kept.index_bytes}): "
                "stop the store's users first"
            )
        return kept


def read(path: str, files: Files) -> list[Setting]:
    """All settings of a store."""
    directory = Directory(path, files, read_only=True)
    try:
        directory.store_id()
        data = _read(directory)
    finally:
        directory.close()
    settings = config.parse_toml(data, f"{path}/{NAME}")
    named = config.parse_document(data, f"{path}/{NAME}")
    values: dict[str, Any] = {
        "capacity": settings.capacity_bytes, "segment_bytes": settings.segment_bytes,
        "index_bytes": settings.index_bytes, "sync": settings.sync, "mode": settings.mode,
        "codec": settings.codec, "bundle_key": settings.bundle_key,
    }  # fmt: skip
    found = [Setting(key, values[key], NAME if key in named else "default") for key in KEYS]
    for name, quota in sorted(settings.quotas.items()):
        fields = (quota.guaranteed_bytes, quota.cap_bytes, quota.ttl_seconds)
        for key, value in zip(QUOTA_KEYS, fields, strict=True):
            if key in named["quota"][name]:
                found.append(Setting(f"quota.{name}.{key}", value, NAME))
    return found


def change(path: str, key: str, value: str, files: Files) -> Settings:
    """Set one setting and replace the file atomically; ConfigError or NoSpaceError if the result is invalid."""
    try:
        f"{key}{value}".encode()
    except UnicodeEncodeError:
        raise ConfigError(f"setting {key!r} to {value!r}: that is no Unicode text") from None
    section, name = _locate(key)
    directory = Directory(path, files, read_only=False)
    with contextlib.closing(directory), translate_os_errors(path):
        directory.store_id()
        with _locked(directory):
            before = _read(directory)
            old = config.parse_toml(before, f"{path}/{NAME}")
            text = set_value(before.decode("utf-8"), section, name, _literal(name, value))
            settings = config.parse_toml(text.encode(), f"{key} = {value}")
            if settings.mode != old.mode:
                io_mode.check(path, settings, files)
            if settings.index_bytes != old.index_bytes and any(alive for _, alive in census(directory)):
                raise StoreLockedError(
                    "index_bytes cannot change while a process has the store open: stop its users first"
                )
            directory.write_small(NAME, text.encode())
    return settings


def _locate(key: str) -> tuple[str, str]:
    """(quota or "", key) of the name of a setting."""
    if key in KEYS:
        return "", key
    match = _QUOTA.match(key)
    if match is not None and match["key"] in QUOTA_KEYS:
        return match["name"], match["key"]
    known = ", ".join([*KEYS, *(f"quota.NAME.{k}" for k in QUOTA_KEYS)])
    raise ConfigError(f"there is no setting {key!r}: known are {known}")


def _literal(name: str, value: str) -> str:
    """The value as TOML, after a check of its kind."""
    if name in ("sync", "mode", "codec", "bundle_key"):
        return config.quoted(value)
    if name == "ttl":
        config.parse_duration(value, name)
    else:
        config.parse_size(value, name)
    return value if value.isascii() and value.isdigit() else config.quoted(value)


def set_value(text: str, section: str, name: str, literal: str) -> str:
    """``text`` with one value changed or added; comments and everything else stay as they are."""
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")  # not splitlines: TOML has no other line ends
    header = f"[quota.{config.quoted(section)}]" if section else ""
    begin, end = _span(lines, section)
    if begin < 0:
        return "\n".join([*lines, "", header, f"{name} = {literal}"]) + "\n"
    assignment = re.compile(rf"\s*{re.escape(name)}\s*=\s*(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^#\s]+)(?P<rest>.*)\Z")
    for i in range(begin, end):
        if match := assignment.match(lines[i]):
            lines[i] = f"{name} = {literal}{match['rest'].rstrip()}"
            return "\n".join(lines) + "\n"
    while end > begin and not lines[end - 1].strip():
        end -= 1
    lines.insert(end, f"{name} = {literal}")
    return "\n".join(lines) + "\n"


def _span(lines: list[str], section: str) -> tuple[int, int]:
    """Lines [begin, end) of a section; begin is -1 if there is none."""
    begin = -1 if section else 0
    for i, line in enumerate(lines):
        if not _SECTION.match(line):
            continue
        if begin >= 0:
            return begin, i
        with contextlib.suppress(ConfigError):
            document = config.parse_document(line.encode(), NAME)
            if set(document.get("quota", {})) == {section}:
                begin = i + 1
    return begin, len(lines)


def _read(directory: Directory) -> bytes:
    data = directory.read_small(NAME, config.TOML_BYTES_MAX)
    if data is None:
        raise CorruptError(f'{directory.path}/{NAME} is missing: write one with capacity = "200GiB"')
    return data


@contextlib.contextmanager
def _locked(directory: Directory) -> Iterator[None]:
    """One change at a time: lock the file that has the name."""
    files = directory.files
    deadline = files.monotonic() + LOCK_SECONDS
    _read(directory)  # raises CorruptError if there is none
    while True:
        with opened(files, NAME, os.O_RDONLY, dir_fd=directory.root) as fd:
            if files.flock(fd, fcntl.LOCK_EX):
                if files.stat(NAME, dir_fd=directory.root).st_ino == files.fstat(fd).st_ino:
                    yield
                    return
            elif files.monotonic() >= deadline:
                raise StoreLockedError(f"{directory.path}/{NAME} is being changed by another process: try again")
        files.sleep(0.01)
