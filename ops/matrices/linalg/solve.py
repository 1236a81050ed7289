"""Linear systems: solve, triangular_solve, inv and matrix_power. Public in `gf.linalg`.

Gradients follow Giles, "An extended collection of matrix derivative results for forward and
reverse mode algorithmic differentiation", 2008, with adjoints in place of transposes for complex
matrices. They are made of the same ops, so they can be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, CheckError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, promote_inputs, register
from graphflow.ir.op import sample as sample_of
from graphflow.ir.spec import (
    TensorSpec,
    broadcast_shapes,
    equate,
    floordiv,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import unbroadcast
from graphflow.ops.matrices.linalg.matrix_rules import (
    array_adjoint,
    call_lapack,
    cast_result,
    cubic_cost,
    identity,
    make_well_conditioned,
    square_size,
    times,
)
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.matrices.triangles import tril, triu
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.shape import expand_dims, squeeze

M33, M32 = spec("float32", (3, 3)), spec("float32", (3, 2))
BATCH33, BATCH32 = spec("float32", (2, 3, 3)), spec("float32", (2, 3, 2))
C33, C32 = spec("complex64", (3, 3)), spec("complex64", (3, 2))
_SINGULAR = (
    "is singular: it has no inverse; add a multiple of the identity, or use gf.linalg.lstsq or pinv"
)


def _well_conditioned_sample(*inputs: TensorSpec, **attrs: Any) -> Any:
    """Return a sample whose first input is made of well-conditioned matrices."""
    return sample_of(*inputs, make=make_well_conditioned, **attrs)


# General systems --------------------------------------------------------------------------------


def _infer_solve(a: TensorSpec, b: TensorSpec, **attrs: Any) -> TensorSpec:
    n = square_size(a)
    if b.rank < 2:
        raise ShapeError(f"expected the right side to be a matrix, got shape {show_shape(b.shape)}")
    what = f"systems {show_shape(a.shape)} with right sides {show_shape(b.shape)}"
    equate(n, b.shape[-2], f"{what}: rows differ")
    return b.with_shape((*broadcast_shapes(a.shape[:-2], b.shape[:-2]), n, b.shape[-1]))


def _cost_solve(a: TensorSpec, b: TensorSpec, **attrs: Any) -> Cost:
    n = a.shape[-1]
    return Cost(flops=floordiv(a.size * n * 2, 3) + _infer_solve(a, b).size * n * 2)


def _solve_broadcast(xp: Any, a: Any, b: Any) -> Any:
    """Solve a @ x = b; CuPy's own function broadcasts no leading axes."""
    if xp is not np:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (xp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    return xp.linalg.solve(a, b)


def _solve_as_columns(xp: Any, solve: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Run solve(a, b); a batch of right sides of one matrix becomes columns, to factor it once."""
    if a.ndim > 2 or b.ndim == 2:
        return solve(a, b)
    wide = xp.moveaxis(b, -2, 0)
    solved = solve(a, wide.reshape(wide.shape[0], math.prod(wide.shape[1:])))
    return xp.moveaxis(solved.reshape(wide.shape), 0, -2)


def _solve_kernel(xp: Any, a: Any, b: Any, adjoint: bool) -> Any:
    left = array_adjoint(a) if adjoint else a

    def solve(left: Any, right: Any) -> Any:
        return call_lapack(
            xp, lambda x: _solve_broadcast(xp, x, right), left, _SINGULAR, whole=True
        )

    return cast_result(xp, _solve_as_columns(xp, solve, left, b), b.dtype)


def _solve_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor, adjoint: bool) -> tuple[Tensor, Tensor]:
    gb: Tensor = solve_op(a, g, adjoint=not adjoint)
    ga = -(times(y, gb, adjoint_b=True) if adjoint else times(gb, y, adjoint_b=True))
    return unbroadcast(ga, a.shape), unbroadcast(gb, b.shape)


# The x of a @ x = b, or of aᴴ @ x = b.
solve_op: Op = register(
    Op(
        "solve",
        infer=_infer_solve,
        kernel=_solve_kernel,
        vjp=_solve_vjp,
        batch=batching.elementwise,
        sharding=sharding.matrix_rule(2, 2),
        cost=_cost_solve,
        autocast="high",
        samples=(
            _well_conditioned_sample(M33, M32, adjoint=False),
            _well_conditioned_sample(M33, M32, adjoint=True),
            _well_conditioned_sample(BATCH33, spec("float32", (4, 1, 3, 2)), adjoint=False),
            _well_conditioned_sample(M33, BATCH32, adjoint=False),
            _well_conditioned_sample(C33, C32, adjoint=False),
            _well_conditioned_sample(C33, C32, adjoint=True),
        ),
        promotes=True,
    )
)


@composite("a", "b", to="high")
@function
def solve(a: Any, b: Any) -> Tensor:
    """Solve a @ x = b for x; leading axes broadcast. Costs 2/3·n³ + 2·n²·k flops.

    Args:
        a: square matrices (…, n, n), float or complex.
        b: right sides (…, n, k), or one vector (n,).

    Raises:
        ShapeError: a is not square, or the rows of a and b differ.
        DTypeError: a or b is neither float nor complex.
        CheckError: from the step, if a matrix is singular.
    """
    a, b = promote_inputs("solve", (a, b))
    square_size(a.spec)
    if b.ndim == 1:
        return squeeze(solve_op(a, expand_dims(b, 1), adjoint=False), -1)
    result: Tensor = solve_op(a, b, adjoint=False)
    return result


# Triangular systems -----------------------------------------------------------------------------

_BLOCK = 64  # rows; smaller blocks would leave products too small to gain anything


def _solve_upper(xp: Any, a: Any, b: Any) -> Any:
    """Solve a @ x = b for an upper triangular a, by blocks of rows from the last to the first.

    The LU factors of such a matrix are the identity and the matrix itself. So `solve` of a block on
    the diagonal is back substitution.
    """
    n = a.shape[-1]
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *b.shape[-2:])
    x = xp.empty(shape, b.dtype)
    for start in reversed(range(0, n, _BLOCK)):
        stop = min(start + _BLOCK, n)
        right = b[..., start:stop, :]
        if stop < n:
            right = right - xp.matmul(a[..., start:stop, stop:], x[..., stop:, :])
        x[..., start:stop, :] = _solve_broadcast(xp, a[..., start:stop, start:stop], right)
    return x


def solve_triangle(xp: Any, a: Any, b: Any, lower: bool, adjoint: bool, unit_diagonal: bool) -> Any:
    left = xp.tril(a) if lower else xp.triu(a)
    diagonal = xp.arange(left.shape[-1])
    if unit_diagonal:
        left[..., diagonal, diagonal] = 1
    elif not (left[..., diagonal, diagonal] != 0).all():
        where = tuple(int(i[0]) for i in xp.nonzero(left[..., diagonal, diagonal] == 0))
        raise CheckError(f"a triangular matrix is singular: its diagonal is 0 at index {where}")
    if adjoint:
        left = array_adjoint(left)
    if lower == adjoint:
        return cast_result(xp, _solve_as_columns(xp, partial(_solve_upper, xp), left, b), b.dtype)
    # A lower triangular system read from its end is upper triangular.
    left, right = left[..., ::-1, ::-1], b[..., ::-1, :]
    solved = _solve_as_columns(xp, partial(_solve_upper, xp), left, right)
    return cast_result(xp, solved[..., ::-1, :], b.dtype)


def _triangular_vjp(
    g: Tensor, y: Tensor, a: Tensor, b: Tensor, lower: bool, adjoint: bool, unit_diagonal: bool
) -> tuple[Tensor, Tensor]:
    flags: dict[str, Any] = {"lower": lower, "unit_diagonal": unit_diagonal}
    gb: Tensor = triangular_solve_op(a, g, adjoint=not adjoint, **flags)
    ga = -(times(y, gb, adjoint_b=True) if adjoint else times(gb, y, adjoint_b=True))
    inside = 1 if unit_diagonal else 0
    ga = tril(ga, k=-inside) if lower else triu(ga, k=inside)
    return unbroadcast(ga, a.shape), unbroadcast(gb, b.shape)


def _cost_triangular(a: TensorSpec, b: TensorSpec, **attrs: Any) -> Cost:
    return Cost(flops=_infer_solve(a, b).size * a.shape[-1])


_LOWER = {"lower": True, "adjoint": False, "unit_diagonal": False}
triangular_solve_op: Op = register(
    Op(
        "triangular_solve",
        infer=_infer_solve,
        kernel=solve_triangle,
        vjp=_triangular_vjp,
        batch=batching.elementwise,
        sharding=sharding.matrix_rule(2, 2),
        cost=_cost_triangular,
        autocast="high",
        samples=(
            _well_conditioned_sample(M33, M32, **_LOWER),
            _well_conditioned_sample(M33, M32, **(_LOWER | {"adjoint": True})),
            _well_conditioned_sample(BATCH33, M32, **(_LOWER | {"lower": False})),
            _well_conditioned_sample(M33, BATCH32, lower=False, adjoint=True, unit_diagonal=True),
            _well_conditioned_sample(C33, C32, **_LOWER),
            _well_conditioned_sample(C33, C32, lower=False, adjoint=True, unit_diagonal=False),
        ),
        promotes=True,
    )
)


@composite("a", "b", to="high")
@function
def triangular_solve(
    a: Any, b: Any, *, lower: bool = True, adjoint: bool = False, unit_diagonal: bool = False
) -> Tensor:
    """Solve t @ x = b, or tᴴ @ x = b, where t is one triangle of a. Costs n²·k flops.

    Args:
        a: square matrices (…, n, n), float or complex.
        b: right sides (…, n, k), or one vector (n,).
        lower: read the lower triangle, else the upper one; the other may hold anything.
        adjoint: solve with the conjugate transpose of t.
        unit_diagonal: take the diagonal as ones, without reading it.

    Raises:
        ShapeError: a is not square, or the rows of a and b differ.
        DTypeError: a or b is neither float nor complex.
        ArgumentError: a flag is not a bool.
        CheckError: from the step, if the diagonal holds a 0.
    """
    a, b = promote_inputs("triangular_solve", (a, b))
    flags: dict[str, Any] = {"lower": lower, "adjoint": adjoint, "unit_diagonal": unit_diagonal}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name} must be True or False, got {value!r}")
    square_size(a.spec)
    if b.ndim == 1:
        return squeeze(triangular_solve_op(a, expand_dims(b, 1), **flags), -1)
    result: Tensor = triangular_solve_op(a, b, **flags)
    return result


# Inverses and powers ----------------------------------------------------------------------------


def _infer_square(x: TensorSpec) -> TensorSpec:
    square_size(x)
    return x


def _inv_kernel(xp: Any, x: Any) -> Any:
    return cast_result(xp, call_lapack(xp, xp.linalg.inv, x, _SINGULAR), x.dtype)


inv_op = register(
    Op(
        "inv",
        infer=_infer_square,
        kernel=_inv_kernel,
        vjp=lambda g, y, x: (-times(times(y, g, adjoint_a=True), y, adjoint_b=True),),
        batch=batching.rows,
        sharding=sharding.matrix_rule(2),
        cost=cubic_cost(2),
        autocast="high",
        samples=(
            _well_conditioned_sample(M33),
            _well_conditioned_sample(BATCH33),
            _well_conditioned_sample(C33),
        ),
    )
)


@composite("x", to="high")
@function
def inv(x: Any) -> Tensor:
    """Invert each matrix of x (…, n, n). To solve a system, `solve` is faster and more accurate.

    Raises:
        ShapeError: x is not square.
        DTypeError: x is neither float nor complex.
        CheckError: from the step, if a matrix is singular.
    """
    result: Tensor = inv_op(as_tensor(x))
    return result


@composite("x", to="low")
@function
def matrix_power(x: Any, n: int) -> Tensor:
    """Raise each matrix of x (…, m, m) to the integer power n; if n < 0, its inverse to -n.

    Repeated squaring takes about 2·log2(n) products.

    Raises:
        ArgumentError: n is no int.
        ShapeError: x is not square.
        DTypeError: x is neither float nor complex.
        CheckError: from the step, if n < 0 and a matrix is singular.
    """
    tensor = as_tensor(x)
    if isinstance(n, bool) or not isinstance(n, int | np.integer):
        raise ArgumentError(f"the power must be an int, got {n!r}")
    size = square_size(tensor.spec)
    if n == 0:
        return broadcast_to(identity(size, tensor), tensor.shape)
    square, left = (inv(tensor), -int(n)) if n < 0 else (tensor, int(n))
    result: Tensor | None = None
    while True:
        if left % 2:
            result = square if result is None else matmul(result, square)
        left //= 2
        if not left:
            assert result is not None
            return result
        square = matmul(square, square)


__all__ = ["inv", "matrix_power", "solve", "triangular_solve"]
