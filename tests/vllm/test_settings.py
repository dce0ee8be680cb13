"""Settings, messages and versions, as users see them. No engine runs."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from kvfs.errors import ConfigError, KvfsError
from kvfs.integrations import vllm as package
from kvfs.integrations.vllm import connector, versions
from kvfs.integrations.vllm import settings as settings_module
from kvfs.integrations.vllm.connector import KvfsConnector
from kvfs.integrations.vllm.metrics import COUNTERS
from kvfs.integrations.vllm.settings import VllmSettings, check_early, ring_bytes, settings_of, warm_bytes
from kvfs.store import open_store

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "vllm.md").read_text()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "path is missing"),
        ({"path": 7}, "path is 7"),
        ({"path": "/x", "capacty": "1GiB"}, "has 'capacty'"),
        ({"path": "/x", "capacity": "lots"}, "capacity is 'lots'"),
        ({"path": "/x", "capacity": True}, "capacity is True"),
        ({"path": "/x", "capacity": -5}, "capacity is -5"),
        ({"path": "/x", "load_seconds": 0}, "load_seconds is 0"),
        ({"path": "/x", "store_seconds": "2"}, "store_seconds is '2'"),
        ({"path": "/x", "min_tokens": -1}, "min_tokens is -1"),
        ({"path": "/x", "bucket_seconds": -1}, "bucket_seconds is -1"),
        ({"path": "/x", "bucket_seconds": True}, "bucket_seconds is True"),
        ({"path": "/x", "max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"path": "/x", "read_only": "yes"}, "read_only is 'yes'"),
        ({"path": "/x", "dp_pulls": 2}, "dp_pulls is 2"),
        ({"path": "/x", "offload_prompt_only": "false"}, "offload_prompt_only is 'false'"),
        ({"path": "/x", "weights_id": 7}, "weights_id is 7"),
        ({"path": "/x", "mode": "fast"}, "mode is 'fast'"),
        ({"path": "/x", "codec": "gzip"}, "codec is 'gzip'"),
        ({"path": "/x", "threads": "2"}, "threads is '2'"),
        ({"path": "/x", "blocks_per_chunk": 0}, "blocks_per_chunk is 0"),
        ({"path": "/x", "block_size": "64"}, "block_size is '64'"),
        ({"path": "/x", "ring_bytes": True}, "ring_bytes is True"),
        ({"path": "/x", "warm_bytes": "lots"}, "warm_bytes is 'lots'"),
        ({"path": "/x", "sync_load_budget_bytes": 1 << 20}, "sync_load_budget_bytes is 1048576: leave it out"),
        ({"path": "/x", "spec_name": "CPUOffloadingSpec"}, "spec_name is 'CPUOffloadingSpec'"),
    ],
)
def test_values_are_checked(extra: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFS_DIR", raising=False)
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings_of(extra)


def test_a_store_that_cannot_be_opened_is_reported_early(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for extra, message in (
        ({"path": str(file), "capacity": "64MiB"}, "is a file, and a store is a directory"),
        ({"path": str(tmp_path / "s")}, "pass capacity="),
        ({"path": str(tmp_path / "s"), "capacity": "1KiB"}, "at least 16777216"),
        ({"path": str(tmp_path / "no" / "s"), "capacity": "64MiB"}, "does not exist; create it first"),
        ({"path": str(tmp_path / "s"), "read_only": True}, "does not exist"),
    ):
        with pytest.raises(KvfsError, match=message):
            check_early(extra)
    check_early({"path": str(tmp_path / "s"), "capacity": "64MiB"})
    check_early({"path": str(tmp_path / "s")})


@pytest.mark.not_as_root("root may write anywhere")
def test_a_directory_without_write_permission_is_reported_early(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    with pytest.raises(KvfsError, match="run as the store's owner"):
        check_early({"path": str(folder / "s"), "capacity": "64MiB"})


def test_an_engine_with_graphs_checks_settings_before_it_loads_a_model(
    model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where vLLM uses graphs by default: it fails while it builds its configuration."""
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", classmethod(lambda cls: True))

    def configure(**extra: Any) -> None:
        EngineArgs(
            model=str(model("llama")), max_model_len=1024, compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"},
            kv_transfer_config={  # type: ignore[arg-type]
                "kv_connector": "KvfsConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
            },
        ).create_engine_config()  # fmt: skip

    with pytest.raises(ValueError, match=r"has 'capacty': pass some of block_size, .*, capacity, "):
        configure(path=str(tmp_path / "s"), capacty="64MiB")
    configure(path=str(tmp_path / "s"), capacity="64MiB")


def test_the_manual_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", DOC, re.M))
    listed = {name: default for names, default in rows.items() for name in re.findall(r"`(\w+)`", names)}
    for field in fields(VllmSettings):
        assert field.name in listed, field.name
        if field.default not in ("", None) and isinstance(field.default, (int, float, str)):
            shown = {
                "max_tokens": "2^24", "load_seconds": "30", "store_seconds": "2", "read_only": "false",
                "offload_prompt_only": "true", "drafter": "true", "dp_pulls": "false",
            }  # fmt: skip
            assert shown.get(field.name, str(field.default)) in listed[field.name], field.name


