"""Batch normalisation by moments of a batch or running ones. Public as `gf.nn.batch_norm`.

The three gradients by the moments of a batch are one op, since one sweep over a channel gives all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
    Op,
    Tensor,
    as_tensor,
    error_location,
    function,
    register,
    sample,
)
from graphflow.ir.spec import TensorSpec, equate, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import is_zeros, kernel_like_first, require_kind
from graphflow.ops.host_calls.debug import check
from graphflow.ops.kernels.conv import batch_norm as channels
from graphflow.ops.networks.norm import (
    Axes,
    channel_axis,
    parameter_shape,
    require_epsilon,
    require_parameters,
    standardize,
    standardize_grad,
)
from graphflow.ops.pointwise.convert import astype, size_of, stop_gradient
from graphflow.ops.pointwise.transcendental import rsqrt
from graphflow.ops.reductions.reduce import F, divide_by_count, element_count, per_element, sum
from graphflow.ops.sharding import row_ops as row_sharding

_V4 = spec("float32", (4,))
_V3 = spec("float32", (3,))
_IMAGE = spec("float32", (2, 3, 2, 2))
_PLANES = spec("float32", (2, 3, 5, 7))


def _summable(x: Any) -> Any:
    """Return x in the dtype to sum in: two-byte floats as float32."""
    return x.astype("float32") if x.dtype.itemsize == 2 else x


# By the moments of the batch --------------------------------------------------------------------


def _reduced_axes(rank: int, channel: int) -> Axes:
    return tuple(i for i in range(rank) if i != channel)


def _infer_batch_norm(
    x: TensorSpec, scale: TensorSpec, bias: TensorSpec, channel: int, epsilon: float,
    unbiased: bool = False,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    require_parameters(x, (channel,), scale=scale, bias=bias)
    return x, scale, scale


def _batch_norm_into(
    xp: Any, out: Any, x: Any, scale: Any, bias: Any, channel: int, epsilon: float,
    unbiased: bool = False,
) -> None:  # fmt: skip
    y, average, variance = out
    axes, over = _reduced_axes(x.ndim, channel), parameter_shape(x.shape, (channel,))
    number, wide = x.size // max(x.shape[channel], 1), _summable(x)
    correction = number / max(number - 1, 1) if unbiased else 1.0
    if channels.is_supported(xp, x, channel):
        channels.normalize(y, average, variance, x, scale, bias, channel, epsilon, correction)
        return
    centre = xp.sum(wide, axis=axes) / number
    about = wide - centre.reshape(over)
    spread = xp.sum(about * about, axis=axes) / number
    factor = scale * xp.reciprocal(xp.sqrt(spread + epsilon))
    xp.multiply(about, factor.reshape(over), out=about)
    xp.add(about, bias.reshape(over), out=y, casting="same_kind")
    xp.copyto(average, centre, casting="same_kind")
    xp.copyto(variance, spread * spread.dtype.type(correction), casting="same_kind")


def _batch_norm_kernel(xp: Any, x: Any, scale: Any, bias: Any, **attrs: Any) -> tuple[Any, ...]:
    out = (xp.empty(x.shape, x.dtype), *(xp.empty(scale.shape, x.dtype) for _ in range(2)))
    _batch_norm_into(xp, out, x, scale, bias, **attrs)
    return out


def _batch_norm_vjp(
    gs: Sequence[Tensor], ys: Sequence[Tensor], x: Tensor, scale: Tensor, bias: Tensor,
    channel: int, epsilon: float, unbiased: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    g, g_mean, g_variance = gs
    axes, over = _reduced_axes(x.ndim, channel), parameter_shape(x.shape, (channel,))
    number = element_count(x.shape, axes)
    dx, dscale, dbias = _batch_norm_grad(g, x, scale, channel=channel, epsilon=epsilon)
    if not is_zeros(g_mean):
        dx = dx + FUNCTIONS["reshape"](divide_by_count(g_mean, number), over)
    if not is_zeros(g_variance):
        g_variance = g_variance * _bessel_correction(number, g_variance) if unbiased else g_variance
        about = x - FUNCTIONS["reshape"](ys[1], over)
        dx = dx + about * FUNCTIONS["reshape"](divide_by_count(g_variance * 2, number), over)
    return dx, dscale, dbias


def _infer_batch_norm_grad(
    g: TensorSpec, x: TensorSpec, scale: TensorSpec, channel: int, epsilon: float
) -> tuple[TensorSpec, ...]:
    require_parameters(x, (channel,), scale=scale)
    for have, want in zip(g.shape, x.shape, strict=True):
        equate(have, want, f"cotangent {show_shape(g.shape)}, x {show_shape(x.shape)}")
    return x, scale, scale


def _batch_norm_grad_into(
    xp: Any, out: Any, g: Any, x: Any, scale: Any, channel: int, epsilon: float
) -> None:
    dx, dscale, dbias = out
    if channels.is_supported(xp, x, channel):
        channels.normalize_gradients(dx, dscale, dbias, g, x, scale, channel, epsilon)
        return
    axes, over = _reduced_axes(x.ndim, channel), parameter_shape(x.shape, (channel,))
    number, x, g = element_count(x.shape, axes), _summable(x), _summable(g)
    about = x - (xp.sum(x, axis=axes) / number).reshape(over)
    spread = xp.sum(about * about, axis=axes) / number
    per_deviation = xp.reciprocal(xp.sqrt(spread + epsilon))
    unit = xp.multiply(about, per_deviation.reshape(over), out=about)
    along, total = xp.sum(g * unit, axis=axes), xp.sum(g, axis=axes)
    xp.multiply(unit, (along / number).reshape(over), out=unit)
    rest = xp.subtract(g, unit, out=unit)
    rest -= (total / number).reshape(over)
    xp.multiply(rest, (scale * per_deviation).reshape(over), out=dx, casting="same_kind")
    xp.copyto(dscale, along, casting="same_kind")
    xp.copyto(dbias, total, casting="same_kind")


def _batch_norm_grad_kernel(
    xp: Any, g: Any, x: Any, scale: Any, channel: int, epsilon: float
) -> tuple[Any, ...]:
    out = (xp.empty(x.shape, x.dtype), *(xp.empty(scale.shape, x.dtype) for _ in range(2)))
    _batch_norm_grad_into(xp, out, g, x, scale, channel, epsilon)
    return out


def _batch_norm_grad_vjp(
    hs: Sequence[Tensor], ys: Sequence[Tensor], g: Tensor, x: Tensor, scale: Tensor,
    channel: int, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Use dx = L(scale·g) with L symmetric and linear, dscale = Σ g·x̂, dbias = Σ g."""
    h, h_scale, h_bias = hs
    axes, over = _reduced_axes(x.ndim, channel), parameter_shape(x.shape, (channel,))
    attrs: dict[str, Any] = {"axis": axes, "epsilon": epsilon}
    h_scale, h_bias, wide = (FUNCTIONS["reshape"](t, over) for t in (h_scale, h_bias, scale))
    spread = standardize_grad(h, x, **attrs)
    dg = spread * wide + h_scale * standardize(x, **attrs) + h_bias
    assert standardize_grad.vjp is not None
    _, through = standardize_grad.vjp(h, ys[0], g * wide, x, **attrs)
    dx = standardize_grad(g * h_scale, x, **attrs) + through
    return dg, dx, sum(spread * g, axes)


