"""Pull: objects become pages of this store, each verified before it is published.

The names of a prompt's objects follow from its chunk hashes, so nothing is listed: objects are fetched ahead, several
at once, and the first name without an object ends the pull. A remote that fails or is slow makes it shorter.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from mmap import mmap
from typing import NamedTuple, TypeAlias

from kvfs.bundles.incoming import Page, PageAppender
from kvfs.catalog.catalog import Catalog
from kvfs.catalog.walk import Walk
from kvfs.context import Context
from kvfs.errors import IndexUnavailableError, NoSpaceError, StoreAccessError, StoreReadOnlyError
from kvfs.index.ledger import page_limit
from kvfs.index.rows import RUN
from kvfs.lookup.matcher import Matcher
from kvfs.lookup.prefix_match import AskCold
from kvfs.lookup.prompt_pages import prompt_of_hashes
from kvfs.lookup.search import Prompt
from kvfs.pages.chunk_hash import HASH_BYTES, ChunkHashes
from kvfs.pages.identity import Described, Identity, parse_descriptor
from kvfs.remote.bucket import Bucket
from kvfs.remote.names import Shape, at_once, folder_of
from kvfs.remote.object_store import RemoteError
from kvfs.remote.page_object import HEAD_BYTES, Arriving, covered, decode
from kvfs.remote.rooms import ROOMS
from kvfs.remote.uses import Uses
from kvfs.write.active_segments import ActiveSegments

SPACE_SECONDS = 30.0  # longest wait for room, per object
WAKE_SECONDS = 1.0  # longest sleep of a pull that waits for pages, whether it is woken or not
FAILURES_MAX = 4  # requests that fail, after their retries, before a pull ends: the object store is away
HEADS = 256  # objects of a namespace of which is asked at once whether they are needed
PROBES = 8  # objects of a prompt that are asked for at once, to learn how far the bucket goes
ROOM_BYTES_MIN = 4 << 20  # of an object that comes into a room; memory for smaller ones is no matter
PROBLEMS_MAX = 20  # lines of a report
#: What ``PageAppender.store`` raises if it cannot store: no room, no answer of the index, or a disk that fails.
STORE_ERRORS = (OSError, NoSpaceError, IndexUnavailableError, StoreAccessError, StoreReadOnlyError)


@dataclass
class Pulled:
    """What a pull did. ``stored`` and ``skipped`` (stored already) in pages; ``refused`` objects did not verify, and
    ``failed`` could not be fetched: pages behind them are missing."""

    stored: int = 0
    skipped: int = 0
    nbytes: int = 0  # of the pages that were stored
    objects: int = 0
    fetched_bytes: int = 0
    refused: int = 0
    failed: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)


class _Wanted(NamedTuple):
    """An object by its name."""

    shape: Shape
    chunk_hash: bytes
    chunk: int = 0  # of a prompt: number of its first chunk
    size: int = 0  # as listed


class _Came(NamedTuple):
    """What a request brought: the pages of an object that verify, or why there are none; neither if there is no such
    object."""

    pages: Sequence[Page] = ()
    nbytes: int = 0  # of the object
    failed: str = ""  # the object store did not answer
    refused: str = ""  # it answered with something else than the whole object, or some of its pages do not verify
    room: mmap | None = None  # where the pages are
    stored: int = 0  # of the leading pages: while the rest came


@dataclass
class _Request:
    """A request for an object."""

    wanted: _Wanted
    came: Future[_Came] = field(default_factory=Future)
    early: Arriving | None = None  # what has come so far
    stored: int = 0  # of its leading pages


#: Which of the pages that follow page number ``int`` of an object are stored as they come, and the keys of their rows.
_Early: TypeAlias = Callable[[_Wanted, int, Sequence[Page]], Sequence[Page]]
_HeadOf: TypeAlias = Callable[[Page], bytes]


def described_of(identity: Identity) -> Described:
    """What ``Puller`` needs of a namespace."""
    described = parse_descriptor(identity.descriptor_bytes())
    assert described is not None, "an identity has a valid descriptor"
    return described


def prompt_of(identity: Identity, hashes: Sequence[bytes]) -> tuple[Described, Prompt]:
    """What ``Puller`` needs of a namespace and of the chunk hashes of a prompt."""
    return described_of(identity), prompt_of_hashes(identity, hashes)


class Puller:
    """One pull: ``requests`` objects are on their way at once, and as many wait to be stored. Owns the threads that
    fetch and verify; the caller's thread stores."""

    def __init__(
        self, context: Context, active: ActiveSegments, ask_cold: AskCold, bucket: Bucket,
        progress: Callable[[], None] = lambda: None, uses: Uses | None = None,
    ) -> None:  # fmt: skip
        """``progress``: called whenever pages of a prompt were stored; an error of it ends the pull. ``uses``: where
        the objects of a prompt are noted."""
        self._c = context
        self._uses = uses
        self._progress = progress
        self._before, self._weight = 0.0, 1.0  # of the work of a prompt: what is done, what is under way
        self.share = 0.0  # of the work of a prompt that is done
        self._ask_cold = ask_cold
        self._bucket = bucket
        self._requests = context.settings.remote.requests
        self._begun: dict[str, _Request] = {}  # for objects that may be wanted, by name
        self._woken = threading.Event()  # set when pages of an object have come, and when it has
        self.done = Pulled()
        self._appender = PageAppender(context, active, self.done, SPACE_SECONDS)
        self._early_appender: PageAppender | None = PageAppender(context, active, self.done, 0.0)  # waits for no room

    # -- a prompt ----------------------------------------------------------------------------

    def reach(self, described: Described, names: Mapping[int, bytes], first: int, end: int) -> int:
        """About how many leading chunks of a prompt the bucket holds, for a reader that has those before ``first``.

        ``names``: hashes of some chunks, see ``names_of``. A few requests, all at once: for the objects at PROBES
        places. ``first`` if there is nothing behind it. Of layouts that need no page of the whole prompt, ``end``.
        FormatError for the bucket; RemoteError.
        """
        if first >= end or not self._bucket.is_ready() or not (shapes := self._bucket.shapes(described)):
            return first
        shape = next((s for s in shapes if s.group.need.kind == "all"), None)
        if shape is None or shape.keyed:
            return end
        begins = [c for c in sorted(names) if c % shape.run_pages == 0 and c < end]
        # the object that begins with ``first`` continues what a shorter prompt had left there
        places = {_last(begins, first), first, begins[-1]}
        places |= {_last(begins, first + (end - first) * i // PROBES) for i in range(1, PROBES)}
        found = first
        with ThreadPoolExecutor(min(self._requests, len(places)), "kvfs-pull") as pool:
            ordered = sorted(places)
            for at, agree in zip(ordered, pool.map(lambda at: self._agreeing(shape, names, at), ordered), strict=True):
                if not agree and at > first:
                    break
                behind = end if at == begins[-1] and agree == shape.run_pages else at + agree
                found = max(found, min(end, behind))
        return found

    def _agreeing(self, shape: Shape, names: Mapping[int, bytes], at: int) -> int:
        """How many chunks the object that begins with chunk ``at`` has in common with the prompt, as far as is known;
        0 if there is none."""
        found = self._bucket.objects.get(shape.name(names[at]), 0, HEAD_BYTES)
        entries = covered(found.data, shape, names[at]) if found is not None else None
        for i, entry in enumerate(entries or ()):
            if entry.chunk_hash != names.get(at + i, entry.chunk_hash):
                return i
        return len(entries or ())

    def prompt(self, described: Described, prompt: Prompt, reach: int | None = None) -> Pulled:
        """Pull the longest prefix of a prompt that the bucket holds, without what is stored here.

        ``reach``: of how many chunks ``share`` is told, as ``reach`` has found; None: of all.

        ConfigError, FormatError for the bucket; RemoteError if it does not answer at all.
        """
        matcher = Matcher(self._c, described.digest, described.layout, self._ask_cold)
        end = len(prompt.hashes)
        reach = end if reach is None else reach
        with ThreadPoolExecutor(self._requests, "kvfs-pull") as pool:
            listed = pool.submit(self._bucket.shapes, described)  # one round trip with the marker, in place of two
            checked = pool.submit(self._bucket.check)  # before the objects, whose bytes would hold its answer up
            try:
                self._begin(described, prompt, matcher, pool)
                checked.result()
                shapes = _ordered(listed.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            work = [s.group.part_bytes(s.part) * (min(reach, end - _first(s, prompt, end)) + 1) for s in shapes]
            for number, mine in groupby(range(len(shapes)), key=lambda i: shapes[i].number):
                reached = []
                for i in mine:
                    self._before, self._weight = sum(work[:i]) / sum(work), work[i] / sum(work)
                    reached.append(self._shape(shapes[i], prompt, matcher, end, min(reach, end), pool))
                if described.layout.groups[number].need.kind == "all" and not prompt.keyed:
                    end = max(reached)
        self._c.counters.add("pages_pulled", self.done.stored)
        return self.done

    def _begin(self, described: Described, prompt: Prompt, matcher: Matcher, pool: ThreadPoolExecutor) -> None:
        """Fetch the first objects of the shape that came first in an earlier pull, before the bucket says that it is
        still there: a round trip less, and no request more."""
        for shape in _ordered(self._bucket.shapes_before(described))[:1]:
            missing = self._missing(shape, prompt, matcher, len(prompt.hashes))
            for wanted in [_Wanted(shape, prompt.hashes[c], c) for c in missing[: self._most([shape] * len(missing))]]:
                self._begun[shape.name(wanted.chunk_hash)] = self._request(wanted, pool)

    def _shape(
        self, shape: Shape, prompt: Prompt, matcher: Matcher, end: int, reach: int, pool: ThreadPoolExecutor
    ) -> int:
        """Pull the chunks of one shape before ``end`` that are of use; up to which chunk it got, without a gap."""
        whole, pages = _is_whole(shape, prompt), shape.run_pages
        missing = self._missing(shape, prompt, matcher, end)
        begin = missing[0] if missing else end
        used: list[bytes] = []
        head_of = partial(_head_of, prompt)

        def of_prompt(wanted: _Wanted, number: int, found: Sequence[Page]) -> Sequence[Page]:
            return self._agreed(found, prompt, wanted.chunk + number, min(wanted.chunk + pages, end))

        wants = [_Wanted(shape, prompt.hashes[c], c) for c in missing]
        for wanted, came in self._ahead(wants, pool, of_prompt, head_of):
            at, until, first = wanted.chunk, min(wanted.chunk + pages, end), came
            while agreed := self._agreed(self._pages(wanted, came), prompt, at, until):
                if not self._store(agreed[came.stored :], head_of):
                    break
                used.append(wanted.chunk_hash)
                at += len(agreed)
                self.share = self._before + self._weight * min(1.0, (at - begin) / max(1, reach - begin))
                self._progress()
                if at == until:
                    break
                # a fork, or the tail of a shorter prompt: the rest has a name of its own
                wanted = _Wanted(shape, prompt.hashes[at], at)
                if came is not first:
                    _give_back(came)
                came = self._fetch(wanted)
            if came is not first:
                _give_back(came)
            if at < until and not whole:
                self._note(shape, prompt, used, at)
                return at
        self._note(shape, prompt, used, 0 if whole else end)
        return end

    def _missing(self, shape: Shape, prompt: Prompt, matcher: Matcher, end: int) -> list[int]:
        """The first chunks of the objects before ``end`` that are of use and not all stored here."""
        present = matcher.present(
            prompt, shape.number, shape.group, shape.part, 0, len(prompt.hashes), whole=_is_whole(shape, prompt)
        ).found.present  # fmt: skip
        pages, first = shape.run_pages, _first(shape, prompt, end)
        return [
            c for c in range(first // pages * pages, end, pages)
            if ~present >> c & (1 << min(pages, end - c)) - 1
        ]  # fmt: skip

    def _note(self, shape: Shape, prompt: Prompt, used: list[bytes], end: int) -> None:
        """A prompt came from the bucket. Another host needs also the objects before ``end`` that are stored here."""
        if self._uses is not None and used:
            before = (prompt.hashes[c] for c in range(0, end, shape.run_pages))
            self._uses.note(shape.used_name(chunk) for chunk in dict.fromkeys([*before, *used]))

    def _agreed(self, pages: Sequence[Page], prompt: Prompt, at: int, until: int) -> Sequence[Page]:
        """The leading pages of an object that are those of the prompt from chunk ``at`` on."""
        for i, page in enumerate(pages[: until - at]):
            if page.entry.chunk_hash != prompt.hashes[at + i] or not (prompt.keyed or page.entry.chunk == at + i):
                return pages[:i]
        return pages[: until - at]

    # -- a namespace -------------------------------------------------------------------------

    def namespace(self, chosen: Described | str, progress: Callable[[int, int], None]) -> Pulled:
        """Pull all pages of a namespace, or of the one that a ref names. ``progress``: (bytes done, all bytes).

        NoSpaceError, before anything is stored, if they are more than this store holds. NotFoundError.
        """
        names: list[_Wanted] = []
        with ThreadPoolExecutor(1, "kvfs-pull") as pool:
            checked = pool.submit(self._bucket.check)  # while the listing comes
            if isinstance(chosen, Described):
                described, names = chosen, self._listed(chosen)
            checked.result()
        if not names:
            described = self._bucket.find(chosen if isinstance(chosen, str) else chosen.digest.hex())
            names = self._listed(described)
        total, limit = sum(w.size for w in names), self._c.settings.segments_bytes_max
        if total > limit:
            raise NoSpaceError(
                f"{described.label} has {total} bytes in the bucket, this store holds {limit}: pull a prompt with "
                "--prompt, or raise capacity"
            )
        here, done = self._here(described), 0
        with ThreadPoolExecutor(self._requests, "kvfs-pull") as pool:
            for first in range(0, len(names), HEADS):
                if self.done.failed >= FAILURES_MAX:
                    break
                some = names[first : first + HEADS]
                answers = list(pool.map(partial(self._is_here, here), some))
                missing = [w for w, is_here in zip(some, answers, strict=True) if not is_here]
                for wanted, came in self._ahead(missing, pool, lambda _, __, found: found, _run_of):
                    self._store(self._pages(wanted, came)[came.stored :], _run_of)
                done += sum(w.size for w in some)
                progress(done, total)
        self._c.counters.add("pages_pulled", self.done.stored)
        return self.done

    def _listed(self, described: Described) -> list[_Wanted]:
        """All objects of a namespace."""
        found, shapes = list[_Wanted](), dict[tuple[int, bytes], Shape | None]()
        for listed, name in self._bucket.listing(f"{folder_of(described)}pages/"):
            if name is None or name.sealed:
                continue
            key = name.group, name.part
            shape = shapes[key] if key in shapes else shapes.setdefault(key, Shape.of(described, *key))
            if shape is not None and listed.size <= shape.object_bytes_max:
                found.append(_Wanted(shape, name.chunk, size=listed.size))
        return found

    def _here(self, described: Described) -> set[tuple[int, bytes, bytes]]:
        """(group, part, chunk hash) of the pages that are stored here."""
        numbers = {c.segment for c in Catalog(self._c).contents() if c.digest == described.digest}
        return {
            (s.group, s.part, s.hashes[i : i + HASH_BYTES])
            for s in (Walk(self._c).stretches(numbers.__contains__) if numbers else ())
            if s.digest == described.digest
            for i in range(0, len(s.hashes), HASH_BYTES)
        }

    def _is_here(self, here: set[tuple[int, bytes, bytes]], wanted: _Wanted) -> bool:
        """Whether all pages of an object are stored here: asked of its first bytes if its first page is."""
        shape, packed = wanted.shape, wanted.shape.part.pack()
        if (shape.number, packed, wanted.chunk_hash) not in here:
            return False
        try:
            found = self._bucket.objects.get(shape.name(wanted.chunk_hash), 0, HEAD_BYTES)
        except RemoteError:
            return False  # counted when it is fetched
        entries = covered(found.data, shape, wanted.chunk_hash) if found is not None else None
        return entries is not None and all((shape.number, packed, e.chunk_hash) in here for e in entries)

    # -- objects -----------------------------------------------------------------------------

    def _ahead(
        self, wanted: Sequence[_Wanted], pool: ThreadPoolExecutor, early: _Early, head_of: _HeadOf
    ) -> Iterator[tuple[_Wanted, _Came]]:
        """Each object with what came of it, in order; the next ones are fetched meanwhile.

        Ends early when the object store has failed FAILURES_MAX times: it is away.
        """
        coming: deque[_Request] = deque()
        rest = iter(wanted)
        most = self._most([w.shape for w in wanted])
        try:
            while self.done.failed < FAILURES_MAX:
                while len(coming) < most and (one := next(rest, None)) is not None:
                    begun = self._begun.pop(one.shape.name(one.chunk_hash), None)
                    coming.append(begun or self._request(one, pool))
                if not coming:
                    return
                self._store_early(coming, early, head_of)
                request = coming.popleft()
                came = request.came.result()._replace(stored=request.stored)
                yield request.wanted, came
                _give_back(came)
        finally:
            for request in coming:
                request.came.cancel()

    def _store_early(self, coming: Sequence[_Request], early: _Early, head_of: _HeadOf) -> None:
        """Until the first of these objects has come: store pages of all of them as they come.

        The objects of a prompt share the link, and all of them end at about the same moment. Pages whose prefix does
        not come after all are of no use until it is computed; they are evicted like others.
        """
        while not coming[0].came.done():
            self._woken.wait(WAKE_SECONDS)
            self._woken.clear()
            for request in coming:
                if coming[0].came.done() or (appender := self._early_appender) is None:
                    break
                found = request.early.pages[request.stored :] if request.early is not None else ()
                if agreed := early(request.wanted, request.stored, found):
                    try:
                        appender.store(agreed, self._c.files.now_us(), head_of)
                    except STORE_ERRORS:
                        self._early_appender = None  # the one that waits meets it again, and counts it
                    request.stored += appender.leading

    def _most(self, shapes: Sequence[Shape]) -> int:
        """How many leading objects of these shapes may be on their way or in memory: as many may wait to be stored as
        are on their way, so that the link does not rest."""
        return at_once(shapes[: 2 * self._requests])

    def _request(self, wanted: _Wanted, pool: ThreadPoolExecutor) -> _Request:
        request = _Request(wanted)
        pool.submit(self._answer, request)
        return request

    def _answer(self, request: _Request) -> None:
        if not request.came.set_running_or_notify_cancel():
            return
        try:
            request.came.set_result(self._fetch(request.wanted, request))
        except BaseException as exc:
            request.came.set_exception(exc)
        self._woken.set()

    def _fetch(self, wanted: _Wanted, request: _Request | None = None) -> _Came:
        """In any thread: changes nothing but ``request``, which is told what comes. Verifying here uses several cores,
        and the caller's thread only stores."""
        shape, chunk_hash, need = wanted.shape, wanted.chunk_hash, wanted.shape.object_bytes_max
        limit, room, early = page_limit(self._c.settings), None, None

        def arrived(nbytes: int) -> None:
            if request is not None and early is not None and early.come(nbytes):
                request.early = early
                self._woken.set()

        try:
            room = ROOMS.take(need) if need >= ROOM_BYTES_MIN else None
            memory = memoryview(room) if room is not None else None
            early = Arriving(memory, shape, chunk_hash, limit) if memory is not None else None
            found = self._bucket.objects.get(shape.name(chunk_hash), 0, need, memory, arrived)
        except (RemoteError, OSError) as exc:  # OSError: no memory
            return _Came(failed=str(exc), room=room)
        if found is None:
            return _Came(room=room)
        if len(found.data) != found.size:
            return _Came(refused=f"{len(found.data)} of {found.size} bytes came", room=room)
        pages = decode(found.data, shape, chunk_hash, limit, early.pages if early is not None else ())
        entries = covered(found.data[:HEAD_BYTES], shape, chunk_hash)
        whole = entries is not None and len(pages) == len(entries)
        return _Came(pages, found.size, refused="" if whole else "does not verify", room=room)

    def _pages(self, wanted: _Wanted, came: _Came) -> Sequence[Page]:
        """The verified pages of an object; counts it."""
        if came.failed:
            self._fail(came.failed)
        if came.refused:
            self._refuse(wanted.shape.name(wanted.chunk_hash), came.refused)
        self.done.objects += bool(came.nbytes)
        self.done.fetched_bytes += came.nbytes
        return came.pages

    def _fail(self, why: str) -> None:
        self.done.failed += 1
        self.done.note(why)
        self._c.counters.add("remote_errors")

    def _refuse(self, name: str, why: str) -> None:
        self.done.refused += 1
        self.done.note(f"{name}: {why}; kvfs remote verify --repair removes such objects")
        self._c.counters.add("remote_objects_refused")

    def _store(self, pages: Sequence[Page], head_of: _HeadOf) -> bool:
        """Whether the pages are stored here now."""
        if not pages:
            return True
        try:
            self._appender.store(pages, self._c.files.now_us(), head_of)
        except STORE_ERRORS as exc:
            self._fail(str(exc))
            return False
        return True


def sparse(hashes: bytes, first: int) -> bytes:
    """Of joined chunk hashes those that ``Puller.reach`` needs: of the row of ``first``, and the first of each later
    row. Objects begin there, whatever their size; all hashes of a long prompt would take long to pass on."""
    begin, step = first // RUN * RUN * HASH_BYTES, RUN * HASH_BYTES
    later = [hashes[at : at + HASH_BYTES] for at in range(begin + step, len(hashes), step)]
    return b"".join([hashes[begin : begin + step], *later])


def names_of(sparse_hashes: bytes, first: int, end: int) -> dict[int, bytes]:
    """Chunk number -> hash, of what ``sparse`` has left of the hashes of ``end`` chunks."""
    begin = first // RUN * RUN
    numbers = [*range(begin, min(begin + RUN, end)), *range(begin + RUN, end, RUN)]
    return dict(zip(numbers, ChunkHashes(sparse_hashes), strict=True))


def _give_back(came: _Came) -> None:
    """Its pages are stored, or of no use."""
    if came.room is not None:
        ROOMS.give(came.room)


def _ordered(shapes: Sequence[Shape]) -> list[Shape]:
    """In the order in which they are pulled: how far the others are of use depends on those that need all pages."""
    return sorted(shapes, key=lambda s: (s.group.need.kind != "all", s.number))


def _is_whole(shape: Shape, prompt: Prompt) -> bool:
    """Whether a page of this shape may be of use although one before it is missing."""
    return shape.group.need.kind != "all" or prompt.keyed


def _last(sorted_numbers: Sequence[int], most: int) -> int:
    """The last number that is at most ``most``."""
    return sorted_numbers[bisect_right(sorted_numbers, most) - 1]


def _first(shape: Shape, prompt: Prompt, end: int) -> int:
    """The first chunk of which a page of this shape is of use to a reader of the chunks before ``end``."""
    trailing = None if prompt.keyed else shape.group.need.chunks(shape.described.layout.page_tokens)
    return 0 if trailing is None else max(0, end - trailing)


def _run_of(page: Page) -> bytes:
    """The chunk that keys the row of a page of a namespace."""
    return page.entry.run_hash


def _head_of(prompt: Prompt, page: Page) -> bytes:
    """The chunk that keys the row of a page: the first of its run."""
    return page.entry.chunk_hash if prompt.keyed else prompt.hashes[page.entry.chunk // RUN * RUN]
