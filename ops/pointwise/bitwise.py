"""Bitwise logic on ints, shifts, bitcast, and C's remainder fmod.

On bools, the operators `& | ^ ~` are the logical ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import DTypeError
from graphflow.ir.op import FUNCTIONS, Op, Tensor, as_tensor, function, sample
from graphflow.ir.spec import TensorSpec, as_dtype, spec
from graphflow.ops.base.shape_rules import require_kind, same, same_numeric
from graphflow.ops.pointwise.arithmetic import divisor_cotangent
from graphflow.ops.pointwise.elementwise import COLUMN, ROW, SCALAR, F, elementwise

INT = spec("int32", (3, 4))
BYTES = spec("uint8", (4,))
BOOL = spec("bool", (3, 4))


def _bits(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    require_kind(x, "bool", "int")
    return same(x, *others)


def _ints(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    require_kind(x, "int")
    return same(x, *others)


_PAIRS = (sample(INT, INT, classes=100), sample(spec("uint8", (3, 1)), BYTES), sample(BOOL, BOOL))
_SHIFTS = (sample(INT, INT, classes=8), sample(spec("uint8", (3, 1)), BYTES))

bitwise_and = elementwise("bitwise_and", "bitwise_and", None, _bits, _PAIRS)
bitwise_or = elementwise("bitwise_or", "bitwise_or", None, _bits, _PAIRS)
bitwise_xor = elementwise("bitwise_xor", "bitwise_xor", None, _bits, _PAIRS)
bitwise_invert = elementwise("bitwise_invert", "invert", None, _bits, (sample(INT), sample(BOOL)))
# A shift by the width of the type or more gives 0 (to the right, -1 for negative numbers).
bitwise_left_shift = elementwise("bitwise_left_shift", "left_shift", None, _ints, _SHIFTS)
bitwise_right_shift = elementwise("bitwise_right_shift", "right_shift", None, _ints, _SHIFTS)


def _fmod_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return g, divisor_cotangent(g, FUNCTIONS["trunc"](a / b))


# The remainder of a truncating division: the result has the sign of a.
fmod: Op = elementwise(
    "fmod",
    "fmod",
    _fmod_vjp,
    same_numeric,
    samples=(
        sample(F, ROW, low=1.1, high=1.9),
        sample(SCALAR, COLUMN, low=-1.9, high=-1.1),
        sample(INT, INT),
    ),
    flops=6,
)


def _infer_bitcast(x: TensorSpec, dtype: str) -> TensorSpec:
    wanted = as_dtype(dtype)
    if wanted.itemsize != x.dtype.itemsize:
        raise DTypeError(
            f"{x.dtype} has {x.dtype.itemsize * 8} bits, {wanted} has {wanted.itemsize * 8}; "
            "convert with .astype first"
        )
    if wanted.kind == "b" != x.dtype.kind:
        raise DTypeError(f"not every {x.dtype} is a bool; compare it with 0")
    return x.with_dtype(wanted)


def _bitcast_expr(xp: Any, x: Any, dtype: str) -> Any:
    return x.view(np.dtype(dtype))


_bitcast = elementwise(
    "bitcast",
    _bitcast_expr,
    None,
    _infer_bitcast,
    samples=(
        sample(F, dtype="int32"),
        sample(spec("int64", (3, 4)), dtype="float64"),
        sample(spec("bool", (4,)), dtype="uint8"),
        sample(spec("bfloat16", (3, 4)), dtype="int16"),
    ),
    halves=True,
    into=lambda xp, out, x, dtype: xp.copyto(out, _bitcast_expr(xp, x, dtype)),
    promotes=False,
)


@function
def bitcast(x: Any, dtype: Any, name: str | None = None) -> Tensor:
    """Read the bits of x as another dtype of the same size.

    Raises:
        DTypeError: the sizes differ, or some bits are no value of the dtype (bool).
    """
    wanted = as_dtype(dtype)
    result: Tensor = _bitcast(as_tensor(x), dtype=wanted.name, name=name)
    return result
