"""``kvfs init`` and ``kvfs config``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import click

from kvfs.cli import text
from kvfs.cli.app import App, Command, CommandGroup, common, complete_namespaces
from kvfs.directory.config import MODES, READ_THROUGH, RETENTION_FROM, SYNC_LEVELS, UPLOADS, Remote
from kvfs.format.codec import CODECS


@click.command(
    "init",
    cls=Command,
    examples=(
        "kvfs init --capacity 200GiB",
        "kvfs -C /srv/kvfs init --capacity 1TiB --group",
        "kvfs -C /dev/shm/kvfs init --capacity 64GiB --mode memory",
    ),
)
@click.option("--capacity", metavar="SIZE", help="Limit of all that the store allocates; default $KVFS_CAPACITY.")
@click.option("--segment-bytes", metavar="SIZE", help="Size of a segment; default capacity / 512, at most 256 MiB.")
@click.option("--index-bytes", metavar="SIZE", help="Budget of the index; default capacity / 128.")
@click.option(
    "--sync",
    type=click.Choice(SYNC_LEVELS),
    default="cache",
    show_default=True,
    help="When pages reach the disk: as the kernel decides, in the background, before put returns.",
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="cache",
    show_default=True,
    help="The page cache is a tier, it is bypassed, or the store is in memory (tmpfs).",
)
@click.option(
    "--codec", type=click.Choice(tuple(CODECS)), default="raw", show_default=True, help="How new pages are stored."
)
@click.option("--group", is_flag=True, help="Share the store with the directory's group (2770/0660).")
@common
@click.pass_obj
def init_command(
    app: App,
    capacity: str | None,
    segment_bytes: str | None,
    index_bytes: str | None,
    sync: str,
    mode: str,
    codec: str,
    group: bool,
) -> None:
    """Create a store at -C PATH. Missing parent directories are made."""
    from kvfs.directory import config
    from kvfs.directory import root as directory
    from kvfs.errors import ConfigError
    from kvfs.store import open_store

    path = os.path.abspath(app.path)
    if app.watched(lambda: directory.is_store(path)):
        raise ConfigError(f"{path} holds a store already: kvfs config shows and changes its settings")
    if app.read_only:
        raise ConfigError("init creates a store, and KVFS_READONLY or --read-only is set: run it without")
    if capacity is None and not os.environ.get("KVFS_CAPACITY"):
        raise ConfigError("no capacity given: pass --capacity 200GiB or set KVFS_CAPACITY")
    # first: a mistake must leave no directories, and a directory that is refused must keep its mode
    limit = os.environ["KVFS_CAPACITY"] if capacity is None else capacity
    config.make_settings(limit, segment=segment_bytes, index=index_bytes, sync=sync, mode=mode, codec=codec)
    app.watched(lambda: _make_folders(path, group=group))
    sizes = {"capacity": capacity, "segment_bytes": segment_bytes, "index_bytes": index_bytes}
    with open_store(path, **sizes, sync=sync, mode=mode, codec=codec) as store:  # type: ignore[arg-type]
        s, store_id = store.settings, store.stats()["store_id"]
    data = {
        "path": path, "store_id": store_id, "capacity_bytes": s.capacity_bytes, "segment_bytes": s.segment_bytes,
        "index_bytes": s.index_bytes,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield f"created store {store_id[:8]} at {path}"
        yield (
            f"limit {text.size(s.capacity_bytes)}, segments of {text.size(s.segment_bytes)}, "
            f"index {text.size(s.index_bytes)}"
        )

    app.out.result(data, lines, [path])


def _make_folders(path: str, *, group: bool) -> None:
    """The parents of a store's directory; the directory itself, if a group shares it."""
    from kvfs.directory import root as directory
    from kvfs.system.files import Files

    with directory.translate_os_errors(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if group:
            os.makedirs(path, exist_ok=True)
            directory.check_free(path, Files())
            os.chmod(path, 0o2770)


@click.group(
    "config",
    cls=CommandGroup,
    invoke_without_command=True,
    examples=("kvfs config", "kvfs config get capacity -q", "kvfs config set capacity 300GiB", "kvfs config --json"),
)
@common
@click.pass_context
def config_command(ctx: click.Context) -> None:
    """Show all settings with their origin; `config get`, `set` and `unset` show, change and remove one."""
    if ctx.invoked_subcommand is None:
        _show(ctx.obj)


def _show(app: App) -> None:
    from kvfs.directory import config_file
    from kvfs.errors import StoreNotFoundError
    from kvfs.system.files import Files

    try:
        found = app.watched(lambda: config_file.read(app.path, Files()))
    except StoreNotFoundError:
        raise app.no_store() from None
    path = os.path.abspath(app.path)
    data = {
        "path": {"value": path, "origin": app.path_origin},
        "settings": {s.name: {"value": s.value, "origin": s.origin} for s in found},
    }

    def rows() -> Iterator[tuple[str, str, str]]:
        for s in found:
            yield s.name, _value(s.name, s.value), s.origin

    def lines() -> Iterator[str]:
        yield f"store {path} (from {app.path_origin})"
        yield ""
        yield from text.table(("SETTING", "VALUE", "FROM"), rows(), width=app.out.width)

    app.out.result(data, lines, (s.name for s in found))


def _complete_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from kvfs.directory.config_file import KEYS, QUOTA_KEYS, REMOTE_KEYS

    names = complete_namespaces(ctx, param, "") if incomplete.startswith("quota.") else []
    quotas = [f"quota.{name}.{key}" for name in names for key in QUOTA_KEYS] or ["quota."]
    return [key for key in (*KEYS, *(f"remote.{key}" for key in REMOTE_KEYS), *quotas) if key.startswith(incomplete)]


def _complete_values(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    values = {
        "sync": SYNC_LEVELS, "mode": MODES, "codec": tuple(CODECS), "remote.read_through": READ_THROUGH,
        "remote.upload": UPLOADS, "remote.codec": tuple(CODECS), "remote.retention_from": RETENTION_FROM,
    }.get(ctx.params.get("key", ""), ())  # fmt: skip
    return [value for value in values if value.startswith(incomplete)]


def _value(name: str, value: object) -> str:
    if name.endswith(("ttl", "timeout", "retention")) and isinstance(value, (int, float)):
        return f"{value:.0f} s" if value == int(value) else f"{value} s"
    if name == "remote.requests":
        return str(value)
    if value is None:
        return "-"
    return text.size(value) if isinstance(value, int) else str(value) or "-"


@config_command.command("get", examples=("kvfs config get capacity", "kvfs config get quota.chat.cap -q"))
@click.argument("key", shell_complete=_complete_keys)
@common
@click.pass_obj
def get_command(app: App, key: str) -> None:
    """Show a setting.

    With -q in bytes or seconds, and an empty line for no limit.
    """
    from kvfs.directory import config_file
    from kvfs.errors import StoreNotFoundError
    from kvfs.system.files import Files

    try:
        found = app.watched(lambda: config_file.find(app.path, key, Files()))
    except StoreNotFoundError:
        raise app.no_store() from None
    data = {"setting": key, "value": found.value, "origin": found.origin}
    app.out.result(data, lambda: [_value(key, found.value)], ["" if found.value is None else str(found.value)])


@config_command.command(
    "set",
    examples=(
        "kvfs config set capacity 200GiB",
        "kvfs config set quota.chat.cap 10GiB",
        "kvfs config set quota.chat.ttl 30d",
    ),
)
@click.argument("key", shell_complete=_complete_keys)
@click.argument("value", shell_complete=_complete_values)
@common
@click.pass_obj
def set_command(app: App, key: str, value: str) -> None:
    """Change a setting; comments in kvfs.toml stay.

    Processes that have the store open apply it within seconds. A mode applies from the next open on, and index_bytes
    can be changed only while no process has the store open. A bucket that cannot be used is a warning.
    """
    _change(app, key, value)


@config_command.command("unset", examples=("kvfs config unset quota.chat.ttl", "kvfs config unset remote.upload"))
@click.argument("key", shell_complete=_complete_keys)
@common
@click.pass_obj
def unset_command(app: App, key: str) -> None:
    """Remove a setting, so that its default applies.

    Comments of other lines in kvfs.toml stay.
    """
    _change(app, key, None)


def _change(app: App, key: str, value: str | None) -> None:
    from kvfs.errors import StoreNotFoundError, StoreReadOnlyError
    from kvfs.remote.reachable import problem

    word = "set" if value is not None else "unset"
    if app.read_only:
        raise StoreReadOnlyError(
            f"config {word} changes the store, and KVFS_READONLY or --read-only is set: run it without"
        )
    try:
        stored, remote = app.watched(lambda: _changed(app, key, value))
    except StoreNotFoundError:
        raise app.no_store() from None
    except StoreReadOnlyError:
        raise app.mounted_read_only() from None
    data = {"setting": key, "value": stored}
    later = key in ("mode", "index_bytes")
    whom = "for processes that open the store from now on" if later else "also for processes that have the store open"
    app.out.result(data, lambda: [f"{key} is now {_value(key, stored)}, {whom}"], [key])
    if key in ("remote.url", "remote.key_file") and remote.url and (found := problem(remote)):
        app.out.note(f"warning: {found}; the setting is stored, kvfs doctor checks the bucket again")


def _changed(app: App, key: str, value: str | None) -> tuple[Any, Remote]:
    """Change a setting (a value of None: remove it), and log that. Its value and the bucket's settings, as they are."""
    from kvfs.directory import config_file
    from kvfs.directory.event_log import EventLog
    from kvfs.directory.root import Directory
    from kvfs.system.files import Files

    config_file.change(app.path, key, value, Files())
    stored = config_file.find(app.path, key, Files()).value
    word = "set" if value is not None else "unset"
    directory = Directory(app.path, Files(), read_only=False)
    try:
        settings = config_file.load(directory)
        EventLog(directory, settings.event_file_bytes).add(f"config {word}", **{key: value or ""})
        return stored, settings.remote
    finally:
        directory.close()
