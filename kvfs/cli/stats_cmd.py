"""``kvfs stats``: the counters of all processes, past and present."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import text
from kvfs.cli.app import App, Command, common, complete_namespaces

if TYPE_CHECKING:
    from kvfs.store import Store

PAUSE_MIN, PAUSE_MAX = 0.1, 1e9  # seconds between two samples; the kernel's clock ends at some 290 years
_BUCKET = re.compile(r"(match|get|put)_us_([0-9]{1,2})\Z")


@click.command(
    "stats",
    cls=Command,
    examples=(
        "kvfs stats",
        "kvfs stats chat",
        "kvfs stats --watch",
        "kvfs stats --watch --interval 1m --times 60 > log",
    ),
)
@click.argument("namespace", required=False, shell_complete=complete_namespaces)
@click.option(
    "--watch", is_flag=True, help="Repeat until interrupted, with rates; one line each time without a terminal."
)
@click.option("--interval", metavar="TIME", help="Time between two samples of --watch.  [default: 2s]")
@click.option("--times", type=click.IntRange(1), metavar="N", help="Stop --watch after N samples.")
@common
@click.pass_obj
def stats_command(app: App, namespace: str | None, watch: bool, interval: str | None, times: int | None) -> None:
    """Show hit rates in tokens, bytes and latencies, summed over all processes since the store was created.

    A killed process loses what it counted in its last 5 seconds. --watch shows the rates of the live processes over the
    time between two of their publications, which come every second: until then it shows none. With NAMESPACE only what
    was counted of it; `kvfs top` shows the rates of namespaces.
    """
    from kvfs.directory.config import parse_duration

    if not watch and (interval is not None or times is not None):
        raise click.UsageError("--interval and --times belong to --watch: add it, or leave them out")
    if watch and namespace is not None:
        raise click.UsageError("--watch shows all namespaces together: leave NAMESPACE out, or run kvfs top")
    pause = min(max(PAUSE_MIN, parse_duration(interval or "2s", "--interval")), PAUSE_MAX)
    with app.open() as store:
        if namespace is not None:
            of = _of_namespace(store, namespace)
            app.out.result(of, lambda: _namespace_lines(of), [_rate(of)])
            return
        if watch:
            _watch(app, store, pause, times)
            return
        data = summary(store.stats())
        app.out.result(data, lambda: _lines(data), [_rate(data)])


def _of_namespace(store: Store, ref: str) -> dict[str, Any]:
    """The counts of one namespace; zero if the store counts none of it, because others were used later."""
    from kvfs.directory.shared_counters import NAMESPACE_COUNTS

    described = store.catalog.find(ref)
    sums = store.namespace_counts().get(described.digest.hex())
    counts = {name: 0 if sums is None else sums.counts.get(name, 0) for name in NAMESPACE_COUNTS}
    queried = counts["tokens_queried"]
    return {
        "namespace": described.label, "digest": described.digest.hex(), **counts,
        "hit_rate": round(counts["tokens_matched"] / queried, 4) if queried else None,
        "published_us": None if sums is None else sums.at_us,
    }  # fmt: skip


def _namespace_lines(data: Mapping[str, Any]) -> Iterable[str]:
    rate = text.percent(data["tokens_matched"], data["tokens_queried"])
    yield f"namespace {data['namespace']}"
    yield (
        f"lookups   {text.count(data['lookups'])}   tokens asked {text.count(data['tokens_queried'])}, "
        f"matched {text.count(data['tokens_matched'])} ({rate})"
    )
    host, disk = text.count(data["tokens_loaded_host"]), text.count(data["tokens_loaded_disk"])
    yield f"loaded    tokens from the page cache {host}, from the disk {disk}"
    yield f"pages     stored {text.count(data['pages_stored'])}, declined {text.count(data['pages_declined'])}"
    yield f"bytes     written {text.size(data['bytes_written'])}, loaded {text.size(data['bytes_loaded'])}"


def _watch(app: App, store: Store, pause: float, times: int | None) -> None:
    """Samples until interrupted: a terminal shows the last one, a pipe gets a line for each, with --json an object."""
    from kvfs.metrics.live import LiveView

    with app.out.screen() as screen:
        live, samples = LiveView(store), 0
        while True:
            data = summary(store.stats())
            rates = live.sample(time.time()).total
            data["per_second"] = None if rates is None else {k: round(rate, 1) for k, rate in rates._asdict().items()}
            line = _rate(data) if app.out.quiet else _sample(data)
            screen.draw(data, line, lambda data=data: _lines(data))  # type: ignore[misc]
            samples += 1
            if samples == times:
                return
            time.sleep(pause)


def _sample(data: Mapping[str, Any]) -> str:
    """One line of --watch in a pipe."""
    used = "-" if data["used_bytes"] is None else text.size(data["used_bytes"])
    return f"{time.strftime('%H:%M:%S')}  {_now(data['per_second'])}  used {used}"


def _now(rates: Mapping[str, float] | None) -> str:
    if rates is None:
        return "no rate yet: no other process has published its counts twice"
    hit = text.percent(rates["tokens_matched"], rates["tokens_queried"])
    return (
        f"{rates['lookups']:,.1f} lookups/s  {rates['tokens_matched']:,.0f} tokens matched/s ({hit})  "
        f"{text.size(rates['bytes_loaded'])}/s loaded  {text.size(rates['bytes_written'])}/s written"
    )


def _rate(data: Mapping[str, Any]) -> str:
    return "-" if data["hit_rate"] is None else str(data["hit_rate"])


def summary(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of ``Store.stats()`` that people ask for."""
    t: Mapping[str, int] = stats["totals"]
    queried, matched = t.get("tokens_queried", 0), t.get("tokens_matched", 0)
    return {
        "lookups": t.get("lookups", 0),
        "tokens_queried": queried,
        "tokens_matched": matched,
        "tokens_loaded": t.get("tokens_loaded", 0),
        "hit_rate": round(matched / queried, 4) if queried else None,
        "pages_stored": t.get("pages_stored", 0),
        "pages_skipped": t.get("pages_skipped", 0),
        "pages_in_flight": t.get("pages_in_flight", 0),
        "pages_declined": {k[15:]: n for k, n in sorted(t.items()) if k.startswith("pages_declined_")},
        "pages_encoded": t.get("pages_encoded", 0),
        "pages_incompressible": t.get("pages_incompressible", 0),
        "bytes_written": t.get("bytes_written", 0),
        "bytes_saved": t.get("bytes_saved", 0),
        "bytes_loaded": t.get("bytes_loaded", 0),
        "segments_evicted": t.get("segments_evicted", 0),
        "pages_corrupt": t.get("pages_corrupt", 0),
        "read_errors": t.get("read_errors", 0),
        "write_errors": t.get("write_errors", 0),
        "settings_taken_up": t.get("settings_taken_up", 0),
        "settings_refused": t.get("settings_refused", 0),
        "bundles_adopted": t.get("bundles_adopted", 0),
        "bundles_refused": t.get("bundles_refused", 0),
        "processes_inotify": t.get("now_inotify", 0),
        "processes_polling": t.get("now_polling", 0),
        "latency_us": latencies(t),
        "capacity_bytes": stats["capacity_bytes"],
        "used_bytes": stats.get("used_bytes"),
        "counters": dict(sorted((k, n) for k, n in t.items() if not _BUCKET.match(k) and not k.startswith("now_"))),
    }


