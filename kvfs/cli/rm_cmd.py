"""``kvfs rm``: removes pages permanently."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from kvfs.cli import text
from kvfs.cli.app import FILE, App, Command, common, complete_namespaces, namespace_option
from kvfs.cli.prompts import need_prompt, prompt_options, read_prompt

if TYPE_CHECKING:
    from kvfs.catalog.catalog import NamespaceInfo, PrefixPages


def _is_of_engine(info: NamespaceInfo) -> bool:
    """Whether vLLM stored it: the salts of its requests are in chunk hashes only, so all tenants share a namespace."""
    extra = info.described.body["extra"]
    return info.pages > 0 and isinstance(extra, dict) and extra.get("engine") == "vllm"


@click.command(
    "rm",
    cls=Command,
    examples=(
        "kvfs rm chat --dry-run",
        "kvfs rm 46dddbe18fda --yes",
        "kvfs rm --prompt prompt.ids -n chat",
        "KVFS_SALT=... kvfs rm --tenant",
    ),
)
@click.argument("targets", nargs=-1, metavar="[TARGET]...", shell_complete=complete_namespaces)
@click.option(
    "--prompt",
    type=FILE,
    metavar="FILE",
    help="Only the chunks of this prompt; with -n. Includes heads that other prompts share.",
)
@click.option("--tenant", is_flag=True, help="Everything stored under the salt in $KVFS_SALT.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@namespace_option
@prompt_options
@common
@click.pass_obj
def rm_command(
    app: App, targets: tuple[str, ...], prompt: str | None, tenant: bool, dry_run: bool, yes: bool, ref: str | None,
    kind: str, tokenizer: str | None,
) -> None:  # fmt: skip
    """Remove namespaces, prefixes, a prompt or a tenant permanently. TARGET is a namespace, or an id of `kvfs ls NAME`.

    No lookup finds the pages afterwards, and no rebuild restores them. Of a prefix, the pages that `kvfs ls` shows are
    removed; prompts that share them end there.

    Refused while a pin protects some of it. The bytes stay on disk until their segments are reclaimed.
    """
    from kvfs.catalog.catalog import NamespaceInfo, NotFoundError
    from kvfs.errors import ConfigError
    from kvfs.pages.identity import salt_digest

    if bool(targets) + (prompt is not None) + tenant != 1:
        raise click.UsageError(
            "nothing to remove, or too much at once: give namespaces or prefixes, or --prompt FILE with -n, or --tenant"
        )
    need_prompt(prompt, ref, kind, tokenizer)
    salt = os.environ.get("KVFS_SALT", "")
    if tenant and not salt:
        raise ConfigError("--tenant removes what is stored under a salt: set it in $KVFS_SALT")
    ids = None if prompt is None else read_prompt(prompt, kind, tokenizer)
    with app.open(write=not dry_run, counted=not dry_run) as store:
        infos = {i.digest: i for i in store.catalog.namespaces()} if ids is None else {}
        if ids is not None:
            ns = app.namespace(store, ref)
            prompt_pages = ns.prompt(ids)  # a match would end at a gap, and of windows hold the last pages only
            prompt_pages.look()
            stored = {name: bits.bit_count() for name, bits in prompt_pages.stored.items()}
            pages = sum(stored.values())
            nbytes = sum(n * ns.layout.group(name).page_bytes for name, n in stored.items())
            what = [f"{text.count(pages)} pages of {prompt} ({text.size(nbytes)})"]
        else:
            prefixes: list[PrefixPages] = []
            if tenant:
                chosen = [i for i in infos.values() if i.described.salt == salt_digest(salt) and i.pages]
            else:
                names, ids_ = store.catalog.sort_out(targets)
                found = {d.digest: d for d in map(store.catalog.find, names)}  # one may be named twice
                chosen = [infos.get(digest) or NamespaceInfo(d) for digest, d in found.items()]
                prefixes = [store.catalog.pages_of_prefix(ref) for ref in dict.fromkeys(ids_)]
            pages = sum(i.pages for i in chosen) + sum(p.pages for p in prefixes)
            nbytes = sum(i.nbytes for i in chosen) + sum(p.nbytes for p in prefixes)
            what = [f"{i.label} ({text.count(i.pages)} pages, {text.size(i.nbytes)})" for i in chosen]
            what += [
                f"{p.last_hash.hex()[:12]} of {p.described.label} ({text.count(p.pages)} pages, {text.size(p.nbytes)})"
                for p in prefixes
            ]
        data = {"dry_run": dry_run, "pages": pages, "bytes": nbytes, "segments_dropped": 0, "bytes_freed": 0}
        if not dry_run:
            app.out.confirm(f"Remove {', '.join(what) or 'nothing'}?", yes=yes)
            if ids is not None:
                results = [store.purge(ns, prefix=ids)]
            elif tenant:
                results = [store.purge(salt=salt)]
            else:
                results = [store.purge(i.digest) for i in chosen]
                results += [store.purge(p.described.digest, chunks=p.names) for p in prefixes]
            data["pages"] = sum(r.pages for r in results)
            data["segments_dropped"] = sum(r.segments_dropped for r in results)
            data["bytes_freed"] = sum(r.bytes_freed for r in results)
            if store.settings.remote.url:
                app.out.note("what was uploaded is still in the bucket and may come back: kvfs remote rm removes it")
    if tenant:
        engines = sorted({i.label for i in infos.values() if _is_of_engine(i)})
        other = f"vLLM's cache_salt is not looked for, and may be in {', '.join(engines)}" if engines else ""
        if not data["pages"]:
            raise NotFoundError("nothing is stored under the salt in $KVFS_SALT" + (f"; {other}" if other else ""))
        if other:
            app.out.note(other)

    def lines() -> Iterable[str]:
        if dry_run:
            yield from (f"would remove {one}" for one in what or ["nothing"])
            return
        yield (
            f"removed {text.count(data['pages'])} pages, dropped {text.count(data['segments_dropped'])} segments, "
            f"freed {text.size(data['bytes_freed'])}"
        )

    app.out.result(data, lines, [str(data["pages"])])
