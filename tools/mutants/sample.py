"""A seeded random sample of the mutants that cosmic-ray can make.

A place is one piece of source that an operator can change. Places are drawn, then one change of each: operators that
know many ways to change one place (a ``+`` becomes ten other operators) do not fill the sample.
"""

from __future__ import annotations

import ast
import importlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
import parso
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec, WorkItem

CONTROL = "core/NoOp"
CONTROLS = 0.03  # share of the sample that changes nothing: a control that is noticed is a test that fails by chance

Place = tuple[Path, tuple[int, int], tuple[int, int]]


class DropCall(Operator):
    """Remove a statement that is a call: a sync, a check, a notice. cosmic-ray has no operator for it."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.type == "simple_stmt" and node.children[0].type in ("atom_expr", "power"):
            call = node.children[0]
            last = call.children[-1]
            if last.type == "trailer" and last.children[0].value == "(":
                yield call.start_pos, call.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        assert index == 0
        node.children[0] = parso.python.tree.Keyword("pass", node.start_pos, node.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (Example("def f():\n    sync(1)\n", "def f():\n    pass\n"),)


cosmic_ray.plugins.OPERATOR_PROVIDERS["kvfs"] = {"DropCall": DropCall}


def means_the_same(operator: str) -> bool:
    """Changes that no test can tell in most places: equal small integers are one object in CPython."""
    _, _, change = operator.partition("ReplaceComparisonOperator_")
    before, _, after = change.partition("_")
    return after in ("Is", "IsNot") and before not in ("Is", "IsNot")


Span = tuple[tuple[int, int], tuple[int, int]]


def span(node: Any) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def unseen(source: str) -> list[Span]:
    """Spans that no run of the program can tell from another: annotations, blocks and overloads for type checkers, and
    assertions that never fail in a right program: ``strict=True`` of ``zip``, ``frozen`` and ``slots`` of a dataclass.
    And exceptions whose names have a dot: cosmic-ray fails when it is to replace them.
    """
    spans: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            spans += [node.returns, *(d for d in node.decorator_list if ast.unparse(d) == "overload")]
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            spans.append(node.annotation)
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            spans += [name for name in ast.walk(node.type) if isinstance(name, ast.Attribute)]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            spans.append(node)
        elif isinstance(node, ast.Call):
            asserted = {"zip": ("strict",), "dataclass": ("frozen", "slots")}.get(ast.unparse(node.func), ())
            spans += [k.value for k in node.keywords if k.arg in asserted]
    return [span(node) for node in spans if node is not None]


def unions_of_flags(source: str) -> list[Span]:
    """Spans of ``A | B`` with names of constants only: distinct bits, so the sum and the difference are their union."""
    unions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.BitOr))
    names = ((node, ast.unparse(node).split("|")) for node in unions)
    return [span(node) for node, parts in names if all(part.strip().rpartition(".")[2].isupper() for part in parts)]


def within(place: tuple[int, int], spans: Sequence[Span]) -> bool:
    return any(first <= place < end for first, end in spans)


def places_of(path: Path) -> dict[Place, list[MutationSpec]]:
    """The changes that cosmic-ray knows for each place of a module."""
    init = importlib.import_module("cosmic_ray.commands.init")  # the package has a function of the same name
    source = path.read_text(encoding="utf-8")
    skipped, flags = unseen(source), unions_of_flags(source)
    found: dict[Place, list[MutationSpec]] = {}
    for item in init._all_work_items([path], {}):
        (change,) = item.mutations
        name, place = change.operator_name, change.start_pos
        row, column = place
        at = (row, column + 1) if name.endswith("RemoveDecorator") else place  # of its name, behind the "@"
        if name == CONTROL or within(at, skipped) or means_the_same(name):
            continue
        if name.endswith(("BitOr_Add", "BitOr_BitXor")) and within(place, flags):
            continue
        found.setdefault((path, place, change.end_pos), []).append(change)
    return found


def draw(root: Path, packages: Sequence[str], size: int, seed: int) -> list[WorkItem]:
    """``size`` mutants and some controls, in a random order; the same for equal sources and seeds."""
    chance = random.Random(seed)
    places: dict[Place, list[MutationSpec]] = {}
    for package in packages:
        for path in sorted((root / "kvfs" / package).rglob("*.py")):
            places |= places_of(path)
    keys = sorted(places)
    chosen = [chance.choice(sorted(places[key], key=str)) for key in chance.sample(keys, min(size, len(keys)))]
    for path, start, end in chance.sample(keys, min(round(size * CONTROLS), len(keys))):
        chosen.append(MutationSpec(path, CONTROL, 0, start, end))
    chance.shuffle(chosen)
    return [WorkItem.single(f"{number:05d}", change) for number, change in enumerate(chosen)]


def create(session: Path, root: Path, packages: Sequence[str], size: int, seed: int) -> int:
    """Write the sample to a new session of cosmic-ray; its size."""
    items = draw(root, packages, size, seed)
    db = WorkDB(str(session), WorkDB.Mode.create)
    try:
        db.clear()
        db.add_work_items(items)
    finally:
        db.close()
    return len(items)
