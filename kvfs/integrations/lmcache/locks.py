"""Locks of keys between a lookup and its load: matches, which hold the segments of their pages."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from kvfs.integrations.lmcache.kinds import Kind
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.namespace import Namespace

LOCKS_MAX = 1 << 17  # keys: a caller that never unlocks must not take all memory


@dataclass(eq=False)
class Held:
    """A match of keys, and how many locks refer to it. It holds its pages for a minute at most."""

    space: Namespace
    kind: Kind
    match: PrefixMatch
    locks: int = 0


class Locks:
    """Which keys are locked, and by which page of which match. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = OrderedDict[Hashable, deque[tuple[Held, int]]]()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, found: Iterable[tuple[Hashable, Held, int]]) -> None:
        """Lock keys, each with its match and the number of its page there."""
        with self._mutex:
            for key, held, page in found:
                held.locks += 1
                self._held.setdefault(key, deque()).append((held, page))
            while len(self._held) > LOCKS_MAX:
                _, locks = self._held.popitem(last=False)
                for held, _ in locks:
                    self._release(held)

    def of(self, key: Hashable) -> tuple[Held, int] | None:
        """The last lock of a key; None if it is not locked."""
        with self._mutex:
            locks = self._held.get(key)
            return locks[-1] if locks else None

    def remove(self, keys: Iterable[Hashable]) -> None:
        """Release a lock of each key that has one."""
        with self._mutex:
            for key in keys:
                locks = self._held.get(key)
                if locks:
                    self._release(locks.popleft()[0])
                    if not locks:
                        del self._held[key]

    def clear(self) -> None:
        with self._mutex:
            for locks in self._held.values():
                for held, _ in locks:
                    self._release(held)
            self._held.clear()

    def _release(self, held: Held) -> None:
        held.locks -= 1
        if not held.locks:
            held.match.close()
