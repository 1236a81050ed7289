"""The declaration of elementwise ops, and sample inputs for them.

Each op gives `expr`, the value of one element. It serves numpy, CuPy and the kernel generators
alike. An op that is a single ufunc also gets `into`, so that it writes straight to its buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.ir.op import Cost, Op, Sample, Sharding, Tensor, register, sample
from graphflow.ir.spec import TensorSpec, broadcast_shapes, product, spec
from graphflow.ops.base.shape_rules import same_numeric

F = spec("float32", (3, 4))
ROW = spec("float32", (4,))
COLUMN = spec("float32", (3, 1))
SCALAR = spec("float32", ())
INT = spec("int32", (3, 4))
BOOL = spec("bool", (3, 4))
COMPLEX = spec("complex64", (3, 4))
COMPLEX_ROW = spec("complex64", (4,))

UNARY = (sample(F), sample(SCALAR))
UNARY_INT = (*UNARY, sample(INT))
POSITIVE = (sample(F, low=0.3, high=3.0), sample(SCALAR, low=0.3, high=3.0))
BINARY = (sample(F, F), sample(F, ROW), sample(COLUMN, ROW), sample(SCALAR, F))
BINARY_INT = (*BINARY, sample(INT, INT))
NUMBER = (*UNARY_INT, sample(COMPLEX))
BINARY_NUMBER = (
    *BINARY_INT,
    sample(COMPLEX, COMPLEX_ROW),
    sample(SCALAR.with_dtype("complex64"), COMPLEX),
)
# Both inputs positive: away from poles and branch points.
RATIO = tuple(sample(*s.inputs, low=0.4, high=3.0) for s in BINARY)


def per_element(flops: int) -> Callable[..., Cost]:
    """Return a cost rule of `flops` for each element of the broadcast inputs."""

    def cost(*specs: TensorSpec, **attrs: Any) -> Cost:
        return Cost(flops=product(broadcast_shapes(*(s.shape for s in specs))) * flops)

    return cost


def elementwise(
    name: str,
    expr: str | Callable[..., Any],
    vjp: Callable[..., Sequence[Tensor | None]] | None,
    infer: Callable[..., TensorSpec] = same_numeric,
    samples: Sequence[Sample] = (),
    flops: int = 1,
    into: Callable[..., None] | None = None,
    promotes: bool = True,
    halves: bool = False,
    doc: str = "",
    sharding: Callable[..., Sharding] | None = None,
    jvp: Callable[..., Tensor | None] | None = None,
) -> Op:
    """Register an elementwise op.

    Args:
        expr: the name of a ufunc, or a function (xp, *scalars, **attrs).
        into: (xp, out, *arrays, **attrs). `out` may share the buffer of an input, so it is written
            last.
        vjp: gives cotangents of the result's shape, whatever was broadcast to it; reverse mode
            reduces them to the inputs' shapes.
    """
    ufunc = None
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
            ufunc=ufunc,
            into=into,
            vjp=vjp,
            jvp=jvp,
            cost=per_element(flops),
            samples=samples,
            promotes=promotes,
            elementwise=True,
            halves=halves,
            doc=doc,
            sharding=sharding,
        )
    )


def no_gradient(g: Tensor, y: Tensor, *inputs: Tensor, **attrs: Any) -> tuple[None, ...]:
    """Return no cotangents: the vjp of functions that are flat almost everywhere."""
    return (None,) * len(inputs)
