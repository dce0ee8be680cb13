"""Which object store a URL names, and the bucket that the settings name."""

from __future__ import annotations

from kvfs.directory.config import Remote
from kvfs.errors import ConfigError
from kvfs.remote.bucket import Bucket
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


def open_bucket(
    remote: Remote, *, keyless: bool = False, fresh_seconds: float = 0.0, timeout: float | None = None,
    retries: int | None = None,
) -> Bucket:  # fmt: skip
    """The bucket of the settings. ``keyless``: for what goes by names alone, whether there is a key or not. The caller
    closes its ``objects``.

    ConfigError as of ``open_object_store``, and for a file with keys that is missing or refused.
    """
    keys = None
    if remote.key_file and not keyless:
        from kvfs.remote.encryption import read_keys

        keys = read_keys(remote.key_file)
    objects = open_object_store(remote, timeout=timeout, retries=retries)
    return Bucket(objects, remote.url, keys=keys, fresh_seconds=fresh_seconds)
