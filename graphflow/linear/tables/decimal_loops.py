"""Decimal numbers in text as the nearest float64: plain Python that runs as machine code.

A number of up to 18 digits is an integer m times a power of ten. If both are exact in float64, one
multiplication rounds right. Otherwise the product is computed with twice the digits; if it lies too
close to the middle between two neighbours, the number counts as hard, and the caller reads it by
Python's `float`.

Source: Clinger, PLDI 1990 (the exact case); Dekker, Numerische Mathematik 18, 1971 (products).
"""

from __future__ import annotations

from typing import Any

LEAST, MOST = -80, 80
"""Powers of ten in the tables."""
_EXACT = 22
_EXACT_MANTISSA = 9007199254740992
_DIGITS = 18
_SPLIT = 134217729.0
_DOUBT = 1.0000000009313226


def read_number(text: Any, at: int, powers: Any, tails: Any, out: Any, place: int) -> int:
    """Write the number at a position to `out[place]`; return the position after it.

    Return -1 if there is no number, or a hard one.

    Args:
        text: bytes; a byte that belongs to no number follows.
        powers, tails: 10^k from k = `LEAST` on, as sums of two float64.
    """
    sign = int(text[at])
    if sign == 45 or sign == 43:  # - +
        at += 1
    begin, mantissa = at, 0
    digit = int(text[at]) - 48
    while digit >= 0 and digit <= 9:
        mantissa = mantissa * 10 + digit
        at += 1
        digit = int(text[at]) - 48
    digits, scale = at - begin, 0
    if digit == -2:  # .
        at += 1
        point = at
        digit = int(text[at]) - 48
        while digit >= 0 and digit <= 9:
            mantissa = mantissa * 10 + digit
            at += 1
            digit = int(text[at]) - 48
        scale = point - at
        digits += at - point
    if digits > _DIGITS:
        digits -= count_zeros(text, begin)
        if digits > _DIGITS:
            return -1
    elif digits == 0:
        return -1
    if digit == 53 or digit == 21:  # e E
        at += 1
        mark = int(text[at])
        if mark == 45 or mark == 43:
            at += 1
        start, exponent = at, 0
        digit = int(text[at]) - 48
        while digit >= 0 and digit <= 9:
            exponent = exponent * 10 + digit
            at += 1
            digit = int(text[at]) - 48
        if at == start or at - start > 4:
            return -1
        scale += -exponent if mark == 45 else exponent
    value = float(mantissa)
    if (mantissa != 0 and scale != 0) or mantissa > _EXACT_MANTISSA:
        value = scale_number(mantissa, scale, powers, tails)
        if value < 0.0:
            return -1
    out[place] = -value if sign == 45 else value
    return at


def count_zeros(text: Any, at: int) -> int:
    """Return the number of zeros that begin a number."""
    zeros = 0
    while int(text[at]) == 48 or int(text[at]) == 46:
        zeros += 1 if int(text[at]) == 48 else 0
        at += 1
    return zeros


def scale_number(mantissa: int, scale: int, powers: Any, tails: Any) -> float:
    """Return mantissa · 10^scale, rounded to the nearest; -1 if that is hard."""
    a = float(mantissa)
    if mantissa <= _EXACT_MANTISSA and scale >= -_EXACT and scale <= _EXACT:
        return float(a * powers[scale - LEAST] if scale > 0 else a / powers[-scale - LEAST])
    if scale < LEAST or scale > MOST:
        return -1.0
    b = powers[scale - LEAST]
    product = a * b
    moved = _SPLIT * a
    a_high = moved - (moved - a)
    a_low = a - a_high
    moved = _SPLIT * b
    b_high = moved - (moved - b)
    b_low = b - b_high
    rest = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    rest += a * tails[scale - LEAST] + float(mantissa - int(a)) * b
    value = product + rest
    left = rest - (value - product)
    return float(value if value + left * _DOUBT == value else -1.0)
