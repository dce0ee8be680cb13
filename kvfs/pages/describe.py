"""Descriptors from tensors: the order of the dimensions is a string, so that a new engine needs no code.

The string names each dimension of a tensor: ``layer``; ``block`` (units of several tokens) or ``slot`` (one token or
state each); ``batch``; ``kv`` (size 2: K, then V); ``token``; ``head`` or ``2*head`` (the heads of K, then those
of V); ``dim`` or ``2*dim`` (K and V, adjacent), which must be contiguous. Examples::

    "block,kv,token,head,dim"    vLLM, a tensor per layer          "block,head,token,2*dim"   vLLM on a CPU
    "layer,block,kv,head,token,dim" ... any order of these         "slot,head,dim"            SGLang, separate K and V
    "layer,slot,2*head,dim"      LightLLM                          "batch,head,token,dim"     transformers
    "block,token,dim"            MLA                               "slot,dim"                 recurrent states
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvfs.errors import ConfigError
from kvfs.pages.device_kv import DeviceKV, KVBuffer
from kvfs.pages.layout import Group

_FLOATS = {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float32": "f32"}
_NAMES = frozenset({"layer", "block", "slot", "batch", "kv", "token", "head", "2*head", "dim", "2*dim"})


class _Array(NamedTuple):
    """A tensor's memory, by dimension name: sizes, and strides in bytes."""

    address: int
    size: Mapping[str, int]
    stride: Mapping[str, int]
    itemsize: int
    extent: tuple[int, int]
    memory: str


class _Piece(NamedTuple):
    """A contiguous piece of each cell of some layers. ``bases``: address for (unit 0, token 0, head 0) per layer."""

    bases: list[int]
    arrays: list[_Array]
    heads: int
    nbytes: int


def describe(
    group: Group, tensors: Any, order: str | Sequence[str], *, layers: Sequence[int] | None = None,
    first_head: int = 0, replica: tuple[int, int] = (0, 1), row: int = 0, memory: str | None = None,
) -> DeviceKV:  # fmt: skip
    """Describe the tensors in which an engine keeps ``group``; they are kept alive, never copied.

    ``tensors``: one tensor if ``order`` names ``layer``, else a sequence with one per layer; where K, V or scales
    are in separate tensors, tuples of tensors in the order of the cell, each with its own ``order`` or all with one.
    ``layers``: their MODEL layer ids (default: all of the group). ``first_head``: model head slot of head 0.
    ``replica``: (index, count) of ranks that hold the same bytes. ``row``: which entry of dimension ``batch``.
    ``memory``: "pinned" where the engine has locked the pages. ConfigError for what a descriptor cannot express.
    """
    ids = group.layers if layers is None else tuple(layers)
    orders = [_parse(text) for text in ([order] if isinstance(order, str) else order)]
    buffers: list[KVBuffer] = []
    offset = 0
    for number, per_layer in enumerate(_columns(tensors, "layer" in orders[0], len(ids))):
        names = orders[min(number, len(orders) - 1)]
        for tensor in per_layer:
            _check_dtype(tensor, group)
        arrays = [_array(tensor, names) for tensor in per_layer]
        for piece in _pieces(arrays, row, len(ids)):
            buffers.append(_buffer(group, piece, ids, (first_head, piece.heads), replica, offset, memory, tensors))
            offset += piece.nbytes
    return DeviceKV(group.name, tuple(buffers))


