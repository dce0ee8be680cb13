"""The check of the bucket that the settings name. It ends within seconds, and the store works whatever it finds."""

from __future__ import annotations

from kvfs.directory import config_file
from kvfs.directory.root import Directory
from kvfs.doctor.findings import OK, WARN, Finding
from kvfs.errors import KvfsError
from kvfs.remote.reachable import problem
from kvfs.system.files import Files

REMEDY = "correct remote.url, remote.key_file or the credentials; until then lookups, loads and saves go on here"


def diagnose_bucket(path: str, files: Files) -> list[Finding]:
    """One finding; none without a bucket, or if the settings cannot be read, which is a finding of its own."""
    try:
        directory = Directory(path, files, read_only=True)
        try:
            remote = config_file.load(directory).remote
        finally:
            directory.close()
    except (OSError, KvfsError):
        return []
    if not remote.url:
        return []
    data = {"url": remote.url}
    found = problem(remote)
    if found:
        return [Finding("bucket", WARN, found, REMEDY, data)]
    return [Finding("bucket", OK, f"{remote.url} answers", "", data)]
