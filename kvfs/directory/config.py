"""Settings that belong to a store (``kvfs.toml``): every process that opens it sees the same limits."""

from __future__ import annotations

import os
import re
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvfs.errors import ConfigError
from kvfs.format.checksums import checksum
from kvfs.format.codec import CODECS
from kvfs.format.codec import parse as parse_codec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CAPACITY_MIN = 16 * MIB
SEGMENT_MIN, SEGMENT_MAX = 256 * KIB, 4 * GIB
SEGMENTS_MIN = 8  # segments that must fit into the capacity
INDEX_MIN, INDEX_MAX = 2 * MIB, 64 * GIB
OVERHEAD_BYTES = 1 * MIB  # reserved for small files: super, settings, access times, liveness, LMDB's second file
PIN_FILES_SHARE = 1024  # one in so many bytes of the capacity is reserved for the files of pins
PROCESS_FILES_SHARE = 16384  # and one in so many for those of processes
COUNT_FILES_SHARE = 8192  # and one in so many for counts by namespace and the event log
DURATION_MAX = 1e12  # seconds
TOML_BYTES_MAX = 256 * KIB  # of kvfs.toml
DOTS_MAX = 100  # of a line: tomllib's time for a dotted key grows with the square of its parts
SYNC_LEVELS = ("cache", "batch", "sync")
REMOTE_REQUESTS, REMOTE_REQUESTS_MAX = 8, 64
REMOTE_SECONDS = 30.0  # for a request of up to 16 MiB: less than 5 Mbit/s is away
REMOTE_RATE_MIN = 100_000  # bytes per second
REMOTE_RETENTION_MIN = 3600.0  # seconds: clocks of hosts and object stores may differ by that much
REMOTE_UNUSED_MIN = 2 * 86_400.0  # seconds, of a retention by use: uses are noted once a day
READ_THROUGH = ("on", "off")
UPLOADS = ("off", "pinned", "reused", "all")
RETENTION_FROM = ("upload", "use")
MODES = ("cache", "staging", "memory")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": KIB, "mi": MIB, "gi": GIB, "ti": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([kmgt]i?)?b?\s*\Z", re.IGNORECASE)
_DURATION = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(s|m|h|d|w)?\s*\Z", re.IGNORECASE)
_AT_LINE = re.compile(r"\(at (?:the end, )?line ([0-9]{1,9})[,)]")  # in messages of tomllib, or of ours for its end
_REMOTE_URL = re.compile(r"(?:(?:s3|gs|az|memory)://|file:///)[^\s?#]*\Z")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def _show(value: object) -> str:
    """A short repr, since messages quote untrusted values."""
    try:
        return "a huge integer" if type(value) is int and value.bit_length() > 64 else reprlib.repr(value)
    except ValueError:  # a list with an integer of thousands of digits
        return f"a {type(value).__name__} with a huge integer"


def parse_size(value: int | str, what: str = "size") -> int:
    """Bytes of ``200G``, ``1.5TiB``, ``8388608``: decimal without the i, binary with it."""
    size = -1
    if isinstance(value, str) and (match := _SIZE.match(value)) is not None:
        unit = _UNITS[(match[2] or "").lower()]
        size = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    elif type(value) is int:
        size = value
    if not 0 <= size < 1 << 62:
        raise ConfigError(f"{what} is {_show(value)}: give bytes or a text like '200GiB', '1.5T'")
    return size


