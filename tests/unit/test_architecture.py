"""The shape of the code, read from the source of every module: imports go down only.

A new module gets its place in LAYERS; the other tables say who may use what. `if TYPE_CHECKING:` imports
obey the same direction but make no cycle, since they never run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "kvfs"

#: The first name below kvfs (a module, a package, or a pattern) -> its layer. kvfs/__init__.py is above all.
LAYERS: dict[int, tuple[str, ...]] = {
    5: ("cli", "integrations", "mount", "metrics"),
    4: (
        "store",
        "core",
        "cores",
        "guest",
        "workshop",
        "disabled",
        "namespace",
        "gc",
        "evictor",
        "survey",
        "victims",
        "keeper",
        "verify",
        "rebuild",
        "pins",
        "pinned",
        "catalog",
        "settings",
        "warm",
        "bundle*",
        "plan",
        "diagnosis*",
        "purge",
        "recompress",
        "selection",
        "watch",
        "dropfolder",
        "tensorfile",
    ),
    3: (
        "transfer",
        "restored",
        "host[ijls]*",
        "gpu*",
        "inplace",
        "pieces",
        "staging",
        "eviction",
        "usage",
        "cohorts",
        "reader",
        "assemble",
        "fetch",
        "reads",
        "writer",
        "active",
        "turns",
        "carry",
        "encoder",
        "match",
        "matcher",
        "prompt",
        "covering",
        "lookup",
        "lookahead",
        "unitids",
        "presence",
        "walk",
        "records",
        "context",
    ),
    2: (
        "segment*",
        "index",
        "kernels",
        "cuda",
        "space",
        "liveness",
        "recency",
        "tally",
        "marks",
        "epochs",
        "registered",
        "hostcopy",
        "testing",
    ),
    1: (
        "format",
        "codec",
        "direct",
        "modes",
        "hashing",
        "chains",
        "layout",
        "hf_config",
        "config",
        "files",
        "pool",
        "directory",
        "descriptors",
        "identity",
        "buffers",
        "device",
        "tensors",
        "milestone",
        "memory",
        "sigterm",
    ),
    0: ("types", "errors", "version", "bits"),
}
TOP = max(LAYERS) + 1
#: Library -> the only places that may import it.
ONLY = {"triton": ("kernels",)}
#: Library -> the places that must not import it.
NEVER = {"torch": ("index", "segment*", "gc", "verify", "cli")}
#: What runs code that it finds in data, or can.
FORBIDDEN_MODULES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"})
FORBIDDEN_CALLS = frozenset({"eval", "exec"})
#: A module stays under this many lines.
LINE_LIMIT = 400


class Import(NamedTuple):
    target: str  # the module, in full
    line: int
    runs: bool  # False: only a type checker sees it


class Module(NamedTuple):
    name: str  # in full: kvfs.index.lmdb
    path: Path
    place: str  # the first name below kvfs; "" for kvfs itself
    imports: tuple[Import, ...]
    calls: tuple[tuple[str, int], ...]
    lines: int


# ---------------------------------------------------------------- reading the source


def module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_package(package: Path) -> dict[str, Module]:
    """Every module below the directory `package`, by its full name."""
    paths = {module_name(p, package): p for p in sorted(package.rglob("*.py"))}
    return {name: read_module(name, path, frozenset(paths)) for name, path in paths.items()}


def read_module(name: str, path: Path, known: frozenset[str]) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and is_type_checking(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    parent = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports: list[Import] = []
    calls: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        imports += [Import(t, line, id(node) not in lazy) for t in imported(node, parent, known)]
        if isinstance(node, ast.Call) and (called := called_builtin(node.func)) in FORBIDDEN_CALLS:
            calls.append((called, line))
    place = name.split(".")[1] if "." in name else ""
    return Module(name, path, place, tuple(imports), tuple(calls), len(text.splitlines()))


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def called_builtin(func: ast.expr) -> str:
    if isinstance(func, ast.Name):
        return func.id
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "builtins":
        return func.attr
    return ""


def imported(node: ast.AST, parent: str, known: frozenset[str]) -> Iterator[str]:
    """The modules that a node imports: a statement, or import_module() of a literal."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = parent.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
        for alias in node.names:
            full = f"{base}.{alias.name}"
            # `from kvfs import errors` names a module, `from kvfs import open` the package; a place in the
            # table counts as a module even before its file exists.
            is_module = full in known or (base == PACKAGE and layer_of(alias.name) is not None)
            yield full if is_module else base
    elif isinstance(node, ast.Call) and node.args:
        func = node.func
        called = getattr(func, "id", getattr(func, "attr", ""))  # f() or x.f()
        first = node.args[0]
        if called in {"import_module", "__import__"} and isinstance(first, ast.Constant):
            target = str(first.value)
            yield parent + target if target.startswith(".") else target


