"""Pins: named prefixes that are never evicted.

A pin's pages are copied into segments of their own, and ``pins/<id>`` (durable, written when the pages are
published) names those segments: a segment that any pin names is never evicted. Pages that are in a pinned segment
already are not copied again; the new pin also names that segment. The files survive a rebuild of the index.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable

from kvfs.context import Context
from kvfs.directory.pin_files import Pin, pinned_segments, read_pin
from kvfs.errors import ConfigError, IndexUnavailableError, NoSpaceError
from kvfs.format import segment as fmt
from kvfs.format.checksums import checksum
from kvfs.index.deadlines import COMMIT_SECONDS
from kvfs.index.ledger import NO_QUOTA
from kvfs.index.session import Session
from kvfs.lookup.prefix_match import PrefixMatch
from kvfs.pages.chunk_set import span
from kvfs.write.active_segments import ActiveSegments, Declined, SegmentClass
from kvfs.write.relocate import Relocator

_NAME = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?\Z")
PINNED_SHARE = 0.5  # of the capacity may be pinned: the rest must stay evictable
PIN_BYTES, ID_BYTES = 512, 36  # of a pin's file: without segment ids, of each id
ROOM_SECONDS = 5.0  # longest eviction for the room of one batch of copies


class Pins:
    """The pins of a store: owns the files in ``pins/``; ``Relocator`` copies pages, the evictor makes room."""

    def __init__(
        self, context: Context, active: ActiveSegments, relocator: Relocator, make_room: Callable[..., None]
    ) -> None:
        self._c = context
        self._active = active
        self._relocator = relocator
        self._make_room = make_room  # ``Evictor.make_room_locked``

    def segments(self) -> set[bytes]:
        return pinned_segments(self._c.directory)

    def pin(self, name: str, match: PrefixMatch) -> int:
        """Pin the pages of a match under ``name``, replacing an earlier pin of that name; tokens pinned.

        The caller holds the evictors' lock: segments are evicted as the copies need room, except those of the match and
        of the copies. NoSpaceError if pins would take more than half of the capacity or no room can be made.
        """
        _check_name(name)
        file = _file(name)
        if not match.tokens:
            raise ConfigError(f"nothing to pin as {name!r}: no page of this prompt is stored")
        pinned = self.segments()
        # it holds that lock, so it may use the standing reserve: writers take some of the room that is made for it
        segment_class = SegmentClass(NO_QUOTA + b"pin:" + self._c.files.random(4), fmt.FLAG_PINNED, evictor=True)
        sources = {n for n, i in match.segments.items() if i not in pinned}
        self._check_share(match, sources, pinned)
        self._check_files(file, len(match.segments))
        spared = {*match.segments.values(), segment_class.class_id}

        def make_room(nbytes: int) -> None:
            end = self._c.files.monotonic() + ROOM_SECONDS  # the copies fail if it was not enough
            self._make_room(nbytes + self._c.settings.segment_bytes, end, spared)

        try:
            self._relocator.copy_match(segment_class, match, sources, make_room)
            segments = self._segments_of(match)
            self._active.finish(segment_class)
        except (Declined, IndexUnavailableError, OSError) as exc:
            self._active.finish(segment_class)
            raise NoSpaceError(f"{name!r} is not pinned: {exc}; raise the capacity or unpin something") from None
        pin = Pin(name, match.namespace.hex(), match.tokens, self._c.files.now_us(), segments)
        self._c.directory.write_small(file, json.dumps(pin._asdict()).encode() + b"\n", sub="pins")
        return match.tokens

    def _segments_of(self, match: PrefixMatch) -> tuple[str, ...]:
        """Ids of the segments that hold the pages of a match now."""
        wanted: dict[bytes, int] = {}  # row -> chunks of its run; the others may be in any segment
        for gm in match.groups:
            for hit in gm.hits:
                bits = hit.bits & span(gm.first, gm.count) >> hit.run * gm.run_length
                wanted[hit.key] = wanted.get(hit.key, 0) | bits

        def look(session: Session) -> set[bytes]:
            ids: set[bytes] = set()
            for key, bits in wanted.items():
                row = session.row(key)
                for extent in row.extents if row is not None else ():
                    if bits & span(extent.first, extent.chunks) and session.is_live(extent):
                        ids.add(session.segment_id(extent.segment) or b"")
            return ids - {b""}

        found: Iterable[bytes] = self._c.index.read(look, COMMIT_SECONDS)
        return tuple(sorted(i.hex() for i in found))

    def _check_share(self, match: PrefixMatch, sources: set[int], pinned: set[bytes]) -> None:
        def sum_pinned(session: Session) -> int:
            return sum(row.allocated for _, row in session.segments() if row.segment_id in pinned)

        held = self._c.index.read(sum_pinned, COMMIT_SECONDS)
        limit = int(self._c.settings.capacity_bytes * PINNED_SHARE)
        new = match.nbytes if sources else 0
        if held + new > limit:
            raise NoSpaceError(
                f"pins hold {held} bytes and this one adds {new}: at most half the capacity ({limit}) may be "
                "pinned; unpin something or raise the capacity"
            )

    def _check_files(self, file: str, segments: int) -> None:
        """NoSpaceError if there is no room for a pin's ``file``, which will name about so many segments."""
        folder, files = self._c.directory.sub("pins"), self._c.files
        held = 0
        for name in files.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                held += 0 if name == file else fmt.align(files.stat(name, dir_fd=folder).st_size)
        limit = self._c.settings.pin_files_bytes
        if held + fmt.align(PIN_BYTES + ID_BYTES * segments) > limit:
            raise NoSpaceError(
                f"the files of all pins hold {held} bytes, {limit} is the most: unpin something or raise the capacity"
            )

    def unpin(self, name: str) -> bool:
        """Remove a pin; its pages become evictable. False if there was none."""
        _check_name(name)
        file = _file(name)
        existed = read_pin(self._c.directory, file) is not None
        self._c.directory.remove(file, sub="pins")
        self._c.files.fsync(self._c.directory.sub("pins"))
        return existed


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigError(f"pin name is {name!r}: pass 1 to 128 printable ASCII characters")


def _file(name: str) -> str:
    return f"{checksum(name.encode()):016x}"
