"""Products of contiguous arrays: where generated kernels are faster than BLAS, or than float32."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from graphflow.ir.spec import broadcast_shapes
from graphflow.ops.kernels.gemm.amx_products import AmxProduct, plan_half_product
from graphflow.ops.kernels.gemm.gemm import (
    MatrixProduct,
    effective_strides,
    is_supported,
    plan_product,
    swap_last_two,
)
from graphflow.ops.kernels.gemm.kernel_form import (
    APART,
    GemmSize,
)
from graphflow.ops.kernels.gemm.tiling import LONG_K

_CACHED_BYTES = 512 << 10
"""Bytes of a result that stay in a cache until they are read."""
_BLAS_FLOPS = 1.2e9
"""Flops of one matrix from which BLAS, which packs both operands, is as fast or faster."""
_BLAS_FLOPS_APART = 6e8
"""The same if a transposed first operand has rows that are read far apart."""
_UNCACHED_BYTES, _FEW_ELEMENTS = 32e6, 2048
"""Bytes of such operands, beyond any cache, from which ours is faster for any number of flops;
unless the result has so few elements that one pass over both operands computes it."""


def plan_if_faster_than_blas(
    a: tuple[int, ...], b: tuple[int, ...], dtype: str, transpose_a: bool, transpose_b: bool,
    added: bool = False,
) -> MatrixProduct | AmxProduct | None:  # fmt: skip
    """Plan the product of contiguous arrays of these shapes; None if BLAS is as fast.

    It depends on shapes, flags and dtype alone, since bits follow from it. Arrays of bfloat16 are
    multiplied by AMX tiles if there are some.

    Args:
        added: whether the product is added to an array of the result's shape.
    """
    if dtype == "bfloat16":
        return None if added else plan_half_product(a, b, transpose_a, transpose_b)
    return _plan_if_faster(a, b, dtype, transpose_a, transpose_b, added)


@lru_cache(maxsize=4096)
def _plan_if_faster(
    a: tuple[int, ...], b: tuple[int, ...], dtype: str, transpose_a: bool, transpose_b: bool,
    added: bool,
) -> MatrixProduct | None:  # fmt: skip
    if not is_supported(dtype):
        return None
    m, k = a[:-3:-1] if transpose_a else a[-2:]
    n = b[-2] if transpose_b else b[-1]
    flops = 2.0 * m * k * n
    # Most of each register would be empty, which does not matter for a few elements.
    narrow = (n <= 4 or (m <= 4 and transpose_b)) and m * k * n > 4096
    is_apart = transpose_a and k > LONG_K
    is_far = (
        is_apart
        and k * (m + n) * np.dtype(dtype).itemsize >= _UNCACHED_BYTES
        and m * n > _FEW_ELEMENTS
    )
    if narrow or is_far or flops > (_BLAS_FLOPS_APART if is_apart else _BLAS_FLOPS):
        return None
    return plan_contiguous(a, b, dtype, transpose_a, transpose_b, added)


@lru_cache(maxsize=4096)
def plan_contiguous(
    a: tuple[int, ...], b: tuple[int, ...], dtype: str, transpose_a: bool = False,
    transpose_b: bool = False, added: bool = False,
) -> MatrixProduct | None:  # fmt: skip
    """Plan the product of contiguous arrays of these shapes, with the blocks of a large result."""
    m, k = a[:-3:-1] if transpose_a else a[-2:]
    n = b[-2] if transpose_b else b[-1]
    batch: tuple[int, ...] = broadcast_shapes(a[:-2], b[:-2])  # type: ignore[assignment]
    rank, item = len(batch) + 2, np.dtype(dtype).itemsize
    strides = []
    for shape, turn in ((a, transpose_a), (b, transpose_b), ((*batch, m, n), False)):
        steps = [item]
        for size in shape[:0:-1]:
            steps.insert(0, steps[0] * size)
        own = effective_strides(shape, tuple(steps), item)
        strides.append((0,) * (rank - len(shape)) + (swap_last_two(own) if turn else own))
    found = plan_product(batch, m, k, n, dtype, strides[2], strides[0], strides[1], added)
    count = math.prod(batch)
    if found is not None and added:
        sizes = list(found.sizes)
        sizes[GemmSize.FLAGS] |= APART
        found = replace(found, sizes=tuple(sizes))
    if found is None or count * m * n * item <= 2 * _CACHED_BYTES:
        return found
    return replace(found, blocks=_finished_blocks(found, count, m, n, item))


def _finished_blocks(
    product: MatrixProduct, count: int, m: int, n: int, item: int
) -> tuple[tuple[int, int], ...]:
    """Return where blocks of a product end: some tiles of a matrix, or some matrices."""
    tiles = product.units // count
    step, height = product.sizes[GemmSize.BLOCK], product.form.height - 1
    if product.swapped or m * n * item <= _CACHED_BYTES:
        some = max(1, _CACHED_BYTES // (m * n * item))
        ends = [(tiles * i, m * n * i) for i in range(some, count, some)]
    else:
        tall = product.sizes[GemmSize.TALL]
        ends = [
            (tiles * i + tile, m * n * i + n * (tile * height + min(tile, tall)))
            for i in range(count)
            for tile in (*range(step, tiles, step), tiles)
        ][:-1]
    return (*ends, (product.units, count * m * n))
