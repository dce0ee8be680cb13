"""Requests and replies have the sizes that the kernel expects, and what it cannot have sent is refused."""

from __future__ import annotations

import stat
import struct

import pytest

from kvfs.mount import wire
from kvfs.mount.wire import Attr, DirectoryItem, Entry, ProtocolError, Usage


def request(op: int, body: bytes = b"", length: int | None = None) -> memoryview:
    size = wire.HEADER.size + len(body) if length is None else length
    return memoryview(wire.HEADER.pack(size, op, 7, 1, 1000, 100, 42, 0, 0) + body)


def test_sizes_are_those_of_the_header_of_linux() -> None:
    sizes = {
        wire.HEADER: 40, wire.REPLY: 16, wire.ATTR: 88, wire.ENTRY: 40, wire.ATTR_REPLY: 16, wire.OPEN_REPLY: 16,
        wire.INIT_REPLY: 64, wire.STATFS_REPLY: 80, wire.SETATTR_IN: 88, wire.READ_IN: 40, wire.GETATTR_IN: 16,
        wire.RELEASE_IN: 24, wire.FLUSH_IN: 24, wire.FSYNC_IN: 16, wire.RENAME2_IN: 16, wire.DIRENT: 24,
    }  # fmt: skip
    assert {s.size: size for s, size in sizes.items() if s.size != size} == {}
    assert wire.IOC_BACKING_OPEN == 0x4010E501
    assert wire.IOC_BACKING_CLOSE == 0x4004E502
    assert len(Entry(5, Attr(5, stat.S_IFREG)).pack()) == 128
    assert len(wire.statfs_bytes(Usage(1, 1, 1, 1))) == 80


def test_requests_that_are_cut_or_lie_about_their_length_are_refused() -> None:
    assert wire.parse(request(wire.Op.LOOKUP, b"name\0")).caller == (1000, 100)
    for data in (request(1)[:39], request(1, b"x", 100), request(1, b"x", 1)):
        with pytest.raises(ProtocolError):
            wire.parse(data)
    with pytest.raises(ProtocolError):
        wire.names(memoryview(b"one\0two"), 2)
    assert wire.names(memoryview(b"one\0two\0"), 2) == [b"one", b"two"]


def test_a_kernel_that_is_too_old_is_refused_and_an_older_one_gets_no_passthrough() -> None:
    old = struct.pack("=4I", 7, 30, 0, 0)
    with pytest.raises(ProtocolError, match=r"7\.31"):
        wire.init_reply(memoryview(old), 1 << 20)
    every = 0xFFFF_FFFF
    _, features = wire.init_reply(memoryview(struct.pack("=4I", 7, 31, 0, every & ~wire.Init.INIT_EXT)), 1 << 20)
    assert wire.Init.PASSTHROUGH not in features
    reply, features = wire.init_reply(memoryview(struct.pack("=5I44x", 7, 41, 0, every, every)), 1 << 20)
    assert wire.Init.PASSTHROUGH in features
    assert wire.Init.HANDLE_KILLPRIV_V2 in features  # or it asks for an attribute before each write
    assert len(reply) == 64


@pytest.mark.parametrize("attributes", [False, True])
def test_an_item_of_a_listing_has_the_layout_that_the_kernel_expects(attributes: bool) -> None:
    for length in range(1, 20):
        item = DirectoryItem(b"n" * length, 10, stat.S_IFDIR)
        for entry in (None, Entry(7, Attr(11, stat.S_IFDIR))):
            packed = wire.pack_item(item, 5, entry, attributes=attributes)
            assert len(packed) == wire.item_bytes(item.name, attributes=attributes)
            at = 128 if attributes else 0
            ino = 10 if entry is None else 11
            assert wire.DIRENT.unpack_from(packed, at) == (ino, 5, length, stat.S_IFDIR >> 12)
            assert packed[at + 24 : at + 24 + length] == item.name
            assert len(packed) % 8 == 0
            if attributes:
                assert list(wire.listed_nodes(packed + packed)) == ([] if entry is None else [7, 7])


def test_listings_with_attributes_are_asked_for() -> None:
    every = 0xFFFF_FFFF
    _, features = wire.init_reply(memoryview(struct.pack("=5I44x", 7, 41, 0, every, every)), 1 << 20)
    assert wire.Init.READDIRPLUS in features and wire.Init.READDIRPLUS_AUTO in features
