"""``kvfs gc``: what eviction would drop, and why a page stays. ``--recompress`` is in ``recompress_cmd``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import recompress_cmd, text
from kvfs.cli.app import App, Command, common
from kvfs.cli.output import shown

if TYPE_CHECKING:
    from kvfs.eviction.dry_run import GcPlan
    from kvfs.store import Store

_PERCENT = re.compile(r"(100|[0-9]{1,2})%\Z")
STEPS_SHOWN = 10  # lines of a plan; --json has all


@click.command(
    "gc",
    cls=Command,
    examples=(
        "kvfs gc --target 100GiB --dry-run",
        "kvfs gc --target 50%",
        "kvfs gc --target 100GiB --apply --yes",
        "kvfs gc --explain 46dddbe18fda",
        "kvfs gc --recompress --idle 12h --apply",
    ),
)
@click.option("--apply", is_flag=True, help="Evict. Without it only the plan is shown.")
@click.option("--dry-run", is_flag=True, help="Only show the plan, which is also the default.")
@click.option("-y", "--yes", is_flag=True, help="With --apply: do not ask before pages are lost.")
@click.option(
    "--target", metavar="SIZE",
    help="How much segments may use afterwards: a size, or a share of the limit as in 50%; default: the limit.",
)  # fmt: skip
@click.option("--max-duration", metavar="TIME", help="Stop evicting or recompressing after this long.")
@click.option("--recompress", is_flag=True, help="Instead of evicting, rewrite cold segments in a codec.")
@click.option("--codec", type=click.Choice(("planes", "zstd")), help="For --recompress.  [default: planes]")
@click.option("--idle", metavar="TIME", help="For --recompress: segments unused for this long are cold; default 1h.")
@click.option(
    "--explain", metavar="KEY", help="Say why the page whose hash begins with KEY stays, or when it would be evicted."
)
@common
@click.pass_obj
def gc_command(
    app: App, apply: bool, dry_run: bool, yes: bool, target: str | None, max_duration: str | None, recompress: bool,
    codec: str | None, idle: str | None, explain: str | None,
) -> None:  # fmt: skip
    """Show what eviction would drop to stay within the limit (a dry run), or with --apply drop it.

    Writers evict by themselves when the limit is reached; gc makes room ahead of time. With --recompress no page is
    lost: sealed segments that are cold and not pinned are rewritten in a codec, and take less space.
    """
    from kvfs.directory.config import parse_duration, parse_size

    share = None if target is None else _PERCENT.match(target)
    target_bytes = None if target is None or share else parse_size(target, "--target")
    seconds = None if max_duration is None else parse_duration(max_duration, "--max-duration")
    if explain is not None and (apply or target is not None):
        raise click.UsageError("--explain shows one page and changes nothing: leave --apply and --target out")
    if dry_run and apply:
        raise click.UsageError("--dry-run changes nothing and --apply does: pass one of them")
    if yes and not apply:
        raise click.UsageError("--yes belongs to --apply: add it, or leave it out")
    if recompress:
        if target is not None or explain is not None:
            raise click.UsageError("--recompress evicts nothing: leave --target and --explain out")
        recompress_cmd.run(app, codec or "planes", idle or "1h", seconds, apply=apply)
        return
    if codec is not None or idle is not None:
        raise click.UsageError("--codec and --idle belong to --recompress: add it, or leave them out")
    with app.open(write=apply, counted=apply) as store:
        if share:
            from kvfs.index import ledger

            target_bytes = ledger.budget(store.settings).limit * int(share[1]) // 100
        if explain is not None:
            _explain(app, store, explain.lower())
        elif apply:
            _confirm(app, store.gc_plan(target_bytes), yes=yes)
            done = store.gc(target_bytes, seconds=seconds, progress=shown(app.out, "evicting"))
            freed = max(0, done["bytes_before"] - done["bytes_after"])  # other processes may have stored pages
            used = text.size(done["bytes_after"])
            done["bytes_freed"] = freed
            app.out.result(
                {"applied": True, **done},
                lambda: (f"dropped {done['segments_dropped']} segments, freed {text.size(freed)}; in use {used}",),
                [str(freed)],
            )
        else:
            _show_plan(app, store.gc_plan(target_bytes))


def _confirm(app: App, plan: GcPlan, *, yes: bool) -> None:
    """Ask if pages would be lost."""
    lost = sum(step.pages for step in plan.steps)
    if lost:
        nbytes = text.size(sum(step.frees_bytes for step in plan.steps))
        app.out.confirm(f"Evict {text.count(lost)} pages, {len(plan.steps)} segments ({nbytes})?", yes=yes)


def _show_plan(app: App, plan: GcPlan) -> None:
    relocated = sum(s.carried_pages for s in plan.steps)
    relocated_bytes = sum(s.carried_bytes for s in plan.steps)
    data = {
        "applied": False, "used_bytes": plan.used_bytes, "target_bytes": plan.target_bytes,
        "dropped_bytes": plan.dropped_bytes, "frees_bytes": plan.freed_bytes, "carried_pages": relocated,
        "carried_bytes": relocated_bytes,
        "steps": [
            {"segment_id": s.segment_id.hex(), "frees_bytes": s.frees_bytes, "pages_lost": s.pages,
             "carried_pages": s.carried_pages, "reason": s.reason}
            for s in plan.steps
        ],
    }  # fmt: skip

    def lines() -> Iterable[str]:
        if plan.dropped_bytes:
            yield f"waits   {text.size(plan.dropped_bytes)} of dropped segments that a reader still holds"
        if not plan.steps:
            yield f"plan    nothing to do: {text.size(plan.used_bytes)} in use, {text.size(plan.target_bytes)} allowed"
            return
        total = sum(s.frees_bytes for s in plan.steps)
        yield (
            f"plan    drop {len(plan.steps)} segments ({text.size(total)}), relocate {text.count(relocated)} hot pages "
            f"({text.size(relocated_bytes)})"
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
        yield from text.table(
            ("SEGMENT", "FREES", "PAGES LOST", "RELOCATED", "WHY"), rows, "lrrrl", width=app.out.width
        )
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
        raise NotFoundError(
            f"no page's hash begins with {key!r}: it was never stored, or was evicted; kvfs ls NAMESPACE shows what is"
        )
    plan = store.gc_plan(0)  # the order in which everything would be evicted
    order = {step.segment_id: (i, step) for i, step in enumerate(plan.steps)}
    # after the plan: a segment that it lacks may have been dropped since
    rows = {row.segment_id: row for _, row in store.catalog.segment_rows()}
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
            why = f"would be evicted as number {rank[0] + 1} of {len(plan.steps)} segments, after {text.size(before)}"
        elif row is None or STATE_NAMES[row.state] == "dropped":
            why = "its segment was dropped a moment ago"
        elif STATE_NAMES[row.state] == "active":
            why = "stays: a live process is appending to its segment"
        else:
            why = "stays: its quota guarantees it"
        found.append(
            {
                "segment_id": segment,
                "state": STATE_NAMES[row.state] if row is not None else "reclaimed",
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
