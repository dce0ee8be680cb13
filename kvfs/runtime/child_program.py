"""What the programs of an engine's child processes have in common: they open the engine's store, serve, and end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from kvfs.errors import KvfsError, StoreAccessError
from kvfs.runtime import registry
from kvfs.runtime.open_store import OpenOptions, OpenStore
from kvfs.system.files import Files


def run(name: str, serve: Callable[[OpenStore, Mapping[str, Any]], None]) -> NoReturn:
    """Open the store that the command line names, serve until the engine has hung up, and end the process.

    Exit status: 0, or that of the error where the store does not open.
    """
    sys.argv[0] = f"kvfs-{name}"  # what the lists of the store's processes show
    setup = json.loads(sys.argv[2])
    try:
        store = registry.acquire(OpenOptions(setup["path"], Files(), inspect_only=True))
        if store.c.store_id.hex() != setup["store"]:
            raise StoreAccessError(f"{setup['path']} is another store than the engine's: restart the engine")
    except KvfsError as exc:
        print(f"kvfs: the {name} process cannot open the store: {exc}", file=sys.stderr)
        sys.exit(exc.exit_code)
    serve(store, setup)
    registry.release(store)
    sys.exit(0)