def parse_duration(value: float | str, what: str = "duration") -> float:
    """Seconds of ``30d``, ``12h``, ``90``."""
    seconds = -1.0
    if isinstance(value, str) and (match := _DURATION.match(value)) is not None:
        seconds = float(match[1]) * _SECONDS[(match[2] or "").lower()]
    elif type(value) is float or (type(value) is int and value < 1 << 53):
        seconds = float(value)
    if not 0 <= seconds < DURATION_MAX:
        raise ConfigError(f"{what} is {_show(value)}: give seconds or a text like '12h', '30d'")
    return seconds


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one class of pages: those of a namespace, by its name, or of a tenant, by its salt."""

    guaranteed_bytes: int = 0
    cap_bytes: int | None = None
    ttl_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Remote:
    """The bucket that this store shares with others; ``url`` is empty for none."""

    url: str = ""
    requests: int = REMOTE_REQUESTS  # under way at once; also the objects in memory
    timeout_seconds: float = REMOTE_SECONDS  # of one request; its retries take as long again
    retention_seconds: float | None = None  # ``kvfs remote gc`` removes what is older; None: nothing
    retention_from: str = "upload"  # since when: the upload, or the last "use" that a host has noted
    read_through: str = "on"  # engines pull what a prompt lacks here while its request waits; or "off"
    upload: str = "off"  # what goes there in the background: "all", "reused" (pages that were read since), "pinned"
    upload_rate: int | None = None  # bytes per second of those uploads; None: as fast as they go
    codec: str = "raw"  # in which pages go there that are stored raw here
    key_file: str = ""  # keys that objects are encrypted with; empty: they are plain


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in kvfs.toml. Sizes in bytes."""

    capacity_bytes: int
    segment_bytes: int
    index_bytes: int
    sync: str = "cache"
    mode: str = "cache"
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    codec: str = "raw"  # default of namespaces
    bundle_key: str = ""  # key file: only bundles that are signed with it are imported
    remote: Remote = field(default_factory=Remote)

    @property
    def segments_bytes_max(self) -> int:
        """What all segments may have allocated: the capacity minus the index and small files."""
        shares = (PIN_FILES_SHARE, PROCESS_FILES_SHARE, COUNT_FILES_SHARE)
        small = sum(self.capacity_bytes // share for share in shares)
        return self.capacity_bytes - self.index_bytes - OVERHEAD_BYTES - small

    @property
    def pin_files_bytes(self) -> int:
        """What the files of all pins may have allocated: a quarter of the overhead, and a share of the capacity."""
        return OVERHEAD_BYTES // 4 + self.capacity_bytes // PIN_FILES_SHARE

    @property
    def process_files_bytes(self) -> int:
        """What the files of all processes may have allocated: half the overhead, and a share of the capacity."""
        return OVERHEAD_BYTES // 2 + self.capacity_bytes // PROCESS_FILES_SHARE

    @property
    def event_file_bytes(self) -> int:
        """Size of each of the two files of the event log, at most 1 MiB: both take 1/16384 of the capacity."""
        return min(MIB, 16 * KIB + self.capacity_bytes // 32768 // 4096 * 4096)

    @property
    def namespace_slot_bytes(self) -> int:
        """Size of each of the two slots of the counts by namespace, at most 256 KiB."""
        return min(256 * KIB, 16 * KIB + self.capacity_bytes // 65536 // 4096 * 4096)

    @property
    def reserve_bytes(self) -> int:
        """Standing reserve that only eviction may use, to relocate hot pages."""
        return 2 * self.segment_bytes


def store_path(path: object) -> str:
    """The ``path`` argument of ``open`` as text."""
    try:
        where = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"path is {type(path).__name__}: pass the directory of the store") from None
    if not where:
        raise ConfigError("path is empty: pass the directory of the store")
    if "\0" in where:
        raise ConfigError(f"path is {where!r}: no file system accepts a name with a zero byte")
    return where


def default_path() -> str:
    """The store of a user who names none: ``$XDG_CACHE_HOME/kvfs``, else ``~/.cache/kvfs``."""
    path = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvfs")
    if not os.path.isabs(path):
        raise ConfigError("no path given, and neither KVFS_DIR nor HOME is set: pass the directory of the store")
    return path


def switch(name: str, value: str | None) -> bool:
    """Whether an environment variable is switched on."""
    text = (value or "").strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(f"{name} is {value!r}: set it to 1 or 0")


def quota_id(name: str) -> bytes:
    """First 8 bytes of the class of the segments that hold a quota's pages."""
    return checksum(name.encode()).to_bytes(8, "little")


def make_settings(
    capacity: int | str,
    *,
    segment: int | str | None = None,
    index: int | str | None = None,
    sync: str = "cache",
    mode: str = "cache",
    quotas: Mapping[str, Quota] | None = None,
    codec: str = "raw",
    bundle_key: str = "",
    remote: Remote | None = None,
) -> Settings:
    """Settings with defaults filled in and everything checked."""
    total = parse_size(capacity, "capacity")
    if total < CAPACITY_MIN:
        raise ConfigError(f"capacity is {total} bytes: a store needs at least {CAPACITY_MIN} (16MiB)")
    if segment is None:
        segment_bytes = min(256 * MIB, max(SEGMENT_MIN, total // 512))
    else:
        segment_bytes = parse_size(segment, "segment_bytes")
    index_bytes = min(INDEX_MAX, max(INDEX_MIN, total // 128)) if index is None else parse_size(index, "index_bytes")
    if not SEGMENT_MIN <= segment_bytes <= SEGMENT_MAX:
        raise ConfigError(f"segment_bytes is {segment_bytes}: choose between {SEGMENT_MIN} and {SEGMENT_MAX}")
    if not INDEX_MIN <= index_bytes <= INDEX_MAX:
        raise ConfigError(f"index_bytes is {index_bytes}: choose between {INDEX_MIN} and {INDEX_MAX}")
    segment_bytes, index_bytes = segment_bytes // 4096 * 4096, index_bytes // 4096 * 4096
    if total - index_bytes - OVERHEAD_BYTES < SEGMENTS_MIN * segment_bytes:
        raise ConfigError(
            f"capacity {total} is too small for segments of {segment_bytes} bytes: at least eight of them and "
            f"the index ({index_bytes}) must fit; raise capacity, or lower segment_bytes or index_bytes"
        )
    if sync not in SYNC_LEVELS:
        raise ConfigError(f"sync is {sync!r}: choose one of {', '.join(SYNC_LEVELS)}")
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}: choose one of {', '.join(MODES)}")
    if mode == "memory" and sync != "cache":
        raise ConfigError(
            f'sync is "{sync}", and in mode "memory" nothing survives a loss of power: write sync = "cache", or choose '
            "another mode"
        )
    parse_codec(codec)
    if bundle_key and not (os.path.isabs(bundle_key) and bundle_key.isprintable()):
        raise ConfigError(f"bundle_key is {_show(bundle_key)}: give the absolute path of a key file, or nothing")
    remote = remote or Remote()
    _check_remote(remote)
    if quotas is not None and not isinstance(quotas, Mapping):
        raise ConfigError(f"quotas is {_show(quotas)}: map names of namespaces to kvfs.Quota")
    quotas = {name: _checked(name, quota) for name, quota in (quotas or {}).items()}
    guaranteed = sum(q.guaranteed_bytes for q in quotas.values())
    if guaranteed > total // 2:
        raise ConfigError(
            f"quotas guarantee {guaranteed} bytes in sum: at most half the capacity ({total // 2}) can be promised"
        )
    return Settings(total, segment_bytes, index_bytes, sync, mode, quotas, codec, bundle_key, remote)


def parse_document(data: bytes, path: str) -> dict[str, Any]:
    """The content of a TOML file; its values are not checked."""
    if any(line.count(b".") > DOTS_MAX for line in data.splitlines()):
        raise ConfigError(f"{path}: a line has more than {DOTS_MAX} dots; correct the file")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as exc:  # not only TOMLDecodeError: integers of thousands of digits
        problem, lines = str(exc), data.rstrip().split(b"\n")
        problem = problem.replace("(at end of document)", f"(at the end, line {len(lines)})")  # of a string or a list
        number = _AT_LINE.search(problem)
        at = int(number[1]) - 1 if number is not None else len(lines)
        shown = f" ({_show(lines[at].decode('utf-8', 'replace').strip())})" if at < len(lines) else ""
        raise ConfigError(f'{path}: {problem}{shown}; correct the file: lines look like capacity = "200GiB"') from None


def parse_toml(data: bytes, path: str) -> Settings:
    """Settings of a kvfs.toml; ConfigError names the line or key."""
    document = parse_document(data, path)
    known = {"capacity", "segment_bytes", "index_bytes", "sync", "mode", "codec", "bundle_key", "quota", "remote"}
    unknown = sorted(set(document) - known)
    if unknown:
        raise ConfigError(f"{path}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
    if "capacity" not in document:
        raise ConfigError(f'{path}: capacity is missing; add capacity = "200GiB"')
    return make_settings(
        document["capacity"],
        segment=document.get("segment_bytes"),
        index=document.get("index_bytes"),
        sync=_text(document, "sync", path),
        mode=_text(document, "mode", path),
        codec=_text(document, "codec", path, "raw"),
        bundle_key=_text(document, "bundle_key", path, ""),
        quotas=_parse_quotas(document.get("quota", {}), path),
        remote=_parse_remote(document.get("remote", {}), path),
    )


def _check_remote(remote: Remote) -> None:
    url = remote.url
    if url and not (_REMOTE_URL.match(url) and url.isprintable() and url.isascii()):
        raise ConfigError(
            f"remote.url is {_show(url)}: give s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
            "az://ACCOUNT/CONTAINER/PREFIX or file:///DIRECTORY, or nothing"
        )
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ConfigError(
            "remote.url has credentials in it, which every reader of kvfs.toml would see: use the environment"
        )
    if type(remote.requests) is not int or not 1 <= remote.requests <= REMOTE_REQUESTS_MAX:
        raise ConfigError(f"remote.requests is {_show(remote.requests)}: choose 1 to {REMOTE_REQUESTS_MAX}")
    if not 0.1 <= remote.timeout_seconds <= 600:
        raise ConfigError(f"remote.timeout is {remote.timeout_seconds} s: choose between 0.1s and 10m")
    if remote.retention_seconds is not None and remote.retention_seconds < REMOTE_RETENTION_MIN:
        raise ConfigError(f"remote.retention is {remote.retention_seconds} s: choose at least 1h")
    if remote.retention_from == "use" and (remote.retention_seconds or REMOTE_UNUSED_MIN) < REMOTE_UNUSED_MIN:
        raise ConfigError(
            f"remote.retention is {remote.retention_seconds} s: choose at least 2d with remote.retention_from use, "
            "since uses are noted once a day"
        )
    if remote.key_file and not (os.path.isabs(remote.key_file) and remote.key_file.isprintable()):
        raise ConfigError(f"remote.key_file is {_show(remote.key_file)}: give an absolute path, or nothing")
    if remote.upload_rate is not None and remote.upload_rate < REMOTE_RATE_MIN:
        raise ConfigError(f"remote.upload_rate is {remote.upload_rate}: choose at least 100KB, per second")
    for name, value, known in (
        ("read_through", remote.read_through, READ_THROUGH),
        ("upload", remote.upload, UPLOADS),
        ("retention_from", remote.retention_from, RETENTION_FROM),
        ("codec", remote.codec, tuple(CODECS)),
    ):
        if value not in known:
            raise ConfigError(f"remote.{name} is {_show(value)}: choose one of {', '.join(known)}")


def _parse_remote(table: Any, path: str) -> Remote:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: remote must be a table [remote]")
    known = (
        "codec", "key_file", "read_through", "requests", "retention", "retention_from", "timeout", "upload",
        "upload_rate", "url",
    )  # fmt: skip
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ConfigError(f"{path}: remote has unknown key {unknown[0]!r}; known are {', '.join(known)}")
    retention, rate = table.get("retention", ""), table.get("upload_rate", "")
    return Remote(
        _text(table, "url", path, ""),
        table.get("requests", REMOTE_REQUESTS),
        parse_duration(table.get("timeout", REMOTE_SECONDS), "remote.timeout"),
        None if retention == "" else parse_duration(retention, "remote.retention"),
        _text(table, "retention_from", path, "upload"),
        _text(table, "read_through", path, "on"),
        _text(table, "upload", path, "off"),
        None if rate == "" else parse_size(rate, "remote.upload_rate"),
        _text(table, "codec", path, "raw"),
        _text(table, "key_file", path, ""),
    )


def _text(document: Mapping[str, Any], key: str, path: str, default: str = "cache") -> str:
    value = document.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{path}: {key} is {_show(value)}, not a text")
    return value


def _checked(name: object, quota: object) -> Quota:
    if not isinstance(name, str) or not isinstance(quota, Quota):
        raise ConfigError(f"quota {name!r} is {type(quota).__name__}: map names of namespaces to kvfs.Quota")
    return _quota(name, quota.guaranteed_bytes, quota.cap_bytes, quota.ttl_seconds)


def _quota(name: str, guaranteed: int | str, cap: int | str | None, ttl: float | str | None) -> Quota:
    return Quota(
        parse_size(guaranteed, f'quota "{name}" guaranteed'),
        None if cap is None else parse_size(cap, f'quota "{name}" cap'),
        None if ttl is None else parse_duration(ttl, f'quota "{name}" ttl'),
    )


def _parse_quotas(table: Any, path: str) -> dict[str, Quota]:
    if not isinstance(table, dict) or not all(isinstance(v, dict) for v in table.values()):
        raise ConfigError(f'{path}: quota must hold tables like [quota."name"]')
    quotas = {}
    for name, entry in table.items():
        unknown = sorted(set(entry) - {"guaranteed", "cap", "ttl"})
        if unknown:
            raise ConfigError(f'{path}: quota "{name}" has unknown key {unknown[0]!r}; known are guaranteed, cap, ttl')
        quotas[name] = _quota(name, entry.get("guaranteed", 0), entry.get("cap"), entry.get("ttl"))
    return quotas


def to_toml(settings: Settings) -> bytes:
    """The settings as the text of a kvfs.toml."""
    modes = "cache: the page cache is the host tier; staging: bypass it, always; memory: on tmpfs"
    lines = [
        '# Settings of this kvfs store; every process that opens it obeys them. Sizes in bytes or like "200GiB".',
        f"capacity = {settings.capacity_bytes}",
        f"segment_bytes = {settings.segment_bytes}",
        f"index_bytes = {settings.index_bytes}",
        f'sync = "{settings.sync}"    # cache: the kernel decides; batch: in the background; sync: before put returns',
        f'mode = "{settings.mode}"    # {modes}',
    ]
    if settings.codec != "raw":  # versions that know no codecs refuse the setting
        lines.append(f'codec = "{settings.codec}"')
    if settings.bundle_key:
        lines.append(f"bundle_key = {quoted(settings.bundle_key)}")
    if settings.remote.url:
        remote = settings.remote
        lines += ["", "[remote]", f"url = {quoted(remote.url)}", f"requests = {remote.requests}"]
        lines.append(f"timeout = {float(remote.timeout_seconds)!r}")
        if remote.retention_seconds is not None:
            lines.append(f"retention = {float(remote.retention_seconds)!r}")
        if remote.retention_from != "upload":
            lines.append(f"retention_from = {quoted(remote.retention_from)}")
        lines += [f"read_through = {quoted(remote.read_through)}", f"upload = {quoted(remote.upload)}"]
        if remote.upload_rate is not None:
            lines.append(f"upload_rate = {remote.upload_rate}")
        if remote.codec != "raw":
            lines.append(f"codec = {quoted(remote.codec)}")
        if remote.key_file:
            lines.append(f"key_file = {quoted(remote.key_file)}")
    for name, quota in sorted(settings.quotas.items()):
        lines += ["", f"[quota.{quoted(name)}]", f"guaranteed = {quota.guaranteed_bytes}"]
        if quota.cap_bytes is not None:
            lines.append(f"cap = {quota.cap_bytes}")
        if quota.ttl_seconds is not None:
            lines.append(f"ttl = {float(quota.ttl_seconds)!r}")
    return ("\n".join(lines) + "\n").encode()


def quoted(name: str) -> str:
    """A TOML basic string."""
    escaped = (f"\\u{ord(c):04x}" if c in '"\\' or ord(c) < 32 or ord(c) == 127 else c for c in name)
    return '"' + "".join(escaped) + '"'
