"""Kernels run under the interpreter where there is no GPU. It must be chosen before triton is imported."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
