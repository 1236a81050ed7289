"""Moments along sharded axes: one exchange gives each shard the mean and variance of the whole.

Ops that reduce along such axes (norms, variances) use it; see `ops/sharding/row_ops.py` and
`graphflow/parallel/resharding/local_ops.py`.
"""

from __future__ import annotations

from typing import Any

from graphflow.ir.op import Cost, Op, Tensor, register, sample
from graphflow.ir.spec import TensorSpec, spec
from graphflow.ops.reductions.reduce import CUBE, Axes, F, divide_by_count, element_count
from graphflow.ops.sharding import row_ops as row_sharding


def _infer(x: TensorSpec, axis: Axes) -> TensorSpec:
    return x.with_shape((3, *(1 if i in axis else n for i, n in enumerate(x.shape))))


def _kernel(xp: Any, x: Any, axis: Axes) -> Any:
    wide = x.astype("float32") if x.dtype.itemsize == 2 else x
    number = element_count(x.shape, axis)
    centre = xp.sum(wide, axis=axis, keepdims=True) / number
    about = wide - centre
    spread = xp.sum(about * about, axis=axis, keepdims=True) / number
    return xp.stack([xp.ones_like(centre), centre, spread]).astype(x.dtype)


def _vjp(g: Tensor, y: Tensor, x: Tensor, axis: Axes) -> tuple[Tensor]:
    number = element_count(x.shape, axis)
    return (divide_by_count(g[1], number) + (x - y[1]) * divide_by_count(2 * g[2], number),)


# The share of all values that x holds (1 for a whole tensor), their mean and their variance. It is
# a share and not a count, which 16-bit floats could not hold.
moments = register(
    Op(
        "moments",
        infer=_infer,
        kernel=_kernel,
        vjp=_vjp,
        sharding=row_sharding.moments_rule,
        cost=lambda x, axis: Cost(flops=x.size * 4),
        samples=(
            sample(F, axis=(1,)),
            sample(CUBE, axis=(0, 2)),
            sample(spec("float32", (2, 3, 5, 7)), axis=(0, 2, 3)),
        ),
    )
)

__all__ = ["moments"]