# ---------------------------------------------------------------- the rules


def matches(place: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(place, pattern) for pattern in patterns)


def layer_of(place: str) -> int | None:
    return next((n for n, patterns in LAYERS.items() if matches(place, patterns)), None)


def place_of(target: str) -> str | None:
    """The first name below kvfs of an imported module; "" for kvfs itself, None for other libraries."""
    first, _, rest = target.partition(".")
    return rest.partition(".")[0] if first == PACKAGE else None


def broken_rules(module: Module) -> list[str]:
    where = module.path.name if not module.place else module.name
    layer = layer_of(module.place) if module.place else TOP
    found: list[str] = []
    if layer is None:
        found.append(f"{where}: {module.place!r} has no layer; give it one in LAYERS ({Path(__file__).name})")
    for target, line, _ in module.imports:
        library, place = target.partition(".")[0], place_of(target)
        if place is not None:
            below = layer_of(place) if place else TOP
            if below is None:
                found.append(f"{where}:{line}: imports {target}, which has no layer in LAYERS")
            elif layer is not None and below > layer:
                found.append(f"{where}:{line}: layer {layer} imports {target} of layer {below}, which is above")
        if library in FORBIDDEN_MODULES:
            found.append(f"{where}:{line}: imports {library}")
        if library in ONLY and not matches(module.place, ONLY[library]):
            found.append(f"{where}:{line}: imports {library}; only {', '.join(ONLY[library])} may")
        if library in NEVER and matches(module.place, NEVER[library]):
            found.append(f"{where}:{line}: imports {library}; {module.place} must not")
    found += [f"{where}:{line}: calls {call}()" for call, line in module.calls]
    if module.lines >= LINE_LIMIT:
        found.append(f"{where}: {module.lines} lines; a module stays under {LINE_LIMIT}, so split it")
    return found


def find_cycle(modules: dict[str, Module]) -> list[str] | None:
    """Modules that import each other in a ring, at load time or inside functions; None when there is none."""
    edges = {
        name: [i.target for i in m.imports if i.runs and i.target in modules and i.target != name]
        for name, m in modules.items()
        if m.place
    }
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done or name not in edges:
            return None
        for target in edges[name]:
            if (ring := visit(target, [*path, name])) is not None:
                return ring
        done.add(name)
        return None

    return next((ring for name in edges if (ring := visit(name, [])) is not None), None)


# ---------------------------------------------------------------- kvfs keeps them

MODULES = read_package(ROOT / PACKAGE)


def test_there_are_modules() -> None:
    assert any(m.place for m in MODULES.values()), f"no modules under {ROOT / PACKAGE}"


@pytest.mark.parametrize("name", MODULES)
def test_module_keeps_the_rules(name: str) -> None:
    found = broken_rules(MODULES[name])
    assert not found, "\n" + "\n".join(found)


def test_no_import_cycle() -> None:
    ring = find_cycle(MODULES)
    assert ring is None, "import cycle: " + " -> ".join(ring or ())


# ---------------------------------------------------------------- and would notice if it did not


def tree(tmp_path: Path, files: dict[str, str]) -> dict[str, Module]:
    """A package kvfs with these modules, by their path without the ending."""
    for name, text in {"__init__": "", **files}.items():
        path = tmp_path / PACKAGE / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_package(tmp_path / PACKAGE)


