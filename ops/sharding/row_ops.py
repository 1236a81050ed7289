"""Sharding rules of ops along whole rows: softmax, norms, losses over classes.

Such an op is expanded into simpler ones (`expand`) whose partial reductions the shards combine. So
the logits of a large vocabulary need not be whole on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.ir.op import FUNCTIONS, REGISTRY, Sharding, Tensor
from graphflow.ir.spec import Size, TensorSpec, is_inexact, product
from graphflow.ops.sharding.rules import capital, equation, letters

G = FUNCTIONS
Axes = tuple[int, ...]


def _axes(axis: Any) -> Axes:
    """Return axes as a tuple."""
    return tuple(axis) if isinstance(axis, tuple) else (axis,)


def same_shape_rule(expand: Callable[..., Any]) -> Callable[..., Sharding]:
    """Return the rule of ops along `axis` whose inputs and output have one shape."""

    def rule(*specs: TensorSpec, axis: Any, **attrs: Any) -> Sharding:
        names = capital(letters(specs[0].rank), _axes(axis))
        return Sharding(equation([names] * len(specs), [names]), expand=expand)

    return rule


def reduction_rule(expand: Callable[..., Any]) -> Callable[..., Sharding]:
    """Return the rule of ops that reduce `axis`."""

    def rule(x: TensorSpec, axis: Any, keepdims: bool = False, **attrs: Any) -> Sharding:
        at = {a % x.rank for a in _axes(axis)} if x.rank else set()
        names = capital(letters(x.rank), tuple(at))
        out = "".join("." if i in at else c for i, c in enumerate(names) if keepdims or i not in at)
        return Sharding(equation([names], [out]), expand=expand)

    return rule


def arg_extremum_rule(extreme: str) -> Callable[..., Sharding]:
    """Return the rule of argmax and argmin: the first index of the extremum of all shards, or of
    NaN."""

    def expand(x: Tensor, axis: int | None, keepdims: bool) -> Any:
        axes = list(range(x.ndim)) if axis is None else [axis % x.ndim]
        best = x == G[extreme](x, axes, keepdims=True)
        if is_inexact(x.dtype):
            best = G["logical_or"](best, G["isnan"](x))
        count: Size = 1
        place: Any = G["zeros"]((), "int64")
        for a in reversed(axes):
            own = G["reshape"](G["arange"](x.shape[a]), _broadcast_shape(x, (a,)))
            place = place + own * G["size_of"](size=count, dtype="int64")
            count = count * x.shape[a]
        behind = G["size_of"](size=count, dtype="int64")
        return G["min"](G["where"](best, place, behind), axes, keepdims=keepdims)

    def rule(x: TensorSpec, axis: int | None, keepdims: bool) -> Sharding:
        every = tuple(range(x.rank)) if axis is None else (axis,)
        return reduction_rule(expand)(x, axis=every, keepdims=keepdims)

    return rule


# Moments and norms ------------------------------------------------------------------------------


def _shard_moments(op: Any, cut: Any, x: Tensor, axis: Axes) -> Any:
    """Return a shard's share of all values, and the mean and variance of its values, stacked."""
    names = letters(x.ndim)
    number, every = (
        REGISTRY["size_of"](size=product([sizes[names[a]] for a in axis]), dtype="float64")
        for sizes in (cut.size, cut.total)
    )
    centre = G["mean"](x, axis, keepdims=True)
    about = x - centre
    part = G["full_like"](centre, 1) * G["astype"](number / every, x.dtype)
    return G["stack"]([part, centre, G["mean"](about * about, axis, keepdims=True)])


def moments_rule(x: TensorSpec, axis: Axes) -> Sharding:
    """Split moments along their axes: those of shards are combined into those of the whole."""
    names = letters(x.rank)
    out = "".join("." if i in axis else c for i, c in enumerate(names))
    text = equation([names], ["." + out])
    return Sharding(text, kind="moments", build=_shard_moments, ignores_start=True)


def _center(x: Tensor, axis: Axes) -> tuple[Any, Any, Any]:
    """Return x minus its mean along some axes, that mean, and the variance."""
    found = REGISTRY["moments"](x, axis=tuple(a % x.ndim for a in axis))
    return x - found[1], found[1], found[2]


def _number(size: Size, like: Tensor) -> Any:
    """Return a size as a tensor of x's dtype."""
    return REGISTRY["size_of"](size=size, dtype=like.dtype.name)


def variance(x: Tensor, axis: Axes, keepdims: bool, correction: float) -> Any:
    """Expand var."""
    spread = _center(x, axis)[2]
    if correction:
        number = _number(product([x.shape[a] for a in axis]), x)
        spread = spread * (number / G["maximum"](number - correction, 0.0))
    return spread if keepdims else G["squeeze"](spread, list(axis))


def deviation(x: Tensor, axis: Axes, keepdims: bool, correction: float) -> Any:
    """Expand std."""
    return G["sqrt"](variance(x, axis, keepdims, correction))


def vector_norm(x: Tensor, axis: Axes, keepdims: bool, ord: float) -> Any:
    """Expand vector_norm."""
    size = G["abs"](x)
    if ord == np.inf:
        return G["max"](size, axis, keepdims)
    if ord == -np.inf:
        return G["min"](size, axis, keepdims)
    if ord == 0:
        return G["sum"](G["astype"](G["not_equal"](size, 0), size.dtype), axis, keepdims)
    if ord == 2:
        return G["sqrt"](G["sum"](size * size, axis, keepdims))
    if ord == 1:
        return G["sum"](size, axis, keepdims)
    return G["sum"](size**ord, axis, keepdims) ** (1.0 / ord)


def log_sum_exp(x: Tensor, axis: Axes, keepdims: bool) -> Any:
    """Expand logsumexp."""
    top = G["max"](x, axis, keepdims=True)
    level = G["where"](G["isfinite"](top), top, G["zeros_like"](top))
    total = G["log"](G["sum"](G["exp"](x - level), axis, keepdims=True)) + level
    return total if keepdims else G["squeeze"](total, list(axis))


def softmax(x: Tensor, axis: int) -> Any:
    """Expand softmax."""
    powers = G["exp"](x - G["max"](x, axis, keepdims=True))
    return powers / G["sum"](powers, axis, keepdims=True)


def log_softmax(x: Tensor, axis: int) -> Any:
    """Expand log_softmax."""
    shifted = x - G["max"](x, axis, keepdims=True)
    return shifted - G["log"](G["sum"](G["exp"](shifted), axis, keepdims=True))


def softmax_grad(g: Tensor, y: Tensor, axis: int) -> Any:
    """Expand softmax_grad."""
    return y * (g - G["sum"](g * y, axis, keepdims=True))


def log_softmax_grad(g: Tensor, y: Tensor, axis: int) -> Any:
    """Expand log_softmax_grad."""
    return g - G["exp"](y) * G["sum"](g, axis, keepdims=True)


def _standardize(x: Tensor, axis: Axes, epsilon: float, centred: bool) -> tuple[Any, Any]:
    """Return the standardised rows and the reciprocal of their deviation."""
    if centred:
        about, _, spread = _center(x, axis)
    else:
        about, spread = x, G["mean"](x * x, axis, keepdims=True)
    per_deviation = G["rsqrt"](spread + epsilon)
    return about * per_deviation, per_deviation


def standardize(x: Tensor, axis: Axes, epsilon: float, centred: bool = True) -> Any:
    """Expand standardize."""
    return _standardize(x, axis, epsilon, centred)[0]


def standardize_grad(g: Tensor, x: Tensor, axis: Axes, epsilon: float, centred: bool = True) -> Any:
    """Expand standardize_grad."""
    unit, per_deviation = _standardize(x, axis, epsilon, centred)
    rest = g - unit * G["mean"](g * unit, axis, keepdims=True)
    return (rest - G["mean"](g, axis, keepdims=True) if centred else rest) * per_deviation


def _broadcast_shape(x: Tensor, axes: Sequence[int]) -> tuple[Size, ...]:
    """Return the shape in which a tensor along some axes broadcasts to x."""
    return tuple(size if i in axes else 1 for i, size in enumerate(x.shape))


def _affine_norm(
    x: Tensor, scale: Tensor, *bias: Tensor, axis: Axes, along: Axes, epsilon: float,
    centred: bool = True,
) -> Any:  # fmt: skip
    """Expand affine_norm."""
    y = _standardize(x, axis, epsilon, centred)[0] * G["reshape"](scale, _broadcast_shape(x, along))
    return y + G["reshape"](bias[0], _broadcast_shape(x, along)) if bias else y


def affine_norm_rule(
    x: TensorSpec, *parameters: TensorSpec, axis: Axes, along: Axes, **attrs: Any
) -> Sharding:
    """Split affine_norm along its rows, by expansion."""
    names = capital(letters(x.rank), axis)
    own = "".join(names[a] for a in along)
    return Sharding(equation([names, *[own] * len(parameters)], [names]), expand=_affine_norm)


# Batch norm -------------------------------------------------------------------------------------


def _others(x: Any, channel: int) -> Axes:
    """Return all axes but that of the channels."""
    return tuple(i for i in range(x.ndim) if i != channel)


