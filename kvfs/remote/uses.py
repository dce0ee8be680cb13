"""When objects of the bucket were last used: an empty object beside each, which a host writes again once a day.

``kvfs remote gc`` compares the time at which the object store took it. So no host asks another one, and no clock counts
but that of the object store. A note that is lost makes an object seem older than it is, and no prompt wrong.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from kvfs.remote.bucket import Bucket
from kvfs.remote.object_store import RemoteError

NOTED_SECONDS = 86_400.0  # for which a use is not noted again by this process
NOTED_MAX = 65_536  # names that are remembered: about 15 MiB
DUE_MAX = 16_384  # uses that wait to be noted; more are dropped


class Uses:
    """The uses that one process has seen. Thread-safe; ``note`` waits for nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # around what follows
        self._noted: OrderedDict[str, float] = OrderedDict()  # name -> when, in monotonic seconds
        self._due: dict[str, None] = {}

    @property
    def due(self) -> int:
        """How many uses wait to be noted in the bucket."""
        return len(self._due)

    def note(self, names: Iterable[str]) -> None:
        """Objects were used: ``names`` as of ``Shape.used_name``."""
        now = time.monotonic()
        with self._lock:
            for name in names:
                if len(self._due) >= DUE_MAX:
                    return
                if now - self._noted.get(name, float("-inf")) >= NOTED_SECONDS:
                    self._due[name] = None

    def flush(self, bucket: Bucket, requests: int, most: int = DUE_MAX) -> None:
        """Note up to ``most`` of them in the bucket. RemoteError if one fails: then none of them is tried again before
        the next use."""
        with self._lock:
            names = [name for _, name in zip(range(most), self._due, strict=False)]
            now = time.monotonic()
            for name in names:
                del self._due[name]
                self._noted[name] = now
                self._noted.move_to_end(name)
            while len(self._noted) > NOTED_MAX:
                self._noted.popitem(last=False)
        if not names:
            return
        with ThreadPoolExecutor(min(requests, len(names)), "kvfs-pull") as pool:
            try:
                for _ in pool.map(lambda name: bucket.objects.replace(name, b""), names):
                    pass
            except RemoteError:
                with self._lock:
                    for name in names:
                        self._noted.pop(name, None)
                pool.shutdown(wait=True, cancel_futures=True)
                raise
