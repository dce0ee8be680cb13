"""``kvfs mount`` and ``kvfs umount``: a store as a directory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable

import click

from kvfs.cli.app import EXIT_FAILED, FILE, App, Command, common

START_SECONDS = 3600.0  # longest wait of --daemon: the index may have to be rebuilt first


@click.command("mount", cls=Command, examples=("kvfs mount /mnt/kvfs", "kvfs mount /mnt/kvfs --daemon"))
@click.argument("directory", metavar="DIR", type=FILE)
@click.option("--daemon", is_flag=True, help="Return when the mount can be used; it is served in the background.")
@click.option("--allow-other", is_flag=True, help="Let other users in, as far as the modes of the files do.")
@click.option("--spool", metavar="SIZE", help="What open files may take besides the limit; default: a quarter of it.")
@click.option("--ready-fd", type=int, hidden=True)
@common
@click.pass_obj
def mount_command(
    app: App, directory: str, daemon: bool, allow_other: bool, spool: str | None, ready_fd: int | None
) -> None:
    """Show the store as a directory DIR, with files/ for files of any program.

    Serves it until it is unmounted; Ctrl-C unmounts. With --read-only nothing can be saved.
    """
    from kvfs.mount import mounting

    options = mounting.MountOptions(app.read_only, allow_other, mounting.parse_spool(spool))
    where = mounting.check_mount_point(directory, app.path)
    data = {"directory": where, "store": os.path.abspath(app.path), "daemon": daemon}
    ends = f"kvfs umount {directory}"

    def show(line: str) -> None:
        app.out.result(data, lambda: [line], [where])

    if daemon:
        _start(app, where, allow_other, spool)
        show(f"mounted at {where}; {ends} ends it")
        return
    with app.open(write=not app.read_only, counted=True) as store:
        mounting.mount(
            store, where, options, _ready(ready_fd, lambda: show(f"mounted at {where}; Ctrl-C or {ends} ends it"))
        )


def _ready(fd: int | None, show: Callable[[], None]) -> Callable[[], None]:
    """What says that the mount can be used: to the starting process, if there is one."""

    def tell() -> None:
        gc.freeze()  # else a collection among all imported objects stops all threads for 10 ms, within a load
        if fd is None:
            show()
            sys.stdout.flush()
            return
        os.write(fd, b"1")
        os.close(fd)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.close(null)

    return tell


def _start(app: App, where: str, allow_other: bool, spool: str | None) -> None:
    """Start the process that serves the mount, and wait until it can be used. Its error is ours."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "kvfs.cli.main", "-C", os.path.abspath(app.path), "mount", where]
    command += ["--ready-fd", str(writing), *(["--allow-other"] if allow_other else [])]
    command += [*(["--spool", spool] if spool else []), *(["--read-only"] if app.read_only else [])]
    with open(reading, "rb") as ready:
        child = subprocess.Popen(
            command, pass_fds=[writing], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, cwd="/", text=True,
        )  # fmt: skip
        os.close(writing)
        if ready.read(1):
            child.returncode = 0  # it goes on; nothing here waits for it
            return
    message = child.communicate(timeout=START_SECONDS)[1].strip().removeprefix("kvfs: ")
    app.out.error(message or "the mount did not start", child.returncode or EXIT_FAILED)
    raise click.exceptions.Exit(child.returncode or EXIT_FAILED)


@click.command("umount", cls=Command, examples=("kvfs umount /mnt/kvfs", "kvfs umount /mnt/kvfs --lazy"))
@click.argument("directory", metavar="DIR", type=FILE)
@click.option("--lazy", is_flag=True, help="Also while files are open: they stay open until they are closed.")
@common
@click.pass_obj
def umount_command(app: App, directory: str, lazy: bool) -> None:
    """End the mount at DIR, also one whose process died."""
    from kvfs.mount import mounting

    mounting.unmount(directory, lazy=lazy)
    where = os.path.abspath(directory)
    app.out.result({"directory": where, "unmounted": True}, lambda: [f"unmounted {where}"], [where])
