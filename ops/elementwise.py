"""Elementwise ops: arithmetic, comparison, exponentials and their kin.

Each gives `expr`, the value of one element, which serves numpy and cupy as it stands (and the kernel
generators); an op that is one ufunc also gives `into`, so that it writes straight to its buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.op import Cost, Op, Sample, Tensor, register, sample
from graphflow.ops.rules import same, same_float, same_numeric, truth, unbroadcast
from graphflow.spec import TensorSpec, broadcast_shapes, product, spec

F = spec("float32", (3, 4))
ROW = spec("float32", (4,))
COLUMN = spec("float32", (3, 1))
SCALAR = spec("float32", ())
INT = spec("int32", (3, 4))


def _flops(each: float) -> Callable[..., Cost]:
    def cost(*specs: TensorSpec, **attrs: Any) -> Cost:
        return Cost(flops=product(broadcast_shapes(*(s.shape for s in specs))) * int(each))

    return cost


def elementwise(
    name: str,
    expr: str | Callable[..., Any],
    vjp: Callable[..., Sequence[Tensor | None]] | None,
    infer: Callable[..., TensorSpec] = same_numeric,
    samples: Sequence[Sample] = (),
    flops: float = 1,
) -> Op:
    """Register an elementwise op: `expr` is a ufunc's name, or a function (xp, *scalars, **attrs)."""
    into = None
    if isinstance(expr, str):
        ufunc = expr

        def expr(xp: Any, *arrays: Any) -> Any:
            return getattr(xp, ufunc)(*arrays)

        def into(xp: Any, out: Any, *arrays: Any) -> None:
            getattr(xp, ufunc)(*arrays, out=out)

    return register(
        Op(
            name,
            infer=infer,
            expr=expr,
            into=into,
            vjp=vjp,
            cost=_flops(flops),
            samples=samples,
            promotes=True,
            elementwise=True,
        )
    )


BINARY = (sample(F, F), sample(F, ROW), sample(COLUMN, F), sample(SCALAR, F))

add = elementwise(
    "add",
    "add",
    vjp=lambda g, y, a, b: (unbroadcast(g, a.shape), unbroadcast(g, b.shape)),
    samples=(*BINARY, sample(INT, INT)),
)
subtract = elementwise(
    "subtract",
    "subtract",
    vjp=lambda g, y, a, b: (unbroadcast(g, a.shape), unbroadcast(-g, b.shape)),
    samples=BINARY,
)
multiply = elementwise(
    "multiply",
    "multiply",
    vjp=lambda g, y, a, b: (unbroadcast(g * b, a.shape), unbroadcast(g * a, b.shape)),
    samples=BINARY,
)
negative = elementwise("negative", "negative", vjp=lambda g, y, x: (-g,), samples=(sample(F),))
exp = elementwise(
    "exp", "exp", infer=same_float, vjp=lambda g, y, x: (g * y,), samples=(sample(F),), flops=8
)
