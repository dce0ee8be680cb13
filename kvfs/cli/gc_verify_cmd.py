"""``kvfs gc`` and ``kvfs verify``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import recompress_cmd, text
from kvfs.cli.app import EXIT_PROBLEMS, App, common

if TYPE_CHECKING:
    from kvfs.eviction.dry_run import GcPlan
    from kvfs.maintenance.verify import Verification
    from kvfs.store import Store

STEPS_SHOWN = 10


@click.command("gc")
@click.option("--apply", is_flag=True, help="Evict. Without it only the plan is shown.")
@click.option("--target", metavar="SIZE", help="Segments may use so much afterwards; default: the limit.")
@click.option("--max-duration", metavar="TIME", help="Stop evicting or recompressing after this long.")
@click.option("--recompress", is_flag=True, help="In place of evicting: write cold segments anew, in a codec.")
@click.option("--codec", metavar="NAME", help="Of --recompress: planes (default) or zstd.")
@click.option("--idle", metavar="TIME", help="Of --recompress: cold is what was not used for so long; default 1h.")
@click.option(
    "--explain", metavar="KEY", help="Say why the page whose hash begins with KEY stays, or when it would go."
)
@common
@click.pass_obj
def gc_command(
    app: App, apply: bool, target: str | None, max_duration: str | None, recompress: bool, codec: str | None,
    idle: str | None, explain: str | None,
) -> None:  # fmt: skip
    """Show what eviction would drop to keep within the limit, or with --apply drop it.

    Writers evict by themselves when the limit is reached; gc is for making room ahead of time. With --recompress no
    page is lost: sealed segments that are cold and not pinned are written anew in a codec, and take less room.
    """
    from kvfs.directory.config import parse_duration, parse_size

    target_bytes = None if target is None else parse_size(target, "--target")
    seconds = None if max_duration is None else parse_duration(max_duration, "--max-duration")
    if explain is not None and (apply or target is not None):
        raise click.UsageError("--explain shows one page and changes nothing: leave --apply and --target out")
    if recompress:
        if target is not None or explain is not None:
            raise click.UsageError("--recompress evicts nothing: leave --target and --explain out")
        recompress_cmd.run(app, codec or "planes", idle or "1h", seconds, apply=apply)
        return
    if codec is not None or idle is not None:
        raise click.UsageError("--codec and --idle belong to --recompress: add it, or leave them out")
    with app.open(write=apply, counted=apply) as store:
        if explain is not None:
            _explain(app, store, explain.lower())
        elif apply:
            done = store.gc(target_bytes, seconds=seconds)
            freed = max(0, done["bytes_before"] - done["bytes_after"])  # others store meanwhile
            used = text.size(done["bytes_after"])
            done["bytes_freed"] = freed
            app.out.result(
                {"applied": True, **done},
                lambda: (f"dropped {done['segments_dropped']} segments, freed {text.size(freed)}; in use {used}",),
                [str(freed)],
            )
        else:
            _show_plan(app, store.gc_plan(target_bytes))


def _show_plan(app: App, plan: GcPlan) -> None:
    carried = sum(s.carried_pages for s in plan.steps)
    carried_bytes = sum(s.carried_bytes for s in plan.steps)
    data = {
        "applied": False, "used_bytes": plan.used_bytes, "target_bytes": plan.target_bytes,
        "dropped_bytes": plan.dropped_bytes, "frees_bytes": plan.freed_bytes, "carried_pages": carried,
        "carried_bytes": carried_bytes,
        "steps": [
            {"segment_id": s.segment_id.hex(), "frees_bytes": s.frees_bytes, "pages_lost": s.pages,
             "carried_pages": s.carried_pages, "reason": s.reason}
            for s in plan.steps
        ],
    }  # fmt: skip

    def lines() -> Iterable[str]:
        if plan.dropped_bytes:
            yield f"waits   {text.size(plan.dropped_bytes)} of dropped segments that somebody still holds"
        if not plan.steps:
            yield f"plan    nothing to do: {text.size(plan.used_bytes)} in use, {text.size(plan.target_bytes)} allowed"
            return
        total = sum(s.frees_bytes for s in plan.steps)
        yield (
            f"plan    drop {len(plan.steps)} segments ({text.size(total)}), carry {text.count(carried)} hot pages "
            f"forward ({text.size(carried_bytes)})"
        )
        rows = [
            (
                s.segment_id.hex()[:12],
                text.size(s.frees_bytes),
                text.count(s.pages),
                text.count(s.carried_pages),
                s.reason,
            )
            for s in plan.steps[:STEPS_SHOWN]
        ]
        yield from text.table(("SEGMENT", "FREES", "PAGES LOST", "CARRIED", "WHY"), rows, "lrrrl")
        if len(plan.steps) > STEPS_SHOWN:
            yield f"... {len(plan.steps) - STEPS_SHOWN} more"
        yield "Nothing was changed. Run `kvfs gc --apply` with the same options to do it."

    app.out.result(data, lines, (s.segment_id.hex() for s in plan.steps))


def _explain(app: App, store: Store, key: str) -> None:
    from kvfs.catalog.catalog import NotFoundError
    from kvfs.errors import ConfigError
    from kvfs.index.tables import STATE_NAMES
    from kvfs.system.files import Files

    pages = store.catalog.find_pages(key)
    if not pages and not re.fullmatch("[0-9a-f]{6,64}", key):
        raise ConfigError(f"--explain is {key!r}: give 6 digits or more of a page's hash; kvfs ls NAMESPACE shows some")
    if not pages:
        raise NotFoundError(f"no page's hash begins with {key!r}: it is not stored, or not any more")
    plan = store.gc_plan(0)  # the order in which everything would go
    order = {step.segment_id: (i, step) for i, step in enumerate(plan.steps)}
    rows = {row.segment_id: row for _, row in store.catalog.segment_rows()}  # later: what the plan lacks may be gone
    pins, now = store.pins(), Files().now_us()
    found: list[dict[str, Any]] = []
    for page in pages:
        row, segment = rows.get(page.segment_id), page.segment_id.hex()
        by = [pin.name for pin in pins if segment in pin.segments]
        rank = order.get(page.segment_id)
        if by:
            why = f"pinned by {', '.join(by)}: never evicted"
        elif rank is not None:
            before = sum(s.frees_bytes for s in plan.steps[: rank[0]])
            why = f"goes as number {rank[0] + 1} of {len(plan.steps)} segments, after {text.size(before)} have gone"
        elif row is None or STATE_NAMES[row.state] == "dropped":
            why = "its segment was dropped a moment ago"
        elif STATE_NAMES[row.state] == "active":
            why = "stays: a live process is appending to its segment"
        else:
            why = "stays: its quota guarantees it"
        found.append(
            {
                "segment_id": segment,
                "state": STATE_NAMES[row.state] if row is not None else "gone",
                "pins": by,
                "position": None if rank is None or by else rank[0] + 1,
                "of": len(plan.steps),
                "last_used_us": page.last_used_us,
                "expires": page.place.expires,
                "why": why,
            }
        )
    data = {"hash": pages[0].chunk_hash.hex(), "records": found}

    def lines() -> Iterable[str]:
        yield f"page    {pages[0].chunk_hash.hex()}"
        for r in found:
            yield f"in      segment {r['segment_id'][:12]} ({r['state']}), last used {text.age(r['last_used_us'], now)}"
            yield f"        {r['why']}"

    app.out.result(data, lines, [pages[0].chunk_hash.hex()])


@click.command("verify")
@click.option("--sample", metavar="SHARE", help="Check the bytes of this share of all pages, like 5% or 0.05.")
@click.option("--all", "everything", is_flag=True, help="Check the bytes of every page.")
@click.option("--seed", type=int, metavar="N", help="Which pages a sample takes.  [default: 0]")
@click.option("--repair", is_flag=True, help="Take bad pages out of the index, rebuild it, move foreign files away.")
@common
@click.pass_obj
def verify_command(app: App, sample: str | None, everything: bool, seed: int | None, repair: bool) -> int:
    """Check the structure of all segments and the index against them; on request the bytes of pages, too.

    Exit code 3 if problems were found (with --repair: if any are left).
    """
    if everything and sample is not None:
        raise click.UsageError("--all and --sample exclude each other")
    if seed is not None and sample is None:
        raise click.UsageError("--seed belongs to --sample: add it, or leave it out")
    share = 1.0 if everything else 0.0 if sample is None else _share(sample)
    with app.open(write=repair) as store:
        app.out.draw("verifying ...")
        report = store.verify(share, repair=repair, seed=seed or 0)
        left = report
        if repair and not report.ok:
            store.wait_ready(600.0)
            left = store.verify(share, seed=seed or 0)
    data = {
        "ok": left.ok, "sample": share, **asdict(report),
        "left": None if left is report else {"ok": left.ok, "problems": left.problems},
    }  # fmt: skip
    app.out.result(data, lambda: _report(report, left, share), report.problems)
    return 0 if left.ok else EXIT_PROBLEMS


def _report(report: Verification, left: Verification, share: float) -> Iterable[str]:
    yield from report.problems
    yield (
        f"checked {report.segments} segments, {text.count(report.index_pages)} index entries, the bytes of "
        f"{text.count(report.pages)} pages ({text.size(report.bytes)})"
    )
    if report.ok:
        yield (
            "no problems found" if share else "no problems found in the structure; --sample 5% or --all read pages, too"
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
