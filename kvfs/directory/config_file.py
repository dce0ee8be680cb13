"""``kvfs.toml``: reading it, changing one setting without touching the rest, following changes of other processes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator, Sequence
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
REMOTE_KEYS = (
    "url", "requests", "timeout", "retention", "retention_from", "read_through", "upload", "upload_rate", "codec",
    "key_file",
)  # fmt: skip
#: Settings whose value is a text, which is checked with the file.
_TEXTS = {
    "sync", "mode", "codec", "bundle_key", "url", "read_through", "upload", "upload_rate", "retention_from", "key_file",
}  # fmt: skip
QUOTA_KEYS = ("guaranteed", "cap", "ttl")
_QUOTA = re.compile(r"quota\.(?P<name>.+)\.(?P<key>[a-z]+)\Z")


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
    remote = settings.remote
    remote_values: tuple[Any, ...] = (
        remote.url, remote.requests, remote.timeout_seconds, remote.retention_seconds, remote.retention_from,
        remote.read_through, remote.upload, remote.upload_rate, remote.codec, remote.key_file,
    )  # fmt: skip
    for key, value in zip(REMOTE_KEYS, remote_values, strict=True):
        if remote.url or key == "url" or key in named.get("remote", {}):
            found.append(Setting(f"remote.{key}", value, NAME if key in named.get("remote", {}) else "default"))
    return found


def find(path: str, key: str, files: Files) -> Setting:
    """One setting as it is now; a value of None is no limit. ConfigError if there is no such setting."""
    _locate(key)
    return next((s for s in read(path, files) if s.name == key), Setting(key, None, "default"))


def change(path: str, key: str, value: str | None, files: Files) -> Settings:
    """Set one setting, or with None remove it, and replace the file atomically; ConfigError if the result is invalid.

    A file with an invalid value can be corrected in this way; one that is not TOML cannot.
    """
    what = f"without {key}" if value is None else f"with {key} = {value}"
    try:
        what.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"setting {key!r} to {value!r}: that is no Unicode text") from None
    section, name = _locate(key)
    directory = Directory(path, files, read_only=False)
    with contextlib.closing(directory), translate_os_errors(path):
        directory.store_id()
        with _locked(directory):
            before = _read(directory)
            new = None if value is None else _value(key, name, value)
            after = set_value(before, section, name, new, f"{path}/{NAME}")
            settings = config.parse_toml(after, f"{path}/{NAME} {what}")
            old: Settings | None = None
            with contextlib.suppress(ConfigError):
                old = config.parse_toml(before, f"{path}/{NAME}")
            if old is None or settings.mode != old.mode:
                io_mode.check(path, settings, files)
            resized = name == "index_bytes" if old is None else settings.index_bytes != old.index_bytes
            if resized and any(alive for _, alive in census(directory)):
                raise StoreLockedError(
                    "index_bytes cannot change while a process has the store open: stop its users first"
                )
            directory.write_small(NAME, after)
    return settings


def _locate(key: str) -> tuple[tuple[str, ...], str]:
    """(path of the table, key) of the name of a setting; () is the document itself."""
    if key in KEYS:
        return (), key
    if key.startswith("remote.") and key.removeprefix("remote.") in REMOTE_KEYS:
        return ("remote",), key.removeprefix("remote.")
    match = _QUOTA.match(key)
    if match is not None and match["key"] in QUOTA_KEYS:
        return ("quota", match["name"]), match["key"]
    known = ", ".join([*KEYS, *(f"remote.{k}" for k in REMOTE_KEYS), *(f"quota.NAME.{k}" for k in QUOTA_KEYS)])
    raise ConfigError(f"there is no setting {key!r}: known are {known}")


def _value(key: str, name: str, value: str) -> int | str:
    """The value of a setting, after a check of its kind."""
    if name in _TEXTS:
        return value
    if name in ("retention", "upload_rate") and not value:
        return value
    if name in ("ttl", "timeout", "retention"):
        config.parse_duration(value, key)
    elif name != "requests":  # a count, which is checked with its limits
        config.parse_size(value, key)
    return int(value) if value.isascii() and value.isdigit() else value


def set_value(data: bytes, section: Sequence[str], name: str, value: int | str | None, path: str) -> bytes:
    """A TOML document with one value changed, added or (None) removed; everything else and its comments stay.

    ConfigError if it is not TOML, or if the editor would change anything else.
    """
    import tomlkit

    wanted = config.parse_document(data, path)
    wanted_table: Any = wanted
    for step in section:
        wanted_table = wanted_table.setdefault(step, {})
        if not isinstance(wanted_table, dict):
            form = "be a table, [remote]" if section[0] == "remote" else 'hold tables like [quota."name"]'
            raise ConfigError(f"{path}: {section[0]} must {form}; correct the file")
    if value is not None:
        wanted_table[name] = value
    elif name in wanted_table:
        del wanted_table[name]
    else:
        raise ConfigError(f"{path} does not set {'.'.join((*section, name))}: its default applies already")
    # the second is for quotas that are dotted keys among other keys
    for edit in (_assign, _append_dotted) if value is not None else (_remove,):
        try:
            document = tomlkit.parse(data)
            edit(document, section, name, value)
            edited = tomlkit.dumps(document).encode()
            if _without_empty(config.parse_document(edited, path)) == _without_empty(wanted):
                return edited
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, tomlkit.exceptions.TOMLKitError):
            continue
    raise ConfigError(f"{path} is written in a form that cannot be edited here: set {name} with an editor")


def _without_empty(table: dict[str, Any]) -> dict[str, Any]:
    """A document without its empty tables, which set nothing."""
    kept = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in table.items()}
    return {key: value for key, value in kept.items() if value != {}}


def _remove(document: Any, section: Sequence[str], name: str, _: object) -> None:
    table = document
    for step in section:
        table = table[step]
    del table[name]


def _assign(document: Any, section: Sequence[str], name: str, value: int | str | None) -> None:
    import tomlkit

    table, inline = document, False
    for step in section:
        table = table.setdefault(step, tomlkit.inline_table() if inline else tomlkit.table())
        inline = isinstance(table, tomlkit.items.InlineTable)
    table[name] = value


def _append_dotted(document: Any, section: Sequence[str], name: str, value: int | str | None) -> None:
    import tomlkit

    document[section[0]].append(tomlkit.key([*section[1:], name]), value)


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
