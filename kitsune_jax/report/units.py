"""Numbers as a person reads them: bytes, seconds, counts, percentages, ratios."""

from __future__ import annotations

from collections.abc import Callable


def byte_text(n: float) -> str:
    """Decimal units, three significant digits: ``1.03 GB``, ``48.2 kB``, ``12 B``."""
    sign, n = ("-" if n < 0 else ""), abs(n)
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= 0.9995 * scale:
            return f"{sign}{_three_digits(n / scale)} {unit}"
    return f"{sign}{n:.0f} B"


def time_text(seconds: float) -> str:
    """Three significant digits: ``1.20 s``, ``-42.0 ms``, ``7.31 us``."""
    if seconds < 0:
        return f"-{time_text(-seconds)}"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def flop_text(n: float) -> str:
    """Three significant digits: ``1.03 Gflop``, ``-12.0 kflop``, ``7 flop``."""
    sign, n = ("-" if n < 0 else ""), abs(n)
    for unit, scale in (("Tflop", 1e12), ("Gflop", 1e9), ("Mflop", 1e6), ("kflop", 1e3)):
        if n >= 0.9995 * scale:
            return f"{sign}{_three_digits(n / scale)} {unit}"
    return f"{sign}{n:.0f} flop"


def signed(text: Callable[[float], str], x: float) -> str:
    """``text(x)``, with a plus where ``x`` is more than nothing."""
    return f"+{text(x)}" if x > 0 else text(x)


def count_text(n: int) -> str:
    """Thousands apart: ``65 536``."""
    return f"{n:,}".replace(",", " ")


def percent_text(part: float, whole: float) -> str:
    """``93 %``; one decimal above 90 % so that 99.6 % does not read as all of it; ``0 %`` of nothing."""
    share = 100.0 * part / whole if whole else 0.0
    return f"{share:.1f} %" if 90.0 <= share < 100.0 else f"{share:.0f} %"


def plural(n: int, noun: str) -> str:
    """``1 region``, ``2 regions``, ``1 024 tiles``."""
    return f"{count_text(n)} {noun}" + ("" if n == 1 else "s")


def _three_digits(x: float) -> str:
    return f"{x:.2f}" if x < 9.995 else f"{x:.1f}" if x < 99.95 else f"{x:.0f}"
