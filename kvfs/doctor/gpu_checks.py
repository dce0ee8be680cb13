"""What ``kvfs doctor`` finds out about GPUs: whether loads can use them, and whether they can read the store in
place."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import subprocess
import sys
from statistics import median
from typing import Any, NamedTuple

from kvfs.directory.root import Directory
from kvfs.doctor import gpu_probe
from kvfs.doctor.findings import BAD, OK, WARN, Finding
from kvfs.format import segment as fmt
from kvfs.segments.scan import scan_segment
from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files

SECONDS = 30.0  # longest run of the probe: contexts of several large GPUs take seconds
KILLED_SECONDS = 2.0  # wait for the end of a killed probe: one that hangs in the driver cannot be ended
OUTPUT_BYTES_MAX = 256 * 1024  # of the probe's output that are parsed
LINK_BYTES = 256 << 20  # of one copy over a link: below some tens of MiB the call itself shows in the rate
PAGE_BYTES_MAX = 2 << 20  # bytes that the probe registers
SEGMENTS_MAX = 8  # segments that are searched for a page
_PAGE = 4096
_GIB = 1 << 30
#: CUresult -> remedy
_REMEDIES = {
    1: "the kernel or the driver refuses maps of this file system: loads go through the ring, which needs nothing",
    2: "raise the limits of memory: ulimit -l unlimited, docker --ulimit memlock=-1, the cgroup's memory",
    100: "give the container its GPUs (docker run --gpus all), and look at CUDA_VISIBLE_DEVICES",
    801: "this device or driver registers no read-only maps: loads go through the ring, which needs nothing",
    802: "start the fabric manager: systemctl start nvidia-fabricmanager",
    803: "library and kernel module are of different versions: reboot, or mount the host's library",
    999: "look at nvidia-smi and at the kernel's log (dmesg | grep -i -e nvrm -e xid)",
}
_UNKNOWN_ERROR = _REMEDIES[999]


class _Sample(NamedTuple):
    """Bytes of the store that a GPU is asked to read."""

    file: Descriptor
    offset: int
    nbytes: int
    what: str


class ProbeOutput(NamedTuple):
    """What the probe reported: the last step that it began, its facts, and the facts of each device."""

    step: str
    facts: dict[str, Any]
    devices: dict[int, dict[str, Any]]
    timed_out: bool = False


def diagnose_gpu(path: str, files: Files, seconds: float = SECONDS) -> Finding:
    """One finding. Takes at most about ``seconds``; raises nothing, even if the driver hangs or crashes."""
    try:
        directory = Directory(path, files, read_only=True)
    except Exception as exc:
        return Finding("gpu", WARN, f"cannot be checked: {exc}", "see the other findings")
    with contextlib.closing(directory):
        try:
            sample = _sample(directory)
            with contextlib.closing(sample.file):
                output = run_probe(sample.file.fd, sample.offset, sample.nbytes, seconds)
        except (OSError, subprocess.SubprocessError) as exc:
            return Finding("gpu", WARN, f"cannot be checked: {exc}", "see the other findings")
        return finding_of(output, sample.what, seconds)


def _sample(directory: Directory) -> _Sample:
    """A stored page, or if there is none, a file of the store."""
    files, folder = directory.files, directory.sub("segments")
    for name in files.listdir(folder)[:SEGMENTS_MAX]:
        file = Descriptor(files)
        with contextlib.suppress(OSError):
            file = Descriptor.open(files, name, os.O_RDONLY, dir_fd=folder)
            files.random_access(file.fd)
            # the probe inherits the descriptor and its lock: while a driver may hold the blocks, they stay charged
            scan = scan_segment(file.fd, files, records_max=4) if files.flock(file.fd, fcntl.LOCK_SH) else None
            # loads never map segments that bypass the page cache (mode staging), so the probe must not map them
            for entry in scan.parts() if scan is not None and not scan.header.flags & fmt.FLAG_DIRECT else ():
                nbytes = min(fmt.align(entry.stored_bytes), PAGE_BYTES_MAX)
                if entry.payload % _PAGE == 0 and entry.payload + nbytes <= files.fstat(file.fd).st_size:
                    return _Sample(file, entry.payload, nbytes, "a page of this store")
        file.close()
    file = Descriptor.open(files, "super", os.O_RDONLY, dir_fd=directory.root)
    return _Sample(file, 0, min(files.fstat(file.fd).st_size, _PAGE), "a file of this store")


def run_probe(fd: int, offset: int, nbytes: int, seconds: float) -> ProbeOutput:
    """Run the probe; what it reported until it ended, was killed, or ``seconds`` had passed."""
    return _run([str(fd), str(offset), str(nbytes)], (fd,), seconds)


def _run(arguments: list[str], fds: tuple[int, ...], seconds: float) -> ProbeOutput:
    command = [sys.executable, "-I", "-S", str(gpu_probe.__file__), *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=fds
    ) as child:
        try:
            output, timed_out = child.communicate(timeout=seconds)[0], False
        except subprocess.TimeoutExpired as exc:
            output, timed_out = exc.output or b"", True
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(KILLED_SECONDS)
            if child.returncode is None:
                child.returncode = -9  # it may never end, and the end of this block would wait for it
    return _parse(output[:OUTPUT_BYTES_MAX], timed_out)


def _parse(output: bytes, timed_out: bool) -> ProbeOutput:
    step, facts, devices = "start", dict[str, Any](), dict[int, dict[str, Any]]()
    for line in output.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            report = json.loads(line)
            if "step" in report:
                step = report["step"]
            elif "device" in report:
                devices[report["device"]["ordinal"]] = report["device"]
            elif "checked" in report:
                devices[report["checked"]] |= report
            else:
                facts |= report
    return ProbeOutput(step, facts, devices, timed_out)


def finding_of(output: ProbeOutput, what: str, seconds: float) -> Finding:
    """The finding that follows from the probe's output. ``what`` it read in place, after at most ``seconds``."""
    facts, devices = output.facts, [output.devices[n] for n in sorted(output.devices)]
    data = {"driver": facts.get("version"), "devices": devices, "module": _module(), "mig": _mig()}
    for device in devices:
        device["bar1_bytes"] = _bar1(device.get("pci", ""))
    if "missing" in facts:
        return Finding("gpu", OK, "no CUDA driver: host transfers only", "", data)
    if output.timed_out:
        return Finding(
            "gpu", BAD, f"the driver did not answer within {seconds:.0f} s ({output.step}): engines hang there as well",
            f"{_UNKNOWN_ERROR}; reset the GPU or reboot", data,
        )  # fmt: skip
    if "failed" in facts:
        return Finding("gpu", WARN, facts["failed"], _REMEDIES.get(facts["code"], _UNKNOWN_ERROR), data)
    if output.step != "done":
        return Finding("gpu", BAD, f"the driver ended the process that asked it ({output.step})", _UNKNOWN_ERROR, data)
    version = f"CUDA {facts['version'] // 1000}.{facts['version'] % 1000 // 10}"
    version += f", driver {data['module']}" if data["module"] else ""
    if not devices:
        return Finding("gpu", WARN, f"{version}, no device", _REMEDIES[100], data)
    names = [f"{n} x {name}" if n > 1 else name for name, n in _counted(devices)]
    detail = f"{version}, {', '.join(names)}{', MIG is on' if data['mig'] else ''}"
    fail = [d for d in devices if not d.get("works")]
    if fail:
        by = "" if len(fail) == len(devices) else f" by device {', '.join(str(d['ordinal']) for d in fail)}"
        return Finding(
            "gpu", WARN, f"{detail}; {what} cannot be read in place{by}: {fail[0].get('reason', '')}",
            _REMEDIES.get(fail[0].get("code", 0), "loads go through the ring, which needs nothing"), data,
        )  # fmt: skip
    return Finding("gpu", OK, f"{detail}; reads {what} in place", "", data)


