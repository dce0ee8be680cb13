"""``kvfs match``: how much of a prompt is stored, where the first gap is, and in which tier the pages are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import click

from kvfs.cli import text
from kvfs.cli.app import FILE, App, Command, common, namespace_option
from kvfs.cli.prompts import prompt_options, read_prompt

_TIERS = {"HOST": "page cache", "DISK": "disk", "REMOTE": "remote", "DEVICE": "device"}


@click.command(
    "match",
    cls=Command,
    examples=(
        "kvfs match -n chat prompt.ids",
        "echo 1 2 3 | kvfs match -n chat --format ids -",
        "kvfs match -n chat prompt.txt --tokenizer tokenizer.json",
    ),
)
@click.argument("prompt", metavar="PROMPT", type=FILE)
@namespace_option
@prompt_options
@common
@click.pass_obj
def match_command(app: App, prompt: str, ref: str | None, kind: str, tokenizer: str | None) -> None:
    """Show how many tokens of PROMPT (a file, or - for stdin) can be restored.

    Walks the index as an engine does, but counts no lookup. The salt of a salted namespace is taken from $KVFS_SALT.
    """
    from kvfs.pages.identity import label

    ids = read_prompt(prompt, kind, tokenizer)
    with app.open() as store:
        ns = app.namespace(store, ref)
        hashes = ns.chunk_hashes(ids)
        step = ns.layout.page_tokens
        with ns.match(ids) as match:
            tiers = Counter(page.tier.name for page in match.pages)
            matched, nbytes = match.tokens, match.nbytes
    chunks, tail = divmod(len(ids), step)
    gap = hashes[matched // step].hex() if matched // step < len(hashes) else None
    data = {
        "namespace": label(ns.identity.name, ns.identity.revision), "tokens": len(ids), "chunks": chunks,
        "tail_tokens": tail, "matched_tokens": matched, "pages": sum(tiers.values()), "bytes": nbytes,
        "tiers": {name.lower(): n for name, n in sorted(tiers.items())},
        "first_gap": None if gap is None else {"token": matched, "chunk": matched // step, "hash": gap},
        "last_hash": hashes[matched // step - 1].hex() if matched else None,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        yield f"tokens  {text.count(len(ids))}   chunks {text.count(chunks)} full + {tail} tokens tail"
        where = " | ".join(f"{_TIERS[name]} {text.count(n)}" for name, n in sorted(tiers.items(), reverse=True))
        yield (
            f"matched {text.count(matched)} tokens ({text.percent(matched, len(ids))})   "
            f"{text.count(sum(tiers.values()))} pages, {text.size(nbytes)}   {where}".rstrip()
        )
        if not chunks:
            yield f"shorter than a chunk ({step} tokens): none of it can be stored"
        elif gap is None:
            yield "no gap: every full chunk is stored"
        else:
            yield f"first gap at token {text.count(matched)} (chunk {matched // step}, hash {gap[:12]})"

    app.out.result(data, lines, [str(matched)])
