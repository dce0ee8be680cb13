"""``kvfs export`` and ``kvfs import``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import click

from kvfs.cli import text
from kvfs.cli.app import EXIT_PROBLEMS, FILE, App, Command, common, complete_namespaces, namespace_option
from kvfs.cli.output import shown
from kvfs.cli.prompts import FORMATS, need_prompt, read_prompt, tokenizer_option

KINDS = ("bundle", "safetensors")  # of the file that export writes


@click.command(
    "export",
    cls=Command,
    examples=(
        "kvfs export all.tar chat code",
        "kvfs export one.tar 46dddbe18fda",
        "kvfs export one.tar --prompt prompt.ids -n chat",
        "kvfs export chat.safetensors 46dddbe18fda --format safetensors",
    ),
)
@click.argument("file", metavar="FILE", type=FILE)
@click.argument("targets", nargs=-1, metavar="[TARGET]...", shell_complete=complete_namespaces)
@click.option("--prompt", type=FILE, metavar="FILE", help="Only the stored part of this prompt; with -n.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option(
    "--key-file", type=FILE, metavar="FILE", help="Sign the bundle for stores whose bundle_key is the same file."
)
@namespace_option
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice((*FORMATS, *KINDS)),
    metavar="FORMAT",
    help="For FILE: bundle (the default), safetensors. For the prompt, as with match: auto, ids, json, bin, text.",
)
@tokenizer_option
@common
@click.pass_obj
def export_command(
    app: App, file: str, targets: tuple[str, ...], prompt: str | None, force: bool, key_file: str | None,
    ref: str | None, formats: tuple[str, ...], tokenizer: str | None,
) -> None:  # fmt: skip
    """Write namespaces, prefixes, or the stored part of one prompt, to FILE.

    TARGET is a namespace, or the id of a prefix from `kvfs ls NAMESPACE`. Every page is verified. A bundle is for
    `kvfs import`; the digest that is printed identifies it. A safetensors file is for other tools: tensors of one
    prompt or one prefix.
    """
    from kvfs.errors import ConfigError

    kind, how = _sort_out(formats)
    if bool(targets) == (prompt is not None):
        raise click.UsageError(
            "nothing to export, or too much at once: give namespaces or prefixes, or --prompt FILE with -n"
        )
    need_prompt(prompt, ref, how, tokenizer)
    if file == "-":
        raise click.UsageError(
            "an export is renamed into place once it is verified, so it cannot go to a stream: name a file"
        )
    if os.path.lexists(file) and not force:
        raise ConfigError(f"{file} exists already: choose another name, or pass --force")
    ids = None if prompt is None else read_prompt(prompt, how, tokenizer)
    if kind == "safetensors":
        if key_file is not None:
            raise click.UsageError("--key-file signs bundles: leave it out for a safetensors file")
        _export_tensors(app, file, targets, ids, prompt, ref)
    else:
        _export_bundle(app, file, targets, ids, prompt, ref, key_file)


def _sort_out(formats: tuple[str, ...]) -> tuple[str, str]:
    """(format of the file, format of the prompt)."""
    kinds, prompts = [f for f in formats if f in KINDS], [f for f in formats if f not in KINDS]
    if len(kinds) > 1 or len(prompts) > 1:
        raise click.UsageError(
            f"--format is given as {', '.join(formats)}: give one for the file and one for the prompt"
        )
    return kinds[0] if kinds else KINDS[0], prompts[0] if prompts else "auto"


def _export_tensors(
    app: App, file: str, targets: tuple[str, ...], ids: Sequence[int] | None, prompt: str | None, ref: str | None
) -> None:
    from kvfs.errors import ConfigError

    if len(targets) > 1:
        raise click.UsageError("a safetensors file holds one prompt: give one prefix, or --prompt FILE with -n")
    with (
        app.open() as store,
        app.namespace(store, ref).match(ids) if ids is not None else store.match_prefix(targets[0]) as match,
    ):
        if not match.tokens:
            raise ConfigError(f"nothing of {prompt or targets[0]} is stored: kvfs match shows what is")
        done = store.export_tensors(file, match, ids, progress=shown(app.out, "exporting"))
        namespace = match.namespace.hex()
    data = {
        "file": done.path, "namespace": namespace, "tokens": done.tokens, "pages": done.pages, "tensors": done.tensors,
        "bytes": done.nbytes, "file_bytes": done.file_bytes,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield (
            f"exported {text.count(done.tokens)} tokens ({text.count(done.pages)} pages, {text.size(done.nbytes)}) as "
            f"{text.count(done.tensors)} tensors to {done.path}"
        )

    app.out.result(data, lines, [done.path])


def _export_bundle(
    app: App, bundle: str, targets: tuple[str, ...], ids: Sequence[int] | None, prompt: str | None, ref: str | None,
    key_file: str | None,
) -> None:  # fmt: skip
    from kvfs.errors import ConfigError

    with app.open() as store:
        match = app.namespace(store, ref).match(ids) if ids is not None else None
        try:
            if match is not None and not match.tokens:
                raise ConfigError(f"nothing of {prompt} is stored: kvfs match shows what is")
            progress = shown(app.out, "exporting", text.pages)
            spaces, prefixes = store.catalog.sort_out(targets)
            done = store.export(bundle, spaces, prefixes=prefixes, match=match, key_file=key_file, progress=progress)
        finally:
            if match is not None:
                match.close()
    data = {
        "bundle": done.path, "digest": done.digest, "pages": done.pages, "bytes": done.nbytes,
        "segments": done.segments, "file_bytes": done.file_bytes, "left_out": done.left_out,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield f"exported {text.count(done.pages)} pages ({text.size(done.nbytes)}) to {done.path}"
        if done.left_out:
            yield f"left out {text.count(done.left_out)}: evicted meanwhile, or failed verification (kvfs verify --all)"
        yield f"digest {done.digest}"

    app.out.result(data, lines, [done.digest])


@click.command(
    "import",
    cls=Command,
    examples=("kvfs import all.tar", "kvfs import all.tar -n chat", "kvfs import all.tar --digest 2b11807b3c4401ba"),
)
@click.argument("bundle", metavar="BUNDLE", type=FILE)
@click.option("-n", "--namespace", "namespaces", metavar="NAME", multiple=True, help="Only the pages of NAME.")
@click.option("--digest", metavar="HEX", help="Refuse any other bundle: 16 digits or more of what export showed.")
@click.option("--partial", is_flag=True, help="Store the pages of a damaged bundle that verify. Exit code 3.")
@common
@click.pass_obj
def import_command(app: App, bundle: str, namespaces: tuple[str, ...], digest: str | None, partial: bool) -> int:
    """Verify every page of BUNDLE and store its pages. Of a bundle that was changed nothing is stored.

    Trust a bundle as much as the weights of a model: it says what the KV of a prompt is, in every namespace that it
    names. -n limits it to some; --digest or the setting bundle_key make sure where it comes from.
    """
    from kvfs.bundles.exporter import BundleError

    with app.open(write=True, counted=True) as store:
        try:
            progress = shown(app.out, "importing")
            done = store.import_bundle(bundle, namespaces=namespaces, partial=partial, digest=digest, progress=progress)
        except BundleError as exc:
            raise BundleError(f"{bundle}: {exc}; nothing was imported") from None
    data = {
        "bundle": bundle, "digest": done.digest, "pages": done.pages, "stored": done.stored, "skipped": done.skipped,
        "expired": done.expired, "bad": done.bad, "bytes": done.nbytes, "problems": done.problems,
        "left_out": done.left_out, "namespaces": done.namespaces,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield from done.problems[: text.PROBLEMS_SHOWN]
        yield (
            f"imported {text.count(done.stored)} of {text.count(done.pages)} pages ({text.size(done.nbytes)}), "
            f"{text.count(done.skipped)} were already stored"
        )
        for name, pages in list(done.namespaces.items())[: text.PROBLEMS_SHOWN]:
            yield f"in {name} {text.count(pages)} pages"
        if done.left_out:
            yield f"left out {text.count(done.left_out)} of other namespaces"
        if done.bad or done.expired:
            yield f"left out {text.count(done.bad)} that fail verification, {text.count(done.expired)} expired"

    app.out.result(data, lines, [str(done.stored)])
    return EXIT_PROBLEMS if done.bad else 0
