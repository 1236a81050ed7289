"""Products of a matrix with its own transpose, x.T @ x and x @ x.T, at half the cost.

`passes/gram.py` replaces such `matmul` nodes by this op. Large products use BLAS's `syrk`, which
computes one triangle; numpy selects it for two views of one memory. Other products are computed as
`matmul` would compute them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.op import Cost, Op, Tensor, register, sample
from graphflow.ir.spec import Size, TensorSpec, show_shape, spec
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.matrices.blas_blocks import choose_blocks, sum_of_products
from graphflow.ops.matrices.matmul import (
    matmul,
    matmul_into,
    native_matmul,
)
from graphflow.ops.tensors.shape import matrix_transpose

Array = np.ndarray[Any, Any]

SYRK_DTYPES = ("float32", "float64")
"""Dtypes whose products may be computed by `syrk`."""
_MIN_SYRK_FLOPS = 2.5e7
"""Flops of the whole product from which `syrk` takes less time."""
_MAX_NARROW_COLUMNS = 32
"""Columns up to which generated kernels are faster, however long the columns are."""


def uses_syrk(n: int, k: int, dtype: str) -> bool:
    """Return True if a product of n columns of length k is computed by `syrk`.

    It depends on sizes and dtype alone, since the bits of the result depend on it.
    """
    return dtype in SYRK_DTYPES and n > _MAX_NARROW_COLUMNS and 2.0 * n * n * k >= _MIN_SYRK_FLOPS


def matmul_flags(columns: bool) -> dict[str, bool]:
    """Return the flags of `matmul` for the same product."""
    return {"transpose_a": columns, "transpose_b": not columns}


def gram_sizes(x: TensorSpec, columns: bool) -> tuple[Size, Size]:
    """Return the size of the result and the length that is summed over."""
    return (x.shape[1], x.shape[0]) if columns else (x.shape[0], x.shape[1])


def _infer(x: TensorSpec, columns: bool) -> TensorSpec:
    require_kind(x, "float")
    if x.rank != 2:
        raise ShapeError(f"expected a matrix, got {show_shape(x.shape)}")
    n, _ = gram_sizes(x, columns)
    return x.with_shape((n, n))


def _cost(x: TensorSpec, columns: bool) -> Cost:
    n, k = gram_sizes(x, columns)
    return Cost(flops=n * (n + 1) * k)


def _native(x: TensorSpec, columns: bool) -> KernelTask | None:
    n, k = gram_sizes(x, columns)
    if uses_syrk(cast(int, n), cast(int, k), x.dtype.name):
        return None
    task = native_matmul(x, x, **matmul_flags(columns))
    return None if task is None else replace(task, order=(0, 0, 1))  # x twice, and the result


def _gram_into(xp: Any, out: Any, x: Any, columns: bool) -> None:
    tall = x if columns else x.swapaxes(0, 1)
    k, n = tall.shape
    if xp is not np:
        xp.matmul(tall.swapaxes(0, 1), tall, out=out)
    elif not uses_syrk(n, k, x.dtype.name):
        matmul_into(np, out, x, x, **matmul_flags(columns))
    else:
        axis, parts = choose_blocks((), n, k, n)
        if parts == 1:
            np.matmul(tall.T, tall, out=out)
        elif axis == 2:
            sum_of_products(out, tall.T, tall, parts)
        else:
            _multiply_upper_blocks(out, tall, min(4, parts))


def _multiply_upper_blocks(out: Array, tall: Array, parts: int) -> None:
    """Multiply blocks on and above the diagonal; mirror them to the blocks below."""
    n = tall.shape[1]
    blocks = [slice(a, b) for a, b in pairwise([n * i // parts for i in range(parts + 1)])]
    pairs = [(a, b) for i, a in enumerate(blocks) for b in blocks[i:]]

    def part(i: int) -> None:
        a, b = pairs[i]
        np.matmul(tall[:, a].T, tall[:, b], out=out[a, b])
        if a is not b:
            out[b, a] = out[a, b].T

    run_parts(part, len(pairs))


def _kernel(xp: Any, x: Any, columns: bool) -> Any:
    n = x.shape[1 if columns else 0]
    out = xp.empty((n, n), x.dtype)
    _gram_into(xp, out, x, columns)
    return out


def _vjp(g: Tensor, y: Tensor, x: Tensor, columns: bool) -> tuple[Tensor]:
    both = g + matrix_transpose(g)
    return (matmul(x, both) if columns else matmul(both, x),)


register(
    Op(
        "gram",
        infer=_infer,
        kernel=_kernel,
        into=_gram_into,
        native=_native,
        vjp=_vjp,
        cost=_cost,
        rate="product",
        autocast="low",
        doc="The products of all columns (or rows) of a matrix: x.T @ x (or x @ x.T).",
        samples=(
            sample(spec("float32", (5, 3)), columns=True),
            sample(spec("float32", (5, 3)), columns=False),
            sample(spec("float64", (3000, 70)), columns=True),
        ),
    )
)
