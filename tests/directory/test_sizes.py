"""Sizes as people read them."""

from __future__ import annotations

import pytest

from kvfs.directory.sizes import size

KIB, MIB, GIB, TIB, PIB = (1 << 10 * n for n in range(1, 6))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (KIB, "1.0 KiB"), (KIB + 51, "1.0 KiB"), (KIB + 52, "1.1 KiB"),
        (MIB, "1.0 MiB"), (5 * GIB // 2, "2.5 GiB"), (TIB, "1.0 TiB"), (PIB, "1.0 PiB"), (2000 * PIB, "2000.0 PiB"),
        (-1023, "-1023 B"), (-KIB, "-1.0 KiB"), (0.4, "0 B"), (1023.6 * KIB, "1023.6 KiB"),
    ],
)  # fmt: skip
def test_a_size_has_one_digit_behind_the_point_and_its_unit(nbytes: float, text: str) -> None:
    assert size(nbytes) == text
