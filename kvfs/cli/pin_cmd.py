"""``kvfs pin``, ``kvfs pin ls`` and ``kvfs unpin``."""

from __future__ import annotations

import os
import re

import click

from kvfs.cli import text
from kvfs.cli.app import FILE, App, Command, CommandGroup, common, complete_pins, namespace_option
from kvfs.cli.prompts import FORMATS, prompt_options, read_prompt

_PREFIX = re.compile(r"[0-9a-f]{6,64}\Z")


class _PinGroup(CommandGroup):
    """``pin NAME PROMPT`` is short for ``pin add NAME PROMPT``."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            args = ["add", *args]
        return super().resolve_command(ctx, args)


@click.group(
    "pin",
    cls=_PinGroup,
    options_metavar="",
    subcommand_metavar="NAME PROMPT | ls",
    examples=("kvfs pin system prompt.ids -n chat", "kvfs pin system 46dddbe18fda", "kvfs pin ls"),
)
@common
def pin_command() -> None:
    """Keep the stored part of a prompt from eviction: `pin NAME PROMPT`; `pin ls` lists the pins.

    PROMPT is a file, or the id of a prefix from `kvfs ls NAMESPACE`.

    `pin add NAME PROMPT` is the long form, for a pin named ls or add.
    """


@pin_command.command("add", examples=("kvfs pin add ls prompt.ids -n chat",))
@click.argument("name")
@click.argument("prompt", metavar="PROMPT", type=FILE)
@namespace_option
@prompt_options
@common
@click.pass_obj
def add_command(app: App, name: str, prompt: str, ref: str | None, kind: str, tokenizer: str | None) -> None:
    """Pin the stored part of PROMPT as NAME. Pins may take half of the capacity.

    PROMPT is a file, or - for stdin, or the id of a prefix from `kvfs ls NAMESPACE`.
    """
    is_id = _PREFIX.match(prompt) is not None and not os.path.lexists(prompt)
    ids = None if is_id else read_prompt(prompt, kind, tokenizer)
    if is_id and (ref is not None or kind != FORMATS[0] or tokenizer is not None):
        raise click.UsageError("-n, --format and --tokenizer belong to a prompt: leave them out for the id of a prefix")
    with app.open(write=True) as store:
        tokens = store.pin_prefix(name, prompt) if ids is None else store.pin(name, app.namespace(store, ref), ids)
    of = tokens if ids is None else len(ids)
    data = {"name": name, "tokens": tokens, "of_tokens": of}
    app.out.result(data, lambda: [f"pinned {text.count(tokens)} of {text.count(of)} tokens as {name}"], [name])


@pin_command.command("ls", examples=("kvfs pin ls", "kvfs pin ls --json"))
@common
@click.pass_obj
def list_command(app: App) -> None:
    """List the pins."""
    from kvfs.system.files import Files

    with app.open() as store:
        pins = store.pins()
        labels = {d.digest.hex(): d.label for d in store.catalog.described()}
        sizes = {row.segment_id.hex(): row.allocated for _, row in store.catalog.segment_rows()}
    now = Files().now_us()
    items = [
        {
            "name": p.name, "namespace": labels.get(p.namespace, p.namespace[:12]), "tokens": p.tokens,
            "created_us": p.created_us, "segments": len(p.segments),
            "segments_bytes": sum(sizes.get(s, 0) for s in p.segments),
        }
        for p in pins
    ]  # fmt: skip
    rows = [
        (p.name, labels.get(p.namespace, p.namespace[:12]), text.count(p.tokens),
         text.size(sum(sizes.get(s, 0) for s in p.segments)), text.age(p.created_us, now))
        for p in pins
    ]  # fmt: skip
    heads = ("PIN", "NAMESPACE", "TOKENS", "IN SEGMENTS OF", "PINNED")
    app.out.result(
        {"items": items}, lambda: text.table(heads, rows, "llrrr", width=app.out.width), (p.name for p in pins)
    )


@click.command("unpin", cls=Command, examples=("kvfs unpin system",))
@click.argument("name", shell_complete=complete_pins)
@common
@click.pass_obj
def unpin_command(app: App, name: str) -> None:
    """Remove the pin NAME. Its pages stay until they are evicted."""
    from kvfs.catalog.catalog import NotFoundError, listed

    with app.open(write=True) as store:
        if not store.unpin(name):
            raise NotFoundError(f"no pin {name!r} in this store{listed((p.name for p in store.pins()), name)}")
    app.out.result({"name": name, "unpinned": True}, lambda: [f"unpinned {name}"], [name])
