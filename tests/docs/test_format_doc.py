"""docs/format.md says what the code does: every table is compared with the struct that its heading names."""

from __future__ import annotations

import importlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from kvfs.directory.root import SUBDIRECTORIES, pack_super
from kvfs.format import checksums
from kvfs.format import segment as fmt
from kvfs.index.environment import State
from kvfs.index.rows import Extent
from kvfs.index.tables import Ledger, SegmentRow
from kvfs.pages import chunk_hash

DOC = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
HEADING = re.compile(r"^### .*: `(kvfs\.[\w.]+)`$", re.MULTILINE)

#: struct -> (fields in the code, or None if they have no names there; whether the check word is first or last)
STRUCTS: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "kvfs.pages.layout._PART": (("layer", "layers", "head", "heads"), ""),
    "kvfs.format.segment._HEADER": (None, "last"),
    "kvfs.format.segment._ENTRY": (fmt.Entry._fields, "last"),
    "kvfs.format.segment._SEAL": (None, "last"),
    "kvfs.format.codec._HEAD": (("planes", "zero"), ""),
    "kvfs.format.segment._PURGE": (("magic", "segment_id", "flags", "epoch", "bytes"), "last"),
    "kvfs.index.rows._HEAD": (None, "first"),
    "kvfs.index.rows._EXTENT": (Extent._fields, ""),
    "kvfs.index.tables._SEGMENT": (SegmentRow._fields, "last"),
    "kvfs.index.tables._LEDGER": (Ledger._fields, "last"),
}


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def section(name: str) -> str:
    """The text from the heading that names ``name`` to the next heading."""
    headings = list(HEADING.finditer(DOC))
    start = next(h.end() for h in headings if h[1] == name)
    return re.split(r"^#", DOC[start:], maxsplit=1, flags=re.MULTILINE)[0]


def table(text: str, columns: int) -> list[list[str]]:
    """Rows of the first table in ``text``, without its head."""
    rows = []
    for line in text.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    assert len(rows) > 2 and all(len(row) == columns for row in rows), f"no table of {columns} columns"
    return rows[2:]


def sizes(packer: struct.Struct) -> list[int]:
    """Bytes of each field of a struct without padding."""
    assert packer.format.startswith("<"), "little endian, no padding"
    found: list[int] = []
    for count, kind in re.findall(r"(\d*)([a-zA-Z])", packer.format[1:]):
        one = struct.calcsize("<" + kind)
        found += [int(count) if count else 1] if kind == "s" else [one] * int(count or 1)
    assert sum(found) == packer.size
    return found


def test_the_page_and_this_test_name_the_same_structs() -> None:
    documented = {h[1] for h in HEADING.finditer(DOC)}
    assert documented == {*STRUCTS, "kvfs.directory.root.pack_super", "kvfs.index.environment.State"}


@pytest.mark.parametrize("name", STRUCTS)
def test_offsets_sizes_and_fields_are_those_of_the_code(name: str) -> None:
    fields, check = STRUCTS[name]
    wanted = sizes(named(name)) + ([8] if check == "last" else [])
    rows = table(section(name), 4)
    offsets = [sum(wanted[:i]) for i in range(len(wanted))]
    assert [(int(row[0]), int(row[1])) for row in rows] == list(zip(offsets, wanted, strict=True))
    documented = [row[2] for row in rows]
    assert len(set(documented)) == len(documented)
    if fields is not None:
        assert documented == [*fields, *(["check"] if check == "last" else [])]
    elif check == "last":
        assert documented[-1] == "check"
    else:
        assert documented[0] == "check"


@pytest.mark.parametrize(
    ("name", "value", "packed"),
    [
        ("kvfs.format.segment._HEADER", fmt.Header(b"S" * 16, b"T" * 16, 5, 4, b"C" * 16), fmt.pack_header),
        ("kvfs.format.segment._SEAL", fmt.Seal(b"S" * 16, 3, 8192, 6, b"R" * 16), fmt.pack_seal),
    ],
)
def test_fields_are_where_the_page_says(name: str, value: Any, packed: Any) -> None:
    """Structs whose fields have no names in the code: what is packed is found under the documented name."""
    data = packed(value)
    at = {row[2]: data[int(row[0]) : int(row[0]) + int(row[1])] for row in table(section(name), 4)}
    for field, content in value._asdict().items():
        expected = content if isinstance(content, bytes) else content.to_bytes(len(at[field]), "little")
        assert at[field] == expected, field
    meaning = {row[2]: row[3] for row in table(section(name), 4)}
    assert at["magic"] == meaning["magic"].strip("`").encode().decode("unicode_escape").encode()
    for field in ("header_bytes", "first_table_bytes", "table_bytes", "version"):
        if field in at:
            assert int.from_bytes(at[field], "little") == int(meaning[field]), field
    assert int.from_bytes(at["check"], "little") == checksums.checksum(data[: data.index(at["check"])])


def test_constants_have_the_documented_values() -> None:
    rows = table(DOC[DOC.index("| constant |") :], 3)
    assert {row[0]: int(row[1]) for row in rows} == {row[0]: getattr(fmt, row[0]) for row in rows}
    assert len(rows) == 7


def test_the_json_files_have_the_documented_keys() -> None:
    body = json.loads(pack_super(bytes(16), 1))
    rows = {row[0]: row[1] for row in table(section("kvfs.directory.root.pack_super"), 2)}
    assert list(rows) == list(body)
    assert all(f"`{name}`" in rows["features"] for name in body["features"])
    assert all(name in rows["algorithms"] for name in body["algorithms"])
    assert tuple(row[0] for row in table(section("kvfs.index.environment.State"), 2)) == State._fields


def test_the_documented_chain_is_the_chain() -> None:
    hashes = chunk_hash.chain(chunk_hash.token_bytes(range(32)), 16, chunk_hash.tenant_seed(""))
    assert all(f"`{h.hex()}`" in DOC for h in hashes)


def test_every_directory_that_holds_data_is_documented() -> None:
    for name in set(SUBDIRECTORIES) - {"pins", "import", "quarantine", "run/use", "run"}:
        assert f"`{name}/" in DOC, name


def test_numbers_in_tables_are_those_of_the_code() -> None:
    flags = next(row[3] for row in table(section("kvfs.format.segment._HEADER"), 4) if row[2] == "flags")
    assert flags.startswith(f"{fmt.FLAG_PINNED} pinned, {fmt.FLAG_DIRECT} written direct, {fmt.FLAG_CARRIED} carried")
    purge = next(row[3] for row in table(section("kvfs.format.segment._PURGE"), 4) if row[2] == "flags")
    assert purge.startswith(f"{fmt.PURGE_PENDING} index rows") and f"{fmt.PURGE_ALL} all records" in purge
    kind = next(row[3] for row in table(section("kvfs.format.segment._ENTRY"), 4) if row[2] == "kind")
    assert kind == f"{fmt.KIND_PART} part of a page, {fmt.KIND_NAMESPACE} namespace, {fmt.KIND_CHAIN} chain"
