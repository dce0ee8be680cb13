"""Which object store a URL names."""

from __future__ import annotations

from kvfs.directory.config import Remote
from kvfs.errors import ConfigError
from kvfs.remote.object_store import ObjectStore


def open_object_store(remote: Remote, *, timeout: float | None = None, retries: int | None = None) -> ObjectStore:
    """The object store of the settings. ``timeout`` (seconds) and ``retries`` replace those of the settings.

    ConfigError if none is set, if the URL is refused, or if the package for it is missing.
    """
    if not remote.url:
        raise ConfigError("no bucket is set: kvfs config set remote.url s3://BUCKET/PREFIX")
    seconds = remote.timeout_seconds if timeout is None else timeout
    if remote.url.startswith("file://"):
        from kvfs.remote.directory_store import DirectoryStore

        return DirectoryStore(remote.url[len("file://") :])
    from kvfs.remote.obstore_client import RETRIES, ObstoreClient

    return ObstoreClient(remote.url, timeout=seconds, retries=RETRIES if retries is None else retries)
