"""Plant each bug of ``tools/mutations.py`` in a copy of the tree, and run the tests that must notice it.

    python -m tools.mutate [--only TEXT] [--jobs N]

The exit status is 1 if a bug was missed. The copy is made in the temporary directory and removed at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from tools.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
TEST_SECONDS, SECONDS_MAX = 180, 900  # of one test and of all tests of a bug; a busy machine must not look like a hang
SOURCES = ("kvfs", "tools", "tests", "docs", "pyproject.toml", "README.md", "Makefile")


def plant(mutation: Mutation, root: Path) -> None:
    """Change the source in ``root``. ValueError unless the text to replace occurs exactly once."""
    file = root / mutation.path
    text = file.read_text()
    if text.count(mutation.old) != 1:
        found = text.count(mutation.old)
        raise ValueError(f"{mutation.name}: {mutation.path} has the replaced text {found} times, not once: update it")
    file.write_text(text.replace(mutation.old, mutation.new))


def judge(mutation: Mutation) -> tuple[str, str]:
    """("caught", by which test), ("missed", ""), or ("broken", why) if the tests did not run."""
    with tempfile.TemporaryDirectory(prefix="kvfs-mutant-") as folder:
        root = Path(folder) / "tree"
        root.mkdir()
        for name in SOURCES:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, root / name)
        plant(mutation, root)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--timeout={TEST_SECONDS}",
            *mutation.tests,
        ]
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
            )
        except subprocess.TimeoutExpired:
            return "caught", f"no end within {SECONDS_MAX} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if "Timeout" in done.stdout + done.stderr and not failed:
        return "caught", "a test that did not end"
    if done.returncode == 0:
        return "missed", ""
    if done.returncode != 1 or not failed:
        return "broken", (done.stdout + done.stderr)[-400:]
    return "caught", failed[0].partition(" ")[2].partition(" - ")[0]


def judge_all(mutations: list[Mutation], jobs: int) -> Iterator[tuple[Mutation, str, str]]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from ((m, *verdict) for m, verdict in zip(mutations, pool.map(judge, mutations), strict=True))


@click.command(help=__doc__)
@click.option("--only", default="", help="Mutations whose names contain this.")
@click.option("--jobs", default=1, show_default=True, help="Bugs judged at the same time.")
def main(only: str, jobs: int) -> None:
    counts = {"caught": 0, "missed": 0, "broken": 0}
    for mutation, verdict, by in judge_all([m for m in MUTATIONS if only in m.name], jobs):
        counts[verdict] += 1
        click.echo(f"{verdict}: {mutation.name}{': ' + by if by else ''}")
    click.echo(" ".join(f"{name}={n}" for name, n in counts.items()))
    if counts["missed"] or counts["broken"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
