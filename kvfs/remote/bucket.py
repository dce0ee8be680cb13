"""A bucket, or the part of one below a prefix, with what kvfs expects in it: marker, descriptors, shapes, pages."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator

from kvfs.catalog.catalog import find_namespace
from kvfs.errors import ConfigError, FormatError
from kvfs.format.segment import DESCRIPTOR_BYTES_MAX
from kvfs.pages.identity import Described, parse_descriptor
from kvfs.remote.names import MARKER, OPEN, Parsed, Shape, folder_of, parse_name
from kvfs.remote.object_store import Listed, ObjectStore

FORMAT = 1
MARKER_BYTES_MAX = 4096
LISTED_MAX = 256  # namespaces whose shapes are remembered
SHAPES_MAX = 4096  # of a namespace that are listed: more than groups times ranks
#: Objects that are looked at to tell an empty bucket from one of another program.
FOREIGN_LOOKED_AT = 1


class Bucket:
    """Reads and writes the small objects; ``objects`` is what the pages go through. ``url`` is for messages."""

    def __init__(self, objects: ObjectStore, url: str, *, fresh_seconds: float = 0.0) -> None:
        """``fresh_seconds``: how long ``is_ready`` and ``shapes`` repeat an answer in place of a request."""
        self.objects = objects
        self.url = url
        self._fresh_seconds = fresh_seconds
        self._asked: tuple[float, bool] | None = None  # when whether there is a marker, and the answer
        self._listed: dict[bytes, tuple[float, list[Shape]]] = {}
        self._described: dict[tuple[str, bytes], Described | None] = {}
        self._said: set[str] = set()  # markers of shapes, descriptors: written or seen

    def is_ready(self) -> bool:
        """Whether the marker is there; False for a bucket without it. FormatError if it is of another format."""
        now = time.monotonic()
        if self._asked is not None and now - self._asked[0] < self._fresh_seconds:
            return self._asked[1]
        found = self.objects.get(MARKER, 0, MARKER_BYTES_MAX)
        if found is None:
            self._asked = now, False
            return False
        try:
            marker = json.loads(bytes(found.data))
            kind, number = marker["kvfs"], marker["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise FormatError(f"{self.url}: {MARKER} is damaged, or not of kvfs: choose another prefix") from None
        if kind != "remote" or number != FORMAT:
            raise FormatError(
                f"{self.url} is of format {number!r}, this kvfs knows {FORMAT}: use the kvfs that wrote it, or another "
                "prefix"
            )
        self._asked = now, True
        return True

    def prepare(self) -> None:
        """Write the marker if it is missing. ConfigError if there are objects of another program."""
        if self.is_ready():
            return
        self.refuse_foreign()
        self.objects.put_new(MARKER, json.dumps({"kvfs": "remote", "format": FORMAT}).encode())
        self.is_ready()

    def refuse_foreign(self) -> None:
        """ConfigError if the bucket holds objects of another program. A request or two."""
        foreign = list(itertools.islice(self.objects.listing(""), FOREIGN_LOOKED_AT))
        if foreign and parse_name(foreign[0].name) is None and foreign[0].name != MARKER:
            raise ConfigError(
                f"{self.url} holds objects of another program, such as {foreign[0].name!r}: give kvfs a prefix of its "
                "own, s3://BUCKET/PREFIX"
            )

    def check(self) -> None:
        """ConfigError for a bucket without a marker."""
        if not self.is_ready():
            raise ConfigError(f"{self.url} holds no pages of kvfs: kvfs push stores some; else check remote.url")

    # -- namespaces --------------------------------------------------------------------------

    def announce(self, shape: Shape, descriptor: bytes) -> None:
        """Store the descriptor and the shape, unless they are there."""
        for name, data in ((f"{folder_of(shape.described)}namespace", descriptor), (shape.marker, b"")):
            if name not in self._said:
                self.objects.put_new(name, data)
                self._said.add(name)

    def described(self, tenant: str, digest: bytes) -> Described | None:
        """A namespace; None if its descriptor is missing or does not have this digest and tenant."""
        key = tenant, digest
        if key not in self._described:
            found = self.objects.get(f"{tenant}/{digest.hex()}/namespace", 0, DESCRIPTOR_BYTES_MAX + 1)
            described = parse_descriptor(bytes(found.data)) if found is not None else None
            right = described is not None and (described.salt or OPEN, described.digest) == key
            self._described[key] = described if right else None
        return self._described[key]

    def forget(self, described: Described) -> None:
        """A namespace was removed: its descriptor and its shapes have to be stored again."""
        self._described.pop((described.salt or OPEN, described.digest), None)
        self._said = {name for name in self._said if not name.startswith(folder_of(described))}

    def shapes(self, described: Described) -> list[Shape]:
        """The shapes of a namespace of which there are, or were, pages."""
        now, (at, known) = time.monotonic(), self._listed.get(described.digest, (float("-inf"), []))
        if now - at < self._fresh_seconds:
            return known
        listed = itertools.islice(self.objects.listing(f"{folder_of(described)}shapes/"), SHAPES_MAX)
        names = (parse_name(found.name) for found in listed)
        shapes = (Shape.of(described, n.group, n.part) for n in names if n is not None and not n.chunk)
        found = [shape for shape in shapes if shape is not None]
        if len(self._listed) >= LISTED_MAX:
            self._listed.clear()
        self._listed[described.digest] = now, found
        return found

    def namespaces(self) -> Iterator[Described]:
        """All namespaces of the bucket whose descriptors are right: a request for each, and some for the listing."""
        for tenant in self.objects.folders(""):
            for digits in self.objects.folders(f"{tenant}/"):
                name = parse_name(f"{tenant}/{digits}/namespace")
                described = self.described(tenant, name.digest) if name is not None else None
                if described is not None:
                    yield described

    def find(self, ref: str) -> Described:
        """The namespace that ``ref`` names, as ``Catalog.find`` does. NotFoundError, ConfigError."""
        known = sorted(self.namespaces(), key=lambda d: (d.name, d.revision, d.digest))
        return find_namespace(ref, known, f"in {self.url}")

    def listing(self, prefix: str = "") -> Iterator[tuple[Listed, Parsed | None]]:
        """All objects below ``prefix`` but the marker; None for what kvfs did not name."""
        for found in self.objects.listing(prefix):
            if found.name != MARKER:
                yield found, parse_name(found.name)
