"""What to let go of at SIGTERM, in programs that have no handler of their own.

A process that dies with many GiB pinned does so slowly: nothing of Python runs any more, and the kernel unpins page by
page. So the first attached GPU installs a handler, if the signal has its default action and the main thread attaches;
it lets go and then dies of the signal. Programs with a handler close their stores in it.

Python forgets the signals that reach a child before its fork is over, if they have a handler. So SIGTERM waits
meanwhile, and has its default action in the child, which has nothing to let go of.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol


class Holder(Protocol):
    """Something that keeps memory pinned."""

    def release(self) -> None: ...


_HOLDERS: weakref.WeakSet[Holder] = weakref.WeakSet()
_pid = 0
_masks = threading.local()  # of signals, of a thread that forks


def at_sigterm(holder: Holder) -> bool:
    """Have ``holder.release()`` called at SIGTERM, as long as it lives; False if the signal is somebody else's."""
    global _pid
    _HOLDERS.add(holder)
    if signal.getsignal(signal.SIGTERM) is _let_go:
        _pid = os.getpid()
        return True
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    _pid = os.getpid()
    signal.signal(signal.SIGTERM, _let_go)
    _watch_forks()
    return True


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(before=_hold_back, after_in_parent=_deliver, after_in_child=_default_in_child)


def _hold_back() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _deliver() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _default_in_child() -> None:
    if signal.getsignal(signal.SIGTERM) is _let_go:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _deliver()


def _let_go(number: int, frame: FrameType | None) -> None:
    if os.getpid() == _pid:
        for holder in _holders():
            with contextlib.suppress(Exception):
                holder.release()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _holders() -> list[Holder]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread attached at that moment
            return list(_HOLDERS)
