"""The op that marks gradients of which places exchange the active rows only.

In the graph of one model it sets the other rows to zero. A strategy that divides the examples
writes the exchange in its place (`graphflow/parallel/blocks/active_rows.py`).
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import ShapeError
from graphflow.ir.op import Cost, Op, Sharding, register, sample
from graphflow.ir.spec import TensorSpec, equate, spec
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.sharding.rules import equation, letters


def _infer(gradient: TensorSpec, active: TensorSpec) -> TensorSpec:
    """Infer the result: the gradient's spec.

    Raises:
        ShapeError, DTypeError: `active` is no bool for each row.
    """
    require_kind(active, "bool")
    if not gradient.rank or active.rank != 1:
        raise ShapeError(f"{active} is no bool for each row of {gradient}")
    equate(gradient.shape[0], active.shape[0], "rows and their flags")
    return gradient


def _kernel(xp: Any, gradient: Any, active: Any) -> Any:
    """Return the gradient with zeros in rows that are not active."""
    flags = active.reshape(-1, *(1,) * (gradient.ndim - 1))
    return xp.where(flags, gradient, gradient.dtype.type(0))


def _rule(gradient: TensorSpec, active: TensorSpec) -> Sharding:
    """Split along all axes but that of the rows. Partial sums pass."""
    names = "." + letters(gradient.rank)[1:]
    return Sharding(equation([names, "."], [names]), linear=((0,),), view=True)


active_sum = register(
    Op(
        "active_sum",
        infer=_infer,
        kernel=_kernel,
        sharding=_rule,
        cost=lambda gradient, active: Cost(flops=gradient.size),
        samples=[
            sample(spec("float32", (5,)), spec("bool", (5,))),
            sample(spec("float64", (3, 2)), spec("bool", (3,))),
        ],
    )
)
