"""fsx of xfstests on a mount of a full store, with kill -9 of the serving process and a new mount after each round.

    git clone https://github.com/kdave/xfstests            # ltp/fsx.c: build it without AIO and URING
    python -m tools.fsx_mount --fsx ./fsx --seconds 3600

The rounds take turns in how fsx uses the file: as it is, with closes and opens in between, without maps, with fsync
after each operation, with maps that are dropped, past the page cache, and a large file. fsx itself compares every byte
that it reads. After each round the serving process is killed, the directory is unmounted and mounted, and the file must
be as it was closed. Prints a line per round, and exits with 1 if anything was wrong or ``kvfs verify`` finds a problem.
Needs root and FUSE.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import kvfs

KINDS: dict[str, list[str]] = {
    "plain": [],
    "reopen": ["-c", "20"],
    "no maps": ["-R", "-W"],
    "fsync": ["-y"],
    "invalidate": ["-I"],
    "direct": ["-Z", "-R", "-W", "-r", "4096", "-w", "4096", "-t", "4096"],
    "large": ["-l", "3000000", "-o", "200000"],
}
FILES = 3
FIND_SECONDS = 10.0  # the index may be rebuilt after a kill
STOP_SECONDS = 60.0
COMMAND = [sys.executable, "-m", "kvfs.cli.main"]


class Mount:
    """A mount of one store, served by a process that is killed and started again."""

    def __init__(self, store: Path, where: Path) -> None:
        self._store, self._where = store, where
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [*COMMAND, "-C", str(self._store), "mount", str(self._where)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if process.stdout is None or "mounted at" not in process.stdout.readline():
            process.kill()
            raise SystemExit(f"{self._where}: the mount did not start")
        return process

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(STOP_SECONDS)
        subprocess.run(["umount", "-l", str(self._where)], check=True, timeout=STOP_SECONDS)

    def start_again(self) -> None:
        self._process = self._start()

    def stop(self) -> None:
        subprocess.run(["umount", "-l", str(self._where)], check=False, timeout=STOP_SECONDS)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()


def digest(path: Path) -> str | None:
    """SHA-256 of a file; None if it does not appear."""
    end = time.monotonic() + FIND_SECONDS
    while True:
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            if time.monotonic() >= end:
                return None
            time.sleep(0.1)


def one_round(fsx: Path, number: int, seconds: int, base: Path, mount: Mount) -> tuple[int, list[str]]:
    """Operations of one round, and what was wrong."""
    kind = list(KINDS)[number % len(KINDS)]
    path = base / "mnt" / "files" / f"f{number % FILES}"
    command = [str(fsx), "-q", "-S", str(1 + number), "-P", str(base), f"--duration={seconds}", *KINDS[kind], str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds * 10 + 300)
    found = sum(int(count) for count in re.findall(r"All (\d+) operations", done.stdout))
    wrong = [f"fsx: {done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}"] if done.returncode else []
    closed = digest(path)
    mount.kill()
    mount.start_again()
    if digest(path) != closed or closed is None:
        wrong.append("the file after the kill is not as it was closed")
    for left in base.glob("*.fsx*"):
        left.unlink()
    print(f"{number + 1} {kind}: {found} operations, load {os.getloadavg()[0]:.0f}", *wrong, flush=True)
    return found, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsx", type=Path, required=True, help="the program")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--round", type=int, default=20, help="seconds of fsx between two kills")
    parser.add_argument("--capacity", default="512MiB")
    arguments = parser.parse_args()
    rounds = operations = bad = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvfs-fsx-") as folder:
        base = Path(folder)
        (base / "mnt").mkdir()
        kvfs.open(base / "store", capacity=arguments.capacity).close()
        mount = Mount(base / "store", base / "mnt")
        try:
            while time.monotonic() - began < arguments.seconds:
                found, wrong = one_round(arguments.fsx.resolve(), rounds, arguments.round, base, mount)
                rounds, operations, bad = rounds + 1, operations + found, bad + bool(wrong)
        finally:
            mount.stop()
        checked = subprocess.run(
            [*COMMAND, "-C", str(base / "store"), "verify", "--all"], capture_output=True, text=True
        )
    print(checked.stdout + checked.stderr)
    print(f"{time.monotonic() - began:,.0f} s, {rounds} rounds and kills, {operations:,} operations, {bad} wrong")
    sys.exit(bool(bad or checked.returncode))


if __name__ == "__main__":
    main()
