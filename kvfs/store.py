"""The public face of a store.

A call imports what it needs beyond the index: a command that only inspects a store takes as long as its imports.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvfs.catalog.catalog import Catalog
from kvfs.directory import config, io_mode, root
from kvfs.directory.config import Quota, Settings, parse_duration, parse_size, quota_id
from kvfs.directory.event_log import Event
from kvfs.directory.liveness import ProcessInfo, processes
from kvfs.directory.pin_files import Pin, list_pins
from kvfs.directory.shared_counters import NamespaceSums
from kvfs.directory.sizes import size
from kvfs.errors import ConfigError, IndexUnavailableError, KvfsError, StoreLockedError, StoreReadOnlyError
from kvfs.format.codec import parse as parse_codec
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.session import Session
from kvfs.index.tables import STATE_NAMES
from kvfs.native import library as native_library
from kvfs.pages.chunk_hash import HASH_BYTES, ChunkHashes
from kvfs.pages.identity import Described, Identity
from kvfs.pages.layout import PageLayout
from kvfs.runtime import registry
from kvfs.runtime.open_store import OpenOptions, OpenStore
from kvfs.system.files import Files
from kvfs.types import ExtraKeys, PurgeResult, StoreStats, TokensLike, Verify
from kvfs.version import FORMAT

if TYPE_CHECKING:
    from kvfs.bundles.exporter import Exported
    from kvfs.bundles.importer import Imported
    from kvfs.bundles.safetensors_file import TensorFile, Written
    from kvfs.eviction.dry_run import GcPlan
    from kvfs.lookup.prefix_match import PrefixMatch
    from kvfs.maintenance.recompress import Recompressed, Recompressor, RecompressPlan
    from kvfs.maintenance.verify import Verification
    from kvfs.maintenance.warm import Warmed
    from kvfs.namespace import Namespace
    from kvfs.remote.bucket import Bucket
    from kvfs.remote.bucket_process import Fetch
    from kvfs.remote.pull import Pulled
    from kvfs.remote.push import Pushed

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
    ``$KVFS_DIR``, else to the store of the command: ``$XDG_CACHE_HOME/kvfs`` or ``~/.cache/kvfs``. ``verify``: "always"
    (default), "first" or "off". ``threads``: parallel reads of one ``get`` from the page cache.
    ``counted=False`` is for processes that only inspect a store: their calls stay out of the counters that
    all processes share, and they take part in the upkeep (eviction, TTLs) only once they load, store or evict.
    Raises StoreNotFoundError, FormatError, StoreAccessError, StoreLockedError, NoSpaceError or ConfigError; each
    message names the remedy. A disk that hangs raises StoreLockedError after ten seconds without progress.

    Operators may set ``KVFS_DISABLE=1`` (every match misses, every put declines, no file is touched) and
    ``KVFS_READONLY=1`` (as ``read_only=True``, but puts decline instead of raising).
    """
    disabled = config.switch("KVFS_DISABLE", os.environ.get("KVFS_DISABLE"))
    forced = config.switch("KVFS_READONLY", os.environ.get("KVFS_READONLY")) and not read_only
    if path is None:
        path = os.environ.get("KVFS_DIR") or ("disabled" if disabled else config.default_path())
    where = config.store_path(path or "disabled" if disabled else path)
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

    def prepare() -> None:
        if not read_only and create and not root.is_store(where):
            limit = os.environ.get("KVFS_CAPACITY") if capacity is None else capacity
            if limit is None:
                raise ConfigError(
                    f"{where} holds no store yet: pass capacity=, for example capacity='200GiB', to create one"
                )
            settings = config.make_settings(
                limit, segment=segment_bytes, index=index_bytes, sync=sync, mode=mode, quotas=quotas, codec=codec
            )
            with root.translate_os_errors(where):
                io_mode.check(where, settings, files)
            root.create(where, config.to_toml(settings), files)
        root.check_filesystem(where)

    registry.watched(where, prepare)
    declines = "read-only" if forced else ""
    return Store(registry.acquire(OpenOptions(where, files, read_only, policy, threads, declines, not counted)))


def _reopened(path: str, read_only: bool, counted: bool) -> Store:
    """A store that was pickled."""
    return open_store(path, create=False, read_only=read_only, counted=counted)


