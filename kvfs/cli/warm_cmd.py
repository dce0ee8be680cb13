"""``kvfs warm``: reads pages into the page cache ahead of traffic."""

from __future__ import annotations

from collections.abc import Iterable

import click

from kvfs.cli import text
from kvfs.cli.app import EXIT_FAILED, FILE, App, Command, common, complete_namespaces, namespace_option
from kvfs.cli.output import Progress
from kvfs.cli.prompts import need_prompt, prompt_options, read_prompt

LIST_BYTES_MAX = 16 << 20  # characters of --list: some 200,000 ids


@click.command(
    "warm",
    cls=Command,
    examples=("kvfs warm chat", "kvfs warm --hottest 50GiB", "kvfs warm --pinned --check", "kvfs warm --list targets"),
)
@click.argument("targets", nargs=-1, metavar="[TARGET]...", shell_complete=complete_namespaces)
@click.option("--prompt", type=FILE, metavar="FILE", help="Warm the stored part of this prompt; with -n.")
@click.option("--pinned", is_flag=True, help="Warm all that is pinned.")
@click.option("--hottest", metavar="SIZE", help="Warm the pages that were used last, up to SIZE.")
@click.option("--list", "listed", type=FILE, metavar="FILE", help="Targets, one per line; - is stdin.")
@click.option("--check", is_flag=True, help="Only show how much is in the page cache.")
@namespace_option
@prompt_options
@common
@click.pass_obj
def warm_command(
    app: App, targets: tuple[str, ...], prompt: str | None, pinned: bool, hottest: str | None, listed: str | None,
    check: bool, ref: str | None, kind: str, tokenizer: str | None,
) -> int:  # fmt: skip
    """Read pages into the page cache. TARGET is a namespace, or the id of a prefix from `kvfs ls NAMESPACE`."""
    from kvfs.directory.config import parse_size
    from kvfs.system.memory_limits import memory_available

    need_prompt(prompt, ref, kind, tokenizer)
    ids = None if prompt is None else read_prompt(prompt, kind, tokenizer)
    names = [*targets, *(_read_list(listed) if listed is not None else ())]
    if not names and ids is None and not pinned and hottest is None:
        raise click.UsageError("nothing to warm: give a namespace, --prompt, --pinned, --hottest SIZE or --list FILE")
    nbytes = None if hottest is None else parse_size(hottest, "--hottest")
    bars: list[Progress] = []

    def progress(done: int, total: int) -> None:
        if not bars:
            bars.append(app.out.progress("warming", total))
            room = memory_available()
            if not check and room is not None and total > room:
                app.out.note(
                    f"{text.size(total)} to read and {text.size(room)} of memory available: the last pages will push "
                    "the first ones out of the page cache"
                )
        bars[0](done)

    with app.open() as store:
        spaces, prefixes = store.catalog.sort_out(names)
        match = app.namespace(store, ref).match(ids) if ids is not None else None
        try:
            done = store.warm(
                spaces, prefixes=prefixes, match=match, pinned=pinned, hottest=nbytes, check=check, progress=progress
            )
        finally:
            if match is not None:
                match.close()
    rate = done.read_bytes / done.seconds if done.seconds else 0.0
    resident = None if done.resident_bytes < 0 else done.resident_bytes
    data = {
        "bytes": done.nbytes, "resident_bytes": resident, "read_bytes": done.read_bytes,
        "failed_bytes": done.failed_bytes, "seconds": round(done.seconds, 3), "bytes_per_second": round(rate),
        "check": check,
    }  # fmt: skip

    def lines() -> Iterable[str]:
        if check:
            if resident is None:
                yield f"{text.size(done.nbytes)} asked for; kernels before 6.5 do not tell what is in the page cache"
            else:
                share = text.percent(resident, done.nbytes)
                yield f"{text.size(resident)} of {text.size(done.nbytes)} in the page cache ({share})"
            return
        there = "" if not resident else f", {text.size(resident)} already there"
        yield (
            f"warmed {text.size(done.nbytes)}: {text.size(done.read_bytes)} read in {done.seconds:.1f} s "
            f"({text.size(rate)}/s){there}"
        )
        if done.failed_bytes:
            yield f"{text.size(done.failed_bytes)} could not be read: evicted meanwhile, or see kvfs verify --all"

    app.out.result(data, lines, [str(done.nbytes)])
    return EXIT_FAILED if done.failed_bytes else 0


def _read_list(file: str) -> list[str]:
    from kvfs.errors import ConfigError

    try:
        with click.open_file(file, encoding="utf-8") as stream:
            content = stream.read(LIST_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise ConfigError(f"{file}: {why}; give a list of targets, or - for stdin") from None
    if len(content) > LIST_BYTES_MAX:
        raise ConfigError(f"{file} has more than {LIST_BYTES_MAX} characters: split it into several lists")
    lines = (line.strip() for line in content.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
