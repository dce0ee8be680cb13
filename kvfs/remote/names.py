"""Names of objects: by identity, so that two hosts agree on them without talking. docs/format-remote.md has the rules.

    kvfs-remote.json                                  marker: what this is, and its format
    TENANT/NAMESPACE/namespace                        descriptor of the namespace
    TENANT/NAMESPACE/shapes/SHAPE                     empty: pages of this group and part were stored
    TENANT/NAMESPACE/pages/SHAPE/CHUNK                pages, from the chunk with this hash on
    TENANT/NAMESPACE/used/SHAPE/CHUNK                 empty: when the object of that name was last used

TENANT is the digest of the salt, or ``open``; NAMESPACE the digest of the namespace; SHAPE a group and a part. In an
encrypted bucket CHUNK is encrypted, and longer (``kvfs.remote.encryption``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from kvfs.errors import ConfigError
from kvfs.format.checksums import LEAF_BYTES
from kvfs.format.segment import BLOCK, DESCRIPTOR_BYTES_MAX, FIRST_PAYLOAD, align
from kvfs.index.rows import RUN
from kvfs.pages.identity import Described
from kvfs.pages.layout import Group, Part

MARKER = "kvfs-remote.json"
SEALED_BYTES = 48  # of a chunk hash that is encrypted for a name
OPEN = "open"  # tenant of namespaces without a salt
#: Pages of one object, together: as many as a power of two allows. docs/decisions/0032 compares the sizes.
OBJECT_BYTES = 16 << 20
#: Objects in memory at once, of one push or pull; or one object. Pages that are verified take as much again, and so do
#: encrypted objects.
MEMORY_BYTES = 512 << 20
_NAME = re.compile(
    r"(?P<tenant>open|[0-9a-f]{32})/(?P<digest>[0-9a-f]{64})/"
    r"(?:namespace|(?P<kind>shapes|pages|used)/(?P<group>[0-9a-f]{4})-(?P<part>[0-9a-f]{16})"
    r"(?:/(?P<chunk>[0-9a-f]{64}|[0-9a-f]{96}))?)\Z"
)


class Parsed(NamedTuple):
    """What a name says: ``part`` and ``chunk`` are empty for a descriptor, ``chunk`` also for a shape."""

    tenant: str
    digest: bytes
    group: int
    part: bytes
    chunk: bytes
    kind: str = "pages"  # or "used", "shapes", "namespace"

    @property
    def sealed(self) -> bool:
        """Whether the chunk hash is encrypted."""
        return len(self.chunk) == SEALED_BYTES

    @property
    def has_pages(self) -> bool:
        return self.kind == "pages"

    @property
    def place(self) -> bytes:
        """Namespace, group and part: what an encrypted chunk hash is bound to."""
        return self.digest + self.group.to_bytes(2, "big") + self.part


def folder_of(described: Described) -> str:
    """What the names of all objects of a namespace begin with."""
    return f"{described.salt or OPEN}/{described.digest.hex()}/"


def parse_name(name: str) -> Parsed | None:
    """What a listed name says; None for a name that kvfs does not give. Listings are untrusted."""
    found = _NAME.match(name)
    if found is None or (found["kind"] in ("pages", "used")) != (found["chunk"] is not None):
        return None
    group, part, chunk = (bytes.fromhex(found[key] or "") for key in ("group", "part", "chunk"))
    digest, kind = bytes.fromhex(found["digest"]), found["kind"] or "namespace"
    return Parsed(found["tenant"], digest, int.from_bytes(group, "big"), part, chunk, kind)


class Shape(NamedTuple):
    """One part of one group of a namespace: what one object holds pages of."""

    described: Described
    number: int  # of the group in the layout
    part: Part

    @classmethod
    def of(cls, described: Described, number: int, packed: bytes) -> Shape | None:
        """The shape that a name states; None if the layout has no such group or part."""
        if number >= len(described.layout.groups):
            return None
        try:
            part = Part.unpack(packed)
            described.layout.groups[number].leaves(part)
        except ConfigError:
            return None
        return cls(described, number, part)

    @property
    def group(self) -> Group:
        return self.described.layout.groups[self.number]

    @property
    def keyed(self) -> bool:
        return self.described.layout.kind == "opaque"

    @property
    def run_pages(self) -> int:
        """How many pages one object holds at most. Objects begin at multiples of it, or at a fork.

        One, where a page is of use without its predecessors: then each page has a name of its own.
        """
        if self.keyed or self.group.need.kind != "all":
            return 1
        count = max(1, OBJECT_BYTES // align(self.group.part_bytes(self.part)))
        return min(RUN, 1 << count.bit_length() - 1)

    @property
    def object_bytes_max(self) -> int:
        """Size of the largest valid object."""
        pages, tables = self.run_pages, LEAF_BYTES * self.group.leaves(self.part)
        payloads = pages * align(self.group.part_bytes(self.part))
        return FIRST_PAYLOAD + DESCRIPTOR_BYTES_MAX + payloads + align(pages * tables) + BLOCK

    @property
    def label(self) -> str:
        return f"{self.number:04x}-{self.part.pack().hex()}"

    @property
    def marker(self) -> str:
        return f"{folder_of(self.described)}shapes/{self.label}"

    @property
    def folder(self) -> str:
        return f"{folder_of(self.described)}pages/{self.label}/"

    def name(self, chunk_hash: bytes) -> str:
        """Name of the object that begins with this chunk."""
        return self.folder + chunk_hash.hex()

    def used_name(self, chunk_hash: bytes) -> str:
        """Name of the empty object that tells when the one with these pages was last used."""
        return f"{folder_of(self.described)}used/{self.label}/{chunk_hash.hex()}"

    def segment_id(self, chunk_hash: bytes) -> bytes:
        """Id of the segment in that object: it seeds the checks of the entries, so an object is valid under one name
        only."""
        said = b"kvfs remote 1\n" + self.described.digest + self.number.to_bytes(2, "big") + self.part.pack()
        return hashlib.blake2b(said + chunk_hash, digest_size=16).digest()


def at_once(shapes: Sequence[Shape]) -> int:
    """How many leading objects of these shapes may be in memory together; at least one."""
    nbytes = 0
    for i, shape in enumerate(shapes):
        nbytes += shape.object_bytes_max
        if i and nbytes > MEMORY_BYTES:
            return i
    return max(1, len(shapes))
