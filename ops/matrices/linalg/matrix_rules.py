"""Parts of ops on matrices: shape rules, adjoints, LAPACK calls, and inputs of samples.

The last two axes are matrices, the axes before them a batch. LAPACK runs on one thread per block of
the batch, so results have the same bits for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from graphflow.errors import CheckError, ShapeError
from graphflow.ir.op import FUNCTIONS, Cost, Tensor
from graphflow.ir.spec import Size, TensorSpec, equate, kind, show_shape
from graphflow.ops.base.shape_rules import conj, require_kind
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.tensors.shape import expand_dims, matrix_transpose

# Shape rules ------------------------------------------------------------------------------------


def matrix_sizes(x: TensorSpec) -> tuple[Size, Size]:
    """Return the rows and columns of a tensor of float or complex matrices.

    Raises:
        DTypeError: x is neither float nor complex.
        ShapeError: x has fewer than two axes.
    """
    require_kind(x, "float", "complex")
    if x.rank < 2:
        raise ShapeError(f"expected matrices in the last two axes, got {show_shape(x.shape)}")
    m, n = x.shape[-2:]
    return m, n


def square_size(x: TensorSpec) -> Size:
    """Return the size of the square matrices of x.

    Raises:
        DTypeError: x is neither float nor complex.
        ShapeError: x is not square.
    """
    m, n = matrix_sizes(x)
    return equate(m, n, f"expected square matrices, got {show_shape(x.shape)}")


def cubic_cost(flops: int) -> Callable[..., Cost]:
    """Return a cost rule of `flops` for each element of the first input and each of its columns."""
    return lambda x, *others, **attrs: Cost(flops=x.size * x.shape[-1] * flops)


# Gradients are made of --------------------------------------------------------------------------


def adjoint(x: Tensor) -> Tensor:
    """Return the conjugate transpose of matrices."""
    return matrix_transpose(conj(x))


def times(a: Tensor, b: Tensor, *, adjoint_a: bool = False, adjoint_b: bool = False) -> Tensor:
    """Multiply a, or its adjoint, by b, or its adjoint."""
    return matmul(
        conj(a) if adjoint_a else a,
        conj(b) if adjoint_b else b,
        transpose_a=adjoint_a,
        transpose_b=adjoint_b,
    )


def symmetric_part(x: Tensor) -> Tensor:
    """Return (x + xᴴ) / 2, the gradient of functions of the symmetric part of their input."""
    result: Tensor = (x + adjoint(x)) * 0.5
    return result


def per_column(values: Tensor) -> Tensor:
    """Return vectors (…, n) as (…, 1, n), to scale or shift each column."""
    return expand_dims(values, -2)


def per_row(values: Tensor) -> Tensor:
    """Return vectors (…, n) as (…, n, 1), to scale or shift each row."""
    return expand_dims(values, -1)


def identity(size: Size, like: Tensor) -> Tensor:
    """Return the identity matrix in the dtype of `like`."""
    result: Tensor = FUNCTIONS["eye"](size, dtype=like.dtype)
    return result


def match_kind(g: Tensor, x: Tensor) -> Tensor:
    """Convert a cotangent to the kind of x; for a real x take the real part."""
    if kind(x.dtype) == "complex":
        return astype(g, x.dtype)
    return astype(FUNCTIONS["real"](g), x.dtype) if kind(g.dtype) == "complex" else g


# Kernels are made of ----------------------------------------------------------------------------


def cast_result(xp: Any, x: Any, dtype: Any) -> Any:
    """Return a contiguous result in the given dtype."""
    return xp.ascontiguousarray(x, dtype=dtype)


def array_adjoint(x: Any) -> Any:
    """Return the conjugate transpose of an array of matrices."""
    transposed = x.swapaxes(-1, -2)
    return transposed.conj() if transposed.dtype.kind == "c" else transposed


def call_lapack(
    xp: Any, call: Callable[[Any], Any], x: Any, fault: str, whole: bool = False
) -> Any:
    """Run call(x), where LAPACK may refuse a matrix of x.

    Args:
        fault: what is wrong with a refused matrix, and the remedy.
        whole: the call takes all matrices of x at once, or one, but no part of a batch.

    Raises:
        CheckError: LAPACK refused a matrix; the message holds its index and `fault`.
    """
    try:
        with _raise_linalg_errors(xp):
            return call(x) if whole or xp is not np else _call_by_blocks(call, x)
    except np.linalg.LinAlgError:
        raise CheckError(f"{_first_failure(call, x)} of shape {x.shape[-2:]} {fault}") from None


# (least multiplications, blocks), as in matmul: a block on another thread costs about 50 µs.
_BLOCKS = ((1e7, 8), (2e5, 2))


def _call_by_blocks(call: Callable[[Any], Any], x: Any) -> Any:
    """Run call(x) on blocks of the first axis of a batch, which threads share.

    The blocks depend on the shape only, and each matrix is decomposed alone.
    """
    wanted = next((blocks for least, blocks in _BLOCKS if x.size * x.shape[-1] >= least), 1)
    blocks = min(wanted, x.shape[0]) if x.ndim > 2 else 1
    if blocks < 2:
        return call(x)
    edges = [x.shape[0] * i // blocks for i in range(blocks + 1)]
    found: list[Any] = [None] * blocks

    def part(i: int) -> None:
        found[i] = call(x[edges[i] : edges[i + 1]])

    run_parts(part, blocks)
    if isinstance(found[0], tuple):
        return tuple(map(np.concatenate, zip(*found, strict=True)))
    return np.concatenate(found)


def _raise_linalg_errors(xp: Any) -> AbstractContextManager[Any]:
    """Return a context in which CuPy raises LAPACK's errors; by default it ignores them."""
    if xp is np:
        return nullcontext()
    import cupyx

    raising: AbstractContextManager[Any] = cupyx.errstate(linalg="raise")
    return raising


def _first_failure(call: Callable[[Any], Any], x: Any) -> str:
    batch: tuple[int, ...] = x.shape[:-2]
    for index in np.ndindex(*batch):
        try:
            call(x[index])
        except np.linalg.LinAlgError:
            return f"the matrix at index {index}" if batch else "the matrix"
    return "a matrix"


# Inputs for samples -----------------------------------------------------------------------------


def make_well_conditioned(arrays: list[Any]) -> list[Any]:
    """Raise the diagonal of the first input, so that its matrices are well conditioned."""
    x, *others = arrays
    x = x.copy()
    diagonal = range(min(x.shape[-2:]))
    x[..., diagonal, diagonal] += 3 * x.shape[-1]
    return [x, *others]


def make_positive_definite(arrays: list[Any]) -> list[Any]:
    """Replace the first input x by x @ xᴴ / n + 1, which is positive definite."""
    x, *others = arrays
    x = x @ x.swapaxes(-1, -2).conj() / x.shape[-1]
    diagonal = range(x.shape[-1])
    x[..., diagonal, diagonal] += 1
    return [x.astype(arrays[0].dtype), *others]


def make_distinct_spectrum(arrays: list[Any]) -> list[Any]:
    """Add a rising diagonal to the first input, so that its spectrum is well separated.

    The spectrum of real matrices up to 3×3 is then real.
    """
    x, *others = arrays
    x = x.copy()
    diagonal = range(min(x.shape[-2:]))
    x[..., diagonal, diagonal] += [10.0 * (i + 1) for i in diagonal]
    return [x, *others]
