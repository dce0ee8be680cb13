"""The public face of a store.

A call imports what it needs beyond the index: a command that only inspects a store takes as long as its imports.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvfs.catalog.catalog import Catalog
from kvfs.context import COMMIT_SECONDS
from kvfs.directory import config, io_mode, root
from kvfs.directory.config import Quota, Settings, parse_duration, parse_size
from kvfs.directory.liveness import count_watching
from kvfs.directory.pin_files import Pin, list_pins
from kvfs.errors import ConfigError, IndexUnavailableError, StoreLockedError, StoreReadOnlyError
from kvfs.format.codec import parse as parse_codec
from kvfs.index.session import Session
from kvfs.index.tables import STATE_NAMES
from kvfs.pages.identity import Identity
from kvfs.pages.layout import PageLayout
from kvfs.runtime import registry
from kvfs.runtime.open_store import OpenOptions, OpenStore
from kvfs.system.files import Files, check_output
from kvfs.types import ExtraKeys, PurgeResult, TokensLike, Verify
from kvfs.version import FORMAT

if TYPE_CHECKING:
    from kvfs.bundles.exporter import Exported
    from kvfs.bundles.importer import Imported
    from kvfs.bundles.safetensors_file import Written
    from kvfs.eviction.dry_run import GcPlan
    from kvfs.lookup.prefix_match import PrefixMatch
    from kvfs.maintenance.recompress import Recompressed, Recompressor, RecompressPlan
    from kvfs.maintenance.verify import Verification
    from kvfs.maintenance.warm import Warmed
    from kvfs.namespace import Namespace

PIN_SECONDS = 10.0  # how long a pin waits for an eviction or a purge in progress


def open_store(
    path: str | os.PathLike[str] | None = None, *, capacity: int | str | None = None, create: bool = True,
    read_only: bool = False, segment_bytes: int | str | None = None, index_bytes: int | str | None = None,
    sync: str = "cache", mode: str = "cache", codec: str = "raw", quotas: Mapping[str, Quota] | None = None,
    verify: str | Verify | None = None, threads: int | None = None, files: Files | None = None,
    counted: bool = True,
) -> Store:  # fmt: skip
    """Open the store at ``path``, creating it if it is missing.

    ``capacity``, ``segment_bytes``, ``index_bytes`` (bytes, or a text like "200GiB"), ``sync``, ``mode``, ``codec`` and
    ``quotas`` are used when the store is created; afterwards kvfs.toml decides, for every process. ``path`` defaults to
    ``$KVFS_DIR``. ``verify``: "always" (default), "first" or "off". ``threads``: parallel reads of one ``get`` from the
    page cache. ``counted=False`` is for processes that only inspect a store: their calls stay out of the counters that
    all processes share, and they take part in the upkeep (eviction, TTLs) only once they load, store or evict.
    Raises StoreNotFoundError, FormatError, StoreAccessError, StoreLockedError, NoSpaceError or ConfigError; each
    message names the remedy.

    Operators may set ``KVFS_DISABLE=1`` (every match misses, every put declines, no file is touched) and
    ``KVFS_READONLY=1`` (as ``read_only=True``, but puts decline instead of raising).
    """
    disabled = config.switch("KVFS_DISABLE", os.environ.get("KVFS_DISABLE"))
    forced = config.switch("KVFS_READONLY", os.environ.get("KVFS_READONLY")) and not read_only
    named = path if path is not None else os.environ.get("KVFS_DIR", "")
    where = config.store_path(named or "disabled" if disabled else named)
    try:
        policy = None if verify is None else Verify(verify)
    except ValueError:
        raise ConfigError(f"verify is {verify!r}: choose always, first or off") from None
    if threads is not None and (type(threads) is not int or not 1 <= threads <= 64):
        raise ConfigError(f"threads is {threads!r}: pass 1 to 64")
    files = files or Files()
    if disabled:
        from kvfs.runtime.disabled import DisabledStore

        return Store(DisabledStore(OpenOptions(where, files, verify=policy, threads=threads)))
    read_only = read_only or forced
    if not read_only and create and not root.is_store(where):
        if capacity is None:
            capacity = os.environ.get("KVFS_CAPACITY")
        if capacity is None:
            raise ConfigError(
                f"{where} holds no store yet: pass capacity=, for example capacity='200GiB', to create one"
            )
        settings = config.make_settings(
            capacity, segment=segment_bytes, index=index_bytes, sync=sync, mode=mode, quotas=quotas, codec=codec
        )
        with root.translate_os_errors(where):
            io_mode.check(where, settings, files)
        root.create(where, config.to_toml(settings), files)
    root.check_filesystem(where)
    declines = "read-only" if forced else ""
    return Store(registry.acquire(OpenOptions(where, files, read_only, policy, threads, declines, not counted)))


class Store:
    """An open store. Usable from any thread, and in children after a fork. Close it, or use ``with``.

    Without a ``close`` it is closed in the background, once it and its namespaces are garbage-collected.
    """

    def __init__(self, shared: OpenStore) -> None:
        self._shared = shared
        self._closed = False
        self._finalizer = weakref.finalize(self, registry.release_later, shared)
        self._finalizer.atexit = False  # at exit the registry closes every open store

    @property
    def path(self) -> str:
        return self._shared.path

    @property
    def settings(self) -> Settings:
        """The limits in force, from kvfs.toml."""
        return self._shared.settings

    @property
    def read_only(self) -> bool:
        return self._shared.read_only

    def namespace(
        self, name: str, layout: PageLayout, revision: str, salt: str = "", *, codec: str | None = None,
        **identity: Any,
    ) -> Namespace:  # fmt: skip
        """The pages of one model. ``identity``: further fields of ``kvfs.Identity``.

        ``revision`` is a commit or a digest of the weights, never a name that moves; ``salt`` a tenant's secret.
        ``codec``: "raw", "zstd" or "planes", in which this process stores new pages (default: the store's setting). It
        is not part of the identity: pages of every codec are read. Raises ConfigError for a bad argument, NoSpaceError
        if a page does not fit into a segment.
        """
        from kvfs.namespace import Namespace

        self._check_open()
        described = Identity(name, layout, revision, salt, **identity)
        services = self._shared.services()
        return Namespace(self._shared.c, services.appender, services.reader, described, codec, keep_alive=self)

    def wait_ready(self, timeout: float = 60.0) -> bool:
        """Wait until the index answers, which a rebuild delays; False if it does not within ``timeout`` seconds."""
        self._check_open()
        deadline = self._shared.c.files.monotonic() + timeout
        while not self._shared.is_ready():
            if self._shared.c.files.monotonic() >= deadline:
                return False
            self._shared.c.files.sleep(0.02)
        return True

    def stats(self) -> dict[str, Any]:
        """What the store holds, and what this process and all processes did with it. docs/api.md lists the keys."""
        self._check_open()
        shared = self._shared
        result: dict[str, Any] = {
            "path": shared.path,
            "format": FORMAT,
            "store_id": shared.c.store_id.hex(),
            "capacity_bytes": shared.settings.capacity_bytes,
            "read_only": shared.read_only,
            "mode": shared.c.mode.name,
            "verify": shared.c.verify.value,
            "watch": shared.watching,
            "counters": shared.c.counters.snapshot(),
            "totals": self._totals(),
            "index": {"state": "ready", "generation": shared.c.index.generation, "timeouts": shared.c.index.timeouts},
        }
        try:
            result |= shared.c.index.read(_summarise, COMMIT_SECONDS)
        except IndexUnavailableError as exc:
            result["index"]["state"] = str(exc)
        return result

    def _totals(self) -> dict[str, int]:
        """Counts of all processes, and how many of the live ones learn of changes by inotify or by polling."""
        c = self._shared.c
        watching = {f"now_{how}": n for how, n in count_watching(c.directory).items()}
        return c.shared_counters.total() | watching

    def gc(self, target_bytes: int | None = None, *, seconds: float | None = None) -> dict[str, int]:
        """Evict until segments use at most ``target_bytes`` (default: only what exceeds the limits now).

        Stops after ``seconds``, if given. Returns ``segments_dropped``, ``bytes_before`` and ``bytes_after``.
        """
        self._check_open()
        self._check_writable()
        if self._shared.disabled:
            return {"segments_dropped": 0, "bytes_before": 0, "bytes_after": 0}
        with root.translate_os_errors(self.path):
            return self._shared.services().evictor.collect(target_bytes, seconds)

    def gc_plan(self, target_bytes: int | None = None) -> GcPlan:
        """What ``gc`` would do now; changes nothing."""
        from kvfs.eviction.dry_run import make_plan

        self._check_open()
        return make_plan(self._shared.c, self._shared.services().evictor, target_bytes)

    def recompress_plan(
        self, codec: str = "planes", *, idle: float | str = "1h", seconds: float | None = None
    ) -> RecompressPlan:
        """Which segments ``recompress`` would rewrite now, and about how many bytes it would save; changes nothing."""
        self._check_open()
        self._check_enabled()
        number, idle_seconds = parse_codec(codec), parse_duration(idle, "idle")
        with root.translate_os_errors(self.path):
            return self._recompressor().plan(number, idle_seconds, seconds)

    def recompress(
        self, codec: str = "planes", *, idle: float | str = "1h", seconds: float | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Recompressed:  # fmt: skip
        """Rewrite cold sealed segments with their pages in ``codec``, and drop the old ones.

        Cold: no page of the segment was used for ``idle`` (seconds, or a text like "1h"), and it is not pinned. Stops
        after ``seconds``, if given. ``progress(done, total)`` is called with numbers of segments.
        """
        self._check_open()
        self._check_enabled()
        self._check_writable()
        number, idle_seconds = parse_codec(codec), parse_duration(idle, "idle")
        with root.translate_os_errors(self.path):
            return self._recompressor().run(number, idle_seconds, seconds, progress)

    def _recompressor(self) -> Recompressor:
        from kvfs.maintenance.recompress import Recompressor

        services = self._shared.services()
        return Recompressor(self._shared.c, services.evictor, services.active)

    def purge(
        self, namespace: Namespace | str | bytes | None = None, *, salt: str | None = None,
        prefix: TokensLike | None = None, chunks: Iterable[bytes] | None = None, extra: ExtraKeys | None = None,
    ) -> PurgeResult:  # fmt: skip
        """Remove pages permanently: no lookup finds them afterwards, and no rebuild restores them.

        ``namespace``: a Namespace, its digest (32 bytes, or in hex), or a name (then all revisions of that name).
        ``salt``: a tenant's secret; everything stored under it. ``prefix``: only the full chunks of these token ids,
        including heads that other prompts share; needs a Namespace. ``chunks``: only chunks with these hashes (see
        ``Namespace.chunk_hashes``). Pages stored afterwards are served, and matches and views that exist already stay
        valid until they are released. ConfigError if a pin protects some of the pages.
        """
        from kvfs.maintenance.purge import select
        from kvfs.namespace import Namespace

        self._check_open()
        if not isinstance(namespace, (Namespace, str, bytes, type(None))) or namespace in ("", b""):
            raise ConfigError(f"namespace is {namespace!r}: pass a Namespace, a name, or a digest")
        if prefix is not None:
            if chunks is not None:
                raise ConfigError("prefix and chunks are both given: pass one")
            if not isinstance(namespace, Namespace):
                raise ConfigError("prefix needs a Namespace as store.namespace(...) gives it: tokens are hashed by it")
            chunks = namespace.chunk_hashes(prefix, extra=extra)
        elif extra is not None:
            raise ConfigError("extra belongs to a prefix: pass prefix=token_ids")
        digest = namespace.identity.digest if isinstance(namespace, Namespace) else namespace
        selection = select(
            digest=digest if isinstance(digest, bytes) else None,
            name=digest if isinstance(digest, str) else None,
            salt=salt, chunks=chunks,
        )  # fmt: skip
        self._check_enabled()
        self._check_writable()
        with root.translate_os_errors(self.path):
            return self._shared.services().purger.purge(selection)

    def pin(self, name: str, namespace: Namespace, token_ids: TokensLike) -> int:
        """Protect the stored prefix of ``token_ids`` from eviction, under ``name``; returns the tokens pinned."""
        self._check_open()
        self._check_writable()
        if self._shared.disabled:
            return 0
        deadline = self._shared.c.files.monotonic() + PIN_SECONDS
        with root.translate_os_errors(self.path), self._shared.services().evictor.lock.hold(deadline) as held:
            if not held:
                raise StoreLockedError(f"{name!r} is not pinned: another process evicts or purges; try again")
            # the lookup is under the lock, too: nothing that is being purged may be copied
            with namespace.match(token_ids) as match:
                return self._shared.services().pins.pin(name, match)

    def unpin(self, name: str) -> bool:
        """Remove a pin; False if there is no such pin."""
        self._check_open()
        self._check_writable()
        if self._shared.disabled:
            return False
        with root.translate_os_errors(self.path):
            return self._shared.services().pins.unpin(name)

    def pins(self) -> list[Pin]:
        """All pins, by name."""
        self._check_open()
        if self._shared.disabled:
            return []
        with root.translate_os_errors(self.path):
            return list_pins(self._shared.c.directory)

    def warm(
        self, namespaces: Sequence[str] = (), *, prefixes: Sequence[str] = (), match: PrefixMatch | None = None,
        pinned: bool = False, hottest: int | str | None = None, check: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Warmed:  # fmt: skip
        """Read pages into the page cache: of namespaces, of prefixes (ids of ``kvfs ls``), of a match, of all pins,
        or the ``hottest`` bytes. ``check`` only reports how much is there. ``progress(done, total)`` in bytes.
        """
        from kvfs.maintenance.warm import Warmer

        self._check_open()
        self._shared.c.mode.check_maps("warm", "do without it")
        warmer = Warmer(self._shared.c)
        with root.translate_os_errors(self.path):
            ranges = warmer.of_namespaces([self.catalog.find(name) for name in namespaces]) if namespaces else []
            ranges += warmer.of_prefixes(prefixes) if prefixes else []
            ranges += warmer.of_match(match) if match is not None else []
            ranges += warmer.of_pins() if pinned else []
            ranges += warmer.hottest(parse_size(hottest, "hottest")) if hottest is not None else []
            return warmer.run(ranges, check=check, progress=progress)

    def export(
        self, path: str, namespaces: Sequence[str] = (), *, match: PrefixMatch | None = None,
        key_file: str | None = None, progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Exported:  # fmt: skip
        """Write the pages of namespaces, or of a match, to a bundle, signed if there is a ``key_file``."""
        from kvfs.bundles import exporter, signature

        self._check_open()
        c = self._shared.c
        check_output(path)
        with root.translate_os_errors(path):
            chosen = exporter.choose(c, [self.catalog.find(n) for n in namespaces], match)
            return exporter.export(c, chosen, path, progress, signature.read_key(key_file) if key_file else None)

    def match_prefix(self, ref: str) -> PrefixMatch:
        """A match of a prefix (an id of ``kvfs ls``); ConfigError if its pages do not begin at the first token."""
        from kvfs.lookup.matcher import Matcher
        from kvfs.lookup.search import Prompt

        self._check_open()
        described, hashes = self.catalog.hashes_of_prefix(ref)
        matcher = Matcher(self._shared.c, described.digest, described.layout, self._shared.services().reader.tiers)
        return matcher.match(Prompt(described.digest, hashes), [g.full for g in described.layout.groups])

    def export_tensors(
        self, path: str, match: PrefixMatch, token_ids: Sequence[int] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Written:  # fmt: skip
        """Write the pages of a match as a safetensors file, which replaces the file at ``path``."""
        from kvfs.bundles import safetensors_file

        self._check_open()
        described = next((d for d in self.catalog.described() if d.digest == match.namespace), None)
        if described is None or not match.tokens:
            raise ConfigError("nothing to export: this match has no pages")
        check_output(path)
        with root.translate_os_errors(path):
            return safetensors_file.write(self._shared.c, described, match, path, token_ids, progress)

    def import_bundle(
        self, path: str, *, namespaces: Sequence[str] = (), partial: bool = False, digest: str | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Imported:  # fmt: skip
        """Verify a bundle page by page and store its pages, or those of ``namespaces``; none of a bundle that was
        changed, unless ``partial``."""
        from kvfs.bundles.importer import Importer

        self._check_open()
        self._check_writable()
        active = self._shared.services().active
        importer = Importer(self._shared.c, active, partial_=partial, namespaces=namespaces)
        return importer.run(path, progress, digest=digest)

    @property
    def catalog(self) -> Catalog:
        """What is in the store: namespaces, segments, prefixes."""
        self._check_open()
        return Catalog(self._shared.c)

    def verify(self, sample: float = 1.0, *, repair: bool = False, seed: int = 0) -> Verification:
        """Check structure, index and the bytes of a share ``sample`` (0 to 1) of all pages.

        ``repair``: bad pages leave the index. ``seed`` chooses the sample. See ``kvfs.maintenance.verify``.
        """
        from kvfs.maintenance.verify import Verifier

        self._check_open()
        self._check_enabled()
        verifier = Verifier(self._shared.c, sample, seed)
        with root.translate_os_errors(self.path):
            report = verifier.run()
            if repair and not report.ok:
                self._check_writable()
                verifier.repair()
                self._shared.background.wake("rebuild")
        return report

    def _check_writable(self) -> None:
        if self._shared.read_only:
            raise StoreReadOnlyError(f"{self.path} is open read-only")

    def _check_enabled(self) -> None:
        """For calls that cannot be answered while disabled."""
        if self._shared.disabled:
            raise ConfigError("kvfs is switched off (KVFS_DISABLE is set): unset it for this command")

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(f"the store {self._shared.path} was closed: open it again")

    def close(self) -> None:
        """Release the store. The last user closes the index cleanly, so that the next open needs no rebuild."""
        self._closed = True
        if self._finalizer.detach() is not None:
            registry.release(self._shared)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _summarise(session: Session) -> dict[str, Any]:
    ledger = session.ledger()
    states = dict.fromkeys(STATE_NAMES.values(), 0)
    for _, row in session.segments():
        states[STATE_NAMES[row.state]] += 1
    return {"used_bytes": ledger.used, "segments": states, "index_bytes": session.used_bytes()}
