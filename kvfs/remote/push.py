"""Push: pages of this store become objects. What is there already stays, so a push that was ended goes on as a new one.

A row of the index holds neighbours of one prompt, 32 at most, and begins at a multiple of 32 or at a fork. It is cut
where objects begin. The name of an object is that of its first chunk; if there is an object by that name, its table
says how far it agrees, and what it lacks becomes an object of its own, named by the first chunk that differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby
from mmap import mmap
from typing import NamedTuple

from kvfs.bundles.exporter import verified_record
from kvfs.catalog.catalog import Catalog
from kvfs.catalog.records import Records
from kvfs.catalog.walk import HASH_BYTES, Stretch, Walk
from kvfs.context import Context, Counters
from kvfs.format.codec import CODECS
from kvfs.format.segment import CODEC_RAW, align
from kvfs.index.rows import RUN
from kvfs.index.session import Session
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.pages.identity import Described
from kvfs.remote.bucket import Bucket
from kvfs.remote.names import MEMORY_BYTES, Shape
from kvfs.remote.object_store import RemoteError
from kvfs.remote.page_object import HEAD_BYTES, covered, encode, payloads_at
from kvfs.remote.rooms import ROOMS
from kvfs.segments.writer import Record
from kvfs.write.encode import encode_records

FAILURES_MAX = 8  # requests that fail, after their retries, before a push ends: the object store is away
PROBLEMS_MAX = 20  # lines of a report


@dataclass
class Pushed:
    """What a push did, in pages: ``stored`` are new in the bucket, ``present`` were there.

    ``left_out``: evicted meanwhile, did not verify, or have a lifetime. ``failed``: the object store did not take them.
    """

    pages: int = 0
    stored: int = 0
    present: int = 0
    left_out: int = 0
    failed: int = 0
    objects: int = 0
    nbytes: int = 0
    problems: list[str] = field(default_factory=list)


class Source(NamedTuple):
    """A record of this store that is to be pushed."""

    chunk: int
    chunk_hash: bytes
    segment_id: bytes
    seq: int


class Piece(NamedTuple):
    """Neighbouring pages of one prompt that make one object. ``head``: hash of the first chunk of their run, or b""."""

    shape: Shape
    head: bytes
    sources: tuple[Source, ...]

    @property
    def name(self) -> str:
        return self.shape.name(self.sources[0].chunk_hash)


class _Put(NamedTuple):
    """An object that is sent, and the memory that it is in."""

    piece: Piece
    buffer: mmap
    nbytes: int


class Pusher:
    """One push: ``requests`` of it are under way at once, and as many objects in memory.

    The caller's thread reads, verifies and encodes the next object while others are sent, and asks ahead which ones
    are there, so that the link does not rest.
    """

    def __init__(self, context: Context, bucket: Bucket, requests: int) -> None:
        self._c = context
        self._bucket = bucket
        self._requests = requests
        self._codec = CODECS[context.settings.remote.codec]
        self._failures = 0
        self._raced: set[str] = set()  # names that were taken between the question and the upload
        self._announced: dict[str, Future[None]] = {}  # by name
        self._payloads = bytearray()  # of the object that is made, if they are encoded on their way into it
        self.done = Pushed()
        self.unsent: list[Source] = []  # what the object store did not take, and what may be among it
        self.found: list[Piece] = []  # what was there: each is the beginning of the object of its name

    def run(
        self, namespaces: Collection[Described], matches: Collection[PrefixMatch],
        progress: Callable[[int, int], None],
    ) -> Pushed:  # fmt: skip
        """Push namespaces and matches. ``progress``: (pages done, all pages). ConfigError, FormatError for the bucket;
        RemoteError if it does not answer at all."""
        described = {d.digest: d for d in Catalog(self._c).described()}
        pieces = list(self._of_namespaces(namespaces)) if namespaces else []
        pieces += [p for m in matches if m.namespace in described for p in _of_match(m, described[m.namespace])]
        return self._run(pieces, lambda nbytes: progress(self._pages_done, self.done.pages))

    def run_pieces(self, pieces: list[Piece], pace: Callable[[int], None]) -> Pushed:
        """Push pieces. ``pace`` is called with the bytes that were sent for each object, 0 for one that was there; an
        error of it ends the push. Errors as of ``run``."""
        return self._run(pieces, pace)

    def _run(self, pieces: list[Piece], after: Callable[[int], object]) -> Pushed:
        """Push pieces; ``after`` is called for each of them, see ``run_pieces``."""
        descriptors = dict(self._c.index.slices(Session.namespaces, 2.0))
        self.done.pages = sum(len(p.sources) for p in pieces)
        rest, asked = deque(pieces), deque[tuple[Piece, Future[int]]]()
        puts: dict[Future[bool], _Put] = {}
        with ThreadPoolExecutor(self._requests, "kvfs-push") as pool, Records(self._c) as records:
            try:
                self._ask(rest, asked, pool)
                self._bucket.prepare()  # what is asked meanwhile changes nothing there
                while (asked or puts) and not self._is_away:
                    while asked and (buffer := self._memory(asked[0][0].shape, puts.values())) is not None:
                        (piece, answer), sending = asked.popleft(), len(puts)
                        left = self._begin(piece, answer, buffer, descriptors, records, pool, puts)
                        rest.extendleft(reversed(left))
                        if len(puts) == sending:
                            after(0)
                        self._ask(rest, asked, pool)  # behind the object in the queue of the pool
                    self._finish(puts, rest, after)
                    self._ask(rest, asked, pool)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        pending = [*(put.piece for put in puts.values()), *(piece for piece, _ in asked), *rest]
        self.unsent += [source for piece in pending for source in piece.sources]
        self.done.failed = self.done.pages - self._pages_done
        self._c.counters.add("pages_pushed", self.done.stored)
        return self.done

    def _ask(self, rest: deque[Piece], asked: deque[tuple[Piece, Future[int]]], pool: ThreadPoolExecutor) -> None:
        """Ask of the next pieces whether they are there."""
        while rest and len(asked) < self._requests:
            piece = rest.popleft()
            asked.append((piece, pool.submit(self._there, piece)))

    def _memory(self, shape: Shape, puts: Collection[_Put]) -> mmap | None:
        """Memory for an object; None while those that are sent take all there is, or if no other one is begun."""
        need = shape.object_bytes_max
        used = sum(len(put.buffer) for put in puts)
        if self._is_away or (puts and (len(puts) >= self._requests or used + need > MEMORY_BYTES)):
            return None
        return ROOMS.take(need)

    def _begin(
        self, piece: Piece, answer: Future[int], buffer: mmap, descriptors: dict[bytes, bytes], records: Records,
        pool: ThreadPoolExecutor, puts: dict[Future[bool], _Put],
    ) -> list[Piece]:  # fmt: skip
        """Send a piece, unless it is there; what is left of it under other names. ``puts``: gains what is sent."""
        there, left = self._result(answer), list[Piece]()
        if there is None:
            self.unsent += piece.sources
        elif there > 0:
            self.done.present += there
            self.found.append(piece._replace(sources=piece.sources[:there]))
            if piece.sources[there:]:
                left.append(piece._replace(sources=piece.sources[there:]))
        else:
            descriptor = descriptors.get(piece.shape.described.digest)
            said = self._announcing(piece.shape, descriptor, pool) if descriptor is not None else []
            data, count, rest = self._encoded(piece, descriptor, records, memoryview(buffer))
            if rest:
                left.append(piece._replace(sources=rest))
            if count:
                mine = piece._replace(sources=piece.sources[:count])
                self.done.nbytes += len(data)
                puts[pool.submit(self._put, mine, said, data, there < 0)] = _Put(mine, buffer, len(data))
                return left
        ROOMS.give(buffer)
        return left

    def _announcing(self, shape: Shape, descriptor: bytes, pool: ThreadPoolExecutor) -> list[Future[None]]:
        """What must be there before pages of a shape are: one request for each, whatever number of objects waits."""
        wanted = self._bucket.announcements(shape, descriptor)
        for name, data in wanted:
            known = self._announced.get(name)
            if known is None or (known.done() and known.exception() is not None):
                self._announced[name] = pool.submit(self._bucket.announce, shape.described, name, data)
        return [self._announced[name] for name, _ in wanted]

    def _finish(
        self, puts: dict[Future[bool], _Put], rest: deque[Piece], after: Callable[[int], object]
    ) -> None:  # fmt: skip
        """Wait until an object is sent, and count those that are. ``rest``: gains what has to be asked again."""
        for future in wait(puts, return_when=FIRST_COMPLETED).done:
            piece, buffer, nbytes = puts.pop(future)
            ROOMS.give(buffer)
            stored = self._result(future)
            if stored:
                self.done.stored += len(piece.sources)
                self.done.objects += 1
            elif stored is not None and piece.name not in self._raced:  # another host was faster: look again
                self._raced.add(piece.name)
                rest.appendleft(piece)
            elif stored is None:
                self.unsent += piece.sources
            else:
                self.unsent += piece.sources
                self._note(f"{piece.name}: the object store says that it is there, and does not show it")
            after(nbytes)

    @property
    def _is_away(self) -> bool:
        """Whether so many requests have failed that no other one is begun."""
        return self._failures >= FAILURES_MAX

    @property
    def _pages_done(self) -> int:
        return self.done.stored + self.done.present + self.done.left_out

    def _of_namespaces(self, wanted: Iterable[Described]) -> Iterator[Piece]:
        described = {d.digest: d for d in wanted}
        numbers = {c.segment for c in Catalog(self._c).contents() if c.digest in described}
        return of_rows(described, Walk(self._c).stretches(numbers.__contains__))

    def _there(self, piece: Piece) -> int:
        """How many pages of a piece are in the object of its name; 0 if there is none, -1 if it is not valid."""
        found = self._bucket.objects.get(piece.name, 0, HEAD_BYTES)
        if found is None:
            return 0
        entries = covered(found.data, piece.shape, piece.sources[0].chunk_hash)
        if entries is None or found.size > piece.shape.object_bytes_max:
            return -1
        agree = 0
        for entry, source in zip(entries, piece.sources, strict=False):
            if entry.chunk_hash != source.chunk_hash:
                break
            agree += 1
        return agree

    def _encoded(
        self, piece: Piece, descriptor: bytes | None, records: Records, buffer: memoryview
    ) -> tuple[memoryview, int, tuple[Source, ...]]:
        """(an object of the leading pages that verify and have no lifetime, how many, the sources behind the gap)."""
        if descriptor is None:
            self.done.left_out += len(piece.sources)
            return memoryview(b""), 0, ()
        good: list[Record] = []
        if self._codec == CODEC_RAW:
            room = buffer[payloads_at(descriptor) :]  # where they stay
        else:
            if len(self._payloads) < piece.shape.object_bytes_max:
                self._payloads = bytearray(piece.shape.object_bytes_max)
            room = memoryview(self._payloads)
        for source in piece.sources:
            record = verified_record(records, source.segment_id, source.seq, piece.shape.group, room)
            if record is None or record.expires or record.chunk_hash != source.chunk_hash:
                self.done.left_out += 1
                break
            room = room[align(len(record.payload)) :]
            good.append(record._replace(run_hash=piece.head or record.chunk_hash))
        rest = piece.sources[len(good) + 1 :]
        if not good:
            return memoryview(b""), 0, rest
        return encode(self._c, piece.shape, descriptor, self._shrunk(piece, good), buffer), len(good), rest

    def _shrunk(self, piece: Piece, records: list[Record]) -> list[Record]:
        """Records in the codec of the bucket; those that have one already keep it. The counters of codecs tell what a
        store saves itself, so nothing is added to them."""
        raw = [record for record in records if record.codec == CODEC_RAW]
        made = iter(encode_records(raw, self._codec, piece.shape.group.cell.element_bytes, Counters()))
        return [next(made) if record.codec == CODEC_RAW else record for record in records]

    def _put(self, piece: Piece, announced: list[Future[None]], data: memoryview, in_place: bool) -> bool:
        for one in announced:  # before this in the queue of the pool, so it runs or has run
            one.result()
        if in_place:
            self._bucket.objects.replace(piece.name, data)
            return True
        return self._bucket.objects.put_new(piece.name, data)

    def _result(self, future: Future[int] | Future[bool]) -> int | None:
        """The result of a request; None if it failed."""
        try:
            return future.result()
        except RemoteError as exc:
            self._note(str(exc))
            return None

    def _note(self, problem: str) -> None:
        """Count a failure."""
        self._failures += 1
        self._c.counters.add("remote_errors")
        if len(self.done.problems) < PROBLEMS_MAX:
            self.done.problems.append(problem)


def of_rows(described: Mapping[bytes, Described], stretches: Iterable[Stretch]) -> Iterator[Piece]:
    """The stretches of known namespaces, which come row by row, cut where objects begin."""
    for _, row in groupby((s for s in stretches if s.digest in described), key=lambda s: s.row):
        mine = list(row)
        shape = Shape.of(described[mine[0].digest], mine[0].group, mine[0].part)
        if shape is not None:
            yield from _cut(shape, _head(mine), [source for s in mine for source in _sources(s)])


def _head(stretches: list[Stretch]) -> bytes:
    """Hash of the first chunk of the run, if a row has it; b"" for the row of a fork: other stores have other forks."""
    return next((s.hashes[:HASH_BYTES] for s in stretches if s.chunk % RUN == 0), b"")


def _sources(s: Stretch) -> Iterator[Source]:
    for i in range(s.pages):
        yield Source(s.chunk + i, s.hashes[HASH_BYTES * i : HASH_BYTES * (i + 1)], s.segment_id, s.seq + i)


def _cut(shape: Shape, head: bytes, sources: Iterable[Source]) -> Iterator[Piece]:
    """Pieces of the pages of one row, or of one prompt: each within a block of ``run_pages`` chunks, without a gap."""
    piece: list[Source] = []
    for source in sorted(sources):
        if piece and (source.chunk != piece[-1].chunk + 1 or source.chunk % shape.run_pages == 0):
            yield Piece(shape, head, tuple(piece))
            piece = []
        piece.append(source)
    if piece:
        yield Piece(shape, head, tuple(piece))


def _of_match(match: PrefixMatch, described: Described) -> Iterator[Piece]:
    for group in match.groups:
        by_part: dict[bytes, list[Source]] = {}
        for chunk, sources in group.sources().items():
            for s in sources:
                found = Source(chunk, s.place.chunk_hash, match.segments[s.place.segment], s.place.seq)
                by_part.setdefault(s.part.pack(), []).append(found)
        for packed, mine in by_part.items():
            shape = Shape.of(described, group.number, packed)
            if shape is None:
                continue
            if match.keyed:  # each has a name of its own
                yield from (Piece(shape, source.chunk_hash, (source,)) for source in sorted(mine))
                continue
            for _, run in groupby(sorted(mine), key=lambda source: source.chunk // RUN):
                pages = list(run)
                head = pages[0].chunk_hash if pages[0].chunk % RUN == 0 else b""
                yield from _cut(shape, head, pages)
