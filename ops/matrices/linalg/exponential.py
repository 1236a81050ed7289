"""The exponential of matrices. Public in `gf.linalg`."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.ir.op import FUNCTIONS, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import TensorSpec, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.matrices.linalg.matrix_rules import (
    adjoint,
    call_lapack,
    cast_result,
    cubic_cost,
    square_size,
)
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.slicing import concat, window

_COEFFICIENTS = (
    64764752532480000, 32382376266240000, 7771770303897600, 1187353796428800, 129060195264000,
    10559470521600, 670442572800, 33522128640, 1323241920, 40840800, 960960, 16380, 182, 1,
)  # fmt: skip
"""Of the Padé approximant of degree 13: (26 - k)!·13! / (13! · k! · (13 - k)!), scaled to ints."""
_LARGEST_NORM = 5.371920351148152
"""Up to this 1-norm the approximant has the accuracy of float64."""


def _exponential(xp: Any, x: Any) -> Any:
    """Return exp(x) by scaling and squaring, each matrix by its own power of 2.

    x is divided by 2ˢ, so that the approximant is accurate, and its result is squared s times.
    """
    n = x.shape[-1]
    norm = xp.abs(x).sum(-2).max(-1)
    times = xp.ceil(xp.log2(xp.maximum(norm / _LARGEST_NORM, 1)))
    times = xp.where(xp.isfinite(times), times, 0)
    a = x * xp.asarray(xp.ldexp(1.0, -times.astype("int32")), x.real.dtype)[..., None, None]
    one = xp.eye(n, dtype=x.dtype)
    a2 = xp.matmul(a, a)
    a4 = xp.matmul(a2, a2)
    a6 = xp.matmul(a2, a4)
    c = [x.real.dtype.type(each / _COEFFICIENTS[0]) for each in _COEFFICIENTS]
    high = xp.matmul(a6, a6 * c[13] + a4 * c[11] + a2 * c[9])
    odd = xp.matmul(a, high + a6 * c[7] + a4 * c[5] + a2 * c[3] + one * c[1])
    high = xp.matmul(a6, a6 * c[12] + a4 * c[10] + a2 * c[8])
    even = high + a6 * c[6] + a4 * c[4] + a2 * c[2] + one * c[0]
    result = xp.linalg.solve(even - odd, even + odd)
    for i in range(int(times.max())):
        squared = xp.matmul(result, result)
        result = xp.where((times > i)[..., None, None], squared, result)
    return result


def _kernel(xp: Any, x: Any) -> Any:
    if not x.size:
        return x.copy()
    with np.errstate(all="ignore"):
        found = call_lapack(
            xp, lambda a: _exponential(xp, a), x, "has no exponential: does it hold NaN or inf?"
        )
    return cast_result(xp, found, x.dtype)


def _infer_square(x: TensorSpec) -> TensorSpec:
    square_size(x)
    return x


def _vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    """Return the derivative of the exponential at xᴴ along g.

    It is the upper right part of exp([[xᴴ, g], [0, xᴴ]]).

    Source: Najfeld & Havel, "Derivatives of the matrix exponential and their computation", Advances
    in Applied Mathematics 16, 1995.
    """
    n, rows, columns = x.shape[-1], x.ndim - 2, x.ndim - 1
    turned = adjoint(x)
    upper = concat([turned, g], columns)
    lower = concat([FUNCTIONS["zeros_like"](g), turned], columns)
    whole = matrix_exp_op(concat([upper, lower], rows))
    return (window(window(whole, rows, 0, n), columns, n, n),)


matrix_exp_op: Op = register(
    Op(
        "matrix_exp",
        infer=_infer_square,
        kernel=_kernel,
        vjp=_vjp,
        batch=batching.rows,
        sharding=sharding.matrix_rule(2),
        cost=cubic_cost(16),
        rate="product",
        autocast="high",
        samples=(
            sample(spec("float32", (3, 3))),
            sample(spec("float32", (2, 3, 3))),
            sample(spec("complex64", (3, 3))),
        ),
    )
)


@composite("x", to="high")
@function
def matrix_exp(x: Any) -> Tensor:
    """Compute the exponential of each matrix of x (…, n, n): the sum of all xᵏ / k!.

    Costs about 16·n³ flops, and 2·n³ more for each doubling of the norm beyond 5. A gradient is the
    exponential of a matrix of twice the size. `exp` is that of each element. A matrix with NaN or
    infinity, or whose exponential overflows, gives infinities and NaN.

    Raises:
        ShapeError: x is not square.
        DTypeError: x is neither float nor complex.

    Source: Higham, "The scaling and squaring method for the matrix exponential revisited", SIMAX
    26(4), 2005.
    """
    result: Tensor = matrix_exp_op(as_tensor(x))
    return result


__all__ = ["matrix_exp"]
