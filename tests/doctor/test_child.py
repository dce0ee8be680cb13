"""The checks run in a child: whatever a disk does with it, the command reads what it found and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import kvfs
from kvfs.doctor import child
from kvfs.doctor.findings import BAD
from kvfs.system.files import Files
from tests.cli.commands import called

ANSWERS = """
import json, os, sys, time
def main():
    line = json.dumps({"findings": [["disk", "bad", "it hangs", "look at dmesg", {}]], "report": {}}) + "\\n"
    os.write(json.loads(sys.argv[2])["fd"], line.encode())
    time.sleep(5)
"""
DIES = "def main(): raise SystemExit(1)\n"


def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Run ``text`` as the child."""
    (tmp_path / "another_child.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child, "MODULE", "another_child")


def test_a_child_that_does_not_even_end_by_sigkill_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, monkeypatch, ANSWERS)
    killed: list[int] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: killed.append(process.pid))
    begin = time.monotonic()
    found, texts = child.findings(str(tmp_path))
    took = time.monotonic() - begin
    os.kill(killed[0], signal.SIGKILL)
    os.waitpid(killed[0], 0)
    assert took < 4 and not texts
    assert [(f.check, f.status, f.detail) for f in found] == [("disk", BAD, "it hangs")]


def test_a_child_that_dies_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, monkeypatch, DIES)
    (found,), _ = child.findings(str(tmp_path))
    assert found.status == BAD and "ended" in found.detail


def test_errors_of_the_child_are_raised(tmp_path: Path) -> None:
    with pytest.raises(kvfs.StoreNotFoundError, match="none"):
        child.findings(str(tmp_path / "none"))


def test_the_command_itself_touches_no_file_of_the_store(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kvfs.open(store_path, capacity="64MiB").close()
    touched: list[str] = []

    def open_root(_: Files, path: str) -> int:
        touched.append(path)
        return os.open(path, os.O_PATH)

    monkeypatch.setattr(Files, "open_root", open_root)
    done = called("-C", str(store_path), "doctor", "--bundle", str(store_path.parent / "report.tar.gz"))
    assert done.returncode == 0 and "0 bad" in done.stdout and not touched
