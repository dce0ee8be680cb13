"""What ``kvfs doctor`` says of GPUs: whether loads can go to them, and whether they can read the store in place."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

from kvfs.directory.root import Directory
from kvfs.doctor import gpu_probe
from kvfs.doctor.checks import BAD, OK, WARN, Finding
from kvfs.format import segment as fmt
from kvfs.segments.scan import scan_segment
from kvfs.system.descriptors import Descriptor
from kvfs.system.files import Files

SECONDS = 30.0  # contexts of several large GPUs take seconds
KILLED_SECONDS = 2.0  # then it is left alone: a process that hangs in the driver cannot be ended
SAID_BYTES_MAX = 256 * 1024
PAGE_BYTES_MAX = 2 << 20
SEGMENTS_LOOKED_AT = 8
_PAGE = 4096
_GIB = 1 << 30
#: CUresult -> what to do
_REMEDIES = {
    1: "the kernel or the driver refuses maps of this file system: loads go through the ring, which needs nothing",
    2: "raise the limits of memory: ulimit -l unlimited, docker --ulimit memlock=-1, the cgroup's memory",
    100: "give the container its GPUs (docker run --gpus all), and look at CUDA_VISIBLE_DEVICES",
    801: "this device or driver registers no read-only maps: loads go through the ring, which needs nothing",
    802: "start the fabric manager: systemctl start nvidia-fabricmanager",
    803: "library and kernel module are of different versions: reboot, or mount the host's library",
    999: "look at nvidia-smi and at the kernel's log (dmesg | grep -i -e nvrm -e xid)",
}
_LOOK = _REMEDIES[999]


class _Sample(NamedTuple):
    """Bytes of the store that a GPU is asked to read."""

    file: Descriptor
    offset: int
    nbytes: int
    what: str


class Said(NamedTuple):
    """What the probe has told: the last step that it began, its facts, what it says of each device."""

    step: str
    facts: dict[str, Any]
    devices: dict[int, dict[str, Any]]
    timed_out: bool = False


def diagnose_gpu(path: str, files: Files, seconds: float = SECONDS) -> Finding:
    """One finding. Takes at most about ``seconds``; raises nothing, whatever the driver does."""
    try:
        directory = Directory(path, files, read_only=True)
    except Exception as exc:
        return Finding("gpu", WARN, f"cannot be checked: {exc}", "see the other findings")
    with contextlib.closing(directory):
        try:
            sample = _sample(directory)
            with contextlib.closing(sample.file):
                said = ask(sample.file.fd, sample.offset, sample.nbytes, seconds)
        except (OSError, subprocess.SubprocessError) as exc:
            return Finding("gpu", WARN, f"cannot be checked: {exc}", "see the other findings")
        return judge(said, sample.what, seconds)


def _sample(directory: Directory) -> _Sample:
    """A page that is stored, or if there is none, a file of the store."""
    files, folder = directory.files, directory.sub("segments")
    for name in files.listdir(folder)[:SEGMENTS_LOOKED_AT]:
        file = Descriptor(files)
        with contextlib.suppress(OSError):
            file = Descriptor.open(files, name, os.O_RDONLY, dir_fd=folder)
            files.random_access(file.fd)
            # goes to the probe with the descriptor: while a driver may hold the blocks, they stay charged
            scan = scan_segment(file.fd, files, records_max=4) if files.flock(file.fd, fcntl.LOCK_SH) else None
            # what goes past the page cache is never mapped by loads in mode staging, so it is not to be mapped here
            for entry in scan.parts() if scan is not None and not scan.header.flags & fmt.FLAG_DIRECT else ():
                nbytes = min(fmt.align(entry.stored_bytes), PAGE_BYTES_MAX)
                if entry.payload % _PAGE == 0 and entry.payload + nbytes <= files.fstat(file.fd).st_size:
                    return _Sample(file, entry.payload, nbytes, "a page of this store")
        file.close()
    file = Descriptor.open(files, "super", os.O_RDONLY, dir_fd=directory.root)
    return _Sample(file, 0, min(files.fstat(file.fd).st_size, _PAGE), "a file of this store")


def ask(fd: int, offset: int, nbytes: int, seconds: float) -> Said:
    """Run the probe; what it said until it ended, was killed, or time was up."""
    command = [sys.executable, "-I", "-S", str(gpu_probe.__file__), str(fd), str(offset), str(nbytes)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(fd,)
    ) as child:
        try:
            output, timed_out = child.communicate(timeout=seconds)[0], False
        except subprocess.TimeoutExpired as exc:
            output, timed_out = exc.output or b"", True
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(KILLED_SECONDS)
            if child.returncode is None:
                child.returncode = -9  # it cannot be waited for: the end of this block would do that
    return _parse(output[:SAID_BYTES_MAX], timed_out)


def _parse(output: bytes, timed_out: bool) -> Said:
    step, facts, devices = "start", dict[str, Any](), dict[int, dict[str, Any]]()
    for line in output.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            told = json.loads(line)
            if "step" in told:
                step = told["step"]
            elif "device" in told:
                devices[told["device"]["ordinal"]] = told["device"]
            elif "in_place" in told:
                devices[told["in_place"]] |= told
            else:
                facts |= told
    return Said(step, facts, devices, timed_out)


def judge(said: Said, what: str, seconds: float) -> Finding:
    """What that means, and what to do."""
    facts, devices = said.facts, [said.devices[n] for n in sorted(said.devices)]
    data = {"driver": facts.get("version"), "devices": devices, "module": _module(), "mig": _mig()}
    for device in devices:
        device["bar1_bytes"] = _bar1(device.get("pci", ""))
    if "missing" in facts:
        return Finding("gpu", OK, "no CUDA driver: host transfers only", "", data)
    if said.timed_out:
        return Finding(
            "gpu", BAD, f"the driver did not answer within {seconds:.0f} s ({said.step}): engines hang there, too",
            f"{_LOOK}; reset the GPU or reboot", data,
        )  # fmt: skip
    if "failed" in facts:
        return Finding("gpu", WARN, facts["failed"], _REMEDIES.get(facts["code"], _LOOK), data)
    if said.step != "done":
        return Finding("gpu", BAD, f"the driver ended the process that asked it ({said.step})", _LOOK, data)
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


def _counted(devices: list[dict[str, Any]]) -> list[tuple[str, int]]:
    names = [f"{d['name']} ({d['memory_bytes'] / _GIB:.0f} GiB)" for d in devices]
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def _module() -> str:
    """Version of the kernel module, "" if it does not say."""
    with contextlib.suppress(OSError, IndexError), open("/sys/module/nvidia/version", encoding="ascii") as file:
        return file.read(64).strip()
    return ""


def _mig() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.startswith("MIG-") or bool(glob.glob("/proc/driver/nvidia/capabilities/gpu*/mig/gi*"))


def _bar1(pci: str) -> int | None:
    """Bytes of a device that the bus shows at once (large with resizable BAR); None if it cannot be told."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if not all(c in "0123456789abcdef:." for c in pci):
            return None
        with open(f"/sys/bus/pci/devices/{pci}/resource", encoding="ascii") as lines:
            start, end, _ = lines.readlines()[1].split()
            return int(end, 16) - int(start, 16) + 1
    return None
