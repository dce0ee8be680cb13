"""``kvfs bench``: figures that follow from what was timed, every byte compared, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfs.bench import host
from kvfs.bench.host import Ratio, Result
from kvfs.cli.app import App
from kvfs.cli.bench_cmd import _data, _lines
from kvfs.cli.main import run
from kvfs.doctor.gpu_checks import Link
from kvfs.errors import KvfsError
from kvfs.namespace import Namespace
from tests.stores import tiny

ONE = (1.0, 1.0, 1.0)


def result(load: float, cold: float, match: float, token_bytes: int = 100_000) -> Result:
    rates = [Ratio((rate, rate, rate), ONE) for rate in (1.0, load, cold)]
    return Result(4096, token_bytes, *rates, (match, match, match), 3)


def test_a_load_pays_where_its_bytes_and_its_lookup_take_less_than_computing() -> None:
    found = result(load=10.0, cold=1.0, match=0.003)  # 10 us and 100 us a token
    assert found.tokens_per_second(cold=False) == 100_000 and found.tokens_per_second(cold=True) == 10_000
    assert found.break_even_tokens(25_000, cold=False) == 100  # 3 ms of lookup, 30 us gained per token
    assert found.break_even_tokens(25_000, cold=True) is None
    assert found.break_even_tokens(10_000, cold=True) is None, "equal speeds gain nothing"
    assert found.break_even_tokens(9_000, cold=True) == 270


def test_a_copy_over_the_slowest_link_counts_after_the_load() -> None:
    found = result(load=10.0, cold=1.0, match=0.003)
    assert found.tokens_per_second(cold=False, link=10.0) == pytest.approx(50_000)
    assert found.break_even_tokens(25_000, cold=False, link=10.0) == 150  # 3 ms of lookup, 20 us gained per token
    assert found.break_even_tokens(25_000, cold=False, link=2.5) is None

    links = [Link(n, "H100", (rate - 1, rate, rate + 1), (1.0, 2.0, 3.0)) for n, rate in ((0, 50.0), (1, 10.0))]
    data = _data(found, "8b", "/srv", 25_000.0, links, "")
    assert data["break_even_tokens"] == 150 and data["links"][1]["to_device"] == [9.0, 10.0, 11.0]
    lines = list(_lines(found, "8B", "/srv", 25_000.0, links, ""))
    assert "0 H100  50.00  49.00  51.00     2.00  1.00  3.00" in lines
    assert "From the page cache and the link it restores 50,000 tokens per second:" in lines


@pytest.mark.parametrize(
    ("match", "said"), [(0.00001, "from the first token on"), (0.003, "from 100 tokens on"), (99, "tokens on")]
)
def test_the_verdict_fits_a_terminal_and_reads_as_a_sentence(match: float, said: str) -> None:
    lines = list(_lines(result(load=10.0, cold=1.0, match=match), "8B", "/srv", 25_000.0, [], "no driver"))
    assert all(len(line) <= 80 for line in lines)
    verdicts = [line for line in lines if line.startswith("  ")]
    assert said in verdicts[-2] and "faster than computing 25,000." in verdicts[-2]
    assert verdicts[-1] == "  computing 25,000 is faster."


def test_every_phase_is_measured_and_the_files_are_gone(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = host.measure(str(tmp_path), tiny(page_tokens=64), 64 * 4096, 2, lambda n, m: seen.append((n, m)))
    assert (found.tokens, found.token_bytes, found.rounds) == (64 * 64, 64, 2)
    for ratio in (found.save, found.load, found.load_cold):
        assert all(0 < a <= b <= c for a, b, c in ratio)
    assert seen == [(1, 3), (2, 3), (3, 3)] and [p.name for p in tmp_path.iterdir()] == ["store"]


def test_wrong_bytes_are_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(ns: Namespace, prompt: object, out: memoryview, pages: int) -> None:
        out[0] ^= 1

    monkeypatch.setattr(host, "_get", get)
    with pytest.raises(KvfsError, match="not those that were saved"):
        host.measure(str(tmp_path), tiny(page_tokens=64), 16 * 4096, 1, lambda n, m: None)


def test_the_command_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        App(), ["bench", "--path", str(tmp_path), "--profile", "mla", "--size", "5MiB", "--rounds", "1", "--json"]
    )
    assert code == 0 and not list(tmp_path.iterdir())
    data = json.loads(capsys.readouterr().out)
    assert data["tokens"] == 64 and data["token_bytes"] == 61 * 576 * 2 and "break_even_tokens" not in data


def test_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(App(), ["bench", "--path", str(tmp_path), "--size", "1000TiB"]) != 0
    assert "pass a smaller --size or --rounds" in capsys.readouterr().err and not list(tmp_path.iterdir())
