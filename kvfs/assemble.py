"""Putting a page together from parts that were written at another TP or PP degree than the reader's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvfs import format as fmt
from kvfs.context import Context
from kvfs.hashing import LEAF_BYTES, checksum, root_of
from kvfs.layout import Group, Part
from kvfs.match import GroupMatch, Source
from kvfs.segment_files import Held


def assemble(
    context: Context, sources: Sequence[Source], gm: GroupMatch, group: Group, target: memoryview,
    held: Mapping[int, Held],
) -> tuple[bool, list[Source]]:  # fmt: skip
    """Fill ``target`` with the wanted rectangle of a page; (whether it is whole, sources that did not verify)."""
    missing = {(h, x) for h in range(gm.want.heads) for x in range(gm.want.layers)}
    wrong = []
    for source in sources:
        shared = source.part.intersect(gm.want)
        file = held.get(source.place.segment)
        if shared is None or file is None or not missing or source.place.codec != fmt.CODEC_RAW:
            continue
        if not _copy_part(context, file, source, shared, gm, group, target):
            wrong.append(source)
            continue
        h0, l0 = shared.head - gm.want.head, shared.layer - gm.want.layer
        missing -= {(h0 + h, l0 + x) for h in range(shared.heads) for x in range(shared.layers)}
    return not missing, wrong


def _copy_part(
    context: Context, held: Held, source: Source, shared: Part, gm: GroupMatch, group: Group, target: memoryview
) -> bool:
    """Copy the shared rectangle of one stored part; whole leaves are read and checked first."""
    files, (part, place) = context.files, source
    leaf, want_leaf = group.leaf_bytes(part), group.leaf_bytes(gm.want)
    try:
        table = files.read(held.fd, LEAF_BYTES * group.leaves(part), place.leaf * LEAF_BYTES)
        if root_of(table) != place.root:
            context.counters.add("pages_corrupt")
            return False
        cell_run = group.granule_states * group.cell.nbytes  # one head of one layer of one granule
        scratch = memoryview(bytearray(leaf * shared.layers))
        for granule in range(group.granules):
            first = granule * part.layers + shared.layer - part.layer
            files.read_into(held.fd, scratch, place.block * fmt.BLOCK + first * leaf)
            for layer in range(shared.layers):
                data = scratch[layer * leaf : (layer + 1) * leaf]
                at = (first + layer) * LEAF_BYTES
                if checksum(data) != int.from_bytes(table[at : at + LEAF_BYTES], "little"):
                    context.counters.add("pages_corrupt")
                    return False
                row = granule * gm.want.layers + shared.layer + layer - gm.want.layer
                to = row * want_leaf + (shared.head - gm.want.head) * cell_run
                begin = (shared.head - part.head) * cell_run
                target[to : to + shared.heads * cell_run] = data[begin : begin + shared.heads * cell_run]
    except OSError:
        context.counters.add("read_errors")
        return False
    return True
