"""``kvfs verify``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvfs.cli import text
from kvfs.cli.app import EXIT_PROBLEMS, App, Command, common
from kvfs.cli.output import shown

if TYPE_CHECKING:
    from kvfs.maintenance.verify import Verification


@click.command(
    "verify",
    cls=Command,
    examples=("kvfs verify", "kvfs verify --sample 5% --seed 7", "kvfs verify --all --repair"),
)
@click.option("--sample", metavar="SHARE", help="Check the bytes of this share of all pages, like 5% or 0.05.")
@click.option("--all", "everything", is_flag=True, help="Check the bytes of every page.")
@click.option("--seed", type=int, metavar="N", help="Seed that selects the pages of a sample.  [default: 0]")
@click.option("--repair", is_flag=True, help="Remove bad pages from the index, rebuild it, move foreign files away.")
@common
@click.pass_obj
def verify_command(app: App, sample: str | None, everything: bool, seed: int | None, repair: bool) -> int:
    """Check the structure of all segments and the index against them; with --sample or --all also the bytes of pages.

    Exit code 3 if problems were found (with --repair: if any are left).
    """
    if everything and sample is not None:
        raise click.UsageError("--all and --sample exclude each other")
    if seed is not None and sample is None:
        raise click.UsageError("--seed belongs to --sample: add it, or leave it out")
    share = 1.0 if everything else 0.0 if sample is None else _share(sample)
    super_written = repair and not app.read_only and _restore_super(app.path)
    with app.open(write=repair) as store:
        report = store.verify(share, repair=repair, seed=seed or 0, progress=shown(app.out, "verifying"))
        left = report
        if repair and not report.ok:
            store.wait_ready(600.0)
            left = store.verify(share, seed=seed or 0, progress=shown(app.out, "verifying again"))
    report.repaired += super_written
    data = {
        "ok": left.ok, "sample": share, **asdict(report),
        "left": None if left is report else {"ok": left.ok, "problems": left.problems},
    }  # fmt: skip
    app.out.result(data, lambda: _report(report, left, share), report.problems)
    return 0 if left.ok else EXIT_PROBLEMS


def _restore_super(path: str) -> bool:
    from kvfs.errors import StoreNotFoundError
    from kvfs.maintenance.verify import restore_super
    from kvfs.system.files import Files

    try:
        return restore_super(path, Files())
    except StoreNotFoundError:  # said when the store is opened
        return False


def _report(report: Verification, left: Verification, share: float) -> Iterable[str]:
    yield from report.problems
    yield (
        f"checked {report.segments} segments, {text.count(report.index_pages)} index entries, the bytes of "
        f"{text.count(report.pages)} pages ({text.size(report.bytes)})"
    )
    if report.ok:
        yield (
            "no problems found" if share else "no problems found in the structure; --sample 5% or --all also read pages"
        )
        return
    yield (
        f"found   {report.bad_pages} bad pages, {report.bad_segments} bad segments, "
        f"{report.index_errors} index errors, {report.foreign_files} foreign files"
    )
    if left is report:
        yield "Nothing was changed. Run `kvfs verify --repair` with the same options to repair it."
    else:
        yield f"repaired {report.repaired}; " + ("no problems are left" if left.ok else "problems are left:")
        yield from left.problems


def _share(sample: str) -> float:
    from kvfs.errors import ConfigError

    try:
        share = float(sample[:-1]) / 100 if sample.endswith("%") else float(sample)
    except ValueError:
        share = -1.0
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"--sample is {sample!r}: give a share like 5% or 0.05, above 0 and up to 100%")
    return share
