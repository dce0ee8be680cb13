"""`import kvfs` and the commands that inspect a store are cheap: a module is imported when a call needs it.

A command that inspects a store takes as long as its imports, which wait for a CPU while writers are busy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "triton", "numpy", "zstandard", "transformers", "vllm", "watchdog")
#: Not needed by commands that only inspect a store: what writes, evicts, rebuilds or reads payloads, and its libraries.
WORK = (
    "kvfs.runtime.services", "kvfs.write.appender", "kvfs.write.active_segments", "kvfs.eviction.evictor",
    "kvfs.maintenance.purge", "kvfs.maintenance.rebuild", "kvfs.bundles.drop_folder", "kvfs.read.reader",
    "kvfs.namespace", "kvfs.bundles.exporter", "kvfs.bundles.importer", "kvfs.maintenance.recompress",
    "kvfs.maintenance.verify", "kvfs.maintenance.warm", "kvfs.eviction.dry_run", "kvfs.runtime.disabled",
    "kvfs.pages.hf_config",
    "tempfile", "shutil", "tarfile", "pathlib", "asyncio",
)  # fmt: skip
INSPECTING = (("inspect",), ("inspect", "alpha"), ("ls",), ("ls", "alpha"), ("stats",))


def loaded_after(statement: str) -> set[str]:
    """Names of all modules, in full, in a process that ran the statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{statement!r} failed:\n{done.stderr}"
    return set(json.loads(done.stdout.splitlines()[-1]))


def loaded_by(*arguments: str) -> set[str]:
    """Names of all modules in a process that ran the command."""
    return loaded_after(
        "from kvfs.cli.app import App\nfrom kvfs.cli.main import run\n"
        f"assert run(App(), {list(arguments)!r}) == 0, 'the command failed'"
    )


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    names = loaded_after("import kvfs; assert kvfs.__file__, 'kvfs/__init__.py is missing'")
    assert "kvfs" in names
    return names


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("looked-at") / "store")
    with kvfs.open(path, capacity="64MiB") as opened:
        opened.namespace("alpha", tiny(), "9213176").put(tokens_of(1, 10), seeded(1, 10 * TINY_BYTES))
    yield path


@pytest.mark.parametrize("heavy", HEAVY)
def test_import_kvfs_does_not_load(heavy: str, loaded: set[str]) -> None:
    assert heavy not in loaded, f"`import kvfs` loads {heavy}; see python -X importtime -c 'import kvfs'"


def test_import_kvfs_loads_none_of_its_modules_but_the_version(loaded: set[str]) -> None:
    assert {name for name in loaded if name.startswith("kvfs.")} == {"kvfs.version"}


def test_help_loads_no_store_and_none_of_the_commands() -> None:
    names = loaded_by("--help")
    assert not names & {
        *HEAVY,
        "lmdb",
        "xxhash",
        "tomllib",
        "logging",
        "kvfs.directory.config",
        "kvfs.system.files",
        "kvfs.store",
    }
    assert {n for n in names if n.startswith("kvfs.cli.")} <= {
        f"kvfs.cli.{n}" for n in ("app", "main", "output", "text")
    }


@pytest.mark.parametrize("arguments", INSPECTING, ids=" ".join)
def test_modules_that_an_inspecting_command_does_not_load(arguments: tuple[str, ...], store: str) -> None:
    names = loaded_by("-C", store, *arguments)
    assert "kvfs.runtime.open_store" in names
    found = names & {*HEAVY, *WORK}
    assert not found, f"`kvfs {' '.join(arguments)}` loads {sorted(found)}; see python -X importtime -m kvfs.cli.main"


def test_config_opens_no_index(store: str) -> None:
    assert not loaded_by("-C", store, "config") & {
        *HEAVY,
        *WORK,
        "lmdb",
        "kvfs.runtime.open_store",
        "kvfs.catalog.catalog",
    }


@pytest.mark.parametrize("arguments", [("verify",), ("gc",), ("warm", "alpha"), ("pin", "ls")], ids=" ".join)
def test_modules_that_the_other_commands_do_not_load(arguments: tuple[str, ...], store: str) -> None:
    assert not loaded_by("-C", store, *arguments) & {*HEAVY, "kvfs.maintenance.recompress", "kvfs.pages.hf_config"}


def test_an_engine_imports_before_it_serves(store: str) -> None:
    """A process that may fork imports nothing in a background thread: the child would find a module half imported."""
    at_once = loaded_after(f"import kvfs\nstore = kvfs.open({store!r})")
    assert set(WORK[:8]) <= at_once
    later = loaded_after(f"import kvfs, time\nstore = kvfs.open({store!r})\ntime.sleep(2.5)")
    assert {n for n in later - at_once if n.startswith("kvfs.")} == set()
