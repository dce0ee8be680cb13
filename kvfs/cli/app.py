"""What all commands share: common options, opening the store, choosing the namespace, exit codes."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvfs.cli.output import Output

if TYPE_CHECKING:
    from kvfs.namespace import Namespace
    from kvfs.store import Store

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_PLAIN = re.compile(r"[A-Za-z0-9._:/@+][A-Za-z0-9._:/@+-]*\Z")

# 10 no store, 11 locked, 12 format, 14 no space, 90 corrupt: ``kvfs.errors`` has them.
EXIT_FAILED, EXIT_USAGE, EXIT_PROBLEMS, EXIT_INTERRUPTED = 1, 2, 3, 130
REBUILD_SECONDS = 3600.0  # longest wait for an index that is being rebuilt
TAB_SECONDS = 0.5  # longest wait of a completion
SILENT_SECONDS = 30.0  # longest wait for an index that is held by a stopped process, or by one that waits for a disk


class App:
    """One run of the command: where the store is, whether it may be changed, and where results go (``Output``)."""

    def __init__(self) -> None:
        self.out = Output()
        self._path = ""
        self.read_only = os.environ.get("KVFS_READONLY", "").strip().lower() not in ("", "0", "false", "no", "off")

    @property
    def path(self) -> str:
        """-C, else $KVFS_DIR, else kvfs in the cache directory of the user."""
        if self._path or os.environ.get("KVFS_DIR"):
            return self._path or os.environ["KVFS_DIR"]
        from kvfs.directory.config import default_path

        return default_path()

    @path.setter
    def path(self, value: str) -> None:
        self._path = value

    @property
    def path_origin(self) -> str:
        return "-C" if self._path else "$KVFS_DIR" if os.environ.get("KVFS_DIR") else "default"

    def open(self, *, write: bool = False, counted: bool = False, hurried: bool = False) -> Store:
        """The store, with an index that answers. Commands that only read fall back to a read-only open.

        ``counted``: the process counts lookups and runs upkeep, as an engine does. ``hurried``: for a completion, which
        does not wait for a rebuild.
        """
        from kvfs.errors import StoreLockedError, StoreNotFoundError, StoreReadOnlyError
        from kvfs.store import open_store

        if write and self.read_only:
            raise StoreReadOnlyError(
                "this command changes the store, and KVFS_READONLY or --read-only is set: run it without"
            )
        try:
            store = self._open(open_store, write, counted)
        except StoreNotFoundError:
            raise self.no_store() from None
        if not store.wait_ready(TAB_SECONDS if hurried else 0.0):
            if not hurried:
                self.out.draw("the index is being rebuilt from the segments ...")
            if hurried or not _rebuilt(store):
                raise StoreLockedError(
                    f"{self.path}: the index does not answer; kvfs doctor says which process holds it"
                )
            self.out.clear()
        return store

    def _open(self, open_store: Callable[..., Store], write: bool, counted: bool) -> Store:
        from kvfs.errors import StoreAccessError, StoreReadOnlyError

        try:
            return open_store(self.path, create=False, read_only=self.read_only, counted=counted)
        except (StoreReadOnlyError, StoreAccessError) as exc:  # a read-only mount, or a user who may only read
            if self.read_only:
                raise
            if not write:
                return open_store(self.path, create=False, read_only=True, counted=counted)
            if isinstance(exc, StoreAccessError):
                raise
            raise self.mounted_read_only() from None

    def mounted_read_only(self) -> Exception:
        from kvfs.errors import StoreReadOnlyError

        return StoreReadOnlyError(
            f"{self.path}: this command changes the store, which is mounted read-only: run it where it is writable"
        )

    def no_store(self) -> Exception:
        """What to do depends on what the path is: `init` makes a store only where it destroys nothing."""
        return self.watched(self._no_store)

    def _no_store(self) -> Exception:
        from kvfs.directory.root import check_free
        from kvfs.errors import FormatError, KvfsError, StoreNotFoundError
        from kvfs.system.files import Files

        path, other = self.path, "name another with -C or $KVFS_DIR"
        if os.path.lexists(path) and not os.path.isdir(path):
            return StoreNotFoundError(f"{path} is a file, and a store is a directory: {other}")
        above = os.path.dirname(path)
        while above and not os.path.lexists(above):
            above = os.path.dirname(above)
        if above and not os.path.isdir(above):
            return StoreNotFoundError(f"no store at {path}, since {above} is a file: {other}")
        try:
            check_free(path, Files())
        except FormatError:  # files that are not kvfs's
            inner = os.path.join(path, "kvfs")
            return StoreNotFoundError(
                f"no store at {path}, which holds other files: {other}, or make one in a directory of its own with "
                f"`kvfs -C {inner} init --capacity 200GiB`"
            )
        except StoreNotFoundError:
            pass
        except (KvfsError, OSError) as exc:
            return StoreNotFoundError(f"no store at {path} ({exc}): {other}")
        return StoreNotFoundError(
            f"no store at {path}: make one with `kvfs -C {path} init --capacity 200GiB`, or {other}"
        )

    def watched(self, function: Callable[[], T]) -> T:
        """Result of a step that opens no store but touches its files. StoreLockedError if the disk hangs."""
        from kvfs.system.worker import WatchedCalls

        return WatchedCalls(self.path).run(function)

    def namespace(self, store: Store, ref: str | None) -> Namespace:
        """The namespace that ``ref`` names; without ``ref``, the only namespace of the store."""
        from kvfs.catalog.catalog import NotFoundError, identity_of, listed
        from kvfs.errors import ConfigError

        if ref is None:
            known = store.catalog.described()
            if len(known) != 1:
                often = Counter(d.name for d in known)
                names = listed(d.name if often[d.name] == 1 else d.label for d in known)
                if not known:
                    raise NotFoundError(f"{self.path} holds no namespace yet: an engine stores the first one")
                raise ConfigError(f"name a namespace with -n: this store has {names}")
            described = known[0]
        else:
            described = store.catalog.find(ref)
        return store.namespace(**identity_of(described, os.environ.get("KVFS_SALT", "")))


def _rebuilt(store: Store) -> bool:
    """Wait up to REBUILD_SECONDS for an index that is being rebuilt, or SILENT_SECONDS for one that does not answer."""
    end, silent = time.monotonic() + REBUILD_SECONDS, time.monotonic() + SILENT_SECONDS
    while not store.wait_ready(1.0):
        now = time.monotonic()
        if store.stats()["index"]["state"] == "rebuilding":
            silent = now + SILENT_SECONDS
        if now >= min(end, silent):
            return False
    return True


def _app(ctx: click.Context) -> App:
    return ctx.ensure_object(App)


def _set_path(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    if value == "" and not ctx.resilient_parsing:  # -C "$UNSET" must not lead to another store
        raise click.UsageError("-C is empty: name the directory of the store, or leave it out")
    if value is not None:
        _app(ctx).path = value


def _set_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        _app(ctx).out.json = True


def _set_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        _app(ctx).out.quiet = True


def _set_read_only(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        _app(ctx).read_only = True


def _set_whole(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        _app(ctx).out.truncate = False


def _directories(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


#: Names of the options of ``common``, which a help lists below those of the command.
COMMON = ("store", "json", "quiet", "no_truncate", "read_only")


def common(function: F) -> F:
    """The options that every command takes, before or after its name."""
    shared: dict[str, Any] = {"expose_value": False, "is_eager": True}
    for option in (
        click.option("--read-only", is_flag=True, callback=_set_read_only, help="Change nothing.", **shared),
        click.option("--no-truncate", is_flag=True, callback=_set_whole, help="Print wide tables in full.", **shared),
        click.option("-q", "--quiet", is_flag=True, callback=_set_quiet, help="Print ids only.", **shared),
        click.option("--json", is_flag=True, callback=_set_json, help="Print JSON.", **shared),
        click.option(
            "-C", "--store", metavar="PATH", callback=_set_path, help="The store.", shell_complete=_directories,
            **shared,
        ),
    ):  # fmt: skip
        function = option(function)
    return function


class Command(click.Command):
    """Shows its ``examples``, command lines, and the options of ``common`` below its own."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own, shared = list[tuple[str, str]](), list[tuple[str, str]]()
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                is_shared = param.name in COMMON or param is self.get_help_option(ctx)
                (shared if is_shared else own).append(record)
        for title, records in (("Options", own), ("Common options", shared)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")


class CommandGroup(Command, click.Group):
    """A command with subcommands."""

    command_class = Command


#: A file in an argument or option: shells complete its name, and the command says what is wrong with it.
FILE = click.Path(readable=False, allow_dash=True)


def namespace_option(function: F) -> F:
    return click.option(
        "-n", "--namespace", "ref", metavar="NAME", shell_complete=complete_namespaces,
        help="Namespace: name, name@revision or digits of its digest; needed if there are several.",
    )(function)  # fmt: skip


def _offered(names: Iterable[str], incomplete: str) -> list[str]:
    """Names that a completion may insert: a shell executes what it finds in others, such as ``$(command)``."""
    return sorted(n for n in names if n.startswith(incomplete) and _PLAIN.match(n))


def complete_namespaces(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Names of the namespaces, for the shell; none where there is no store."""
    try:
        with _app(ctx).open(hurried=True) as store:
            return _offered({d.name for d in store.catalog.described()}, incomplete)
    except Exception:
        return []


def complete_pins(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Names of the pins, for the shell; none where there is no store."""
    try:
        with _app(ctx).open(hurried=True) as store:
            return _offered({pin.name for pin in store.pins()}, incomplete)
    except Exception:
        return []
