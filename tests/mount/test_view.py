"""What a mount shows of a store: real files of exact size, verified where they hold pages."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

import kvfs
from kvfs.metrics import exporter
from kvfs.mount.view import FRESH_MAX
from tests.mount.kernel import Kernel, Mounted
from tests.stores import seeded, segment_files, tiny, tokens_of

CHUNKS = 6


@pytest.fixture
def prompt(store: kvfs.Store) -> list[int]:
    ns = store.namespace("models/tiny", tiny(), "9213176")
    tokens = tokens_of(1, CHUNKS)
    ns.put(tokens, seeded(1, CHUNKS * tiny().page_bytes))
    return tokens


def only(kernel: Kernel, folder: str) -> str:
    (name,) = kernel.listdir(folder)
    return f"{folder}/{name}"


def test_the_top_lists_what_there_is(kernel: Kernel) -> None:
    assert kernel.listdir("") == ["files", "namespaces", "pins", "prefixes", "segments", "metrics.prom", "stats.json"]


@pytest.mark.usefixtures("prompt")
def test_a_prefix_is_the_file_that_an_export_writes(kernel: Kernel, store: kvfs.Store, tmp_path: Path) -> None:
    name = only(kernel, "prefixes")
    with store.match_prefix(Path(name).stem) as match:
        written = store.export_tensors(str(tmp_path / "p"), match)
    assert kernel.stat(name).size == written.file_bytes
    fd = kernel.open(name)
    assert kernel.read(fd) == (tmp_path / "p").read_bytes()
    again = kernel.open(name)
    assert kernel.open_files[again][0].backing == kernel.open_files[fd][0].backing, "the kernel allows one backing"
    kernel.close(fd)
    kernel.close(again)
    assert kernel.load(name) == (tmp_path / "p").read_bytes()


@pytest.mark.usefixtures("prompt")
def test_a_flipped_byte_makes_a_prefix_an_error(kernel: Kernel, store_path: Path) -> None:
    name = only(kernel, "prefixes")
    needle = seeded(1, CHUNKS * tiny().page_bytes)[:64]
    for file in segment_files(store_path):
        raw = file.read_bytes()
        if needle in raw:
            with file.open("r+b") as out:
                out.seek(raw.index(needle))
                out.write(bytes([needle[0] ^ 1]))
    with pytest.raises(OSError, match=rf"\[Errno {errno.EIO}\]"):
        kernel.open(name)
    assert not kernel.exists(name)


@pytest.mark.usefixtures("prompt")
def test_namespaces_pins_segments_and_statistics(
    kernel: Kernel, store: kvfs.Store, store_path: Path, prompt: list[int]
) -> None:
    store.pin("system/prompt", store.namespace("models/tiny", tiny(), "9213176"), prompt)
    assert kernel.listdir("namespaces") == ["models%2Ftiny@9213176"]
    body = json.loads(kernel.load("namespaces/models%2Ftiny@9213176/layout.json"))
    assert (body["name"], body["layout"]) == ("models/tiny", tiny().descriptor())
    pin = json.loads(kernel.load("pins/system%2Fprompt.json"))
    assert (pin["name"], pin["tokens"]) == ("system/prompt", CHUNKS * 16)
    assert sorted(kernel.listdir("segments")) == sorted(p.name for p in segment_files(store_path))
    for file in segment_files(store_path):
        assert kernel.load(f"segments/{file.name}") == file.read_bytes()
    stats = json.loads(kernel.load("stats.json"))
    assert stats["store_id"] == store.stats()["store_id"]
    assert kernel.stat("stats.json").size > 0


def test_the_metrics_are_those_of_the_command(kernel: Kernel, store: kvfs.Store) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    shown = {family.name for family in text_string_to_metric_families(kernel.load("metrics.prom").decode())}
    assert shown == {family.name for family in text_string_to_metric_families(exporter.textfile(store).decode())}
    assert "kvfs_capacity_bytes" in shown
    assert kernel.stat("metrics.prom").size > 0


def test_without_the_package_of_metrics_there_is_no_file(store: kvfs.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "available", lambda: False)
    with Mounted(store) as mounted:
        assert "metrics.prom" not in mounted.kernel.listdir("")
        assert not mounted.kernel.exists("metrics.prom")


def test_the_pages_of_files_are_no_prefixes(kernel: Kernel) -> None:
    kernel.save("files/a", seeded(1, 1 << 20))
    assert kernel.listdir("prefixes") == []
    assert kernel.listdir("namespaces") == []


@pytest.mark.parametrize(
    "path", ["none", "prefixes/abcdef.safetensors", "prefixes/x", "pins/none.json", "namespaces/none", "segments/none"]
)
def test_other_names_do_not_exist(kernel: Kernel, path: str) -> None:
    assert not kernel.exists(path)


def test_a_symlink_among_the_segments_is_not_followed(kernel: Kernel, mounted: Mounted, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    os.symlink(tmp_path / "secret", Path(mounted.store.path) / "segments" / f"{'a' * 32}.kvs")
    assert not kernel.exists(f"segments/{'a' * 32}.kvs")
    os.unlink(Path(mounted.store.path) / "segments" / f"{'a' * 32}.kvs")


def test_what_is_kept_of_namespaces_that_come_and_go_is_bounded(mounted: Mounted) -> None:
    for n in range(3 * FRESH_MAX):
        assert mounted.view.cached(f"layout {n}", lambda n=n: n) == n  # type: ignore[misc]
    assert len(mounted.view._fresh) <= FRESH_MAX
