"""Floats of 16 bits: stored as float16 or bfloat16, computed in float32.

No kernel computes in 16 bits. One that is given such arrays sees them as float32, and its float
results are rounded once, to nearest, when they are stored: sums, products and norms lose nothing
on the way. Kernels that only move numbers (`Op.halves`) get them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.ir.spec import TensorSpec, is_half


def has_half(arrays: Sequence[Any]) -> bool:
    """Whether some array (or spec) is of 16-bit floats."""
    return any(is_half(a.dtype) for a in arrays)


def upcast_half(arrays: Sequence[Any]) -> list[Any]:
    """Arrays with those of 16-bit floats as float32: exactly the same numbers."""
    return [a.astype("float32") if is_half(a.dtype) else a for a in arrays]


def round_to_specs(results: Sequence[Any], specs: Sequence[TensorSpec]) -> tuple[Any, ...]:
    """Results in the dtypes of their specs: 16-bit floats rounded from float32."""
    return tuple(
        r.astype(s.dtype) if is_half(s.dtype) else r for r, s in zip(results, specs, strict=True)
    )


def upcast_into(into: Callable[..., None]) -> Callable[..., None]:
    """The `into` of an op for arrays of 16-bit floats: by way of float32 buffers of its own."""

    def narrow(xp: Any, out: Any, *arrays: Any, **attrs: Any) -> None:
        outs = out if isinstance(out, tuple) else (out,)
        wide = tuple(xp.empty(o.shape, "float32") if is_half(o.dtype) else o for o in outs)
        into(xp, wide if isinstance(out, tuple) else wide[0], *upcast_half(arrays), **attrs)
        for target, result in zip(outs, wide, strict=True):
            if result is not target:
                xp.copyto(target, result, casting="unsafe")

    return narrow
