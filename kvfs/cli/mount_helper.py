"""``mount.kvfs``: what mount(8) runs for a line of /etc/fstab whose type is ``kvfs``.

It is called as ``mount.kvfs STORE DIR [-sfnv] [-o OPTIONS]`` and becomes ``kvfs -C STORE mount DIR --daemon``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvfs.cli.app import EXIT_USAGE, App

#: Options that are for mount(8), systemd or every file system, and say nothing here.
_IGNORED = frozenset({
    "rw", "defaults", "auto", "noauto", "nofail", "user", "nouser", "users", "owner", "_netdev", "exec", "noexec",
    "suid", "nosuid", "dev", "nodev", "atime", "noatime", "relatime", "strictatime", "sync", "async",
})  # fmt: skip


def translate(arguments: Sequence[str]) -> list[str]:
    """Arguments of the ``kvfs`` command. ValueError with the reason if these are not those of a mount helper."""
    names: list[str] = []
    options: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "-o":
            options += next(words, "").split(",")
        elif not word.startswith("-"):
            names.append(word)
        elif set(word[1:]) - set("sfnv"):
            raise ValueError(f"unknown flag {word}")
    if len(names) != 2:
        raise ValueError("usage: mount.kvfs STORE DIR [-o OPTIONS]")
    found = ["-C", names[0], "mount", names[1], "--daemon"]
    for option in filter(None, options):
        name, _, value = option.partition("=")
        if option == "ro":
            found.append("--read-only")
        elif option == "allow_other":
            found.append("--allow-other")
        elif name == "spool":
            found += ["--spool", value]
        elif name not in _IGNORED and not name.startswith(("x-", "X-", "comment")):
            raise ValueError(f"unknown option {option!r}: known are ro, allow_other, spool=SIZE")
    return found


def main() -> None:
    from kvfs.cli.main import run

    try:
        arguments = translate(sys.argv[1:])
    except ValueError as exc:
        App().out.error(f"mount.kvfs: {exc}", EXIT_USAGE)
        sys.exit(EXIT_USAGE)
    sys.exit(run(App(), arguments))
