"""Names and axes in drawings: shortened to fit a box, with round tick marks."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata

from graphflow.base.formatting import time_unit

# Characters that XML 1.0 has no way to write, those that steer terminals, and those that turn the
# direction of the text around them, so that a name could read as another.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


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
    """Return the width of a text in letters; Chinese, Japanese and Korean letters count twice."""
    return len(text) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)


def _begin(text: str, letters: int) -> str:
    """Return as much of the beginning of a text as fits."""
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
