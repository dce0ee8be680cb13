"""The structure of ``kvfs/``, read from the source: packages, what imports what, cycles, public surfaces.

    python -m tools.structure            packages with their floor, modules, lines and imports; cycles; sizes
    python -m tools.structure --surface  also the names that other packages take from each package

A package is the first name below ``kvfs``; a module at the top is a node of its own. Imports inside functions and
under ``if TYPE_CHECKING`` count like all others. ``tests/test_architecture.py`` holds the table of what is allowed.
"""

from __future__ import annotations

import argparse
import ast
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "kvfs"


class Import(NamedTuple):
    """One imported module."""

    target: str  # the module, in full
    name: str  # what is taken from it; "" for the module itself
    line: int
    runs: bool  # False: only a type checker sees it


class Module(NamedTuple):
    """One file of the package."""

    name: str  # in full: kvfs.index.session
    path: Path
    imports: tuple[Import, ...]
    calls: tuple[tuple[str, int], ...]  # builtins called by name
    lines: int

    @property
    def place(self) -> str:
        return place_of(self.name) or ""


def place_of(target: str) -> str | None:
    """The first name below kvfs of a module; "" for kvfs itself, None for other libraries."""
    first, _, rest = target.partition(".")
    return rest.partition(".")[0] if first == PACKAGE else None


def read_package(package: Path) -> dict[str, Module]:
    """Every module below the directory ``package``, by its full name."""
    paths = {_module_name(p, package): p for p in sorted(package.rglob("*.py"))}
    return {name: _read_module(name, path, frozenset(paths)) for name, path in paths.items()}


def _module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read_module(name: str, path: Path, known: frozenset[str]) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and _is_type_checking(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    parent = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports: list[Import] = []
    calls: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        imports += [Import(t, n, line, id(node) not in typing_only) for t, n in _imported(node, parent, known)]
        if isinstance(node, ast.Call) and (called := _called_builtin(node.func)):
            calls.append((called, line))
    return Module(name, path, tuple(imports), tuple(calls), len(text.splitlines()))


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _called_builtin(func: ast.expr) -> str:
    if isinstance(func, ast.Name):
        return func.id
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "builtins":
        return func.attr
    return ""


def _imported(node: ast.AST, parent: str, known: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(module, name) that a node imports: a statement, or import_module() of a literal."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = parent.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield (full, "") if full in known else (base, alias.name)
    elif isinstance(node, ast.Call) and node.args:
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))  # f() or x.f()
        first = node.args[0]
        if called in {"import_module", "__import__"} and isinstance(first, ast.Constant):
            target = str(first.value)
            yield (parent + target if target.startswith(".") else target), ""


def package_graph(modules: Mapping[str, Module], *, types: bool = True) -> dict[str, set[str]]:
    """Package -> packages that it imports; with ``types``, imports for type checkers count too."""
    graph: dict[str, set[str]] = {m.place: set() for m in modules.values()}
    for module in modules.values():
        for item in module.imports:
            place = place_of(item.target)
            if place is not None and place != module.place and (types or item.runs):
                graph[module.place].add(place)
    return graph


def module_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Module -> modules that it imports when it runs, inside functions included."""
    return {
        name: {i.target for i in m.imports if i.runs and i.target in modules and i.target not in (name, PACKAGE)}
        for name, m in modules.items()
        if name != PACKAGE
    }


def find_cycle(graph: Mapping[str, set[str]]) -> list[str] | None:
    """Nodes that import each other in a ring, the first one repeated at the end; None when there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for target in sorted(graph.get(name, ())):
            if (ring := visit(target, [*path, name])) is not None:
                return ring
        done.add(name)
        return None

    return next((ring for name in sorted(graph) if (ring := visit(name, [])) is not None), None)


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """The length of the longest chain of imports below each package of a graph without cycles."""
    found: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((floor(n) for n in graph.get(name, ())), default=0)
        return found[name]

    for name in graph:
        floor(name)
    return found


def surfaces(modules: Mapping[str, Module]) -> dict[str, dict[str, set[str]]]:
    """Package -> module -> the names that other packages take from it ("*": the module itself)."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module in modules.values():
        for item in module.imports:
            place = place_of(item.target)
            if place and place != module.place and module.name != PACKAGE:
                found[place][item.target].add(item.name or "*")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--surface", action="store_true", help="the names that other packages take")
    args = parser.parse_args()
    modules = read_package(ROOT / PACKAGE)
    graph = package_graph(modules)
    ring = find_cycle(graph) or find_cycle(module_graph(modules))
    if ring is None:
        height = floors(graph)
        for place in sorted(graph, key=lambda p: (-height[p], p)):
            mine = [m for m in modules.values() if m.place == place]
            lines = sum(m.lines for m in mine)
            imports = " ".join(sorted(p or PACKAGE for p in graph[place])) or "-"
            print(f"{height[place]:2} {place or PACKAGE:14} {len(mine):3} modules {lines:6} lines -> {imports}")
    print("cycle:", " -> ".join(ring) if ring else "none (types included)")
    sizes = [m.lines for m in modules.values()]
    print(f"{len(sizes)} modules, {sum(sizes)} lines, median {statistics.median(sizes):g}, longest {max(sizes)}")
    if args.surface:
        for place, taken in sorted(surfaces(modules).items()):
            print(f"{place}: {sum(map(len, taken.values()))} names")
            for name, names in sorted(taken.items()):
                print(f"    {name}: {', '.join(sorted(names))}")
    return 1 if ring else 0


if __name__ == "__main__":
    raise SystemExit(main())
