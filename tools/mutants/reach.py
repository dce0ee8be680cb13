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


def function_at(source: str, line: int) -> int:
    """The first line, decorators included, of the outermost function around a line; 0: the module runs it itself."""
    found = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if node.body[0].lineno <= line <= (node.end_lineno or 0) and (not found or first < found):
                found = first
    return found


@dataclass
class Reach:
    """Functions, as ``module:first line``, with the tests that run them. Kept in a file."""

    path: Path
    files: list[str] = field(default_factory=list)  # of tests that were noted
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

    def of(self, module: str, source: str, line: int) -> list[str]:
        """Tests that run the function at a line; for a line of the module itself, those that run any function of it."""
        first = function_at(source, line)
        if first:
            return self.functions.get(f"{module}:{first}", [])
        mine = (tests for key, tests in self.functions.items() if key.rpartition(":")[0] == module)
        return sorted({test for tests in mine for test in tests})


class Noted:
    """A pytest plugin: notes the functions below ``root/kvfs`` that each test runs, in all threads of the process."""

    def __init__(self, root: Path, log: Path) -> None:
        self._prefix, self._log = f"{root}/", log
        self._codes: set[CodeType] = set()
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
        for code in self._codes:
            name = code.co_filename
            if name.startswith(self._prefix + "kvfs/"):
                key = f"{name.removeprefix(self._prefix)}:{code.co_firstlineno}"
                tests = self.functions.setdefault(key, [])
                if not tests or tests[-1] != item.nodeid:
                    tests.append(item.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._log.write_text(json.dumps(self.functions))
