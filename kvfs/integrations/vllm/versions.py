"""Which vLLM this adapter was tested with, and what is said where it meets another one."""

from __future__ import annotations

TESTED = ("0.32.0",)


def installed() -> str:
    """Version of the engine in this process; "" where it does not tell."""
    import vllm  # it calls us, so it is there

    return str(getattr(vllm, "__version__", "")).partition("+")[0]


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
