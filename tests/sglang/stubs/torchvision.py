"""Stands for torchvision, which SGLang imports at the top of modules that these tests never use.

A module and package at once: every submodule is this file again, and every name in it is a class.
"""

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

__path__: list[str] = []


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


class _Finder:
    """Finds torchvision.anything."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = __getattr__  # type: ignore[method-assign]


if __name__ == "torchvision":
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]
