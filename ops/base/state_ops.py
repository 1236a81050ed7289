"""Ops that hold or change state: constants, placeholders, variables and assignments.

None of them computes. The executor reads their values from the graph, from the feeds or from the
session's state, and runs assignments when the step commits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import DTypeError, ShapeError
from graphflow.ir.op import Cost, Op, register
from graphflow.ir.spec import Shape, TensorSpec, as_dtype, equate, show_shape


def _no_cost(*specs: TensorSpec, **attrs: Any) -> Cost:
    return Cost(flops=0, bytes=0)


constant = register(
    Op(
        "constant",
        infer=lambda value: TensorSpec(value.shape, value.dtype),
        kernel=lambda xp, value: xp.asarray(value),
        cost=_no_cost,
    )
)

placeholder = register(
    Op(
        "placeholder",
        infer=lambda shape, dtype: TensorSpec(shape, as_dtype(dtype)),
        cost=_no_cost,
        pure=False,
    )
)


def _infer_variable(
    initial: Any, trainable: bool, shape: Shape, dtype: str, named: bool
) -> TensorSpec:
    return TensorSpec(shape, as_dtype(dtype))


# `initial` is a numpy array, a graphflow.init.Initializer or a part of one. `named`: the user chose
# the name. A second variable of that name in a session is then an error; others are renamed.
variable = register(Op("variable", infer=_infer_variable, cost=_no_cost, pure=False))


def _infer_assign(variable: TensorSpec, value: TensorSpec) -> TensorSpec:
    if variable.dtype != value.dtype:
        raise DTypeError(
            f"the variable holds {variable.dtype}, the value is {value.dtype}; "
            f"convert it with .astype({variable.dtype.name!r})"
        )
    if value.shape == variable.shape:
        return variable
    what = f"variable {show_shape(variable.shape)}, value {show_shape(value.shape)}"
    if variable.rank != value.rank:
        raise ShapeError(f"{what}: ranks differ")
    for have, want in zip(value.shape, variable.shape, strict=True):
        equate(want, have, what)
    return variable


# The value of an assignment is the new value. The variable changes when the step commits.
assign = register(
    Op(
        "assign",
        infer=_infer_assign,
        kernel=lambda xp, variable, value: value,
        into=lambda xp, out, variable, value: xp.copyto(out, value),
        cost=lambda variable, value: Cost(flops=0, bytes=variable.nbytes * 2),
        pure=False,
    )
)

# Computes its inputs; its fetched value is None. `strategy`: how the graph is divided before it is
# placed. `loss`: what a training step minimises; the step may not need its value.
group = register(
    Op(
        "group",
        infer=lambda *specs, strategy=None, loss=None: TensorSpec((0,), np.dtype("bool")),
        kernel=lambda xp, *arrays, strategy=None, loss=None: xp.zeros(0, "bool"),
        cost=_no_cost,
        pure=False,
    )
)
