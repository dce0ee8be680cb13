"""``kvfs gc --recompress``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvfs.cli import text
from kvfs.cli.app import App

if TYPE_CHECKING:
    from kvfs.store import Store

STEPS_SHOWN = 10  # lines of a plan; --json has all


def run(app: App, codec: str, idle: str, seconds: float | None, *, apply: bool) -> None:
    from kvfs.directory.config import parse_duration
    from kvfs.errors import ConfigError
    from kvfs.format.codec import parse

    if not parse(codec, "--codec"):
        raise ConfigError("--codec is 'raw': recompressing makes segments smaller; choose planes or zstd")
    idle_seconds = parse_duration(idle, "--idle")
    with app.open(write=apply, counted=apply) as store:
        if apply:
            _apply(app, store, codec, idle_seconds, seconds)
        else:
            _show(app, store, codec, idle_seconds, seconds)


def _show(app: App, store: Store, codec: str, idle_seconds: float, seconds: float | None) -> None:
    from kvfs.system.files import Files

    plan = store.recompress_plan(codec, idle=idle_seconds, seconds=seconds)
    now = Files().now_us()
    data = {
        "applied": False, "codec": codec, "idle_seconds": idle_seconds, "saves_bytes": plan.saves_bytes,
        "steps": [
            {"segment_id": s.segment_id.hex(), "pages": s.pages, "raw_bytes": s.raw_bytes,
             "saves_bytes": s.saves_bytes, "last_used_us": s.last_used_us}
            for s in plan.steps
        ],
        "left": plan.left,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        left = ", ".join(f"{n} {why}" for why, n in sorted(plan.left.items()))
        if not plan.steps:
            yield "plan    nothing to do" + (f": sealed segments are left as they are ({left})" if left else "")
            return
        raw = sum(s.raw_bytes for s in plan.steps)
        yield (
            f"plan    rewrite {len(plan.steps)} segments ({text.size(raw)} of raw pages) as {codec}, saving about "
            f"{text.size(plan.saves_bytes)}"
        )
        if left:
            yield f"left    {left}"
        rows = [
            (s.segment_id.hex()[:12], text.count(s.pages), text.size(s.raw_bytes), text.size(s.saves_bytes),
             text.age(s.last_used_us, now))
            for s in plan.steps[:STEPS_SHOWN]
        ]  # fmt: skip
        yield from text.table(("SEGMENT", "PAGES", "RAW", "SAVES ABOUT", "LAST USED"), rows, "lrrrr", app.out.width)
        if len(plan.steps) > STEPS_SHOWN:
            yield f"... {len(plan.steps) - STEPS_SHOWN} more"
        yield "Nothing was changed. Run `kvfs gc --recompress --apply` with the same options to do it."

    app.out.result(data, lines, (s.segment_id.hex() for s in plan.steps))


def _apply(app: App, store: Store, codec: str, idle_seconds: float, seconds: float | None) -> None:
    done = store.recompress(
        codec, idle=idle_seconds, seconds=seconds,
        progress=lambda n, total: app.out.draw(f"recompressing {n} of {total} segments ..."),
    )  # fmt: skip
    freed = max(0, done.bytes_before - done.bytes_after)  # other processes may have stored pages meanwhile
    data = {
        "applied": True, "codec": codec, "segments": done.segments, "pages": done.pages, "failed": done.failed,
        "bytes_before": done.bytes_before, "bytes_after": done.bytes_after, "bytes_freed": freed,
        "stopped": done.stopped,
    }  # fmt: skip
    failed = f"; {done.failed} segments could not be copied and stay" if done.failed else ""
    why = f"; stopped: not enough {done.stopped}" if done.stopped in ("time", "space") else ""
    why = why or (f"; stopped: {done.stopped}" if done.stopped else "")
    line = (
        f"rewrote {text.count(done.pages)} pages of {done.segments} segments, freed {text.size(freed)}; "
        f"in use {text.size(done.bytes_after)}{failed}{why}"
    )
    app.out.result(data, lambda: [line], [str(freed)])
