"""``kvfs pin``, ``kvfs pin ls`` and ``kvfs unpin``."""

from __future__ import annotations

import click

from kvfs.cli import text
from kvfs.cli.app import App, common, complete_pins, namespace_option
from kvfs.cli.prompts import prompt_options, read_prompt


class _PinGroup(click.Group):
    """``pin NAME PROMPT`` is short for ``pin add NAME PROMPT``."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            args = ["add", *args]
        return super().resolve_command(ctx, args)


@click.group("pin", cls=_PinGroup, options_metavar="", subcommand_metavar="NAME PROMPT | ls")
@common
def pin_command() -> None:
    """Keep the stored part of a prompt from eviction: `pin NAME PROMPT`; `pin ls` lists the pins.

    `pin add NAME PROMPT` is the long form, for a pin named ls or add.
    """


@pin_command.command("add")
@click.argument("name")
@click.argument("prompt", metavar="PROMPT")
@namespace_option
@prompt_options
@common
@click.pass_obj
def add_command(app: App, name: str, prompt: str, ref: str | None, kind: str, tokenizer: str | None) -> None:
    """Pin the stored part of PROMPT as NAME. Pins may take half of the capacity."""
    ids = read_prompt(prompt, kind, tokenizer)
    with app.open(write=True) as store:
        tokens = store.pin(name, app.namespace(store, ref), ids)
    data = {"name": name, "tokens": tokens, "of_tokens": len(ids)}
    app.out.result(data, lambda: [f"pinned {text.count(tokens)} of {text.count(len(ids))} tokens as {name}"], [name])


@pin_command.command("ls")
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
    app.out.result({"items": items}, lambda: text.table(heads, rows, "llrrr"), (p.name for p in pins))


@click.command("unpin")
@click.argument("name", shell_complete=complete_pins)
@common
@click.pass_obj
def unpin_command(app: App, name: str) -> None:
    """Remove the pin NAME. Its pages stay until they are evicted."""
    from kvfs.catalog.catalog import NotFoundError

    with app.open(write=True) as store:
        if not store.unpin(name):
            names = ", ".join(p.name for p in store.pins()[:8]) or "none"
            raise NotFoundError(f"there is no pin {name!r}; there are: {names}")
    app.out.result({"name": name, "unpinned": True}, lambda: [f"unpinned {name}"], [name])
