"""Traces of ops on 16-bit floats: the steps of `expression_trace.py` between conversions.

An op of float16 or bfloat16 computes in float32, and its result is rounded once, as everywhere
(`half_precision.py`). Both conversions are steps, so a chain of such ops is one kernel that reads
and writes 16 bits. Values between two of the ops are rounded, too, as if they were stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.errors import GraphflowError, Untraceable
from graphflow.ir.op import Op
from graphflow.ir.spec import TensorSpec, as_dtype, is_half
from graphflow.ops.kernels.codegen.expression_trace import (
    ROWS,
    XP,
    ExpressionTrace,
    Symbol,
    record_expression,
)

_SINGLE = np.dtype("float32")
_EXACT = frozenset(map(np.dtype, ("bool", "int8", "uint8", "float32")))
"""Dtypes whose values float32 holds, so that rounding to 16 bits by way of it rounds once."""


def record_op(
    trace: ExpressionTrace, op: Op, given: Sequence[Symbol], attrs: Mapping[str, Any]
) -> Symbol:
    """Return the symbol that an op makes of symbols, some of which may have 16 bits.

    Raises:
        Untraceable: the op does anything but primitive steps.
    """
    assert op.expr is not None
    halves = any(is_half(symbol.dtype) for symbol in given)
    if op.name == "astype" and (halves or is_half(as_dtype(attrs["dtype"]))):
        return _cast(trace, given[0], as_dtype(attrs["dtype"]))
    xp = XP if op.rows is None else ROWS
    if not halves:
        return record_expression(trace, op.expr, given, attrs, xp)
    if op.rows is not None or op.name == "bitcast":
        raise Untraceable(f"{op.name} of 16-bit floats is not generated")
    wide = [_cast(trace, s, _SINGLE) if is_half(s.dtype) else s for s in given]
    result = record_expression(trace, op.expr, wide, attrs, xp)
    try:
        wanted = op.infer(*(TensorSpec((), s.dtype) for s in given), **attrs)
    except GraphflowError as error:
        raise Untraceable(f"{op.name} of such scalars: {error}") from error
    if isinstance(wanted, TensorSpec) and is_half(wanted.dtype):
        return _cast(trace, result, wanted.dtype)
    return result


def _cast(trace: ExpressionTrace, symbol: Symbol, dtype: np.dtype[Any]) -> Symbol:
    """Convert from or to 16 bits by way of float32, if that rounds no more than once."""
    if symbol.dtype == dtype:
        return symbol
    if is_half(symbol.dtype):
        wide = Symbol(trace, trace.step("convert", (symbol.step,), _SINGLE))
        return _cast(trace, wide, dtype) if is_half(dtype) else wide.astype(dtype)
    if symbol.dtype not in _EXACT:
        raise Untraceable(f"{symbol.dtype} to {dtype} is not generated")
    single = symbol.astype(_SINGLE).step
    if single.kind == "convert" and single.args[0].dtype == dtype:
        return Symbol(trace, single.args[0])  # the number itself, which was only widened
    return Symbol(trace, trace.step("convert", (single,), dtype))
