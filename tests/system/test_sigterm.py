"""A process that dies of SIGTERM lets go of what it keeps pinned; handlers of the program are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys, time
from kvfs.system.sigterm import at_sigterm
class Holder:
    def __init__(self, name): self.name = name
    def release(self):
        print(self.name, flush=True)
        if self.name == "raises": raise RuntimeError("in a handler")
mine = lambda number, frame: (print("mine", flush=True), os._exit(3))
case = sys.argv[1]
if case == "own handler":
    signal.signal(signal.SIGTERM, mine)
holders = [Holder("raises"), Holder("one")]
installed = [at_sigterm(holder) for holder in holders]
print(*installed, flush=True)
if case == "fork":
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
if case == "killed in the fork":
    for _ in range(20):
        if not (child := os.fork()):
            time.sleep(30)
            os._exit(9)
        os.kill(child, signal.SIGTERM)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
if case == "gone":
    del holders[1]
if case == "later handler":
    signal.signal(signal.SIGTERM, mine)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""


def run(case: str) -> tuple[int, list[str]]:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, case], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.split("\n")[:-1]


def test_everything_is_let_go_of_and_the_process_dies_of_the_signal() -> None:
    code, lines = run("plain")
    assert (code, lines[0], sorted(lines[1:])) == (-signal.SIGTERM, "True True", ["one", "raises"])


def test_what_is_gone_is_not_asked() -> None:
    assert run("gone") == (-signal.SIGTERM, ["True True", "raises"])


def test_handlers_of_the_program_win() -> None:
    assert run("own handler") == (3, ["False False", "mine"])
    assert run("later handler") == (3, ["True True", "mine"])


def test_a_forked_child_lets_go_of_nothing() -> None:
    code, lines = run("fork")
    assert (code, lines[:2], sorted(lines[2:])) == (-signal.SIGTERM, ["True True", "child -15"], ["one", "raises"])


def test_a_child_that_is_terminated_before_its_fork_is_over_dies() -> None:
    """Python drops signals of that moment if they have a handler: a pool waited for such a child for ever."""
    code, lines = run("killed in the fork")
    assert (code, lines[1:21]) == (-signal.SIGTERM, ["child -15"] * 20)
