"""How numbers are told to people: with units, three digits, and the right form of the noun.

Everything that prints, draws or complains takes them from here, so that one number reads the same
in a plan, on its page, in a report and in an error.
"""

from __future__ import annotations

from math import isinf

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def show_seconds(value: float) -> str:
    """1.23 ms"""
    for unit, name in _SECONDS:
        if abs(value) >= unit:
            return f"{_digits(value / unit, 3)} {name}"
    return "0 s" if value == 0 else f"{_digits(value / 1e-9, 3)} ns"


def show_bytes(value: float) -> str:
    """1.21 MiB"""
    return _in_bytes(value, 3)


def show_memory(value: float) -> str:
    """1.207 MiB, or unlimited memory: what is needed beside what there is takes a digit more."""
    return "unlimited memory" if isinf(value) else _in_bytes(value, 4)


def show_count(number: int, noun: str) -> str:
    """1 node, 1,234 nodes"""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def time_unit(longest: float) -> tuple[float, str]:
    """(seconds, name) of the unit in which an axis up to `longest` seconds reads well."""
    return next(((unit, name) for unit, name in _SECONDS if longest >= unit), _SECONDS[-1])


def _in_bytes(value: float, digits: int) -> str:
    for unit, name in _BYTES:
        if abs(value) >= unit:
            return f"{_digits(value / unit, digits)} {name}"
    return f"{value:.0f} B"


def _digits(value: float, count: int) -> str:
    """So many digits, as far as they say something; never an exponent."""
    return f"{value:.0f}" if abs(value) >= 10 ** (count - 1) - 0.05 else f"{value:.{count}g}"
