"""Settings that belong to a store (``kvfs.toml``): every process that opens it sees the same limits."""

from __future__ import annotations

import os
import re
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvfs.errors import ConfigError, NoSpaceError
from kvfs.format.checksums import checksum
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
DURATION_MAX = 1e12  # seconds
TOML_BYTES_MAX = 256 * KIB  # of kvfs.toml
DOTS_MAX = 100  # of a line: tomllib's time for a dotted key grows with the square of its parts
SYNC_LEVELS = ("cache", "batch", "sync")
MODES = ("cache", "staging", "memory")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": KIB, "mi": MIB, "gi": GIB, "ti": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([kmgt]i?)?b?\s*\Z", re.IGNORECASE)
_DURATION = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(s|m|h|d|w)?\s*\Z", re.IGNORECASE)
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

    @property
    def segments_bytes_max(self) -> int:
        """What all segments may have allocated: the capacity minus the index and small files."""
        return self.capacity_bytes - self.index_bytes - OVERHEAD_BYTES - self.capacity_bytes // PIN_FILES_SHARE

    @property
    def pin_files_bytes(self) -> int:
        """What the files of all pins may have allocated: a quarter of the overhead, and a share of the capacity."""
        return OVERHEAD_BYTES // 4 + self.capacity_bytes // PIN_FILES_SHARE

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
        raise ConfigError("no path given and KVFS_DIR is not set: pass the directory of the store")
    if "\0" in where:
        raise ConfigError(f"path is {where!r}: no file system accepts a name with a zero byte")
    return where


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
) -> Settings:
    """Settings with defaults filled in and everything checked."""
    total = parse_size(capacity, "capacity")
    if total < CAPACITY_MIN:
        raise NoSpaceError(f"capacity is {total} bytes: a store needs at least {CAPACITY_MIN} (16MiB)")
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
        raise NoSpaceError(
            f"capacity {total} is too small for segments of {segment_bytes} bytes: at least eight of them and "
            f"the index ({index_bytes}) must fit; raise capacity or lower segment_bytes"
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
    quotas = dict(quotas or {})
    for name, quota in quotas.items():
        if not isinstance(name, str) or not isinstance(quota, Quota):
            raise ConfigError(f"quota {name!r} is {type(quota).__name__}: map names of namespaces to kvfs.Quota")
    guaranteed = sum(q.guaranteed_bytes for q in quotas.values())
    if guaranteed > total // 2:
        raise ConfigError(
            f"quotas guarantee {guaranteed} bytes in sum: at most half the capacity ({total // 2}) can be promised"
        )
    return Settings(total, segment_bytes, index_bytes, sync, mode, quotas, codec, bundle_key)


def parse_document(data: bytes, path: str) -> dict[str, Any]:
    """The content of a TOML file; its values are not checked."""
    if any(line.count(b".") > DOTS_MAX for line in data.splitlines()):
        raise ConfigError(f"{path}: a line has more than {DOTS_MAX} dots; correct the file")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as exc:  # not only TOMLDecodeError: integers of thousands of digits
        raise ConfigError(f"{path}: {exc}; correct the file") from None


def parse_toml(data: bytes, path: str) -> Settings:
    """Settings of a kvfs.toml; ConfigError names the line or key."""
    document = parse_document(data, path)
    known = {"capacity", "segment_bytes", "index_bytes", "sync", "mode", "codec", "bundle_key", "quota"}
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
    )


def _text(document: Mapping[str, Any], key: str, path: str, default: str = "cache") -> str:
    value = document.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{path}: {key} is {_show(value)}, not a text")
    return value


def _parse_quotas(table: Any, path: str) -> dict[str, Quota]:
    if not isinstance(table, dict) or not all(isinstance(v, dict) for v in table.values()):
        raise ConfigError(f'{path}: quota must hold tables like [quota."name"]')
    quotas = {}
    for name, entry in table.items():
        unknown = sorted(set(entry) - {"guaranteed", "cap", "ttl"})
        if unknown:
            raise ConfigError(f'{path}: quota "{name}" has unknown key {unknown[0]!r}; known are guaranteed, cap, ttl')
        quotas[name] = Quota(
            parse_size(entry.get("guaranteed", 0), f'quota "{name}" guaranteed'),
            parse_size(entry["cap"], f'quota "{name}" cap') if "cap" in entry else None,
            parse_duration(entry["ttl"], f'quota "{name}" ttl') if "ttl" in entry else None,
        )
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
