"""Norms of vectors and matrices, and condition numbers. Public in `gf.linalg`."""

from __future__ import annotations

from functools import partial
from typing import Any

from graphflow.errors import ArgumentError, ShapeError, Untraceable
from graphflow.ir.op import FUNCTIONS, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import TensorSpec, kind, real_dtype, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.roots import divide_by_root, divide_out, one_where_masked, zero_at_root
from graphflow.ops.base.shape_rules import (
    normalize_axis,
    reciprocal_or_zero,
    reduced_shape,
    require_kind,
    restore_reduced_axes,
    zero_where_zero,
)
from graphflow.ops.kernels.fusion.row_ops import over_axes
from graphflow.ops.matrices.linalg import confluent
from graphflow.ops.matrices.linalg.matrix_rules import match_kind, matrix_sizes, square_size
from graphflow.ops.matrices.linalg.solve import inv
from graphflow.ops.matrices.linalg.svd import svdvals
from graphflow.ops.pointwise.select import stop_gradient_unless
from graphflow.ops.reductions.reduce import normalize_arguments, per_element, require_elements
from graphflow.ops.reductions.variance import reduction_jvp_from_slope
from graphflow.ops.sharding import row_ops as row_sharding
from graphflow.ops.tensors.shape import expand_dims, permute_dims, squeeze

Axes = tuple[int, ...]
INF = float("inf")
_DIVISIBLE_ORDERS = (3.0, 4.0, 5.0, 6.0)
"""Orders at which the gradient looks for a power of the norm in its cotangent."""


# Vectors ----------------------------------------------------------------------------------------


def _infer_norm(x: TensorSpec, axis: Axes, keepdims: bool, ord: float) -> TensorSpec:
    require_kind(x, "float", "complex")
    if abs(ord) == INF:
        require_elements(x, axis)
    return TensorSpec(reduced_shape(x.shape, axis, keepdims), real_dtype(x.dtype))


def _norm_kernel(xp: Any, x: Any, axis: Axes, keepdims: bool, ord: float) -> Any:
    dtype = real_dtype(x.dtype)
    kept = {"axis": axis, "keepdims": keepdims}
    if ord == 0:
        result = (x != 0).sum(**kept)
    elif ord == INF:
        result = xp.abs(x).max(**kept)
    elif ord == -INF:
        result = xp.abs(x).min(**kept)
    elif ord == 1:
        result = xp.abs(x).sum(**kept)
    elif ord == 2:
        squares = x.real * x.real + x.imag * x.imag if x.dtype.kind == "c" else x * x
        result = xp.sqrt(squares.sum(**kept))
    else:
        result = (xp.abs(x) ** ord).sum(**kept) ** (1.0 / ord)
    return xp.asarray(result, dtype)


def _norm_of(xp: Any, x: Any, axis: Axes, keepdims: bool, ord: float) -> Any:
    """Compute the norm of a row of real numbers, for generated kernels."""
    if abs(ord) == INF:
        return xp.max(abs(x)) if ord > 0 else xp.min(abs(x))
    if ord == 1:
        return xp.sum(abs(x))
    if ord == 2:
        return xp.sqrt(xp.sum(x * x))
    raise Untraceable(f"no kernel is generated for the norm of order {ord}")


