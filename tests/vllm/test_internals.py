"""Private names of vLLM that the connector uses: all in one module, each there in the installed version."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvfs.integrations.vllm.internals import NAMES

FOLDER = Path(__file__).resolve().parents[2] / "kvfs" / "integrations" / "vllm"
OWNERS = {
    "KVConnectorFactory, OffloadingSpecFactory, SecondaryTierFactory": (
        KVConnectorFactory, OffloadingSpecFactory, SecondaryTierFactory
    ),
    "OffloadingConnector": (OffloadingConnector,),
    "OffloadingConnectorScheduler": (scheduler.OffloadingConnectorScheduler,),
    "RequestOffloadState": (scheduler.RequestOffloadState,),
    "RequestGroupState": (scheduler.RequestGroupState,),
    "GroupOffloadConfig": (scheduler.GroupOffloadConfig,),
    "SchedulerOffloadConfig": (scheduler.SchedulerOffloadConfig,),
    "OffloadingConnectorWorker": (OffloadingConnectorWorker,),
    "OffloadingWorkerMetadata": (OffloadingWorkerMetadata,),
    "OffloadingEventsTracker": (OffloadingEventsTracker,),
    "KVCacheBlocks": (KVCacheBlocks,),
}  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in NAMES.items() for name in names])
def test_each_name_is_there(owner: str, name: str) -> None:
    for cls in OWNERS[owner]:
        source = "".join(inspect.getsource(base) for base in cls.__mro__ if base.__module__.startswith("vllm"))
        assert re.search(rf"\b(def |self\.)?{name}\b(\(|:| =)", source), f"{cls.__name__}.{name}"


def test_no_other_module_uses_a_private_name_of_the_engine() -> None:
    """A private attribute of any object but self, its own class, or another object of kvfs."""
    ours = re.compile(r"^(self|cls|super\(\)|state|recent)\b")
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        if path.name == "internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
            if private and not ours.match(ast.unparse(node.value)):  # type: ignore[attr-defined]
                found.append(f"{path.name}: {ast.unparse(node)}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                found += [f"{path.name}: {a.name}" for a in node.names if a.name.startswith("_")]
                if ".v1.offloading" in (node.module or "") and path.name != "metrics.py":
                    found.append(f"{path.name}: {node.module}")
    assert found == [
        "__init__.py: known._registry",  # loaded in every engine of the environment: it imports nothing
        "model.py: _get_attn_isa",  # of the CPU's kernels: it names their order of bytes
    ]
