"""What kvfs needs of an object store: seven calls. ``kvfs.testing.ObjectStoreContract`` tests an implementation.

Names are ASCII, with ``/`` between their components. An object is small enough for one request and one piece of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from kvfs.errors import KvfsError


class RemoteError(KvfsError):
    """The object store did not do what it was asked, after all retries. What it held before, it still holds."""


class Fetched(NamedTuple):
    """Bytes of an object from an offset on, and the size of the whole object. Untrusted."""

    data: memoryview
    size: int


class Listed(NamedTuple):
    """An object in a listing; ``modified`` in seconds since 1970, by the clock of the object store."""

    name: str
    size: int
    modified: float


class ObjectStore(Protocol):
    """A bucket, or a part of one. Thread-safe. Each call ends within a deadline of its own; all raise RemoteError."""

    def get(
        self, name: str, start: int, length: int, room: memoryview | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> Fetched | None:  # fmt: skip
        """Up to ``length`` (1 or more) bytes from offset ``start`` on; None if there is no such object.

        ``room``: memory of ``length`` bytes or more that the answer may be put in. ``arrived``: may be called now and
        then with the number of bytes that are there so far.

        Fewer than asked for only at the end of the object, or if the body was cut short: compare with ``size``.
        """

    def put_new(self, name: str, data: memoryview | bytes) -> bool:
        """Store an object that is not there yet, atomically; False if there is one by that name, which stays."""

    def replace(self, name: str, data: memoryview | bytes) -> None:
        """Store an object in place of the one by that name, atomically."""

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if there is none."""

    def listing(self, prefix: str) -> Iterator[Listed]:
        """All objects whose names begin with the components ``prefix`` ("" or one that ends with /), in any order."""

    def folders(self, prefix: str) -> list[str]:
        """The distinct components that follow ``prefix`` (as of ``listing``) in names that have more after them."""

    def close(self) -> None: ...
