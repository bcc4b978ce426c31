"""Texts of x values on the axes of figures."""

from __future__ import annotations

import math


def power_of_two(value: float) -> str:
    return f"$2^{{{math.log2(value):.0f}}}$"


def plain_number(value: float) -> str:
    """Return 0.00001 as such, not as 1e-05."""
    return f"{value:.6f}".rstrip("0")


def power_of_ten(value: float) -> str:
    """Return a power of ten; nothing for values between, whose texts would overlap."""
    power = math.log10(value)
    return f"$10^{{{power:.0f}}}$" if math.isclose(power, round(power)) else ""
