"""Traces of ops for CUDA kernels: those of `half_trace.py`, all of which are exact enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.errors import Untraceable
from graphflow.ir.op import Op
from graphflow.ir.spec import is_half
from graphflow.ops.kernels.codegen.expression_trace import DTYPES, ExpressionTrace
from graphflow.ops.kernels.codegen.half_trace import record_op
from graphflow.ops.kernels.codegen.region import freeze_attributes
from graphflow.ops.kernels.fusion.region_kernels import TracedOp

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
        value = record_op(trace, op, [trace.input(i, d) for i, d in enumerate(dtypes)], attrs)
    except Untraceable:
        return None
    return TracedOp(value.dtype, approximate=False)
