"""``kvfs push``, ``kvfs pull`` and ``kvfs remote``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from kvfs.cli import text
from kvfs.cli.app import (
    EXIT_PROBLEMS,
    FILE,
    App,
    Command,
    CommandGroup,
    common,
    complete_namespaces,
    namespace_option,
)
from kvfs.cli.output import shown
from kvfs.cli.prompts import need_prompt, prompt_options, read_prompt

if TYPE_CHECKING:
    from kvfs.namespace import Namespace
    from kvfs.remote.upkeep import Removed
    from kvfs.store import Store


@click.command(
    "push",
    cls=Command,
    examples=("kvfs push chat", "kvfs push 46dddbe18fda", "kvfs push --prompt prompt.ids -n chat"),
)
@click.argument("targets", nargs=-1, metavar="[TARGET]...", shell_complete=complete_namespaces)
@click.option("--prompt", type=FILE, metavar="FILE", help="The stored part of this prompt; with -n.")
@namespace_option
@prompt_options
@common
@click.pass_obj
def push_command(
    app: App, targets: tuple[str, ...], prompt: str | None, ref: str | None, kind: str, tokenizer: str | None
) -> int:
    """Store pages in the bucket of the setting remote.url, unless they are there.

    TARGET is a namespace, or the id of a prefix from `kvfs ls NAMESPACE`. Every page is verified before it is sent.
    A push that was interrupted goes on where it ended when it is run again. Pages with a ttl stay here. Exit code 3 if
    the bucket did not take all of them.
    """
    need_prompt(prompt, ref, kind, tokenizer)
    if not targets and prompt is None:
        raise click.UsageError("nothing to push: give a namespace, the id of a prefix, or --prompt FILE")
    ids = read_prompt(prompt, kind, tokenizer) if prompt is not None else None
    with app.open() as store:
        spaces, prefixes = store.catalog.sort_out(targets)
        match = app.namespace(store, ref).match(ids) if ids is not None else None
        try:
            progress = shown(app.out, "pushing", text.pages)
            done = store.push(spaces, prefixes=prefixes, match=match, progress=progress)
        finally:
            if match is not None:
                match.close()
        url = store.settings.remote.url
    data = {
        "url": url, "pages": done.pages, "stored": done.stored, "present": done.present, "left_out": done.left_out,
        "failed": done.failed, "objects": done.objects, "bytes": done.nbytes, "problems": done.problems,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield from done.problems[: text.PROBLEMS_SHOWN]
        yield (
            f"pushed {text.count(done.stored)} of {text.count(done.pages)} pages ({text.size(done.nbytes)}) as "
            f"{text.count(done.objects)} objects to {url}, {text.count(done.present)} were there"
        )
        if done.left_out:
            yield f"left out {text.count(done.left_out)}: with a ttl, evicted meanwhile, or failed verification"
        if done.failed:
            yield f"{text.count(done.failed)} pages were not taken: run kvfs push again"

    app.out.result(data, lines, [str(done.stored)])
    return EXIT_PROBLEMS if done.failed else 0


@click.command(
    "pull",
    cls=Command,
    examples=("kvfs pull chat", "kvfs pull chat@1a2b", "kvfs pull --prompt prompt.ids -n chat"),
)
@click.argument("target", required=False, metavar="[NAMESPACE]")
@click.option("--prompt", type=FILE, metavar="FILE", help="Only what the bucket holds of this prompt; with -n.")
@namespace_option
@prompt_options
@common
@click.pass_obj
def pull_command(
    app: App, target: str | None, prompt: str | None, ref: str | None, kind: str, tokenizer: str | None
) -> int:
    """Store pages from the bucket of the setting remote.url here.

    NAMESPACE is one of `kvfs remote ls`, and so is that of -n. Every page is verified before it is published; what does
    not verify, or does not come, is missing, and the exit code is 3. With --prompt, no object is listed: their names
    follow from its tokens. Trust a bucket as much as the weights of a model: it says what the KV of a prompt is.
    """
    need_prompt(prompt, ref, kind, tokenizer)
    if (target is None) == (prompt is None):
        raise click.UsageError("give a NAMESPACE, or --prompt FILE with -n")
    ids = read_prompt(prompt, kind, tokenizer) if prompt is not None else None
    tokens = None
    with app.open(write=True, counted=True) as store:
        if ids is not None:
            namespace = _namespace(app, store, ref)
            done = store.pull(namespace, ids)
            with namespace.match(ids) as match:
                tokens = match.tokens
        else:
            done = store.pull(target or "", progress=shown(app.out, "pulling"))
        url = store.settings.remote.url
    data = {
        "url": url, "stored": done.stored, "skipped": done.skipped, "bytes": done.nbytes, "objects": done.objects,
        "fetched_bytes": done.fetched_bytes, "refused": done.refused, "failed": done.failed, "tokens": tokens,
        "problems": done.problems,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield from done.problems[: text.PROBLEMS_SHOWN]
        yield (
            f"pulled {text.count(done.stored)} pages ({text.size(done.nbytes)}) in {text.count(done.objects)} objects "
            f"from {url}, {text.count(done.skipped)} were already stored"
        )
        if ids is not None and tokens is not None:
            yield f"{text.count(tokens)} of {text.count(len(ids))} tokens are stored here now"
        if done.refused or done.failed:
            yield f"{text.count(done.refused)} objects were refused, {text.count(done.failed)} could not be fetched"

    app.out.result(data, lines, [str(done.stored)])
    return EXIT_PROBLEMS if done.refused or done.failed else 0


def _namespace(app: App, store: Store, ref: str | None) -> Namespace:
    """The namespace of the store that ``ref`` names, else that of the bucket: a new host has none."""
    from kvfs.catalog.catalog import NotFoundError, identity_of
    from kvfs.errors import ConfigError

    try:
        return app.namespace(store, ref)
    except NotFoundError:
        with store.bucket() as bucket:
            if ref is None:
                raise ConfigError("name a namespace of the bucket with -n: kvfs remote ls shows them") from None
            bucket.check()  # a name is found in descriptors, which may be encrypted
            described = bucket.find(ref)
        return store.namespace(**identity_of(described, os.environ.get("KVFS_SALT", "")))


@click.group(
    "remote",
    cls=CommandGroup,
    examples=("kvfs remote ls", "kvfs remote verify", "kvfs remote gc --older-than 30d", "kvfs remote rm chat --yes"),
)
@common
def remote_command() -> None:
    """Show, verify or clear the bucket of the setting remote.url, which other stores may share."""


@remote_command.command("ls", examples=("kvfs remote ls", "kvfs remote ls --json"))
@common
@click.pass_obj
def ls_command(app: App) -> None:
    """List the namespaces in the bucket. Reads the whole listing: one request per 1,000 objects."""
    from kvfs.remote import upkeep

    with app.open() as store, store.bucket() as bucket:
        bucket.check()
        found = upkeep.namespaces(bucket)
    now = time.time()
    data = {
        "url": bucket.url,
        "namespaces": [
            {
                "name": n.described.name, "revision": n.described.revision, "digest": n.described.digest.hex(),
                "objects": n.objects, "bytes": n.nbytes, "oldest_us": int(n.oldest * 1e6),
                "newest_us": int(n.newest * 1e6),
            }
            for n in found
        ],
    }  # fmt: skip

    def lines() -> Iterable[str]:
        def rows() -> Iterable[tuple[str, ...]]:
            for n in found:
                age = text.age(int(n.newest * 1e6), int(now * 1e6))
                digest = n.described.digest.hex()[:12]
                yield digest, n.described.label, text.count(n.objects), text.size(n.nbytes), age

        yield from text.table(("ID", "NAMESPACE", "OBJECTS", "BYTES", "LAST UPLOAD"), rows(), "f rr", app.out.width)

    app.out.result(data, lines, [n.described.digest.hex() for n in found])


@remote_command.command("verify", examples=("kvfs remote verify", "kvfs remote verify --repair"))
@click.option("--repair", is_flag=True, help="Remove the objects that do not verify.")
@common
@click.pass_obj
def verify_command(app: App, repair: bool) -> int:
    """Read and verify every object in the bucket. Exit code 3 if some do not verify or cannot be read."""
    from kvfs.remote import upkeep

    if repair:
        _check_writable(app)
    with app.open() as store, store.bucket() as bucket:
        bucket.check()
        progress = shown(app.out, "verifying", lambda n: f"{text.count(round(n))} objects")
        done = upkeep.verify(bucket, repair=repair, requests=store.settings.remote.requests, progress=progress)
    data = {
        "url": bucket.url, "objects": done.objects, "pages": done.pages, "bytes": done.nbytes, "bad": done.bad,
        "removed": done.removed, "failed": done.failed, "foreign": done.foreign, "problems": done.problems,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield from done.problems[: text.PROBLEMS_SHOWN]
        yield (
            f"{text.count(done.pages)} pages verify in {text.count(done.objects)} objects ({text.size(done.nbytes)}); "
            f"{text.count(done.bad)} objects do not verify"
        )
        if done.removed:
            yield f"removed {text.count(done.removed)}"
        if done.failed or done.foreign:
            yield f"{text.count(done.failed)} could not be read, {text.count(done.foreign)} are not of kvfs"

    app.out.result(data, lines, [])
    return EXIT_PROBLEMS if done.bad - done.removed or done.failed else 0


@remote_command.command("gc", examples=("kvfs remote gc --older-than 30d", "kvfs remote gc --older-than 30d --apply"))
@click.option("--older-than", metavar="AGE", help="Age, such as 30d; default: remote.retention.")
@click.option("--apply", is_flag=True, help="Remove them.")
@common
@click.pass_obj
def gc_command(app: App, older_than: str | None, apply: bool) -> None:
    """Show what is older than the retention, or remove it with --apply.

    A host that has just found a removed object gets a shorter prefix, never wrong bytes. Age counts from the upload,
    or with the setting remote.retention_from = use from the last use of an object, by the clock of the object store.
    It needs no key of an encrypted bucket.
    """
    from kvfs.directory.config import REMOTE_RETENTION_MIN, REMOTE_UNUSED_MIN, parse_duration
    from kvfs.errors import ConfigError
    from kvfs.remote import upkeep

    if apply:
        _check_writable(app)
    with app.open() as store, store.bucket(keyless=True) as bucket:
        age = parse_duration(older_than, "--older-than") if older_than else store.settings.remote.retention_seconds
        if age is None:
            raise ConfigError("no retention is set: give --older-than 30d, or kvfs config set remote.retention 30d")
        by_use = store.settings.remote.retention_from == "use"
        if age < REMOTE_RETENTION_MIN:
            raise ConfigError(f"--older-than is {age:g} s: give at least 1h, since clocks differ")
        if by_use and age < REMOTE_UNUSED_MIN:
            raise ConfigError(f"--older-than is {age:g} s: give at least 2d, since uses are noted once a day")
        bucket.check_marked()
        done = upkeep.collect(bucket, time.time() - age, apply=apply, by_use=by_use)
    _show_removed(app, bucket.url, done, apply=apply)


@remote_command.command(
    "rm", examples=("kvfs remote rm chat", "kvfs remote rm chat --yes", "KVFS_SALT=... kvfs remote rm --tenant --yes")
)
@click.argument("ref", required=False, metavar="[NAMESPACE]")
@click.option("--tenant", is_flag=True, help="Everything that was uploaded under the salt in $KVFS_SALT.")
@click.option("--yes", is_flag=True, help="Remove it; otherwise only show what would be removed.")
@common
@click.pass_obj
def rm_command(app: App, ref: str | None, tenant: bool, yes: bool) -> None:
    """Remove a namespace or a tenant from the bucket, for all hosts. What hosts hold themselves stays: see kvfs rm."""
    from kvfs.errors import ConfigError
    from kvfs.pages.identity import salt_digest
    from kvfs.remote import upkeep

    if (ref is not None) == tenant:
        raise click.UsageError("give a NAMESPACE, or --tenant")
    salt = os.environ.get("KVFS_SALT", "")
    if tenant and not salt:
        raise ConfigError("--tenant removes what was uploaded under a salt: set it in $KVFS_SALT")
    if yes:
        _check_writable(app)
    with app.open() as store, store.bucket(keyless=tenant) as bucket:
        bucket.check_marked()
        if ref is None:
            done = upkeep.remove_tenant(bucket, salt_digest(salt), apply=yes)
        else:
            bucket.check()  # a name is found in descriptors, which may be encrypted
            done = upkeep.remove(bucket, bucket.find(ref), apply=yes)
    _show_removed(app, bucket.url, done, apply=yes)


def _show_removed(app: App, url: str, done: Removed, *, apply: bool) -> None:
    data = {
        "url": url, "objects": done.objects, "bytes": done.nbytes, "kept": done.kept, "used": done.used,
        "applied": apply,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        what = f"{text.count(done.objects)} objects ({text.size(done.nbytes)}) from {url}"
        used = f", {text.count(done.used)} of them since they were used" if done.used else ""
        yield f"{'removed' if apply else 'would remove'} {what}, {text.count(done.kept)} stay{used}"

    app.out.result(data, lines, [str(done.objects)])


def _check_writable(app: App) -> None:
    from kvfs.errors import StoreReadOnlyError

    if app.read_only:
        raise StoreReadOnlyError("this changes the bucket, and KVFS_READONLY or --read-only is set: run it without")