def test_the_manual_lists_every_counter() -> None:
    watching = DOC[DOC.index("## Watching it") :]
    assert {name for name in COUNTERS if f"`{name}`" not in watching} == set()


def test_messages_in_the_manual_are_those_of_the_code() -> None:
    """Word for word, except for ``...``."""
    sources = [*(ROOT / "kvfs").rglob("*.py")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in sources))
    code = re.sub(r"\{[^{}]*\}|%s|%d", "...", code)
    table = DOC[DOC.index("## Messages") : DOC.index("## Limits")]
    rows = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| `")]
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 10
    for message in messages:
        if message.startswith("Unsupported connector"):  # of vLLM
            continue
        text, _, reason = message.partition("(")
        reason = reason.rstrip(")").removesuffix(", ...")
        for part in text.replace("'...'", "...").split("..."):
            assert part.strip(" '") in code, message
        assert not reason or f'"{reason}"' in code, message


def test_another_version_of_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: versions.TESTED[0])
    assert versions.warning() == ""
    monkeypatch.setattr(versions, "installed", lambda: "0.99.1")
    assert "vLLM 0.99.1 was not tested" in versions.warning() and versions.TESTED[0] in versions.warning()
    monkeypatch.setitem(sys.modules, "kvfs.integrations.vllm.connector", None)
    monkeypatch.delitem(sys.modules, package.MODULE, raising=False)
    with pytest.raises(ImportError, match=r"vLLM 0\.99\.1 was not tested .* install a tested version"):
        __import__(package.MODULE)


def test_an_engine_without_the_registries_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The entry point is called in every engine of the environment, even without kvfs in use."""
    monkeypatch.setattr(versions, "installed", lambda: "0.11.0")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for place, *_ in package._PLACES:
        monkeypatch.setitem(sys.modules, place, None)
    package.register()
    names = {r.args[0] for r in caplog.records if r.name == "vllm.kvfs" and isinstance(r.args, tuple)}
    assert names == {"KvfsConnector", "KvfsOffloadingSpec", "kvfs"}
    assert "vLLM 0.11.0 was not tested" in caplog.text


def test_messages_go_to_the_engines_log() -> None:
    from kvfs.integrations.vllm import manager, tier, worker

    for module in (connector, manager, tier, worker):
        assert module.logger.name.startswith("vllm."), "vLLM shows only loggers below its own"


def test_class_hooks_check_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="threads is 0"):
        KvfsConnector.requires_piecewise_for_cudagraph({"path": str(tmp_path / "s"), "threads": 0})
    assert not KvfsConnector.requires_piecewise_for_cudagraph({"path": str(tmp_path / "s"), "capacity": "64MiB"})


@pytest.mark.parametrize(
    ("again", "said"),
    [("64MiB", []), ("128MiB", ["capacity of this store is 67108864 bytes, not 128MiB"]), (None, [])],
)
def test_another_capacity_than_the_stores_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: str | None, said: list[str]
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(connector.logger, "warning", lambda message, *args, **_: logged.append(message % args))
    check_early({"path": str(tmp_path / "s"), "capacity": "64MiB"})
    with open_store(str(tmp_path / "s")) as store:
        connector.warn_of_capacity(store, again)
        assert [line for line in logged if said and said[0] in line] == logged and len(logged) == len(said)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 20))
        connector.warn_of_capacity(store, None)
    assert logged[-1] == "kvfs: the capacity of this store is 67108864 bytes, its file system has 1048576"


def test_the_ring_holds_three_steps_within_its_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "memory_limit", lambda: 128 << 30)
    default = VllmSettings("/x")
    assert ring_bytes(default, 1 << 30) == 3 << 30
    assert ring_bytes(default, 1 << 20) == 256 << 20, "a small model's steps need less than the least"
    assert ring_bytes(default, 4 << 30) == 4 << 30, "a thirty-second of the memory"
    assert ring_bytes(VllmSettings("/x", ring_bytes="1GiB"), 4 << 30) == "1GiB"
    monkeypatch.setattr(settings_module, "memory_limit", lambda: None)
    assert ring_bytes(default, 1 << 30) == 256 << 20


def test_ranks_share_what_a_start_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "memory_limit", lambda: 128 << 30)
    assert warm_bytes(VllmSettings("/x"), 1) == 32 << 30
    assert warm_bytes(VllmSettings("/x"), 8) == 4 << 30
    assert warm_bytes(VllmSettings("/x", registered_bytes="16GiB"), 4) == 4 << 30
    assert warm_bytes(VllmSettings("/x", warm_bytes=0), 4) == 0
    assert warm_bytes(VllmSettings("/x", warm_bytes="2GiB"), 4) == 2 << 30
