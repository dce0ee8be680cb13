"""Identity: which names a namespace may have, given by a caller or read from a file."""

from __future__ import annotations

import json
import random

import pytest

from kvfs import ConfigError, Identity
from kvfs.pages import identity
from kvfs.pages.identity import digest_of, parse_descriptor, salt_digest
from tests.stores import tiny

FORGED = ["", " x", "x\x1b]0;pwn\x07", "x\ny", "x\u202ey", "x\u00e9", "x" * 257]


def descriptor(**changed: str) -> bytes:
    body = json.loads(Identity("m", tiny(), "r1", salt="s").descriptor_bytes())
    return json.dumps(body | changed).encode()


@pytest.mark.parametrize("text", FORGED)
def test_a_descriptor_has_only_names_that_an_identity_accepts(text: str) -> None:
    assert parse_descriptor(descriptor()) is not None
    with pytest.raises(ConfigError, match="printable ASCII"):
        Identity(text, tiny(), "r1")
    assert parse_descriptor(descriptor(name=text)) is None
    assert parse_descriptor(descriptor(revision=text)) is None


def test_no_name_is_that_of_a_tenants_quota() -> None:
    name = f"salt:{salt_digest('alice')}"
    with pytest.raises(ConfigError, match="quotas of tenants"):
        Identity(name, tiny(), "r1")
    assert parse_descriptor(descriptor(name=name)) is None


@pytest.mark.parametrize("text", ["s", "0" * 31, "0" * 31 + "\n", "x" * 32])
def test_the_salt_of_a_descriptor_is_a_digest(text: str) -> None:
    assert parse_descriptor(descriptor(salt=text)) is None
    assert parse_descriptor(descriptor(salt="0" * 32)) is not None and parse_descriptor(descriptor(salt="")) is not None


HARMLESS: dict[str, dict[str, object]] = {
    "plain": {},
    "the cut in a value": {"extra": {"x": ',"name":1}', ',"name":': [{"name": "y"}]}},
    "a rope with names": {"rope": {"name": "m", "a": {"z": 1, "name": 2}}},
    "an adapter": {"adapter": '","name":"other'},
}


@pytest.mark.parametrize("what", HARMLESS)
@pytest.mark.parametrize("order", ["canonical", "reversed", "shuffled", "spaced"])
def test_a_descriptor_is_parsed_as_json_wherever_it_is_cut(what: str, order: str) -> None:
    body = json.loads(Identity("m", tiny(), "r1").descriptor_bytes()) | HARMLESS[what]
    names = sorted(body, reverse=order == "reversed")
    if order == "shuffled":
        random.Random(1).shuffle(names)
    spaces = (", ", " : ") if order == "spaced" else (",", ":")
    data = json.dumps({name: body[name] for name in names}, separators=spaces).encode()
    for _ in range(2):  # with and without what is cached
        found = parse_descriptor(data)
        assert found is not None and found.body == body and found.layout == tiny()
        assert (found.name, found.revision, found.digest) == ("m", "r1", digest_of(data))


@pytest.mark.parametrize(
    "change",
    [(b'{"adapter"', b'{,"adapter"'), (b',"name"', b'},"name"'), (b',"name"', b',,"name"'), (b'"}', b'"}}'),
     (b',"name":"m"', b',"name":{}'), (b',"name":"m"', b',"name":'), (b'"name"', b'"nane"'), (b"", b"\xff"),
     (b',"salt":""', b',"salt":"","layout":{}'), (b',"rope":{}', b""), (b'"kvfs":1', b'"kvfs":2')],
)  # fmt: skip
def test_what_is_no_descriptor_is_refused_wherever_it_is_cut(change: tuple[bytes, bytes]) -> None:
    data = Identity("m", tiny(), "r1").descriptor_bytes()
    assert parse_descriptor(data) is not None
    assert parse_descriptor(data.replace(*change, 1)) is None


def test_descriptors_that_differ_in_their_names_share_what_is_parsed() -> None:
    """Each was parsed and its layout written as text again: a listing of 60,000 namespaces took 24.6 s."""
    data = [Identity(f"m{number}", tiny(), "r1").descriptor_bytes() for number in range(50)]
    before = identity._head.cache_info().misses
    assert [parsed.name for one in data if (parsed := parse_descriptor(one))] == [f"m{number}" for number in range(50)]
    assert identity._head.cache_info().misses - before <= 1
