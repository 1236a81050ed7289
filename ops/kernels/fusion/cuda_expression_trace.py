"""What CUDA kernels compute of ops: the steps of `expression_trace.py`, and 16-bit floats besides.

An op of float16 or bfloat16 sees float32 and its result is rounded once, as everywhere
(`half_precision.py`): here both conversions are steps of the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.errors import GraphflowError, Untraceable
from graphflow.ir.op import Op
from graphflow.ir.spec import TensorSpec, as_dtype, is_half
from graphflow.ops.kernels.codegen.elementwise_emitter import Region, attributes
from graphflow.ops.kernels.codegen.expression_trace import (
    DTYPES,
    ROWS,
    XP,
    Step,
    Symbol,
    Trace,
    record,
)
from graphflow.ops.kernels.fusion.region_kernels import Traced

_SINGLE = np.dtype("float32")
_EXACT = frozenset(map(np.dtype, ("bool", "int8", "uint8", "float32")))
"""Dtypes whose numbers are float32's: from these, rounding to 16 bits by way of it is one step."""


def trace_of(region: Region) -> tuple[Trace, list[Step]]:
    """The steps of a region, and those of its results.

    Raises:
        Untraceable: an op has no trace.
    """
    trace = Trace()
    inputs = [trace.input(i, as_dtype(o.dtype)) for i, o in enumerate(region.operands)]
    values: list[Symbol] = []
    for applied in region.ops:
        given = [values[i] if inner else inputs[i] for inner, i in applied.inputs]
        attrs = {name: value for name, value, _ in applied.attrs}
        values.append(_value(trace, applied.op, given, attrs))
    return trace, [values[i].step for i in region.results]


_known: dict[Any, Traced | None] = {}


def traced(op: Op, dtypes: Sequence[np.dtype[Any]], attrs: Mapping[str, Any]) -> Traced | None:
    """What a CUDA kernel of the op gives; None where there is none."""
    items = attributes(attrs)
    if op.expr is None or items is None or not dtypes:
        return None
    if not (op.elementwise or op.rows is not None):
        return None
    key = (op, tuple(dtypes), items)
    if key not in _known:
        _known[key] = _traced(op, dtypes, attrs)
    return _known[key]


def _traced(op: Op, dtypes: Sequence[np.dtype[Any]], attrs: Mapping[str, Any]) -> Traced | None:
    if not all(dtype in DTYPES or is_half(dtype) for dtype in dtypes):
        return None
    trace = Trace()
    try:
        value = _value(trace, op, [trace.input(i, d) for i, d in enumerate(dtypes)], attrs)
    except Untraceable:
        return None
    return Traced(value.dtype, approximate=False)


def _value(trace: Trace, op: Op, given: Sequence[Symbol], attrs: Mapping[str, Any]) -> Symbol:
    assert op.expr is not None
    halves = any(is_half(symbol.dtype) for symbol in given)
    if op.name == "astype" and (halves or is_half(as_dtype(attrs["dtype"]))):
        return _cast(trace, given[0], as_dtype(attrs["dtype"]))
    xp = XP if op.rows is None else ROWS
    if not halves:
        return record(trace, op.expr, given, attrs, xp)
    if op.rows is not None or op.name == "bitcast":
        raise Untraceable(f"{op.name} of 16-bit floats is not generated")
    wide = [_cast(trace, s, _SINGLE) if is_half(s.dtype) else s for s in given]
    result = record(trace, op.expr, wide, attrs, xp)
    try:
        wanted = op.infer(*(TensorSpec((), s.dtype) for s in given), **attrs)
    except GraphflowError as error:
        raise Untraceable(f"{op.name} of such scalars: {error}") from error
    if isinstance(wanted, TensorSpec) and is_half(wanted.dtype):
        return _cast(trace, result, wanted.dtype)
    return result


def _cast(trace: Trace, symbol: Symbol, dtype: np.dtype[Any]) -> Symbol:
    """A conversion from or to 16 bits: by way of float32, if that rounds no more than once."""
    if symbol.dtype == dtype:
        return symbol
    if is_half(symbol.dtype):
        wide = Symbol(trace, trace.step("convert", (symbol.step,), _SINGLE))
        return _cast(trace, wide, dtype) if is_half(dtype) else wide.astype(dtype)
    if symbol.dtype not in _EXACT:
        raise Untraceable(f"{symbol.dtype} to {dtype} is not generated")
    return Symbol(trace, trace.step("convert", (symbol.astype(_SINGLE).step,), dtype))
