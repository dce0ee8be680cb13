"""Which tests run which functions of kvfs: a mutant is asked of the tests that run its function.

Noted once, while the tests run without a bug. What a test runs in a child process is not seen.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest


def functions_of(source: str) -> dict[int, tuple[int, str]]:
    """The outermost functions: the first line of each, decorators included, with its last line and its dotted name."""
    found: dict[int, tuple[int, str]] = {}

    def look(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                found[first] = child.end_lineno or first, prefix + child.name
            elif isinstance(child, ast.ClassDef):
                look(child, f"{prefix}{child.name}.")
            else:
                look(child, prefix)

    look(ast.parse(source), "")
    return found


def function_at(source: str, line: int) -> str:
    """The dotted name of the outermost function around a line, its defaults and decorators included; of other lines "":
    the module runs them itself.
    """
    return next((name for first, (last, name) in functions_of(source).items() if first <= line <= last), "")


@dataclass
class Reach:
    """Functions, as ``module:dotted name``, with the tests that run them. Kept in a file."""

    path: Path
    files: dict[str, str] = field(default_factory=dict)  # of tests that were noted, each with a digest of its text
    functions: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Reach:
        if not path.exists():
            return cls(path)
        data = json.loads(path.read_text())
        names = data["tests"]
        functions = {key: [names[i] for i in tests] for key, tests in data["functions"].items()}
        return cls(path, data["files"], functions)

    def save(self) -> None:
        names = sorted({test for tests in self.functions.values() for test in tests})
        number = {test: i for i, test in enumerate(names)}
        functions = {key: [number[t] for t in tests] for key, tests in self.functions.items()}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"files": self.files, "tests": names, "functions": functions}))
        new.replace(self.path)

    def note(self, file: str, digest: str, functions: dict[str, list[str]]) -> None:
        """What the tests of a file run, in place of what they ran."""
        for key, tests in self.functions.items():
            self.functions[key] = [test for test in tests if test.partition("::")[0] != file]
        for key, tests in functions.items():
            self.functions.setdefault(key, []).extend(tests)
        self.files[file] = digest
        self.save()

    def of(self, module: str, source: str, line: int) -> list[str]:
        """Tests that run the function at a line; for a line of the module itself, those that run any function of it."""
        name = function_at(source, line)
        if name:
            return self.functions.get(f"{module}:{name}", [])
        mine = (tests for key, tests in self.functions.items() if key.rpartition(":")[0] == module)
        return sorted({test for tests in mine for test in tests})


class Noted:
    """A pytest plugin: notes the functions below ``root/kvfs`` that each test runs, in all threads of the process."""

    def __init__(self, root: Path, log: Path) -> None:
        self._prefix, self._log = f"{root}/", log
        self._codes: set[CodeType] = set()
        self._names: dict[str, dict[int, tuple[int, str]]] = {}  # of modules, as functions_of() gives them
        self.functions: dict[str, list[str]] = {}

    def _called(self, frame: FrameType, event: str, arg: Any) -> None:
        self._codes.add(frame.f_code)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self._codes = set()
        threading.settrace(self._called)
        sys.settrace(self._called)
        yield
        sys.settrace(None)
        threading.settrace(None)
        for code in list(self._codes):  # a copy: threads of the test may go on
            file = code.co_filename
            if not file.startswith(self._prefix + "kvfs/"):
                continue
            if file not in self._names:
                self._names[file] = functions_of(Path(file).read_text(encoding="utf-8"))
            _, name = self._names[file].get(code.co_firstlineno, (0, ""))
            if name:
                tests = self.functions.setdefault(f"{file.removeprefix(self._prefix)}:{name}", [])
                if not tests or tests[-1] != item.nodeid:
                    tests.append(item.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._log.write_text(json.dumps(self.functions))