def _norm_vjp(
    g: Tensor, y: Tensor, x: Tensor, axis: Axes, keepdims: bool, ord: float
) -> tuple[Tensor | None]:
    """Return g·x/|x|·(|x|/y)^(ord - 1), and 0 where x or y is 0.

    For ord = ±inf, equal extrema share the cotangent.
    """
    if ord == 0:
        return (None,)
    if ord == 2:
        widen = partial(restore_reduced_axes, shape=x.shape, axes=axis, keepdims=keepdims)
        return (match_kind(divide_by_root(g, y, x, widen), x),)
    where, size = FUNCTIONS["where"], FUNCTIONS["abs"](x)
    quotient: Tensor | None = g if ord in _DIVISIBLE_ORDERS else None
    for _ in range(int(ord) - 1 if ord in _DIVISIBLE_ORDERS else 0):
        quotient = quotient if quotient is None else divide_out(quotient, y)
    if quotient is not None:  # g comes from a power of y, at least ord, which is smooth at 0
        return (x * size ** (ord - 2) * restore_reduced_axes(quotient, x.shape, axis, keepdims),)
    g, y = (restore_reduced_axes(t, x.shape, axis, keepdims) for t in (g, one_where_masked(g, y)))
    if ord == 1 and kind(x.dtype) == "complex":
        return (zero_at_root(size, x, g * (x / size)),)
    direction = x * reciprocal_or_zero(size)
    if ord == 1:
        return (zero_where_zero(size, direction * g),)
    if abs(ord) == INF:
        hit = size == y
        shared = g / FUNCTIONS["sum"](
            FUNCTIONS["astype"](hit, size.dtype), axis=axis, keepdims=True
        )
        return (match_kind(where(hit & (size != 0), direction * shared, 0), x),)
    ratio = where(size == 0, 1.0, size) / y  # infinite where y is 0: derivatives there are NaN
    slope = direction * (g * where(ratio == 0, 1.0, ratio) ** (ord - 1))
    return (match_kind(zero_at_root(y, x, slope), x),)


F, CUBE = spec("float32", (3, 4)), spec("float32", (2, 3, 2))
vector_norm_op = register(
    Op(
        "vector_norm",
        infer=_infer_norm,
        kernel=_norm_kernel,
        expr=_norm_of,
        rows=over_axes,
        vjp=_norm_vjp,
        jvp=reduction_jvp_from_slope(_norm_vjp),
        batch=batching.along("axis"),
        sharding=row_sharding.reduction_rule(row_sharding.vector_norm),
        cost=per_element(3),
        autocast="high",
        samples=(
            sample(F, axis=(1,), keepdims=False, ord=2.0),
            sample(CUBE, axis=(0, 2), keepdims=True, ord=2.0),
            sample(spec("complex64", (3, 4)), axis=(0,), keepdims=False, ord=2.0),
            sample(spec("complex64", (3, 4)), axis=(1,), keepdims=False, ord=1.0),
            sample(F, axis=(0, 1), keepdims=False, ord=INF),
            sample(F, axis=(0,), keepdims=False, ord=-INF),
            sample(F, axis=(1,), keepdims=False, ord=0.0),
            sample(F, axis=(1,), keepdims=False, ord=1.0),
            sample(F, axis=(1,), keepdims=False, ord=3.5),
            sample(F, axis=(1,), keepdims=True, ord=-1.0, low=0.3),
            sample(spec("complex64", (4,)), axis=(0,), keepdims=False, ord=3.0),
        ),
    )
)


@function
def vector_norm(
    x: Any, axis: Any = None, keepdims: bool = False, ord: float = 2, name: str | None = None
) -> Tensor:
    """Compute (Σ|x|^ord)^(1/ord) over axes (None: all elements), as a real tensor.

    The gradient is 0 where the vector is 0 (for ord other than 2, where an element is 0). Equal
    largest or least elements share it.

    Args:
        x: floats or complex numbers.
        ord: any number. inf and -inf give the largest and the least |x|; 0 counts elements that are
            not 0.

    Raises:
        ShapeError: an axis is outside x, or there are no elements for ord = ±inf.
        ArgumentError: an axis is given twice, or ord is no number.
        DTypeError: x is neither float nor complex.
    """
    x, axes = normalize_arguments("vector_norm", x, axis, keepdims)
    if isinstance(ord, bool) or not isinstance(ord, int | float) or ord != ord:
        raise ArgumentError(f"ord must be a number, inf or -inf, got {ord!r}")
    result: Tensor = vector_norm_op(x, axis=axes, keepdims=keepdims, ord=float(ord), name=name)
    return result


# Matrices ---------------------------------------------------------------------------------------

_SUMS = (1, -1, INF, -INF)


def _is_order(ord: Any, *orders: Any) -> bool:
    return not isinstance(ord, bool) and isinstance(ord, int | float | str) and ord in orders


