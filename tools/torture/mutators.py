"""Mutations of known structures: fields of structs, nodes of JSON, lines of TOML, records of a segment.

Most recompute the checksums afterwards, so that inputs also reach the code behind the first check.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

from kvfs.directory.root import _canonical
from kvfs.format import segment as fmt
from kvfs.format.checksums import checksum, root_of
from kvfs.pages.identity import digest_of
from tools.torture.images import Image

BIG = "@big@"  # stands for a number that json.dumps refuses to write
INTEGERS = (0, 1, -1, 2, 7, 16, 31, 32, 33, 255, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53)
VALUES: tuple[Any, ...] = (
    None, True, False, *INTEGERS, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.0, 1.5, 1e308, float("nan"),
    float("inf"), "", "a", "a" * 300, "a" * 5000, "\0", "\ud800", "\u202e", "../../etc", "main", "all", "exact", [], {},
    [[]], [None], {"": None}, BIG, "00" * 16, "zz" * 16, " " * 32,
)  # fmt: skip
SIZES = (0, 1, 4095, 4096, 16383, 16384, 16385, 2**20, 2**31, 2**32, 2**35, 2**35 + 4096, 2**44, 2**44 + 4096, 2**62)


def flip_bytes(chance: random.Random, data: bytes) -> bytes:
    """Change, cut, double or insert bytes."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(6):
            case 0 if out:
                out[at % len(out)] ^= 1 << chance.randrange(8)
            case 1 if out:
                out[at % len(out)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            case 2:
                del out[at:]
            case 3:
                out[at:at] = chance.randbytes(chance.choice((1, 2, 4, 8, 64)))
            case 4:
                end = min(len(out), at + chance.choice((1, 4, 8, 32)))
                out[at:at] = out[at:end]
            case _:
                del out[at : at + chance.choice((1, 4, 8))]
    return bytes(out)


def mutate_fields(chance: random.Random, packer: struct.Struct, body: bytes) -> bytes:
    """Change one or more fields of a struct."""
    fields = list(packer.unpack(body))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        i = chance.randrange(len(fields))
        if isinstance(fields[i], bytes):
            size = len(fields[i])
            fields[i] = chance.choice(
                (bytes(size), b"\xff" * size, chance.randbytes(size), flip_bytes(chance, fields[i])[:size].ljust(size))
            )
        else:
            new = chance.choice(
                (*INTEGERS, 2**63 - 1, 2**64 - 1, fields[i] + 1, fields[i] - 1, fields[i] ^ 1 << chance.randrange(64))
            )
            for width in (64, 32, 16, 8):  # the widest that the field takes
                try:
                    changed = [*fields]
                    changed[i] = new % (1 << width)
                    packer.pack(*changed)
                except struct.error:
                    continue
                fields = changed
                break
    return packer.pack(*fields)


def struct_mutator(packer: struct.Struct, seed: int = 0, *, check_first: bool = False) -> Callable[..., bytes]:
    """Mutator of a struct with its check word behind it; the bytes behind that stay."""

    def mutate(chance: random.Random, data: bytes) -> bytes:
        if len(data) < packer.size + 8 or chance.random() < 0.1:
            return flip_bytes(chance, data)
        body = mutate_fields(chance, packer, data[: packer.size])
        check = data[packer.size : packer.size + 8]
        if chance.random() < 0.9:
            check = checksum(body, seed=seed).to_bytes(8, "little")
        return body + check + data[packer.size + 8 :]

    return mutate


# -- text ------------------------------------------------------------------------------------


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every node of a JSON tree, at most a few thousand."""
    found, queue = [path], [(path, tree)]
    while queue and len(found) < 2000:
        at, node = queue.pop()
        items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            found.append((*at, key))
            queue.append(((*at, key), child))
    return found


def _node(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def mutate_tree(chance: random.Random, tree: Any) -> Any:
    """Replace, remove, add or swap one or more nodes of a JSON tree."""
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        paths = _paths(tree)
        path = chance.choice(paths)
        if not path:
            if chance.random() < 0.02:
                tree = chance.choice(VALUES)
            continue
        parent, key = _node(tree, path[:-1]), path[-1]
        match chance.randrange(7):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[chance.choice(("", "x", "kvfs", "version", "layers", "__class__", "a" * 300))] = parent[key]
            case 1 | 2 if isinstance(parent, list):
                many = 5000 if chance.random() < 0.02 else 3
                parent[key:key] = [parent[key]] * chance.choice((1, 2, 5, 70, many))
            case 3:
                parent[key] = json.loads(json.dumps(_node(tree, chance.choice(paths))))
            case 4 if type(parent[key]) is int:
                parent[key] += chance.choice((-1, 1, 16, 2**31))
            case _:
                parent[key] = chance.choice(VALUES)
    return tree


def mutate_json(chance: random.Random, data: bytes, mend: Callable[[Any], None] | None = None) -> bytes:
    """Mutate JSON text; ``mend`` repairs checks inside the tree."""
    roll = chance.random()
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        roll = 0.0
    if roll < 0.08:
        return flip_bytes(chance, data)
    if roll < 0.12:  # deeper than a parser's recursion limit
        depth = chance.choice((10, 100, 900, 1100, 7000, 30000))
        left, right = chance.choice((("[", "]"), ('{"a":', "}")))
        text = data.decode("utf-8", "replace")
        at = text.find(":") + 1
        return (text[:at] + left * depth + "1" + right * depth + text[at:].lstrip()[1:]).encode("utf-8", "replace")
    try:
        tree = mutate_tree(chance, tree)
        if mend is not None and isinstance(tree, dict) and chance.random() < 0.9:
            mend(tree)
        text = json.dumps(tree, separators=(",", ":"), sort_keys=chance.random() < 0.8)
    except (ValueError, RecursionError, TypeError):
        return flip_bytes(chance, data)
    return text.replace(f'"{BIG}"', chance.choice(("9" * 5000, "1e9999", "-" + "8" * 4301))).encode()


def mend_super(tree: dict[str, Any]) -> None:
    tree.pop("check", None)
    tree["check"] = f"{checksum(_canonical(tree)):016x}"


_TOML = (
    "0", "-1", "1.5", "true", '""', '"200GiB"', '"1e9"', "[]", "{}", "inf", "nan", "1979-05-27", "1979-05-27T07:32:00Z",
    "00:00:00", "0x" + "f" * 6000, "9" * 5000, "0b" + "1" * 20000, "[" * 50 + "]" * 50, "[" * 2000 + "]" * 2000,
    "[0x" + "f" * 6000 + "]", '{a = 0x' + "f" * 5000 + "}", '"' + "a" * 9000 + '"', "'''\n'''", '"\\ud800"',
    '"\\u0000"',
    '"' + "9" * 31 + 'GiB"', '"0.' + "9" * 30 + 'TiB"', "9223372036854775807", "18446744073709551616",
)  # fmt: skip
_LINES = (
    "[quota]", '[quota."a"]', "[[quota]]", '[quota."a".b]', "quota = 1", 'quota.a.cap = "1GiB"', "a" * 3000 + " = 1",
    ".".join("a" * 12000) + " = 1", "[" + ".".join("b" * 200) + "]", "\x00", "\ufeff", "= 1", "capacity", "# \x7f",
    'ttl = "1d"', "guaranteed = 1e400", 'cap = "1KiB"', 'guaranteed = "1TiB"', "ttl = 1e300", "ttl = -0.0", "ttl = nan",
)  # fmt: skip


def mutate_toml(chance: random.Random, data: bytes) -> bytes:
    if chance.random() < 0.1:
        return flip_bytes(chance, data)
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(lines))
        name, equals, _value = lines[at].partition("=")
        match chance.randrange(4):
            case 0 | 1 if equals:
                lines[at] = f"{name}= {chance.choice(_TOML)}"
            case 2:
                lines[at:at] = [chance.choice(_LINES) if chance.random() < 0.8 else chance.choice(lines)]
            case _:
                del lines[at]
                lines = lines or [""]
    return "\n".join(lines).encode("utf-8", "replace")


# -- segments --------------------------------------------------------------------------------

_FIRST_SLOTS = fmt.slots_of_table(True)


def slot_offset(seq: int) -> int:
    """Offset of entry ``seq``, which must be in the first table."""
    return fmt.FIRST_TABLE + seq % _FIRST_SLOTS * fmt.ENTRY_BYTES


def _entry_at(chance: random.Random, image: Image, tables: list[int]) -> int:
    table = chance.choice(tables)
    slots = fmt.slots_of_table(table == fmt.FIRST_TABLE)
    slot = chance.choice((0, 1, 2, slots - 2, slots - 1, chance.randrange(slots)))
    return table + slot * fmt.ENTRY_BYTES


def mutate_segment(chance: random.Random, source: Image) -> Image:
    """Change the header, an entry, a descriptor, the seal or the size, with valid check words."""
    image = source.copy()
    seed = fmt.segment_seed(image.read(56, 16))
    tables = [fmt.FIRST_TABLE, *_chained(image, seed)]
    for _ in range(chance.choice((1, 1, 1, 2, 6))):
        match chance.randrange(12):
            case 0:
                page = struct_mutator(fmt._HEADER)(chance, image.read(0, fmt.HEADER_BYTES))
                image.write(0, page[: fmt.BLOCK])
            case 1:
                image.size = chance.choice((*SIZES, image.size - 4096, image.size + 4096, image.size + 1))
            case 2:
                at = chance.randrange(max(1, min(image.size, 1 << 20)))
                image.write(at, chance.randbytes(chance.choice((1, 8, 4096))))
            case 3:
                a, b = _entry_at(chance, image, tables), _entry_at(chance, image, tables)
                image.write(a, image.read(b, fmt.ENTRY_BYTES))
            case 4:
                _mutate_descriptor(chance, image, seed)
            case 5:
                _mutate_seal(chance, image, seed)
            case _:
                at = _entry_at(chance, image, tables)
                raw = image.read(at, fmt.ENTRY_BYTES)
                if len(raw) == fmt.ENTRY_BYTES:
                    image.write(at, struct_mutator(fmt._ENTRY, seed)(chance, raw)[: fmt.ENTRY_BYTES])
    if len(image.pieces) > 60:  # drops overwritten pieces
        image.pieces = [(0, image.read(0, min(image.size, 2 << 20)))]
    return image


def _chained(image: Image, seed: int) -> list[int]:
    found, table = [], fmt.FIRST_TABLE
    while len(found) < 8:
        slots = fmt.slots_of_table(table == fmt.FIRST_TABLE)
        entry = fmt.parse_entry(image.read(table + (slots - 1) * fmt.ENTRY_BYTES, fmt.ENTRY_BYTES), seed)
        if entry is None or entry.kind != fmt.KIND_CHAIN or entry.payload in found:
            break
        table = entry.payload
        found.append(table)
    return found


def _mutate_descriptor(chance: random.Random, image: Image, seed: int) -> None:
    """Replace a namespace descriptor, and mend its entry."""
    for seq in range(_FIRST_SLOTS):
        at = slot_offset(seq)
        entry = fmt.parse_entry(image.read(at, fmt.ENTRY_BYTES), seed)
        if entry is None or entry.payload > SIZES[-1]:  # beyond any file's size
            continue
        if entry.kind == fmt.KIND_NAMESPACE and entry.stored_bytes < 1 << 17:
            data = mutate_json(chance, image.read(entry.payload, entry.stored_bytes))[: 1 << 17]
            image.write(entry.payload, data)
            new = entry._replace(stored_bytes=len(data), root=root_of(data), chunk_hash=digest_of(data))
            image.write(at, fmt.pack_entry(new, seed))
            if chance.random() < 0.7:
                return


def _mutate_seal(chance: random.Random, image: Image, seed: int) -> None:
    at = image.size - fmt.BLOCK
    raw = image.read(at, fmt.SEAL_BYTES) if at >= 0 else b""
    if len(raw) == fmt.SEAL_BYTES:
        image.write(at, struct_mutator(fmt._SEAL)(chance, raw)[: fmt.SEAL_BYTES])
