"""A call whose body draws the random numbers of a number that is computed.

A loop's body draws other numbers in each iteration, which follow from the iteration's index. Where
workers take micro-batches from a queue, a micro-batch has to have the same numbers in whichever
iteration of whichever loop it is taken.
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import ShapeError
from graphflow.ir.graph import Body
from graphflow.ir.op import Cost, Op, register
from graphflow.ir.spec import TensorSpec
from graphflow.ops.control_flow.control import COUNT, body_cost, check_operands, run_body


def _infer(number: TensorSpec, *operands: TensorSpec, body: Body) -> tuple[TensorSpec, ...]:
    if number != COUNT:
        raise ShapeError(f"the number must be {COUNT}, got {number}")
    check_operands(body, operands)
    return tuple(t.spec for t in body.outputs)


def _kernel(xp: Any, number: Any, *arrays: Any, body: Body, step: int) -> tuple[Any, ...]:
    return tuple(run_body(xp, body, arrays, int(number)))


# (number, operands) -> the results of a body, which draws the numbers of a step of this number, an
# int64 from 0 up to 2**48.
numbered_call: Op = register(
    Op(
        "numbered_call",
        infer=_infer,
        kernel=_kernel,
        halves=True,
        cost=lambda number, *specs, body: Cost(*body_cost(body)),
        pure=False,
        random=True,
    )
)

__all__ = ["numbered_call"]
