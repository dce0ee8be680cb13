"""The shape of the code, read from the source: which package may import which, and what none may.

``ALLOWED`` is the table of ``docs/architecture.md``. A new package gets its row in both. Imports inside functions and
imports for types count like all others. ``python -m tools.structure`` prints what the source says today.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.structure import PACKAGE, ROOT, Module, find_cycle, module_graph, package_graph, place_of, read_package

#: Package, or module at the top of kvfs/ -> what it may import of kvfs. ``kvfs`` itself (the facade) may import all.
ALLOWED: dict[str, str] = {
    "cli": (
        "bench bundles catalog directory doctor errors eviction format index maintenance metrics mount namespace pages "
        "remote store system version"
    ),
    "mount": "bundles catalog directory errors format lookup metrics namespace pages store system",
    "bench": "errors namespace pages store",
    "metrics": "directory errors pages store version",
    "integrations": "directory errors format lookup namespace pages ranks remote store system transfer types",
    "ranks": "errors gpu kernels lookup native pages system transfer types",
    "store": (
        "bundles catalog directory errors eviction format index lookup maintenance namespace native pages "
        "remote runtime system types version"
    ),
    "namespace": "context directory errors format gpu lookup pages read system transfer types write",
    "runtime": (
        "bundles context directory errors eviction index lookup maintenance pages read remote segments system types "
        "write"
    ),
    "doctor": "bundles directory errors format native remote segments system",
    "gpu": (
        "catalog context directory errors format index kernels lookup pages read segments system transfer types write"
    ),
    "maintenance": "catalog context directory errors eviction format index lookup pages segments system types write",
    "bundles": ("catalog context directory errors format index lookup pages read segments system types version write"),
    "remote": "bundles catalog context directory errors format index lookup pages segments system write",
    "eviction": "context directory errors format index segments system write",
    "transfer": "context directory errors lookup pages read segments system types write",
    "read": "context errors format index lookup native pages segments system types",
    "write": "context directory errors format index lookup pages segments",
    "catalog": "context errors format index pages segments system",
    "lookup": "context errors index native pages segments types",
    "context": "directory index pages segments system types",
    "index": "directory errors format native pages system",
    "kernels": "pages",
    "segments": "directory errors format native pages system",
    "testing": "format remote system",
    "directory": "errors format system version",
    "pages": "errors format native system types",
    "native": "errors",
    "system": "errors format",
    "format": "errors",
    "errors": "",
    "types": "",
    "version": "",
}
#: Library -> the only packages that may import it.
ONLY = {"triton": {"kernels"}, "obstore": {"remote"}, "cryptography": {"remote"}}
#: Library -> the packages that must not import it.
NEVER = {"torch": {"index", "segments", "eviction", "maintenance", "cli"}}
#: What runs code that it finds in data, or can.
FORBIDDEN_MODULES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"})
FORBIDDEN_CALLS = frozenset({"eval", "exec"})


def broken_rules(module: Module) -> list[str]:
    where = module.name if module.place else module.path.name
    found: list[str] = []
    if module.place and module.place not in ALLOWED:
        found.append(f"{where}: {module.place!r} has no row in ALLOWED ({Path(__file__).name})")
    allowed = set(ALLOWED.get(module.place, "").split())
    for target, _, line, _ in module.imports:
        library, place = target.partition(".")[0], place_of(target)
        if place is not None and module.place in ALLOWED and place not in allowed | {module.place}:
            found.append(f"{where}:{line}: {module.place} imports {target}, which ALLOWED does not list")
        if library in FORBIDDEN_MODULES:
            found.append(f"{where}:{line}: imports {library}")
        if library in ONLY and module.place not in ONLY[library]:
            found.append(f"{where}:{line}: imports {library}; only {', '.join(ONLY[library])} may")
        if library in NEVER and module.place in NEVER[library]:
            found.append(f"{where}:{line}: imports {library}; {module.place} must not")
    found += [f"{where}:{line}: calls {call}()" for call, line in module.calls if call in FORBIDDEN_CALLS]
    return found


# ---------------------------------------------------------------- kvfs keeps them

MODULES = read_package(ROOT / PACKAGE)


def test_there_are_modules() -> None:
    assert any(m.place for m in MODULES.values()), f"no modules under {ROOT / PACKAGE}"


@pytest.mark.parametrize("name", MODULES)
def test_module_keeps_the_rules(name: str) -> None:
    found = broken_rules(MODULES[name])
    assert not found, "\n" + "\n".join(found)


def test_packages_make_no_cycle_even_with_imports_for_types() -> None:
    ring = find_cycle(package_graph(MODULES))
    assert ring is None, "import cycle: " + " -> ".join(ring or ())


def test_modules_make_no_cycle() -> None:
    ring = find_cycle(module_graph(MODULES))
    assert ring is None, "import cycle: " + " -> ".join(ring or ())


def test_every_allowed_import_is_used() -> None:
    graph = package_graph(MODULES)
    unused = {p: left for p, row in ALLOWED.items() if (left := sorted(set(row.split()) - graph.get(p, set())))}
    assert not unused, f"ALLOWED lists imports that nothing uses any more: {unused}"


def test_the_document_shows_the_same_table() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \| .* \| (.*) \|$", text, re.MULTILINE)
    assert {name: row.replace("-", "").replace("`", "") for name, row in rows} == ALLOWED


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
        ("format/segment", "import kvfs.store", "format imports kvfs.store, which ALLOWED does not list"),
        ("format/segment", "from kvfs import store", "format imports kvfs.store"),
        ("format/segment", "from ..store import Store", "format imports kvfs.store"),
        ("format/segment", "def f():\n    from kvfs.store import Store", "segment:2: format imports kvfs.store"),
        ("format/segment", "if TYPE_CHECKING:\n    import kvfs.store", "segment:2: format imports kvfs.store"),
        ("format/segment", "import importlib\nimportlib.import_module('kvfs.store')", "segment:2: format imports"),
        ("cli/main", "from kvfs import open", "cli imports kvfs, which"),
        ("surprise/part", "", "'surprise' has no row"),
        ("store", "import kvfs.surprise", "store imports kvfs.surprise, which"),
        ("transfer/load", "import triton.language as tl", "only kernels may"),
        ("eviction/reclaimer", "import torch", "eviction must not"),
        ("segments/scan", "from torch import Tensor", "segments must not"),
        ("index/session", "def f():\n    import torch.cuda", "index must not"),
        ("format/codec", "import pickle", "imports pickle"),
        ("format/codec", "from marshal import loads", "imports marshal"),
        ("format/codec", "x = eval('1')", "calls eval()"),
        ("format/codec", "import builtins\nx = builtins.eval('1')", "calls eval()"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, place: str, text: str, expected: str) -> None:
    modules = tree(tmp_path, {"store": "", place: text})
    found = broken_rules(modules[f"{PACKAGE}.{place.replace('/', '.')}"])
    assert len(found) == 1 and expected in found[0], found


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("store", "from kvfs import errors\nfrom kvfs.index.session import Session\nimport torch"),
        ("kernels/cells", "import triton\nimport torch\nfrom kvfs.pages.layout import PageLayout"),
        ("transfer/load", "from kvfs.transfer import save\ndef f(model):\n    model.eval()"),
    ],
)
def test_what_is_allowed(tmp_path: Path, place: str, text: str) -> None:
    modules = tree(tmp_path, {"errors": "", place: text})
    assert broken_rules(modules[f"{PACKAGE}.{place.replace('/', '.')}"]) == []


def test_the_facade_may_not_import_what_runs_code_either(tmp_path: Path) -> None:
    found = broken_rules(tree(tmp_path, {"__init__": "import pickle"})[PACKAGE])
    assert found == ["__init__.py:1: imports pickle"]


def test_a_cycle_of_packages_is_found_though_one_import_is_for_types(tmp_path: Path) -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvfs.store import Store"
    modules = tree(tmp_path, {"store": "import kvfs.read.reader", "read/__init__": "", "read/reader": typed})
    assert find_cycle(package_graph(modules)) == ["read", "store", "read"]
    assert find_cycle(module_graph(modules)) is None


def test_a_cycle_inside_a_package_is_found(tmp_path: Path) -> None:
    files = {
        "index/rows": "def f():\n    from kvfs.index import session",
        "index/session": "from .rows import Row",
        "index/__init__": "",
    }
    ring = find_cycle(module_graph(tree(tmp_path, files)))
    assert ring == ["kvfs.index.rows", "kvfs.index.session", "kvfs.index.rows"]
