"""Epochs of weights that change in place: numbers that a store gives out once, whatever happens to its pages.

``epochs/<base>-<number>`` (empty files; base: 16 hex digits of the digest that the identity has at epoch 0) says which
numbers were given. Creating a name that must not exist decides between processes; no lock, nothing to wait for.
"""

from __future__ import annotations

import re

from kvfs.directory.root import Directory
from kvfs.errors import StoreLockedError

EPOCH_MAX = 2**63 - 1
KEPT = 4  # names of one base that stay: a process that is slow must see that it is
TRIES = 1000
_FOLDER = "epochs"
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\Z")


def next_epoch(directory: Directory, base: bytes, above: int) -> int:
    """A number above ``above`` that nobody was given before, durably taken. OSError as it comes."""
    files, prefix = directory.files, base.hex()[:16]
    folder = directory.sub(_FOLDER)

    def given() -> list[int]:
        return sorted(
            int(n[17:], 16) for n in files.listdir(folder) if _NAME.match(n) and n.startswith(prefix + "-")
        )  # fmt: skip

    for _ in range(TRIES):
        number = max([above, *given()]) + 1
        if number > EPOCH_MAX:
            break
        try:
            files.close(files.create(f"{prefix}-{number:016x}", directory.file_mode, dir_fd=folder))
        except FileExistsError:
            continue
        known = given()
        if known[-1] > number:
            continue  # others went past it meanwhile, and its name may have been removed before
        files.fsync(folder)
        files.fsync(directory.root)
        for old in known[:-KEPT]:
            directory.remove(f"{prefix}-{old:016x}", sub=_FOLDER)
        return number
    raise StoreLockedError(f"{directory.path}: no epoch could be had in {TRIES} tries: others raise it all the time")
