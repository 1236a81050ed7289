"""Ops at the ends of a cut edge. They move a tensor between partitions; the executor runs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.op import Cost, Op, register
from graphflow.spec import Shape, TensorSpec, as_dtype


def _nothing(*specs: TensorSpec, **attrs: Any) -> Cost:
    return Cost(flops=0, bytes=0)


# The tensor `edge` of the step, from `source` (a device).
recv = register(
    Op(
        "recv",
        infer=lambda edge, source, shape, dtype: _spec(shape, dtype),
        cost=_nothing,
        pure=False,
    )
)

# Sends its input as `edge` to `target` (a device); no value of its own.
send = register(
    Op(
        "send",
        infer=lambda x, edge, target: TensorSpec((0,), np.dtype("bool")),
        cost=_nothing,
        pure=False,
    )
)


def _spec(shape: Shape, dtype: str) -> TensorSpec:
    return TensorSpec(shape, as_dtype(dtype))