def latencies(totals: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """p50 and p99 per call in microseconds, as upper bounds of buckets that double."""
    buckets: dict[str, dict[int, int]] = {}
    for name, n in totals.items():
        if match := _BUCKET.match(name):
            buckets.setdefault(match[1], {})[int(match[2])] = n
    found = {}
    for call, counts in sorted(buckets.items()):
        calls = sum(counts.values())
        entry = {"calls": calls}
        for label, share in (("p50_below", 0.5), ("p99_below", 0.99)):
            seen = 0
            for exponent in sorted(counts):
                seen += counts[exponent]
                if seen >= share * calls:
                    entry[label] = 1 << exponent
                    break
        found[call] = entry
    return found


def _lines(data: Mapping[str, Any]) -> Iterable[str]:
    rate = text.percent(data["tokens_matched"], data["tokens_queried"])
    yield (
        f"lookups   {text.count(data['lookups'])}   tokens asked {text.count(data['tokens_queried'])}, "
        f"matched {text.count(data['tokens_matched'])} ({rate}), loaded {text.count(data['tokens_loaded'])}"
    )
    declined = data["pages_declined"]
    why = f" ({', '.join(f'{k} {text.count(n)}' for k, n in declined.items())})" if declined else ""
    yield (
        f"pages     stored {text.count(data['pages_stored'])}, skipped {text.count(data['pages_skipped'])}, "
        f"in flight {text.count(data['pages_in_flight'])}, declined {text.count(sum(declined.values()))}{why}"
    )
    yield (
        f"bytes     written {text.size(data['bytes_written'])}, loaded {text.size(data['bytes_loaded'])}   "
        f"segments evicted {text.count(data['segments_evicted'])}"
    )
    if data["pages_encoded"] or data["pages_incompressible"]:
        yield (
            f"codecs    {text.count(data['pages_encoded'])} pages stored smaller, {text.size(data['bytes_saved'])} "
            f"saved; {text.count(data['pages_incompressible'])} did not shrink"
        )
    yield (
        f"faults    corrupt pages {text.count(data['pages_corrupt'])}, read errors {text.count(data['read_errors'])}, "
        f"write errors {text.count(data['write_errors'])}"
    )
    yield (
        f"changes   {text.count(data['processes_inotify'])} processes use inotify, "
        f"{text.count(data['processes_polling'])} poll   settings applied {text.count(data['settings_taken_up'])}, "
        f"refused {text.count(data['settings_refused'])}"
    )
    adopted, refused = data["bundles_adopted"], data["bundles_refused"]
    yield f"drops     bundles adopted {text.count(adopted)}, refused {text.count(refused)}"
    for call, entry in data["latency_us"].items():
        yield (
            f"{call:<9} {text.count(entry['calls'])} calls, p50 below {_micros(entry['p50_below'])}, "
            f"p99 below {_micros(entry['p99_below'])}"
        )
    if "per_second" in data:
        yield f"now       {_now(data['per_second'])}"


def _micros(us: int) -> str:
    return f"{us} us" if us < 1000 else f"{us / 1000:.1f} ms" if us < 1_000_000 else f"{us / 1e6:.1f} s"
