"""Loading, switching off, and refusing the native library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.native import library
from tools import build_native

ROOT = Path(__file__).resolve().parents[2]


def state_of(**environment: str) -> str:
    """``library.state()`` of a new process."""
    done = subprocess.run(
        [sys.executable, "-c", "from kvfs.native import library; print(library.state())"],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_variable_switches_it_off(native: library.Library) -> None:
    assert state_of(KVFS_NATIVE="0") == "off: KVFS_NATIVE=0" and state_of(KVFS_NATIVE="1") == "on"


def test_what_was_not_built_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "NAME", "none such.so")
    monkeypatch.delenv("KVFS_NATIVE", raising=False)
    assert library._load.__wrapped__() == (None, "off: not built")


def test_another_version_is_refused(native: library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    monkeypatch.delenv("KVFS_NATIVE", raising=False)
    loaded, why = library._load.__wrapped__()
    assert loaded is None and f"has version {library.ABI - 1} of the interface" in why


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"not ELF")
    with pytest.raises(OSError):
        library.Library(str(tmp_path / "broken.so"))


def test_the_constants_are_those_of_the_header() -> None:
    header = (ROOT / "native" / "kvfs_native.h").read_text(encoding="utf-8")
    assert f"#define KVFS_ABI {library.ABI} " in header and f"KVFS_MOVED = {library.MOVED} " in header
    for name in ("PREFIX", "PARTS", "CELLS", "RUNS", "ROWS", "SEGMENTS", "KEYS"):
        assert f"KVFS_{name}_MAX = {getattr(library, name + '_MAX')}" in header
    assert f"KVFS_FEATURE_SHA = {library.FEATURE_SHA}," in header


def test_every_public_function_is_declared(native: library.Library) -> None:
    header = (ROOT / "native" / "kvfs_native.h").read_text(encoding="utf-8")
    public = {line.split("(")[0].split()[-1].lstrip("*") for line in header.splitlines() if line.startswith("KVFS_PUB")}
    assert public == set(library._FUNCTIONS)


def test_without_a_compiler_there_is_one_line_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_native.main([]) == 1
    assert capsys.readouterr().err == "no C compiler (cc, gcc, clang) on PATH\n"
    monkeypatch.setenv("CC", "/none/such/compiler")
    assert build_native.main([]) == 1
    assert "/none/such/compiler: No such file" in capsys.readouterr().err
