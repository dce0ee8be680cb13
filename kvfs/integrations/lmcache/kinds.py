"""Kinds of objects: a namespace has pages of one size, an LMCache server objects of several.

A key of LMCache says neither how long its object is nor what its bytes are. Objects of one layout (shapes and dtypes)
and size are a kind, and each kind of a model is a namespace. A lookup is told the layout of the object before LMCache's
serializer changed it, so which kinds there are is read from the store.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvfs.errors import ConfigError, KvfsError
from kvfs.integrations.lmcache.settings import LMCacheSettings
from kvfs.namespace import Namespace
from kvfs.pages.layout import PageLayout
from kvfs.store import Store

log = logging.getLogger("lmcache.kvfs")
ENGINE = "lmcache"
#: Sizes of objects that are shorter than their buffer: parts of it. They are padded to the next one.
SIZES = 16
KINDS_MAX = 64  # of one model: a lookup that finds nothing asks each of them
NAMESPACES_MAX = 1024  # that are kept open; there is one for each kind and cache salt
REFRESH_SECONDS = 1.0  # how often a lookup that finds nothing reads the kinds from the store
LAYOUT_CHARS = 200  # of a layout in a namespace's identity; longer ones are hashed


class Kind(NamedTuple):
    """Objects of one layout and size."""

    layout: str
    nbytes: int


def layout_name(shapes: Iterable[Iterable[int]], dtypes: Iterable[object]) -> str:
    """Text that is equal for equal layouts: ``bfloat16[2,32,256,1024]``, of several groups one behind the other."""
    pairs = zip(shapes, dtypes, strict=True)
    text = " ".join(f"{str(t).removeprefix('torch.')}[{','.join(str(int(n)) for n in s)}]" for s, t in pairs)
    return text if len(text) <= LAYOUT_CHARS else hashlib.sha256(text.encode()).hexdigest()


def stored_bytes(nbytes: int, room: int) -> int:
    """The size under which an object of ``nbytes`` in a buffer of ``room`` bytes is stored."""
    step = -(-room // SIZES)
    return room if nbytes >= room else min(room, -(-nbytes // step) * step)


class Kinds:
    """The namespaces of a server's objects. Thread-safe."""

    def __init__(self, store: Store, settings: LMCacheSettings) -> None:
        self._store, self._settings = store, settings
        self._lock = threading.Lock()
        self._namespaces = OrderedDict[tuple[str, str, Kind], Namespace]()
        self._known = dict[str, dict[Kind, None]]()  # by model
        self._read_at = float("-inf")
        self.refresh()

    def namespace(self, model: str, salt: str, kind: Kind) -> Namespace:
        """The namespace of a kind. ConfigError if there are too many kinds, or the store cannot keep such objects."""
        with self._lock:
            space = self._namespaces.get((model, salt, kind))
            if space is not None:
                self._namespaces.move_to_end((model, salt, kind))
                return space
            known = self._known.setdefault(model, {})
            if kind not in known and len(known) >= KINDS_MAX:
                raise ConfigError(
                    f"{model} has objects of more than {KINDS_MAX} sizes and layouts: purge namespaces of old ones "
                    "(kvfs ls, kvfs rm), or use another serde"
                )
        space = self._store.namespace(
            model, PageLayout.opaque(kind.nbytes, self._settings.chunk_tokens), self._settings.weights_id, salt=salt,
            extra={"engine": ENGINE, "layout": kind.layout}, codec=self._settings.codec,
        )  # fmt: skip
        with self._lock:
            self._known[model][kind] = None
            self._namespaces[model, salt, kind] = space
            if len(self._namespaces) > NAMESPACES_MAX:
                self._namespaces.popitem(last=False)
        return space

    def known(self, model: str) -> list[Kind]:
        """The kinds of a model's objects that this process knows."""
        with self._lock:
            return list(self._known.get(model, ()))

    def refresh(self) -> bool:
        """Read from the store which kinds there are, at most once in REFRESH_SECONDS; whether one is new."""
        with self._lock:
            now = time.monotonic()
            if now < self._read_at + REFRESH_SECONDS:
                return False
            self._read_at = now
        try:
            described = self._store.catalog.described()
        except KvfsError as exc:  # the index does not answer: a lookup finds nothing then
            log.warning("kvfs: the kinds of objects cannot be read: %s", exc)
            return False
        new = False
        for one in described:
            kind = self._kind_of(one)
            if kind is None:
                continue
            with self._lock:
                known = self._known.setdefault(one.name, {})
                if kind not in known and len(known) < KINDS_MAX:
                    known[kind], new = None, True
        return new

    def _kind_of(self, described: Any) -> Kind | None:
        """The kind of a namespace of this adapter's settings; None for any other."""
        layout, extra = described.layout, described.body.get("extra")
        if layout.kind != "opaque" or described.revision != self._settings.weights_id or not isinstance(extra, dict):
            return None
        name = extra.get("layout")
        if extra.get("engine") != ENGINE or not isinstance(name, str):
            return None
        if layout.page_tokens != self._settings.chunk_tokens:
            return None
        return Kind(name, layout.groups[0].page_bytes)
