"""Numbers as text: units, three significant digits, and the plural of a noun.

Plans, pages, reports and errors all format numbers here, so that one number reads the same
everywhere.
"""

from __future__ import annotations

from math import isinf

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def show_seconds(value: float) -> str:
    """Format a duration, as in "1.23 ms"."""
    for unit, name in _SECONDS:
        if abs(value) >= unit:
            return f"{_digits(value / unit, 3)} {name}"
    return "0 s" if value == 0 else f"{_digits(value / 1e-9, 3)} ns"


def show_margin(value: float, margin: float) -> str:
    """Format a duration that may be off by a margin, as in "1.23 ms ± 0.2"."""
    unit, name = time_unit(abs(value))
    return f"{_digits(value / unit, 3)} {name} ± {_digits(margin / unit, 2)}"


def show_interval(value: float, low: float | None, high: float | None) -> str:
    """Format a duration with its interval, as in "1.23 ms (1.1 to 1.4)"; without one, alone."""
    if low is None or high is None:
        return show_seconds(value)
    unit, _ = time_unit(abs(value))
    return f"{show_seconds(value)} ({_digits(low / unit, 3)} to {_digits(high / unit, 3)})"


def show_bytes(value: float) -> str:
    """Format a size, as in "1.21 MiB"."""
    return _in_bytes(value, 3)


def show_memory(value: float) -> str:
    """Format a size with four digits, as in "1.207 MiB"; infinity is "unlimited memory".

    Needed and available memory are often equal to three digits.
    """
    return "unlimited memory" if isinf(value) else _in_bytes(value, 4)


def show_count(number: int, noun: str) -> str:
    """Format a number with its noun, as in "1 node" or "1,234 nodes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def time_unit(longest: float) -> tuple[float, str]:
    """Return (seconds, name) of the unit for an axis that ends at `longest` seconds."""
    return next(((unit, name) for unit, name in _SECONDS if longest >= unit), _SECONDS[-1])


def _in_bytes(value: float, digits: int) -> str:
    for unit, name in _BYTES:
        if abs(value) >= unit:
            return f"{_digits(value / unit, digits)} {name}"
    return f"{value:.0f} B"


def _digits(value: float, count: int) -> str:
    """Format a number with `count` significant digits, never with an exponent."""
    return f"{value:.0f}" if abs(value) >= 10 ** (count - 1) - 0.05 else f"{value:.{count}g}"
