"""vLLM's own file-system tier, pointed at files/ of a mount: what one engine saved, another one finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import kvfs
from tests.mount.real import needs_fuse, serving
from tests.vllm.engine import Engine


@needs_fuse
def test_the_file_system_tier_of_vllm_in_a_mount(
    model: Callable[[str], Path], prompt: Callable[..., list[int]], tmp_path: Path
) -> None:
    (tmp_path / "mnt").mkdir()
    store = tmp_path / "store"
    kvfs.open(store, capacity="256MiB").close()
    tier = {
        "type": "fs",
        "root_dir": str(tmp_path / "mnt" / "files" / "vllm"),
        "n_read_threads": 4,
        "n_write_threads": 4,
    }
    transfer = {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec", "spec_module_path": "tools.benchmarks.vllm_peers",
            "cpu_bytes_to_use": 64 << 20, "block_size": 32, "secondary_tiers": [tier],
        },
    }  # fmt: skip
    ids = prompt(1, 500)  # vLLM's CPU tier refuses machines without a GPU, so here the CPU makes its copies
    with serving(store, tmp_path / "mnt"), Engine(model("llama"), transfer=transfer) as first:
        cold = first.generate(ids)
    with serving(store, tmp_path / "mnt"), Engine(model("llama"), transfer=transfer) as second:
        assert second.generate(ids) == [(480, cold[0][1])]
    assert cold[0][0] == 0
