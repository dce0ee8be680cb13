"""The examples run, and the files in docs/deploy and .github are what their readers expect."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.cli.main import COMMANDS
from tests.cli.commands import called

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
DEPLOY = ROOT / "docs" / "deploy"
UNITS = sorted([*DEPLOY.glob("*.service"), *DEPLOY.glob("*.timer")])
#: A command of kvfs in a shell command line, a compose file or a manifest
USES = re.compile(r"\bkvfs (?:-C \S+ )?([a-z]+)((?: --?[a-z]+(?:[ =][^-\s;,\"']+)?)*)")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVFS_")}
    for _ in range(2):  # with what the first run left
        done = subprocess.run(
            [sys.executable, str(example), str(tmp_path / "store")], env={**kept, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout and not done.stderr


@pytest.mark.parametrize("folder", ["examples", "deploy"])
def test_the_page_of_a_folder_lists_its_files(folder: str) -> None:
    text = (ROOT / "docs" / folder / "README.md").read_text(encoding="utf-8")
    names = {p.name for p in (ROOT / "docs" / folder).iterdir() if p.is_file() and p.name != "README.md"}
    assert names == set(re.findall(r"\]\(([\w.-]+)\)", text))


@pytest.mark.parametrize("name", ["compose.yml", "daemonset.yml", "kvfs-verify.service", "kvfs-metrics.service"])
def test_commands_in_deployment_files_have_the_options_that_they_use(name: str) -> None:
    file = DEPLOY / name
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith(("#", "Descr"))]
    used = USES.findall("\n".join(lines).replace('", "', " "))
    assert used, f"no command found in {name}"
    for command, options in used:
        assert command in COMMANDS, f"{file.name}: kvfs {command}"
        known = called(command, "--help").stdout
        for option in re.findall(r"--?[a-z-]+", options):
            assert re.search(rf"(?<!\S){option}(?![a-z-])", known), f"{file.name}: kvfs {command} {option}"


def unit(file: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(file.read_text(encoding="utf-8"))
    return parser


@pytest.mark.parametrize("file", UNITS, ids=lambda p: p.name)
def test_units_of_systemd_have_their_sections(file: Path) -> None:
    parser = unit(file)
    assert parser.get("Unit", "Description")
    if file.suffix == ".timer":
        assert file.with_suffix(".service").exists()
        assert parser.get("Install", "WantedBy") == "timers.target"
    else:
        assert parser.get("Service", "Type") == "oneshot"


@pytest.mark.parametrize("name", ["verify", "metrics"])
def test_the_command_of_a_unit_runs(name: str, store_path: Path, tmp_path: Path) -> None:
    """As systemd would run it: %% is a percent sign, and the words are split as by a shell."""
    with kvfs.open(store_path, capacity="64MiB"):
        pass
    service = unit(DEPLOY / f"kvfs-{name}.service")
    words = shlex.split(service.get("Service", "ExecStart").replace("%%", "%"))
    variables = dict(word.split("=", 1) for word in service.get("Service", "Environment").split())
    assert variables["KVFS_DIR"] == "/srv/kvfs"
    shim = tmp_path / "bin" / "kvfs"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvfs.cli.main "$@"\n')
    shim.chmod(0o755)
    textfile = tmp_path / "kvfs.prom"
    changed = {"KVFS_DIR": str(store_path), "TEXTFILE": str(textfile), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, env={**os.environ, **variables, **changed, "PATH": f"{shim.parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no problems found" in done.stdout if name == "verify" else "kvfs_" in textfile.read_text()


YAML = [*sorted(DEPLOY.glob("*.yml")), *sorted((ROOT / ".github").rglob("*.yml"))]


@pytest.mark.parametrize("file", YAML, ids=lambda p: p.name)
def test_yaml_is_yaml(file: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    document: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(document, dict) and document
    if file.name == "ci.yml":
        steps = [step.get("run", "") for job in document["jobs"].values() for step in job["steps"]]
        assert any((ROOT / step).is_file() for step in steps if step.startswith(".ci/"))
    if file.parent.name == "ISSUE_TEMPLATE" and "body" in document:
        assert all(part["type"] in ("markdown", "textarea", "input", "checkboxes") for part in document["body"])
