"""``kvfs inspect``: the store, or one thing in it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from kvfs.cli import text
from kvfs.cli.app import App, Command, common, complete_namespaces

if TYPE_CHECKING:
    from kvfs.catalog.catalog import Catalog, NamespaceInfo, PageInfo, SegmentInfo
    from kvfs.pages.identity import Described
    from kvfs.store import Store

KINDS = ("namespace", "segment", "page")
# f: the id keeps its digits
NAMESPACE_HEADS = (("NAMESPACE", "CELL", "CHUNK", "PAGES", "SIZE", "LAST USED", "ID"), "llrrrlf")


@click.command("inspect", cls=Command, examples=("kvfs inspect", "kvfs inspect chat", "kvfs inspect page:46dddbe18fda"))
@click.argument("ref", required=False, shell_complete=complete_namespaces)
@common
@click.pass_obj
def inspect_command(app: App, ref: str | None) -> None:
    """Show the store, or what REF names: a namespace (name, name@revision, digest), a segment id or a page's hash.

    Six digits or more of an id are enough. If they fit several kinds, write namespace:REF, segment:REF or page:REF.
    """
    with app.open() as store:
        if ref is None:
            _store(app, store)
            return
        kind, found = _find(store.catalog, ref)
        if kind == "namespace":
            _namespace(app, store.catalog, found)
        elif kind == "segment":
            _segment(app, store, found)
        else:
            _page(app, store, found)


def _find(catalog: Catalog, ref: str) -> tuple[str, Any]:
    """(kind, object) that REF names."""
    from kvfs.catalog.catalog import NotFoundError, listed
    from kvfs.errors import ConfigError

    kind, colon, rest = ref.partition(":")
    kinds, name = ((kind,), rest) if colon and kind in KINDS else (KINDS, ref)
    found: dict[str, Any] = {}
    if "namespace" in kinds:
        try:
            found["namespace"] = catalog.find(name)
        except NotFoundError:
            if len(kinds) == 1:
                raise
    name = name.lower()
    if "segment" in kinds and (segments := catalog.find_segments(name)):
        if len(segments) > 1:
            ids = listed(s.row.segment_id.hex()[:16] for s in segments)
            raise ConfigError(f"{name!r} names {len(segments)} segments: {ids}; give more digits")
        found["segment"] = segments[0]
    if "page" in kinds and not found and (pages := catalog.find_pages(name)):
        found["page"] = pages
    if not found:
        raise NotFoundError(
            f"this store has no {ref!r}: give a namespace, or 6 digits or more of a namespace, segment or page; "
            "kvfs ls lists them"
        )
    if len(found) > 1:
        raise ConfigError(f"{ref!r} names a {' and a '.join(found)}: write {' or '.join(f'{k}:{name}' for k in found)}")
    return next(iter(found.items()))


def dtype_of(described: Described) -> str:
    """Names of the cell dtypes of a namespace; hybrids have several."""
    return _dtypes(tuple(g.cell.encoding for g in described.layout.groups))


@functools.lru_cache(maxsize=64)
def _dtypes(encodings: tuple[str, ...]) -> str:
    return ",".join(sorted({encoding.split()[0] for encoding in encodings}))


def namespace_data(info: NamespaceInfo) -> dict[str, Any]:
    d = info.described
    return {
        "name": d.name, "revision": d.revision, "digest": d.digest.hex(), "salted": bool(d.salt),
        "cell": dtype_of(d), "page_tokens": d.layout.page_tokens, "page_bytes": d.layout.page_bytes,
        "pages": info.pages, "bytes": info.nbytes, "segments": info.segments, "last_used_us": info.last_used_us,
    }  # fmt: skip


def namespace_columns(i: NamespaceInfo, now_us: int) -> tuple[str, ...]:
    return (
        i.label, dtype_of(i.described), str(i.described.layout.page_tokens), text.count(i.pages), text.size(i.nbytes),
        text.age(i.last_used_us, now_us), i.digest.hex()[:12],
    )  # fmt: skip


def namespace_table(infos: Iterable[NamespaceInfo], now_us: int, width: int | None) -> list[str]:
    heads, columns = NAMESPACE_HEADS
    return text.table(heads, (namespace_columns(i, now_us) for i in infos), columns, width)


def _store(app: App, store: Store) -> None:
    from kvfs.directory.liveness import census
    from kvfs.directory.root import Directory
    from kvfs.errors import StoreLockedError
    from kvfs.system.files import Files

    stats, infos, files = store.stats(), store.catalog.namespaces(), Files()
    directory = Directory(store.path, files, read_only=True)
    try:  # without this process, which only inspects
        users = sum(alive for _, alive in census(directory)) - (not store.read_only)
    finally:
        directory.close()
    if "used_bytes" not in stats:
        raise StoreLockedError(f"{store.path}: the index does not answer; kvfs doctor says which process holds it")
    used = stats["used_bytes"] + store.settings.index_bytes
    pins, quotas = len(store.pins()), stats.get("quotas", {})
    data = {
        "path": store.path, "format": stats["format"], "store_id": stats["store_id"], "mode": stats["mode"],
        "processes": users,
        "capacity_bytes": stats["capacity_bytes"], "used_bytes": used, "segments": stats["segments"], "pins": pins,
        "index_bytes": stats["index_bytes"], "index_bytes_max": store.settings.index_bytes, "quotas": quotas,
        "namespaces": [namespace_data(i) for i in infos] if app.out.json else [],
    }  # fmt: skip

    def lines() -> Iterable[str]:
        limit = stats["capacity_bytes"]
        yield f"store    {store.path}"
        yield (
            f"format   {stats['format']}   id {stats['store_id'][:8]}   mode {stats['mode']}   "
            f"open by {users} {'process' if users == 1 else 'processes'}"
        )
        share = f"{text.bar(used, limit)}  {text.percent(used, limit)}"
        yield f"limit    {text.size(limit)}   used {text.size(used)}  {share}"
        states = ", ".join(f"{n} {state}" for state, n in stats["segments"].items() if n) or "none"
        index = f"{text.size(stats['index_bytes'])} of {text.size(store.settings.index_bytes)}"
        yield f"segments {states}   index {index}   pins {pins}"
        for name, quota in quotas.items():
            yield f"quota    {_filled(name, quota)}"
        if infos:
            yield ""
            yield from namespace_table(infos, files.now_us(), app.out.width)

    app.out.result(data, lines, (i.digest.hex() for i in infos))


def _filled(name: str, quota: Mapping[str, int | None]) -> str:
    used, cap, guaranteed = quota["used_bytes"] or 0, quota["cap_bytes"], quota["guaranteed_bytes"]
    line = f"{text.printable(name)}   used {text.size(used)}"
    if cap is not None:
        line += f" of {text.size(cap)}  {text.bar(used, cap)}  {text.percent(used, cap)}"
    return line + (f"   guaranteed {text.size(guaranteed)}" if guaranteed else "")


def _namespace(app: App, catalog: Catalog, described: Described) -> None:
    from kvfs.catalog.catalog import NamespaceInfo
    from kvfs.system.files import Files

    info = next((i for i in catalog.namespaces() if i.digest == described.digest), NamespaceInfo(described))
    body = described.body
    groups: list[dict[str, Any]] = [
        {"name": g.name, "layers": len(g.layers), "heads": g.heads, "cell": g.cell.encoding, "need": g.need.kind,
         "page_bytes": g.page_bytes}
        for g in described.layout.groups
    ]  # fmt: skip
    data = namespace_data(info) | {
        "rope": body["rope"], "adapter": body["adapter"], "epoch": body["epoch"], "groups": groups,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield from text.pairs(
            [
                ("namespace", described.name),
                ("revision", described.revision),
                ("digest", described.digest.hex()),
                ("salted", "yes" if described.salt else "no"),
                ("chunk", f"{described.layout.page_tokens} tokens, {text.size(described.layout.page_bytes)} per page"),
                (
                    "stored",
                    f"{text.count(info.pages)} pages, {text.size(info.nbytes)}, in {info.segments} segments",
                ),
                ("last used", text.age(info.last_used_us, Files().now_us())),
                ("rope", str(body["rope"]) if body["rope"] else "-"),
                ("adapter", body["adapter"] or "-"),
            ]
        )
        yield ""
        rows = [
            (g["name"], str(g["layers"]), str(g["heads"]), g["cell"], g["need"], text.size(g["page_bytes"]))
            for g in groups
        ]
        yield from text.table(("GROUP", "LAYERS", "HEADS", "CELL", "NEED", "PAGE"), rows, "lrrllr", app.out.width)

    app.out.result(data, lines, [described.digest.hex()])


def _segment(app: App, store: Store, info: SegmentInfo) -> None:
    from kvfs.index.tables import STATE_NAMES
    from kvfs.system.files import Files

    row = info.row
    name = f"{row.segment_id.hex()}.kvs"
    files = Files()
    folder = "doomed" if STATE_NAMES[row.state] == "dropped" else "segments"
    path = os.path.join(store.path, folder, name)
    size, cached = 0, None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            cached = files.cached_bytes(fd, 0, size) if size else 0
        finally:
            os.close(fd)
    except OSError:
        path = ""
    labels = {d.digest: d.label for d in store.catalog.described()}
    pins = [p.name for p in store.pins() if row.segment_id.hex() in p.segments]
    contents: list[dict[str, Any]] = [
        {"namespace": labels.get(c.digest, c.digest.hex()[:12]), "pages": c.records, "bytes": c.stored_bytes}
        for c in info.contents
    ]
    data = {
        "segment_id": row.segment_id.hex(), "state": STATE_NAMES[row.state], "records": row.records,
        "file_bytes": size, "allocated_bytes": row.allocated, "cached_bytes": cached, "expires": row.expires,
        "pins": pins, "contents": contents, "path": path,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield from text.pairs(
            [
                ("segment", row.segment_id.hex()),
                ("state", STATE_NAMES[row.state]),
                ("file", f"{text.size(size)}   {path}" if path else "missing"),
                ("charged", text.size(row.allocated)),
                ("page cache", text.size(cached) if cached is not None else "the kernel does not say"),
                ("records", text.count(row.records)),
                ("pinned by", ", ".join(pins) or "-"),
            ]
        )
        if contents:
            yield ""
            rows = [(c["namespace"], text.count(c["pages"]), text.size(c["bytes"])) for c in contents]
            yield from text.table(("NAMESPACE", "PAGES", "SIZE"), rows, "lrr", app.out.width)

    app.out.result(data, lines, [row.segment_id.hex()])


def _page(app: App, store: Store, pages: list[PageInfo]) -> None:
    from kvfs.format.codec import NAMES as codec_names
    from kvfs.pages.layout import Part
    from kvfs.system.files import Files

    labels = {d.digest: d for d in store.catalog.described()}
    now = Files().now_us()
    records: list[dict[str, Any]] = []
    for page in pages:
        located = page.located
        described = labels.get(located.digest) if located is not None else None
        entry = located.entry if located is not None else None
        groups = described.layout.groups if described is not None else ()
        part = Part.unpack(entry.part) if entry is not None else None
        records.append(
            {
                "namespace": described.label if described is not None else "",
                "group": groups[entry.group].name if entry is not None and entry.group < len(groups) else "",
                "heads": [part.head, part.head + part.heads] if part is not None else [],
                "layers": [part.layer, part.layer + part.layers] if part is not None else [],
                "chunk": entry.chunk if entry is not None else -1,
                "segment_id": page.segment_id.hex(),
                "offset": page.place.block * 4096,
                "bytes": page.place.stored_bytes,
                "codec": codec_names.get(page.place.codec, str(page.place.codec)),
                "raw_bytes": entry.raw_bytes if entry is not None else page.place.stored_bytes,
                "written_us": entry.written_us if entry is not None else 0,
                "last_used_us": page.last_used_us,
                "expires": page.place.expires,
            }
        )
    data = {"hash": pages[0].chunk_hash.hex(), "records": records}

    def lines() -> Iterable[str]:
        yield f"page     {pages[0].chunk_hash.hex()}"
        for r in records:
            yield from (
                f"stored   {r['namespace']}  chunk {r['chunk']}  group {r['group']}  {text.size(r['bytes'])}"
                + (f" ({r['codec']}, of {text.size(r['raw_bytes'])})" if r["codec"] != "raw" else ""),
                f"         heads {r['heads']}  layers {r['layers']}",
                f"in       segment {r['segment_id'][:12]} at {r['offset']}",
                f"used     {text.age(r['last_used_us'], now)}, written {text.age(r['written_us'], now)}",
            )

    app.out.result(data, lines, [pages[0].chunk_hash.hex()])
