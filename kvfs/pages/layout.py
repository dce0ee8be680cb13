"""How the KV of a model is cut into pages: a descriptor, so that no other code branches on the model.

A **page** is the KV of one chunk of tokens in one **group** of layers, ``[granule][layer][head slot][state]
[cell]``; a cell is K, then V, then scales. A **part** is a rectangle of head slots x layers of a page, in the
same order. A **leaf**, the unit of checksums, is one layer of one granule of a part.

Constructors enforce the invariants and limits below with ConfigError: a group has ``page_tokens`` states per page
(one per token) or 1 (a snapshot, an opaque page); a model layer is in at most one group; the order of groups is part
of the layout.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvfs.errors import ConfigError

GRANULE_TOKENS = 16
PAGE_TOKENS_MAX = 4096
LAYERS_MAX = HEADS_MAX = 4096  # of one group
LAYER_ID_MAX = 65535
GROUPS_MAX = 64
WINDOW_TOKENS_MAX = 2**31 - 1
CELL_BYTES_MAX = 1 << 20  # of one token; a snapshot or an opaque page may fill a page
PAGE_BYTES_MAX = 1 << 30  # of one group
DESCRIPTOR_VERSION = 1

_PAGE_TOKENS = (GRANULE_TOKENS, PAGE_TOKENS_MAX, GRANULE_TOKENS)  # at least, at most, a multiple of
_NAME = re.compile(r"[a-z0-9_.-]{1,64}")
_ENCODING = re.compile(r"[!-~](?:[ -~]{0,190}[!-~])?")
_SCALE_DIGEST = re.compile(r"[a-z0-9_.:-]{1,64}")
_PART = struct.Struct("<4H")
_ROPE = re.compile("interleaved|halves")
_BITS = {"bf16": 16, "f16": 16, "f32": 32, "float8_e4m3fn": 8, "float8_e5m2": 8, "int8": 8, "int4": 4}
_SHORT = {
    "bfloat16": "bf16", "float16": "f16", "half": "f16", "fp16": "f16", "float32": "f32", "fp32": "f32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """The bytes of one state of one head slot of one layer: ``nbytes``, with the meaning named by ``encoding``."""

    encoding: str
    nbytes: int

    def __post_init__(self) -> None:
        _text("cell encoding", self.encoding, _ENCODING)
        _int("cell bytes", self.nbytes, 1, PAGE_BYTES_MAX)

    @property
    def element_bytes(self) -> int:
        """Bytes of one number of the cell, scales aside; 0 if the encoding does not tell."""
        bits = _BITS.get(self.encoding.split()[0], 0)
        return max(1, bits // 8) if bits else 0


@dataclass(frozen=True, slots=True)
class Need:
    """Which pages of a group a length needs to be restored. ``window`` in tokens."""

    kind: Literal["all", "window", "exact"]
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("all", "window", "exact"):
            raise ConfigError(f"need is {_show(self.kind)}: pass 'all', 'window' or 'exact'")
        low, high = (1, WINDOW_TOKENS_MAX) if self.kind == "window" else (0, 0)
        _int(f"window of need {self.kind}", self.window, low, high)

    @classmethod
    def all(cls) -> Need:
        """Every page before the length: full attention."""
        return cls("all")

    @classmethod
    def window_of(cls, tokens: int) -> Need:
        """The pages of the last ``tokens`` tokens before the length: sliding-window attention."""
        return cls("window", tokens)

    @classmethod
    def exact(cls) -> Need:
        """The one page that ends at the length: a snapshot of a recurrent state."""
        return cls("exact")

    def chunks(self, page_tokens: int) -> int | None:
        """How many trailing chunks must be present at a restorable length; None: all of them."""
        return {"all": None, "window": -(-self.window // page_tokens), "exact": 1}[self.kind]


@dataclass(frozen=True, slots=True)
class Part:
    """Head slots [head, head+heads) x layer positions [layer, layer+layers) of a group; never empty."""

    head: int
    heads: int
    layer: int
    layers: int

    def __post_init__(self) -> None:
        _int("head of a part", self.head, 0, HEADS_MAX - 1)
        _int("heads of a part", self.heads, 1, HEADS_MAX - self.head)
        _int("layer of a part", self.layer, 0, LAYERS_MAX - 1)
        _int("layers of a part", self.layers, 1, LAYERS_MAX - self.layer)

    def pack(self) -> bytes:
        """8 bytes: layer, layers, head, heads as u16 little endian."""
        return _PART.pack(self.layer, self.layers, self.head, self.heads)

    @classmethod
    def unpack(cls, packed: bytes) -> Part:
        """Inverse of ``pack``. ConfigError if these are not 8 bytes that encode a rectangle."""
        if len(packed) != _PART.size:
            raise ConfigError(f"a packed part has {len(packed)} bytes: pass {_PART.size}")
        layer, layers, head, heads = _PART.unpack(packed)
        return cls(head, heads, layer, layers)

    def contains(self, other: Part) -> bool:
        """Whether every cell of ``other`` is one of this part."""
        head_end, layer_end = self.head + self.heads, self.layer + self.layers
        heads = self.head <= other.head and other.head + other.heads <= head_end
        return heads and self.layer <= other.layer and other.layer + other.layers <= layer_end

    def intersect(self, other: Part) -> Part | None:
        """The cells in both parts; None if there are none."""
        head, layer = max(self.head, other.head), max(self.layer, other.layer)
        heads = min(self.head + self.heads, other.head + other.heads) - head
        layers = min(self.layer + self.layers, other.layer + other.layers) - layer
        return Part(head, heads, layer, layers) if heads > 0 and layers > 0 else None


@dataclass(frozen=True, slots=True)
class Group:
    """Layers (MODEL layer ids, ascending) that share one cell, number of head slots and need."""

    name: str
    layers: tuple[int, ...]
    heads: int
    cell: Cell
    need: Need
    states: int

    def __post_init__(self) -> None:
        where = f"of group {_text('group name', self.name, _NAME)}"
        if type(self.layers) is not tuple or type(self.cell) is not Cell or type(self.need) is not Need:
            raise ConfigError(f"layers, cell and need {where}: pass a tuple, a Cell and a Need")
        _int(f"number of layers {where}", len(self.layers), 1, LAYERS_MAX)
        for before, layer in zip((-1, *self.layers), self.layers, strict=False):
            _int(f"layer id {where}, ids ascend and", layer, before + 1, LAYER_ID_MAX)
        _int(f"heads {where}", self.heads, 1, HEADS_MAX)
        once = self.states == 1 or self.need.kind == "exact"
        _int(f"states {where}", self.states, *((1, 1) if once else _PAGE_TOKENS))
        _int(f"cell bytes {where}", self.cell.nbytes, 1, PAGE_BYTES_MAX if once else CELL_BYTES_MAX)
        _int(f"page bytes {where}", self.page_bytes, 1, PAGE_BYTES_MAX)

    @property
    def full(self) -> Part:
        """The part that is the whole page."""
        return Part(0, self.heads, 0, len(self.layers))

    @property
    def granule_states(self) -> int:
        """States of one granule: 16, or 1 where a page has one state."""
        return 1 if self.states == 1 else GRANULE_TOKENS

    @property
    def granules(self) -> int:
        """Granules of one page."""
        return self.states // self.granule_states

    @property
    def page_bytes(self) -> int:
        """Bytes of a whole page of this group."""
        return self.states * len(self.layers) * self.heads * self.cell.nbytes

    def part_bytes(self, part: Part) -> int:
        """Bytes of ``part`` of a page. ConfigError if it reaches outside the group."""
        return self.leaves(part) * self.leaf_bytes(part)

    def leaf_bytes(self, part: Part) -> int:
        """Bytes of one layer of one granule of ``part``."""
        return self.granule_states * part.heads * self.cell.nbytes

    def leaves(self, part: Part) -> int:
        """Number of leaves of ``part``. ConfigError if it reaches outside the group."""
        if part.head + part.heads > self.heads or part.layer + part.layers > len(self.layers):
            raise ConfigError(f"{part} reaches outside group {self.name}: stay within {self.full}")
        return self.granules * part.layers


@dataclass(frozen=True, slots=True)
class PageLayout:
    """All groups of a model, or one opaque page. A group's number is its position in ``groups``."""

    page_tokens: int
    groups: tuple[Group, ...]
    kind: Literal["kv", "opaque"]

    def __post_init__(self) -> None:
        _int("page_tokens", self.page_tokens, *_PAGE_TOKENS)
        if type(self.groups) is not tuple or not all(type(group) is Group for group in self.groups):
            raise ConfigError("groups: pass a tuple of Group, or use PageLayout.of([...])")
        _int("number of groups", len(self.groups), 1, GROUPS_MAX)
        names, layers = [g.name for g in self.groups], [layer for g in self.groups for layer in g.layers]
        if len(set(names)) < len(names) or len(set(layers)) < len(layers):
            raise ConfigError(f"groups {names}: names must differ, and a layer may be in one group only")
        if not {group.states for group in self.groups} <= {1, self.page_tokens}:
            raise ConfigError(f"groups {names}: states per page must be {self.page_tokens} or 1")
        one = len(names) == 1 and self.groups[0].states == 1
        if self.kind not in ("kv", "opaque") or (self.kind == "opaque" and not one):
            raise ConfigError(f"kind is {_show(self.kind)}: 'kv', or 'opaque' with one group of one state")

    @property
    def page_bytes(self) -> int:
        """Bytes of one chunk: a page of each group."""
        return sum(group.page_bytes for group in self.groups)

    def group(self, name: str) -> Group:
        """The group of that name. ConfigError if there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise ConfigError(f"no group {_show(name)}: pass one of {[group.name for group in self.groups]}")

    @classmethod
    def of(cls, groups: Iterable[Group], page_tokens: int = 64) -> PageLayout:
        """A layout of any groups: hybrid models, custom cells."""
        return cls(page_tokens, tuple(groups), "kv")

    @classmethod
    def kv(
        cls,
        *,
        layers: int | Sequence[int],
        kv_heads: int,
        head_dim: int,
        dtype: object,
        page_tokens: int = 64,
        v_head_dim: int | None = None,
        window: int | None = None,
        scale: object = None,
        scales: int = 2,
        scale_digest: str | None = None,
    ) -> PageLayout:
        """One group with K and V per head (MHA, GQA, MQA), named "full", or "window" if ``window`` is given.

        ``layers``: how many, or their model layer ids. ``window`` (tokens): all layers slide. int8, int4 (two
        numbers per byte) and fp8 need either ``scale``, the dtype (float32, float16) of the ``scales`` scales
        that end a cell (default: one for K, one for V), or ``scale_digest``, a digest of the model's static
        scales ("unit" if all are 1). ConfigError for anything out of range.
        """
        dims = (head_dim, head_dim if v_head_dim is None else v_head_dim)
        cell = _cell(dtype, dims, "k{}+v{}".format(*dims), scale_digest, scale, scales)
        name, need = ("full", Need.all()) if window is None else ("window", Need.window_of(window))
        heads, states = _int("kv_heads", kv_heads, 1, HEADS_MAX), _int("page_tokens", page_tokens, *_PAGE_TOKENS)
        return cls.of([Group(name, _layers(layers), heads, cell, need, states)], states)

    @classmethod
    def mla(
        cls,
        *,
        layers: int | Sequence[int],
        kv_lora_rank: int,
        rope_dim: int,
        dtype: object,
        page_tokens: int = 64,
        rope: str = "interleaved",
        scale_digest: str | None = None,
    ) -> PageLayout:
        """One group "full" of one head slot: ``kv_lora_rank`` latent numbers, then ``rope_dim`` rotary ones.

        ``rope``: the order of the latter, "interleaved" or "halves"; engines differ. The rest as in ``kv``.
        """
        dims, order = (kv_lora_rank, rope_dim), _text("rope", rope, _ROPE)
        cell = _cell(dtype, dims, "latent {}+{} {}".format(*dims, order), scale_digest)
        states = _int("page_tokens", page_tokens, *_PAGE_TOKENS)
        return cls.of([Group("full", _layers(layers), 1, cell, Need.all(), states)], states)

    @classmethod
    def opaque(cls, page_bytes: int, page_tokens: int) -> PageLayout:
        """Pages of ``page_bytes`` bytes that kvfs does not interpret."""
        group = Group("opaque", (0,), 1, Cell("opaque", page_bytes), Need.all(), 1)
        return cls(page_tokens, (group,), "opaque")

    @classmethod
    def from_hf_config(cls, config: Any, page_tokens: int = 64, dtype: object = None, **cell: Any) -> PageLayout:
        """The layout of a Hugging Face model: ``config`` is a dict, a path of config.json, an object.

        ``dtype``: of the engine's KV cache, default the model's. Also ``scale``, ``scale_digest`` (``kv``)
        and ``rope`` (``mla``). Layers that slide become the group "window", the others "full".
        UnsupportedModelError where the cache is not understood or KV is not a function of the prefix.
        """
        from kvfs.pages.hf_config import layout_from_config

        return layout_from_config(cls, config, page_tokens, dtype, **cell)

    def descriptor(self) -> dict[str, Any]:
        """JSON-able, enough to rebuild the layout, keys in stable order."""
        groups = [{**asdict(group), "layers": list(group.layers)} for group in self.groups]
        top = {"version": DESCRIPTOR_VERSION, "kind": self.kind, "page_tokens": self.page_tokens}
        return {**top, "groups": groups}

    @classmethod
    def from_descriptor(cls, descriptor: Any) -> PageLayout:
        """Rebuild a layout from untrusted data. ConfigError for anything that ``descriptor()`` could not return."""
        try:
            groups = tuple(_group(group) for group in descriptor["groups"])
            layout = cls(descriptor["page_tokens"], groups, descriptor["kind"])
        except (TypeError, LookupError, ValueError) as exc:
            raise ConfigError(f"not a layout descriptor: {exc}; pass what descriptor() returned") from None
        if layout.descriptor() != descriptor or type(descriptor["version"]) is not int:
            raise ConfigError("not a layout descriptor: unknown keys, or another version; update kvfs")
        return layout

    def digest(self) -> bytes:
        """32 bytes: BLAKE2b of the descriptor as canonical JSON (sorted keys, no spaces, ASCII)."""
        text = json.dumps(self.descriptor(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode("ascii"), digest_size=32).digest()


def _group(item: Any) -> Group:
    """A group from untrusted data; TypeError or LookupError where its shape is wrong."""
    parts = {"cell": Cell(**item["cell"]), "need": Need(**item["need"]), "layers": tuple(item["layers"])}
    return Group(**{**item, **parts})


def _cell(
    dtype: object, dims: tuple[int, int], text: str, scale_digest: str | None, scale: object = None, scales: int = 0
) -> Cell:
    """Two vectors of ``dims`` numbers, then scales; numbers of 8 bits or less have scales, in the cell or static."""
    name = _dtype(dtype, *_BITS)
    for dim in dims:
        _int(f"a dimension of a {name} cell", dim, 1, CELL_BYTES_MAX, 2 if name == "int4" else 1)
    if [scale, scale_digest].count(None) != (1 if _BITS[name] < 16 else 2):
        raise ConfigError(f"dtype is {name}: int8, int4 and fp8 pass scale= or scale_digest=, others neither")
    nbytes = sum(dims) * _BITS[name] // 8
    if scale is not None:
        short = _dtype(scale, "f16", "f32")
        text += f"+{short} scale {_int('scales', scales, 1, CELL_BYTES_MAX)}"
        nbytes += scales * _BITS[short] // 8
    static = "" if scale_digest is None else " static " + _text("scale_digest", scale_digest, _SCALE_DIGEST)
    return Cell(f"{name} {text}{static}", nbytes)


def _dtype(dtype: object, *allowed: str) -> str:
    """Short name of a dtype, given as a name, or a dtype or scalar type of torch or numpy."""
    name = (dtype.__name__ if isinstance(dtype, type) else str(dtype)).removeprefix("torch.").lower()
    name = _SHORT.get(name, name)
    if name not in allowed:
        raise ConfigError(f"dtype is {_show(dtype)}: pass one of {', '.join(allowed)}, or its long name")
    return name


def _layers(layers: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(layers, Iterable) and not isinstance(layers, str):
        return tuple(layers)
    return tuple(range(_int("layers", layers, 1, LAYERS_MAX)))


def _int(name: str, value: object, low: int, high: int, step: int = 1) -> int:
    if type(value) is int and low <= value <= high and value % step == 0:
        return value
    raise ConfigError(f"{name} is {_show(value)}: pass an integer in {low}..{high}, a multiple of {step}")


def _text(name: str, value: object, pattern: re.Pattern[str]) -> str:
    if type(value) is str and pattern.fullmatch(value):
        return value
    raise ConfigError(f"{name} is {_show(value)}: pass text that matches {pattern.pattern}")


def _show(value: object) -> str:
    """A bounded repr, since messages quote untrusted values."""
    return "a huge integer" if type(value) is int and value.bit_length() > 64 else reprlib.repr(value)
