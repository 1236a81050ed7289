"""Constant folding of shape arithmetic while a model is read.

Known values are numpy arrays, of objects if some are symbolic sizes: `Dim` adds, multiplies and
divides like int. Comparisons and remainders of Dims are left to the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from graphflow.errors import GraphflowError, OnnxError
from graphflow.ir.spec import Dim, is_nonnegative, maximum, minimum
from graphflow.onnx.loading.reading.value_kinds import Array, Known, onnx_dtype
from graphflow.onnx.loading.translation.node_call import NodeCall

MAX_ELEMENTS = 4096
"""Elements of the largest value that is folded."""

_FOLDS: dict[str, Callable[..., Any]] = {}


def fold_rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register (call, *arrays) -> array as the folding rule of operators."""

    def enter(rule: Callable[..., Any]) -> Callable[..., Any]:
        _FOLDS.update(dict.fromkeys(names, rule))
        return rule

    return enter


def fold(call: NodeCall) -> Known | None:
    """Return the known output of an operator on known inputs; None if the graph must compute it."""
    rule = _FOLDS.get(call.op_type) if call.proto.domain in ("", "ai.onnx") else None
    values = [value for value in call.values if isinstance(value, Known)]
    if rule is None or len(values) != len(call.values) or not values:
        return None
    if any(v.parameter is not None or v.array.size > MAX_ELEMENTS for v in values):
        return None
    if not any(v.symbolic for v in values) and call.op_type not in _ALWAYS:
        return None
    try:
        result = rule(call, *(v.array for v in values))
    except (TypeError, ValueError, IndexError, GraphflowError):
        return None
    if result is None or np.size(result) > MAX_ELEMENTS:
        return None
    dtype = _dtype(call, values)
    array = np.asarray(result)
    if array.dtype.kind == "O" and not any(isinstance(x, Dim) for x in array.reshape(-1)):
        array = array.astype(dtype)
    if array.dtype.kind != "O":
        array = array.astype(dtype)
    return Known(array, np.dtype(dtype))


def _dtype(call: NodeCall, values: list[Known]) -> Any:
    if call.op_type == "Cast":
        return onnx_dtype(call.attr("to"))
    if call.op_type == "Equal":
        return np.dtype(bool)
    return values[1].dtype if call.op_type == "Where" else values[0].dtype


# Folded for plain numbers, too, since shape computations consist of these operators.
_ALWAYS = {"Gather", "Slice", "Concat", "Unsqueeze", "Squeeze", "Identity", "Reshape"}


@fold_rule("Add")
def _add(call: NodeCall, a: Array, b: Array) -> Any:
    return _floats_to_ints(a) + _floats_to_ints(b)


@fold_rule("Sub")
def _subtract(call: NodeCall, a: Array, b: Array) -> Any:
    return _floats_to_ints(a) - _floats_to_ints(b)


@fold_rule("Min")
def _least(call: NodeCall, *arrays: Array) -> Any:
    return reduce(np.frompyfunc(minimum, 2, 1), map(_floats_to_ints, arrays))


@fold_rule("Max")
def _most(call: NodeCall, *arrays: Array) -> Any:
    return reduce(np.frompyfunc(maximum, 2, 1), map(_floats_to_ints, arrays))


@fold_rule("Floor", "Ceil", "Round", "Abs")
def _round(call: NodeCall, a: Array) -> Any:
    """Return sizes unchanged, since they are integers; Abs needs them to be non-negative."""
    if call.op_type == "Abs" and not all(is_nonnegative(x) for x in a.reshape(-1)):
        return None
    return a


@fold_rule("Mul")
def _multiply(call: NodeCall, a: Array, b: Array) -> Any:
    return _floats_to_ints(a) * _floats_to_ints(b)


def _floats_to_ints(a: Array) -> Array:
    """Convert integral floats to ints, by which sizes can be multiplied; refuse other floats."""
    if a.dtype.kind != "f":
        return a
    if not (a == np.floor(a)).all():
        raise OnnxError("sizes are scaled by whole numbers only")
    return a.astype(np.int64)


