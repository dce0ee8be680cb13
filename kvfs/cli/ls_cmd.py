"""``kvfs ls``: namespaces, or the prefixes of one, filtered and sorted."""

from __future__ import annotations

import contextlib
import gc
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvfs.cli import text
from kvfs.cli.app import App, Command, common, complete_namespaces

if TYPE_CHECKING:
    from kvfs.catalog.catalog import NamespaceInfo
    from kvfs.catalog.walk import Prefix
    from kvfs.pages.identity import Described

_FILTER = re.compile(r"\s*([a-z_]+)\s*(<=|>=|=|<|>)\s*(.+?)\s*\Z")
_NUMBER = re.compile(r"[0-9]{1,30}\Z")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "=": operator.eq,
}  # fmt: skip
KEYS = ("accessed", "size", "pages", "tokens", "name")


class Listing(NamedTuple):
    """What is listed. No object is made for a line but the catalog's: a store may have 100,000 namespaces."""

    heads: tuple[str, ...]
    letters: str  # of ``text.table``
    items: list[Any]
    values: dict[str, Callable[[Any], Any]]  # by key: what filters and sorting compare
    id: Callable[[Any], str]
    data: Callable[[Any], dict[str, Any]]
    columns: Callable[[Any], tuple[str, ...]]
    complete: bool = True
    share: float = 1.0  # of the index that was read


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """A long list is hundreds of thousands of objects without a cycle: collections took a sixth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _complete_sort(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    return [word for key in KEYS for word in (key, f"{key}:desc") if word.startswith(incomplete)]


@click.command(
    "ls",
    cls=Command,
    examples=(
        "kvfs ls",
        "kvfs ls chat --sort tokens:desc --limit 20",
        "kvfs ls --filter 'size>1GiB' --filter 'accessed>30d'",
    ),
)
@click.argument("namespace", required=False, shell_complete=complete_namespaces)
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="EXPR",
    help="accessed>30d, size>1MiB, pages>=4, name=org/*; an item must pass all of them.",
)
@click.option(
    "--sort",
    metavar="KEY[:desc]",
    shell_complete=_complete_sort,
    help=f"One of {', '.join(KEYS)}; accessed: latest first.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most N lines.")
@click.option(
    "--max-duration", metavar="TIME", default="10s", show_default=True, help="Stop reading the index after this long."
)
@common
@click.pass_obj
@_without_collections()
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
        listing = _namespaces(store) if namespace is None else _prefixes(store, namespace, seconds)
    kept = [item for item in listing.items if all(test(listing.values, item) for test in tests)]
    if key:
        kept.sort(key=listing.values[key], reverse=reverse)
    shown = kept[:limit]
    if not listing.complete:
        app.out.note(
            f"stopped after {seconds:.0f} s with {100 * listing.share:.0f} % of the index read: "
            "sizes are lower bounds; raise --max-duration to see all"
        )
    data = {
        "items": list(map(listing.data, shown)) if app.out.json else [], "total": len(kept),
        "complete": listing.complete, "share_read": round(listing.share, 3),
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield from text.table(listing.heads, map(listing.columns, shown), listing.letters, app.out.width)
        if len(shown) < len(kept):
            yield f"... {len(kept) - len(shown)} more"
        if len(kept) > 1:
            pages, nbytes = (sum(map(listing.values[key], kept)) for key in ("pages", "size"))
            yield f"total {text.pages(pages)}, {text.size(nbytes)}"

    app.out.result(data, lines, map(listing.id, shown))


def _namespaces(store: Any) -> Listing:
    from kvfs.cli.inspect_cmd import NAMESPACE_HEADS, namespace_columns, namespace_data
    from kvfs.system.files import Files

    now = Files().now_us()
    values: dict[str, Callable[[NamespaceInfo], Any]] = {
        "name": lambda i: i.name,
        "pages": lambda i: i.pages,
        "size": lambda i: i.nbytes,
        "tokens": lambda i: i.pages * i.described.layout.page_tokens,
        "accessed": lambda i: (now - i.last_used_us) / 1e6 if i.last_used_us else float("inf"),
    }
    columns = partial(namespace_columns, now_us=now)
    return Listing(
        *NAMESPACE_HEADS, store.catalog.namespaces(), values, lambda i: i.digest.hex(), namespace_data, columns
    )


def _prefixes(store: Any, ref: str, seconds: float) -> Listing:
    from kvfs.system.files import Files

    described = store.catalog.find(ref)
    found, walk = store.catalog.prefixes(described, seconds=seconds)
    now, step = Files().now_us(), described.layout.page_tokens
    whole = [n for n, group in enumerate(described.layout.groups) if group.need.kind == "all"]
    values: dict[str, Callable[[Prefix], Any]] = {
        "name": lambda p: described.name,
        "pages": lambda p: p.pages,
        "size": lambda p: p.nbytes,
        "tokens": lambda p: (p.last_chunk + 1 - p.first_chunk) * step,
        "accessed": lambda p: (now - p.stamp_us) / 1e6,
    }
    return Listing(
        ("PREFIX", "TOKENS", "PAGES", "SIZE", "LAST USED"), "lrrrl", sorted(found, key=lambda p: -p.stamp_us), values,
        lambda p: p.last_hash.hex(), lambda p: _prefix_data(p, described, p.gaps(whole)),
        lambda p: _prefix_columns(p, step, now, p.gaps(whole)), walk.complete, walk.share,
    )  # fmt: skip


def _prefix_data(p: Prefix, described: Described, gaps: int) -> dict[str, Any]:
    step = described.layout.page_tokens
    return {
        "id": p.last_hash.hex(), "namespace": described.label, "first_token": p.first_chunk * step,
        "end_token": (p.last_chunk + 1) * step, "missing_chunks": gaps, "pages": p.pages, "bytes": p.nbytes,
        "last_used_us": p.stamp_us,
    }  # fmt: skip


def _prefix_columns(p: Prefix, step: int, now_us: int, gaps: int) -> tuple[str, ...]:
    holes = f", {text.count(gaps)} missing" if gaps else ""
    tokens = f"{p.first_chunk * step}-{(p.last_chunk + 1) * step}{holes}"
    return p.last_hash.hex()[:12], tokens, text.count(p.pages), text.size(p.nbytes), text.age(p.stamp_us, now_us)


def _test(expression: str) -> Callable[[dict[str, Callable[[Any], Any]], Any], bool]:
    """A filter like ``accessed>30d``: of the values of a listing, and an item."""
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
            raise ConfigError(f"filter is {expression!r}: names are compared with =, as in name=chat or name=org/*")
        if any(sign in value for sign in "*?["):
            from fnmatch import fnmatchcase

            return lambda values, item: fnmatchcase(values[key](item), value)
        return lambda values, item: bool(values[key](item) == value)
    if key == "accessed":
        wanted: float = parse_duration(value, "accessed")
    elif key == "size":
        wanted = parse_size(value, "size")
    elif _NUMBER.match(value):
        wanted = int(value)
    else:
        raise ConfigError(f"filter is {expression!r}: {key} takes a whole number, as in {key}>4")
    return lambda values, item: compare(values[key](item), wanted)


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
