"""Namespace: the public face of one model's pages. It checks arguments; lookups, puts and loads are done below."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfs.context import Context
from kvfs.directory.config import Quota, parse_duration, quota_id
from kvfs.directory.engine_speeds import EngineSpeeds
from kvfs.errors import ConfigError, StoreReadOnlyError
from kvfs.format.codec import NAMES as codec_names
from kvfs.format.codec import parse as parse_codec
from kvfs.lookup.matcher import Matcher
from kvfs.lookup.prefix_match import GroupMatch, PrefixMatch
from kvfs.lookup.prompt_pages import PromptPages, chain_of, prompt_of_hashes, prompt_of_keys
from kvfs.lookup.search import Prompt
from kvfs.pages.chunk_hash import ChunkHashes
from kvfs.pages.chunk_set import members, span
from kvfs.pages.identity import Identity, label, salt_digest
from kvfs.pages.layout import Group, PageLayout, Part
from kvfs.read.reader import Reader
from kvfs.system.memory_views import PageBuffers, byte_view
from kvfs.types import ExtraKeys, PagesLike, PutResult, Tier, TokensLike
from kvfs.types import SavePlan as SavePlan
from kvfs.write.active_segments import LANES, RoomWait, SegmentClass
from kvfs.write.appender import Appender, AppendJob, Outcome, check_pages_fit

if TYPE_CHECKING:
    from kvfs.pages.device_kv import DeviceKV
    from kvfs.transfer.host_io import HostIO


def random_epoch() -> int:
    """A number for ``Identity.epoch`` that no other change of weights has, in any process: 62 random bits, never 0."""
    return secrets.randbits(62) | 1


def _of_store(store: Any, identity: Identity, codec: str) -> Namespace:
    """A namespace that was pickled."""
    made = store.namespace(
        identity.name, identity.layout, identity.revision, identity.salt, rope=identity.rope, adapter=identity.adapter,
        epoch=identity.epoch, extra=identity.extra, codec=codec,
    )  # fmt: skip
    assert isinstance(made, Namespace)
    return made


class _Put(NamedTuple):
    number: int
    group: Group
    part: Part
    start: int
    data: memoryview | PageBuffers
    pages: int


class Namespace:
    """Pages of one identity in one store. Made by ``Store.namespace``; any thread may use it."""

    def __init__(
        self, context: Context, appender: Appender, reader: Reader, identity: Identity, codec: str | None = None,
        keep_alive: object = None,
    ) -> None:  # fmt: skip
        self._c = context
        self._keep_alive = keep_alive  # the Store, which must not be garbage-collected before its namespaces
        self._codec = parse_codec(context.settings.codec if codec is None else codec)
        self._appender = appender
        self._reader = reader
        self.identity = identity
        self.layout: PageLayout = identity.layout
        self._descriptor = identity.descriptor_bytes()
        self._matcher = Matcher(context, identity.digest, identity.layout, reader.cold)
        check_pages_fit(identity.layout, len(self._descriptor), context.settings)

    def __repr__(self) -> str:
        return f"<Namespace {label(self.name, self.identity.revision)} in {self._c.directory.path}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """By its store, which a process that unpickles it opens by path. The salt, a secret, is part of it."""
        if self._keep_alive is None:
            raise TypeError("this namespace was not made by Store.namespace: it cannot be pickled")
        return _of_store, (self._keep_alive, self.identity, self.codec)

    @property
    def name(self) -> str:
        """The name in its identity."""
        return self.identity.name

    @property
    def codec(self) -> str:
        """The codec of new pages; pages of every codec are read."""
        return codec_names[self._codec]

    def new_epoch(self) -> Namespace:
        """The namespace of the same model after its weights changed in place: nothing stored before is found.

        Its ``identity.epoch`` is random. Of several ranks one calls this; the others open the namespace with ``epoch=``
        that number. This object stays as it is.
        """
        identity = replace(self.identity, epoch=random_epoch())
        return Namespace(self._c, self._appender, self._reader, identity, self.codec, self._keep_alive)

    def compute_speed(self) -> int | None:
        """Tokens per second that an engine of this namespace computed when one last told; None if none has."""
        return EngineSpeeds(self._c.directory).read(self.identity.digest)

    def note_compute_speed(self, tokens_per_second: float) -> None:
        """Tell engines that start later how fast this one computes. Not stored if the disk fails, or read-only.
        ConfigError unless it is a positive number.
        """
        if not isinstance(tokens_per_second, (int, float)) or not 0 < tokens_per_second < math.inf:
            raise ConfigError(f"tokens_per_second is {tokens_per_second!r}: pass a positive number")
        EngineSpeeds(self._c.directory).note(self.identity.digest, tokens_per_second)

    # -- lookups -----------------------------------------------------------------------------

    def match(
        self, token_ids: TokensLike, leave: int = 0, *, extra: ExtraKeys | None = None,
        part: Part | Mapping[str, Part] | None = None,
    ) -> PrefixMatch:  # fmt: skip
        """Longest prefix of ``token_ids`` that can be restored, leaving at least ``leave`` tokens to compute.

        ``token_ids``: a sequence or 1-D integer array. ``extra``: extra key bytes of single chunks. ``part``: the
        rectangle of layers and heads that this reader needs (a TP or PP rank; default: whole pages). If the index does
        not answer in time, the match has 0 tokens. Close the match, or use ``with``.
        """
        hashes = self._chain(token_ids, extra, leave)
        return self._matcher.match(Prompt(self.identity.digest, hashes), self._parts(part))

    def match_keys(self, keys: Sequence[bytes], *, part: Part | Mapping[str, Part] | None = None) -> PrefixMatch:
        """Match the leading keys that are present; for engines with keys of their own instead of tokens."""
        return self._matcher.match(self._key_prompt(keys), self._parts(part))

    def present_keys(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether a page is stored under each of the keys; of several groups, a page of each."""
        return self._matcher.stored(self._key_prompt(keys))

    def prompt(
        self, token_ids: TokensLike = (), *, hashes: Sequence[bytes] | None = None,
        keys: Sequence[bytes] | None = None, extra: ExtraKeys | None = None,
    ) -> PromptPages:  # fmt: skip
        """A prompt for engines that look up and decide page by page; see ``PromptPages``.

        Of ``token_ids``, and then it may grow; of ``hashes``, the chunk hashes of a prompt from its first chunk on, as
        ``chunk_hashes`` gives them; or of ``keys``, each of which names one page (of each group) that needs no other.
        Keys and hashes name different pages, also if they are equal.
        """
        if hashes is None and keys is None:
            pages = PromptPages(self._c, self._matcher, self.identity, extra, None)
            pages.extend(token_ids)
            return pages
        if (hashes is not None and keys is not None) or len(token_ids) or extra is not None:
            raise ConfigError("pass one of token_ids, hashes and keys; extra belongs to token_ids")
        named = self._key_prompt(keys) if keys is not None else prompt_of_hashes(self.identity, hashes or ())
        return PromptPages(self._c, self._matcher, self.identity, None, named)

    # -- loads -------------------------------------------------------------------------------

    def get(self, match: PrefixMatch, out: PagesLike) -> int:
        """Load the pages of ``match``; returns how many leading chunks are verified and now in ``out``.

        ``out``: a writable buffer of at least ``match.group(name).nbytes`` bytes, which receives pages in canonical
        order, or a list of buffers, one for each page; for layouts of several groups a mapping from group name to one
        of these. Its content beyond the returned length is undefined. Raises ConfigError for a bad argument, never for
        a disk that fails.
        """
        good = self.get_pages(match, out)
        return match.restorable(good) if match.tokens else 0

    def get_pages(self, match: PrefixMatch, out: PagesLike, *, wait: bool = True) -> dict[str, int]:
        """``get`` for callers that can use pages behind one that is lost, such as those of keys.

        Group name -> set of chunks, as bits, that are verified and now in ``out``; the rest of it is undefined.
        ``wait=False``: without waiting for a disk, so of the pages in the page cache only. Whether the others are
        damaged is not found out: ask for them again.
        """
        return self._load(match, out, wait)[0]

    def get_tiers(self, match: PrefixMatch, out: PagesLike) -> dict[Tier, int]:
        """``get`` for callers that account for each request: tier -> set of chunks, as bits.

        The sets are disjoint; together they are the leading chunks that ``get`` counts (of keys: all that are in
        ``out``). A chunk belongs to the slowest tier that one of its pages was read from: HOST is the page cache, and
        DEVICE holds chunks that need no page, such as those before a window.
        """
        return self._load(match, out)[1]

    def copy(self, match: PrefixMatch, fd: int, spots: Sequence[tuple[int, int, int]]) -> bool:
        """Copy all pages of a match of keys into a file, verified, and ``touch`` them; whether that was done.

        ``spots``: (at, bytes, offset) of what belongs in the file, ``at`` in the pages in canonical order. False
        without the native library, for pages in a codec or in parts, and if one does not verify: then ``get`` tells
        which are good, and what the file has at the spots is undefined.
        """
        self._check_match(match)
        if not match.keyed or len(match.groups) != 1:
            raise ConfigError("copy needs a match of keys, of a layout of one group")
        began = self._c.files.monotonic()
        done = self._reader.copy(match, self.layout.groups[0], fd, spots)
        self._c.counters.took("get", self._c.files.monotonic() - began)
        return done

    def _load(self, match: PrefixMatch, out: PagesLike, wait: bool = True) -> tuple[dict[str, int], dict[Tier, int]]:
        self._check_match(match)
        outs = [self._check_out(match, gm, out) for gm in match.groups]
        if not match.tokens:
            return dict.fromkeys((gm.name for gm in match.groups), 0), {}
        began = self._c.files.monotonic()
        load = self._reader.load if wait else self._reader.load_at_once
        done = load(match, self.layout.groups, outs)
        self._c.counters.took("get", self._c.files.monotonic() - began)
        return done

    def _check_out(self, match: PrefixMatch, gm: GroupMatch, out: Any) -> memoryview | PageBuffers:
        buffer = out.get(gm.name) if isinstance(out, Mapping) else out
        if buffer is None or (not isinstance(out, Mapping) and len(match.groups) > 1):
            raise ConfigError(f"out must map each of the groups {[g.name for g in match.groups]} to a buffer")
        if isinstance(buffer, (list, tuple)):
            pages = PageBuffers(buffer, gm.part_bytes, f"out of group {gm.name}", writable=True)
            if len(buffer) != gm.count:
                raise ConfigError(
                    f"out of group {gm.name} has {len(buffer)} buffers: pass one for each of {gm.count} pages"
                )
            return pages
        view = byte_view(buffer, f"out of group {gm.name}", writable=True)
        if len(view) < gm.nbytes:
            raise ConfigError(
                f"out of group {gm.name} has {len(view)} bytes, {gm.nbytes} are needed ({gm.count} pages)"
            )
        return view

    def view(self, match: PrefixMatch, group: str | None = None) -> list[memoryview]:
        """Read-only buffers over the page cache, one per leading page that verifies; no copy.

        A view stays valid as long as the caller keeps it, also after eviction. The list ends at the first page that
        was written in other parts than the match asks for. ConfigError in mode "staging".
        """
        self._check_match(match)
        self._c.mode.check_maps("view", "use get")
        names = [g.name for g in match.groups]
        if (group is None and len(names) > 1) or group not in (None, *names):
            raise ConfigError(f"group is {group!r}: pass one of {names}")
        gm = match.groups[0] if group is None else match.group(group)
        return self._reader.view(match, gm, self.layout.groups[gm.number]) if match.tokens else []

    def touch(self, match: PrefixMatch) -> None:
        """Set the access times of the pages of a match of keys to about its time, without reading them.

        The pages of each segment get a time of their own: eviction takes equal times for one prompt, whose pages are
        worth nothing behind a gap, and keys have no order.
        """
        self._check_match(match)
        self._reader.touch(match)

    def _check_match(self, match: PrefixMatch) -> None:
        if not isinstance(match, PrefixMatch):
            raise ConfigError(f"match is {type(match).__name__}: pass what match or match_keys returns")
        if match.namespace != self.identity.digest:
            raise ConfigError("this match is of another namespace: use the one that made it")

    # -- saves -------------------------------------------------------------------------------

    def put(
        self, token_ids: TokensLike, pages: PagesLike, start: int | Mapping[str, int] = 0, *,
        extra: ExtraKeys | None = None, part: Part | Mapping[str, Part] | None = None,
        ttl: float | str | None = None, attempt: bytes = bytes(8),
    ) -> PutResult:  # fmt: skip
        """Store whole pages of a prompt, in canonical order, from chunk ``start`` on.

        ``pages``: one buffer, or a list of buffers of one page each, or a mapping from group name to one of these;
        ``start``: a number, or such a mapping. ``ttl``: lifetime in seconds, or a text like "12h" (default: the
        quota's). ``attempt``: 8 bytes that all ranks of one save share. Pages that
        are stored already are skipped, pages that another writer is storing count as ``in_flight``. In a group of full
        attention no page is stored whose predecessor is missing, and the first decline ends the put. A disk that fails
        is a decline; ConfigError and StoreReadOnlyError are raised before anything is written.
        """
        hashes = self._chain(token_ids, extra)
        return self._put(Prompt(self.identity.digest, hashes), pages, start, part, ttl, attempt)

    def put_keys(
        self, keys: Sequence[bytes], pages: PagesLike, *, part: Part | Mapping[str, Part] | None = None,
        ttl: float | str | None = None, attempt: bytes = bytes(8), lane: int = 0,
    ) -> PutResult:  # fmt: skip
        """Store one page per key (of each group that ``pages`` names); the rest as in ``put``.

        ``lane``: 0 to 7. Puts of one lane append to the same segment, one after the other; those of two, in parallel.
        """
        if type(lane) is not int or not 0 <= lane < LANES:
            raise ConfigError(f"lane is {lane!r}: pass 0 to {LANES - 1}")
        return self._put(self._key_prompt(keys), pages, 0, part, ttl, attempt, lane)

    def chunk_hashes(self, token_ids: TokensLike, *, extra: ExtraKeys | None = None) -> list[bytes]:
        """Hashes (32 bytes) of the full chunks of a prompt: each identifies the whole prefix up to its end."""
        return list(chain_of(self._c, self.identity, token_ids, 0, extra).all())

    def plan_save(
        self, token_ids: TokensLike, *, extra: ExtraKeys | None = None, part: Part | Mapping[str, Part] | None = None
    ) -> SavePlan:
        """Which full chunks of a prompt are neither stored nor being written, per group.

        Chunks that are stored behind a long gap may be listed, too: their save skips them.
        """
        hashes = self._chain(token_ids, extra)
        prompt = Prompt(self.identity.digest, hashes)
        missing, at_us = {}, self._c.files.now_us()
        for number, group in enumerate(self.layout.groups):
            lookup = self._matcher.present(
                prompt, number, group, self._part(group, part), 0, len(hashes), whole=True, orphans=False
            )
            have = lookup.found.present | lookup.found.claimed
            missing[group.name] = tuple(members(span(0, len(hashes)) & ~have))
            self._matcher.note_use(lookup, at_us)
        first = min((chunks[0] for chunks in missing.values() if chunks), default=0)
        if first:
            self._c.access_times.note_request(hashes[first - 1], at_us)  # for the save of the plan
        return SavePlan(len(hashes), tuple(hashes), missing, self.identity.digest)

    # -- transfers ---------------------------------------------------------------------------

    def attach(
        self, device_kvs: DeviceKV | Sequence[DeviceKV], *, ring_bytes: int | str = "256MiB", threads: int = 2,
        dirty_bytes: int | str | None = None, queue_max: int = 256, scratch_bytes: int | str = "256MiB",
        registered_bytes: int | str | None = None, transport: str | None = None, append_elsewhere: bool = False,
    ) -> HostIO:  # fmt: skip
        """Attach the engine's buffers, one descriptor per group; saves and loads then go through ``HostIO``, or
        ``GpuIO`` for buffers on a GPU.

        A rank attaches what it holds, without the groups that have no layer on it. ``ring_bytes``: staging memory, at
        least one page. ``threads``: that copy, and as many that load. ``dirty_bytes``: how much may be copied out of
        the engine and not published yet (default: three quarters of the ring). ``queue_max``: unfinished transfers. On
        a GPU, loads use ``scratch_bytes`` of its memory, and saves as much, but at most 128 MiB;
        ``registered_bytes`` of host memory (default: a quarter of it) may be pinned by all processes of the host
        together, in addition to their rings (0: all loads use the ring). ``transport``: one of
        ``kvfs.gpu.gpu_io.TRANSPORTS``; default: the fastest that the device supports. ``append_elsewhere``: saves
        from a GPU are written to the store by a child process, so that they take nothing of this interpreter.
        Raises ConfigError for a descriptor that does not fit the layout, or a device that does not exist.
        """
        from kvfs.pages.device_kv import DeviceKV

        kvs = [device_kvs] if not isinstance(device_kvs, Sequence) else device_kvs
        for kv in kvs:
            if not isinstance(kv, DeviceKV):
                raise ConfigError(f"device_kvs has {kv!r}: pass kvfs.DeviceKV, one per group")
        args = (self._c, self._appender, self._reader, self._matcher, self.identity, self._retention, kvs)
        settings: dict[str, Any] = {
            "ring_bytes": ring_bytes, "threads": threads, "dirty_bytes": dirty_bytes, "queue_max": queue_max,
            "codec": self._codec,
        }  # fmt: skip
        memory = next((kv.memory for kv in kvs), "host")
        if not memory.startswith("cuda"):
            if append_elsewhere:
                raise ConfigError(f"append_elsewhere is for buffers on a GPU, these are in {memory}: leave it out")
            from kvfs.transfer.host_io import HostIO

            return HostIO(*args, **settings)
        from kvfs.gpu.device import Gpu
        from kvfs.gpu.gpu_io import GpuIO

        return GpuIO(
            Gpu(memory), *args, **settings, scratch_bytes=scratch_bytes, registered_bytes=registered_bytes,
            transport=transport, append_elsewhere=append_elsewhere,
        )  # fmt: skip

    def _put(
        self, prompt: Prompt, pages: Any, start: Any, part: Any, ttl: float | str | None, attempt: bytes, lane: int = 0
    ) -> PutResult:
        puts = [self._check_put(prompt, n, g, pages, start, part) for n, g in enumerate(self.layout.groups)]
        expires, segment_class = self._retention(ttl)
        segment_class = segment_class._replace(lane=lane)
        if not isinstance(attempt, bytes) or len(attempt) != 8:
            raise ConfigError(f"attempt is {attempt!r}: pass 8 bytes that all ranks of one save share")
        if self._c.declines:
            pages_n = sum(put.pages for put in puts if put is not None)
            self._c.counters.add(f"pages_declined_{self._c.declines}", pages_n)
            return PutResult(0, 0, pages_n, 0, self._c.declines if pages_n else "")
        if self._c.liveness is None:
            raise StoreReadOnlyError("the store is open read-only: open it without read_only=True to put")
        began = self._c.files.monotonic()
        total = Outcome()
        limit, wait = len(prompt.hashes), self._appender.room_wait(segment_class)
        at_us = self._request_time(prompt, min((p.start for p in puts if p is not None), default=0))
        for put in sorted((p for p in puts if p is not None), key=lambda p: p.group.need.kind != "all"):
            done, limit = self._store(prompt, put, limit, expires, segment_class, attempt, at_us, wait)
            for name in ("stored", "skipped", "in_flight", "declined"):
                setattr(total, name, getattr(total, name) + getattr(done, name))
            total.reason = total.reason or done.reason
        self._c.counters.took("put", self._c.files.monotonic() - began)
        return PutResult(total.stored, total.skipped, total.declined, total.in_flight, total.reason)

    def _store(
        self, prompt: Prompt, put: _Put, limit: int, expires: int, segment_class: SegmentClass, attempt: bytes,
        at_us: int, wait: RoomWait,
    ) -> tuple[Outcome, int]:  # fmt: skip
        """Store one group. Returns the outcome, and the chunk up to which pages of other groups are of use."""
        number, group, part, start, data, pages = put
        end = min(start + pages, limit)
        if end <= start:  # after what another group declined: of no use
            return Outcome(declined=pages), limit
        size = group.part_bytes(part)
        chain = group.need.kind == "all" and not prompt.keyed
        first = start - 1 if chain and start else start
        lookup = self._matcher.present(prompt, number, group, part, first, end, whole=False)
        present = lookup.found.present | lookup.found.claimed
        if chain and start and not present >> (start - 1) & 1:
            self._c.counters.add("pages_declined_gap", pages)
            return Outcome(declined=pages, reason="gap"), min(limit, start - 1)
        missing = [c for c in range(start, end) if not present >> c & 1]
        self._matcher.note_use(lookup, at_us)
        job = AppendJob(
            self.identity.digest, self._descriptor, number, group, part, prompt,
            lambda chunk: data[(chunk - start) * size : (chunk - start + 1) * size],
            expires, at_us, attempt, segment_class, codec=self._codec,
        )  # fmt: skip
        outcome = self._appender.store(job, missing, wait) if missing else Outcome()
        writing = lookup.found.claimed & ~lookup.found.present
        in_flight = sum(writing >> c & 1 for c in range(start, end))
        skipped = end - start - len(missing) - in_flight
        outcome.in_flight += in_flight
        outcome.skipped += skipped
        self._c.counters.add("pages_in_flight", in_flight)
        self._c.counters.add("pages_skipped", skipped)
        outcome.declined += start + pages - end
        if chain and outcome.declined:
            limit = min(limit, end - outcome.declined)
        if end:
            self._c.access_times.note_request(prompt.hashes[end - 1], at_us)
        return outcome, limit

    def _request_time(self, prompt: Prompt, start: int) -> int:
        """The access time of all pages of a put: of the lookup or put that ended at ``start``, else now."""
        at_us = self._c.access_times.request_of(prompt.hashes[start - 1]) if start else None
        return self._c.files.now_us() if at_us is None else at_us

    def _check_put(self, prompt: Prompt, number: int, group: Group, pages: Any, start: Any, part: Any) -> _Put | None:
        if isinstance(pages, Mapping):
            self._check_names("pages", pages)
            if group.name not in pages:
                return None
            data = pages[group.name]
        elif len(self.layout.groups) > 1:
            raise ConfigError(f"pages must map each of the groups {[g.name for g in self.layout.groups]} to a buffer")
        else:
            data = pages
        if isinstance(start, Mapping):
            self._check_names("start", start)
        first = start.get(group.name, 0) if isinstance(start, Mapping) else start
        if type(first) is not int or first < 0:
            raise ConfigError(f"start is {first!r}: pass the number of the first chunk, 0 or more")
        mine = self._part(group, part)
        size = group.part_bytes(mine)
        view: memoryview | PageBuffers
        if isinstance(data, (list, tuple)):
            view = PageBuffers(data, size, f"pages of group {group.name}")
        else:
            view = byte_view(data, f"pages of group {group.name}")
        count, rest = divmod(len(view), size)
        if rest:
            raise ConfigError(
                f"pages of group {group.name} has {len(view)} bytes, no multiple of a page ({size} bytes for "
                f"{self.layout.page_tokens} tokens): pass whole pages of this layout"
            )
        if first + count > len(prompt.hashes):
            raise ConfigError(
                f"pages of group {group.name} holds chunks {first} to {first + count - 1}, the tokens make "
                f"{len(prompt.hashes)} full chunks: pass one page per full chunk"
            )
        return _Put(number, group, mine, first, view, count) if count else None

    def _retention(self, ttl: float | str | None) -> tuple[int, SegmentClass]:
        """(expiry in unix seconds, class of segments) of a put."""
        quota_name, quota = self._quota()
        seconds = quota.ttl_seconds if ttl is None else parse_duration(ttl, "ttl")
        owner = quota_id(quota_name) if quota_name else bytes(8)
        if seconds is None:
            return 0, SegmentClass(owner + bytes(8))
        now = self._c.files.now_us() // 1_000_000
        expires = min(0xFFFF_FFFF, now + max(1, int(seconds)))
        # records that expire about together share segments, so that whole segments expire
        width = 1 << max(4, (int(seconds) // 4).bit_length())
        return expires, SegmentClass(owner + (-(-expires // width) * width).to_bytes(8, "little"))

    def _quota(self) -> tuple[str, Quota]:
        quotas = self._c.settings.quotas
        for name in (f"salt:{salt_digest(self.identity.salt)}" if self.identity.salt else "", self.identity.name):
            if name and name in quotas:
                return name, quotas[name]
        return "", Quota()

    # -- helpers -----------------------------------------------------------------------------

    def _chain(self, token_ids: TokensLike, extra: ExtraKeys | None, leave: int = 0) -> ChunkHashes:
        self._c.note_use()
        return chain_of(self._c, self.identity, token_ids, leave, extra).all()

    def _key_prompt(self, keys: Sequence[bytes]) -> Prompt:
        self._c.note_use()
        return prompt_of_keys(self.identity, keys)

    def _parts(self, part: Part | Mapping[str, Part] | None) -> list[Part]:
        return [self._part(group, part) for group in self.layout.groups]

    def _check_names(self, what: str, by_group: Mapping[str, Any]) -> None:
        for name in by_group:
            if name not in {g.name for g in self.layout.groups}:
                raise ConfigError(f"{what} names group {name!r}; the layout has {[g.name for g in self.layout.groups]}")

    def _part(self, group: Group, part: Part | Mapping[str, Part] | None) -> Part:
        if isinstance(part, Mapping):
            self._check_names("part", part)
        mine = part.get(group.name) if isinstance(part, Mapping) else part
        if mine is None:
            return group.full
        if not isinstance(mine, Part):
            raise ConfigError(f"part is {type(mine).__name__}: pass a kvfs.Part or a mapping from group name to one")
        group.leaves(mine)  # raises ConfigError for a rectangle outside the group
        return mine