@fold_rule("Div")
def _divide(call: NodeCall, a: Array, b: Array) -> Any:
    """Divide ints; sizes are not negative, so rounding down is ONNX's rounding towards zero."""
    values = [v for v in call.values if isinstance(v, Known)]
    return a // b if all(v.dtype.kind in "iu" for v in values) else None


@fold_rule("Neg")
def _negate(call: NodeCall, a: Array) -> Any:
    return -a


@fold_rule("Identity")
def _identity(call: NodeCall, a: Array) -> Any:
    return a


@fold_rule("Cast")
def _cast(call: NodeCall, a: Array) -> Any:
    target = onnx_dtype(call.attr("to"))
    return a if target is not None and target.kind in "iuf" else None


@fold_rule("Concat")
def _concat(call: NodeCall, *arrays: Array) -> Any:
    return np.concatenate([a.astype(object) for a in arrays], axis=call.attr("axis", 0))


@fold_rule("Gather")
def _gather(call: NodeCall, a: Array, indices: Array) -> Any:
    return np.take(a.astype(object), indices.astype(np.int64), axis=call.attr("axis", 0))


@fold_rule("Reshape")
def _reshape(call: NodeCall, a: Array, shape: Array) -> Any:
    wanted = [int(s) for s in shape]
    if not call.attr("allowzero", 0):
        wanted = [a.shape[i] if s == 0 else s for i, s in enumerate(wanted)]
    return a.reshape(wanted)


def _axes(call: NodeCall, axes: Array | None) -> list[int] | None:
    given = call.attr("axes") if axes is None else [int(x) for x in axes]
    return None if given is None else list(given)


@fold_rule("Unsqueeze")
def _unsqueeze(call: NodeCall, a: Array, axes: Array | None = None) -> Any:
    return np.expand_dims(a, tuple(_axes(call, axes) or ()))


@fold_rule("Squeeze")
def _squeeze(call: NodeCall, a: Array, axes: Array | None = None) -> Any:
    given = _axes(call, axes)
    return np.squeeze(a, None if given is None else tuple(given))


@fold_rule("Slice")
def _slice(call: NodeCall, a: Array, *rest: Array) -> Any:
    if call.version < 10:
        starts, ends, axes = call.attr("starts"), call.attr("ends"), call.attr("axes")
        steps = None
    else:
        given = [[int(x) for x in r] for r in rest]
        starts, ends = given[0], given[1]
        axes = given[2] if len(given) > 2 else None
        steps = given[3] if len(given) > 3 else None
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    index = [slice(None)] * a.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        low = None if step < 0 and end < -a.shape[axis] else end
        index[axis] = slice(start, low, step)
    return a[tuple(index)]


@fold_rule("ReduceProd")
def _product(call: NodeCall, a: Array, *axes: Array) -> Any:
    if a.ndim != 1:
        return None
    total = np.prod(a, axis=0)
    return np.array([total], dtype=object) if call.attr("keepdims", 1) else np.array(total, object)


@fold_rule("Equal")
def _equal(call: NodeCall, a: Array, b: Array) -> Any:
    """Compare sizes where the result is certain: equal polynomials, or a negative number."""

    def same(x: Any, y: Any) -> bool | None:
        if isinstance(x, Dim) or isinstance(y, Dim):
            numbers = [v for v in (x, y) if not isinstance(v, Dim)]
            if x == y:
                return True
            return False if len(numbers) == 1 and numbers[0] < 0 else None
        return bool(x == y)

    pairs = np.broadcast_arrays(a, b)
    answers = [same(x, y) for x, y in zip(*(p.reshape(-1) for p in pairs), strict=True)]
    return None if None in answers else np.array(answers).reshape(pairs[0].shape)


@fold_rule("Where")
def _where(call: NodeCall, condition: Array, a: Array, b: Array) -> Any:
    return np.where(condition, a.astype(object), b.astype(object))
