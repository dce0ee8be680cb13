"""Starts a program of kvfs as a child process, with an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

#: Isolated, so that neither the working directory nor the environment decides what is imported.
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); importlib.import_module(sys.argv[3]).main()"
)


def start(module: str, setup: Mapping[str, Any], fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Call ``main`` of a module in a child that inherits ``fds`` under their numbers. OSError.

    ``setup``, as JSON, is the second argument of its command line. The child is in a session of its own: an interrupt
    at a terminal reaches the engine alone.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _BOOT, json.dumps(path), json.dumps(setup), module], pass_fds=fds,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
