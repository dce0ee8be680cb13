"""The stored pages of a prompt as a safetensors file: tensors that other tools read.

The format is small: eight bytes with the length of a JSON header (little endian), the header, then the tensors. It is
written here without the library and without torch, in batches of BATCH_BYTES for prompts of any length. Pages are
verified as they are loaded; the file appears under its name when all of them are. One page that does not verify ends
the export: the header, which has the number of tokens, is written before the first page is read.

A tensor holds one component of the cells of one layer, [states, heads, numbers]: ``<group>.layer.<id>.k`` and ``.v``,
``.latent`` and ``.rope`` (MLA), ``.scale``; cells of other encodings are bytes, ``.cell``. A state is a token, or where
a page has one state (``exact`` groups, opaque pages) a page.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvfs.context import Context
from kvfs.errors import ConfigError, KvfsError
from kvfs.lookup.prefix_match import GroupMatch, PrefixMatch
from kvfs.pages import chunk_hash
from kvfs.pages.device_kv import DeviceKV, KVBuffer
from kvfs.pages.host_copy import scatter
from kvfs.pages.identity import Described
from kvfs.pages.layout import Cell, Group
from kvfs.read.reader import Reader
from kvfs.system.memory_views import address_of
from kvfs.types import TokensLike, Verify
from kvfs.version import __version__

BATCH_BYTES = 8 << 20  # of pages in memory at once, or one page
HEADER_BYTES_MAX = 100_000_000  # longest header that the library reads
_DTYPES = {"bf16": ("BF16", 2), "f16": ("F16", 2), "f32": ("F32", 4), "int8": ("I8", 1),
           "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1)}  # fmt: skip
_ENCODING = re.compile(
    r"(?P<dtype>[a-z0-9_]+) (?:k(?P<k>\d{1,9})\+v(?P<v>\d{1,9})|latent (?P<latent>\d{1,9})\+(?P<rope>\d{1,9}) [a-z]+)"
    r"(?:\+(?P<scale_dtype>f16|f32) scale (?P<scale>\d{1,9}))?(?: static .*)?\Z"
)


class TensorSlice(NamedTuple):
    """One component of each cell: its name, its safetensors dtype, its offset and size in the cell (bytes)."""

    name: str
    dtype: str
    numbers: int
    offset: int
    nbytes: int

    @property
    def item_bytes(self) -> int:
        return self.nbytes // self.numbers


class Tensor(NamedTuple):
    """One tensor of a file: a component of one layer (by position in its group); ``offset`` counts from the header's
    end."""

    name: str
    group: GroupMatch
    layer: int
    component: TensorSlice
    shape: tuple[int, int, int]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Of one state."""
        return self.shape[1] * self.component.nbytes

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_bytes


@dataclass
class Written:
    """What a file holds."""

    path: str
    tokens: int
    pages: int
    tensors: int
    nbytes: int
    file_bytes: int = 0


class UnverifiedError(KvfsError):
    """A page of the match does not verify or was evicted."""


def components(cell: Cell) -> list[TensorSlice]:
    """The components of a cell; its bytes as one if its encoding is not one of kvfs's, or has half bytes."""
    found = _ENCODING.match(cell.encoding)
    if found is not None and found["dtype"] in _DTYPES:
        dtype, size = _DTYPES[found["dtype"]]
        wanted = [(name, dtype, size) for name in ("k", "v", "latent", "rope") if found[name] is not None]
        if found["scale"] is not None:
            wanted.append(("scale", *_DTYPES[found["scale_dtype"]]))
        made, at = [], 0
        for name, dtype, size in wanted:
            made.append(TensorSlice(name, dtype, int(found[name]), at, int(found[name]) * size))
            at += made[-1].nbytes
        if at == cell.nbytes and all(p.numbers for p in made):
            return made
    return [TensorSlice("cell", "U8", cell.nbytes, 0, cell.nbytes)]


