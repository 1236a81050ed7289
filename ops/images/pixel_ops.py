"""Rearrangements of pixels and channels, and local response normalisation."""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, function
from graphflow.ir.spec import Size, floordiv, product, show_shape
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.tensors.shape import moveaxis, permute_dims, reshape
from graphflow.ops.windows.pool_mean import avg_pool_op
from graphflow.ops.windows.window_arguments import move_channels_first, per_axis, restore_channels


def _divide_exactly(n: Size, by: int, what: str) -> Size:
    """Divide a size by an int that divides it."""
    if isinstance(n, int) and n % by:
        raise ShapeError(f"{what} {n} is no multiple of {by}")
    return floordiv(n, by)


def _is_depth_first(mode: str) -> bool:
    """Return True if the position in the block comes before the channel."""
    if mode not in ("DCR", "CRD"):
        raise ArgumentError(f"mode must be 'DCR' or 'CRD', got {mode!r}")
    return mode == "DCR"


@function
def depth_to_space(x: Any, block: int, mode: str = "DCR", channels_last: bool = False) -> Tensor:
    """Move channels into blocks of pixels: (batch, c·blockʳ, *space) to (batch, c, *space·block).

    Args:
        x: (batch, channels, *space) with r spatial axes, channels last with `channels_last`.
        block: size of a block along each spatial axis, an int.
        mode: order of the channels: "DCR", the position in the block first, or "CRD", the channel
            first (as in PyTorch's pixel_shuffle).

    Raises:
        ShapeError: blockʳ does not divide the channels.
        ArgumentError: block is no int >= 1, or the mode is unknown.
    """
    x = move_channels_first(x, channels_last)
    (b,) = per_axis("block", block, 1)
    rank = x.ndim - 2
    c = _divide_exactly(x.shape[1], b**rank, f"the channels of {show_shape(x.shape)},")
    depth_first = _is_depth_first(mode)
    split = ((b,) * rank + (c,)) if depth_first else ((c,) + (b,) * rank)
    parts = reshape(x, (x.shape[0], *split, *x.shape[2:]))
    channel, first = (1 + rank, 1) if depth_first else (1, 2)
    order = [0, channel]
    for i in range(rank):
        order += [2 + rank + i, first + i]
    sizes = tuple(n * b for n in x.shape[2:])
    y = reshape(permute_dims(parts, order), (x.shape[0], c, *sizes))
    return restore_channels(y, channels_last)


@function
def space_to_depth(x: Any, block: int, mode: str = "DCR", channels_last: bool = False) -> Tensor:
    """Move blocks of pixels into channels: the inverse of `depth_to_space`.

    Raises:
        ShapeError: block does not divide a spatial size.
        ArgumentError: block is no int >= 1, or the mode is unknown.
    """
    x = move_channels_first(x, channels_last)
    (b,) = per_axis("block", block, 1)
    rank = x.ndim - 2
    sizes = tuple(
        _divide_exactly(n, b, f"a spatial size of {show_shape(x.shape)},") for n in x.shape[2:]
    )
    split = [s for n in sizes for s in (n, b)]
    parts = reshape(x, (*x.shape[:2], *split))
    within = [3 + 2 * i for i in range(rank)]
    order = [0, *within, 1] if _is_depth_first(mode) else [0, 1, *within]
    order += [2 + 2 * i for i in range(rank)]
    y = reshape(permute_dims(parts, order), (x.shape[0], x.shape[1] * b**rank, *sizes))
    return restore_channels(y, channels_last)


@function
def pixel_shuffle(x: Any, factor: int, channels_last: bool = False) -> Tensor:
    """Move channels into blocks of pixels in PyTorch's order: `depth_to_space` with mode "CRD".

    Shapes and errors as for `depth_to_space`.
    """
    return depth_to_space(x, factor, "CRD", channels_last)


@function
def pixel_unshuffle(x: Any, factor: int, channels_last: bool = False) -> Tensor:
    """Move blocks of pixels into channels: the inverse of `pixel_shuffle`.

    Shapes and errors as for `space_to_depth`.
    """
    return space_to_depth(x, factor, "CRD", channels_last)


@composite("x")
@function
def local_response_norm(
    x: Any,
    size: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
    before: int | None = None,
    channels_last: bool = False,
) -> Tensor:
    """Compute x / (k + alpha/size · Σ x²)^beta, the sum over `size` neighbouring channels.

    Args:
        x: floats (batch, channels, …), channels last with `channels_last`.
        size: number of channels in a sum.
        before: number of them before the channel itself; default size // 2, as in PyTorch (ONNX:
            (size - 1) // 2).

    Raises:
        ShapeError, DTypeError, ArgumentError: x has no channels or is not float, or size or before
            is out of range.

    Source: Krizhevsky, Sutskever & Hinton, NeurIPS 2012.
    """
    x = as_tensor(x)
    require_kind(x.spec, "float")
    if x.ndim < 2:
        raise ShapeError(f"expected x of (batch, channels, …), got {show_shape(x.shape)}")
    (width,) = per_axis("size", size, 1)
    (left,) = per_axis("before", width // 2 if before is None else before, 1, least=0)
    if left >= width:
        raise ArgumentError(f"before, {left}, is not below the size {width}")
    y = moveaxis(x, -1, 1) if channels_last else x
    planes = reshape(y * y, (y.shape[0], 1, y.shape[1], product(y.shape[2:])))
    sums = avg_pool_op(
        planes,
        kernel=(width, 1),
        stride=(1, 1),
        padding=((left, width - 1 - left), (0, 0)),
        dilation=(1, 1),
        ceil_mode=False,
        divisor=1,
    )
    scale = reshape(sums, y.shape) * (alpha / width) + k
    result: Tensor = FUNCTIONS["divide"](y, scale**beta)
    return restore_channels(result, channels_last)
