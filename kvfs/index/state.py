"""The file ``state``: for which boot, device and inode a generation was made dirty, or that it was closed cleanly."""

from __future__ import annotations

import json
from typing import NamedTuple

from kvfs.directory import Directory


class State(NamedTuple):
    """Content of the file ``state``."""

    generation: str
    boot: str
    device: int
    inode: int
    clean: bool


def read_state(directory: Directory) -> State | None:
    try:
        data = directory.read_small("state", 4096)
        if data is None:
            return None
        body = json.loads(data)
        state = State(*(body[name] for name in State._fields))
    except Exception:  # damaged state means: do not trust the index
        return None
    kinds = (str, str, int, int, bool)
    return state if all(type(v) is k for v, k in zip(state, kinds, strict=True)) else None


def write_state(directory: Directory, state: State) -> None:
    directory.write_small("state", json.dumps(state._asdict()).encode() + b"\n")
