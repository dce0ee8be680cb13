"""The benchmark of lookups: in a new process, each connector finds what was stored for it and nothing else."""

from __future__ import annotations

import pytest

from tools.benchmarks import vllm_lookups
from tools.benchmarks.vllm import CONNECTORS


@pytest.mark.slow
@pytest.mark.timeout(900)  # of eight processes that import vLLM
def test_every_connector_finds_its_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    vllm_lookups.run(1, CONNECTORS, {"tiny": (4 * vllm_lookups.BLOCK + vllm_lookups.SETTLE, 2)})
    rows = capsys.readouterr().out.splitlines()
    shown = ["kvfs", "fs tier", "ExampleConnector", vllm_lookups.WITHOUT]
    assert sorted(row.split(" | ")[1] for row in rows) == sorted(shown)
