"""What an operator asks of a bucket: what is in it, whether it verifies, and the removal of what is old or unwanted.

An object may be removed at any time: a host that has just found it gets a shorter prefix. So nothing here waits for
other hosts. Objects that kvfs did not name are counted and never removed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvfs.pages.identity import Described
from kvfs.remote.bucket import Bucket
from kvfs.remote.names import Parsed, Shape, folder_of
from kvfs.remote.object_store import Listed, RemoteError
from kvfs.remote.page_object import HEAD_BYTES, covered, decode

PROBLEMS_MAX = 100  # lines of a report


@dataclass
class RemoteNamespace:
    """What a bucket holds of one namespace."""

    described: Described
    objects: int = 0
    nbytes: int = 0
    oldest: float = 0.0  # seconds since 1970, by the clock of the object store
    newest: float = 0.0


@dataclass
class Checked:
    """What a verification of a bucket found. ``bad`` objects did not verify, ``removed`` of them are gone now;
    ``failed`` could not be read; ``foreign`` are not of kvfs."""

    objects: int = 0
    pages: int = 0
    nbytes: int = 0
    bad: int = 0
    removed: int = 0
    failed: int = 0
    foreign: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)


@dataclass
class Removed:
    """Objects with pages that were removed, or would be. ``used`` of those that are ``kept`` were uploaded before the
    retention, and used since."""

    objects: int = 0
    nbytes: int = 0
    kept: int = 0
    used: int = 0


def namespaces(bucket: Bucket) -> list[RemoteNamespace]:
    """What the bucket holds, by name."""
    found = [_sums(bucket, described) for described in bucket.namespaces()]
    return sorted(found, key=lambda n: (n.described.name, n.described.revision, n.described.digest))


def _sums(bucket: Bucket, described: Described) -> RemoteNamespace:
    info = RemoteNamespace(described)
    for listed, _ in bucket.listing(f"{folder_of(described)}pages/", stored=True):
        info.objects += 1
        info.nbytes += listed.size
        info.oldest = min(info.oldest or listed.modified, listed.modified)
        info.newest = max(info.newest, listed.modified)
    return info


def verify(
    bucket: Bucket, *, repair: bool, requests: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Checked:  # fmt: skip
    """Read and verify every object. ``repair`` removes those that do not verify. ``progress``: (objects, all)."""
    report = Checked()
    listed: list[tuple[Listed, Parsed]] = []
    for found, name in bucket.listing():
        if name is None or (name.sealed and name.has_pages):
            report.foreign += 1
            report.note(f"{found.name}: " + ("not an object of kvfs" if name is None else "of a key that is not here"))
        elif name.has_pages:
            listed.append((found, name))

    def check(item: tuple[Listed, Parsed]) -> tuple[Listed, int, str, bool]:
        """(object, pages, what is wrong, whether that is sure)."""
        found, name = item
        try:
            pages, why = _check(bucket, found, name)
        except RemoteError as exc:
            return found, 0, str(exc), False
        return found, pages, why, True

    with ThreadPoolExecutor(requests, "kvfs-verify") as pool:
        try:
            for first in range(0, len(listed), requests):
                for found, pages, why, sure in pool.map(check, listed[first : first + requests]):
                    report.objects += 1
                    report.pages += pages
                    report.nbytes += found.size
                    report.bad += bool(why) and sure
                    report.failed += bool(why) and not sure
                    if why:
                        report.note(f"{found.name}: {why}")
                    if why and sure and repair:
                        bucket.objects.delete(found.name)
                        report.removed += 1
                progress(report.objects, len(listed))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return report


def _check(bucket: Bucket, listed: Listed, name: Parsed) -> tuple[int, str]:
    """(pages that verify, what is wrong with the object)."""
    described = bucket.described(name.tenant, name.digest)
    shape = Shape.of(described, name.group, name.part) if described is not None else None
    if described is None and bucket.keys is not None:  # its name is of a key that is here: no reason to remove it
        raise RemoteError("the descriptor of its namespace is missing, or of a key that is not here")
    if shape is None:
        return 0, "its namespace is missing, or has no such group and part"
    found = bucket.objects.get(listed.name, 0, shape.object_bytes_max)
    if found is None:  # removed meanwhile
        return 0, ""
    if len(found.data) != found.size:
        if found.size > shape.object_bytes_max:
            return 0, "too large"
        raise RemoteError(f"{len(found.data)} of {found.size} bytes came")
    pages = decode(found.data, shape, name.chunk)
    entries = covered(found.data[:HEAD_BYTES], shape, name.chunk)
    return len(pages), "" if entries is not None and len(pages) == len(entries) else "does not verify"


def collect(bucket: Bucket, before: float, *, apply: bool, by_use: bool = False) -> Removed:
    """Remove the objects with pages that were uploaded, and with ``by_use`` not used since, before ``before`` (seconds
    since 1970), or only count them.

    With ``by_use`` the names of a namespace's old objects are in memory at once: about 300 bytes each.
    """
    done = Removed()
    for tenant in bucket.stored.folders(""):
        for digits in bucket.stored.folders(f"{tenant}/"):
            _collect(bucket, f"{tenant}/{digits}/", before, done, apply=apply, by_use=by_use)
    return done


def _collect(bucket: Bucket, folder: str, before: float, done: Removed, *, apply: bool, by_use: bool) -> None:
    old: list[tuple[Listed, Parsed]] = []

    def remove(listed: Listed) -> None:
        if apply:
            bucket.stored.delete(listed.name)
        done.objects += 1
        done.nbytes += listed.size

    for listed, name in bucket.listing(f"{folder}pages/", stored=True):
        if name is None or not name.has_pages:
            continue
        if listed.modified >= before:
            done.kept += 1
        elif by_use:
            old.append((listed, name))
        else:
            remove(listed)
    used = set[tuple[bytes, bytes]]()
    for listed, name in bucket.listing(f"{folder}used/", stored=True):  # after the objects: also what was just used
        if name is None or name.kind != "used":
            continue
        if listed.modified >= before:
            used.add((name.place, name.chunk))
        elif apply:
            bucket.stored.delete(listed.name)
    for listed, name in old:
        if (name.place, name.chunk) in used:
            done.kept += 1
            done.used += 1
        else:
            remove(listed)


def remove(bucket: Bucket, described: Described, *, apply: bool) -> Removed:
    """Remove a namespace, or only count its objects."""
    done = _remove(bucket, folder_of(described), apply=apply)
    if apply:
        bucket.forget(described)
    return done


def remove_tenant(bucket: Bucket, tenant: str, *, apply: bool) -> Removed:
    """Remove all namespaces of a salt, by its digest as in names, or only count their objects."""
    return _remove(bucket, f"{tenant}/", apply=apply)


def _remove(bucket: Bucket, prefix: str, *, apply: bool) -> Removed:
    done = Removed()
    for listed, name in bucket.listing(prefix, stored=True):
        if name is None:
            continue
        if apply:
            bucket.stored.delete(listed.name)
        done.objects += name.has_pages
        done.nbytes += listed.size
    return done
