"""doctor and GPUs: a driver that works, fails, returns wrong bytes, hangs or crashes is reported."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvfs
from kvfs.directory.root import Directory
from kvfs.doctor.findings import BAD, OK, WARN, Finding
from kvfs.doctor.gpu_checks import Link, _sample, diagnose_gpu, measure_links
from kvfs.system.files import Files
from tests.stores import seeded, tiny, tokens_of

HERE = Path(__file__).parent
LAYOUT = tiny(page_tokens=256)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a libcuda.so.1 that does what FAKE_CUDA says."""
    if shutil.which("gcc") is None:
        pytest.skip("no compiler for a fake driver")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(HERE / "fakecuda.c")],
        check=True, timeout=60,
    )  # fmt: skip
    return folder


@pytest.fixture
def path(store_path: Path) -> Path:
    with kvfs.open(store_path, capacity="64MiB") as store:
        store.namespace("m", LAYOUT, "r1").put(tokens_of(1, 4, 256), seeded(1, 4 * LAYOUT.page_bytes))
    return store_path


def check(path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch, mode: str, seconds: float = 60.0) -> Finding:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("FAKE_CUDA", mode)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return diagnose_gpu(str(path), Files(), seconds)


def test_without_a_driver_it_is_one_line(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")  # instead of the host's library
    found = check(path, tmp_path, monkeypatch, "")
    assert (found.status, found.detail, found.remedy) == (OK, "no CUDA driver: host transfers only", "")


def test_a_driver_that_works_reads_a_page_in_place(path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(path, driver, monkeypatch, "")
    assert found.status == OK and "CUDA 12.4" in found.detail and "2 x Fake 9000 (80 GiB)" in found.detail
    assert "reads a page of this store in place" in found.detail
    assert [d["works"] for d in found.data["devices"]] == [True, True] and json.dumps(found.data)


def test_an_empty_store_is_tried_with_a_file(tmp_path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kvfs.open(tmp_path / "empty", capacity="64MiB"):
        pass
    assert "reads a file of this store in place" in check(tmp_path / "empty", driver, monkeypatch, "").detail


@pytest.mark.parametrize(
    ("mode", "status", "detail", "remedy"),
    [
        ("init=100", WARN, "error 100 (a fake error)", "--gpus all"),
        ("init=803", WARN, "error 803", "different versions"),
        ("init=802", WARN, "error 802", "fabric manager"),
        ("init=7", WARN, "error 7", "nvidia-smi"),
        ("none", WARN, "no device", "--gpus all"),
        ("register=801", WARN, "cannot be read in place: cuMemHostRegister_v2: error 801", "ring"),
        ("register=2", WARN, "error 2", "memlock"),
        ("second=1", WARN, "cannot be read in place by device 1", "ring"),
        ("wrong", WARN, "the device read other bytes", "ring"),
        ("crash", BAD, "ended the process that asked it (registration on device 0)", "nvidia-smi"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(
    path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch, mode: str, status: str, detail: str, remedy: str
) -> None:
    found = check(path, driver, monkeypatch, mode)
    assert (found.check, found.status) == ("gpu", status)
    assert detail in found.detail and remedy in found.remedy and "\n" not in found.detail


def test_a_driver_that_hangs_is_reported(path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (2, 8, 32):  # a loaded machine may need more to get so far
        found = check(path, driver, monkeypatch, "hang", seconds=seconds)
        if "registration" in found.detail:
            break
    assert found.status == BAD and f"did not answer within {seconds} s (registration on device 0)" in found.detail
    assert found.data["devices"][0]["name"] == "Fake 9000"


def test_no_store_and_no_child_raise_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert diagnose_gpu(str(tmp_path / "none"), Files()).status == WARN
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert "cannot be checked" in diagnose_gpu(str(path), Files()).detail


def links(driver: Path, monkeypatch: pytest.MonkeyPatch, mode: str, seconds: float = 60.0) -> tuple[list[Link], str]:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("FAKE_CUDA", mode)
    return measure_links(seconds, 1 << 20)


def test_the_link_of_each_device_is_measured(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, why = links(driver, monkeypatch, "")
    assert [(link.ordinal, link.name) for link in found] == [(0, "Fake 9000"), (1, "Fake 9000")] and why == ""
    for link in found:
        assert all(0 < low <= middle <= high for low, middle, high in (link.to_device, link.to_host))


@pytest.mark.parametrize(
    ("mode", "measured", "why"),
    [
        ("init=803", 0, "cuInit: error 803 (a fake error): run kvfs doctor"),
        ("none", 0, "the CUDA driver has no device: run kvfs doctor"),
        ("pin=2", 1, "device 1: cuMemHostAlloc: error 2 (a fake error): run kvfs doctor"),
        ("wrong", 0, "device 0: the device returned other bytes: run kvfs doctor"),
        ("crash", 0, "the driver ended the process that asked it (link of device 0): run kvfs doctor"),
    ],
)
def test_a_link_that_is_not_measured_is_one_line(
    driver: Path, monkeypatch: pytest.MonkeyPatch, mode: str, measured: int, why: str
) -> None:
    found, said = links(driver, monkeypatch, mode)
    assert (len(found), said) == (measured, why)


def test_without_a_driver_or_a_child_there_is_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")  # instead of the host's library
    assert links(tmp_path, monkeypatch, "") == ([], "no CUDA driver, so there is no link to measure")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert "cannot be measured" in measure_links()[1]


def test_a_link_whose_driver_hangs_is_given_up(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, why = links(driver, monkeypatch, "hang", seconds=1.0)
    assert found == [] and why.startswith("the driver did not answer within 1 s (")


def probes() -> list[bytes]:
    """Command lines of the children of this process that are probes."""
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    found = []
    for pid in children:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return [line for line in found if b"gpu_probe" in line]


def test_the_probe_leaves_no_descriptor_and_no_process(
    path: Path, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir("/proc/self/fd")
    check(path, driver, monkeypatch, "hang", seconds=0.5)
    check(path, driver, monkeypatch, "")
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert not probes()


@pytest.mark.gpu
def test_a_real_driver(path: Path) -> None:
    found = diagnose_gpu(str(path), Files())
    assert found.status in (OK, WARN) and found.data["driver"] >= 12000 and found.data["devices"]


def test_the_blocks_that_a_probe_may_hold_stay_charged(path: Path) -> None:
    """A driver that hangs keeps the child's descriptor: without a lock it was unlinked, and not counted."""
    with contextlib.closing(Directory(str(path), Files(), read_only=True)) as directory:
        with contextlib.closing(_sample(directory).file) as file:
            assert os.readlink(f"/proc/self/fd/{file.fd}").endswith(".kvs")
            again = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY)
            assert not Files().flock(again, fcntl.LOCK_EX)
        assert Files().flock(again, fcntl.LOCK_EX)  # as an evictor that is about to unlink it
        with contextlib.closing(_sample(directory).file) as file:
            assert os.readlink(f"/proc/self/fd/{file.fd}").endswith("super")
        os.close(again)
