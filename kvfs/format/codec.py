"""Codecs of stored payloads: the only module that encodes pages into fewer bytes and decodes them.

raw      unchanged
zstd     one zstd frame
planes   the numbers of a page split into byte planes: all first bytes, all second bytes, ...; each plane is a zstd
         frame of its own, or unchanged where compression gains nothing. In bf16 the plane of sign and exponent has
         2.5 to 3 bits of entropy per byte, the plane of the mantissa is noise: interleaved, the noise hides the rest

A codec changes the stored bytes and nothing else: names, checksums and layouts are those of the raw bytes. Stored
bytes are untrusted: ``decode`` allocates and writes no more than the size of the page, whatever size a stream claims,
and raises CodecError for anything that is not exactly one page.

    planes   u8 number of planes, 3 zero bytes, u32 stored bytes of each plane, the planes; a plane with as many stored
             bytes as raw bytes is not compressed
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Sequence
from typing import Any

from kvfs.errors import ConfigError
from kvfs.format import segment as fmt

#: Name of a codec in settings -> its number in records.
CODECS = {"raw": fmt.CODEC_RAW, "zstd": fmt.CODEC_ZSTD, "planes": fmt.CODEC_PLANES}
NAMES = {number: name for name, number in CODECS.items()}
PLANES = (1, 2, 4, 8)
_HEAD = struct.Struct("<B3s")
_LENGTH = struct.Struct("<I")
_GAIN = 0.98  # a plane that does not shrink below this share is stored unchanged: it needs no decoding


class CodecError(ValueError):
    """Stored bytes that are not a page. Never leaves the library: callers treat the page as corrupt."""


class CodecMemoryError(CodecError):
    """Too little memory to tell whether stored bytes are a page."""

    def __init__(self) -> None:
        super().__init__("no memory for the page")


def parse(name: object, what: str = "codec") -> int:
    """Number of the codec that a setting names; ConfigError for anything else."""
    if not isinstance(name, str) or name not in CODECS:
        shown = repr(name) if len(repr(name)) <= 60 else type(name).__name__
        raise ConfigError(f"{what} is {shown}: choose one of {', '.join(CODECS)}")
    return CODECS[name]


def fits(codec: int, stored_bytes: int, raw_bytes: int) -> bool:
    """Whether a page of ``raw_bytes`` may have ``stored_bytes`` in this codec; False for an unknown codec."""
    if codec == fmt.CODEC_RAW:
        return stored_bytes == raw_bytes
    return codec in NAMES and 0 < stored_bytes < raw_bytes


def encode(payload: Any, codec: int, element_bytes: int) -> tuple[int, Any]:
    """(codec, stored bytes) of a page; (raw, ``payload`` itself) where ``codec`` does not save at least one block.

    ``element_bytes``: size of one number of the page; 0 if unknown, then ``zstd`` replaces ``planes``.
    """
    raw_bytes = len(memoryview(payload))
    if codec == fmt.CODEC_RAW or raw_bytes <= fmt.BLOCK:
        return fmt.CODEC_RAW, payload
    tools = _tools()
    try:
        if codec == fmt.CODEC_PLANES and element_bytes in PLANES and not raw_bytes % element_bytes:
            stored = _encode_planes(payload, element_bytes, tools)
        else:
            codec, stored = fmt.CODEC_ZSTD, tools.whole.compress(payload)
    except (tools.error, MemoryError):  # falling back to raw is always allowed
        return fmt.CODEC_RAW, payload
    if fmt.align(len(stored)) >= fmt.align(raw_bytes):
        return fmt.CODEC_RAW, payload
    return codec, stored


def decode(stored: Any, codec: int, target: memoryview) -> None:
    """Fill ``target`` with the raw bytes of a page; CodecError if ``stored`` does not decode to exactly its size.

    The caller must verify ``target`` against its checksums: a codec has none.
    """
    source = memoryview(stored)
    if not fits(codec, len(source), len(target)):
        raise CodecError(f"{len(source)} bytes of codec {codec} are not a page of {len(target)} bytes")
    if codec == fmt.CODEC_RAW:
        target[:] = source
    elif codec == fmt.CODEC_ZSTD:
        target[:] = _unzip(source, len(target))
    else:
        try:
            _join(_decode_planes(source, len(target)), target)
        except MemoryError:
            raise CodecMemoryError from None


def decoded(stored: Any, codec: int, raw_bytes: int) -> Any:
    """The raw bytes of a page: ``stored`` itself if it is raw. Raises CodecError like ``decode``."""
    if codec == fmt.CODEC_RAW and fits(codec, len(stored), raw_bytes):
        return stored
    if not fits(codec, len(stored), raw_bytes):  # before anything is allocated
        raise CodecError(f"{len(stored)} bytes of codec {codec} are not a page of {raw_bytes} bytes")
    if codec == fmt.CODEC_ZSTD:
        return memoryview(_unzip(memoryview(stored), raw_bytes))
    try:
        target = memoryview(bytearray(raw_bytes))
    except MemoryError:
        raise CodecMemoryError from None
    decode(stored, codec, target)
    return target


# -- zstd ------------------------------------------------------------------------------------


class _Tools(threading.local):
    """Contexts of zstd: one of each per thread, created on first use, since the import takes 20 ms."""

    def __init__(self) -> None:
        import zstandard

        self.error = zstandard.ZstdError
        self.parameters = zstandard.get_frame_parameters
        self.whole = zstandard.ZstdCompressor(level=1, write_checksum=False)
        # matches in a plane of exponents are chance: a short search is twice as fast, and compresses better
        self.plane = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7,
                target_length=0, write_content_size=True, write_checksum=False, write_dict_id=False,
            )
        )  # fmt: skip
        self.decompressor = zstandard.ZstdDecompressor()


_made: _Tools | None = None


def _tools() -> _Tools:
    global _made
    if _made is None:
        _made = _Tools()
    return _made


def _unzip(source: memoryview, raw_bytes: int) -> bytes:
    """Decode one frame of ``raw_bytes`` bytes. The frame must claim that size: zstd allocates what it claims."""
    tools = _tools()
    try:
        claimed = tools.parameters(source).content_size
        if claimed != raw_bytes:
            raise CodecError(f"a frame claims {claimed} bytes, expected {raw_bytes}")
        data: bytes = tools.decompressor.decompress(source, max_output_size=raw_bytes, allow_extra_data=False)
    except MemoryError:
        raise CodecMemoryError from None
    except tools.error as exc:
        raise CodecError(str(exc)) from None
    if len(data) != raw_bytes:
        raise CodecError(f"a frame decoded to {len(data)} of {raw_bytes} bytes")
    return data


# -- planes ----------------------------------------------------------------------------------


def _encode_planes(payload: Any, count: int, tools: _Tools) -> bytes:
    planes = _split(payload, count)
    stored = []
    for plane in planes:
        packed = tools.plane.compress(plane)
        stored.append(packed if len(packed) < _GAIN * len(plane) else plane)
    return b"".join([_HEAD.pack(count, bytes(3)), *(_LENGTH.pack(len(s)) for s in stored), *stored])


def _decode_planes(source: memoryview, raw_bytes: int) -> list[Any]:
    count = source[0]
    begin = _HEAD.size + count * _LENGTH.size
    if count not in PLANES or raw_bytes % count or len(source) < begin or any(source[1 : _HEAD.size]):
        raise CodecError(f"{count} planes of a page of {raw_bytes} bytes")
    lengths = [n for (n,) in _LENGTH.iter_unpack(source[_HEAD.size : begin])]
    plane_bytes = raw_bytes // count
    if sum(lengths) != len(source) - begin or max(lengths) > plane_bytes:
        raise CodecError("the planes do not fill the record")
    planes: list[Any] = []
    for length in lengths:
        plane = source[begin : begin + length]
        planes.append(plane if length == plane_bytes else _unzip(plane, plane_bytes))
        begin += length
    return planes


def _split(payload: Any, count: int) -> list[Any]:
    """Byte i of every number, for each i."""
    if count == 1:
        return [payload]
    numpy = _numpy()
    if numpy is None:
        data = bytes(payload)
        return [data[i::count] for i in range(count)]
    if count == 2:
        words = numpy.frombuffer(payload, "<u2")
        return [words.astype("u1"), (words >> 8).astype("u1")]
    whole = numpy.frombuffer(payload, "u1")
    return [numpy.ascontiguousarray(whole[i::count]) for i in range(count)]


def _join(planes: Sequence[Any], target: memoryview) -> None:
    """Inverse of ``_split``, into ``target``."""
    count = len(planes)
    numpy = _numpy() if count > 1 else None
    if numpy is None:
        page = bytearray(len(target))
        for i, plane in enumerate(planes):
            page[i::count] = plane
        target[:] = page
    elif count == 2 and sys.byteorder == "little":
        low, high = (numpy.frombuffer(plane, "u1") for plane in planes)
        words = numpy.frombuffer(target, "<u2")
        numpy.left_shift(high, 8, out=words, dtype="u2", casting="unsafe")
        numpy.bitwise_or(words, low, out=words)
    else:
        whole = numpy.frombuffer(target, "u1")
        for i, plane in enumerate(planes):
            whole[i::count] = numpy.frombuffer(plane, "u1")


def _numpy() -> Any:
    """numpy, which is faster and releases the GIL, or None where it is not installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy
