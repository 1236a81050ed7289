"""Smaller parts of vision models: blocks of pixels as channels, normalisation across channels."""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, function
from graphflow.ir.spec import Size, floordiv, product, show_shape
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.tensors.shape import moveaxis, permute_dims, reshape
from graphflow.ops.windows.pool_mean import avg_pool_op
from graphflow.ops.windows.window_arguments import per_axis


def _image(x: Any, channels_last: bool) -> Tensor:
    x = as_tensor(x)
    if x.ndim < 3:
        raise ShapeError(f"takes (batch, channels, *space), not {show_shape(x.shape)}")
    return moveaxis(x, -1, 1) if channels_last else x


def _divide_exactly(n: Size, by: int, what: str) -> Size:
    if isinstance(n, int) and n % by:
        raise ShapeError(f"{what} {n} is no multiple of {by}")
    return floordiv(n, by)


def _is_depth_first(mode: str) -> bool:
    if mode not in ("DCR", "CRD"):
        raise ArgumentError(f"mode is 'DCR' or 'CRD', not {mode!r}")
    return mode == "DCR"


@function
def depth_to_space(x: Any, block: int, mode: str = "DCR", channels_last: bool = False) -> Tensor:
    """Channels moved into blocks of pixels: (batch, c·blockʳ, *space) to (batch, c, *space·block).

    Args:
        mode: order of the channels: "DCR", the place in the block first, or "CRD", it last (as
            PyTorch's pixel_shuffle).

    Raises:
        ShapeError: the channels are no multiple of blockʳ, for r spatial axes.
        ArgumentError: block is no int >= 1, or another mode.
    """
    x = _image(x, channels_last)
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
    return moveaxis(y, 1, -1) if channels_last else y


@function
def space_to_depth(x: Any, block: int, mode: str = "DCR", channels_last: bool = False) -> Tensor:
    """The inverse of `depth_to_space`: blocks of pixels become channels.

    Raises:
        ShapeError: a spatial size is no multiple of the block.
        ArgumentError: block is no int >= 1, or another mode.
    """
    x = _image(x, channels_last)
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
    return moveaxis(y, 1, -1) if channels_last else y


@function
def pixel_shuffle(x: Any, factor: int, channels_last: bool = False) -> Tensor:
    """`depth_to_space` with the place in the block last: PyTorch's order."""
    return depth_to_space(x, factor, "CRD", channels_last)


@function
def pixel_unshuffle(x: Any, factor: int, channels_last: bool = False) -> Tensor:
    """The inverse of `pixel_shuffle`."""
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
    """x / (k + alpha/size · Σ x²)^beta, the sum over `size` neighbouring channels.

    Args:
        before: how many of them come before the channel itself; default size // 2, as in PyTorch
            (ONNX has (size - 1) // 2).

    Raises:
        ShapeError, DTypeError, ArgumentError: no channels, not floats, or no size.

    Source: Krizhevsky, Sutskever & Hinton, NeurIPS 2012.
    """
    x = as_tensor(x)
    require_kind(x.spec, "float")
    if x.ndim < 2:
        raise ShapeError(f"takes (batch, channels, …), not {show_shape(x.shape)}")
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
    return moveaxis(result, 1, -1) if channels_last else result
