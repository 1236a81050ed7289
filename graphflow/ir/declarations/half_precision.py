"""16-bit floats: stored as float16 or bfloat16, computed in float32.

No kernel adds in 16 bits. A kernel gets such arrays as float32, and its float results are
rounded once, to nearest, when they are stored. So sums, products and norms do not accumulate
rounding errors. Kernels that only move numbers (`Op.halves`), or round once by themselves
(`Op.takes_half`), get 16-bit arrays as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.ir.spec import TensorSpec, is_half


def has_half(arrays: Sequence[Any]) -> bool:
    """Return True if an array (or spec) has a 16-bit float dtype."""
    return any(is_half(a.dtype) for a in arrays)


def upcast_half(arrays: Sequence[Any]) -> list[Any]:
    """Convert arrays of 16-bit floats to float32, which is exact; others stay."""
    return [a.astype("float32") if is_half(a.dtype) else a for a in arrays]


def round_to_specs(results: Sequence[Any], specs: Sequence[TensorSpec]) -> tuple[Any, ...]:
    """Round results to the dtypes of their specs where these are 16-bit floats."""
    return tuple(
        r.astype(s.dtype) if is_half(s.dtype) else r for r, s in zip(results, specs, strict=True)
    )


Float32Runner = Callable[[Callable[..., None], Any, Sequence[Any], Mapping[str, Any]], None]


def upcast_into(
    into: Callable[..., None],
    takes_half: Callable[..., bool] | None = None,
    run_in_float32: Float32Runner | None = None,
) -> Callable[..., None]:
    """Wrap the `into` of an op for 16-bit floats: compute in float32 buffers, then round.

    Args:
        takes_half: tells of which arrays `into` rounds by itself (`Op.takes_half`).
        run_in_float32: (into, out, arrays, attrs) does this on a CPU.
    """

    def narrow(xp: Any, out: Any, *arrays: Any, **attrs: Any) -> None:
        if takes_half is not None and xp is np and takes_half(*arrays, **attrs):
            into(xp, out, *arrays, **attrs)
            return
        if xp is np and run_in_float32 is not None:
            run_in_float32(into, out, arrays, attrs)
            return
        outs = out if isinstance(out, tuple) else (out,)
        wide = tuple(xp.empty(o.shape, "float32") if is_half(o.dtype) else o for o in outs)
        into(xp, wide if isinstance(out, tuple) else wide[0], *upcast_half(arrays), **attrs)
        for target, result in zip(outs, wide, strict=True):
            if result is not target:
                xp.copyto(target, result, casting="unsafe")

    return narrow
