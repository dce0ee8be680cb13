"""S3, GCS and Azure through obstore, whose core is the Rust crate object_store. The only module that imports it.

Credentials come from where the client of each provider looks for them: environment variables, files, the metadata
service of the machine. kvfs stores none. An S3-compatible gateway is named by ``AWS_ENDPOINT_URL``; without TLS it
also needs ``AWS_ALLOW_HTTP=true``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from kvfs.directory.config import switch
from kvfs.errors import ConfigError
from kvfs.remote import aws_credentials_file
from kvfs.remote.object_store import Fetched, Listed, RemoteError

T = TypeVar("T")
RETRIES = 3  # of a request that failed in a way that may pass; object_store's own default is 10 in three minutes
CONNECT_SECONDS = 5.0  # to connect, or the time of the whole request if that is less
BACKOFF_SECONDS, BACKOFF_SECONDS_MAX = 0.1, 2.0  # before the first retry, and at most
CHUNK_BYTES = 256 << 10  # of an answer that are copied at once, while they are in the processor's caches
LIST_CHUNK = 1000  # objects of one request of a listing: what S3 gives at most
_SCHEMES = ("s3", "gs", "az", "memory")
_DEBUG = "\n\nDebug source:"  # after it an error repeats itself as a Rust structure
MESSAGE_MAX = 300  # characters of an error that are shown


class ObstoreClient:
    """The objects below a URL: ``s3://BUCKET/PREFIX``, ``gs://...``, ``az://ACCOUNT/CONTAINER/PREFIX``.

    A request ends after ``timeout`` seconds, and is retried at most ``retries`` times within as long again.
    """

    def __init__(self, url: str, *, timeout: float, retries: int) -> None:
        scheme = url.partition("://")[0]
        if scheme not in _SCHEMES:
            raise ConfigError(f"remote.url is {url!r}: give s3://BUCKET/PREFIX, gs://, az:// or file:///DIRECTORY")
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import from_url
        except ImportError:
            raise ConfigError(f"{url} needs the package obstore: pip install 'kvfs[remote]'") from None
        self._api: Any = obstore
        self._errors: Any = exceptions
        self._url = url
        options: dict[str, Any] = {}
        if scheme != "memory":
            options = {
                "client_options": {
                    "timeout": timedelta(seconds=timeout),
                    "connect_timeout": timedelta(seconds=min(timeout, CONNECT_SECONDS)),
                    # obstore reads it itself only where it is given no other option of the client
                    "allow_http": switch("AWS_ALLOW_HTTP", os.environ.get("AWS_ALLOW_HTTP")),
                },
                "retry_config": {
                    "max_retries": retries,
                    "retry_timeout": timedelta(seconds=timeout),
                    "backoff": {
                        "init_backoff": timedelta(seconds=BACKOFF_SECONDS),
                        "max_backoff": timedelta(seconds=BACKOFF_SECONDS_MAX),
                        "base": 2,
                    },
                },
            }
        if scheme == "s3" and (provider := aws_credentials_file.provider(os.environ)) is not None:
            options["credential_provider"] = provider
        try:
            self._store: Any = from_url(url, **options)
        except (exceptions.BaseError, ValueError, TypeError) as exc:
            raise ConfigError(f"remote.url is {url!r}: {_first_line(exc)}") from None

    def get(
        self, name: str, start: int, length: int, room: memoryview | None = None,
        arrived: Callable[[int], None] | None = None,
    ) -> Fetched | None:  # fmt: skip
        def fetch() -> Fetched:
            got = self._api.get(self._store, name, options={"range": (start, start + length)})
            size = int(got.meta["size"])
            if room is None:
                return Fetched(memoryview(got.bytes())[:length], size)
            done = 0
            for chunk in got.stream(min_chunk_size=CHUNK_BYTES):
                piece = memoryview(chunk)[: length - done]
                room[done : done + len(piece)] = piece
                done += len(piece)
                if arrived is not None:
                    arrived(done)
            return Fetched(room[:done], size)

        return self._call(name, fetch, missing=None)

    def put_new(self, name: str, data: memoryview | bytes) -> bool:
        def put() -> bool:
            try:
                self._api.put(self._store, name, data, mode="create", use_multipart=False)
            except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
                return False
            return True

        return self._call(name, put)

    def replace(self, name: str, data: memoryview | bytes) -> None:
        self._call(name, lambda: self._api.put(self._store, name, data, use_multipart=False))

    def delete(self, name: str) -> None:
        self._call(name, lambda: self._api.delete(self._store, name), missing=None)

    def listing(self, prefix: str) -> Iterator[Listed]:
        stream = self._call(prefix, lambda: iter(self._api.list(self._store, prefix or None, chunk_size=LIST_CHUNK)))
        while True:
            chunk: list[Any] | None = self._call(prefix, lambda: next(stream, None))
            if chunk is None:
                return
            for found in chunk:
                yield Listed(str(found["path"]), int(found["size"]), found["last_modified"].timestamp())

    def folders(self, prefix: str) -> list[str]:
        found = self._call(prefix, lambda: self._api.list_with_delimiter(self._store, prefix or None))
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    def close(self) -> None:
        self._store = None

    def _call(self, name: str, function: Callable[[], T], **missing: T) -> T:
        """The result of a request; ``missing`` if there is no such object. RemoteError for everything else."""
        try:
            return function()
        except FileNotFoundError as exc:
            if "missing" in missing and "NoSuchBucket" not in str(exc):
                return missing["missing"]
            raise RemoteError(f"{self._url}: {_first_line(exc)}; is the bucket there?") from None
        except (self._errors.BaseError, OSError) as exc:
            raise RemoteError(f"{self._url}: {self._remedy(exc)}{_first_line(exc)}") from None

    def _remedy(self, exc: Exception) -> str:
        text = str(exc)
        if "RequestTimeTooSkewed" in text:
            return "the clock of this host and that of the object store differ too much: "
        if "ExpiredToken" in text:
            return "the credentials have expired: "
        if isinstance(exc, (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError)):
            return "the credentials of the environment are refused: "
        if "CredentialProvider" in text or "InstanceCredentials" in text or "MissingCredentials" in text:
            return "no credentials in the environment (AWS_ACCESS_KEY_ID and the like): "
        if "builder error" in text or "BadScheme" in text or "URL scheme is not allowed" in text:
            return "an endpoint without TLS needs AWS_ALLOW_HTTP=true: "
        return ""


def _first_line(exc: Exception) -> str:
    text = " ".join(str(exc).partition(_DEBUG)[0].split())
    return text if len(text) <= MESSAGE_MAX else f"{text[:MESSAGE_MAX]}..."
