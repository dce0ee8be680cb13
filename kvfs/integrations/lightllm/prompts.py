"""Chunk hashes of the last prompts: LightLLM offloads pages under hashes that say nothing about their tokens."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

PAGES_MAX = 1 << 17  # that are remembered: 8 million tokens in pages of 64, some 40 MB
HASH_BITS = 128  # of LightLLM's hashes


class Prompts:
    """Which page of which prompt a hash of LightLLM is of. Thread-safe, bounded: the pages told last are kept."""

    def __init__(self, pages_max: int = PAGES_MAX) -> None:
        self._max = pages_max
        self._lock = threading.Lock()
        #: hash of LightLLM -> (number of the page in its prompt, chunk hash); None: of two prompts
        self._pages = OrderedDict[int, tuple[int, bytes] | None]()

    def tell(self, hash_128s: Sequence[int], chunk_hashes: Sequence[bytes]) -> bool:
        """Remember the pages of a prompt, from its first one on. False if a hash is of another prompt, too.

        Such a hash names nothing from then on: LightLLM itself cannot tell whose KV is in its page.
        """
        clean = True
        with self._lock:
            for n, (name, chunk) in enumerate(zip(hash_128s, chunk_hashes, strict=False)):
                known = self._pages.setdefault(name, (n, chunk))
                if known != (n, chunk):
                    self._pages[name], clean = None, False
                self._pages.move_to_end(name)
            while len(self._pages) > self._max:
                self._pages.popitem(last=False)
        return clean

    def chunks(self, hash_128s: Sequence[int]) -> list[bytes]:
        """Chunk hashes of the leading pages that are known. ``hash_128s``: of a prompt, from its first page on."""
        found = list[bytes]()
        with self._lock:
            for n, name in enumerate(hash_128s):
                known = self._pages.get(name)
                if known is None or known[0] != n:
                    break
                found.append(known[1])
        return found
