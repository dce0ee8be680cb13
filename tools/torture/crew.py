"""Starting, stopping and killing the processes of a torture run, and collecting their counts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.torture.judge import BLOCKED_SECONDS, Judge

ROOT = Path(__file__).resolve().parents[2]


class Crew:
    """Processes that work on ``folder/store``. A context manager: none of them outlives it."""

    def __init__(self, folder: Path, seed: int, options: dict[str, object] | None = None) -> None:
        self.folder = folder
        self.seed = seed
        self.options = [f"{k}={v}" for k, v in (options or {}).items()]
        self.members: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: dict[str, float] = {}  # name -> when to resume
        self._touched: dict[str, float] = {}  # name -> start, or end of a stop: silence counts from then
        self._stopped_at: dict[str, float] = {}
        self._stops: dict[str, float] = {}
        self._started = 0
        (folder / "status").mkdir(parents=True, exist_ok=True)

    def start(self, role: str, *, prefix: Sequence[str] = ()) -> str:
        """Start a process; its name. ``prefix``: a command that runs it (unshare, setpriv)."""
        name = f"{role}-{self._started}"
        command = [*prefix, sys.executable, "-m", "tools.torture.actor", role, str(self.folder), name]
        command += [str(self.seed * 1000 + self._started), *self.options]
        self._started += 1
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        with open(self.folder / "status" / f"{name}.err", "wb") as errors:
            self.members[name] = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=errors, stderr=errors, start_new_session=True
            )
        self._touched[name] = time.monotonic()
        return name

    def has_reported(self, name: str) -> bool:
        """Whether a process has ended its first operation."""
        status = self.folder / "status" / name
        return status.exists() and status.stat().st_size > 0

    def kill(self, name: str, number: int = signal.SIGKILL, *, wait: float = 20.0) -> bool:
        """End a process and its children, with a signal; False if it did not end in time."""
        member = self.members.pop(name)
        self.stopped.pop(name, None)
        _signal(member, signal.SIGCONT)
        _signal(member, number)
        try:
            member.wait(wait)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            _signal(member, signal.SIGKILL)
            member.wait()

    def stop(self, name: str, seconds: float) -> None:
        """Freeze a process for so many seconds; ``tick`` resumes it."""
        os.kill(self.members[name].pid, signal.SIGSTOP)
        self.stopped[name] = time.monotonic() + seconds
        self._stopped_at[name] = time.monotonic()

    def resume(self) -> None:
        """Resume all frozen processes."""
        self.tick(all_of_them=True)

    def tick(self, *, all_of_them: bool = False) -> None:
        now = time.monotonic()
        for name, until in list(self.stopped.items()):
            if now >= until or all_of_them:
                del self.stopped[name]
                self._touched[name] = now
                self._note_stop(name)
                _signal(self.members[name], signal.SIGCONT)

    def _note_stop(self, name: str) -> None:
        """Write down how long a process was stopped in sum: its calls took that much longer."""
        self._stops[name] = self._stops.get(name, 0.0) + time.monotonic() - self._stopped_at[name]
        (self.folder / "status" / f"{name}.stopped").write_text(f"{self._stops[name]:.6f}")

    def check(self, judge: Judge) -> None:
        """Report processes that ended unasked or have been silent for too long."""
        now, wall = time.monotonic(), time.time()
        for name, member in list(self.members.items()):
            if member.poll() is not None:
                judge.found("raised", f"{name} ended with {member.returncode}: {self.errors_of(name)[-600:]}")
                self.members.pop(name)
                self.stopped.pop(name, None)
                continue
            path = self.folder / "status" / name
            silent = wall - path.stat().st_mtime if path.exists() else now - self._touched[name]
            if name not in self.stopped and min(silent, now - self._touched[name]) > BLOCKED_SECONDS + 10:
                judge.found("blocked", f"{name} is silent for {silent:.0f} s")
                self.kill(name)

    def collect(self, judge: Judge) -> None:
        """Add up the counts of all processes, dead ones included, once."""
        for path in sorted((self.folder / "status").iterdir()):
            if path.suffix not in (".err", ".stopped"):
                text = path.read_bytes().strip(b" \0")
                if text:
                    try:
                        judge.merge(*json.loads(text))
                    except ValueError:  # killed in the middle of a report
                        judge.counts["unread_reports"] += 1
            path.unlink()

    def sum(self, count: str) -> int:
        """A count of all processes so far, dead ones included."""
        total = 0
        for path in (self.folder / "status").iterdir():
            if path.suffix not in (".err", ".stopped"):
                with contextlib.suppress(ValueError, IndexError):
                    total += json.loads(path.read_bytes().strip(b" \0"))[0].get(count, 0)
        return total

    def errors_of(self, name: str) -> str:
        try:
            return (self.folder / "status" / f"{name}.err").read_text(errors="replace")
        except OSError:
            return ""

    def run(self, role: str, judge: Judge, seconds: float = 120.0) -> None:
        """Run a role that ends by itself."""
        name = self.start(role)
        member = self.members.pop(name)
        try:
            if member.wait(seconds):
                judge.found("unopenable", f"{name} failed: {self.errors_of(name)[-1200:]}")
        except subprocess.TimeoutExpired:
            judge.found("blocked", f"{name} did not end within {seconds:.0f} s")
        finally:
            _signal(member, signal.SIGKILL)
            member.wait()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.members):
            self.kill(name)


def _signal(member: subprocess.Popen[bytes], number: int) -> None:
    """Signal a process and the children that it has forked."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(member.pid, number)
