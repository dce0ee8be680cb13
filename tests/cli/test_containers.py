"""One store in several containers, simulated by namespaces: equal pids, a read-only bind mount."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvfs
from tests.cli.commands import environment
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of

pytestmark = pytest.mark.needs_root("makes PID and mount namespaces")

ENGINE = """
import os, sys
import kvfs
from tests.stores import TINY_BYTES, seeded, tiny, tokens_of
assert os.getpid() == 1
with kvfs.open(sys.argv[1]) as store:
    ns = store.namespace("alpha", tiny(), "1a")
    for i in range(int(sys.argv[2]), int(sys.argv[2]) + 20):
        assert ns.put(tokens_of(i, 10), seeded(i, 10 * TINY_BYTES)).declined == 0
"""


def unshared(*command: str) -> list[str]:
    """The command as pid 1 of new PID and mount namespaces."""
    tool = shutil.which("unshare")
    if tool is None:
        pytest.skip("there is no unshare here")
    return [tool, "--pid", "--fork", "--mount-proc", *command]


def may_unshare() -> bool:
    return subprocess.run(unshared("true"), capture_output=True, timeout=30).returncode == 0


@pytest.fixture
def path(store_path: Path) -> Path:
    if not may_unshare():
        pytest.skip("namespaces are not allowed here")
    with kvfs.open(store_path, capacity="64MiB") as store:
        store.namespace("alpha", tiny(), "1a").put(tokens_of(999, 10), seeded(999, 10 * TINY_BYTES))
    return store_path


def test_processes_with_equal_pids_write_one_store_and_the_command_sees_them_all(path: Path) -> None:
    engines = [
        subprocess.Popen(unshared(sys.executable, "-c", ENGINE, str(path), str(100 * n)), env=environment())
        for n in range(3)
    ]
    assert [e.wait(60) for e in engines] == [0, 0, 0]
    shown = subprocess.run(
        unshared(sys.executable, "-m", "kvfs.cli.main", "-C", str(path), "inspect", "--json"),
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert json.loads(shown.stdout)["namespaces"][0]["pages"] == 610, shown.stderr
    with kvfs.open(path) as store:
        assert store.verify().ok and store.stats()["totals"]["pages_stored"] == 610


def test_on_a_read_only_mount_the_command_reads_and_refuses_to_write(path: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    kvfs_command = f'"{sys.executable}" -m kvfs.cli.main -C {inside}'
    script = (
        f"mount --bind {path} {inside} && mount -o remount,ro,bind {inside} || exit 77; "
        f"{kvfs_command} ls --json && {kvfs_command} doctor -q; {kvfs_command} rm alpha -y; echo code $?"
    )
    done = subprocess.run(unshared("sh", "-c", script), env=environment(), capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("bind mounts are not allowed here")
    assert '"pages": 10' in done.stdout and done.stdout.endswith("code 1\n"), done.stdout + done.stderr
    assert "read-only" in done.stderr.lower() and "Traceback" not in done.stderr
