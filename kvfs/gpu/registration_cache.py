"""Pieces of segments that a GPU can read: which there are, who uses them, which ones go.

A piece is up to PIECE_BYTES of a segment, in the page cache or in an arena (``kvfs.gpu.registration``). Published
bytes never change, so what is there stays right; a piece covers published bytes only. Pieces cost pinned memory: their
sum is bounded, the least recently used go first, and none goes while a copy uses it. A piece keeps its segment open: at
most a quarter of the descriptors that this process may have go for that. It keeps the segment's shared lock, too, so a
dropped segment counts as used space until its pieces are let go (``sweep``).
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from kvfs.gpu.registration import FullError, RegionSource, RegisteredRegion
from kvfs.segments.open_segments import OpenSegment, sealed_bytes
from kvfs.system.files import Files

PIECE_BYTES = 64 << 20
SEEN_MAX = 4096
WISHES_MAX = 256
WORK_SECONDS = 0.1
MAKING_SECONDS = 0.5  # a piece takes a tenth of it, where the disk has it and is well


class RegisteredRange(NamedTuple):
    """Neighbouring registered bytes."""

    address: int
    nbytes: int


class _Piece:
    __slots__ = ("address", "backed", "nbytes", "users")

    def __init__(self, backed: RegisteredRegion) -> None:
        self.backed, self.address, self.nbytes = backed, backed.address, backed.nbytes
        self.users = 0


class _Wish(NamedTuple):
    """A piece that is to be made by ``work``."""

    held: OpenSegment
    published: int


_Key = tuple[bytes, int]  # segment id, number of the piece


class RegionLease:
    """The pieces that one transfer copies from."""

    def __init__(self) -> None:
        self.keys: set[_Key] = set()


class RegistrationCache:
    """The pieces of one device. Thread-safe.

    One thread at a time makes pieces, out of what may be a disk that hangs. Nobody else waits for it longer than
    MAKING_SECONDS, and after that nobody at all until it is done.
    """

    def __init__(self, backing: RegionSource, files: Files, piece_bytes: int = PIECE_BYTES) -> None:
        self.backing, self._files, self._piece_bytes = backing, files, piece_bytes
        self._lock = threading.RLock()
        self._made = threading.Condition(self._lock)
        self._maker: object = None  # whoever makes a piece
        self._stuck = False  # somebody has waited for the maker in vain
        self._pieces: OrderedDict[_Key, _Piece] = OrderedDict()  # least recently used first
        self._wishes: dict[_Key, _Wish] = {}
        self._seen: OrderedDict[_Key, None] = OrderedDict()  # went through the ring once
        self._sealed: dict[bytes, int] = {}
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._segments_max = files_max // 4 if files_max != resource.RLIM_INFINITY else SEEN_MAX
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(piece.nbytes for piece in list(self._pieces.values()))

    @property
    def pinned(self) -> int:
        """What is pinned for them."""
        return sum(self.backing.cost(piece.nbytes) for piece in list(self._pieces.values()))

    def stretches(
        self, held: OpenSegment, offset: int, nbytes: int, published: int, use: RegionLease, *, register: bool | None
    ) -> list[RegisteredRange] | None:
        """Memory that holds [offset, offset + nbytes) of a segment, in use by ``use`` from now on.

        ``published``: bytes of the segment that are known to be published. None: not all of it is there, and
        ``register`` (make what is missing) is not set, the budget is spent or the driver refuses. What is asked for a
        second time is then made by ``work``, unless ``register`` is None.
        """
        found = []
        for number, inside, need in self._cuts(offset, nbytes):
            key = (held.segment_id, number)
            piece = self._take(key, need, use)
            if piece is None and register:
                piece = self._make(key, held, need, published, use, ahead=False)
            elif piece is None and register is not None:
                self._wish(held, key, published)
            if piece is None:
                return None
            found.append(RegisteredRange(piece.address + inside, need - inside))
        return found

    def _cuts(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(piece, first byte in it, end in it) of a stretch of a segment."""
        end = offset + nbytes
        while offset < end:
            number, inside = divmod(offset, self._piece_bytes)
            need = min(end - number * self._piece_bytes, self._piece_bytes)
            yield number, inside, need
            offset += need - inside

    def release(self, use: RegionLease) -> None:
        """Nothing copies from these pieces any more."""
        with self._lock:
            for key in use.keys:
                piece = self._pieces[key]
                piece.users -= 1
                assert piece.users >= 0, "a piece is released twice"
            use.keys.clear()
            if self._closed:
                self._let_go()

    def covers(self, held: OpenSegment, offset: int, nbytes: int) -> bool:
        """Whether all of it is there."""
        with self._lock:
            for number, _, need in self._cuts(offset, nbytes):
                piece = self._pieces.get((held.segment_id, number))
                if piece is None or piece.nbytes < need:
                    return False
        return True

    def _take(self, key: _Key, need: int, use: RegionLease | None) -> _Piece | None:
        """A piece that has ``need`` bytes, in use by ``use``; None if there is none."""
        with self._lock:
            piece = self._pieces.get(key)
            if piece is None or piece.nbytes < need:
                return None
            if use is not None:
                if key not in use.keys:
                    use.keys.add(key)
                    piece.users += 1
                self._pieces.move_to_end(key)
            return piece

    def touched(self, held: OpenSegment, offset: int, nbytes: int, published: int) -> list[tuple[int, int, int]]:
        """(number, bytes of the stretch in it, bytes that it would have) of each piece that a stretch lies in."""
        return [
            (number, end - inside, self._published((held.segment_id, number), held, published))
            for number, inside, end in self._cuts(offset, nbytes)
        ]

    def missing(self, held: OpenSegment, offset: int, nbytes: int, published: int) -> list[tuple[int, int]]:
        """(first byte, bytes that it would have) of each piece that a stretch lies in and that is not there."""
        found = []
        for number, _, need in self._cuts(offset, nbytes):
            key = (held.segment_id, number)
            if self._take(key, need, None) is None:
                found.append((number * self._piece_bytes, self._published(key, held, published)))
        return found

    def warm(self, held: OpenSegment, offset: int, nbytes: int, published: int, *, spare: bool = False) -> int:
        """Have a stretch of a segment made; bytes of it that are there now. ``spare``: no other piece goes for it."""
        ready = 0
        for number, inside, need in self._cuts(offset, nbytes):
            key = (held.segment_id, number)
            if self._take(key, need, None) or self._make(key, held, need, published, None, ahead=True, spare=spare):
                ready += need - inside
        return ready

    def _wish(self, held: OpenSegment, key: _Key, published: int) -> None:
        with self._lock:
            if key in self._seen and key not in self._wishes and len(self._wishes) < WISHES_MAX:
                self._wishes[key] = _Wish(held, published)
            self._seen[key] = None
            if len(self._seen) > SEEN_MAX:
                self._seen.popitem(last=False)

    def work(self) -> None:
        """Make what was wished for, for a short while. Called every second."""
        end = time.monotonic() + WORK_SECONDS
        while time.monotonic() < end:
            with self._lock:
                pieces = self._pieces
                key = next((key for key in self._wishes if key not in pieces or not pieces[key].users), None)
                if key is None:  # what is left is in use
                    return
                wish = self._wishes.pop(key)
            self._make(key, wish.held, self._published(key, *wish), wish.published, None, ahead=True)

    def _make(
        self,
        key: _Key,
        held: OpenSegment,
        need: int,
        published: int,
        use: RegionLease | None,
        *,
        ahead: bool,
        spare: bool = False,
    ) -> _Piece | None:
        """All of a piece that is published, as far as is known; None if that is less than ``need``, or cannot be had.

        What is there of it, less than is needed and not in use, goes; if ``spare``, only when there is more.
        """
        me = object()
        try:
            with self._made:
                if not self._made.wait_for(lambda: self._maker is None, 0.0 if self._stuck else MAKING_SECONDS):
                    self._stuck = True
                    return None
                self._maker = me
            return self._make_alone(key, held, max(need, 1), published, use, ahead=ahead, spare=spare)
        finally:
            with self._made:
                if self._maker is me:
                    self._maker, self._stuck = None, False
                    self._made.notify()
                    if self._closed:
                        self._let_go()

    def _make_alone(
        self,
        key: _Key,
        held: OpenSegment,
        need: int,
        published: int,
        use: RegionLease | None,
        *,
        ahead: bool,
        spare: bool,
    ) -> _Piece | None:
        nbytes = self._published(key, held, published)
        with self._lock:
            self._wishes.pop(key, None)
            there = self._take(key, need, use)  # made while this one waited
            if self._closed or there is not None:
                return there
            if key in self._pieces and not spare and not self._drop_unused(key):
                if not ahead and len(self._wishes) < WISHES_MAX:
                    self._wishes[key] = _Wish(held, published)  # later, when nothing copies from it
                return None
        while nbytes >= need:
            try:
                if self._too_many_with(held.segment_id):
                    raise FullError
                backed = self.backing.make(held, key[1] * self._piece_bytes, nbytes, ahead=ahead)
            except FullError:
                with self._lock:
                    if spare or not any(self._drop_unused(oldest) for oldest in list(self._pieces)):
                        return None
                continue
            if backed is None:
                return None
            with self._lock:
                if key in self._pieces and not self._drop_unused(key):  # a smaller one, ``spare``, that a copy uses
                    self.backing.free(backed)
                    return None
                self._pieces[key] = _Piece(backed)
                return self._take(key, need, use) if not self._closed else None
        return None

    def _too_many_with(self, segment_id: bytes) -> bool:
        """Whether a piece of this segment would keep one more open than may be."""
        if len(self._pieces) < self._segments_max:
            return False
        segments = {key[0] for key in list(self._pieces)}
        return segment_id not in segments and len(segments) >= self._segments_max

    def _published(self, key: _Key, held: OpenSegment, published: int) -> int:
        """Bytes of a piece that are published, as far as is known."""
        end = max(published, self._sealed_bytes(held)) - key[1] * self._piece_bytes
        return max(0, min(end, self._piece_bytes))

    def _sealed_bytes(self, held: OpenSegment) -> int:
        """Size of a segment if it is sealed, else 0."""
        size = self._sealed.get(held.segment_id, 0)
        if not size:
            with contextlib.suppress(OSError):
                size = sealed_bytes(self._files, held)
                if size:
                    if len(self._sealed) > SEEN_MAX:
                        self._sealed.clear()
                    self._sealed[held.segment_id] = size
        return size

    def _drop_unused(self, key: _Key) -> bool:
        """Let go of a piece, unless somebody copies from it."""
        if self._pieces[key].users:
            return False
        self.backing.free(self._pieces.pop(key).backed)
        return True

    @property
    def wished(self) -> bool:
        """Whether there is anything for ``work``."""
        return bool(self._wishes)

    def gone(self, dropped: Callable[[bytes], bool]) -> set[bytes]:
        """The segments of pieces, and of wishes, that were ``dropped``."""
        with self._lock:
            known = {key[0] for key in (*self._pieces, *self._wishes)}
        return set(filter(dropped, known))

    def sweep(self, gone: Collection[bytes]) -> None:
        """Let go of these segments, as far as nobody copies from them."""
        with self._lock:
            for segment_id in gone:
                self._sealed.pop(segment_id, None)
            for key in [key for key in self._wishes if key[0] in gone]:
                del self._wishes[key]
            for key in [key for key in self._pieces if key[0] in gone]:
                self._drop_unused(key)

    def close(self) -> None:
        """Let go of everything that nobody copies from, the rest when it is released, and make no more."""
        with self._lock:
            self._closed = True
            self._wishes.clear()
            self._let_go()

    def _let_go(self) -> None:
        for key in list(self._pieces):
            self._drop_unused(key)
        if not self._pieces and self._maker is None:
            self.backing.close()
