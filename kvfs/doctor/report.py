"""A file to attach to a report: findings, settings, counts and versions; no pages, no tokens, no salts."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
import sys
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

from kvfs.directory import config
from kvfs.directory.root import Directory, check_output, translate_os_errors
from kvfs.directory.shared_counters import SharedCounters
from kvfs.doctor.findings import Finding
from kvfs.errors import ConfigError
from kvfs.system.files import Files

PACKAGES = (
    "kvfs", "click", "lmdb", "tomlkit", "watchdog", "xxhash", "zstandard", "torch", "triton", "transformers", "vllm",
    "sglang", "lmcache", "numpy",
)  # fmt: skip
SECRETS = frozenset({"KVFS_SALT"})


def check(path: str) -> None:
    """ConfigError names what is wrong with the name of a report: a file that exists, for example."""
    check_output(path)
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already: choose another name")


def write(path: str, findings: Sequence[Finding], texts: Mapping[str, str]) -> None:
    """Write a gzipped tar of small text files to ``path``: the findings, versions, and ``texts`` of the store."""
    members = {
        "findings.json": json.dumps([f._asdict() for f in findings], indent=1).encode(),
        "versions.json": json.dumps(versions(), indent=1).encode(),
        **{name: text.encode() for name, text in texts.items()},
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"kvfs-report/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with translate_os_errors(path), open(path, "xb", opener=_private) as file:
        file.write(packed.getvalue())


def versions() -> dict[str, Any]:
    """What runs here: Python, kernel, packages, and the variables of kvfs that are no secret."""
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    variables = {k: v for k, v in sorted(os.environ.items()) if k.startswith("KVFS_") and k not in SECRETS}
    return {
        "python": sys.version, "kernel": platform.release(), "machine": platform.machine(), "cores": os.cpu_count(),
        "packages": installed, "environment": variables,
    }  # fmt: skip


def of_store(store: str) -> dict[str, str]:
    """Counts and settings of a store, by the name of the file that they become."""
    directory = Directory(store, Files(), read_only=True)
    with contextlib.closing(directory):
        found = {"totals.json": json.dumps(SharedCounters(directory).total(), indent=1)}
        with contextlib.suppress(OSError):
            settings = directory.read_small("kvfs.toml", config.TOML_BYTES_MAX) or b""
            found["kvfs.toml"] = settings.decode(errors="backslashreplace")
    return found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
