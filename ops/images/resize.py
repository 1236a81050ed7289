"""Resizing along axes, one after the other: a linear op whose gradient is its transpose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.base.argument_kinds import is_number
from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import FUNCTIONS, Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import Shape, Size, TensorSpec, normalize_shape, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import normalize_axis, require_kind, require_list
from graphflow.ops.kernels.images.resample import (
    COORDINATES,
    MODES,
    ROUNDINGS,
    ResampleRule,
    is_outside,
    resample,
    slice_table,
    table_for,
)
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.windows import sharding_rules as window_sharding
from graphflow.ops.windows.window_arguments import spatial_axes

Ints = tuple[int, ...]
Parts = tuple[tuple[int, int, int, int], ...] | None
"""For each axis of a part of a resize: the sizes of the whole input and output, and the part's
start in each."""


def _infer(
    x: TensorSpec, axes: Ints, sizes: Shape, rules: Any, transpose: bool, parts: Any = None
) -> TensorSpec:
    if any(rule[0] != "nearest" for rule in rules) or transpose:
        require_kind(x, "float")
    shape = list(x.shape)
    for axis, size in zip(axes, sizes, strict=True):
        if shape[axis] == 0 and size != 0:
            raise ShapeError(f"axis {axis} of {show_shape(x.shape)} has no elements to resize")
        shape[axis] = size
    for axis, size, (n, m, low, first) in zip(axes, sizes, parts or (), strict=bool(parts)):
        if low + x.shape[axis] > n or first + size > m:
            raise ShapeError(
                f"{x.shape[axis]} of {n} elements from {low} on do not give {size} of {m} from "
                f"{first} on along axis {axis}"
            )
    return x.with_shape(shape)


def _resize_into(
    xp: Any, out: Any, x: Any, axes: Ints, sizes: Ints, rules: Any, transpose: bool,
    parts: Parts = None,
) -> None:  # fmt: skip
    of = parts or tuple((x.shape[a], m, 0, 0) for a, m in zip(axes, sizes, strict=True))
    # Shrinking axes first, so that later ones have less to do. Among equals inner axes first, since
    # there single elements move.
    order = sorted(
        zip(axes, sizes, rules, of, strict=True),
        key=lambda one: (one[3][1] / max(1, one[3][0]), -one[0]),
    )
    source = x
    for position, (axis, size, rule, (n, m, low, first)) in enumerate(order):
        rows = table_for(n, m, ResampleRule(*rule), transpose)
        if parts:
            rows = slice_table(rows, first, size, low, x.shape[axis])
        shape = (*source.shape[:axis], size, *source.shape[axis + 1 :])
        is_last = position == len(order) - 1
        target = out if is_last else scratch(xp, f"resized {position}", shape, x.dtype)
        resample(xp, target, source, axis, rows)
        source = target
    if not order:
        xp.copyto(out, x)


def _kernel(xp: Any, x: Any, **attrs: Any) -> Any:
    shape = list(x.shape)
    for axis, size in zip(attrs["axes"], attrs["sizes"], strict=True):
        shape[axis] = size
    out = xp.empty(tuple(shape), x.dtype)
    _resize_into(xp, out, x, **attrs)
    return out


def _cost(x: TensorSpec, axes: Ints, sizes: Shape, **attrs: Any) -> Cost:
    out = _infer(x, axes, sizes, **attrs)
    return Cost(flops=(x.size + out.size) * 4 * len(axes))


def _vjp(
    g: Tensor, y: Tensor, x: Tensor, axes: Ints, sizes: Shape, rules: Any, transpose: bool,
    **attrs: Any,
) -> tuple[Tensor]:  # fmt: skip
    if attrs.get("parts"):
        attrs["parts"] = tuple((m, n, first, low) for n, m, low, first in attrs["parts"])
    found: Tensor = resize_op(
        g, axes=axes, sizes=tuple(x.shape[a] for a in axes), rules=rules,
        transpose=not transpose, **attrs,
    )  # fmt: skip
    return (found,)


_IMAGE, _GROWN = spec("float32", (2, 3, 4)), spec("float32", (2, 5, 3))
_LINEAR, _CUBIC = ResampleRule("linear"), ResampleRule("cubic", "align_corners")
_CALLS = tuple(
    tuple(map(tuple, rules))
    for rules in (
        (_LINEAR, ResampleRule("cubic", exclude_outside=True)),
        (_CUBIC, ResampleRule("nearest", "asymmetric", rounding="floor")),
        (ResampleRule("area"), ResampleRule("linear", antialias=True)),
        (
            ResampleRule("linear", "tf_crop_and_resize", begin=-0.2, end=0.7),
            ResampleRule("cubic", antialias=True),
        ),
    )
)  # attributes are plain tuples, as they come over a wire
resize_op: Op = register(
    Op(
        "resize",
        infer=_infer,
        kernel=_kernel,
        into=_resize_into,
        records=True,
        vjp=_vjp,
        batch=batching.along("axes"),
        sharding=window_sharding.resize,
        cost=_cost,
        samples=(
            *(sample(_IMAGE, axes=(1, 2), sizes=(5, 3), rules=r, transpose=False) for r in _CALLS),
            *(sample(_GROWN, axes=(1, 2), sizes=(3, 4), rules=r, transpose=True) for r in _CALLS),
            sample(
                spec("float32", (2, 3, 4)),
                axes=(1, 2),
                sizes=(4, 5),
                rules=_CALLS[0],
                parts=((5, 9, 1, 2), (4, 5, 0, 0)),
                transpose=False,
            ),
            sample(
                spec("uint8", (2, 3)),
                axes=(1,),
                sizes=(7,),
                rules=(tuple(ResampleRule("nearest")),),
                transpose=False,
            ),
        ),
    )
)


# Functions --------------------------------------------------------------------------------------


@function
def resize(
    x: Any,
    size: Any = None,
    scale: Any = None,
    mode: str = "nearest",
    coordinates: str = "half_pixel",
    axes: Any = None,
    rounding: str = "round_prefer_floor",
    cubic_a: float = -0.75,
    exclude_outside: bool = False,
    antialias: bool = False,
    roi: Any = None,
    extrapolation_value: float = 0.0,
    channels_last: bool = False,
    name: str | None = None,
) -> Tensor:
    """Resize x along some axes, interpolating along one axis after the other.

    Args:
        x: a tensor; of any dtype for "nearest", else float.
        size, scale: new sizes, or factors (the new size is then n·factor, rounded down), one for
            all axes or one for each. If both are given, scale only sets the coordinates.
        mode: "nearest", "linear", "cubic", or "area" (means over what each output covers).
        coordinates: positions of outputs on the input, as ONNX's Resize names them: "half_pixel",
            "align_corners", "asymmetric", "pytorch_half_pixel", "half_pixel_symmetric",
            "tf_crop_and_resize".
        axes: the axes to resize; default: all but batch and channels.
        rounding: for "nearest": "round_prefer_floor", "round_prefer_ceil", "floor", "ceil".
        cubic_a: the parameter of the cubic filter.
        exclude_outside: leave out inputs beyond the axis and rescale the other weights to a sum of
            1; else the element at the edge is repeated.
        antialias: widen the filter where an axis shrinks.
        roi: for "tf_crop_and_resize": (begin, end) of each axis, from 0 to 1.
        extrapolation_value: what "tf_crop_and_resize" gives beyond the input.

    Raises:
        ShapeError: an axis has no elements to resize.
        DTypeError: x is not float, and the mode is not "nearest".
        ArgumentError: an unknown mode or rule, or arguments of another form.

    Source: ONNX operator Resize, opset 19.
    """
    x = as_tensor(x)
    _require_options(mode, coordinates, rounding)
    chosen = _resize_axes(x, axes, channels_last)
    sizes, factors = _new_sizes(x, chosen, size, scale)
    crops = _crop_ranges(roi, len(chosen)) if coordinates == "tf_crop_and_resize" else None
    flags = bool(exclude_outside), bool(antialias)
    rule = ResampleRule(mode, coordinates, None, rounding, float(cubic_a), *flags)
    rules = tuple(
        rule._replace(scale=factor, begin=begin, end=end)
        for factor, (begin, end) in zip(factors, crops or [(0.0, 1.0)] * len(chosen), strict=True)
    )
    kept = [
        i
        for i, axis in enumerate(chosen)
        if sizes[i] != x.shape[axis] or factors[i] not in (None, 1.0) or crops
    ]
    if not kept:
        return x  # type: ignore[no-any-return]
    y: Tensor = resize_op(
        x,
        axes=tuple(chosen[i] for i in kept),
        sizes=tuple(sizes[i] for i in kept),
        rules=tuple(tuple(rules[i]) for i in kept),
        transpose=False,
        name=name,
    )
    return _fill_outside(x, y, chosen, sizes, rules, extrapolation_value) if crops else y


def _require_options(mode: str, coordinates: str, rounding: str) -> None:
    for what, word, known in (
        ("mode", mode, MODES),
        ("coordinates", coordinates, COORDINATES),
        ("rounding", rounding, ROUNDINGS),
    ):
        if word not in known:
            raise ArgumentError(f"{what} {word!r} is none of {', '.join(known)}")


def _resize_axes(x: Tensor, axes: Any, channels_last: bool) -> Ints:
    if axes is not None:
        chosen = tuple(normalize_axis(a, x.ndim) for a in require_list("axes", axes))
        if len(set(chosen)) != len(chosen):
            raise ArgumentError(f"axes {axes} name an axis twice")
        return chosen
    if x.ndim < 3:
        raise ShapeError(
            f"expected x of (batch, channels, *space), got {show_shape(x.shape)}; name the axes"
        )
    return spatial_axes(x.ndim, channels_last)


def _new_sizes(x: Tensor, axes: Ints, size: Any, scale: Any) -> tuple[Shape, list[float | None]]:
    """Return the new size of each axis, and its factor where one was given."""
    if size is None and scale is None:
        raise ArgumentError("neither size nor scale is given; give one of them")
    factors: list[float | None] = [None] * len(axes)
    if scale is not None:
        given = list(scale) if isinstance(scale, tuple | list) else [scale] * len(axes)
        if len(given) != len(axes) or not all(_is_factor(f) for f in given):
            raise ArgumentError(
                f"scale must be a positive number or {len(axes)} of them, got {scale!r}"
            )
        factors = [float(f) for f in given]
    if size is None:
        found = (
            _scale_size(x.shape[a], f) for a, f in zip(axes, factors, strict=True) if f is not None
        )
        return tuple(found), factors
    whole = size if isinstance(size, tuple | list) else [size] * len(axes)
    sizes = normalize_shape(whole, "size")
    if len(sizes) != len(axes):
        raise ArgumentError(f"size {size!r} has {len(sizes)} entries for {len(axes)} axes")
    return sizes, factors


def _is_factor(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf


def _scale_size(n: Size, factor: float) -> Size:
    if isinstance(n, int):
        return int(n * factor)
    if factor != int(factor):
        raise ShapeError(f"an axis of unknown size {n} needs a factor that is an int, got {factor}")
    return n * int(factor)


def _crop_ranges(roi: Any, count: int) -> list[tuple[float, float]]:
    pairs = require_list("roi", roi) if not isinstance(roi, np.ndarray) else list(roi)
    if len(pairs) != count or any(len(p) != 2 for p in pairs):
        raise ArgumentError(
            f"roi must be a pair (begin, end) for each of {count} axes, got {roi!r}"
        )
    return [(float(begin), float(end)) for begin, end in pairs]


def _fill_outside(
    x: Tensor, y: Tensor, axes: Ints, sizes: Shape, rules: Any, value: float
) -> Tensor:
    """Write `value` to the elements of y that lie outside of x, which are 0."""
    beyond: Any = np.zeros((1,) * x.ndim, bool)
    for axis, size, rule in zip(axes, sizes, rules, strict=True):
        n = x.shape[axis]
        if not isinstance(n, int) or not isinstance(size, int):
            raise ShapeError(f"cropping needs to know the size of axis {axis}, {n}")
        shape = [1] * x.ndim
        shape[axis] = size
        beyond = beyond | is_outside(n, size, rule).reshape(shape)
    if not value or not beyond.any():
        return y
    result: Tensor = FUNCTIONS["where"](as_tensor(beyond), as_tensor(float(value), y.dtype), y)
    return result


_TORCH_MODES = {
    "nearest": ("nearest", "asymmetric", "floor"),
    "nearest-exact": ("nearest", "half_pixel", "round_prefer_ceil"),
    "linear": ("linear", "half_pixel", "floor"),
    "bilinear": ("linear", "half_pixel", "floor"),
    "trilinear": ("linear", "half_pixel", "floor"),
    "cubic": ("cubic", "half_pixel", "floor"),
    "bicubic": ("cubic", "half_pixel", "floor"),
    "area": ("area", "half_pixel", "floor"),
}


@function
def interpolate(
    x: Any,
    size: Any = None,
    scale: Any = None,
    mode: str = "nearest",
    align_corners: bool = False,
    antialias: bool = False,
    channels_last: bool = False,
    name: str | None = None,
) -> Tensor:
    """Resize the spatial axes of x by PyTorch's rules.

    Args:
        x: (batch, channels, *space), or (batch, *space, channels) with `channels_last`.
        size, scale: new sizes or factors, one for all spatial axes or one for each.
        mode: "nearest", "nearest-exact", "linear" ("bilinear", "trilinear"), "cubic" ("bicubic"),
            "area".
        align_corners: first and last elements keep their places ("linear" and "cubic" only).
        antialias: widen the filter where an axis shrinks.

    Raises:
        ShapeError, DTypeError, ArgumentError: as `resize`.
    """
    if mode not in _TORCH_MODES:
        raise ArgumentError(f"mode {mode!r} is none of {', '.join(_TORCH_MODES)}")
    filter_name, coordinates, rounding = _TORCH_MODES[mode]
    if align_corners and size is None:
        x = as_tensor(x)
        size, scale = _new_sizes(x, _resize_axes(x, None, channels_last), None, scale)[0], None
    if align_corners and filter_name not in ("linear", "cubic"):
        raise ArgumentError(f"align_corners needs a linear or cubic mode, got {mode!r}")
    result: Tensor = resize(
        x,
        size,
        scale,
        mode=filter_name,
        coordinates="align_corners" if align_corners else coordinates,
        rounding=rounding,
        cubic_a=-0.5 if antialias else -0.75,
        exclude_outside=antialias,
        antialias=antialias,
        channels_last=channels_last,
        name=name,
    )
    return result
