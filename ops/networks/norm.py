"""Layer, RMS, group and instance normalisation, and the standardisation inside them.

One op standardises, scales and shifts for all of them. They differ in the axes of the moments, and
in the axes that scale and bias belong to.
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Op, Rows, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import Shape, TensorSpec, broadcast_shapes, equate, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import normalize_axes, require_kind
from graphflow.ops.kernels.fusion.row_ops import over_axes, row_kernel
from graphflow.ops.pointwise.transcendental import rsqrt
from graphflow.ops.reductions.reduce import CUBE, F, mean, per_element, sum
from graphflow.ops.reductions.variance import var
from graphflow.ops.sharding import row_ops as row_sharding

Axes = tuple[int, ...]


# Standardisation --------------------------------------------------------------------------------


def _standardize_rows(xp: Any, x: Any, epsilon: float, centred: bool) -> tuple[Any, Any]:
    """Return x (less its mean if `centred`) over its deviation, and the reciprocal deviation."""
    about = x - xp.mean(x) if centred else x
    per_deviation = xp.reciprocal(xp.sqrt(xp.mean(about * about) + epsilon))
    return about * per_deviation, per_deviation


def _standardize_of(xp: Any, x: Any, axis: Axes, epsilon: float, centred: bool = True) -> Any:
    return _standardize_rows(xp, x, epsilon, centred)[0]


def _standardize_grad_of(
    xp: Any, g: Any, x: Any, axis: Axes, epsilon: float, centred: bool = True
) -> Any:
    unit, per_deviation = _standardize_rows(xp, x, epsilon, centred)
    rest = g - unit * xp.mean(g * unit)
    return (rest - xp.mean(g) if centred else rest) * per_deviation


def _standardize_grad_vjp(
    h: Tensor, y: Tensor, g: Tensor, x: Tensor, axis: Axes, epsilon: float, centred: bool = True
) -> tuple[Tensor, Tensor]:
    """Differentiate the gradient of standardisation.

    With x̂ the standardised x, r its reciprocal deviation and ⟨·⟩ means over the axes:

    y = r·(g - ⟨g⟩ - x̂·⟨g·x̂⟩) is linear and symmetric in g; and from dx̂/dx = y[g := 1_k] and
    dr/dx = -r²·x̂/count follows dx = -r·(x̂·⟨h·y⟩ + y[g := h]·⟨g·x̂⟩ + y·⟨h·x̂⟩). Without
    `centred`, the same holds without ⟨g⟩.
    """
    attrs: dict[str, Any] = {"axis": axis, "epsilon": epsilon, "centred": centred}
    unit = standardize(x, **attrs)
    spread = var(x, axis, keepdims=True) if centred else mean(x * x, axis, keepdims=True)
    per_deviation = rsqrt(spread + epsilon)
    dg = standardize_grad(h, x, **attrs)

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return mean(a * b, axis, keepdims=True)

    dx = per_deviation * (unit * inner(h, y) + dg * inner(g, unit) + y * inner(h, unit))
    return dg, -dx


def _infer_standardize(
    x: TensorSpec, *others: TensorSpec, axis: Axes, epsilon: float, centred: bool = True
) -> TensorSpec:
    require_kind(x, "float")
    return TensorSpec(broadcast_shapes(x.shape, *(o.shape for o in others)), x.dtype)


_NORM: dict[str, Any] = {"axis": (1,), "epsilon": 0.1}
_RAW: dict[str, Any] = _NORM | {"centred": False}
standardize_grad = register(
    Op(
        "standardize_grad",
        infer=_infer_standardize,
        kernel=row_kernel(_standardize_grad_of, over_axes),
        expr=_standardize_grad_of,
        rows=over_axes,
        vjp=_standardize_grad_vjp,
        batch=batching.along("axis"),
        sharding=row_sharding.same_shape_rule(row_sharding.standardize_grad),
        cost=per_element(14),
        samples=(
            sample(F, F, **_NORM),
            sample(F, F, **_RAW),
            sample(CUBE, CUBE, axis=(1, 2), epsilon=0.1),
        ),
    )
)
# (x - mean) / √(variance + epsilon) over axes; without `centred` x / √(mean of squares + epsilon).
standardize = register(
    Op(
        "standardize",
        infer=_infer_standardize,
        kernel=row_kernel(_standardize_of, over_axes),
        expr=_standardize_of,
        rows=over_axes,
        vjp=lambda g, y, x, **attrs: (standardize_grad(g, x, **attrs),),
        batch=batching.along("axis"),
        sharding=row_sharding.same_shape_rule(row_sharding.standardize),
        cost=per_element(7),
        autocast="high",
        samples=(
            sample(F, **_NORM),
            sample(F, **_RAW),
            sample(CUBE, axis=(0, 2), epsilon=0.1),
        ),
    )
)


# Standardised, scaled, shifted ------------------------------------------------------------------


def parameter_shape(shape: Shape, axes: Axes) -> Shape:
    """Return the shape with which parameters along some axes broadcast to `shape`."""
    return tuple(size if i in axes else 1 for i, size in enumerate(shape))


def require_parameters(x: TensorSpec, along: Axes, **parameters: TensorSpec) -> None:
    """Refuse scale, bias or statistics without x's dtype and its shape along some axes."""
    require_kind(x, "float")
    wanted = tuple(x.shape[a] for a in along)
    for what, given in parameters.items():
        if given.dtype != x.dtype:
            raise DTypeError(f"{what} is {given.dtype}, x is {x.dtype}; convert one with .astype")
        text = (
            f"{what} {show_shape(given.shape)} is not of the normalised shape {show_shape(wanted)}"
        )
        if given.rank != len(along):
            raise ShapeError(text)
        for a, b in zip(given.shape, wanted, strict=True):
            equate(a, b, text)