def _batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, channel: int, epsilon: float, unbiased: bool = False
) -> Any:
    """Expand batch_norm."""
    over = _broadcast_shape(x, (channel,))
    about, *found = _center(x, _others(x, channel))
    centre, spread = (G["reshape"](t, (x.shape[channel],)) for t in found)
    factor = scale * G["rsqrt"](spread + epsilon)
    y = about * G["reshape"](factor, over) + G["reshape"](bias, over)
    if unbiased:
        number = _number(product([x.shape[a] for a in _others(x, channel)]), x)
        spread = spread * (number / G["maximum"](number - 1, 1))
    return y, centre, spread


def _batch_norm_grad(g: Tensor, x: Tensor, scale: Tensor, channel: int, epsilon: float) -> Any:
    """Expand batch_norm_grad."""
    axes, over = _others(x, channel), _broadcast_shape(x, (channel,))
    number = product([x.shape[a] for a in axes])
    about, _, spread = _center(x, axes)
    per_deviation = G["rsqrt"](spread + epsilon)
    unit = about * per_deviation
    along, total = G["sum"](g * unit, axes), G["sum"](g, axes)
    rest = g - unit * G["reshape"](along / number, over) - G["reshape"](total / number, over)
    return rest * (G["reshape"](scale, over) * per_deviation), along, total


def batch_norm_rule(x: TensorSpec, *parameters: TensorSpec, channel: int, **attrs: Any) -> Sharding:
    """Split batch_norm. The moments are those of the whole batch, wherever its parts are."""
    names = letters(x.rank)
    own = names[channel]
    wide = capital(names, [i for i in range(x.rank) if i != channel])
    return Sharding(equation([wide, own, own], [wide, own, own]), expand=_batch_norm, apart="mean")


def batch_norm_grad_rule(
    g: TensorSpec, x: TensorSpec, scale: TensorSpec, channel: int, epsilon: float
) -> Sharding:
    """Split batch_norm_grad. The moments are those of the whole batch."""
    names = letters(x.rank)
    own = names[channel]
    wide = capital(names, [i for i in range(x.rank) if i != channel])
    text = equation([wide, wide, own], [wide, own, own])
    return Sharding(text, expand=_batch_norm_grad, apart="sum")


def channel_affine_rule(
    x: TensorSpec, *parameters: TensorSpec, channel: int, epsilon: float
) -> Sharding:
    """Split channel_affine along all axes."""
    names = letters(x.rank)
    return Sharding(equation([names, *[names[channel]] * len(parameters)], [names]))


# Classes ----------------------------------------------------------------------------------------


def _is_label(logits: Tensor, labels: Tensor) -> Any:
    """Return a mask of the logit of each label."""
    return G["one_hot"](labels, logits.shape[-1], "bool")


def _pick_label(logits: Tensor, labels: Tensor) -> Any:
    """Return the logit of each label."""
    zeros = G["zeros_like"](logits)
    return G["sum"](G["where"](_is_label(logits, labels), logits, zeros), -1)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Any:
    """Expand cross_entropy."""
    shifted = logits - G["max"](logits, -1, keepdims=True)
    total = G["sum"](G["exp"](shifted), -1, keepdims=True)  # the gradient reuses this sum
    picked = _pick_label(shifted, labels)  # before `total` is read: one exchange for both
    return G["squeeze"](G["log"](total), -1) - picked


def _cross_entropy_grad(g: Tensor, logits: Tensor, labels: Tensor) -> Any:
    """Expand cross_entropy_grad."""
    share = softmax(logits, logits.ndim - 1)
    slope = G["where"](_is_label(logits, labels), share - 1.0, share)
    return slope * G["expand_dims"](g, -1)


def cross_entropy_rule(logits: TensorSpec, labels: TensorSpec) -> Sharding:
    """Split cross_entropy along the classes, by expansion."""
    names = letters(labels.rank)
    own = letters(1, names).upper()
    return Sharding(equation([names + own, names], [names]), expand=_cross_entropy)


def nll_rule(x: TensorSpec, labels: TensorSpec) -> Sharding:
    """Split nll along the classes, by expansion."""
    names = letters(labels.rank)
    own = letters(1, names).upper()
    return Sharding(
        equation([names + own, names], [names]), expand=lambda x, labels: -_pick_label(x, labels)
    )


def cross_entropy_grad_rule(g: TensorSpec, logits: TensorSpec, labels: TensorSpec) -> Sharding:
    """Split cross_entropy_grad along the classes, by expansion."""
    names = letters(labels.rank)
    own = names + letters(1, names).upper()
    return Sharding(equation([names, own, names], [own]), expand=_cross_entropy_grad)
