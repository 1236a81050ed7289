"""The ops under `gf.fft`: `fft` of complex tensors, `rfft` of real ones, and `irfft` back.

`rfft` gives the half of the spectrum that determines the rest. Single precision stays single. The
transform's matrix is symmetric, so gradients are transforms, too: the inverse ones under the
opposite norm. In half a spectrum, each frequency but the first and the one at n/2 stands for two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.errors import CheckError, ShapeError
from graphflow.ir.op import Cost, Op, register, sample
from graphflow.ir.spec import (
    Size,
    TensorSpec,
    complex_dtype,
    equate,
    floordiv,
    real_dtype,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.kernels.fft import dft as transforms
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.sharding import rules as sharding

OPPOSITE = {"backward": "forward", "ortho": "ortho", "forward": "backward"}
C34, F34 = spec("complex64", (3, 4)), spec("float32", (3, 4))
CUBE = spec("complex64", (2, 3, 4))


def _cost(size: Size, along: Sequence[Size]) -> Cost:
    """Estimate 5·N·log2(N) flops of complex numbers; unknown sizes count as 1024."""
    levels = sum(math.ceil(math.log2(max(n, 2))) if isinstance(n, int) else 10 for n in along)
    return Cost(flops=size * 5 * levels)


def _require_samples(x: TensorSpec, axis: int) -> None:
    if x.shape[axis] == 0:
        raise ShapeError(f"axis {axis} of {x} has no elements to transform")


# (least flops, blocks), as in matmul: a block on another thread costs about 50 µs, and a flop of a
# transform about 1 ns.
_BLOCKS = ((2e7, 8), (1e6, 2))


def _transform_by_blocks(
    out: Any, x: Any, axes: Sequence[int], transform: Callable[[Any, Any], object]
) -> None:
    """Run transform(x, out) on blocks of an axis that it does not mix, which threads share.

    The blocks, and so the bits of each transform, depend on the shape only.
    """
    free = [i for i in range(x.ndim) if i not in axes]
    flops: Any = _cost(x.size, [x.shape[a] for a in axes]).flops
    wanted = next((blocks for least, blocks in _BLOCKS if flops >= least), 1)
    axis = max(free, key=x.shape.__getitem__) if free else 0
    blocks = min(wanted, x.shape[axis]) if free else 1
    if blocks < 2:
        transform(x, out)
        return
    edges = [x.shape[axis] * i // blocks for i in range(blocks + 1)]

    def part(i: int) -> None:
        block = (slice(None),) * axis + (slice(edges[i], edges[i + 1]),)
        transform(x[block], out[block])

    run_parts(part, blocks)


def _infer_fft(x: TensorSpec, axes: tuple[int, ...], inverse: bool, norm: str) -> TensorSpec:
    require_kind(x, "complex")
    for axis in axes:
        _require_samples(x, axis)
    return x


def _fft_kernel(xp: Any, x: Any, axes: tuple[int, ...], inverse: bool, norm: str) -> Any:
    out = xp.empty(x.shape, x.dtype)
    _fft_into(xp, out, x, axes, inverse, norm)
    return out


def _fft_into(xp: Any, out: Any, x: Any, axes: tuple[int, ...], inverse: bool, norm: str) -> None:
    if xp is np and transforms.is_native(x, axes):
        for i, axis in enumerate(axes):
            scale = _scale(x, axes, inverse, norm) if i == len(axes) - 1 else 1.0
            transforms.transform_along(out if i else x, out, axis, inverse, scale)
    elif xp is np:
        transform: Any = np.fft.ifftn if inverse else np.fft.fftn
        _transform_by_blocks(
            out, x, axes, lambda x, out: transform(x, axes=axes, norm=norm, out=out)
        )
    else:
        xp.copyto(out, (xp.fft.ifftn if inverse else xp.fft.fftn)(x, axes=axes, norm=norm))


def _scale(x: Any, axes: Sequence[int], inverse: bool, norm: str) -> float:
    """Return the factor of a transform along some axes."""
    size = math.prod(x.shape[a] for a in axes)
    if norm == "ortho":
        return 1 / math.sqrt(size)
    return 1 / size if (norm == "backward") == inverse else 1.0


fft_op: Op = register(
    Op(
        "fft",
        infer=_infer_fft,
        kernel=_fft_kernel,
        into=_fft_into,
        vjp=lambda g, y, x, axes, inverse, norm: (
            fft_op(g, axes=axes, inverse=not inverse, norm=OPPOSITE[norm]),
        ),
        batch=batching.along("axes"),
        sharding=sharding.row_rule("axes", linear=True),
        cost=lambda x, axes, inverse, norm: _cost(x.size, [x.shape[a] for a in axes]),
        samples=(
            sample(C34, axes=(1,), inverse=False, norm="backward"),
            sample(C34, axes=(1,), inverse=True, norm="backward"),
            sample(CUBE, axes=(1, 2), inverse=False, norm="ortho"),
            sample(CUBE, axes=(1,), inverse=True, norm="forward"),
        ),
    )
)


def _infer_rfft(x: TensorSpec, axis: int, norm: str, inner: float) -> TensorSpec:
    require_kind(x, "float")
    _require_samples(x, axis)
    shape = list(x.shape)
    shape[axis] = floordiv(shape[axis], 2) + 1
    return TensorSpec(tuple(shape), complex_dtype(x.dtype))


def _scale_inner(spectrum: Any, size: int, axis: int, inner: float) -> None:
    """Multiply the frequencies that stand for two."""
    if inner != 1.0:
        spectrum[(slice(None),) * axis + (slice(1, (size + 1) // 2),)] *= inner


def _rfft_into(xp: Any, out: Any, x: Any, axis: int, norm: str, inner: float) -> None:
    if xp is np and transforms.is_native_real(x.dtype, x.shape, axis):
        transforms.transform_real(x, out, x.shape[axis], _scale(x, (axis,), False, norm))
    elif xp is np:
        transform: Any = np.fft.rfft
        _transform_by_blocks(
            out, x, (axis,), lambda x, out: transform(x, axis=axis, norm=norm, out=out)
        )
    else:
        xp.copyto(out, xp.fft.rfft(x, axis=axis, norm=norm))
    _scale_inner(out, x.shape[axis], axis, inner)


def _rfft_kernel(xp: Any, x: Any, axis: int, norm: str, inner: float) -> Any:
    shape = list(x.shape)
    shape[axis] = shape[axis] // 2 + 1
    out = xp.empty(shape, complex_dtype(x.dtype))
    _rfft_into(xp, out, x, axis, norm, inner)
    return out


def _infer_irfft(x: TensorSpec, size: Size, axis: int, norm: str, inner: float) -> TensorSpec:
    require_kind(x, "complex")
    what = f"{x} is no half of the spectrum of {size} elements along axis {axis}"
    equate(x.shape[axis], floordiv(size, 2) + 1, what)
    if size == 0:
        raise ShapeError(f"{what}: give at least 1 element")
    shape = list(x.shape)
    shape[axis] = size
    return TensorSpec(tuple(shape), real_dtype(x.dtype))


def _irfft_into(xp: Any, out: Any, x: Any, size: int, axis: int, norm: str, inner: float) -> None:
    if size < 1 or x.shape[axis] < 1:
        raise CheckError(f"{x.shape[axis]} frequencies are no half of {size} elements; give n")
    if inner != 1.0:
        x = x.copy()
        _scale_inner(x, size, axis, inner)
    if xp is np and transforms.is_native_real(out.dtype, out.shape, axis):
        transforms.transform_real(x, out, size, _scale(out, (axis,), True, norm))
    elif xp is np:
        transform: Any = np.fft.irfft
        _transform_by_blocks(
            out, x, (axis,), lambda x, out: transform(x, size, axis=axis, norm=norm, out=out)
        )
    else:
        xp.copyto(out, xp.fft.irfft(x, size, axis=axis, norm=norm))


def _irfft_kernel(xp: Any, x: Any, size: int, axis: int, norm: str, inner: float) -> Any:
    shape = list(x.shape)
    shape[axis] = size
    out = xp.empty(shape, real_dtype(x.dtype))
    _irfft_into(xp, out, x, size, axis, norm, inner)
    return out


# Half of the spectrum of a real tensor. `inner` multiplies all frequencies but the first and the
# one at n/2.
rfft_op: Op = register(
    Op(
        "rfft",
        infer=_infer_rfft,
        kernel=_rfft_kernel,
        into=_rfft_into,
        vjp=lambda g, y, x, axis, norm, inner: (
            astype(
                irfft_op(g, size=x.shape[axis], axis=axis, norm=OPPOSITE[norm], inner=inner / 2),
                x.dtype,
            ),
        ),
        batch=batching.along("axis"),
        sharding=sharding.row_rule("axis", linear=True),
        cost=lambda x, axis, norm, inner: _cost(x.size, [x.shape[axis]]),
        samples=(
            sample(F34, axis=1, norm="backward", inner=1.0),
            sample(spec("float32", (2, 5, 2)), axis=1, norm="ortho", inner=2.0),
            sample(spec("float32", (2, 1)), axis=1, norm="forward", inner=1.0),
        ),
    )
)
# The real tensor of `size` elements along the axis with such a spectrum. `inner` multiplies the
# same frequencies of the input.
irfft_op: Op = register(
    Op(
        "irfft",
        infer=_infer_irfft,
        kernel=_irfft_kernel,
        into=_irfft_into,
        vjp=lambda g, y, x, size, axis, norm, inner: (
            rfft_op(g, axis=axis, norm=OPPOSITE[norm], inner=inner * 2),
        ),
        batch=batching.along("axis"),
        sharding=sharding.row_rule("axis", linear=True),
        cost=lambda x, size, axis, norm, inner: _cost(x.size, [x.shape[axis]]),
        samples=(
            sample(spec("complex64", (3, 3)), size=4, axis=1, norm="backward", inner=1.0),
            sample(spec("complex64", (2, 3, 2)), size=5, axis=1, norm="ortho", inner=0.5),
            sample(spec("complex64", (2, 1)), size=1, axis=1, norm="forward", inner=1.0),
        ),
    )
)
