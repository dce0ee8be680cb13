"""The identity of a namespace: everything that must match before bytes may be reused. Never TP or PP."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvfs.errors import ConfigError
from kvfs.format.segment import DESCRIPTOR_BYTES_MAX
from kvfs.pages.chunk_hash import tenant_seed
from kvfs.pages.layout import PageLayout

_MOVING = frozenset({"", "main", "master", "latest", "head", "trunk", "dev", "none", "null"})
_TEXT = re.compile(r"[!-~](?:[ -~]{0,254}[!-~])?\Z")
_DIGEST = re.compile(r"(?:[0-9a-f]{32})?\Z")  # of a salt; empty for none
_WORD = re.compile(r"[A-Za-z0-9]{1,12}[-_:](?=[0-9a-f]{8})")  # of a revision, before a digest
_SALT = "salt:"  # begins the name of a tenant's quota, and so no name of a namespace
_FIELDS = {"kvfs", "name", "revision", "layout", "rope", "adapter", "salt", "epoch", "extra"}
_PLAIN = r"[!#-\[\]-~](?:[ !#-\[\]-~]{0,254}[!#-\[\]-~])?"  # as _TEXT, of characters that JSON does not escape
_TAIL = re.compile(rf'({_PLAIN})","revision":"({_PLAIN})","rope":(.*),"salt":"((?:[0-9a-f]{{32}})?)"}}')
_TAIL_FIELDS = {"name", "revision", "rope", "salt"}  # what canonical JSON has behind the layout
_ENCODE, _DECODE = json.JSONEncoder(sort_keys=True).encode, json.JSONDecoder().decode


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


class Described(NamedTuple):
    """A namespace read from a store: untrusted bytes that passed every check."""

    digest: bytes
    name: str
    revision: str
    salt: str
    layout: PageLayout
    rest: Mapping[str, Any]  # its other members; shared by namespaces where they are equal
    rope: Any

    @property
    def body(self) -> dict[str, Any]:
        """All members of the descriptor."""
        named = {"name": self.name, "revision": self.revision, "salt": self.salt}
        return {**self.rest, **named, "rope": self.rope}

    def is_named(self, ref: str) -> bool:
        """Whether ``ref`` is its name, name@revision (or its beginning), or 6 or more digits of its digest."""
        name, at, revision = ref.rpartition("@")
        digits = len(ref) >= 6 and self.digest.hex().startswith(ref)
        return ref == self.name or digits or (bool(at) and name == self.name and self.revision.startswith(revision))

    @property
    def label(self) -> str:
        """Name and the beginning of the revision, behind a word such as ``weights-`` of it."""
        return label(self.name, self.revision)


def label(name: str, revision: str) -> str:
    """``name@revision`` with a short revision, which ``Catalog.find`` accepts."""
    word = _WORD.match(revision)
    return f"{name}@{revision[: 8 + (word.end() if word is not None else 0)]}"


# A store has few layouts and may have many namespaces: checking a layout takes 0.4 ms, parsing a descriptor 25 us.
@functools.lru_cache(maxsize=64)
def _layout_of(descriptor: str) -> PageLayout:
    return PageLayout.from_descriptor(json.loads(descriptor))


@functools.lru_cache(maxsize=64)
def _head(text: str) -> tuple[Mapping[str, Any], PageLayout] | None:
    """Members of a canonical descriptor before its name, and the layout among them; None if they are not those."""
    body = _DECODE(text)
    if not isinstance(body, dict) or body.keys() != _FIELDS - _TAIL_FIELDS:
        return None
    return _checked(body)


@functools.lru_cache(maxsize=64)
def _rope(text: str) -> Any:
    return _DECODE(text)


def _checked(body: dict[str, Any]) -> tuple[Mapping[str, Any], PageLayout] | None:
    if body["kvfs"] != 1 or not isinstance(body["layout"], dict):
        return None
    return body, _layout_of(_ENCODE(body["layout"]))


def _parse_canonical(data: bytes, text: str) -> Described | None:
    """A descriptor as ``Identity`` writes it, in a fifth of the time; None for any other text; ValueError.

    In canonical JSON the layout comes before the name, and many descriptors of a store differ only from there on. So
    the text is cut there. Texts that are the members of an object each are those of one object together, wherever the
    cuts were made. Equal ones are parsed once, and callers share the result.
    """
    before, _, after = text.rpartition(',"name":"')
    tail = _TAIL.fullmatch(after)
    head = _head(before + "}") if tail is not None else None
    if tail is None or head is None:
        return None
    name, revision, rope, salt = tail.groups()
    if name.startswith(_SALT):
        return None
    return Described(digest_of(data), name, revision, salt, head[1], head[0], _rope(rope))


def _parse_any(data: bytes, text: str) -> Described | None:
    body = _DECODE(text)
    if not isinstance(body, dict) or body.keys() != _FIELDS:
        return None
    checked = _checked(body)
    name, revision, salt = body["name"], body["revision"], body["salt"]
    if not (_TEXT.match(name) and _TEXT.match(revision) and _DIGEST.match(salt)) or name.startswith(_SALT):
        return None
    return None if checked is None else Described(digest_of(data), name, revision, salt, checked[1], body, body["rope"])


def parse_descriptor(data: bytes) -> Described | None:
    """Parse a namespace descriptor from a segment or the index; None if it is invalid."""
    if len(data) > DESCRIPTOR_BYTES_MAX:
        return None
    try:
        text = data.decode()
        with contextlib.suppress(ValueError):  # cut inside a value
            found = _parse_canonical(data, text)
            if found is not None:
                return found
        return _parse_any(data, text)
    except (ValueError, TypeError, RecursionError):  # ConfigError is a ValueError; TypeError: a name is no text
        return None
