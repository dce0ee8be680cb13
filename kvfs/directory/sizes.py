"""Sizes as people read them; ``config.parse_size`` reads them back."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: float) -> str:
    """``116.5 GiB``."""
    unit = 0
    while abs(nbytes) >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.0f} B" if unit == 0 else f"{nbytes:.1f} {_UNITS[unit]}"
