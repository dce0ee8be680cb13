"""Pages between SGLang's host pool and a store, by page hash. Synchronous: SGLang calls it on threads of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvfs.errors import ConfigError
from kvfs.integrations.sglang.attachment import Attachment, digests, ended
from kvfs.integrations.sglang.identity import ModelFiles
from kvfs.integrations.sglang.pools import GROUP, host_pool
from kvfs.integrations.sglang.ranks import Rank
from kvfs.integrations.sglang.settings import SGLangSettings
from kvfs.lookup.prompt_pages import PromptPages
from kvfs.types import PageDone, PageOutcome

log = logging.getLogger("sglang.kvfs")


class HiCachePages:
    """The pages of one rank. Thread-safe. After ``attach`` no call raises because of a disk.

    A page's name is its hash in SGLang, which without a salt is the chunk hash that kvfs computes from token ids. Its
    place in the chain comes from the hashes before it (``prefix``), so SGLang must be told to pass them.
    """

    def __init__(self, settings: SGLangSettings, rank: Rank, model: ModelFiles, model_name: str | None = None) -> None:
        self._settings, self._rank, self._model, self._model_name = settings, rank, model, model_name
        self._attached: Attachment | None = None
        self._warned = False

    def attach(self, pool: Any) -> None:
        """Open the store and attach the pool. ConfigError or UnsupportedModelError names the flag to change."""
        if self._attached is not None:
            raise ConfigError("a host pool is attached already: detach the storage backend first")
        self._attached = Attachment.open(self._settings, self._rank, self._model, self._model_name, host_pool(pool))

    @property
    def attached(self) -> Attachment:
        """ConfigError before ``attach`` and after ``close``."""
        if self._attached is None:
            raise ConfigError("no host pool is attached: SGLang attaches one before it uses the storage backend")
        return self._attached

    def exists(self, keys: Sequence[str], prefix: Sequence[str] | None) -> int:
        """How many leading pages of ``keys`` are stored, whole: by all ranks."""
        pages, first = self._prompt(keys, prefix)
        pages.look(first)
        here = pages.stored[GROUP] >> first
        found = (~here & here + 1).bit_length() - 1
        pages.note_lookup((first + found) * self.attached.page_tokens)
        return found

    def save(self, keys: Sequence[str], slots: Any, prefix: Sequence[str] | None) -> list[bool]:
        """Store the pages at ``slots`` (of each token, page by page); which are stored, or are being written, then."""
        if prefix is None:
            return self._without_prefix(keys)
        attached, settings = self.attached, self._settings
        pages, first = self._prompt(keys, prefix)
        units = attached.units(keys, slots)
        pages.look(first)
        there = pages.stored[GROUP] | pages.writing[GROUP]
        missing = [c for c in range(first, pages.chunks) if not there >> c & 1]
        if not missing:
            return [True] * len(keys)
        lost = set(attached.kv.written(missing))  # another rank may hold the same bytes, and write the others

        def page(done: PageDone) -> None:
            if done.outcome in (PageOutcome.STORED, PageOutcome.SKIPPED):
                lost.discard(done.chunk)

        plan = pages.plan({GROUP: missing})
        saving = attached.io.save(
            plan, units, first_unit=first, deadline=settings.store_seconds, ttl=settings.ttl, on_page=page
        )
        if not ended(saving, settings.store_seconds):
            return [False] * len(keys)
        return [first + n not in lost for n in range(len(keys))]

    def load(self, keys: Sequence[str], slots: Any, prefix: Sequence[str] | None) -> list[bool]:
        """Load pages to ``slots``; which of them verified. The others are untouched."""
        attached, seconds = self.attached, self._settings.load_seconds
        pages, first = self._prompt(keys, prefix)
        units = attached.units(keys, slots)
        good = set[int]()

        def page(done: PageDone) -> None:
            if done.outcome is PageOutcome.LOADED:
                good.add(done.chunk)

        with pages.select({GROUP: first}, pages.chunks) as match:
            loading = attached.io.load(
                match, units, first_unit=first, first_token=first * attached.page_tokens, deadline=seconds, on_page=page
            )
            if not ended(loading, seconds):
                return [False] * len(keys)
        return [first + n in good for n in range(len(keys))]

    def clear(self) -> None:
        """Remove all pages of this namespace, for every engine that uses it."""
        self.attached.store.purge(self.attached.space)

    def close(self) -> None:
        """End what is under way, and close the store. May be called again."""
        attached, self._attached = self._attached, None
        if attached is not None:
            attached.close()

    # -- helpers -----------------------------------------------------------------------------

    def _prompt(self, keys: Sequence[str], prefix: Sequence[str] | None) -> tuple[PromptPages, int]:
        before = list(prefix or ())
        return self.attached.space.prompt(hashes=digests([*before, *keys])), len(before)

    def _without_prefix(self, keys: Sequence[str]) -> list[bool]:
        """Pages whose place in the chain is not known would be found by chance only: they are not stored."""
        if not self._warned:
            self._warned = True
            log.warning(
                'kvfs stores nothing: write "hicache_storage_pass_prefix_keys": true into %s, so that SGLang tells '
                "where in its prompt a page is", self._settings.flag,
            )  # fmt: skip
        return [False] * len(keys)
