"""Identity: which names a namespace may have, given by a caller or read from a file."""

from __future__ import annotations

import json

import pytest

from kvfs import ConfigError, Identity
from kvfs.pages.identity import parse_descriptor, salt_digest
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
