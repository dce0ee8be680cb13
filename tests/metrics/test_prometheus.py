"""A real Prometheus, with the alert rules of docs/deploy, scrapes the exporter of a real store."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from kvfs.metrics import exporter
from tests.stores import TINY_BYTES, seeded, segment_files, tiny, tokens_of

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus here: apt install prometheus")
DEPLOY = Path(__file__).parents[2] / "docs/deploy"
WAIT_SECONDS = 90.0
#: Queries of the dashboard without a result in this store, which has no quota and declined nothing
EMPTY = ("kvfs_quota_", "kvfs_declined_pages_total", "kvfs_transfers_total", "kvfs_index_unavailable_total")


class Prometheus:
    """Scrapes one exporter every two seconds, and evaluates the rules as often."""

    def __init__(self, folder: Path, exporter_port: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._url = f"http://{address}/api/v1"
        folder.mkdir()
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 2s, evaluation_interval: 2s}\n"
            f"rule_files: [{json.dumps(str(DEPLOY / 'alerts.yml'))}]\n"
            "scrape_configs:\n"
            f"  - {{job_name: kvfs, static_configs: [{{targets: ['127.0.0.1:{exporter_port}']}}]}}\n"
        )
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={address}"],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def ask(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            body = json.load(answer)
        assert body["status"] == "success"
        return body["data"]

    def value(self, query: str) -> float | None:
        found = self.ask("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        return {a["labels"]["alertname"] for a in self.ask("alerts")["alerts"] if a["state"] == "firing"}

    def wait(self, what: Callable[[], bool], name: str = "") -> None:
        end = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                if what():
                    return
            except (urllib.error.URLError, ConnectionError):  # it has just been started
                assert self._process.poll() is None, Path(self._log.name).read_text()[-2000:]
            assert time.monotonic() < end, name + Path(self._log.name).read_text()[-2000:]
            time.sleep(0.2)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()
            self._log.close()


def use(path: Path) -> None:
    """Another process in the life of the store: what it counted is published when it closes the store."""
    with kvfs.open(path) as store:
        ns = store.namespace("alpha", tiny(), "9213176")
        ns.put(tokens_of(1, 4), seeded(1, 4 * TINY_BYTES))
        with ns.match(tokens_of(1, 4)) as match:
            ns.get(match, bytearray(4 * TINY_BYTES))


@pytest.fixture
def scraped(store_path: Path, tmp_path: Path) -> Iterator[Prometheus]:
    kvfs.open(store_path, capacity="64MiB").close()
    use(store_path)
    with kvfs.open(store_path, counted=False) as watched:
        server, thread = exporter.serve(watched, "127.0.0.1", 0)
        made = Prometheus(tmp_path / "prometheus", server.server_port)
        try:
            made.wait(lambda: made.value("kvfs_index_ready") == 1.0)
            yield made
        finally:
            made.close()
            server.shutdown()
            server.server_close()
            thread.join(30)


def test_a_flipped_byte_of_a_page_raises_the_alert(scraped: Prometheus, store_path: Path) -> None:
    faults = 'kvfs_faults_total{kind="corrupt_page"}'
    scraped.wait(lambda: scraped.value(faults) == 0)
    assert "KvfsCorruptPages" not in scraped.firing()
    page = seeded(1, 4 * TINY_BYTES)[:64]
    (segment,) = (s for s in segment_files(store_path) if page in s.read_bytes())
    data = bytearray(segment.read_bytes())
    data[data.index(page)] ^= 1
    segment.write_bytes(data)
    use(store_path)
    scraped.wait(lambda: scraped.firing() == {"KvfsCorruptPages"})
    scraped.wait(lambda: scraped.value(faults) == 1)


def test_every_query_of_the_dashboard_has_a_result(scraped: Prometheus, store_path: Path) -> None:
    """A scrape that a busy machine makes late has none: the next one has."""
    use(store_path)
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) > 15
    for query in queries:
        plain = query.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$namespace", ".*")
        assert "$" not in plain, query
        scraped.ask("query", query=plain)
        if not any(name in query for name in EMPTY):
            scraped.wait(lambda plain=plain: known(scraped.value(plain)), query)  # type: ignore[misc]


def known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)
