"""Mutants: small changes of the source that tests must notice.

    python -m tools.mutants draw FOLDER [--size 1000 --seed 1]   a random sample, a new session
    python -m tools.mutants run FOLDER [--seconds N]             judge what is pending; stop and go on at any time
    python -m tools.mutants again FOLDER                         judge the survivors with today's tests
    python -m tools.mutants report FOLDER [--survivors]          counts for each package; what survived
    python -m tools.mutants named [--only TEXT]                  plant the bugs of tools/mutations.py

cosmic-ray makes the mutants and keeps the session, so its own reports (cr-report, cr-html) read FOLDER/session.sqlite.
It can neither sample nor choose tests for each mutant; this tool adds both. A session works on a copy of the sources.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tools.mutants.excuses import excused
from tools.mutants.tree import ROOT, Tree, Verdict, load_libraries
from tools.mutations import MUTATIONS

if TYPE_CHECKING:
    from cosmic_ray.work_db import WorkDB
    from cosmic_ray.work_item import MutationSpec

#: Packages that decide what is stored, found, charged and dropped: the sample is of them.
PACKAGES = (
    "format", "segments", "index", "write", "read", "lookup", "eviction", "directory", "maintenance", "transfer",
)  # fmt: skip
#: Tests of other packages that see much of the store, asked together with those of the mutant's own package.
BROAD = ("tests/test_namespace.py", "tests/test_store_open.py", "tests/crash/test_order_of_writes.py")
#: Any of these may run a mutant's function: all that do not drive a GPU, an engine or the documentation.
WIDE = (
    "tests/bundles", "tests/catalog", "tests/cli", "tests/crash", "tests/directory", "tests/eviction", "tests/format",
    "tests/fuzz", "tests/golden", "tests/index", "tests/lookup", "tests/maintenance", "tests/multiprocess",
    "tests/native", "tests/property", "tests/read", "tests/runtime", "tests/security", "tests/segments", "tests/system",
    "tests/transfer", "tests/write", "tests/test_store_switches.py", "tests/test_architecture.py", "tests/metrics",
    "tests/pages", "tests/doctor", "tests/ranks", "tests/mount", "tests/remote",
)  # fmt: skip
NAMED_SECONDS = 900.0  # of all tests of a named bug; a busy machine must not look like a hang
NEAR_SECONDS, WIDE_SECONDS = 5.0, 20.0  # of one test that runs the mutant's function, and of one of all others
FIRST_TESTS, REACHED_SECONDS = 8, 120.0  # that are asked at once; of all tests that run the mutant's function

FOLDER = click.argument("folder", type=click.Path(file_okay=False, path_type=Path))


@click.group(help=__doc__)
def main() -> None:
    pass


@contextmanager
def session(folder: Path) -> Iterator[WorkDB]:
    from cosmic_ray.work_db import WorkDB, use_db

    if not (folder / "session.sqlite").exists():
        raise click.ClickException(f"{folder} has no session: python -m tools.mutants draw {folder}")
    with use_db(str(folder / "session.sqlite"), WorkDB.Mode.open) as db:
        yield db


@main.command(help="Draw a sample, and copy the sources that it is of.")
@FOLDER
@click.option("--size", default=1000, show_default=True)
@click.option("--seed", default=1, show_default=True)
def draw(folder: Path, size: int, seed: int) -> None:
    from tools.mutants import sample

    if (folder / "session.sqlite").exists():
        raise click.ClickException(f"{folder} has a session already: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    tree = Tree(folder)
    tree.copy()
    total = sample.create(folder / "session.sqlite", tree.root, PACKAGES, size, seed)
    click.echo(f"{total} mutants, controls included")


def package_of(path: Path) -> str:
    return path.parent.name


def exists(tree: Tree, *paths: str) -> list[str]:
    return [path for path in paths if (tree.root / path).exists()]


def near(tree: Tree, path: Path) -> list[str]:
    return exists(tree, f"tests/{package_of(path)}", *BROAD)


def ranked(tree: Tree, path: Path, line: int) -> list[str]:
    """The tests that run the function at a line, the most promising first, as many as REACHED_SECONDS allow."""
    name = str(path.relative_to(tree.root))
    known = tree.known
    found = tree.reach.of(name, path.read_text(encoding="utf-8"), line)
    found = [t for t in found if t not in known.failing and known.seconds.get(t, 0.0) <= NEAR_SECONDS]
    found.sort(
        key=lambda test: (*known.rank(name, test)[:2], package_of(path) not in test, known.seconds.get(test, 0.0))
    )
    spent = accumulate(known.seconds.get(test, 0.0) for test in found)
    return [test for test, seconds in zip(found, spent, strict=True) if seconds <= REACHED_SECONDS]


def judge(tree: Tree, path: Path, text: str, line: int, *, new: bool = False, wide: bool = False) -> Verdict:
    """The tests that run the mutant's function. ``new``: before them those near it that were not seen without a bug.
    ``wide``: after them all others.
    """
    name = str(path.relative_to(tree.root))
    chosen = ranked(tree, path, line)
    passes: list[tuple[Sequence[str], Collection[str] | None, float]] = []
    if new:
        passes.append((near(tree, path), None, 0.0))
    passes += [
        (sorted({test.partition("::")[0] for test in some}), some, NEAR_SECONDS)
        for some in (chosen[:FIRST_TESTS], chosen[FIRST_TESTS:])
        if some
    ]
    if not chosen:  # a module of constants, or a function that only child processes run
        passes.append((near(tree, path), None, NEAR_SECONDS))
    if wide:
        passes.append(([*near(tree, path), *exists(tree, *WIDE)], None, WIDE_SECONDS))
    verdict = Verdict(False, "", frozenset(), 0.0)
    with tree.changed(name, text):
        for tests, only, seconds_max in (one for one in passes if one[0]):  # without a name pytest would run all
            last = tree.run(tests, name, only=only, seconds_max=seconds_max, skip=verdict.ran)
            verdict = last._replace(ran=verdict.ran | last.ran, seconds=verdict.seconds + last.seconds)
            if verdict.noticed:
                break
    return verdict


def mutated(change: MutationSpec) -> str:
    """The text of a module with one change."""
    import cosmic_ray.plugins
    from cosmic_ray.mutating import mutate_code

    from tools.mutants import sample

    assert sample  # its own operator is known from now on
    operator = cosmic_ray.plugins.get_operator(change.operator_name)()
    text = mutate_code(change.module_path.read_text(encoding="utf-8"), operator, change.occurrence)
    if text is None:
        raise click.ClickException(f"{change}: the source has changed since the sample was drawn")
    return str(text)


def files_of_tests(tree: Tree) -> list[str]:
    """The files whose tests may be asked: those near the mutants first, since a run may end while it learns."""
    here = [f"tests/{package}" for package in PACKAGES]
    paths = (tree.root / path for path in exists(tree, *here, *BROAD, *WIDE))
    files = (file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path]))
    return list(dict.fromkeys(str(file.relative_to(tree.root)) for file in files))


def learn(tree: Tree, end: float) -> bool:
    """Run tests without a bug, each once: their seconds, which of them fail here, and which functions they run.

    File by file, so that a run which ends meanwhile goes on where it was. Whether all are known.
    """
    load_libraries()
    for file in files_of_tests(tree):
        if tree.reach.files.get(file) == tree.digest(file):
            continue
        if time.monotonic() > end:
            return False
        verdict = tree.run([file], learn=True)
        click.echo(f"{file}: {len(verdict.ran)} tests without a mutant in {verdict.seconds:.0f} s")
    click.echo(f"failing without a mutant: {tree.known.failing}")
    return True


def work(
    folder: Path, db: WorkDB, items: list[Any], seconds: float, *, new: bool = False, wide: bool, known: bool
) -> None:
    from cosmic_ray.mutating import _make_diff
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    tree, end = Tree(folder), time.monotonic() + seconds
    if known:
        load_libraries()
    elif not learn(tree, end):
        return
    for item in items:
        if time.monotonic() > end:
            return
        (change,) = item.mutations
        before, after = change.module_path.read_text(encoding="utf-8"), mutated(change)
        verdict = judge(tree, change.module_path, after, change.start_pos[0], new=new, wide=wide)
        name = change.module_path.relative_to(tree.root)
        result = WorkResult(
            WorkerOutcome.NORMAL,
            json.dumps({"by": verdict.by, "seconds": round(verdict.seconds, 1), "tests": len(verdict.ran)}),
            TestOutcome.KILLED if verdict.noticed else TestOutcome.SURVIVED,
            "\n".join(_make_diff(before, after, name)[1:]),
        )
        db.set_result(item.job_id, result)
        click.echo(f"{item.job_id} {name}:{change.start_pos[0]} {verdict.by or 'SURVIVED'} ({verdict.seconds:.0f} s)")


SECONDS = click.option("--seconds", default=1e9, show_default="no limit", help="Start no further mutant after this.")
KNOWN = click.option(
    "--known", is_flag=True, help="Learn no further tests: ask those whose functions are noted already."
)
WIDER = click.option("--wide", is_flag=True, help="Ask all tests, not only those seen to run the mutant's function.")


@main.command(help="Judge the mutants that have no result yet.")
@FOLDER
@SECONDS
@WIDER
@KNOWN
def run(folder: Path, seconds: float, wide: bool, known: bool) -> None:
    with session(folder) as db:
        work(folder, db, sorted(db.pending_work_items, key=lambda item: item.job_id), seconds, wide=wide, known=known)


@main.command(help="Judge the survivors once more, with the tests as they are now.")
@FOLDER
@SECONDS
@WIDER
@KNOWN
@click.option("--only", multiple=True, help="Numbers of mutants, as report --survivors shows them; default: all.")
def again(folder: Path, seconds: float, wide: bool, known: bool, only: tuple[str, ...]) -> None:
    Tree(folder).copy(("tests", "tools"))
    with session(folder) as db:
        pairs = sorted(db.completed_work_items, key=lambda pair: pair[0].job_id)
        items = [item for item, result in pairs if not result.is_killed and not is_control(item)]
        items = [i for i in items if not only or i.job_id in only]
        work(folder, db, items, seconds, new=True, wide=wide, known=known)


def is_control(item: Any) -> bool:
    return bool(item.mutations[0].operator_name == "core/NoOp")


@main.command(help="Counts for each package.")
@FOLDER
@click.option("--survivors", is_flag=True, help="Show the mutants that no test noticed and no line excuses.")
def report(folder: Path, survivors: bool) -> None:
    counts: dict[str, Counter[str]] = {}
    with session(folder) as db:
        total = db.num_work_items
        done = sorted(db.completed_work_items, key=lambda pair: (str(pair[0].mutations[0].module_path), pair[0].job_id))
    for item, result in done:
        (change,) = item.mutations
        count = counts.setdefault("controls" if is_control(item) else package_of(change.module_path), Counter())
        count["run"] += 1
        count["noticed"] += result.is_killed
        if not result.is_killed and not is_control(item):
            name = str(change.module_path).partition("/tree/")[2]
            why = excused(name, result.diff or "")
            count["excused"] += why is not None
            if survivors and why is None:
                click.echo(f"{item.job_id} {name}:{change.start_pos[0]} {change.operator_name}\n{result.diff}\n")
    everything: Counter[str] = sum((c for name, c in counts.items() if name != "controls"), Counter())
    click.echo("package run noticed share excused")
    for name, count in [*sorted(counts.items()), ("all but controls", everything)]:
        share = f"{count['noticed'] / count['run']:.3f}" if count["run"] else "-"
        click.echo(f"{name} {count['run']} {count['noticed']} {share} {count['excused']}")
    click.echo(f"{total - len(done)} pending")


@main.command(help="Plant each bug of tools/mutations.py, and run the tests that must notice it.")
@click.option("--only", default="", help="Bugs whose names contain this.")
def named(only: str) -> None:
    missed = 0
    with tempfile.TemporaryDirectory(prefix="kvfs-mutants-") as folder:
        tree = Tree(Path(folder))
        tree.copy()
        load_libraries()
        for mutation in (m for m in MUTATIONS if only in m.name):
            with tree.changed(mutation.path, mutation.planted(tree.root)):
                verdict = tree.run(mutation.tests, mutation.path, limit=NAMED_SECONDS)
            missed += not verdict.noticed
            click.echo(f"{'noticed' if verdict.noticed else 'MISSED'}: {mutation.name}: {verdict.by}")
            if verdict.by.startswith("exit status"):  # the tests did not run
                click.echo(tree.output.read_text(errors="replace")[-400:])
                missed += 1
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(prog_name="python -m tools.mutants")
