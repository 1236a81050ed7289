"""How drawings write numbers and names: with their units, and short enough for a box."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
# Characters that XML 1.0 has no way to write, those that steer terminals, and those that turn the
# direction of the text around them, so that a name could read as another.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def seconds(value: float) -> str:
    """1.23 ms"""
    for unit, name in _SECONDS:
        if abs(value) >= unit:
            return f"{_three(value / unit)} {name}"
    return "0 s" if value == 0 else f"{_three(value / 1e-9)} ns"


def size(value: float) -> str:
    """Bytes: 1.21 MiB"""
    for unit, name in _BYTES:
        if value >= unit:
            return f"{_three(value / unit)} {name}"
    return f"{int(value)} B"


def counted(number: int, noun: str) -> str:
    """1 node, 1,234 nodes"""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _three(value: float) -> str:
    """Three digits, as far as they say something."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def time_unit(longest: float) -> tuple[float, str]:
    """(seconds, name) of the unit in which an axis up to `longest` seconds reads well."""
    return next(((unit, name) for unit, name in _SECONDS if longest >= unit), _SECONDS[-1])


def shorten(name: str, letters: int) -> str:
    """The name in the room of at most `letters`: its last part tells most, then its first."""
    if _room(name) <= letters:
        return name
    first, *rest = name.split("/")
    if rest:
        if _room(short := f"{first}/…/{rest[-1]}") <= letters and first:
            return short
        for i in range(len(rest)):
            if _room(short := "…/" + "/".join(rest[i:])) <= letters:
                return short
    head = (letters - 1) // 3
    return f"{_begin(name, head)}…{_begin(name[::-1], letters - 1 - head)[::-1]}"


def _room(text: str) -> int:
    """Its width in letters: those of Chinese, Japanese and Korean take two."""
    return len(text) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)


def _begin(text: str, letters: int) -> str:
    """As much of its beginning as has room."""
    ends = itertools.accumulate(map(_room, text))
    return text[: sum(1 for _ in itertools.takewhile(lambda end: end <= letters, ends))]


def printable(text: str) -> str:
    """The text without the control characters that no XML or HTML document may hold."""
    return _UNPRINTABLE.sub("\ufffd", text)


def ticks(longest: float, about: int = 10) -> list[tuple[float, str]]:
    """(seconds, text) of some `about` round marks on an axis from 0 to `longest` seconds."""
    unit, name = time_unit(longest)
    step = 10.0 ** math.floor(math.log10(longest / unit / about))
    step = next(step * k for k in (1, 2, 5, 10) if longest / unit <= step * k * about)
    count = int(longest / unit / step + 1e-9)
    return [(i * step * unit, f"{i * step:.6g} {name}" if i else "0") for i in range(count + 1)]
