"""Sums of 16-bit floats are taken in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Into = Callable[..., None]


def widened(into: Into) -> Into:
    """`into` that computes 16-bit floats in float32; other dtypes as they are."""

    @functools.wraps(into)
    def wide(xp: Any, out: Any, *arrays: Any, **attrs: Any) -> None:
        if out.dtype.itemsize >= 4 or out.dtype.kind in "biu":
            into(xp, out, *arrays, **attrs)
            return
        sums = xp.empty(out.shape, xp.float32)
        converted = [a.astype(xp.float32) if a.dtype == out.dtype else a for a in arrays]
        into(xp, sums, *converted, **attrs)
        out[...] = sums.astype(out.dtype)

    return wide