@pytest.mark.parametrize(
    ("place", "text", "expected"),
    [
        ("format", "import kvfs.store", "layer 1 imports kvfs.store of layer 4"),
        ("format", "from kvfs import store", "layer 1 imports kvfs.store of layer 4"),
        ("format", "from .store import Store", "layer 1 imports kvfs.store of layer 4"),
        ("format", "def f():\n    from kvfs.store import Store", "format:2: layer 1 imports kvfs.store"),
        ("format", "if TYPE_CHECKING:\n    import kvfs.store", "format:2: layer 1 imports kvfs.store"),
        ("format", "import importlib\nimportlib.import_module('kvfs.store')", "format:2: layer 1 imports"),
        ("cli/main", "from kvfs import open", "layer 5 imports kvfs of layer 6"),
        ("index/lmdb", "from ..store import Store", "layer 2 imports kvfs.store of layer 4"),
        ("surprise", "", "'surprise' has no layer"),
        ("store", "import kvfs.surprise", "imports kvfs.surprise, which has no layer"),
        ("transfer", "import triton.language as tl", "only kernels may"),
        ("gc", "import torch", "gc must not"),
        ("segment_reader", "from torch import Tensor", "segment_reader must not"),
        ("index/lmdb", "def f():\n    import torch.cuda", "index must not"),
        ("codec", "import pickle", "imports pickle"),
        ("codec", "from marshal import loads", "imports marshal"),
        ("codec", "x = eval('1')", "calls eval()"),
        ("codec", "import builtins\nx = builtins.eval('1')", "calls eval()"),
        ("codec", "\n" * LINE_LIMIT, "400 lines"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, place: str, text: str, expected: str) -> None:
    modules = tree(tmp_path, {"store": "", place: text})
    found = broken_rules(modules[f"{PACKAGE}.{place.replace('/', '.')}"])
    assert len(found) == 1 and expected in found[0], found


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("store", "from kvfs import errors, format\nfrom kvfs.segment import Segment\nimport torch"),
        ("store", "from kvfs.namespace import Namespace"),
        ("kernels/gather", "import triton\nimport torch\nfrom kvfs.layout import PageLayout"),
        ("transfer", "def f(model):\n    model.eval()"),
        ("codec", "\n" * (LINE_LIMIT - 1)),
    ],
)
def test_what_is_allowed(tmp_path: Path, place: str, text: str) -> None:
    modules = tree(tmp_path, {place: text})
    assert broken_rules(modules[f"{PACKAGE}.{place.replace('/', '.')}"]) == []


def test_the_package_itself_may_import_all_but_the_forbidden(tmp_path: Path) -> None:
    assert broken_rules(tree(tmp_path, {"__init__": "from kvfs.store import Store"})[PACKAGE]) == []
    found = broken_rules(tree(tmp_path, {"__init__": "import pickle"})[PACKAGE])
    assert found == ["__init__.py:1: imports pickle"]


def test_a_cycle_is_found(tmp_path: Path) -> None:
    files = {
        "store": "import kvfs.gc",
        "gc": "def f():\n    from kvfs import pins",
        "pins": "from .store import Store",
    }
    assert find_cycle(tree(tmp_path, files)) == ["kvfs.gc", "kvfs.pins", "kvfs.store", "kvfs.gc"]


def test_a_cycle_inside_a_package_is_found(tmp_path: Path) -> None:
    files = {
        "index/__init__": "from kvfs.index.lmdb import Index",
        "index/lmdb": "from kvfs.index import Row",
    }
    ring = find_cycle(tree(tmp_path, files))
    assert ring is not None and set(ring) == {"kvfs.index", "kvfs.index.lmdb"}


def test_imports_for_types_make_no_cycle(tmp_path: Path) -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvfs.store import Store"
    assert find_cycle(tree(tmp_path, {"store": "import kvfs.namespace", "namespace": typed})) is None
