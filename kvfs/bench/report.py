"""What a run says: percentiles, rates and hits, as data and as a page with plots."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from kvfs.bench.driver import Run

PERCENTILES = (50, 90, 99)
ERRORS_MAX = 8  # kinds of errors that are listed
POINTS_MAX = 2000  # of a plot
_WIDTH, _HEIGHT, _EDGE = 640, 280, 48


def summary(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run. Durations are in seconds; requests that failed count as such and in nothing else."""
    good = [d.answer for d in run.done if not d.answer.error]
    errors = Counter(d.answer.error for d in run.done if d.answer.error)
    seconds = max(run.ended - run.began, 1e-9)
    said = [a for a in good if a.cached_tokens is not None]
    prompts, generated = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    return {
        "settings": settings,
        "seconds": round(seconds, 3),
        "requests": len(run.done),
        "failed": sum(errors.values()),
        "errors": dict(errors.most_common(ERRORS_MAX)),
        "ttft": spread([a.token_times[0] - a.sent for a in good]),
        "itl": spread([b - a for answer in good for a, b in pairwise(answer.token_times)]),
        "e2e": spread([a.ended - a.sent for a in good]),
        "prompt_tokens": prompts,
        "output_tokens": generated,
        "cached_tokens": sum(a.cached_tokens or 0 for a in said) if said else None,
        "hit_ratio": round(sum(a.cached_tokens or 0 for a in said) / max(1, sum(a.prompt_tokens for a in said)), 4)
        if said
        else None,
        "requests_per_second": round(len(good) / seconds, 3),
        "prompt_tokens_per_second": round(prompts / seconds, 1),
        "output_tokens_per_second": round(generated / seconds, 1),
        "late_seconds": round(run.late_seconds, 3),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles by nearest rank; None without values."""
    if not values:
        return None
    ranked = sorted(values)
    found = {f"p{p}": ranked[max(0, math.ceil(p / 100 * len(ranked)) - 1)] for p in PERCENTILES}
    return {name: round(n, 6) for name, n in {"mean": sum(ranked) / len(ranked), **found, "max": ranked[-1]}.items()}


def requests(run: Run) -> list[dict[str, Any]]:
    """One row per request, in seconds since the run began."""
    return [
        {
            "session": d.session, "turn": d.turn, "sent": round(d.answer.sent - run.began, 6),
            "ttft": round(d.answer.token_times[0] - d.answer.sent, 6) if d.answer.token_times else None,
            "e2e": round(d.answer.ended - d.answer.sent, 6), "prompt_tokens": d.answer.prompt_tokens,
            "output_tokens": d.answer.output_tokens, "cached_tokens": d.answer.cached_tokens, "error": d.answer.error,
        }
        for d in run.done
    ]  # fmt: skip


def page(run: Run, found: dict[str, Any]) -> str:
    """A page of HTML without scripts: the figures, and plots of the time to the first token."""
    good = [d.answer for d in run.done if not d.answer.error]
    by_time = [(a.sent - run.began, a.token_times[0] - a.sent) for a in good]
    by_length = [(float(a.prompt_tokens), a.token_times[0] - a.sent) for a in good]
    ranked = sorted(y for _, y in by_time)
    shares = [(y, (n + 1) / len(ranked)) for n, y in enumerate(ranked)]
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(_cell(value))}</td></tr>"
        for name, value in found.items()
        if name != "settings"
    )
    settings = html.escape(json.dumps(found["settings"]))
    plots = "".join(
        (
            _plot("Time to the first token by time", "s since the start", "s", by_time),
            _plot("Time to the first token by length of the prompt", "tokens", "s", by_length),
            _plot("Share of requests with at most this time to the first token", "s", "share", shares),
        )
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>kvfs bench serve</title><style>"
        "body{font:14px sans-serif;margin:2em auto;max-width:48em}td{padding:2px 12px 2px 0;vertical-align:top}"
        "svg{background:#fafafa;margin:8px 0}</style><h1>kvfs bench serve</h1>"
        f"<p><code>{settings}</code></p><table>{rows}</table>{plots}</html>\n"
    )


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {n:,.4g}" if isinstance(n, float) else f"{name}: {n}" for name, n in value.items())
    return f"{value:,}" if isinstance(value, (int, float)) else "-" if value is None else str(value)


def _plot(title: str, across: str, up: str, points: Sequence[tuple[float, float]]) -> str:
    """Points in an SVG, the axes from 0 to the largest value; at most POINTS_MAX of them, evenly chosen."""
    if not points:
        return ""
    shown = points[:: math.ceil(len(points) / POINTS_MAX)]
    x_max, y_max = (max(p[axis] for p in points) or 1.0 for axis in (0, 1))
    inner_x, inner_y = _WIDTH - 2 * _EDGE, _HEIGHT - 2 * _EDGE
    dots = "".join(
        f"<circle cx='{_EDGE + x / x_max * inner_x:.1f}' cy='{_HEIGHT - _EDGE - y / y_max * inner_y:.1f}' r='2'/>"
        for x, y in shown
    )
    return (
        f"<h2>{html.escape(title)}</h2><svg width='{_WIDTH}' height='{_HEIGHT}' fill='#2563eb'>"
        f"<path d='M{_EDGE} {_EDGE}V{_HEIGHT - _EDGE}H{_WIDTH - _EDGE}' stroke='#444' fill='none'/>"
        f"<g fill='#444' font-size='12'><text x='4' y='{_EDGE - 8}'>{y_max:.3g} {html.escape(up)}</text>"
        f"<text x='{_WIDTH - _EDGE}' y='{_HEIGHT - 12}' text-anchor='end'>{x_max:.4g} {html.escape(across)}</text></g>"
        f"{dots}</svg>"
    )
