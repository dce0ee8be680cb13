"""Child processes: what they are told, and what they must not depend on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvfs.system import child_process


def test_a_child_gets_its_setup_and_descriptors_and_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program_of_a_child.py").write_text(
        "import json, os, sys\n"
        "def main():\n"
        "    setup = json.loads(sys.argv[2])\n"
        "    os.write(setup['fd'], repr((setup['name'], os.getsid(0) == os.getpid(), sys.stdin.read())).encode())\n"
    )
    monkeypatch.setattr(sys, "path", [Path("/ignored"), *sys.path, str(tmp_path)])
    reader, writer = os.pipe()
    try:
        process = child_process.start("program_of_a_child", {"fd": writer, "name": "bucket"}, [writer])
    finally:
        os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    assert process.wait(60) == 0
    assert said == repr(("bucket", True, "")).encode()
