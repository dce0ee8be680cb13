"""The identity of a namespace: everything that must match before bytes may be reused. Never TP or PP."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvfs.errors import ConfigError
from kvfs.format.segment import DESCRIPTOR_BYTES_MAX
from kvfs.pages.chunk_hash import tenant_seed
from kvfs.pages.layout import PageLayout

_MOVING = frozenset({"", "main", "master", "latest", "head", "trunk", "dev", "none", "null"})
_TEXT = re.compile(r"[!-~](?:[ -~]{0,254}[!-~])?\Z")
_DIGEST = re.compile(r"(?:[0-9a-f]{32})?\Z")  # of a salt; empty for none
_SALT = "salt:"  # begins the name of a tenant's quota, and so no name of a namespace
_FIELDS = ("kvfs", "name", "revision", "layout", "rope", "adapter", "salt", "epoch", "extra")


@dataclass(frozen=True)
class Identity:
    """What determines the bytes of a namespace. ``digest`` (32 bytes) covers all of it; ``seed`` starts the hash chain.

    ``revision`` is a weights digest or commit; a moving name is refused, since it does not determine the bytes.
    ``rope`` holds the effective RoPE parameters, ``adapter`` a digest of adapter content, ``salt`` a tenant's
    secret, ``epoch`` counts in-place changes of the weights, ``extra`` holds all else that changes KV in an engine.
    """

    name: str
    layout: PageLayout
    revision: str
    salt: str = field(default="", repr=False)
    rope: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = ""
    epoch: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    digest: bytes = field(init=False, compare=False, repr=False)
    seed: bytes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layout, PageLayout):
            raise ConfigError(f"layout is {type(self.layout).__name__}: pass a kvfs.PageLayout")
        for what in ("name", "revision"):
            value = getattr(self, what)
            if not isinstance(value, str) or not _TEXT.match(value):
                raise ConfigError(f"namespace {what} is {value!r}: pass 1 to 256 printable ASCII characters")
        if self.name.startswith(_SALT):
            raise ConfigError(f"namespace name is {self.name!r}: {_SALT} begins the quotas of tenants")
        if self.revision.lower() in _MOVING:
            raise ConfigError(
                f"revision is {self.revision!r}, a moving name: pass the commit or a digest of the weights, "
                "otherwise KV of other weights would be reused"
            )
        if not isinstance(self.salt, str) or not isinstance(self.adapter, str):
            raise ConfigError(
                "salt and adapter must be strings (a secret of the tenant; a digest of the adapter's content)"
            )
        if not isinstance(self.rope, Mapping) or not isinstance(self.extra, Mapping):
            raise ConfigError("rope and extra must map names to plain JSON data")
        if type(self.epoch) is not int or not 0 <= self.epoch < 2**63:
            raise ConfigError(f"epoch is {self.epoch!r}: pass a count of weight changes, 0 or more")
        packed = self.descriptor_bytes()
        if len(packed) > DESCRIPTOR_BYTES_MAX:
            raise ConfigError(
                f"the namespace descriptor has {len(packed)} bytes, at most {DESCRIPTOR_BYTES_MAX}: shorten extra"
            )
        object.__setattr__(self, "digest", digest_of(packed))
        object.__setattr__(self, "seed", tenant_seed(self.salt))

    def descriptor_bytes(self) -> bytes:
        """Canonical JSON that describes the namespace; the salt appears only as a digest."""
        body = {
            "kvfs": 1,
            "name": self.name,
            "revision": self.revision,
            "layout": self.layout.descriptor(),
            "rope": dict(self.rope),
            "adapter": self.adapter,
            "salt": salt_digest(self.salt),
            "epoch": self.epoch,
            "extra": dict(self.extra),
        }
        try:
            return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as exc:
            raise ConfigError(f"rope and extra must be plain JSON data: {exc}") from None


def salt_digest(salt: str) -> str:
    """32 hex digits: all that a store contains of a salt; empty for no salt."""
    try:
        secret = salt.encode()
    except UnicodeEncodeError as exc:
        raise ConfigError(f"salt is not Unicode text ({exc.reason}): decode it as UTF-8 first") from None
    return hashlib.blake2b(b"kvfs salt 1\n" + secret, digest_size=16).hexdigest() if secret else ""


def digest_of(descriptor: bytes) -> bytes:
    return hashlib.blake2b(b"kvfs namespace 1\n" + descriptor, digest_size=32).digest()


@dataclass(frozen=True)
class Described:
    """A namespace read from a store: untrusted bytes that passed every check."""

    digest: bytes
    name: str
    revision: str
    salt: str
    layout: PageLayout
    body: Mapping[str, Any]

    def is_named(self, ref: str) -> bool:
        """Whether ``ref`` is its name, name@revision (or its beginning), or 6 or more digits of its digest."""
        name, at, revision = ref.rpartition("@")
        digits = len(ref) >= 6 and self.digest.hex().startswith(ref)
        return ref == self.name or digits or (bool(at) and name == self.name and self.revision.startswith(revision))

    @property
    def label(self) -> str:
        """Name and the beginning of the revision."""
        return f"{self.name}@{self.revision[:8]}"


@functools.lru_cache(maxsize=64)  # a store has few layouts and may have many namespaces; checking one takes 0.4 ms
def _layout_of(descriptor: str) -> PageLayout:
    return PageLayout.from_descriptor(json.loads(descriptor))


def parse_descriptor(data: bytes) -> Described | None:
    """Parse a namespace descriptor from a segment or the index; None if it is invalid."""
    if len(data) > DESCRIPTOR_BYTES_MAX:
        return None
    try:
        body = json.loads(data)
        if not isinstance(body, dict) or set(body) != set(_FIELDS) or body["kvfs"] != 1:
            return None
        texts = (body["name"], body["revision"], body["salt"])
        rules = (_TEXT, _TEXT, _DIGEST)
        if not all(isinstance(t, str) and rule.match(t) for t, rule in zip(texts, rules, strict=True)):
            return None
        if body["name"].startswith(_SALT):
            return None
        layout = _layout_of(json.dumps(body["layout"], sort_keys=True))
    except (ValueError, RecursionError):  # ConfigError is a ValueError
        return None
    return Described(digest_of(data), *texts, layout, body)
