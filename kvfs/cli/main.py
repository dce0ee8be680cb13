"""``kvfs``: the group of all commands, and how their errors become messages and exit codes.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

import click

from kvfs.cli.app import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, App, CommandGroup, common
from kvfs.version import __version__

#: Command -> (module below kvfs.cli, what it does).
COMMANDS = {
    "init": ("config_cmd", "Create a store."),
    "config": ("config_cmd", "Show the settings with their origin, or change one."),
    "inspect": ("inspect_cmd", "Show the store, a namespace, a segment or a page."),
    "ls": ("ls_cmd", "List namespaces, or the prefixes of one."),
    "match": ("match_cmd", "Show how much of a prompt is stored, and in which tier."),
    "stats": ("stats_cmd", "Show hit rates, bytes and latencies of all processes, past and present."),
    "top": ("top_cmd", "Show what the processes of the store do now."),
    "log": ("log_cmd", "Show what happened to the store, when and by whom."),
    "metrics": ("metrics_cmd", "Print, write or serve metrics for Prometheus."),
    "gc": ("gc_cmd", "Show what would be evicted, or evict it."),
    "verify": ("verify_cmd", "Check the store, and repair it."),
    "pin": ("pin_cmd", "Keep a prefix from eviction, or list such prefixes."),
    "unpin": ("pin_cmd", "Remove a pin."),
    "rm": ("rm_cmd", "Remove a namespace, a prompt or a tenant permanently."),
    "warm": ("warm_cmd", "Read pages into the page cache."),
    "export": ("bundle_cmd", "Write pages to a bundle, a file that another store can import."),
    "import": ("bundle_cmd", "Verify a bundle and store its pages."),
    "push": ("remote_cmd", "Store pages in the bucket that hosts share."),
    "pull": ("remote_cmd", "Store pages from that bucket here, verified."),
    "remote": ("remote_cmd", "List, verify or clear that bucket."),
    "bench": ("bench_cmd", "Measure what a store does on this machine."),
    "mount": ("mount_cmd", "Show the store as a directory, with a folder for files of any program."),
    "umount": ("mount_cmd", "End a mount."),
    "doctor": ("doctor_cmd", "Find problems around the store, with remedies."),
    "completion": ("completion_cmd", "Print the completion script of a shell."),
}

#: click 8.2 and later raise this for a group without a command.
NO_ARGUMENTS: tuple[type[Exception], ...] = tuple(filter(None, [getattr(click.exceptions, "NoArgsIsHelpError", None)]))
_ENDS = (signal.SIGTERM, signal.SIGHUP)
#: An interrupted command that has not ended after this long waits for a disk: it ends without its cleanup.
CLEANUP_SECONDS = 10.0
GC_THRESHOLD = 50_000  # objects between collections; Python's default is 700


class Commands(CommandGroup):
    """Imports a command when it runs; the summaries of all are in ``COMMANDS``."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "help" and len(args) > 1:  # `kvfs help ls` is `kvfs ls --help`
            args = [*args[1:], "--help"]
        elif args[0] == "help":
            click.echo(ctx.get_help())
            ctx.exit()
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from difflib import get_close_matches

            close = get_close_matches(name, COMMANDS, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise click.UsageError(f"there is no command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"kvfs.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=("kvfs -C /srv/kvfs init --capacity 200GiB", "KVFS_DIR=/srv/kvfs kvfs inspect"),
)
@common
@click.version_option(__version__, "-V", "--version", prog_name="kvfs", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Manage a kvfs store: a persistent cache of the attention KV of LLM prompts.

    The store is -C PATH, else $KVFS_DIR, else kvfs in the user's cache directory.
    """
    ctx.ensure_object(App)
    level = os.environ.get("KVFS_LOG", "").upper()
    if level in ("DEBUG", "INFO", "WARNING", "ERROR"):
        import logging

        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


def main() -> NoReturn:
    """Entry point: one line for an error, never a traceback, and the published exit codes."""
    os.environ.pop("KVFS_DISABLE", None)  # it switches engines off, not this command
    gc.set_threshold(GC_THRESHOLD)  # imports make many objects and no garbage
    _have_streams()
    app = App()
    interrupts = _Interrupts(app)
    interrupts.install()
    try:
        code = run(app)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed its end, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILED
    for number in _ENDS:  # nothing is left to interrupt
        if signal.getsignal(number) == interrupts.end:
            _leave_to_the_system(number, signal.SIG_DFL)
    gc.freeze()  # else the interpreter collects cycles among all imported objects as it exits
    sys.exit(code)


def _have_streams() -> None:
    """Replace closed streams by /dev/null. Otherwise the next opened file would get the number of one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # paths may have letters that the locale lacks; stderr escapes them
        sys.stdout.reconfigure(errors="backslashreplace")


class _Interrupts:
    """SIGTERM ends a command as Ctrl-C does: it leaves no half-written file, and no index that must be rebuilt.

    Python runs handlers in the main thread, and the kernel wakes no thread that waits for a disk. So a thread looks for
    a signal that stays pending, or a cleanup that does not end, and ends the process after CLEANUP_SECONDS.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._interrupted = False

    def install(self) -> None:
        for number in _ENDS:
            if signal.getsignal(number) is signal.SIG_DFL:  # nohup stays nohup
                signal.signal(number, self.end)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        threading.Thread(target=self._watch, name="kvfs-interrupt", daemon=True).start()

    def end(self, number: int, frame: FrameType | None) -> None:
        for other in _ENDS:  # `timeout` sends it twice: the second must not interrupt the cleanup
            _leave_to_the_system(other, signal.SIG_IGN)
        self._interrupt(number, frame)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_ENDS))
        since = time.monotonic()
        while time.monotonic() - since < CLEANUP_SECONDS:
            time.sleep(CLEANUP_SECONDS / 20)
            if not (self._interrupted or _is_pending()):
                since = time.monotonic()
        self._app.out.error("interrupted, without a cleanup: the disk does not answer", EXIT_INTERRUPTED)
        os._exit(EXIT_INTERRUPTED)


def _leave_to_the_system(number: int, action: signal.Handlers) -> None:
    """Set SIG_IGN or SIG_DFL, without the traceback that Python prints of a signal that came just before that."""
    report, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        signal.signal(number, action)
    finally:
        sys.unraisablehook = report


def _is_pending() -> bool:
    """Whether a signal that ends the command waits for the main thread."""
    pending = 0
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith(("SigPnd:", "ShdPnd:")):
                pending |= int(line.split()[1], 16)
    return any(pending & 1 << number - 1 for number in (signal.SIGINT, *_ENDS))


def run(app: App, arguments: list[str] | None = None) -> int:
    """Run a command line. Returns its exit code."""
    try:
        result = cli.main(arguments, prog_name="kvfs", standalone_mode=False, obj=app)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except (click.Abort, KeyboardInterrupt):
        app.out.error("interrupted", EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    except click.UsageError as exc:
        where = exc.ctx.command_path if exc.ctx is not None else "kvfs"
        message = "Missing command" if isinstance(exc, NO_ARGUMENTS) else exc.format_message().rstrip(".")
        if isinstance(exc, NO_ARGUMENTS) and not (app.out.json or app.out.quiet):
            click.echo(exc.format_message(), err=True)  # the message is the help
        else:
            app.out.error(f"{message}; see `{where} --help`", EXIT_USAGE)
        return EXIT_USAGE
    except click.ClickException as exc:
        app.out.error(exc.format_message(), EXIT_FAILED)
        return EXIT_FAILED
    except BrokenPipeError:
        raise
    except Exception as exc:
        return _explain(app, exc)


def _explain(app: App, exc: Exception) -> int:
    from kvfs.errors import IndexUnavailableError, KvfsError

    code = getattr(exc, "exit_code", EXIT_FAILED)
    if isinstance(exc, IndexUnavailableError):
        app.out.error(f"{app.path}: the index does not answer ({exc}); kvfs doctor says which process holds it", code)
    elif isinstance(exc, KvfsError):
        app.out.error(str(exc), code)
    elif isinstance(exc, OSError):
        name = f" ({exc.filename})" if exc.filename else ""
        app.out.error(f"{exc.strerror or exc}{name}", code)
    else:
        import logging

        logging.getLogger("kvfs").debug("unexpected", exc_info=exc)
        app.out.error(f"unexpected {type(exc).__name__}: {exc}; this is a bug, KVFS_LOG=debug shows where", code)
    return code


if __name__ == "__main__":
    main()
