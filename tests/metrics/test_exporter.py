"""Metrics as Prometheus reads them: right figures, one family each, and documents that name what exists."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.cli.app import App
from kvfs.cli.main import run
from kvfs.metrics import collector, exporter
from kvfs.metrics.families import FAMILIES, HISTOGRAM_NAME, Snapshot, histograms
from tests.stores import TINY_BYTES, seeded, segment_files, tiny, tokens_of

prometheus = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="prometheus_client is not installed")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(store_path: Path) -> Iterator[kvfs.Store]:
    with kvfs.open(store_path, capacity="64MiB") as made:
        yield made


def use(store: kvfs.Store, name: str, seed: int) -> int:
    """One put, one hit that is loaded, one miss; the tokens of the hit."""
    ns = store.namespace(name, tiny(), "9213176")
    ns.put(tokens_of(seed, 4), seeded(seed, 4 * TINY_BYTES))
    ns.match(tokens_of(seed + 1000, 4)).close()
    with ns.match(tokens_of(seed, 4)) as match:
        assert ns.get(match, bytearray(4 * TINY_BYTES)) == 4
        return match.tokens


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def published(path: Path) -> str:
    with kvfs.open(path, counted=False) as store:
        return exporter.openmetrics(store)


def test_the_figures_are_those_of_the_store_and_of_each_namespace(store: kvfs.Store, store_path: Path) -> None:
    tokens = use(store, "alpha", 1)
    use(store, "beta", 2)
    use(store, "beta", 3)
    digest = store.namespace("beta", tiny(), "9213176").identity.digest.hex()[:12]
    store.close()
    found = samples(published(store_path))
    assert found["kvfs_lookups_total", ()] == 6
    assert found["kvfs_lookup_tokens_total", (("result", "matched"),)] == 3 * tokens
    assert found["kvfs_lookup_tokens_total", (("result", "missed"),)] == 3 * tokens
    loaded = [found["kvfs_loaded_tokens_total", (("tier", tier),)] for tier in ("host", "disk")]
    assert sum(loaded) == 3 * tokens
    beta = (("id", digest), ("namespace", "beta@9213176"))
    assert found["kvfs_namespace_lookups_total", beta] == 4
    assert found["kvfs_namespace_lookup_tokens_total", (*beta, ("result", "matched"))] == 2 * tokens
    assert found["kvfs_namespace_written_bytes_total", beta] == 8 * TINY_BYTES
    assert found["kvfs_pages_total", (("result", "stored"),)] == 12
    assert found["kvfs_capacity_bytes", ()] == 64 << 20
    assert found["kvfs_index_ready", ()] == 1 and found["kvfs_used_bytes", ()] > 0
    assert found["kvfs_call_seconds_count", (("call", "match"),)] == 6
    assert 0 < found["kvfs_call_seconds_sum", (("call", "match"),)] < 600


def test_quotas_are_shown_with_their_use(store_path: Path) -> None:
    with kvfs.open(store_path, capacity="64MiB", quotas={"alpha": kvfs.Quota(guaranteed_bytes=1 << 20)}) as store:
        use(store, "alpha", 1)
        found = samples(exporter.openmetrics(store))
    assert found["kvfs_quota_used_bytes", (("quota", "alpha"),)] > 0
    assert found["kvfs_quota_guaranteed_bytes", (("quota", "alpha"),)] == 1 << 20
    assert ("kvfs_quota_cap_bytes", (("quota", "alpha"),)) not in found


def test_buckets_are_cumulative_and_the_same_for_every_store() -> None:
    totals = {"match_us_3": 2, "match_us_10": 5, "match_us_40": 1, "match_us": 7_000_000, "get_us_5": 1}
    match, get, put = histograms(Snapshot({"totals": totals}, {}))
    assert (match.calls, match.seconds) == (8, 7.0) and (put.calls, put.seconds) == (0, 0.0)
    below = dict(match.buckets)
    assert below[32e-6] == 2 and below[512e-6] == 2 and below[1024e-6] == 7 and max(below.values()) == 7
    assert [bound for bound, _ in match.buckets] == [bound for bound, _ in get.buckets]
    assert [n for _, n in match.buckets] == sorted(n for _, n in match.buckets)


def test_a_damaged_page_raises_the_count_of_faults(store: kvfs.Store, store_path: Path) -> None:
    use(store, "alpha", 1)
    store.close()
    (segment,) = segment_files(store_path)
    data = bytearray(segment.read_bytes())
    data[data.index(seeded(1, 4 * TINY_BYTES)[:64])] ^= 1
    segment.write_bytes(data)
    with kvfs.open(store_path) as store:
        ns = store.namespace("alpha", tiny(), "9213176")
        with ns.match(tokens_of(1, 4)) as match:
            ns.get(match, bytearray(4 * TINY_BYTES))
    assert samples(published(store_path))["kvfs_faults_total", (("kind", "corrupt_page"),)] == 1


def test_an_engine_registers_the_collector_in_its_own_registry(store: kvfs.Store) -> None:
    registry = prometheus.CollectorRegistry()
    registry.register(collector(store))
    assert b"kvfs_capacity_bytes 6.7108864e+07" in prometheus.generate_latest(registry)
    store.close()


def test_the_server_answers_a_scrape(store: kvfs.Store) -> None:
    server, _ = exporter.serve(store, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=60) as answer:
            assert b"kvfs_index_ready 1.0" in answer.read()
    finally:
        server.shutdown()
        server.server_close()
        store.close()


def test_a_text_file_is_replaced_in_one_step_and_nothing_else_is_left(store: kvfs.Store, tmp_path: Path) -> None:
    folder = tmp_path / "collector"
    folder.mkdir()
    target = folder / "kvfs.prom"
    target.write_text("old")
    exporter.write_textfile(store, str(target))
    assert "kvfs_index_ready 1.0" in target.read_text() and list(folder.iterdir()) == [target]
    with pytest.raises(kvfs.ConfigError, match=r"names that end with \.prom"):
        exporter.write_textfile(store, str(folder / "kvfs.txt"))
    with pytest.raises(kvfs.ConfigError, match="name a directory that is writable"):
        exporter.write_textfile(store, str(tmp_path / "missing" / "kvfs.prom"))
    assert list(folder.iterdir()) == [target]
    store.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "9567"], "pass HOST:PORT"),
        (["--listen", "localhost:http"], "pass HOST:PORT"),
        (["--listen", ":70000"], "pass HOST:PORT"),
        (["--listen", ":1", "--textfile", "x.prom"], "choose one"),
    ],
)
def test_a_wrong_address_is_refused(
    arguments: list[str], message: str, store: kvfs.Store, store_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(App(), ["-C", str(store_path), "metrics", *arguments]) == 2
    assert message in capsys.readouterr().err
    store.close()


def test_a_directory_that_takes_no_text_file_is_one_line(
    store: kvfs.Store, store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "file"
    folder.write_text("no directory")
    for target in (folder / "kvfs.prom", tmp_path / "missing" / "kvfs.prom", Path("/proc/kvfs.prom")):
        assert run(App(), ["-C", str(store_path), "metrics", "--textfile", str(target)]) == 2
        seen = capsys.readouterr()
        assert seen.out == "" and seen.err.count("\n") == 1 and "name a directory that is writable" in seen.err
    assert folder.read_text() == "no directory"
    store.close()


def test_a_port_in_use_is_one_line(store: kvfs.Store, store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, _ = exporter.serve(store, "127.0.0.1", 0)
    try:
        code = run(App(), ["-C", str(store_path), "metrics", "--listen", f"127.0.0.1:{server.server_port}"])
    finally:
        server.shutdown()
        server.server_close()
        store.close()
    error = capsys.readouterr().err
    assert code != 0 and error.count("\n") == 1 and "choose another address" in error


def test_scrapes_at_once_agree(store: kvfs.Store) -> None:
    use(store, "alpha", 1)
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(exporter.openmetrics(store))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert len(texts) == 4 and len({samples(text)["kvfs_capacity_bytes", ()] for text in texts}) == 1


def names() -> set[str]:
    return {family.name for family in FAMILIES} | {HISTOGRAM_NAME}


def test_every_family_has_one_name_and_a_row_in_the_documentation() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    text = (ROOT / "docs/metrics.md").read_text()
    rows = dict(re.findall(r"^\| `(kvfs_\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert rows == {**{family.name: family.kind for family in FAMILIES}, HISTOGRAM_NAME: "histogram"}


@pytest.mark.parametrize("file", ["docs/deploy/grafana.json", "docs/deploy/alerts.yml"])
def test_the_dashboard_and_the_alerts_use_metrics_and_labels_that_exist(file: str) -> None:
    text = (ROOT / file).read_text().replace('\\"', '"')
    used = re.findall(r"\b(kvfs_\w+?)(_total|_bucket|_count|_sum|_info)?\b(?:\{([^}]*)\})?", text)
    assert used
    kinds = {family.name: family for family in FAMILIES}
    for name, ending, labels in used:
        assert name in names(), f"{file} uses {name}, which is no metric"
        if name == HISTOGRAM_NAME:
            assert ending in ("_bucket", "_count", "_sum")
            continue
        assert ending == {"counter": "_total", "info": "_info", "gauge": ""}[kinds[name].kind], name + ending
        for label in re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", labels):
            assert label in (*kinds[name].labels, "instance", "job", "call"), f"{name} has no label {label}"
