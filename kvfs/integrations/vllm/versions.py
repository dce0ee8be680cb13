"""The versions of vLLM that this adapter was tested with, and the warning for others."""

from __future__ import annotations

TESTED = ("0.32.0",)


def installed() -> str:
    """Version of vLLM in this process; "" if it is unknown."""
    import vllm

    return str(getattr(vllm, "__version__", "")).partition("+")[0]


def warning() -> str:
    """The warning for a version that was not tested; "" for one that was."""
    found = installed()
    if found in TESTED:
        return ""
    return (
        f"vLLM {found or '(of an unknown version)'} was not tested with this version of kvfs (tested: "
        f"{', '.join(TESTED)}). If it does not start, or a request fails, start it without KvfsConnector or install a "
        "tested version"
    )
