"""Elementwise comparison, logic on bools, and tests for NaN and infinity."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphflow.ir.op import Op, Sample, sample
from graphflow.ir.spec import TensorSpec, spec
from graphflow.ops.base.shape_rules import bool_result, require_kind, same_number
from graphflow.ops.pointwise.elementwise import (
    BINARY_INT,
    BINARY_NUMBER,
    BOOL,
    COMPLEX,
    UNARY,
    elementwise,
)

_PAIRS = (sample(BOOL, BOOL), sample(spec("bool"), BOOL))


def _orderable(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    require_kind(x, "int", "float")
    return bool_result(x, *others)


def _numbers(x: TensorSpec) -> TensorSpec:
    return same_number(x).with_dtype(bool)


def _logical(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    require_kind(x, "bool")
    return bool_result(x, *others)


def _comparison(
    name: str,
    doc: str,
    infer: Callable[..., TensorSpec] = _orderable,
    samples: Sequence[Sample] = BINARY_INT,
) -> Op:
    return elementwise(name, name, None, infer, samples, doc=doc)


equal = _comparison("equal", "True where a is equal to b.", bool_result, BINARY_NUMBER)
not_equal = _comparison(
    "not_equal", "True where a differs from b, or one is NaN.", bool_result, BINARY_NUMBER
)
less = _comparison("less", "True where a < b.")
less_equal = _comparison("less_equal", "True where a <= b.")
greater = _comparison("greater", "True where a > b.")
greater_equal = _comparison("greater_equal", "True where a >= b.")


def _logic(name: str, doc: str, samples: Sequence[Sample] = _PAIRS) -> Op:
    return elementwise(name, name, None, _logical, samples, doc=doc)


logical_and = _logic("logical_and", "True where both a and b are.")
logical_or = _logic("logical_or", "True where a or b is, or both.")
logical_xor = _logic("logical_xor", "True where one of a and b is, but not both.")
logical_not = _logic("logical_not", "True where x is False.", (sample(BOOL),))


def _check(name: str, doc: str) -> Op:
    return elementwise(name, name, None, _numbers, (*UNARY, sample(COMPLEX)), doc=doc)


isnan = _check("isnan", "True where x is NaN.")
isinf = _check("isinf", "True where x is inf or -inf.")
isfinite = _check("isfinite", "True where x is neither NaN nor infinite.")
