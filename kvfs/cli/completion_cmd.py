"""``kvfs completion``: the script by which a shell completes commands, namespaces and pins."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kvfs.cli.app import App, common

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@common
@click.pass_obj
def completion_command(app: App, shell: str) -> None:
    """Print the completion script of SHELL; for bash: eval "$(kvfs completion bash)"."""
    from kvfs.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "kvfs", "_KVFS_COMPLETE").source(), nl=False)
