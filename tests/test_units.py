from __future__ import annotations

import pytest

from trl_alpharl.units import GIB, KIB, MIB, display_bytes


def test_units_are_powers_of_two():
    assert (KIB, MIB, GIB) == (2**10, 2**20, 2**30)


@pytest.mark.parametrize(
    "size_bytes, shown",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.5 * 2**20, "1.50 MiB"),
        (2**30 - 1, "1024.00 MiB"),
        (80 * 2**30, "80.00 GiB"),
        (-3 * 2**29, "-1.50 GiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(size_bytes, shown):
    assert display_bytes(size_bytes) == shown