def _parse(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    wrong = [n for n in names if n not in _NAMES] or [n for n in names if names.count(n) > 1]
    if wrong:
        raise ConfigError(f"order {text!r} names {wrong[0]!r}: name each of {', '.join(sorted(_NAMES))} at most once")
    units = [n for n in names if n in ("block", "slot")]
    if len(units) > 1 or not {*units, "token"} & {*names} or ("slot" in names and "token" in names):
        raise ConfigError(f"order {text!r}: name 'block' (with 'token'), or 'slot', or 'token' (with 'batch')")
    if {"head", "2*head"} <= {*names} or {"dim", "2*dim"} <= {*names}:
        raise ConfigError(f"order {text!r} names a dimension and its double: name one of them")
    return names


def _columns(tensors: Any, one: bool, count: int) -> list[list[Any]]:
    """Tensors by piece of the cell, then by layer (a single one that holds all layers if ``one``)."""
    rows = [tensors] if one else list(tensors)
    if not one and len(rows) != count:
        raise ConfigError(f"{len(rows)} tensors for {count} layers: pass one per layer, or name 'layer' in the order")
    split = [list(row) if isinstance(row, (tuple, list)) else [row] for row in rows]
    if len({len(row) for row in split}) != 1:
        raise ConfigError("layers have different numbers of tensors: pass the same pieces for each")
    return [list(column) for column in zip(*split, strict=True)]


def _check_dtype(tensor: Any, group: Group) -> None:
    """ConfigError for torch floats other than the cell's: of the same width they would be mistaken for each other.

    numpy has no bf16, so its dtypes are not checked. Next to quantised numbers there are scales, of any dtype other
    than floats of 8 bits.
    """
    wanted, dtype = group.cell.encoding.partition(" ")[0], str(getattr(tensor, "dtype", ""))
    narrow = dtype.startswith("torch.float8") and group.cell.element_bytes > 0
    found = dtype.removeprefix("torch.") if narrow else _FLOATS.get(dtype, wanted)
    if found != wanted and (narrow or wanted in _FLOATS.values()):
        raise ConfigError(f"a tensor holds {found}, the cells of group {group.name} {wanted}: pass KV of that dtype")


def _array(tensor: Any, names: tuple[str, ...]) -> _Array:
    if hasattr(tensor, "data_ptr"):
        array = _of_torch(tensor, names)
    elif hasattr(tensor, "__array_interface__"):
        array = _of_numpy(tensor, names)
    else:
        raise ConfigError(f"a tensor is {type(tensor).__name__}: pass a torch tensor or a numpy array")
    for name in ("dim", "2*dim"):
        if array.size.get(name, 1) > 1 and array.stride[name] != array.itemsize:
            raise ConfigError(f"dimension {name!r} has stride {array.stride[name]} bytes: it must be contiguous")
    return array


def _named(names: tuple[str, ...], values: Sequence[int], factor: int = 1) -> dict[str, int]:
    if len(names) != len(values):
        raise ConfigError(f"a tensor has {len(values)} dimensions, the order names {len(names)}: {','.join(names)}")
    return {name: int(value) * factor for name, value in zip(names, values, strict=True)}


def _of_torch(tensor: Any, names: tuple[str, ...]) -> _Array:
    storage, item = tensor.untyped_storage(), int(tensor.element_size())
    memory = "host" if tensor.device.type == "cpu" else str(tensor.device)
    return _Array(
        int(tensor.data_ptr()), _named(names, tensor.shape), _named(names, tensor.stride(), item), item,
        (int(storage.data_ptr()), int(storage.nbytes())), memory,
    )  # fmt: skip


def _of_numpy(array: Any, names: tuple[str, ...]) -> _Array:
    address, read_only = array.__array_interface__["data"]
    if read_only:
        raise ConfigError("an array is read-only: pass one that loads can write to")
    root = array
    while hasattr(root.base, "__array_interface__"):
        root = root.base
    start = int(root.__array_interface__["data"][0])
    steps = [s * (n - 1) for s, n in zip(root.strides, root.shape, strict=True)]
    low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
    extent = (start + low, high - low + root.itemsize)
    return _Array(
        int(address), _named(names, array.shape), _named(names, array.strides), int(array.itemsize), extent, "host"
    )


def _pieces(arrays: list[_Array], row: int, layers: int) -> Iterator[_Piece]:
    """The contiguous pieces of a cell that one column of tensors holds, in the order of the cell."""
    first = arrays[0]
    if any((a.size, a.stride, a.memory) != (first.size, first.stride, first.memory) for a in arrays):
        raise ConfigError("the tensors of the layers differ in shape, strides or device: describe them separately")
    size, stride = first.size, first.stride
    if "layer" in size and size["layer"] != layers:
        raise ConfigError(f"dimension 'layer' has {size['layer']} entries for {layers} layers: pass layers=")
    if not 0 <= row < size.get("batch", row + 1):
        raise ConfigError(f"row is {row}: the batch has {size['batch']} rows")
    if "kv" in size and size["kv"] != 2:
        raise ConfigError(f"dimension 'kv' has {size['kv']} entries: it holds K and V, 2")
    if size.get("2*head", 2) % 2 or size.get("2*dim", 2) % 2:
        raise ConfigError("a doubled dimension has an odd size: it holds K, then V, of the same size")
    starts = [a.address + row * stride.get("batch", 0) for a in arrays]
    if "layer" in size:
        starts = [starts[0] + i * stride["layer"] for i in range(layers)]
    heads = size.get("head", size.get("2*head", 2) // 2)
    nbytes = size.get("dim", size.get("2*dim", 1)) * first.itemsize
    step = stride["kv"] if "kv" in size else stride.get("2*head", 0) * heads
    if "kv" in size and step == nbytes:
        nbytes, step = 2 * nbytes, 0  # K and V of a token touch: one piece
    extended = arrays * layers if "layer" in size else arrays
    for number in range(2 if step else 1):
        yield _Piece([start + number * step for start in starts], extended, heads, nbytes)


def _buffer(
    group: Group, piece: _Piece, ids: tuple[int, ...], heads: tuple[int, int], replica: tuple[int, int], offset: int,
    memory: str | None, owner: object,
) -> KVBuffer:  # fmt: skip
    array = piece.arrays[0]
    if memory not in (None, array.memory) and (memory, array.memory) != ("pinned", "host"):
        raise ConfigError(
            f"memory is {memory!r}, a tensor is in {array.memory}: leave it out, or pass 'pinned' for host tensors"
        )
    size, stride = array.size, array.stride
    unit = next((name for name in ("block", "slot") if name in size), "token")
    tokens = size["token"] if unit == "block" and "token" in size else int(group.states > 1)
    if unit == "block" and "token" not in size and group.states > 1:
        raise ConfigError(f"order of group {group.name} has 'block' without 'token': name single tokens 'slot'")
    return KVBuffer(
        memory or array.memory, tuple(piece.bases), tuple(a.extent for a in piece.arrays), ids, heads, replica,
        tokens, size[unit],
        (stride[unit], stride["token"] if unit == "block" and "token" in size else 0,
         stride.get("head", stride.get("2*head", 0))),
        (offset, piece.nbytes), owner,
    )  # fmt: skip
