"""Image operators: resizing, sampling, deformable convolution, unpooling and cropping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.ir.op import Tensor
from graphflow.ir.spec import Size, kind, product
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.onnx.operators.networks.convolution import steps_of
from graphflow.onnx.operators.quantize import saturate
from graphflow.ops.images import deformable_conv as deform
from graphflow.ops.images import grid_sample as grid
from graphflow.ops.images import resize, roi
from graphflow.ops.images.adaptive_pooling import max_unpool
from graphflow.ops.pointwise import arithmetic
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.tensors import slicing as window
from graphflow.ops.tensors.padding import pad
from graphflow.ops.windows import unfold

# Resizing -------------------------------------------------------------------------------------


def _resize_and_round(call: NodeCall, x: Tensor, **how: Any) -> Tensor:
    """Resize x; interpolated ints are computed as floats, rounded, and clipped to their range."""
    if how["mode"] == "nearest" or kind(x.dtype) == "float":
        result: Tensor = resize.resize(x, **how)
        return result
    wide = "float64" if x.dtype.itemsize > 2 else "float32"
    return saturate(resize.resize(astype(x, wide), **how), None, x.dtype)


def _list(call: NodeCall, i: int) -> list[Any] | None:
    """Return an optional input of numbers as a list; an empty one counts as left out."""
    if not call.has(i) or 0 in call.spec(i).shape:
        return None
    return [item.item() for item in call.known_array(i).reshape(-1)]


def _keep_aspect(
    call: NodeCall, policy: str, shape: Sequence[Size], sizes: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Return sizes and factors with one factor for all axes, as the aspect ratio policy asks."""
    if policy not in ("not_larger", "not_smaller"):
        raise call.unsupported_error(f"keep_aspect_ratio_policy {policy!r}")
    have = [call.static_size(n) for n in shape]
    factors = [call.static_size(size) / n for size, n in zip(sizes, have, strict=True)]
    factor = min(factors) if policy == "not_larger" else max(factors)
    return [int(factor * n + 0.5) for n in have], [factor] * len(have)


