"""Registered maps: pieces of segments that a GPU reads straight out of the page cache.

A piece is up to PIECE_BYTES of a segment, mapped read-only and registered read-only. Published bytes never change, so
what is registered stays right; a piece covers published bytes only. Pieces cost pinned memory: their sum is bounded,
the least recently used go first, and none goes while a copy uses it. A map keeps the segment's shared lock, so a
dropped segment counts as used space until its pieces are let go (``sweep``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from kvfs.buffers import address_of_readonly
from kvfs.cuda import CudaError
from kvfs.files import Files
from kvfs.gpu import Device
from kvfs.segment_files import Held, may_map, sealed_bytes

PIECE_BYTES = 64 << 20
MEASURED_BYTES = 256 << 20  # registered, before the cost of it is believed
SECONDS_PER_GIB_MAX = 0.06  # dearer than this, a load is faster through the ring than by registering first
FAILURES_MAX = 8  # of the driver, until loads ask it no more
SEEN_MAX = 4096
WISHES_MAX = 256
WORK_SECONDS = 0.1


class Stretch(NamedTuple):
    """Neighbouring registered bytes."""

    address: int
    nbytes: int


class _Mapped(NamedTuple):
    """A piece that is mapped, not registered. It keeps its segment open, so that lookups find it open."""

    held: Held
    mapping: Any
    nbytes: int


class _Piece:
    __slots__ = ("address", "mapped", "nbytes", "users")

    def __init__(self, mapped: _Mapped, address: int) -> None:
        self.mapped, self.address, self.nbytes = mapped, address, mapped.nbytes
        self.users = 0


_Key = tuple[bytes, int]  # segment id, number of the piece


class Use:
    """The pieces that one transfer copies from."""

    def __init__(self) -> None:
        self.keys: set[_Key] = set()


class InPlace:
    """The registered maps of one device. Thread-safe; one thread registers at a time."""

    def __init__(self, device: Device, files: Files, budget: int, piece_bytes: int = PIECE_BYTES) -> None:
        self._device, self._files, self._budget, self._piece_bytes = device, files, budget, piece_bytes
        self._lock = threading.RLock()
        self._pieces: OrderedDict[_Key, _Piece] = OrderedDict()  # least recently used first
        self._wishes: dict[_Key, _Mapped] = {}  # to be registered by ``work``
        self._seen: OrderedDict[_Key, None] = OrderedDict()  # went through the ring once
        self._sealed: dict[bytes, int] = {}
        self.nbytes = 0
        self.failed = 0  # registrations that the driver refused
        self.seconds = 0.0  # spent on registering
        self.registered = 0  # bytes, since the start

    @property
    def worth_it(self) -> bool:
        """Whether a load gains by registering first, by what that has cost so far."""
        seconds = self.seconds * (1 << 30) / self.registered if self.registered >= MEASURED_BYTES else 0.0
        return seconds <= SECONDS_PER_GIB_MAX and self.failed < FAILURES_MAX

    def stretches(
        self, held: Held, offset: int, nbytes: int, published: int, use: Use, *, register: bool
    ) -> list[Stretch] | None:
        """Registered memory of [offset, offset + nbytes) of a segment, in use by ``use`` from now on.

        ``published``: bytes of the segment that are known to be published. None: not all of it is registered, and
        ``register`` is not set, the budget is spent or the driver refuses. What is asked for a second time is then
        registered by ``work``.
        """
        found = []
        with self._lock:
            for number, inside, need in self._cuts(offset, nbytes):
                piece = self._piece(held, number, need, published, register)
                if piece is None:
                    return None
                key = (held.segment_id, number)
                if key not in use.keys:
                    use.keys.add(key)
                    piece.users += 1
                self._pieces.move_to_end(key)
                found.append(Stretch(piece.address + inside, need - inside))
        return found

    def _cuts(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """(piece, first byte in it, end in it) of a stretch of a segment."""
        end = offset + nbytes
        while offset < end:
            number, inside = divmod(offset, self._piece_bytes)
            need = min(end - number * self._piece_bytes, self._piece_bytes)
            yield number, inside, need
            offset += need - inside

    def release(self, use: Use) -> None:
        """Nothing copies from these pieces any more."""
        with self._lock:
            for key in use.keys:
                piece = self._pieces[key]
                piece.users -= 1
                assert piece.users >= 0, "a piece is released twice"
            use.keys.clear()

    def covers(self, held: Held, offset: int, nbytes: int) -> bool:
        """Whether all of it is registered."""
        with self._lock:
            for number, _, need in self._cuts(offset, nbytes):
                piece = self._pieces.get((held.segment_id, number))
                if piece is None or piece.nbytes < need:
                    return False
        return True

    def _piece(self, held: Held, number: int, need: int, published: int, register: bool) -> _Piece | None:
        key = (held.segment_id, number)
        piece = self._pieces.get(key)
        if piece is not None and piece.nbytes >= need:
            return piece
        if piece is not None and piece.users:
            return None
        if not register:
            self._wish(held, key, published)
            return None
        if piece is not None:  # more has been published since
            self._drop(key)
        self._wishes.pop(key, None)
        mapped = self._map(held, number, published)
        return self._register(key, mapped) if mapped is not None and mapped.nbytes >= need else None

    def _wish(self, held: Held, key: _Key, published: int) -> None:
        if key in self._seen and key not in self._wishes and len(self._wishes) < WISHES_MAX:
            mapped = self._map(held, key[1], published)
            if mapped is not None:
                self._wishes[key] = mapped
        self._seen[key] = None
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)

    def work(self) -> None:
        """Register what was wished for, for a short while. Called every second."""
        end = time.monotonic() + WORK_SECONDS
        while time.monotonic() < end:
            with self._lock:
                if not self._wishes:
                    return
                key, mapped = self._wishes.popitem()
                piece = self._pieces.get(key)
                if piece is None or not piece.users:
                    if piece is not None:
                        self._drop(key)
                    self._register(key, mapped)

    def _map(self, held: Held, number: int, published: int) -> _Mapped | None:
        """All of a piece that is published, as far as is known."""
        start = number * self._piece_bytes
        nbytes = min(max(published, self._sealed_bytes(held)) - start, self._piece_bytes)
        if not may_map(self._files, held):
            return None
        try:
            return _Mapped(held, self._files.map(held.fd, nbytes, start), nbytes)
        except (OSError, ValueError):
            return None

    def _sealed_bytes(self, held: Held) -> int:
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

    def _register(self, key: _Key, mapped: _Mapped) -> _Piece | None:
        if not self._make_room(mapped.nbytes):
            return None
        begin = time.perf_counter()
        address = address_of_readonly(mapped.mapping)
        try:
            self._device.register(address, mapped.nbytes, read_only=True)
        except CudaError:
            self.failed += 1
            return None
        piece = self._pieces[key] = _Piece(mapped, address)
        self.nbytes += mapped.nbytes
        self.registered += mapped.nbytes
        self.seconds += time.perf_counter() - begin
        return piece

    def _make_room(self, nbytes: int) -> bool:
        for key in [key for key, piece in self._pieces.items() if not piece.users]:
            if self.nbytes + nbytes <= self._budget:
                break
            self._drop(key)
        return self.nbytes + nbytes <= self._budget

    def _drop(self, key: _Key) -> None:
        piece = self._pieces.pop(key)
        assert not piece.users, "a piece in use is dropped"
        self.nbytes -= piece.nbytes
        with contextlib.suppress(CudaError):
            self._device.unregister(piece.address)
        piece.mapped.mapping.close()

    def sweep(self, gone: Callable[[bytes], bool]) -> None:
        """Let go of the segments that are ``gone``, as far as nobody copies from them."""
        with self._lock:
            for segment_id in {key[0] for key in (*self._pieces, *self._wishes)}:
                if gone(segment_id):
                    self._sealed.pop(segment_id, None)
                    for key in [key for key in self._wishes if key[0] == segment_id]:
                        del self._wishes[key]
                    self._drop_all(key for key in list(self._pieces) if key[0] == segment_id)

    def _drop_all(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            if not self._pieces[key].users:
                self._drop(key)

    def close(self) -> None:
        with self._lock:
            self._wishes.clear()
            self._drop_all(list(self._pieces))


class Probe(NamedTuple):
    """What the device makes of a read-only map of a file of this store."""

    works: bool
    reason: str = ""


def probe(device: Device, fd: int, files: Files, nbytes: int) -> Probe:
    """Register a map of ``nbytes`` of ``fd`` and read it back through the device, byte for byte."""
    try:
        mapping = files.map(fd, nbytes, 0)
        files.populate(mapping)
    except (OSError, ValueError) as exc:
        return Probe(False, f"cannot map: {exc}")
    address = address_of_readonly(mapping)
    try:
        device.register(address, nbytes, read_only=True)
    except CudaError as exc:
        return Probe(False, str(exc))
    try:
        back, memory, stream = device.pinned(nbytes), device.memory(nbytes), device.stream()
        stream.copy_in(memory.address, address, nbytes)
        stream.copy_out(back.address, memory.address, nbytes)
        stream.record().synchronize()
        same = back.view[:nbytes] == memoryview(mapping)
        back.close()
    except CudaError as exc:
        return Probe(False, str(exc))
    finally:
        with contextlib.suppress(CudaError):
            device.unregister(address)
    return Probe(same, "" if same else "the device read other bytes")