# The cotangents of x, scale and bias for a cotangent of the first result of `batch_norm`.
_batch_norm_grad = register(
    Op(
        "batch_norm_grad",
        infer=_infer_batch_norm_grad,
        kernel=_batch_norm_grad_kernel,
        into=_batch_norm_grad_into,
        records=True,
        vjp=_batch_norm_grad_vjp,
        batch=batching.channels,
        sharding=row_sharding.batch_norm_grad_rule,
        cost=per_element(16),
        samples=(
            sample(F, F, _V4, channel=1, epsilon=0.1),
            sample(_IMAGE, _IMAGE, _V3, channel=1, epsilon=0.1),
            sample(_PLANES, _PLANES, _V3, channel=1, epsilon=0.1),
        ),
    )
)


# The normalised x, and the mean and variance of each channel. x is divided by the deviation of the
# biased variance, also if the returned variance is `unbiased`.
_batch_norm = register(
    Op(
        "batch_norm",
        infer=_infer_batch_norm,
        kernel=_batch_norm_kernel,
        into=_batch_norm_into,
        records=True,
        vjp=_batch_norm_vjp,
        batch=batching.channels,
        sharding=row_sharding.batch_norm_rule,
        cost=per_element(9),
        autocast="high",
        samples=(
            sample(F, _V4, _V4, channel=1, epsilon=0.1),
            sample(_IMAGE, _V3, _V3, channel=1, epsilon=0.1, unbiased=True),
            sample(_PLANES, _V3, _V3, channel=1, epsilon=0.1),
            sample(_PLANES, _V3, _V3, channel=1, epsilon=0.1, unbiased=True),
        ),
    )
)


