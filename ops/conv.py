"""Convolution of any rank: one op, and its gradients in the input and in the weight.

The three are the partial derivatives of one trilinear form, Σ y[n,o,p] · w[o,c,k] · x[n,c,q] with
q = p·stride - before + k·dilation, so that each one's gradients are the two others. Transposed
convolution is the gradient in the input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from graphflow.errors import ArgumentError, ShapeError
from graphflow.op import (
    FUNCTIONS,
    Cost,
    Op,
    Tensor,
    as_tensor,
    function,
    promoted,
    register,
    sample,
)
from graphflow.ops import batching
from graphflow.ops.kernels.columns import correlate, correlate_weights, spread
from graphflow.ops.kernels.depthwise import depthwise, depthwise_weights, spread_depthwise
from graphflow.ops.rules import require_kind
from graphflow.ops.shape import moveaxis, reshape
from graphflow.ops.sliding import Ints, Pairs, Windows, padding_pairs, per_axis, slid_shape
from graphflow.spec import Shape, TensorSpec, equate, product, show_shape, spec

# Shape rules ------------------------------------------------------------------------------------


def _require_weight(x: TensorSpec, w: TensorSpec, groups: int, axis: int) -> None:
    """Refuse weights that do not fit the channels of x; `axis` of w is what x's channels meet."""
    require_kind(x, "float")
    shapes = f"x {show_shape(x.shape)}, weight {show_shape(w.shape)}, groups {groups}"
    if x.rank < 3 or x.rank != w.rank:
        raise ShapeError(f"{shapes}: takes (batch, channels, *space) and a weight of that rank")
    if x.dtype != w.dtype:
        raise ArgumentError(f"x is {x.dtype}, the weight {w.dtype}; convert one with .astype")
    channels = w.shape[axis] * (groups if axis else 1)
    equate(x.shape[1], channels, f"{shapes}: channels differ")
    outputs = w.shape[0]
    if isinstance(outputs, int) and outputs % groups:
        raise ShapeError(f"{shapes}: the weight's first axis is no multiple of the groups")


def _infer_conv(
    x: TensorSpec, w: TensorSpec, stride: Ints, padding: Pairs, dilation: Ints, groups: int
) -> TensorSpec:
    _require_weight(x, w, groups, axis=1)
    out = slid_shape(x.shape[2:], w.shape[2:], stride, padding, dilation)
    return x.with_shape((x.shape[0], w.shape[0], *out))


def _infer_transpose(
    g: TensorSpec,
    w: TensorSpec,
    sizes: Shape,
    stride: Ints,
    padding: Pairs,
    dilation: Ints,
    groups: int,
) -> TensorSpec:
    _require_weight(g, w, groups, axis=0)
    _equate_positions(g, slid_shape(sizes, w.shape[2:], stride, padding, dilation))
    return g.with_shape((g.shape[0], w.shape[1] * groups, *sizes))


def _infer_weight(
    x: TensorSpec,
    g: TensorSpec,
    kernel: Shape,
    stride: Ints,
    padding: Pairs,
    dilation: Ints,
    groups: int,
) -> TensorSpec:
    require_kind(x, "float")
    equate(x.shape[0], g.shape[0], "batch sizes")
    _equate_positions(g, slid_shape(x.shape[2:], kernel, stride, padding, dilation))
    inputs = x.shape[1] // groups
    return x.with_shape((g.shape[1], inputs, *kernel))


def _equate_positions(g: TensorSpec, wanted: Shape) -> None:
    for have, want in zip(g.shape[2:], wanted, strict=True):
        equate(have, want, f"positions {show_shape(g.shape[2:])}, windows {show_shape(wanted)}")


def _cost_conv(x: TensorSpec, w: TensorSpec, **attrs: Any) -> Cost:
    out = _infer_conv(x, w, **attrs)
    return Cost(flops=out.size * 2 * product(w.shape[1:]))


def _cost_transpose(g: TensorSpec, w: TensorSpec, **attrs: Any) -> Cost:
    return Cost(flops=g.size * 2 * product(w.shape[1:]))