class Store:
    """An open store. Usable from any thread, and in children after a fork. Close it, or use ``with``.

    Without a ``close`` it is closed in the background, once it and its namespaces are garbage-collected.
    """

    def __init__(self, shared: OpenStore) -> None:
        self._shared = shared
        self._closed = False
        self._finalizer = weakref.finalize(self, registry.release_later, shared)
        self._finalizer.atexit = False  # at exit the registry closes every open store

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ", read-only" if self.read_only else ""
        return f"<Store {self.path}, limit {size(self.settings.capacity_bytes)}{state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """By path: a process that unpickles it opens the store, with the defaults of that process."""
        self._check_open()
        return _reopened, (os.path.abspath(self.path), self.read_only, not self._shared.c.inspect_only)

    @property
    def path(self) -> str:
        """The directory, as it was given to ``open``."""
        return self._shared.path

    @property
    def settings(self) -> Settings:
        """The limits in force, from kvfs.toml."""
        return self._shared.settings

    @property
    def read_only(self) -> bool:
        """Whether it is open for reading only: nothing can be stored, pinned, evicted or repaired."""
        return self._shared.read_only

    def namespace(
        self, name: str, layout: PageLayout, revision: str, salt: str = "", *,
        rope: Mapping[str, Any] | None = None, adapter: str = "", epoch: int = 0,
        extra: Mapping[str, Any] | None = None, codec: str | None = None,
    ) -> Namespace:  # fmt: skip
        """The pages of one model. All arguments but ``codec`` are its identity: change one, and nothing is found.

        ``revision`` is a commit or a digest of the weights, never a name that moves; ``salt`` a tenant's secret.
        ``rope``: the effective RoPE parameters, ``adapter``: a digest of an adapter's content, ``epoch``: a number of
        the weights after a change in place, ``extra``: all else that changes KV in an engine, as JSON data.
        ``codec``: "raw", "zstd" or "planes", in which this process stores new pages (default: the store's setting);
        pages of every codec are read.
        Raises ConfigError for a bad argument, NoSpaceError if a page does not fit into a segment.
        """
        from kvfs.namespace import Namespace

        self._check_open()
        described = Identity(
            name, layout, revision, salt, {} if rope is None else rope, adapter, epoch, {} if extra is None else extra
        )
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

    def stats(self) -> StoreStats:
        """What the store holds, and what this process and all processes did with it. docs/api.md lists the keys.

        Waits for no disk that hangs: what the files of the store say of other processes is then as of the last call.
        """
        self._check_open()
        shared = self._shared
        live = self.processes()
        totals = shared.c.figures.read("totals", shared.c.shared_counters.total, dict[str, int]())
        watching = Counter(process.watching for process in live if process.watching)
        result: StoreStats = {
            "path": shared.path,
            "format": FORMAT,
            "store_id": shared.c.store_id.hex(),
            "capacity_bytes": shared.settings.capacity_bytes,
            "read_only": shared.read_only,
            "mode": shared.c.mode.name,
            "verify": shared.c.verify.value,
            "watch": shared.watching,
            "native": native_library.state(),
            "counters": shared.c.counters.snapshot(),
            "totals": totals | {f"now_{how}": n for how, n in watching.items()},
            "processes": len(live),
            "pinned_bytes": sum(process.pinned_bytes for process in live),
            "index": {"state": "ready", "generation": shared.c.index.generation, "timeouts": shared.c.index.timeouts},
        }
        try:
            result.update(shared.c.index.read(partial(_summarise, quotas=shared.settings.quotas), COMMIT_SECONDS))
        except IndexUnavailableError as exc:
            result["index"]["state"] = str(exc)
        return result

    @property
    def process_id(self) -> str:
        """Id in hex of this process among ``processes()``; "" of a read-only store."""
        liveness = self._shared.c.liveness
        return liveness.owner.hex() if liveness is not None else ""

    def processes(self) -> list[ProcessInfo]:
        """The live processes that may write to the store, this one included; empty while they cannot be listed.

        While the disk hangs: those of the last call.
        """
        context = self._shared.c
        try:
            return context.figures.read("processes", lambda: processes(context.directory), [])
        except OSError:
            return []

    def namespace_counts(self) -> dict[str, NamespaceSums]:
        """What all processes did with each namespace, by its digest in hex: the counts that docs/api.md lists.

        Of the namespaces that were used last: 32 to 512, by capacity.
        """
        self._check_open()
        read = self._shared.c.shared_counters.by_namespace
        found = self._shared.c.figures.read("namespaces", read, dict[bytes, NamespaceSums]())
        return {digest.hex(): sums for digest, sums in found.items()}

    def events(self) -> list[Event]:
        """What happened to the store and by whom, oldest first: as many as the log keeps (``kvfs log``)."""
        self._check_open()
        return self._shared.c.figures.read("events", lambda: list(self._shared.c.events.read()), [])

    def gc(
        self, target_bytes: int | str | None = None, *, seconds: float | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, int]:  # fmt: skip
        """Evict until segments use at most ``target_bytes``, a size (default: only what exceeds the limits now).

        Stops after ``seconds``, if given. ``progress(done, total)`` in bytes. Returns ``segments_dropped``,
        ``bytes_before`` and ``bytes_after``.
        """
        self._check_open()
        self._check_writable()
        target = None if target_bytes is None else parse_size(target_bytes, "target_bytes")
        if self._shared.disabled:
            return {"segments_dropped": 0, "bytes_before": 0, "bytes_after": 0}
        with root.translate_os_errors(self.path):
            evictor = self._shared.services().evictor
            done = self._shared.c.calls.run(lambda: evictor.collect(target, seconds, progress))
        self._shared.c.events.add("gc", **done)
        return done

    def gc_plan(self, target_bytes: int | str | None = None) -> GcPlan:
        """What ``gc`` would do now; changes nothing."""
        from kvfs.eviction.dry_run import make_plan

        self._check_open()
        target = None if target_bytes is None else parse_size(target_bytes, "target_bytes")
        return make_plan(self._shared.c, self._shared.services().evictor, target)

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
            done = self._recompressor().run(number, idle_seconds, seconds, progress)
        self._shared.c.events.add("recompressed", codec=codec, segments=done.segments, pages=done.pages)
        return done

    def _recompressor(self) -> Recompressor:
        from kvfs.maintenance.recompress import Recompressor

        services = self._shared.services()
        return Recompressor(self._shared.c, services.evictor, services.active)

    def purge(
        self, namespace: Namespace | str | bytes | None = None, *, salt: str | None = None,
        prefix: TokensLike | None = None, chunks: Iterable[bytes] | None = None, keys: Sequence[bytes] | None = None,
        extra: ExtraKeys | None = None,
    ) -> PurgeResult:  # fmt: skip
        """Remove pages permanently: no lookup finds them afterwards, and no rebuild restores them.

        ``namespace``: a Namespace, its digest (32 bytes, or in hex), or a name (then all revisions of that name).
        ``salt``: a tenant's secret; everything stored under it. ``prefix``: only the full chunks of these token ids,
        including heads that other prompts share; needs a Namespace. ``chunks``: only chunks with these hashes (see
        ``Namespace.chunk_hashes``). ``keys``: only the pages that these keys name; needs a Namespace. Pages stored
        afterwards are served, and matches and views that exist already stay valid until they are released. ConfigError
        if a pin protects some of the pages.
        """
        from kvfs.maintenance.purge import select
        from kvfs.namespace import Namespace

        self._check_open()
        if not isinstance(namespace, (Namespace, str, bytes, type(None))) or namespace in ("", b""):
            raise ConfigError(f"namespace is {namespace!r}: pass a Namespace, a name, or a digest")
        if sum(one is not None for one in (prefix, chunks, keys)) > 1:  # by identity: these may be arrays
            raise ConfigError("prefix, chunks and keys exclude each other: pass one")
        if (prefix is not None or keys is not None) and not isinstance(namespace, Namespace):
            raise ConfigError("prefix and keys need a Namespace as store.namespace(...) gives it: it hashes them")
        if extra is not None and prefix is None:
            raise ConfigError("extra belongs to a prefix: pass prefix=token_ids")
        if isinstance(namespace, Namespace) and prefix is not None:
            chunks = namespace.chunk_hashes(prefix, extra=extra)
        elif isinstance(namespace, Namespace) and keys is not None:
            chunks = namespace.prompt(keys=keys).hashes
        digest = namespace.identity.digest if isinstance(namespace, Namespace) else namespace
        selection = select(
            digest=digest if isinstance(digest, bytes) else None,
            name=digest if isinstance(digest, str) else None,
            salt=salt, chunks=chunks,
        )  # fmt: skip
        self._check_enabled()
        self._check_writable()
        with root.translate_os_errors(self.path):
            purger = self._shared.services().purger
            done = self._shared.c.calls.run(lambda: purger.purge(selection))
        whose = digest.hex() if isinstance(digest, bytes) else digest or ""
        self._shared.c.events.add("purged", namespace=whose, pages=done.pages, segments_dropped=done.segments_dropped)
        return done

    def pin(self, name: str, namespace: Namespace, token_ids: TokensLike) -> int:
        """Protect the stored prefix of ``token_ids`` from eviction, under ``name``; returns the tokens pinned."""
        from kvfs.namespace import Namespace

        if not isinstance(namespace, Namespace):
            raise ConfigError(f"namespace is {namespace!r}: pass what Store.namespace returns, or use pin_prefix")
        return self._pin(name, lambda: namespace.match(token_ids))

    def pin_prefix(self, name: str, ref: str) -> int:
        """``pin`` of the prefix with id ``ref`` (see ``kvfs ls``); ConfigError if it does not begin at token 0."""
        return self._pin(name, lambda: self.match_prefix(ref))

    def _pin(self, name: str, look: Callable[[], PrefixMatch]) -> int:
        self._check_open()
        self._check_writable()
        if self._shared.disabled:
            return 0
        with root.translate_os_errors(self.path):
            tokens = self._shared.c.calls.run(lambda: self._pin_locked(name, look))
        self._shared.c.events.add("pinned", name=name, tokens=tokens)
        return tokens

    def _pin_locked(self, name: str, look: Callable[[], PrefixMatch]) -> int:
        services, deadline = self._shared.services(), self._shared.c.files.monotonic() + PIN_SECONDS
        with services.evictor.lock.hold(deadline) as held:
            if not held:
                raise StoreLockedError(f"{name!r} is not pinned: another process evicts or purges; try again")
            with look() as match:  # under the lock, too: nothing that is being purged may be copied
                return services.pins.pin(name, match)

    def unpin(self, name: str) -> bool:
        """Remove a pin; False if there is no such pin."""
        self._check_open()
        self._check_writable()
        if self._shared.disabled:
            return False
        with root.translate_os_errors(self.path):
            pins = self._shared.services().pins
            done = self._shared.c.calls.run(lambda: pins.unpin(name))
        if done:
            self._shared.c.events.add("unpinned", name=name)
        return done

    def pins(self) -> list[Pin]:
        """All pins, by name."""
        self._check_open()
        if self._shared.disabled:
            return []
        with root.translate_os_errors(self.path):
            return self._shared.c.calls.run(lambda: list_pins(self._shared.c.directory))

    def warm(
        self, namespaces: Sequence[str] = (), *, prefixes: Sequence[str] = (), match: PrefixMatch | None = None,
        pinned: bool = False, hottest: int | str | None = None, sample: int | str | None = None, check: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Warmed:  # fmt: skip
        """Read pages into the page cache: of namespaces, of prefixes (ids of ``kvfs ls``), of a match, of all pins,
        or the ``hottest`` bytes; or a ``sample`` of so many bytes that are not there, which tells what the disk reads
        (``read_bytes / seconds``). ``check`` only reports how much is there. ``progress(done, total)`` in bytes.
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
            ranges += warmer.sample(parse_size(sample, "sample")) if sample is not None else []
            return warmer.run(ranges, check=check, progress=progress)

    def export(
        self, path: str, namespaces: Sequence[str] = (), *, prefixes: Sequence[str] = (),
        match: PrefixMatch | None = None, key_file: str | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Exported:  # fmt: skip
        """Write the pages of namespaces, of prefixes (ids of ``kvfs ls``) and of a match to a bundle, signed if there
        is a ``key_file``. ``progress(done, total)`` in pages.
        """
        from kvfs.bundles import exporter, signature

        self._check_open()
        c = self._shared.c
        root.check_output(path)
        with root.translate_os_errors(path), contextlib.ExitStack() as held:
            matches = [held.enter_context(self.match_prefix(ref)) for ref in prefixes]
            chosen = exporter.choose(
                c, [self.catalog.find(n) for n in namespaces], [*matches, *([match] if match is not None else [])]
            )
            return exporter.export(c, chosen, path, progress, signature.read_key(key_file) if key_file else None)

    def match_prefix(self, ref: str) -> PrefixMatch:
        """A match of a prefix (an id of ``kvfs ls``); ConfigError if its pages do not begin at the first token."""
        from kvfs.lookup.matcher import Matcher
        from kvfs.lookup.search import Prompt

        self._check_open()
        described, hashes = self.catalog.hashes_of_prefix(ref)
        matcher = Matcher(self._shared.c, described.digest, described.layout, self._shared.services().reader.cold)
        return matcher.match(Prompt(described.digest, hashes), [g.full for g in described.layout.groups])

    def export_tensors(
        self, path: str, match: PrefixMatch, token_ids: TokensLike | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Written:  # fmt: skip
        """Write the pages of a match as a safetensors file, which replaces the file at ``path``.

        ``token_ids``: those of the match or more, for the file's metadata; they are not compared with its hashes.
        ConfigError for fewer, and for a path inside a store.
        """
        from kvfs.bundles import safetensors_file

        described = self._described(match)
        root.check_output(path)
        with root.translate_os_errors(path):
            return safetensors_file.write(self._shared.c, described, match, path, token_ids, progress)

    def tensor_file(self, match: PrefixMatch) -> TensorFile:
        """The safetensors file of a match, which knows its exact size before it is written."""
        from kvfs.bundles import safetensors_file

        return safetensors_file.TensorFile(self._shared.c, self._described(match), match)

    def _described(self, match: PrefixMatch) -> Described:
        """The namespace of a match that has pages. ConfigError."""
        described = next((d for d in self.catalog.described() if d.digest == match.namespace), None)
        if described is None or not match.tokens:
            raise ConfigError("nothing to export: this match has no pages")
        return described

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
        done = importer.run(path, progress, digest=digest)
        self._shared.c.events.add("imported", bundle=str(path), stored=done.stored, skipped=done.skipped)
        return done

    def push(
        self, namespaces: Sequence[str] = (), *, prefixes: Sequence[str] = (), match: PrefixMatch | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Pushed:  # fmt: skip
        """Store the pages of namespaces, of prefixes (ids of ``kvfs ls``) and of a match in the bucket of the settings,
        unless they are there. ``progress(done, total)`` in pages. RemoteError if the bucket does not answer at all.
        """
        from kvfs.remote.push import Pusher

        self._check_open()
        self._check_enabled()
        spaces = [self.catalog.find(n) for n in namespaces]
        with contextlib.ExitStack() as held:
            matches = [held.enter_context(self.match_prefix(ref)) for ref in prefixes]
            matches += [match] if match is not None else []
            if not spaces and not matches:
                raise ConfigError("nothing is chosen for the push: pass names of namespaces, prefixes= or match=")
            pusher = Pusher(self._shared.c, held.enter_context(self.bucket()), self.settings.remote.requests)
            done = pusher.run(spaces, matches, progress)
        if done.failed:
            self._shared.kept_bucket().forget()  # its credentials may have expired
        if not self.read_only:
            self._shared.c.events.add("pushed", stored=done.stored, failed=done.failed)
        return done

    def pull(
        self, namespace: Namespace | str, token_ids: TokensLike | None = None, *, extra: ExtraKeys | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Pulled:  # fmt: skip
        """Store what the bucket of the settings holds of a prompt (needs a Namespace), or of a whole namespace, here.

        Each page is verified before it is published. A bucket that fails makes the pull shorter, see ``Pulled``.
        ``progress(done, total)`` in bytes, of a namespace. RemoteError if the bucket does not answer at all.
        """
        from kvfs.namespace import Namespace
        from kvfs.remote.object_store import RemoteError
        from kvfs.remote.pull import Puller, described_of, prompt_of
        from kvfs.remote.uses import Uses

        self._check_open()
        self._check_enabled()
        self._check_writable()
        if (token_ids is not None and not isinstance(namespace, Namespace)) or (
            extra is not None and token_ids is None
        ):
            raise ConfigError("token_ids need a Namespace as store.namespace(...) gives it, and extra needs token_ids")
        services = self._shared.services()
        with self.bucket() as bucket:
            uses = Uses() if self.settings.remote.retention_from == "use" else None
            puller = Puller(self._shared.c, services.active, services.reader.cold, bucket, uses=uses)
            if isinstance(namespace, Namespace) and token_ids is not None:
                done = puller.prompt(*prompt_of(namespace.identity, namespace.chunk_hashes(token_ids, extra=extra)))
            else:
                known = described_of(namespace.identity) if isinstance(namespace, Namespace) else namespace
                done = puller.namespace(known, progress)
            if uses is not None:
                try:
                    uses.flush(bucket, self.settings.remote.requests)
                except RemoteError as exc:  # what came is here all the same
                    done.problems.append(f"the bucket was not told what is used: {exc}")
        if done.failed:
            self._shared.kept_bucket().forget()
        self._shared.c.events.add("pulled", stored=done.stored, refused=done.refused, failed=done.failed)
        return done

    def fetch(
        self, namespace: Namespace, token_ids: TokensLike | None = None, *, hashes: Sequence[bytes] | None = None,
        extra: ExtraKeys | None = None, first: int = 0,
    ) -> Fetch | None:  # fmt: skip
        """Begin to pull a prompt from the bucket of the settings, in a process of its own; returns at once.

        The prompt is named by its tokens, or by the chunk hashes of ``namespace.prompt``. ``first``: how many leading
        chunks are stored here. Lookups find pages as they arrive. None if there is no bucket, if
        ``remote.read_through`` is off, or if the bucket lacked this prompt, or failed, within the last 30 seconds.
        """
        self._check_open()
        remote = self.settings.remote
        if not remote.url or remote.read_through == "off" or self.read_only or self._shared.disabled:
            return None
        if (token_ids is None) is (hashes is None):
            raise ConfigError("pass token_ids or hashes=, one of them")
        if hashes is None:
            assert token_ids is not None
            hashes = namespace.chunk_hashes(token_ids, extra=extra)
        joined = hashes.joined if isinstance(hashes, ChunkHashes) else b"".join(hashes)
        if namespace.layout.kind == "opaque" or len(joined) != len(hashes) * HASH_BYTES:
            raise ConfigError(f"hashes must be chunk hashes of {HASH_BYTES} bytes each, of a namespace of KV")
        if type(first) is not int or first < 0:
            raise ConfigError(f"first is {first!r}: pass the number of leading chunks that are stored here")
        process = self._shared.bucket_process()
        return None if process is None else process.fetch(namespace.identity, joined, first)

    def start_bucket_process(self) -> None:
        """Start the process that asks the bucket, if ``fetch`` or uploads may need it. Else the first fetch does."""
        remote = self.settings.remote
        used = remote.read_through == "on" or remote.upload != "off"
        if remote.url and used and not self.read_only and not self._shared.disabled:
            process = self._shared.bucket_process()
            if process is not None:
                process.start()

    @contextlib.contextmanager
    def bucket(self, *, keyless: bool = False) -> Iterator[Bucket]:
        """The bucket of the settings, for ``kvfs.remote``. ConfigError if there is none. ``keyless``: as in
        ``kvfs.remote.urls.open_bucket``."""
        from kvfs.remote.urls import open_bucket

        self._check_open()
        if keyless:
            bucket = open_bucket(self.settings.remote, keyless=True)
            try:
                yield bucket
            finally:
                bucket.objects.close()
            return
        kept = self._shared.kept_bucket()
        try:
            yield kept.of(self.settings.remote).again()
        except KvfsError:
            kept.forget()
            raise

    @property
    def catalog(self) -> Catalog:
        """What is in the store: namespaces, segments, prefixes."""
        self._check_open()
        return Catalog(self._shared.c)

    def verify(
        self, sample: float = 1.0, *, repair: bool = False, seed: int = 0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Verification:  # fmt: skip
        """Check structure, index and the bytes of a share ``sample`` (0 to 1) of all pages.

        ``repair``: bad pages leave the index. ``seed`` chooses the sample. ``progress(done, total)`` in bytes of
        segments, which a damaged index may count wrongly. See ``kvfs.maintenance.verify``.
        """
        from kvfs.maintenance.verify import Verifier

        self._check_open()
        self._check_enabled()
        verifier = Verifier(self._shared.c, sample, seed, progress)
        with root.translate_os_errors(self.path):
            report = verifier.run()
            if repair and not report.ok:
                self._check_writable()
                verifier.repair()
                self._shared.background.wake("rebuild")
                self._shared.c.events.add("repaired", bad_pages=report.bad_pages, repaired=report.repaired)
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
        """Release the store. The last user closes the index cleanly, so that the next open needs no rebuild.

        If the disk hangs, a thread goes on with the close, after ten seconds without progress.
        """
        self._closed = True
        if self._finalizer.detach() is not None:
            registry.release(self._shared)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _summarise(session: Session, quotas: Mapping[str, Quota]) -> StoreStats:
    ledger = session.ledger()
    states = dict.fromkeys(STATE_NAMES.values(), 0)
    for _, row in session.segments():
        states[STATE_NAMES[row.state]] += 1
    used = {
        name: {
            "used_bytes": session.quota_used(quota_id(name)),
            "cap_bytes": quota.cap_bytes,
            "guaranteed_bytes": quota.guaranteed_bytes,
        }
        for name, quota in quotas.items()
    }
    return {"used_bytes": ledger.used, "segments": states, "index_bytes": session.used_bytes(), "quotas": used}