def write(
    context: Context, described: Described, match: PrefixMatch, path: str,
    token_ids: TokensLike | None, progress: Callable[[int, int], None],
) -> Written:  # fmt: skip
    """Write the pages of a match; ``progress``: (bytes done, all bytes). UnverifiedError, ConfigError; raises OSError
    unchanged."""
    tensors = TensorFile(context, described, match, token_ids)
    temporary = f"{path}.{context.files.random(4).hex()}.tmp"
    try:
        with open(temporary, "xb", opener=context.directory.opener) as file:
            tensors.fill(file.fileno(), progress)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return Written(
        path, match.tokens, sum(g.count for g in match.groups), len(tensors.tensors), tensors.payload_bytes,
        tensors.nbytes,
    )  # fmt: skip


class TensorFile:
    """The file of a match before it is written: ``nbytes`` is its exact size. ConfigError for a match of a part."""

    def __init__(
        self, context: Context, described: Described, match: PrefixMatch, token_ids: TokensLike | None = None
    ) -> None:
        self._c, self._match, self._groups = context, match, described.layout.groups
        for gm in match.groups:
            if gm.want != self._groups[gm.number].full:
                raise ConfigError("this match is of a part of each page: match without part= to export")
        self.tensors = list(_tensors(self._groups, match))
        self.payload_bytes = sum(t.nbytes for t in self.tensors)
        self._head = _header(described, match, self.tensors, token_ids)
        self.nbytes = len(self._head) + self.payload_bytes

    def fill(self, fd: int, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Write the file to a descriptor. UnverifiedError if a page does not verify: then the bytes are of no use."""
        match, files = self._match, self._c.files
        reader = Reader(replace(self._c, verify=Verify.ALWAYS))  # independent of the policy of this process's own loads
        try:
            with reader.open_segments(match) as held:
                files.truncate(fd, self.nbytes)
                files.write_all(fd, [self._head], 0)
                written = 0
                for gm in match.groups:
                    mine = [t for t in self.tensors if t.group is gm]
                    batch = _TensorBatch(self._groups[gm.number], gm, mine)
                    for first in range(gm.first, gm.first + gm.count, batch.chunks):
                        cut = gm.cut(first, min(batch.chunks, gm.first + gm.count - first))
                        good, _ = reader.load_run(match, cut, self._groups[gm.number], batch.pages[: cut.nbytes], held)
                        if good != (1 << cut.count) - 1 << cut.first:
                            raise UnverifiedError(
                                f"a page of tokens {first * match.page_tokens} to "
                                f"{(first + cut.count) * match.page_tokens} does not verify, or was evicted: try "
                                "again, the prefix that is left is shorter"
                            )
                        for tensor, data in batch.arranged(cut.count):
                            at = len(self._head) + tensor.offset + (first - gm.first) * batch.states * tensor.row_bytes
                            files.write_all(fd, [data], at)
                        written += cut.nbytes
                        progress(written, self.payload_bytes)
        finally:
            reader.close()


def _tensors(groups: Sequence[Group], match: PrefixMatch) -> Iterator[Tensor]:
    """The tensors with the widest numbers first, so that each begins at a multiple of its item size."""
    found = [
        (gm, layer, component)
        for gm in match.groups
        for layer in range(len(groups[gm.number].layers))
        for component in components(groups[gm.number].cell)
    ]
    at = 0
    for gm, layer, component in sorted(found, key=lambda item: -item[2].item_bytes):
        group = groups[gm.number]
        shape = (gm.count * group.states, group.heads, component.numbers)
        name = f"{group.name}.layer.{group.layers[layer]}.{component.name}"
        tensor = Tensor(name, gm, layer, component, shape, at)
        at += tensor.nbytes
        yield tensor


def _header(described: Described, match: PrefixMatch, tensors: Sequence[Tensor], token_ids: TokensLike | None) -> bytes:
    """The length and the JSON of a header. By the rules of the format metadata are strings: structures are JSON."""
    about: dict[str, Any] = {
        "kvfs": __version__,
        "namespace": described.digest.hex(),
        "name": described.name,
        "revision": described.revision,
        **{key: _text(described.body[key]) for key in ("adapter", "epoch", "rope", "extra", "layout")},
        "page_tokens": str(match.page_tokens),
        "token_count": str(match.tokens),
        "first_tokens": json.dumps({g.name: g.first * match.page_tokens for g in match.groups}),
        "chunk_hashes": json.dumps(_hashes(match)),
    }
    if token_ids is not None:
        about["tokens"] = json.dumps(_tokens(match, token_ids), separators=(",", ":"))
    body: dict[str, Any] = {"__metadata__": about}
    for t in tensors:
        body[t.name] = {"dtype": t.component.dtype, "shape": t.shape, "data_offsets": [t.offset, t.offset + t.nbytes]}
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise ConfigError(f"the header has {len(text)} bytes, at most {HEADER_BYTES_MAX} are read: shorten the prompt")
    return struct.pack("<Q", len(text)) + text


def _tokens(match: PrefixMatch, token_ids: TokensLike) -> list[int]:
    """The ids of the match's tokens. ConfigError for what is not token ids, or too few."""
    tokens = chunk_hash.token_bytes(token_ids)
    count = len(tokens) // chunk_hash.TOKEN_BYTES
    if count < match.tokens:
        raise ConfigError(f"token_ids has {count} of the match's {match.tokens} tokens: pass the whole prompt")
    return list(struct.unpack_from(f"<{match.tokens}I", tokens))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _hashes(match: PrefixMatch) -> dict[str, list[str]]:
    """Group -> chunk hashes of its pages."""
    return {
        g.name: [sources[0].place.chunk_hash.hex() for _, sources in sorted(g.sources().items())] for g in match.groups
    }


class _TensorBatch:
    """Buffers of a batch: pages of a group as they are stored, and the same bytes in the order of the tensors."""

    def __init__(self, group: Group, gm: GroupMatch, tensors: Sequence[Tensor]) -> None:
        self._group, self._tensors = group, tensors
        self.states = group.states
        self.chunks = max(1, min(gm.count, BATCH_BYTES // group.page_bytes))
        self.pages = memoryview(bytearray(self.chunks * group.page_bytes))
        self._out = memoryview(bytearray(self.chunks * group.page_bytes))
        start, size = address_of(self._out), len(self._out)
        self._at: dict[str, int] = {}
        at = 0
        for t in tensors:
            self._at[t.name] = at
            at += self.chunks * self.states * t.row_bytes
        by_component: dict[TensorSlice, list[Tensor]] = {}
        for t in tensors:
            by_component.setdefault(t.component, []).append(t)
        # the tensors are described like an engine's buffers, so that the same code moves cells
        self._units = range(self.chunks * self.states)
        self._described = DeviceKV(
            group.name,
            tuple(
                KVBuffer(
                    "host", tuple(start + self._at[t.name] for t in some), ((start, size),) * len(some),
                    tuple(group.layers[t.layer] for t in some), (0, group.heads), (0, 1),
                    0 if group.states == 1 else 1, len(self._units),
                    (some[0].row_bytes, some[0].row_bytes, component.nbytes), (component.offset, component.nbytes),
                    self._out,
                )
                for component, some in by_component.items()
            ),
        )  # fmt: skip

    def arranged(self, count: int) -> Iterator[tuple[Tensor, memoryview]]:
        """The first ``count`` pages as rows of each tensor."""
        size = self._group.page_bytes
        for i in range(count):
            page = self.pages[i * size : (i + 1) * size]
            scatter(page, self._group, self._group.full, self._described, self._units, i)
        for t in self._tensors:
            at = self._at[t.name]
            yield t, self._out[at : at + count * self.states * t.row_bytes]
