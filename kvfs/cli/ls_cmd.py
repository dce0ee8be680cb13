"""``kvfs ls``: namespaces, or the prefixes of one, filtered and sorted."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import click

from kvfs.cli import text
from kvfs.cli.app import App, common, complete_namespaces

_FILTER = re.compile(r"\s*([a-z_]+)\s*(<=|>=|=|<|>)\s*(.+?)\s*\Z")
_NUMBER = re.compile(r"[0-9]{1,30}\Z")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "=": operator.eq,
}  # fmt: skip
KEYS = ("accessed", "size", "pages", "tokens", "name")


class Item(NamedTuple):
    """One line of the list, and the values that filters and sorting compare."""

    name: str
    pages: int
    size: int
    tokens: int
    accessed: float  # seconds since the last use
    data: dict[str, Any]
    columns: tuple[str, ...]
    id: str


@click.command("ls")
@click.argument("namespace", required=False, shell_complete=complete_namespaces)
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="EXPR",
    help="accessed>30d, size>1MiB, pages>=4, name=x; an item must pass all of them.",
)
@click.option("--sort", metavar="KEY[:desc]", help=f"One of {', '.join(KEYS)}; accessed: latest first.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N lines.")
@click.option(
    "--max-duration", metavar="TIME", default="10s", show_default=True, help="Stop reading the index after this long."
)
@common
@click.pass_obj
def ls_command(
    app: App, namespace: str | None, filters: tuple[str, ...], sort: str | None, limit: int | None, max_duration: str
) -> None:
    """List namespaces, or the prefixes of NAMESPACE.

    A prefix is what one request used last: the pages of a namespace with the same access time. Its id is the hash of
    its last page. A head that a later request also used is listed with that request.
    """
    from kvfs.directory.config import parse_duration

    tests = [_test(expression) for expression in filters]
    key, reverse = _sort_key(sort)
    seconds = parse_duration(max_duration, "--max-duration")
    with app.open() as store:
        complete, share = True, 1.0
        if namespace is None:
            heads, right, items = _namespaces(store)
        else:
            heads, right, items, complete, share = _prefixes(store, namespace, seconds)
    kept = [item for item in items if all(test(item) for test in tests)]
    if key:
        kept.sort(key=lambda item: getattr(item, key), reverse=reverse)
    shown = kept[:limit]
    if not complete:
        app.out.note(
            f"stopped after {seconds:.0f} s with {100 * share:.0f} % of the index read: sizes are lower bounds; "
            "raise --max-duration to see all"
        )
    data = {
        "items": [item.data for item in shown], "total": len(kept), "complete": complete, "share_read": round(share, 3),
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield from text.table(heads, (item.columns for item in shown), right)
        if len(shown) < len(kept):
            yield f"... {len(kept) - len(shown)} more"

    app.out.result(data, lines, (item.id for item in shown))


def _namespaces(store: Any) -> tuple[tuple[str, ...], str, list[Item]]:
    from kvfs.cli.inspect_cmd import dtype_of, namespace_data
    from kvfs.system.files import Files

    now = Files().now_us()
    items = []
    for i in store.catalog.namespaces():
        tokens = i.pages * i.described.layout.page_tokens
        age = (now - i.last_used_us) / 1e6 if i.last_used_us else float("inf")
        columns = (
            i.label, dtype_of(i.described), str(i.described.layout.page_tokens), text.count(i.pages),
            text.size(i.nbytes), text.age(i.last_used_us, now), i.digest.hex()[:12],
        )  # fmt: skip
        items.append(Item(i.name, i.pages, i.nbytes, tokens, age, namespace_data(i), columns, i.digest.hex()))
    return ("NAMESPACE", "CELL", "CHUNK", "PAGES", "SIZE", "LAST USED", "ID"), "llrrrl", items


def _prefixes(store: Any, ref: str, seconds: float) -> tuple[tuple[str, ...], str, list[Item], bool, float]:
    from kvfs.system.files import Files

    described = store.catalog.find(ref)
    found, walk = store.catalog.prefixes(described, seconds=seconds)
    now, step = Files().now_us(), described.layout.page_tokens
    items = []
    for p in sorted(found, key=lambda p: -p.stamp_us):
        first, end = p.first_chunk * step, (p.last_chunk + 1) * step
        data = {
            "id": p.last_hash.hex(), "namespace": described.label, "first_token": first,
            "end_token": end, "pages": p.pages, "bytes": p.nbytes, "last_used_us": p.stamp_us,
        }  # fmt: skip
        columns = (
            p.last_hash.hex()[:12], f"{first}-{end}", text.count(p.pages), text.size(p.nbytes),
            text.age(p.stamp_us, now),
        )  # fmt: skip
        items.append(
            Item(
                described.name,
                p.pages,
                p.nbytes,
                end - first,
                (now - p.stamp_us) / 1e6,
                data,
                columns,
                p.last_hash.hex(),
            )
        )
    return ("PREFIX", "TOKENS", "PAGES", "SIZE", "LAST USED"), "lrrrl", items, walk.complete, walk.share


def _test(expression: str) -> Callable[[Item], bool]:
    """A filter like ``accessed>30d``."""
    from kvfs.directory.config import parse_duration, parse_size
    from kvfs.errors import ConfigError

    match = _FILTER.match(expression)
    if match is None or match[1] not in KEYS:
        raise ConfigError(
            f"filter is {expression!r}: write KEY OP VALUE with one of {', '.join(KEYS)}, for example 'accessed>30d'"
        )
    key, compare, value = match[1], _OPERATORS[match[2]], match[3]
    if key == "name":
        if match[2] != "=":
            raise ConfigError(f"filter is {expression!r}: names are compared with =, as in name=chat")
        return lambda item: item.name == value
    if key == "accessed":
        wanted: float = parse_duration(value, "accessed")
    elif key == "size":
        wanted = parse_size(value, "size")
    elif _NUMBER.match(value):
        wanted = int(value)
    else:
        raise ConfigError(f"filter is {expression!r}: {key} takes a whole number, as in {key}>4")
    return lambda item: compare(getattr(item, key), wanted)


def _sort_key(sort: str | None) -> tuple[str, bool]:
    from kvfs.errors import ConfigError

    if sort is None:
        return "", False
    key, _, order = sort.partition(":")
    if key not in KEYS or order not in ("", "asc", "desc"):
        raise ConfigError(
            f"sort is {sort!r}: write one of {', '.join(KEYS)}, with :desc appended for the reverse order"
        )
    return key, order == "desc"
