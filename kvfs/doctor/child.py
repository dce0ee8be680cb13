"""The checks in a child process. The kernel keeps a process one thread of which waits for a disk. So the command opens
no file of the store itself, and does not wait for the end of its child, which may come when the disk answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from kvfs import errors
from kvfs.doctor.findings import BAD, Finding
from kvfs.errors import KvfsError
from kvfs.system import child_process

MODULE = __name__


def findings(path: str, *, with_report: bool = False) -> tuple[list[Finding], dict[str, str]]:
    """What a child found, and for a report the texts of the store's files. Raises what ``diagnose`` raises."""
    reader, writer = os.pipe()
    with open(reader, "rb") as answer:
        try:
            process = child_process.start(MODULE, {"fd": writer, "path": path, "report": with_report}, [writer])
        finally:
            os.close(writer)
        try:
            return _parse(answer.readline())
        finally:
            process.kill()
            process.returncode = process.poll() or 0  # the end is not waited for: it may never come


def _parse(line: bytes) -> tuple[list[Finding], dict[str, str]]:
    if not line:
        return [Finding("doctor", BAD, "the process that runs the checks ended", "look at dmesg, and try again")], {}
    found: dict[str, Any] = json.loads(line)
    if "error" in found:
        raise getattr(errors, found["error"], KvfsError)(found["text"])
    return [Finding(*finding) for finding in found["findings"]], found["report"]


def main() -> None:
    """The child: one line of JSON, then the end, which a disk may delay."""
    setup: dict[str, Any] = json.loads(sys.argv[2])
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # a reader of the output of the command must not wait for this process
        os.dup2(null, stream)
    line = json.dumps(_answer(setup["path"], with_report=setup["report"])).encode() + b"\n"
    with contextlib.suppress(BrokenPipeError), open(setup["fd"], "wb") as answer:
        answer.write(line)
    os._exit(0)  # a thread may wait for the disk, and holds nothing


def _answer(path: str, *, with_report: bool) -> dict[str, Any]:
    from kvfs.directory.root import translate_os_errors  # the command itself needs none of these
    from kvfs.doctor import report
    from kvfs.doctor.bucket_check import diagnose_bucket
    from kvfs.doctor.checks import diagnose
    from kvfs.doctor.gpu_checks import diagnose_gpu
    from kvfs.system.files import Files

    try:
        with translate_os_errors(path):
            found = diagnose(path, Files(), lambda: [*diagnose_bucket(path, Files()), diagnose_gpu(path, Files())])
        hangs = any(finding.check == "disk" for finding in found)
        texts = report.of_store(path) if with_report and not hangs else {}
    except KvfsError as exc:
        return {"error": type(exc).__name__, "text": str(exc)}
    return {"findings": found, "report": texts}
