"""A bucket, or the part of one below a prefix, with what kvfs expects in it: marker, descriptors, shapes, pages."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvfs.catalog.catalog import find_namespace
from kvfs.errors import ConfigError, FormatError
from kvfs.format.segment import DESCRIPTOR_BYTES_MAX
from kvfs.pages.identity import Described, parse_descriptor
from kvfs.remote.names import MARKER, OPEN, Parsed, Shape, folder_of, parse_name
from kvfs.remote.object_store import Listed, ObjectStore

if TYPE_CHECKING:
    from kvfs.remote.encryption import Keys

FORMAT, ENCRYPTED_FORMAT = 1, 2
MARKER_BYTES_MAX = 4096
LISTED_MAX = 256  # namespaces whose shapes are remembered
SHAPES_MAX = 4096  # of a namespace that are listed: more than groups times ranks
KEY_IDS_MAX, KEY_ID_DIGITS_MAX = 16, 16  # of a marker
#: Objects that are looked at to tell an empty bucket from one of another program.
FOREIGN_LOOKED_AT = 1


class Bucket:
    """Reads and writes the small objects; ``objects`` is what the pages go through. ``url`` is for messages.

    ``stored`` are the objects as the bucket has them: encrypted, if there are ``keys``.
    """

    def __init__(self, stored: ObjectStore, url: str, *, keys: Keys | None = None, fresh_seconds: float = 0.0) -> None:
        """``fresh_seconds``: how long ``is_ready`` and ``shapes`` repeat an answer in place of a request."""
        self.stored = self.objects = stored
        if keys is not None:
            from kvfs.remote.encryption import EncryptedObjects

            self.objects = EncryptedObjects(stored, keys)
        self.keys = keys
        self.url = url
        self._fresh_seconds = fresh_seconds
        self._asked: tuple[float, bool] | None = None  # when whether there is a marker, and the answer
        self._listed: dict[bytes, tuple[float, list[Shape]]] = {}
        self._described: dict[tuple[str, bytes], Described | None] = {}
        self._said: set[str] = set()  # markers of shapes, descriptors: written or seen
        self._ids: list[str] = []  # of the keys in the marker

    def again(self) -> Bucket:
        """The same bucket for another call: nothing that was answered or written before is taken for granted."""
        bucket = Bucket(self.stored, self.url, keys=self.keys)
        bucket._listed = self._listed
        return bucket

    def is_ready(self) -> bool:
        """Whether the marker is there; False for a bucket without it. FormatError if it is of another format;
        ConfigError if its objects are encrypted with other keys, or plain although there are keys."""
        now = time.monotonic()
        if self._asked is not None and now - self._asked[0] < self._fresh_seconds:
            return self._asked[1]
        ids = self._marker()
        if ids is not None:
            self._check_keys(ids)
        self._ids = ids or []
        self._asked = now, ids is not None
        return ids is not None

    def _marker(self) -> list[str] | None:
        """Ids of the keys that objects were encrypted with, the newest last; empty if they are plain. None if there is
        no marker; FormatError."""
        found = self.stored.get(MARKER, 0, MARKER_BYTES_MAX)
        if found is None:
            return None
        try:
            marker = json.loads(bytes(found.data))
            kind, number = marker["kvfs"], marker["format"]
            keys = marker["keys"][-KEY_IDS_MAX:] if number == ENCRYPTED_FORMAT else []
            ids = [str(key)[:KEY_ID_DIGITS_MAX] for key in keys]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise FormatError(f"{self.url}: {MARKER} is damaged, or not of kvfs: choose another prefix") from None
        if kind != "remote" or number not in (FORMAT, ENCRYPTED_FORMAT) or (number == ENCRYPTED_FORMAT and not ids):
            raise FormatError(
                f"{self.url} is of format {number!r}, this kvfs knows {FORMAT} and {ENCRYPTED_FORMAT}: use the kvfs "
                "that wrote it, or another prefix"
            )
        return ids

    def _check_keys(self, ids: list[str]) -> None:
        """ConfigError unless this host reads and writes what the others do: nothing is read as plain that should be
        encrypted, and nothing plain is added to what is encrypted."""
        if self.keys is None and ids:
            raise ConfigError(f"{self.url} is encrypted, with key {ids[-1]!r}: name its file in remote.key_file")
        if self.keys is not None and not ids:
            raise ConfigError(
                f"{self.url} is not encrypted, and remote.key_file is set: choose another prefix, or unset it"
            )
        if self.keys is not None and not self.keys.ids.intersection(ids):
            raise ConfigError(
                f"{self.url} is encrypted with key {ids[-1]!r}, and remote.key_file has "
                f"{', '.join(sorted(self.keys.ids))}: name the file with the right key, or choose another prefix"
            )

    def prepare(self) -> None:
        """Write the marker if it is missing, or lacks the key that encrypts. ConfigError if there are objects of
        another program, or as of ``is_ready``."""
        if not self.is_ready():
            self.refuse_foreign()
            if self.stored.put_new(MARKER, self._marked([])):
                self._ids = [self.keys.current.id.hex()] if self.keys is not None else []
                self._asked = time.monotonic(), True
            else:  # another host was faster, perhaps with other keys
                self._asked = None
                self.is_ready()
        ids = self._ids
        if self.keys is not None and ids and self.keys.current.id.hex() not in ids:
            self.stored.replace(MARKER, self._marked(ids))  # of two hosts at once, the next push adds the other's key

    def _marked(self, ids: list[str]) -> bytes:
        """The marker of a bucket that had these keys until now."""
        marker: dict[str, Any] = {"kvfs": "remote", "format": FORMAT}
        if self.keys is not None:
            marker["format"] = ENCRYPTED_FORMAT
            marker["keys"] = [*ids, self.keys.current.id.hex()][-KEY_IDS_MAX:]
        return json.dumps(marker).encode()

    def check_marked(self) -> None:
        """ConfigError for a bucket without a marker; whatever its keys are, for what goes by names alone."""
        if self._marker() is None:
            raise ConfigError(f"{self.url} holds no pages of kvfs: kvfs push stores some; else check remote.url")

    def refuse_foreign(self) -> None:
        """ConfigError if the bucket holds objects of another program. A request or two."""
        foreign = list(itertools.islice(self.stored.listing(""), FOREIGN_LOOKED_AT))
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

    def announcements(self, shape: Shape, descriptor: bytes) -> list[tuple[str, bytes]]:
        """The small objects by which readers find the pages of a shape; those that this object has not seen there."""
        wanted = ((f"{folder_of(shape.described)}namespace", descriptor), (shape.marker, b""))
        return [(name, data) for name, data in wanted if name not in self._said]

    def announce(self, described: Described, name: str, data: bytes) -> None:
        """Store an announcement, unless it is there. A descriptor that does not verify is replaced, and while keys
        rotate each one is: else it would be lost with the old key."""
        if not self.objects.put_new(name, data) and data:
            self._described.pop((described.salt or OPEN, described.digest), None)
            rotates = self.keys is not None and len(self.keys.all) > 1
            if rotates or self.described(described.salt or OPEN, described.digest) is None:
                self.objects.replace(name, data)
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

    def shapes_before(self, described: Described) -> list[Shape]:
        """What ``shapes`` said last, of this bucket or of one that it is again: a guess, without a request."""
        return self._listed.get(described.digest, (0.0, []))[1]

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

    def listing(self, prefix: str = "", *, stored: bool = False) -> Iterator[tuple[Listed, Parsed | None]]:
        """All objects below ``prefix`` but the marker, as this host reads them, or as they are ``stored``; None for
        what kvfs did not name."""
        for found in (self.stored if stored else self.objects).listing(prefix):
            if found.name != MARKER:
                yield found, parse_name(found.name)