# By given moments -------------------------------------------------------------------------------


def _infer_channel_affine(
    x: TensorSpec, scale: TensorSpec, bias: TensorSpec, mean: TensorSpec, variance: TensorSpec,
    channel: int, epsilon: float,
) -> TensorSpec:  # fmt: skip
    require_parameters(
        x, (channel,), scale=scale, bias=bias, mean=mean, variance=variance
    )  # fmt: skip
    return x


def _channel_affine_into(
    xp: Any, out: Any, x: Any, scale: Any, bias: Any, mean: Any, variance: Any, channel: int,
    epsilon: float,
) -> None:  # fmt: skip
    over = parameter_shape(x.shape, (channel,))
    factor = scale * xp.reciprocal(xp.sqrt(_summable(variance) + epsilon))
    shift = bias - mean * factor
    if channels.is_supported(xp, x, channel):
        channels.scale_and_shift(out, x, factor, shift, channel)
        return
    product = xp.multiply(x, factor.reshape(over), out=out if out.dtype == factor.dtype else None)
    xp.add(product, shift.reshape(over), out=out, casting="same_kind")


def _channel_affine_vjp(
    g: Tensor, y: Tensor, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor,
    channel: int, epsilon: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    axes, over = _reduced_axes(x.ndim, channel), parameter_shape(x.shape, (channel,))
    per_deviation = rsqrt(variance + epsilon)
    factor = scale * per_deviation
    total = sum(g, axes)
    along = sum(g * (x - FUNCTIONS["reshape"](mean, over)), axes)
    d_variance = along * (factor * per_deviation * per_deviation * -0.5)
    dx = g * FUNCTIONS["reshape"](factor, over)
    return dx, along * per_deviation, total, -(total * factor), d_variance


# (x - mean)·scale / √(variance + epsilon) + bias for each channel.
_channel_affine = register(
    Op(
        "channel_affine",
        infer=_infer_channel_affine,
        kernel=kernel_like_first(_channel_affine_into),
        into=_channel_affine_into,
        vjp=_channel_affine_vjp,
        batch=batching.channels,
        sharding=row_sharding.channel_affine_rule,
        cost=per_element(2),
        samples=(
            sample(F, _V4, _V4, _V4, _V4, channel=1, epsilon=0.1, low=0.2),
            sample(_IMAGE, _V3, _V3, _V3, _V3, channel=1, epsilon=0.1, low=0.2),
        ),
    )
)


@composite("x", "scale", "bias", "mean", "variance")
@function
def batch_norm(
    x: Any, scale: Any = None, bias: Any = None, mean: Any = None, variance: Any = None, *,
    training: bool = False, momentum: float = 0.1, epsilon: float = 1e-5, unbiased: bool = True,
    channels_last: bool = False, name: str | None = None,
) -> Any:  # fmt: skip
    """Standardise each channel of x over the batch and its positions, then scale and shift it.

    With `training`, by the moments of the batch; the result is (y, new running mean, new running
    variance), where new = (1 - momentum)·running + momentum·(of the batch), without a gradient.
    Otherwise by the given mean and variance; the result is y.

    Args:
        x: floats (N, C, …), or (N, …, C) with `channels_last`.
        scale, bias: (C,), or None.
        mean, variance: (C,): the running moments.
        momentum: weight of the batch's moments in the new running ones, from 0 to 1.
        epsilon: is added to the variance.
        unbiased: divide the variance that enters the running one by (count - 1), as torch does.
            ONNX divides by the count (and calls 1 - momentum momentum).

    Raises:
        DTypeError: a tensor is not float.
        ShapeError: a parameter has another shape, or training has one value for each channel only.
        ArgumentError: mean or variance is missing, or a number is out of range.

    Source: Ioffe & Szegedy, ICML 2015.
    """
    x = as_tensor(x)
    channel, epsilon = channel_axis(x, channels_last), require_epsilon(epsilon)
    if mean is None or variance is None:
        raise ArgumentError("give the running mean and variance, (C,) each")
    number = isinstance(momentum, int | float) and not isinstance(momentum, bool)
    if not number or not 0 <= momentum <= 1:
        raise ArgumentError(f"momentum must be a number from 0 to 1, got {momentum!r}")
    for what, flag in (("training", training), ("unbiased", unbiased)):
        if not isinstance(flag, bool):
            raise ArgumentError(f"{what} must be True or False, got {flag!r}")
    require_kind(x.spec, "float")
    scale = FUNCTIONS["ones"]((x.shape[channel],), x.dtype) if scale is None else as_tensor(scale)
    bias = FUNCTIONS["zeros"]((x.shape[channel],), x.dtype) if bias is None else as_tensor(bias)
    running = as_tensor(mean), as_tensor(variance)
    for tensor in (scale, bias, *running):
        require_kind(tensor.spec, "float")
    wide, scale, bias = _cast_to_widest(x, scale, bias, *running)
    attrs: dict[str, Any] = {"channel": channel, "epsilon": epsilon}
    if not training:
        average, spread = (astype(s, wide.dtype) for s in running)
        given = wide, scale, bias, average, spread
        if channel < x.ndim - 1 or wide.dtype.itemsize < 4:
            return astype(_channel_affine(*given, **attrs, name=name), x.dtype)
        with error_location("batch_norm"):
            _channel_affine.infer(*(t.spec for t in given), **attrs)
        factor = scale * rsqrt(spread + epsilon)  # fused with the ops around
        shifted = FUNCTIONS["add"](wide * factor, bias - average * factor, name=name)
        return astype(shifted, x.dtype)
    items = element_count(x.shape, _reduced_axes(x.ndim, channel))
    y, centre, spread = _batch_norm(wide, scale, bias, **attrs, unbiased=unbiased, name=name)
    spread = _require_enough_values(spread, items, 2 if unbiased else 1, x)
    moved = (
        _update_running(running[0], centre, momentum),
        _update_running(running[1], spread, momentum),
    )
    return astype(y, x.dtype), *moved


def _cast_to_widest(x: Tensor, scale: Tensor, bias: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Cast x, scale and bias to the widest dtype among all: float16 data has float32 statistics."""
    widest = max((x, scale, bias, *others), key=lambda t: t.dtype.itemsize).dtype
    return tuple(astype(t, widest) for t in (x, scale, bias))


def _require_enough_values(spread: Tensor, items: Any, least: int, x: Tensor) -> Tensor:
    """Return the variance if it has enough values; a NaN would stay in the running one."""
    if isinstance(items, int) and items >= least:
        return spread
    have, remedy = ("no value", "") if least == 1 else ("one value", ", or say unbiased=False")
    message = (
        f"x {show_shape(x.shape)} has {have} for each channel: its variance is unknown; "
        f"train on more{remedy}"
    )
    if isinstance(items, int):
        raise ShapeError(message)
    return check(spread, size_of(size=items, dtype="int64") >= least, f"in batch_norm, {message}")


def _bessel_correction(items: Any, like: Tensor) -> Any:
    """Return count / (count - 1), for known and unknown counts."""
    if isinstance(items, int):
        return items / max(items - 1, 1)
    number = size_of(size=items, dtype=like.dtype.name)
    return number / FUNCTIONS["maximum"](number - 1, 1)


def _update_running(running: Tensor, now: Tensor, momentum: float) -> Tensor:
    fresh = astype(stop_gradient(now), running.dtype)
    result: Tensor = running * (1 - momentum) + fresh * momentum
    return result
