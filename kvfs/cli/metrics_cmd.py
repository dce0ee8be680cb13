"""``kvfs metrics``: the store's figures for Prometheus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from kvfs.cli.app import FILE, App, Command, common

if TYPE_CHECKING:
    from kvfs.store import Store


@click.command(
    "metrics",
    cls=Command,
    examples=(
        "kvfs metrics | grep namespace",
        "kvfs metrics --textfile /var/lib/node_exporter/kvfs.prom",
        "kvfs metrics --listen 127.0.0.1:9567",
    ),
)
@click.option(
    "--textfile", type=FILE, metavar="PATH", help="Write a file for node_exporter's textfile collector (*.prom)."
)
@click.option("--listen", metavar="[HOST]:PORT", help="Serve the metrics over HTTP until interrupted.")
@common
@click.pass_obj
def metrics_command(app: App, textfile: str | None, listen: str | None) -> None:
    """Print the metrics of the store in the OpenMetrics text format.

    The figures are those of all processes of the store, past and present: one exporter per store is enough. With
    --textfile the file is replaced in one step. docs/metrics.md lists the metrics.
    """
    from kvfs.metrics import exporter

    if textfile is not None and listen is not None:
        raise click.UsageError("--textfile and --listen are both given: choose one")
    address = _address(listen) if listen is not None else None
    with app.open() as store:
        if address is not None:
            _serve(app, store, *address)
        elif textfile is not None:
            exporter.write_textfile(store, textfile)
            app.out.result({"textfile": textfile}, list, [textfile])
        else:
            text = exporter.openmetrics(store)
            app.out.result({"openmetrics": text}, text.splitlines)


def _serve(app: App, store: Store, host: str, port: int) -> None:
    from kvfs.errors import ConfigError
    from kvfs.metrics import exporter

    try:
        server, _ = exporter.serve(store, host, port)
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on {host or '*'}:{port} ({exc.strerror or exc}): choose another address"
        ) from None
    url = f"http://{host or '0.0.0.0'}:{server.server_port}/metrics"
    app.out.note(f"serving {url}; Ctrl-C ends it")
    try:
        while True:
            time.sleep(3600)
    finally:
        server.shutdown()


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise click.UsageError(f"--listen is {text!r}: pass HOST:PORT, or :PORT for all addresses")
    return host.strip("[]"), int(port)
