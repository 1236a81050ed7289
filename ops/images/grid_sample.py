"""Sampling of images at points off their grid: grid_sample and affine_grid.

A point lies between elements along each axis. The elements around it and their weights, combined
over the axes, are the indices and weights of `weighted_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, function, promote_inputs
from graphflow.ir.spec import Dim, Shape, Size, equate, normalize_shape, product, show_shape
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.images.sparse_sampling import weighted_rows
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.tensors.creation import arange
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.shape import expand_dims, moveaxis, reshape
from graphflow.ops.windows.window_arguments import require_known

_CUBIC_A = -0.75  # of the cubic filter, as PyTorch and ONNX have it
# The cubic filter's weights of the four elements around a point, as polynomials in its distance to
# the second of them: the rows are the coefficients of 1, t, t², t³.
_CUBIC = (
    (0.0, 1.0, 0.0, 0.0),
    (_CUBIC_A, 0.0, -_CUBIC_A, 0.0),
    (-2 * _CUBIC_A, -_CUBIC_A - 3, 2 * _CUBIC_A + 3, _CUBIC_A),
    (_CUBIC_A, _CUBIC_A + 2, -_CUBIC_A - 2, -_CUBIC_A),
)
PADDINGS = ("zeros", "border", "reflection")
_MODES = {
    "nearest": "nearest",
    "linear": "linear",
    "bilinear": "linear",
    "cubic": "cubic",
    "bicubic": "cubic",
}


# Points -----------------------------------------------------------------------------------------


def _reflect(u: Tensor, low: float, high: Any) -> Tensor:
    """Fold u back into [low, high] by reflection at both ends."""
    span = high - low
    if isinstance(span, float | int) and span == 0:
        return u * 0.0  # type: ignore[no-any-return]
    distance = abs(u - low)
    turns = FUNCTIONS["floor"](distance / span)
    rest = distance - turns * span
    even = FUNCTIONS["equal"](turns - FUNCTIONS["floor"](turns * 0.5) * 2.0, 0)
    result: Tensor = FUNCTIONS["where"](even, rest + low, high - rest)
    return result


def _apply_padding(u: Tensor, n: Size, padding: str, align_corners: bool) -> Tensor:
    """Move points onto an axis of n elements; "zeros" leaves them where they are."""
    if padding == "zeros":
        return u
    if padding == "reflection":
        last = as_tensor(n - 1, u.dtype) if isinstance(n, Dim) else n - 1
        u = _reflect(u, 0.0, last) if align_corners else _reflect(u, -0.5, last + 0.5)
    return _clip_to_axis(u, n)


def _clip_to_axis(u: Tensor, n: Size) -> Tensor:
    at_most: Tensor = FUNCTIONS["minimum"](u, n - 1)
    result: Tensor = FUNCTIONS["maximum"](at_most, 0)
    return result


def _axis_taps(
    u: Tensor, n: Size, mode: str, padding: str, align_corners: bool
) -> tuple[Tensor, Tensor]:
    """Return the elements around points u of an axis of n and their weights, (points, taps)
    each.
    """
    if mode != "cubic":
        u = _apply_padding(u, n, padding, align_corners)
    if mode == "nearest":
        near = FUNCTIONS["round"](u)
        places, weights = expand_dims(near, 1), expand_dims(u * 0.0 + 1.0, 1)
    else:
        first = FUNCTIONS["floor"](u)
        t = expand_dims(u - first, 1)
        offsets = (0, 1) if mode == "linear" else (-1, 0, 1, 2)
        places = expand_dims(first, 1) + np.asarray(offsets, u.dtype)
        rows = ((1.0, 0.0), (-1.0, 1.0)) if mode == "linear" else _CUBIC
        constants = [np.asarray(row, u.dtype) for row in rows]
        weights = as_tensor(constants[-1])
        for constant in reversed(constants[:-1]):
            weights = weights * t + constant
    if mode == "cubic":
        places = _apply_padding(places, n, padding, align_corners)
        if padding == "reflection":
            places = FUNCTIONS["round"](places)
    if padding == "zeros":
        there = FUNCTIONS["logical_and"](
            FUNCTIONS["greater_equal"](places, 0), FUNCTIONS["less"](places, n)
        )
        weights = FUNCTIONS["where"](there, weights, 0.0)
    # Clip again as ints: a NaN coordinate has no valid index, and its weight is NaN anyway.
    return _clip_to_axis(astype(FUNCTIONS["stop_gradient"](places), "int64"), n), weights


def _combine_axes(taps: list[tuple[Tensor, Tensor]], sizes: Shape) -> tuple[Tensor, Tensor]:
    """Combine taps of several axes: indices in the flattened axes, and products of weights."""
    places, weights = taps[0]
    for (more, factors), n in zip(taps[1:], sizes[1:], strict=True):
        count = places.shape[1] * more.shape[1]
        places = reshape(expand_dims(places, 2) * n + expand_dims(more, 1), (-1, count))
        weights = reshape(expand_dims(weights, 2) * expand_dims(factors, 1), (-1, count))
    return places, weights


def sample_points(
    x: Tensor, points: list[Tensor], per_image: Size, mode: str, padding: str, align: bool
) -> Tensor:
    """Interpolate x (images, channels, *space) at points: rows (images·points, channels).

    Args:
        points: for each axis one coordinate in elements, (images·points,).
    """
    space = x.shape[2:]
    taps = [_axis_taps(u, n, mode, padding, align) for u, n in zip(points, space, strict=True)]
    places, weights = _combine_axes(taps, space)
    images = arange(x.shape[0]) * product(space)
    start = broadcast_to(expand_dims(images, 1), (x.shape[0], per_image))
    places = places + reshape(start, (x.shape[0] * per_image, 1))
    rows = reshape(moveaxis(x, 1, -1), (x.shape[0] * product(space), x.shape[1]))
    result: Tensor = weighted_rows(rows, places, weights)
    return result


@composite("x", "grid")
@function
def grid_sample(
    x: Any,
    grid: Any,
    mode: str = "linear",
    padding: str = "zeros",
    align_corners: bool = False,
) -> Tensor:
    """Interpolate x at the points of a grid; differentiable in both.

    Args:
        x: floats (batch, channels, *space), with one or more spatial axes.
        grid: (batch, *positions, axes): coordinates from -1 to 1, the last spatial axis first.
        mode: "linear" ("bilinear"), "nearest" (halves to even), "cubic" ("bicubic").
        padding: values beyond the edges: "zeros", "border" (the edge) or "reflection".
        align_corners: True: -1 and 1 are the centres of the outermost elements; False: their outer
            edges.

    Returns:
        (batch, channels, *positions).

    Raises:
        ShapeError: x and grid do not fit each other.
        DTypeError, ArgumentError: x or grid is not float, or mode or padding is unknown.
    """
    x, grid = promote_inputs("grid_sample", (x, grid))
    require_kind(x.spec, "float")
    if mode not in _MODES or padding not in PADDINGS:
        raise ArgumentError(
            f"mode must be one of {', '.join(_MODES)} and padding one of {', '.join(PADDINGS)}, "
            f"got {mode!r} and {padding!r}"
        )
    shapes = f"x {show_shape(x.shape)}, grid {show_shape(grid.shape)}"
    rank = x.ndim - 2
    if rank < 1 or grid.ndim < 2 or grid.shape[-1] != rank:
        raise ShapeError(
            f"expected x of (batch, channels, *space) and grid of (batch, *positions, axes), got "
            f"{shapes}"
        )
    batch = equate(x.shape[0], grid.shape[0], f"{shapes}: batch sizes")
    flat = reshape(grid, (product(grid.shape[:-1]), rank))
    points = []
    for axis, n in enumerate(x.shape[2:]):
        g = flat[:, rank - 1 - axis]
        u = (g + 1.0) * 0.5
        points.append(u * (n - 1) if align_corners else u * n - 0.5)
    where = grid.shape[1:-1]
    rows = sample_points(x, points, product(where), _MODES[mode], padding, bool(align_corners))
    return moveaxis(reshape(rows, (batch, *where, x.shape[1])), -1, 1)


@composite("theta")
@function
def affine_grid(theta: Any, size: Any, align_corners: bool = False) -> Tensor:
    """Return a grid for `grid_sample`, of points mapped by affine maps.

    Args:
        theta: floats (batch, r, r + 1) for r spatial axes.
        size: (batch, channels, *space) of the output; its spatial sizes must be known.
        align_corners: as for `grid_sample`.

    Returns:
        (batch, *space, r).

    Raises:
        ShapeError: theta and size do not fit each other.
        DTypeError: theta is not float.
    """
    theta = as_tensor(theta)
    require_kind(theta.spec, "float")
    sizes = normalize_shape(size, "size")
    space = sizes[2:]
    rank = len(space)
    if rank < 1 or theta.ndim != 3 or theta.shape[1:] != (rank, rank + 1):
        raise ShapeError(
            "expected theta of (batch, r, r + 1) and size (batch, channels, and r sizes), got "
            f"theta {show_shape(theta.shape)} and size {show_shape(sizes)}"
        )
    equate(theta.shape[0], sizes[0], "batch sizes of theta and size")
    axes = [
        _normalized_coordinates(n, align_corners) for n in require_known("spatial sizes", space)
    ]
    mesh = np.meshgrid(*axes, indexing="ij")
    base = np.stack([*reversed(mesh), np.ones_like(mesh[0])], axis=-1).astype(theta.dtype)
    points = matmul(base.reshape(-1, rank + 1), theta, transpose_b=True)
    return reshape(points, (theta.shape[0], *space, rank))


def _normalized_coordinates(n: int, align_corners: bool) -> Any:
    """Return the coordinates of an axis's elements, from -1 to 1."""
    if align_corners:
        return np.linspace(-1.0, 1.0, n) if n > 1 else np.zeros(1)
    return (np.arange(n) * 2.0 + 1.0) / n - 1.0
