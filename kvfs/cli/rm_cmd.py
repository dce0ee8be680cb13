"""``kvfs rm``: removes pages permanently."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from kvfs.cli import text
from kvfs.cli.app import App, common, complete_namespaces, namespace_option
from kvfs.cli.prompts import need_prompt, prompt_options, read_prompt

if TYPE_CHECKING:
    from kvfs.catalog.catalog import NamespaceInfo


def _is_of_engine(info: NamespaceInfo) -> bool:
    """Whether vLLM stored it: the salts of its requests are in chunk hashes only, so all tenants share a namespace."""
    extra = info.described.body["extra"]
    return info.pages > 0 and isinstance(extra, dict) and extra.get("engine") == "vllm"


@click.command("rm")
@click.argument("namespaces", nargs=-1, metavar="[NAMESPACE]...", shell_complete=complete_namespaces)
@click.option(
    "--prompt", metavar="FILE", help="Only the chunks of this prompt; with -n. Includes heads that other prompts share."
)
@click.option("--tenant", is_flag=True, help="Everything stored under the salt in $KVFS_SALT.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@namespace_option
@prompt_options
@common
@click.pass_obj
def rm_command(
    app: App, namespaces: tuple[str, ...], prompt: str | None, tenant: bool, dry_run: bool, yes: bool, ref: str | None,
    kind: str, tokenizer: str | None,
) -> None:  # fmt: skip
    """Remove NAMESPACEs, a prompt or a tenant: no lookup finds them afterwards, and no rebuild restores them.

    Refused while a pin protects some of it. The bytes stay on disk until their segments are reclaimed.
    """
    from kvfs.catalog.catalog import NamespaceInfo, NotFoundError
    from kvfs.errors import ConfigError
    from kvfs.pages.identity import salt_digest

    if bool(namespaces) + (prompt is not None) + tenant != 1:
        raise click.UsageError(
            "nothing to remove, or too much at once: give namespaces, or --prompt FILE with -n, or --tenant"
        )
    need_prompt(prompt, ref, kind, tokenizer)
    salt = os.environ.get("KVFS_SALT", "")
    if tenant and not salt:
        raise ConfigError("--tenant removes what is stored under a salt: set it in $KVFS_SALT")
    ids = None if prompt is None else read_prompt(prompt, kind, tokenizer)
    with app.open(write=not dry_run, counted=not dry_run) as store:
        infos = {i.digest: i for i in store.catalog.namespaces()}
        if ids is not None:
            ns = app.namespace(store, ref)
            prompt_pages = ns.prompt(ids)  # a match would end at a gap, and of windows hold the last pages only
            prompt_pages.look()
            stored = {name: bits.bit_count() for name, bits in prompt_pages.stored.items()}
            pages = sum(stored.values())
            nbytes = sum(n * ns.layout.group(name).page_bytes for name, n in stored.items())
            what = [f"{text.count(pages)} pages of {prompt} ({text.size(nbytes)})"]
        else:
            if tenant:
                chosen = [i for i in infos.values() if i.described.salt == salt_digest(salt)]
            else:
                found = {d.digest: d for d in map(store.catalog.find, namespaces)}  # one may be named twice
                chosen = [infos.get(digest) or NamespaceInfo(d) for digest, d in found.items()]
            chosen = [i for i in chosen if i.pages or not tenant]
            pages, nbytes = sum(i.pages for i in chosen), sum(i.nbytes for i in chosen)
            what = [f"{i.label} ({text.count(i.pages)} pages, {text.size(i.nbytes)})" for i in chosen]
        data = {"dry_run": dry_run, "pages": pages, "bytes": nbytes, "segments_dropped": 0, "bytes_freed": 0}
        if not dry_run:
            app.out.confirm(f"Remove {', '.join(what) or 'nothing'}?", yes=yes)
            if ids is not None:
                results = [store.purge(ns, prefix=ids)]
            elif tenant:
                results = [store.purge(salt=salt)]
            else:
                results = [store.purge(i.digest) for i in chosen]
            data["pages"] = sum(r.pages for r in results)
            data["segments_dropped"] = sum(r.segments_dropped for r in results)
            data["bytes_freed"] = sum(r.bytes_freed for r in results)
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
