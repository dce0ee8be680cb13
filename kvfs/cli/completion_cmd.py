"""``kvfs completion``: the script by which a shell completes commands, namespaces and pins."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kvfs.cli.app import App, Command, common

SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    cls=Command,
    examples=(
        'eval "$(kvfs completion bash)"',
        "kvfs completion zsh > ~/.zfunc/_kvfs",
        "kvfs completion fish > ~/.config/fish/completions/kvfs.fish",
    ),
)
@click.argument("shell", type=click.Choice(SHELLS))
@common
@click.pass_obj
def completion_command(app: App, shell: str) -> None:
    """Print the completion script of SHELL: commands, options and their values, namespaces, pins, files."""
    from kvfs.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "kvfs", "_KVFS_COMPLETE").source()
    if app.out.json:
        app.out.result({"shell": shell, "script": script}, tuple)
    else:
        click.echo(script, nl=False)
