"""Pages that cannot be read as they are stored: decoded, or assembled from parts written at another TP or PP degree.

Pages read here are always verified, whatever the policy: the CPU touches all of their bytes anyway.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence

from kvfs.context import Context
from kvfs.format import codec as codecs
from kvfs.format import segment as fmt
from kvfs.format.checksums import LEAF_BYTES, checksum, leaf_table, root_of
from kvfs.format.codec import CodecError, CodecMemoryError
from kvfs.index.rows import Place
from kvfs.lookup.prefix_match import GroupMatch, Source
from kvfs.pages.layout import Group, Part
from kvfs.segments.open_segments import OpenSegment


def assemble(
    context: Context, sources: Sequence[Source], gm: GroupMatch, group: Group, target: memoryview,
    held: Mapping[int, OpenSegment],
) -> tuple[bool, list[Source]]:  # fmt: skip
    """Fill ``target`` with the wanted rectangle of a page; (whether it is complete, sources that did not verify).

    Parts of an unknown codec are skipped.
    """
    missing = {(h, x) for h in range(gm.want.heads) for x in range(gm.want.layers)}
    wrong = []
    for source in sources:
        shared = source.part.intersect(gm.want)
        file = held.get(source.place.segment)
        if shared is None or file is None or not missing or source.place.codec not in codecs.NAMES:
            continue
        if source.place.codec == fmt.CODEC_RAW:
            fine = _copy_part(context, file, source, shared, gm, group, target)
        elif source.part == gm.want:
            fine = decode_page(context, file, source.place, group.leaf_bytes(source.part), target)
        else:
            page = memoryview(bytearray(group.part_bytes(source.part)))
            fine = decode_page(context, file, source.place, group.leaf_bytes(source.part), page)
            if fine:
                copy = _copier(source.part, shared, gm, group, target)
                leaf = group.leaf_bytes(source.part)
                for row in _rows(group, source.part, shared):
                    copy(row, page[row * leaf : (row + 1) * leaf])
        if fine is False:
            wrong.append(source)
        if not fine:
            continue
        h0, l0 = shared.head - gm.want.head, shared.layer - gm.want.layer
        missing -= {(h0 + h, l0 + x) for h in range(shared.heads) for x in range(shared.layers)}
    return not missing, wrong


def decode_page(context: Context, held: OpenSegment, place: Place, leaf_bytes: int, target: memoryview) -> bool | None:
    """Fill ``target`` with the whole part that is stored encoded at ``place``; whether it was read and verified.

    None: there was not enough memory to find out.
    """
    try:
        if not codecs.fits(place.codec, place.stored_bytes, len(target)):
            raise CodecError(f"{place.stored_bytes} stored bytes for a page of {len(target)}")
        stored = context.segments.read_bytes(held, place.stored_bytes, place.block * fmt.BLOCK)
        codecs.decode(stored, place.codec, target)
    except OSError as exc:
        context.counters.add("read_errors")
        return None if exc.errno == errno.ENOMEM else False
    except (CodecMemoryError, MemoryError):
        context.counters.add("read_errors")
        return None
    except CodecError:
        context.counters.add("pages_corrupt")
        return False
    if root_of(leaf_table(target, leaf_bytes)) != place.root:
        context.counters.add("pages_corrupt")
        return False
    context.counters.add("pages_decoded")
    return True


def _copy_part(
    context: Context, held: OpenSegment, source: Source, shared: Part, gm: GroupMatch, group: Group, target: memoryview
) -> bool | None:
    """Copy the shared rectangle of one stored part; whole leaves are read and verified first.

    Returns what ``decode_page`` does.
    """
    files, (part, place) = context.files, source
    leaf = group.leaf_bytes(part)
    copy = _copier(part, shared, gm, group, target)
    try:
        table = files.read(held.fd, LEAF_BYTES * group.leaves(part), place.leaf * LEAF_BYTES)
        if root_of(table) != place.root:
            context.counters.add("pages_corrupt")
            return False
        scratch = memoryview(bytearray(leaf * shared.layers))
        for row in _rows(group, part, shared):
            layer = row % part.layers - (shared.layer - part.layer)
            if not layer:
                context.segments.read(held, scratch, place.block * fmt.BLOCK + row * leaf)
            data = scratch[layer * leaf : (layer + 1) * leaf]
            if checksum(data) != int.from_bytes(table[row * LEAF_BYTES : (row + 1) * LEAF_BYTES], "little"):
                context.counters.add("pages_corrupt")
                return False
            copy(row, data)
    except OSError as exc:
        context.counters.add("read_errors")
        return None if exc.errno == errno.ENOMEM else False
    return True


def _rows(group: Group, part: Part, shared: Part) -> list[int]:
    """Numbers of the leaves of ``part`` that contain cells of ``shared``."""
    first = shared.layer - part.layer
    return [g * part.layers + first + x for g in range(group.granules) for x in range(shared.layers)]


def _copier(
    part: Part, shared: Part, gm: GroupMatch, group: Group, target: memoryview
) -> Callable[[int, memoryview], None]:
    """A function that copies the shared cells of leaf ``row`` of ``part`` to their place in ``target``."""
    cell_run = group.granule_states * group.cell.nbytes  # one head of one layer of one granule
    begin, nbytes = (shared.head - part.head) * cell_run, shared.heads * cell_run
    want_leaf, first = group.leaf_bytes(gm.want), (shared.head - gm.want.head) * cell_run

    def copy(row: int, data: memoryview) -> None:
        granule, layer = divmod(row, part.layers)
        to = (granule * gm.want.layers + part.layer + layer - gm.want.layer) * want_leaf + first
        target[to : to + nbytes] = data[begin : begin + nbytes]

    return copy
