"""Settings and fixtures of all tests."""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# tests/vllm and tests/sglang need their engine, which pins its own torch: `make test-vllm` and `make test-engines` run
# them in environments of their own.
HAS_ENGINE = {name: importlib.util.find_spec(name) is not None for name in ("vllm", "sglang")}
collect_ignore = [name for name, there in HAS_ENGINE.items() if not there]

# Kernels run under the interpreter. Here, since torch may import triton first; 0 where tests run on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# "ci", the default: the same examples on every run, and no deadline on a loaded machine.
# HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile(
    "explore", max_examples=2000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# A shell's background job ignores SIGINT, and so do its children: tests that interrupt a process would fail there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> list[str]:
    from kvfs.native import library

    lines = [f"native library: {library.state()}"]
    for name, target in (("vllm", "test-vllm"), ("sglang", "test-engines")):
        absent = f"not installed, tests/{name} are left out (make {target} runs them)"
        lines.append(f"{name}: {'installed' if HAS_ENGINE[name] else absent}")
    return lines


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """Where a test may create a store; it does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory on tmpfs if the host has one, for tests that make very many stores: nothing waits for a disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="kvfs-test-", dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def python_only() -> Iterator[None]:
    """Without the native library: what a test counts or disturbs is in the Python path."""
    from kvfs.native import library

    with library.paused():
        yield


@pytest.fixture
def disk_path(tmp_path: Path) -> Path:
    """A directory on a file system that supports O_DIRECT."""
    from kvfs.directory import io_mode
    from kvfs.directory.config import make_settings
    from kvfs.errors import ConfigError
    from kvfs.system.files import Files

    try:
        io_mode.check(str(tmp_path), make_settings("16MiB", mode="staging"), Files())
    except ConfigError as exc:
        pytest.skip(f"needs a disk: {exc}")
    return tmp_path


def _why(marker: pytest.Mark) -> str:
    if len(marker.args) != 1 or not isinstance(marker.args[0], str):
        pytest.fail(f"@pytest.mark.{marker.name} takes one argument, the reason", pytrace=False)
    return marker.args[0]


def _no_gpu() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    root = os.geteuid() == 0
    for marker in item.iter_markers("needs_root"):
        why = _why(marker)
        if not root:
            pytest.skip(f"only as root: {why}")
    for marker in item.iter_markers("not_as_root"):
        why = _why(marker)
        if root:
            pytest.skip(f"not as root: {why}")
    if item.get_closest_marker("gpu") is not None and (missing := _no_gpu()) is not None:
        pytest.skip(f"needs a GPU: {missing}")
