"""Elementwise comparison, logic on bools, and tests for NaN and infinity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphflow.ir.op import (
    Op,
    sample,
)
from graphflow.ir.spec import (
    TensorSpec,
    spec,
)
from graphflow.ops.base.shape_rules import (
    bool_result,
    require_kind,
    same_number,
)
from graphflow.ops.pointwise.elementwise import (
    BINARY_INT,
    BINARY_NUMBER,
    BOOL,
    COMPLEX,
    UNARY,
    elementwise,
)


def _orderable(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    require_kind(x, "int", "float")
    return bool_result(x, *others)


def _numbers(x: TensorSpec) -> TensorSpec:
    return same_number(x).with_dtype(bool)


def _logical(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    require_kind(x, "bool")
    return bool_result(x, *others)


def _comparison(
    name: str, infer: Callable[..., TensorSpec] = _orderable, samples: Any = BINARY_INT
) -> Op:
    return elementwise(name, name, None, infer, samples)


equal = _comparison("equal", bool_result, BINARY_NUMBER)
not_equal = _comparison("not_equal", bool_result, BINARY_NUMBER)
less = _comparison("less")
less_equal = _comparison("less_equal")
greater = _comparison("greater")
greater_equal = _comparison("greater_equal")

_BOOLS = (sample(BOOL, BOOL), sample(spec("bool"), BOOL))
logical_and = elementwise("logical_and", "logical_and", None, _logical, _BOOLS)
logical_or = elementwise("logical_or", "logical_or", None, _logical, _BOOLS)
logical_xor = elementwise("logical_xor", "logical_xor", None, _logical, _BOOLS)
logical_not = elementwise("logical_not", "logical_not", None, _logical, (sample(BOOL),))

_TESTED = (*UNARY, sample(COMPLEX))
isnan = elementwise("isnan", "isnan", None, _numbers, _TESTED)
isinf = elementwise("isinf", "isinf", None, _numbers, _TESTED)
isfinite = elementwise("isfinite", "isfinite", None, _numbers, _TESTED)
