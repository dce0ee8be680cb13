"""``kvfs doctor``: problems around the store, with remedies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import click

from kvfs.cli import text
from kvfs.cli.app import EXIT_PROBLEMS, FILE, App, Command, common

_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "bad": ("BAD ", "red")}


@click.command(
    "doctor", cls=Command, examples=("kvfs doctor", "kvfs doctor --bundle report.tar.gz", "kvfs doctor --json")
)
@click.option(
    "--bundle", type=FILE, metavar="FILE", help="Also write the findings, settings and versions to FILE, for a report."
)
@common
@click.pass_obj
def doctor_command(app: App, bundle: str | None) -> int:
    """Check file system, limits, locks and holders, dead processes, memory, page cache, bucket, GPUs; name remedies.

    Does not open the index and changes nothing. Exit code 3 if something is bad (warnings do not count).
    """
    from kvfs.doctor import child, report
    from kvfs.errors import StoreNotFoundError

    if bundle is not None:
        report.check(bundle)
    try:
        findings, texts = child.findings(app.path, with_report=bundle is not None)
    except StoreNotFoundError:
        raise app.no_store() from None
    if bundle is not None:
        report.write(bundle, findings, texts)
        app.out.note(f"wrote {bundle}: look at its files before you attach it to a report")
    counts = Counter(f.status for f in findings)
    data = {
        "findings": [
            {"check": f.check, "status": f.status, "detail": f.detail, "remedy": f.remedy, "data": f.data}
            for f in findings
        ],
        "ok": counts["ok"],
        "warn": counts["warn"],
        "bad": counts["bad"],
    }

    def lines() -> Iterable[str]:
        for f in findings:
            mark, color = _MARKS[f.status]
            yield text.Marked(f"{mark}  {f.check:<16}  {f.detail}", len(mark), color)
            if f.remedy:
                yield f"{'':24}-> {f.remedy}"
        yield f"{counts['ok']} ok, {counts['warn']} warnings, {counts['bad']} bad"

    app.out.result(data, lines, (f.check for f in findings if f.status != "ok"))
    return EXIT_PROBLEMS if counts["bad"] else 0
