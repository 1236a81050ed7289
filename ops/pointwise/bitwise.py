"""Bitwise logic on ints, shifts, bitcast, and C's remainder fmod.

On bools, the operators `& | ^ ~` are the logical ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.errors import DTypeError
from graphflow.ir.op import FUNCTIONS, Op, Sample, Tensor, as_tensor, function, sample
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


def _bitwise(name: str, ufunc: str, doc: str, samples: Sequence[Sample] = _PAIRS) -> Op:
    return elementwise(name, ufunc, None, _bits, samples, doc=doc)


def _shift(name: str, ufunc: str, doc: str) -> Op:
    return elementwise(name, ufunc, None, _ints, _SHIFTS, doc=doc)


bitwise_and = _bitwise(
    "bitwise_and", "bitwise_and", "The bits that both a and b have; of bools the logical and."
)
bitwise_or = _bitwise(
    "bitwise_or", "bitwise_or", "The bits that a or b has; of bools the logical or."
)
bitwise_xor = _bitwise(
    "bitwise_xor", "bitwise_xor", "The bits that a or b has, but not both; of bools the same."
)
bitwise_invert = _bitwise(
    "bitwise_invert",
    "invert",
    "The bits that x does not have; of bools the logical not.",
    (sample(INT), sample(BOOL)),
)
bitwise_left_shift = _shift(
    "bitwise_left_shift",
    "left_shift",
    "The bits of a, moved up by b places; 0 if b is the width of the dtype or more.",
)
bitwise_right_shift = _shift(
    "bitwise_right_shift",
    "right_shift",
    "The bits of a, moved down by b places, which keeps the sign: in the end 0 or -1.",
)


def _fmod_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return g, divisor_cotangent(g, FUNCTIONS["trunc"](a / b))


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
    doc="a - trunc(a / b)·b, with the sign of a.",
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
