"""Compiles the native library into the wheel where there is a C compiler; without one the wheel is pure Python."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before hatchling builds a wheel; ``KVFS_NATIVE=0`` in the environment leaves the library out."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or os.environ.get("KVFS_NATIVE") == "0" or sys.platform != "linux":
            return
        sys.path.insert(0, self.root)
        try:
            from tools.build_native import OUTPUT, NoCompilerError, build
        finally:
            sys.path.remove(self.root)
        try:
            build(Path(self.root))
        except NoCompilerError as exc:
            self.app.display_warning(f"kvfs is installed without its native library: {exc}")
            return
        if version != "editable":
            build_data["artifacts"].append(OUTPUT.as_posix())
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