def _infer_affine_norm(
    x: TensorSpec, *parameters: TensorSpec, axis: Axes, along: Axes, **attrs: Any
) -> TensorSpec:
    require_parameters(x, along, **dict(zip(("scale", "bias"), parameters, strict=False)))
    return x


def _affine_norm_of(
    xp: Any, x: Any, scale: Any, *bias: Any, axis: Axes, along: Axes, epsilon: float,
    centred: bool = True,
) -> Any:  # fmt: skip
    scaled = _standardize_rows(xp, x, epsilon, centred)[0] * scale
    return scaled + bias[0] if bias else scaled


def _affine_rows(x: Shape, *parameters: Shape, axis: Axes, along: Axes, **attrs: Any) -> Rows:
    return Rows(axis, (x, *(parameter_shape(x, along) for _ in parameters)))


def _affine_norm_vjp(
    g: Tensor, y: Tensor, x: Tensor, scale: Tensor, *bias: Tensor, axis: Axes, along: Axes,
    epsilon: float, centred: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    attrs: dict[str, Any] = {"axis": axis, "epsilon": epsilon, "centred": centred}
    rest = tuple(i for i in range(x.ndim) if i not in along)
    scaled = g * FUNCTIONS["reshape"](scale, parameter_shape(x.shape, along))
    dx = standardize_grad(scaled, x, **attrs)
    dscale = sum(g * standardize(x, **attrs), rest)
    return (dx, dscale, sum(g, rest)) if bias else (dx, dscale)


_V4 = spec("float32", (4,))
_V3 = spec("float32", (3,))
_V32 = spec("float32", (3, 2))
# scale·standardize(x) + bias; the bias is optional.
_affine_norm = register(
    Op(
        "affine_norm",
        infer=_infer_affine_norm,
        kernel=row_kernel(_affine_norm_of, _affine_rows),
        expr=_affine_norm_of,
        rows=_affine_rows,
        vjp=_affine_norm_vjp,
        batch=batching.affine_norm,
        sharding=row_sharding.affine_norm_rule,
        cost=per_element(9),
        autocast="high",
        samples=(
            sample(F, _V4, _V4, along=(1,), **_NORM),
            sample(F, _V4, along=(1,), **_RAW),
            sample(CUBE, _V32, _V32, axis=(1, 2), along=(1, 2), epsilon=0.1),
            sample(CUBE, _V3, _V3, axis=(2,), along=(1,), epsilon=0.1),
        ),
    )
)


def require_epsilon(value: Any) -> float:
    """Return epsilon as a float; refuse anything but a number >= 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ArgumentError(f"epsilon must be a number that is not negative, got {value!r}")
    return float(value)


def _normalize(
    x: Tensor, scale: Any, bias: Any, axis: Axes, along: Axes, epsilon: Any, name: str | None,
    centred: bool = True,
) -> Tensor:  # fmt: skip
    """Standardise x, then apply the scale and bias that are given."""
    attrs: dict[str, Any] = {"axis": axis, "epsilon": require_epsilon(epsilon), "centred": centred}
    if scale is None and bias is None:
        plain: Tensor = standardize(x, **attrs, name=name)
        return plain
    shape = tuple(x.shape[a] for a in along)
    given = FUNCTIONS["full"](shape, 1, dtype=x.dtype) if scale is None else as_tensor(scale)
    parameters = (given,) if bias is None else (given, as_tensor(bias))
    result: Tensor = _affine_norm(x, *parameters, along=along, **attrs, name=name)
    return result


@function
def layer_norm(
    x: Any, scale: Any = None, bias: Any = None, axis: Any = -1, epsilon: float = 1e-5,
    name: str | None = None,
) -> Tensor:  # fmt: skip
    """Compute scale·(x - mean) / √(variance + epsilon) + bias, with moments over some axes.

    Args:
        x: floats.
        scale, bias: of the shape of x along the axes (in order), or None.
        axis: an axis or several.

    Raises:
        DTypeError: x is not float, or the dtypes differ.
        ShapeError: an axis is outside x, or scale or bias has another shape.
        ArgumentError: epsilon is no number >= 0, or an axis is given twice.

    Source: Ba, Kiros & Hinton, arXiv:1607.06450.
    """
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim)
    return _normalize(x, scale, bias, axes, axes, epsilon, name)


@function
def rms_norm(
    x: Any, scale: Any = None, axis: Any = -1, epsilon: float = 1e-5, name: str | None = None
) -> Tensor:
    """Compute scale·x / √(mean of squares + epsilon), with the mean over some axes.

    Args:
        x: floats.
        scale: of the shape of x along the axes (in order), or None.
        axis: an axis or several.

    Raises:
        DTypeError: x is not float, or the dtypes differ.
        ShapeError: an axis is outside x, or the scale has another shape.
        ArgumentError: epsilon is no number >= 0, or an axis is given twice.

    Source: Zhang & Sennrich, NeurIPS 2019.
    """
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim)
    return _normalize(x, scale, None, axes, axes, epsilon, name, centred=False)


# Over channels ----------------------------------------------------------------------------------


def channel_axis(x: Tensor, channels_last: Any) -> int:
    """Return the axis of the channels; refuse tensors without one."""
    if not isinstance(channels_last, bool):
        raise ArgumentError(f"channels_last must be True or False, got {channels_last!r}")
    if x.ndim < 2:
        raise ShapeError(
            f"x must have a batch and channels, (N, C, …) or (N, …, C), "
            f"got shape {show_shape(x.shape)}"
        )
    return x.ndim - 1 if channels_last else 1


@function
def instance_norm(
    x: Any, scale: Any = None, bias: Any = None, epsilon: float = 1e-5,
    channels_last: bool = False, name: str | None = None,
) -> Tensor:  # fmt: skip
    """Standardise each channel of each example over its positions, then scale and shift by channel.

    Args:
        x: floats (N, C, …), or (N, …, C) with `channels_last`.
        scale, bias: (C,), or None.

    Raises:
        DTypeError: x is not float, or the dtypes differ.
        ShapeError: x has no positions, or scale or bias has another shape.
        ArgumentError: epsilon is no number >= 0.

    Source: Ulyanov, Vedaldi & Lempitsky, arXiv:1607.08022.
    """
    x = as_tensor(x)
    channel = channel_axis(x, channels_last)
    if x.ndim < 3:
        raise ShapeError(
            f"x must have axes besides batch and channels, got shape {show_shape(x.shape)}"
        )
    places = tuple(i for i in range(1, x.ndim) if i != channel)
    return _normalize(x, scale, bias, places, (channel,), epsilon, name)


@function
def group_norm(
    x: Any, groups: int, scale: Any = None, bias: Any = None, epsilon: float = 1e-5,
    channels_last: bool = False, name: str | None = None,
) -> Tensor:  # fmt: skip
    """Standardise each group of channels of each example, then scale and shift by channel.

    Args:
        x: floats (N, C, …), or (N, …, C) with `channels_last`.
        groups: a divisor of C; neighbouring channels share a group.
        scale, bias: (C,), or None.

    Raises:
        DTypeError: x is not float, or the dtypes differ.
        ShapeError: groups do not divide C, or scale or bias has another shape.
        ArgumentError: groups is no positive int, or epsilon no number >= 0.

    Source: Wu & He, ECCV 2018.
    """
    x = as_tensor(x)
    channel = channel_axis(x, channels_last)
    channels = x.shape[channel]
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ArgumentError(f"groups must be an int above 0, got {groups!r}")
    if not isinstance(channels, int) or channels % groups:
        raise ShapeError(f"{groups} groups do not divide {channels} channels")
    parts = (groups, channels // groups)
    apart = FUNCTIONS["reshape"](x, (*x.shape[:channel], *parts, *x.shape[channel + 1 :]))
    for what, given in (("scale", scale), ("bias", bias)):
        if given is not None and as_tensor(given).shape != (channels,):
            raise ShapeError(f"{what} {show_shape(as_tensor(given).shape)} is not ({channels},)")
    scale, bias = (p if p is None else FUNCTIONS["reshape"](p, parts) for p in (scale, bias))
    axes = tuple(i for i in range(1, apart.ndim) if i != channel)
    y = _normalize(apart, scale, bias, axes, (channel, channel + 1), epsilon, name)
    result: Tensor = FUNCTIONS["reshape"](y, x.shape)
    return result