@composite("x")
@function
def matrix_norm(x: Any, keepdims: bool = False, ord: Any = "fro") -> Tensor:
    """Compute the norm of each matrix of x (…, m, n).

    Singular values that are 0 up to rounding have gradient 0, as |x| has at 0. If the largest
    (least) ones are equal, the gradient is that of one choice of their vectors.

    Args:
        ord: "fro" the root of the sum of squares, "nuc" the sum of the singular values, 2 (-2) the
            largest (least) of them, 1 (-1) the largest (least) sum of |x| over a column, inf (-inf)
            over a row.

    Raises:
        ShapeError: x has fewer than two axes.
        ArgumentError: ord is none of these.
        DTypeError: x is neither float nor complex.
    """
    x, _ = normalize_arguments("matrix_norm", x, None, keepdims)
    matrix_sizes(x.spec)
    if _is_order(ord, "fro"):
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    largest, least = FUNCTIONS["max"], FUNCTIONS["min"]
    if _is_order(ord, *_SUMS):
        along, over = (-2, -1) if abs(ord) == 1 else (-1, -2)
        sums = vector_norm(x, axis=along, keepdims=True, ord=1)
        result: Tensor = (largest if ord > 0 else least)(sums, axis=over, keepdims=True)
        return result if keepdims else squeeze(result, (-2, -1))
    if _is_order(ord, "nuc", 2, -2):
        reduce = FUNCTIONS["sum"] if ord == "nuc" else largest if ord == 2 else least
        values = svdvals(x)
        noise = squeeze(confluent.largest_magnitude(values), -1) * confluent.rounding_error(values)
        result = reduce(stop_gradient_unless(values > noise, values), axis=-1)
        return expand_dims(result, (-2, -1)) if keepdims else result
    raise ArgumentError(f"ord must be 'fro', 'nuc', ±1, ±2 or ±inf, got {ord!r}")


@function
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Compute the norm of vectors or matrices, with numpy's rules for which of the two.

    Args:
        ord: as for `vector_norm` or `matrix_norm`; None: the root of the sum of squares.
        axis: one axis for vectors, two for matrices. None: all elements if ord is None; else x is
            one vector or one matrix.

    Raises:
        ShapeError: an axis is outside x, or axis names more than two.
        ArgumentError: ord is none of theirs.
        DTypeError: x is neither float nor complex.
    """
    x, axes = normalize_arguments("norm", x, axis, keepdims)
    if ord is None:
        return vector_norm(x, axis=axes, keepdims=keepdims)
    if len(axes) == 1:
        return vector_norm(x, axis=axes, keepdims=keepdims, ord=ord)
    if len(axes) != 2:
        raise ShapeError(
            f"a norm of order {ord!r} is over one axis or two, got {len(axes)}; name them"
        )
    first, second = axes if axis is None else (normalize_axis(a, x.ndim) for a in axis)
    others = [i for i in range(x.ndim) if i not in axes]
    result = matrix_norm(permute_dims(x, [*others, first, second]), ord=ord)
    return expand_dims(result, axes) if keepdims else result


@composite("x")
@function
def cond(x: Any, p: Any = None) -> Tensor:
    """Compute the condition number norm(x)·norm(x⁻¹) of each matrix of x (…, m, n).

    Args:
        p: the norm, as for `matrix_norm`. None or 2: the largest singular value over the least (-2:
            the reciprocal), for matrices of any shape; other norms need square matrices.

    Raises:
        ShapeError: x holds no matrices, or they must be square and are not.
        ArgumentError: p is no norm.
        DTypeError: x is neither float nor complex.
        CheckError: from the step, if a matrix is singular (for None and 2 the result is inf).
    """
    tensor = as_tensor(x)
    if p is None or _is_order(p, 2, -2):
        m, n = matrix_sizes(tensor.spec)
        if m == 0 or n == 0:
            raise ShapeError(f"{tensor.spec} has no singular values")
        values = svdvals(tensor)
        largest, least = FUNCTIONS["max"](values, axis=-1), FUNCTIONS["min"](values, axis=-1)
        ratio: Tensor = least / largest if p == -2 else largest / least
        return ratio
    square_size(tensor.spec)
    product: Tensor = matrix_norm(tensor, ord=p) * matrix_norm(inv(tensor), ord=p)
    return product


__all__ = ["cond", "matrix_norm", "norm", "vector_norm"]
