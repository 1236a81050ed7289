"""Convolution of any rank and its transpose. Public in `gf.nn`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from graphflow.base.environment import is_on
from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, function, promote_inputs
from graphflow.ir.spec import Shape, equate, show_shape
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.tensors.shape import moveaxis, reshape
from graphflow.ops.windows.conv_ops import conv_op, conv_transpose_op
from graphflow.ops.windows.window_arguments import Ints, Pairs, padding_pairs, per_axis


@function
def conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    channels_last: bool = False,
    name: str | None = None,
    exact: bool | None = None,
) -> Tensor:
    """Convolve x (by cross-correlation) over all axes but the first two.

    Args:
        x: floats (batch, channels, *space), or (batch, *space, channels) with `channels_last`.
        weight: (outputs, channels / groups, *kernel).
        bias: (outputs,), or None.
        stride, dilation: an int, or one for each spatial axis.
        padding: an int, an int or a pair (before, after) for each spatial axis, "valid" (none), or
            "same" (output sizes are input sizes divided by the stride, rounded up; an odd element
            goes after, with "same_lower" before).
        groups: output channels see only the input channels of their group.
        exact: sum the products themselves. Otherwise 3×3 windows of stride 1 over float32 images
            use Winograd's F(4×4, 3×3) on CPUs from 16 channels on each side and 57 on both on,
            gradients too. That is about twice as fast, but off by 1e-6 of the result's scale where
            plain sums are off by 1e-7.
            An infinite or NaN pixel makes all tiles of 4×4 results that read it NaN. Default: True
            if the environment has GRAPHFLOW_WINOGRAD=off while the graph is built.

    Returns:
        (batch, outputs, *positions), channels last if x's are.

    Raises:
        ShapeError: ranks or channels do not fit, or no window does.
        DTypeError, ArgumentError: the tensors are not floats, or arguments have another form.
    """
    x, w, b = _operands("conv", x, weight, bias, channels_last)
    rank = x.ndim - 2
    strides, dilations = per_axis("stride", stride, rank), per_axis("dilation", dilation, rank)
    attrs = {
        "stride": strides,
        "padding": padding_pairs(padding, x.shape[2:], w.shape[2:], strides, dilations),
        "dilation": dilations,
        "groups": _require_count("groups", groups),
        **_exact_attribute(exact),
    }
    y: Tensor = conv_op(x, w, name=name, **attrs)
    return _add_bias(y, b, channels_last)


@function
def conv_transpose(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    channels_last: bool = False,
    name: str | None = None,
    output_size: Any = None,
    exact: bool | None = None,
) -> Tensor:
    """Apply the transpose of `conv` as a linear map of its input, also called deconvolution.

    An axis of n positions becomes one of (n - 1)·stride - before - after + (kernel - 1)·dilation +
    1 + output_padding elements.

    Args:
        x: floats (batch, channels, *positions), channels last with `channels_last`.
        weight: (channels of x, outputs / groups, *kernel), as in the convolution that is
            transposed.
        bias, stride, padding, dilation, groups, exact: as for `conv`.
        output_padding: extra elements at the end of each axis, fewer than the stride or the
            dilation.
        output_size: the spatial sizes, in place of `output_padding`. "same" padding is then derived
            from them; given numbers stay, and the end of each axis takes the difference.

    Raises:
        ShapeError, DTypeError, ArgumentError: as `conv`.
    """
    x, w, b = _operands("conv_transpose", x, weight, bias, channels_last)
    rank = x.ndim - 2
    strides, dilations = per_axis("stride", stride, rank), per_axis("dilation", dilation, rank)
    extra = per_axis("output_padding", output_padding, rank, least=0)
    spans = tuple((k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True))
    full = tuple((n - 1) * s + e for n, s, e in zip(x.shape[2:], strides, spans, strict=True))
    if output_size is not None:
        sizes: Shape = per_axis("output_size", output_size, rank)
    elif isinstance(padding, str) and padding != "valid":
        sizes = tuple(n * s for n, s in zip(x.shape[2:], strides, strict=True))
    else:
        plain = padding_pairs(padding, full, w.shape[2:], strides, dilations)
        sizes = tuple(
            n - before - after + more
            for n, (before, after), more in zip(full, plain, extra, strict=True)
        )
        _check_extra(extra, strides, dilations)
    y: Tensor = conv_transpose_op(
        x,
        w,
        sizes=sizes,
        stride=strides,
        padding=_transpose_padding(padding, sizes, w.shape[2:], strides, dilations, full),
        dilation=dilations,
        groups=_require_count("groups", groups),
        name=name,
        **_exact_attribute(exact),
    )
    return _add_bias(y, b, channels_last)


def _check_extra(extra: Ints, stride: Ints, dilation: Ints) -> None:
    if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
        raise ArgumentError(
            f"output_padding {extra} is not below the stride {stride} or dilation {dilation}"
        )


def _transpose_padding(
    padding: Any, sizes: Shape, kernel: Shape, stride: Ints, dilation: Ints, full: Shape
) -> Pairs:
    """Return the padding with which a convolution over `sizes` has exactly the given positions.

    The padding after an axis is negative if its last elements lie under no window.
    """
    pairs = padding_pairs(padding, sizes, kernel, stride, dilation)
    return tuple(
        (before, whole - n - before)
        for (before, _), whole, n in zip(pairs, full, sizes, strict=True)
    )


def _operands(
    what: str, x: Any, weight: Any, bias: Any, channels_last: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    given = (x, weight) if bias is None else (x, weight, bias)
    tensors = promote_inputs(what, given)
    x, w = tensors[:2]
    require_kind(x.spec, "float")
    if x.ndim < 3 or x.ndim != w.ndim:
        raise ShapeError(
            "expected x of (batch, channels, *space) and a weight of that rank, got x "
            f"{show_shape(x.shape)} and weight {show_shape(w.shape)}"
        )
    b = tensors[2] if bias is not None else None
    if b is not None and b.ndim != 1:
        raise ShapeError(f"the bias must be one number for each output, got {show_shape(b.shape)}")
    return (moveaxis(x, -1, 1) if channels_last else x), w, b


def _add_bias(y: Tensor, bias: Tensor | None, channels_last: bool) -> Tensor:
    if channels_last:
        y = moveaxis(y, 1, -1)
    if bias is None:
        return y
    what = f"bias {show_shape(bias.shape)}, outputs"
    outputs = y.shape[-1 if channels_last else 1]
    size = equate(bias.shape[0], outputs, what)
    shaped = bias if channels_last else reshape(bias, (size, *(1,) * (y.ndim - 2)))
    result: Tensor = FUNCTIONS["add"](y, shaped)
    return result


def _exact_attribute(exact: bool | None) -> dict[str, bool]:
    """Return the attribute that forbids Winograd, if it is wanted.

    It is part of the graph, so that all devices compute the same.
    """
    if exact is not None and not isinstance(exact, bool):
        raise ArgumentError(f"exact must be True, False or None, got {exact!r}")
    if exact is None:
        exact = not is_on("GRAPHFLOW_WINOGRAD")
    return {"exact": True} if exact else {}


def _require_count(what: str, value: Any) -> int:
    (count,) = per_axis(what, value, 1)
    return count


# By rank ----------------------------------------------------------------------------------------

P = ParamSpec("P")


def for_rank(f: Callable[P, Tensor], rank: int) -> Callable[P, Tensor]:
    """Return a version of f for tensors with `rank` spatial axes."""

    @functools.wraps(f)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if not args and "x" not in kwargs:
            return f(*args, **kwargs)  # raises the error about the missing argument
        x = as_tensor(args[0] if args else kwargs["x"])
        if x.ndim != rank + 2:
            raise ShapeError(
                f"expected a batch, channels and {rank} spatial axes, got {show_shape(x.shape)}"
            )
        return f(*args, **kwargs)

    wrapper.__name__ = wrapper.__qualname__ = f"{f.__name__}{rank}d"
    axes = "one spatial axis" if rank == 1 else f"{rank} spatial axes"
    wrapper.__doc__ = f"`{f.__name__}` over {axes}.\n\n    {f.__doc__}"
    return function(wrapper)


conv1d, conv2d, conv3d = (for_rank(conv, rank) for rank in (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = (
    for_rank(conv_transpose, rank) for rank in (1, 2, 3)
)
