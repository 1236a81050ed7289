"""The op that marks gradients which workers push to a parameter server.

In the graph of one model it passes a gradient on. Where a strategy cuts the step, the part before
the marks is a worker's turn, and the part after them is the server's update
(`graphflow/parallel/servers`).
"""

from __future__ import annotations

from graphflow.errors import ShapeError
from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import TensorSpec, equate, spec


def _infer(gradient: TensorSpec, variable: TensorSpec, compensation: float = 0.0) -> TensorSpec:
    what = f"the gradient is {gradient}, and its variable {variable}"
    if gradient.rank != variable.rank:
        raise ShapeError(what)
    for mine, other in zip(gradient.shape, variable.shape, strict=True):
        equate(mine, other, what)
    return gradient


# (gradient, variable) -> the gradient. `compensation`: the λ of `gf.optim.DelayCompensated`.
pushed_gradient = register(
    Op(
        "pushed_gradient",
        infer=_infer,
        kernel=lambda xp, gradient, variable, **attrs: xp.copy(gradient),
        cost=lambda gradient, variable, **attrs: Cost(flops=0),
        halves=True,
        samples=[sample(spec("float32", (3, 2)), spec("float32", (3, 2)))],
        pure=False,
    )
)