def _cost_weight(x: TensorSpec, g: TensorSpec, groups: int, **attrs: Any) -> Cost:
    return Cost(flops=g.size * 2 * (x.shape[1] // groups) * product(attrs["kernel"]))


# Kernels ----------------------------------------------------------------------------------------


def _windows(kernel: Ints, stride: Ints, padding: Any, dilation: Ints, out: Ints) -> Windows:
    return Windows(kernel, stride, tuple(before for before, _ in padding), dilation, out)


def _conv_into(
    xp: Any, out: Any, x: Any, w: Any, stride: Ints, padding: Any, dilation: Ints, groups: int
) -> None:
    windows = _windows(w.shape[2:], stride, padding, dilation, out.shape[2:])
    if not out.size or not w.size:
        out[...] = 0
    elif w.shape[1] == 1 and groups > 1:
        depthwise(xp, out, x, w, windows)
    else:
        correlate(xp, out, x, w, windows, groups)


def _transpose_into(
    xp: Any,
    out: Any,
    g: Any,
    w: Any,
    sizes: Ints,
    stride: Ints,
    padding: Any,
    dilation: Ints,
    groups: int,
) -> None:
    windows = _windows(w.shape[2:], stride, padding, dilation, g.shape[2:])
    single = w.shape[1] == 1 and groups > 1
    if not out.size or not g.size or not w.size:
        out[...] = 0
    elif set(stride) == {1} and (w.shape[0] == groups if single else not _weighty(g, w)):
        _correlate_flipped(xp, out, g, w, windows, groups)
    elif single:
        spread_depthwise(xp, out, g, w, windows)
    else:
        spread(xp, out, g, w, windows, groups)


def _weighty(g: Any, w: Any) -> bool:
    """Whether turning the weight round costs more than adding windows to each other."""
    return bool(g.size < 2 * w.shape[0] * g.shape[1])


def _correlate_flipped(xp: Any, out: Any, g: Any, w: Any, windows: Windows, groups: int) -> None:
    """With stride 1, the gradient in the input is a convolution by the flipped kernel."""
    outputs, inputs, *kernel = w.shape
    flipped = w[(slice(None), slice(None), *(slice(None, None, -1) for _ in kernel))]
    flipped = flipped.reshape(groups, outputs // groups, inputs, *kernel).swapaxes(1, 2)
    flipped = flipped.reshape(groups * inputs, outputs // groups, *kernel)
    before = tuple(
        (k - 1) * d - b for k, d, b in zip(kernel, windows.dilation, windows.before, strict=True)
    )
    mirrored = windows._replace(before=before, out=out.shape[2:])
    if flipped.shape[1] == 1 and groups > 1:
        depthwise(xp, out, g, xp.ascontiguousarray(flipped), mirrored)
    else:
        correlate(xp, out, g, xp.ascontiguousarray(flipped), mirrored, groups)


def _weight_into(
    xp: Any,
    out: Any,
    x: Any,
    g: Any,
    kernel: Ints,
    stride: Ints,
    padding: Any,
    dilation: Ints,
    groups: int,
) -> None:
    windows = _windows(kernel, stride, padding, dilation, g.shape[2:])
    if not out.size or not x.size:
        out[...] = 0
    elif out.shape[1] == 1 and groups > 1:
        depthwise_weights(xp, out, x, g, windows)
    else:
        correlate_weights(xp, out, x, g, windows, groups)


def _conv_kernel(xp: Any, x: Any, w: Any, **attrs: Any) -> Any:
    padding = attrs["padding"]
    out = slid_shape(x.shape[2:], w.shape[2:], attrs["stride"], padding, attrs["dilation"])
    return _made(xp, _conv_into, (x.shape[0], w.shape[0], *out), x, w, attrs)


def _transpose_kernel(xp: Any, g: Any, w: Any, **attrs: Any) -> Any:
    shape = (g.shape[0], w.shape[1] * attrs["groups"], *attrs["sizes"])
    return _made(xp, _transpose_into, shape, g, w, attrs)


def _weight_kernel(xp: Any, x: Any, g: Any, **attrs: Any) -> Any:
    shape = (g.shape[1], x.shape[1] // attrs["groups"], *attrs["kernel"])
    return _made(xp, _weight_into, shape, x, g, attrs)


def _made(xp: Any, into: Any, shape: Any, a: Any, b: Any, attrs: Any) -> Any:
    out = xp.empty(shape, a.dtype)
    into(xp, out, a, b, **attrs)
    return out


# The three ops ----------------------------------------------------------------------------------


def _plain(
    rank: int, stride: int = 1, padding: Any = (0, 0), dilation: int = 1, groups: int = 1
) -> dict[str, Any]:
    """Attributes with the same on each axis."""
    return {
        "stride": (stride,) * rank,
        "padding": (tuple(padding),) * rank,
        "dilation": (dilation,) * rank,
        "groups": groups,
    }


def _f(*shape: int) -> TensorSpec:
    return spec("float32", shape)


_STRIDED = _plain(2, stride=2, padding=(1, 0))
_DILATED = _plain(1, padding=(1, 2), dilation=2, groups=2)
_DEEP = _plain(2, stride=2, padding=(1, 1), groups=3)
_FLAT_DEEP = _plain(2, padding=(0, 1), groups=2)
_CUBES = _plain(3, padding=(1, 0))

conv_op: Op = register(
    Op(
        "conv",
        infer=_infer_conv,
        kernel=_conv_kernel,
        into=_conv_into,
        vjp=lambda g, y, x, w, **attrs: (
            conv_transpose_op(g, w, sizes=x.shape[2:], **attrs),
            conv_weight_op(x, g, kernel=w.shape[2:], **attrs),
        ),
        batch=batching.grouped(1, 0, out=1),
        cost=_cost_conv,
        autocast="low",
        samples=(
            sample(_f(2, 3, 5, 4), _f(4, 3, 3, 2), **_STRIDED),
            sample(_f(3, 2, 5), _f(4, 1, 2), **_DILATED),
            sample(_f(2, 3, 4, 5), _f(3, 1, 3, 3), **_DEEP),
            sample(_f(2, 2, 3, 3), _f(4, 1, 2, 2), **_FLAT_DEEP),
            sample(_f(2, 2, 3, 2), _f(3, 2, 1, 1), **_plain(2)),
            sample(_f(1, 2, 3, 2, 2), _f(2, 2, 2, 2, 1), **_CUBES),
        ),
    )
)
conv_transpose_op: Op = register(
    Op(
        "conv_transpose",
        infer=_infer_transpose,
        kernel=_transpose_kernel,
        into=_transpose_into,
        vjp=lambda h, y, g, w, sizes, **attrs: (
            conv_op(h, w, **attrs),
            conv_weight_op(h, g, kernel=w.shape[2:], **attrs),
        ),
        batch=batching.grouped(1, 0, out=1),
        cost=_cost_transpose,
        autocast="low",
        samples=(
            sample(_f(2, 4, 2, 2), _f(4, 3, 3, 2), sizes=(5, 4), **_STRIDED),
            sample(_f(3, 4, 6), _f(4, 1, 2), sizes=(5,), **_DILATED),
            sample(_f(2, 3, 2, 3), _f(3, 1, 3, 3), sizes=(4, 5), **_DEEP),
            sample(_f(2, 4, 3, 3), _f(4, 1, 2, 2), sizes=(3, 3), **_FLAT_DEEP),
        ),
    )
)
conv_weight_op: Op = register(
    Op(
        "conv_weight_grad",
        infer=_infer_weight,
        kernel=_weight_kernel,
        into=_weight_into,
        vjp=lambda h, y, x, g, kernel, **attrs: (
            conv_transpose_op(g, h, sizes=x.shape[2:], **attrs),
            conv_op(x, h, **attrs),
        ),
        batch=batching.grouped(1, 1, out=0),
        cost=_cost_weight,
        samples=(
            sample(_f(2, 3, 5, 4), _f(2, 4, 2, 2), kernel=(3, 2), **_STRIDED),
            sample(_f(3, 2, 5), _f(3, 4, 6), kernel=(2,), **_DILATED),
            sample(_f(2, 3, 4, 5), _f(2, 3, 2, 3), kernel=(3, 3), **_DEEP),
            sample(_f(2, 2, 3, 3), _f(2, 4, 3, 3), kernel=(2, 2), **_FLAT_DEEP),
        ),
    )
)

# Functions --------------------------------------------------------------------------------------


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
) -> Tensor:
    """Convolution (cross-correlation) over all axes of x but the first two.

    Args:
        x: (batch, channels, *space), or (batch, *space, channels) with `channels_last`.
        weight: (outputs, channels / groups, *kernel).
        bias: (outputs,), added.
        stride, dilation: an int, or one for each spatial axis.
        padding: an int, an int or a pair (before, after) for each spatial axis, "valid" (none), or
            "same" (output sizes are input sizes divided by the stride, rounded up; an odd element
            goes after, with "same_lower" before).
        groups: output channels see only the input channels of their group.

    Returns:
        (batch, outputs, *positions), channels last if x's are.

    Raises:
        ShapeError: ranks or channels do not fit, or no window does.
        DTypeError, ArgumentError: not floats, or arguments of another form.
    """
    x, w, b = _operands("conv", x, weight, bias, channels_last)
    rank = x.ndim - 2
    strides, dilations = per_axis("stride", stride, rank), per_axis("dilation", dilation, rank)
    attrs = {
        "stride": strides,
        "padding": padding_pairs(padding, x.shape[2:], w.shape[2:], strides, dilations),
        "dilation": dilations,
        "groups": _count("groups", groups),
    }
    y: Tensor = conv_op(x, w, name=name, **attrs)
    return _finished(y, b, channels_last)


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
) -> Tensor:
    """The transpose of `conv` as a linear map of its input: what is often called deconvolution.

    An axis of n positions becomes one of (n - 1)·stride - before - after + (kernel - 1)·dilation +
    1 + output_padding elements; `output_padding` of these, below the stride or the dilation, are at
    its end. `output_size` says the sizes themselves instead: then "same" padding is what makes the
    difference, and numbers leave it to the end.

    Args:
        weight: (channels of x, outputs / groups, *kernel), as the convolution it transposes has it.

    Raises:
        As `conv`.
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
        padding=_closing(padding, sizes, w.shape[2:], strides, dilations, full),
        dilation=dilations,
        groups=_count("groups", groups),
        name=name,
    )
    return _finished(y, b, channels_last)


def _check_extra(extra: Ints, stride: Ints, dilation: Ints) -> None:
    if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
        raise ArgumentError(
            f"output_padding {extra} is not below the stride {stride} or dilation {dilation}"
        )


def _closing(
    padding: Any, sizes: Shape, kernel: Shape, stride: Ints, dilation: Ints, full: Shape
) -> Pairs:
    """Padding with which a convolution of `sizes` has exactly the positions that were given: what
    goes after may be negative, where the last elements are under no window."""
    pairs = padding_pairs(padding, sizes, kernel, stride, dilation)
    return tuple(
        (before, whole - n - before)
        for (before, _), whole, n in zip(pairs, full, sizes, strict=True)
    )


def _operands(
    what: str, x: Any, weight: Any, bias: Any, channels_last: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    given = (x, weight) if bias is None else (x, weight, bias)
    tensors = promoted(what, given)
    x, w = tensors[:2]
    require_kind(x.spec, "float")
    if x.ndim < 3 or x.ndim != w.ndim:
        raise ShapeError(
            f"x {show_shape(x.shape)}, weight {show_shape(w.shape)}: takes (batch, channels, "
            "*space) and a weight of that rank"
        )
    b = tensors[2] if bias is not None else None
    if b is not None and b.ndim != 1:
        raise ShapeError(f"the bias is one number for each output, not {show_shape(b.shape)}")
    return (moveaxis(x, -1, 1) if channels_last else x), w, b


def _finished(y: Tensor, bias: Tensor | None, channels_last: bool) -> Tensor:
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


def _count(what: str, value: Any) -> int:
    (count,) = per_axis(what, value, 1)
    return count


# By rank ----------------------------------------------------------------------------------------

P = ParamSpec("P")


def of_rank(f: Callable[P, Tensor], rank: int) -> Callable[P, Tensor]:
    """A function of any number of spatial axes for tensors that have `rank` of them."""

    @functools.wraps(f)
    def ranked(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        x = as_tensor(args[0] if args else kwargs["x"])
        if x.ndim != rank + 2:
            raise ShapeError(
                f"takes (batch, channels) and {rank} spatial axes, not {show_shape(x.shape)}"
            )
        return f(*args, **kwargs)

    ranked.__name__ = ranked.__qualname__ = f"{f.__name__}{rank}d"
    ranked.__doc__ = f"`{f.__name__}` over {rank} spatial axes.\n\n    {f.__doc__}"
    return function(ranked)


conv1d, conv2d, conv3d = (of_rank(conv, rank) for rank in (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = (
    of_rank(conv_transpose, rank) for rank in (1, 2, 3)
)