class Link(NamedTuple):
    """Copies between pinned host memory and one device in GB/s: minimum, median, maximum."""

    ordinal: int
    name: str
    to_device: tuple[float, float, float]
    to_host: tuple[float, float, float]


def measure_links(seconds: float = SECONDS, nbytes: int = LINK_BYTES) -> tuple[list[Link], str]:
    """The link of each device, and one line about those that could not be measured, "" if there are none.

    Takes at most about ``seconds``; raises nothing, even if the driver hangs or crashes.
    """
    try:
        output = _run(["link", str(nbytes)], (), seconds)
    except (OSError, subprocess.SubprocessError) as exc:
        return [], f"cannot be measured ({exc})"
    found = []
    for ordinal, device in sorted(output.devices.items()):
        if device.get("works"):
            rates = ([nbytes / 1e9 / s for s in device[way]] for way in ("to_device", "to_host"))
            found.append(Link(ordinal, device["name"], *((min(r), median(r), max(r)) for r in rates)))
    if "missing" in output.facts:
        return found, "no CUDA driver, so there is no link to measure"
    if output.timed_out:
        return found, f"the driver did not answer within {seconds:.0f} s ({output.step}): run kvfs doctor"
    if "failed" in output.facts:
        return found, f"{output.facts['failed']}: run kvfs doctor"
    if output.step != "done":
        return found, f"the driver ended the process that asked it ({output.step}): run kvfs doctor"
    if not output.devices:
        return found, "the CUDA driver has no device: run kvfs doctor"
    bad = [f"device {n}: {d.get('reason', '')}" for n, d in sorted(output.devices.items()) if not d.get("works")]
    return found, f"{bad[0]}: run kvfs doctor" if bad else ""


def _counted(devices: list[dict[str, Any]]) -> list[tuple[str, int]]:
    names = [f"{d['name']} ({d['memory_bytes'] / _GIB:.0f} GiB)" for d in devices]
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def _module() -> str:
    """Version of the kernel module, "" if it is unknown."""
    with contextlib.suppress(OSError, IndexError), open("/sys/module/nvidia/version", encoding="ascii") as file:
        return file.read(64).strip()
    return ""


def _mig() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.startswith("MIG-") or bool(glob.glob("/proc/driver/nvidia/capabilities/gpu*/mig/gi*"))


def _bar1(pci: str) -> int | None:
    """Bytes of a device that the bus maps at once (many with resizable BAR); None if that is unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if not all(c in "0123456789abcdef:." for c in pci):
            return None
        with open(f"/sys/bus/pci/devices/{pci}/resource", encoding="ascii") as lines:
            start, end, _ = lines.readlines()[1].split()
            return int(end, 16) - int(start, 16) + 1
    return None
