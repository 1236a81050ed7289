"""Traces of ops for CUDA kernels: the steps of `expression_trace.py`, and 16-bit floats.

An op of float16 or bfloat16 computes in float32, and its result is rounded once, as everywhere
(`half_precision.py`). Here both conversions are steps of the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.errors import GraphflowError, Untraceable
from graphflow.ir.op import Op
from graphflow.ir.spec import TensorSpec, as_dtype, is_half
from graphflow.ops.kernels.codegen.expression_trace import (
    DTYPES,
    ROWS,
    XP,
    ExpressionTrace,
    ScalarStep,
    Symbol,
    record_expression,
)
from graphflow.ops.kernels.codegen.region import Region, freeze_attributes
from graphflow.ops.kernels.fusion.region_kernels import TracedOp

_SINGLE = np.dtype("float32")
_EXACT = frozenset(map(np.dtype, ("bool", "int8", "uint8", "float32")))
"""Dtypes whose values float32 holds, so that rounding to 16 bits by way of it rounds once."""


def trace_region(region: Region) -> tuple[ExpressionTrace, list[ScalarStep]]:
    """Record the steps of a region; returns the trace and the steps of results.

    Raises:
        Untraceable: an op has no trace.
    """
    trace = ExpressionTrace()
    inputs = [trace.input(i, as_dtype(o.dtype)) for i, o in enumerate(region.operands)]
    values: list[Symbol] = []
    for applied in region.ops:
        given = [values[i] if inner else inputs[i] for inner, i in applied.inputs]
        attrs = {name: value for name, value, _ in applied.attrs}
        values.append(_record_op(trace, applied.op, given, attrs))
    return trace, [values[i].step for i in region.results]


_trace_cache: dict[Any, TracedOp | None] = {}


def trace_op(op: Op, dtypes: Sequence[np.dtype[Any]], attrs: Mapping[str, Any]) -> TracedOp | None:
    """Return the dtype of an op's CUDA kernel; None if there is no such kernel."""
    items = freeze_attributes(attrs)
    if op.expr is None or items is None or not dtypes:
        return None
    if not (op.elementwise or op.rows is not None):
        return None
    key = (op, tuple(dtypes), items)
    if key not in _trace_cache:
        _trace_cache[key] = _trace_uncached(op, dtypes, attrs)
    return _trace_cache[key]


def _trace_uncached(
    op: Op, dtypes: Sequence[np.dtype[Any]], attrs: Mapping[str, Any]
) -> TracedOp | None:
    if not all(dtype in DTYPES or is_half(dtype) for dtype in dtypes):
        return None
    trace = ExpressionTrace()
    try:
        value = _record_op(trace, op, [trace.input(i, d) for i, d in enumerate(dtypes)], attrs)
    except Untraceable:
        return None
    return TracedOp(value.dtype, approximate=False)


def _record_op(
    trace: ExpressionTrace, op: Op, given: Sequence[Symbol], attrs: Mapping[str, Any]
) -> Symbol:
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
    return Symbol(trace, trace.step("convert", (symbol.astype(_SINGLE).step,), dtype))