@operator("Resize", since=11)
def _resize(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    scales = _list(call, 2)
    given = call.has(3) and 0 not in call.spec(3).shape
    sizes: list[Any] | None = call.sizes(3) if given else None  # they may be symbolic
    if (scales is None) == (sizes is None):
        raise call.unsupported_error("exactly one of scales and sizes is given")
    axes = [axis % x.ndim for axis in call.attr("axes", range(x.ndim))]
    coordinates = call.attr("coordinate_transformation_mode", "half_pixel")
    if coordinates == "tf_half_pixel_for_nn":
        raise call.unsupported_error(
            "coordinates by tf_half_pixel_for_nn; half_pixel is later's name"
        )
    policy = call.attr("keep_aspect_ratio_policy", "stretch")
    if sizes is not None and policy != "stretch":
        sizes, scales = _keep_aspect(call, policy, [x.shape[a] for a in axes], sizes)
    region = None
    if coordinates == "tf_crop_and_resize":
        bounds = _list(call, 1) or [0.0] * len(axes) + [1.0] * len(axes)
        region = list(zip(bounds[: len(axes)], bounds[len(axes) :], strict=True))
    return _resize_and_round(
        call,
        x,
        size=sizes,
        scale=scales,
        mode=call.attr("mode", "nearest"),
        coordinates=coordinates,
        axes=axes,
        rounding=call.attr("nearest_mode", "round_prefer_floor"),
        cubic_a=call.attr("cubic_coeff_a", -0.75),
        exclude_outside=bool(call.attr("exclude_outside", 0)),
        antialias=bool(call.attr("antialias", 0)),
        roi=region,
        extrapolation_value=call.attr("extrapolation_value", 0.0),
    )


def _resize_by_factors(call: NodeCall, factors: Sequence[float]) -> Outputs:
    """Resize as opset 10 and Upsample do: asymmetric coordinates, without later options."""
    x = call.tensor(0)
    if len(factors) != x.ndim:
        raise call.unsupported_error(f"{len(factors)} scales for {x.ndim} axes")
    mode = call.attr("mode", "nearest")
    return _resize_and_round(
        call,
        x,
        scale=list(factors),
        mode="linear" if mode in ("bilinear", "linear") else mode,
        coordinates="asymmetric",
        axes=list(range(x.ndim)),
        rounding="floor",
    )


@operator("Resize", since=10)
def _resize_10(call: NodeCall) -> Outputs:
    return _resize_by_factors(call, call.known_array(1).astype(float).reshape(-1).tolist())


@operator("Upsample", since=9)
def _upsample(call: NodeCall) -> Outputs:
    return _resize_by_factors(call, call.known_array(1).astype(float).reshape(-1).tolist())


@operator("Upsample", since=7)
def _upsample_7(call: NodeCall) -> Outputs:
    return _resize_by_factors(call, call.required_attr("scales"))


@operator("Upsample")
def _upsample_1(call: NodeCall) -> Outputs:
    return _resize_by_factors(
        call, [1.0, 1.0, call.required_attr("height_scale"), call.required_attr("width_scale")]
    )


# Sampling -------------------------------------------------------------------------------------

_MODES = {"bilinear": "linear", "bicubic": "cubic"}  # names before opset 20


@operator("GridSample")
def _grid_sample(call: NodeCall) -> Outputs:
    mode = call.attr("mode", "linear")
    return grid.grid_sample(
        call.tensor(0),
        astype(call.tensor(1), call.spec(0).dtype),
        mode=_MODES.get(mode, mode),
        padding=call.attr("padding_mode", "zeros"),
        align_corners=bool(call.attr("align_corners", 0)),
    )


@operator("AffineGrid")
def _affine_grid(call: NodeCall) -> Outputs:
    return grid.affine_grid(
        call.tensor(0), tuple(call.sizes(1)), align_corners=bool(call.attr("align_corners", 0))
    )


def _align_regions(call: NodeCall, coordinates: str) -> Tensor:
    result: Tensor = roi.roi_align(
        call.tensor(0),
        astype(call.tensor(1), call.spec(0).dtype),
        call.tensor(2),
        size=(call.attr("output_height", 1), call.attr("output_width", 1)),
        scale=call.attr("spatial_scale", 1.0),
        samples=call.attr("sampling_ratio", 0),
        mode=call.attr("mode", "avg"),
        half_pixel=coordinates == "half_pixel",
    )
    return result


@operator("RoiAlign", since=16)
def _roi_align(call: NodeCall) -> Outputs:
    return _align_regions(call, call.attr("coordinate_transformation_mode", "half_pixel"))


@operator("RoiAlign")
def _roi_align_10(call: NodeCall) -> Outputs:
    return _align_regions(call, "output_half_pixel")


@operator("DeformConv")
def _deform_conv(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    rank = x.ndim - 2
    pads = call.attr("pads", [0] * (2 * rank))
    return deform.deform_conv(
        x,
        call.tensor(1),
        call.tensor(2),
        call.optional(3),
        call.optional(4),
        padding=[(pads[i], pads[rank + i]) for i in range(rank)],
        groups=call.attr("group", 1),
        offset_groups=call.attr("offset_group", 1),
        **steps_of(call, rank),
    )


# Unpooling, folding, cropping -----------------------------------------------------------------


@operator("MaxUnpool")
def _max_unpool(call: NodeCall) -> Outputs:
    """Translate MaxUnpool: ONNX's indices count through the whole tensor, ours in each map."""
    x, places = call.tensor(0), call.tensor(1)
    kernel = call.required_attr("kernel_shape")
    rank = len(kernel)
    strides = call.attr("strides", [1] * rank)
    pads = call.attr("pads", [0] * (2 * rank))
    sizes = [
        (call.static_size(n) - 1) * strides[i] - pads[i] - pads[rank + i] + kernel[i]
        for i, n in enumerate(x.shape[2:])
    ]
    y: Tensor = max_unpool(
        x, arithmetic.remainder(places, product(sizes)), kernel, strides, output_size=sizes
    )
    if not call.has(2):
        return y
    wanted = [int(n) for n in call.known_array(2).reshape(-1)]
    spread = [(0, want - have) for want, have in zip(wanted[2:], sizes, strict=True)]
    if min((after for _, after in spread), default=0) < 0:
        raise call.unsupported_error(
            f"output_shape {wanted} is smaller than {sizes}, which it came from"
        )
    return pad(y, [(0, 0), (0, 0), *spread])


@operator("Col2Im")
def _col_to_image(call: NodeCall) -> Outputs:
    image, block = ([call.static_size(n) for n in call.sizes(i)] for i in (1, 2))
    rank = len(image)
    pads = call.attr("pads", [0] * (2 * rank))
    return unfold.fold(
        call.tensor(0),
        image,
        block,
        padding=[(pads[i], pads[rank + i]) for i in range(rank)],
        **steps_of(call, rank),
    )


@operator("CenterCropPad")
def _center_crop_pad(call: NodeCall) -> Outputs:
    """Translate CenterCropPad; odd elements are cropped or added at the end."""
    x, wanted = call.tensor(0), call.sizes(1)
    axes = [axis % x.ndim for axis in call.attr("axes", range(x.ndim))]
    for axis, size in zip(axes, wanted, strict=True):
        if size == x.shape[axis]:
            continue
        have, want = call.static_size(x.shape[axis]), call.static_size(size)
        if have > want:
            x = window.window(x, axis, (have - want) // 2, want)
        else:
            before = (want - have) // 2
            edges = (before, want - have - before)
            x = pad(x, [edges if i == axis else (0, 0) for i in range(x.ndim)])
    return x
