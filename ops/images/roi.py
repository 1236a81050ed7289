"""Regions of interest: boxes cut into bins, each the mean or the largest of samples of an image.

Boxes have no gradient. The number of samples may depend on the boxes, so these kernels run on the
CPU only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, promote_inputs, register, sample
from graphflow.ir.spec import Shape, TensorSpec, equate, show_shape, spec
from graphflow.ops.base.shape_rules import kernel_from_into, require_kind
from graphflow.ops.kernels.images.roi_sampling import (
    BinGrid,
    mean_samples,
    pick_largest,
    picked_samples,
    spread_means,
)
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.windows.window_arguments import per_axis

Ints = tuple[int, ...]


def _require_regions(x: TensorSpec, boxes: TensorSpec, batch: TensorSpec) -> None:
    require_kind(x, "float")
    require_kind(boxes, "float")
    require_kind(batch, "int")
    shapes = f"x {show_shape(x.shape)}, boxes {show_shape(boxes.shape)}"
    if x.rank != 4 or boxes.rank != 2 or batch.rank != 1:
        raise ShapeError(
            "expected x of (batch, channels, height, width), boxes of (regions, 4) and batch of "
            f"(regions,), got {shapes}, batch {show_shape(batch.shape)}"
        )
    equate(boxes.shape[1], 4, f"{shapes}: numbers of a box")
    equate(boxes.shape[0], batch.shape[0], f"{shapes}: boxes and their images")


def _infer(x: TensorSpec, boxes: TensorSpec, batch: TensorSpec, size: Ints, **a: Any) -> TensorSpec:
    _require_regions(x, boxes, batch)
    return x.with_shape((boxes.shape[0], x.shape[1], *size))


def _infer_places(x: TensorSpec, boxes: TensorSpec, batch: TensorSpec, **a: Any) -> TensorSpec:
    return _infer(x, boxes, batch, **a).with_dtype("int32")


def _infer_spread(
    g: TensorSpec, boxes: TensorSpec, batch: TensorSpec, *picks: TensorSpec, **a: Any
) -> TensorSpec:
    images, height, width = a["space"]
    _require_regions(g, boxes, batch)
    return g.with_shape((images, g.shape[1], height, width))


def _regions(size: Ints, scale: float, samples: int, half_pixel: bool, **rest: Any) -> BinGrid:
    return BinGrid((size[0], size[1]), scale, samples, half_pixel)


def _image_indices(batch: Any, count: int) -> Any:
    """Return the image of each region as int64; refuse numbers that are no image."""
    if batch.size and not 0 <= int(batch.min()) <= int(batch.max()) < count:
        wrong = int(batch.min()) if int(batch.min()) < 0 else int(batch.max())
        raise IndexError(f"image {wrong} of a region is outside [0, {count})")
    return batch.astype(np.int64)


def _flatten_bins(out: Any) -> Any:
    return out.reshape(*out.shape[:2], out.shape[2] * out.shape[3])


def _mean_into(xp: Any, out: Any, x: Any, boxes: Any, batch: Any, **a: Any) -> None:
    mean_samples(_flatten_bins(out), x, boxes, _image_indices(batch, x.shape[0]), _regions(**a))


def _spread_into(xp: Any, out: Any, g: Any, boxes: Any, batch: Any, **a: Any) -> None:
    spread_means(out, _flatten_bins(g), boxes, _image_indices(batch, out.shape[0]), _regions(**a))


def _places_into(xp: Any, out: Any, x: Any, boxes: Any, batch: Any, **a: Any) -> None:
    pick_largest(_flatten_bins(out), x, boxes, _image_indices(batch, x.shape[0]), _regions(**a))


def _pick_into(xp: Any, out: Any, x: Any, boxes: Any, batch: Any, picks: Any, **a: Any) -> None:
    rows, channels = _image_indices(batch, x.shape[0]), np.arange(x.shape[1])[:, None]
    images, flat = _flatten_bins(x), _flatten_bins(out)
    for r, image in enumerate(rows):
        places, weights = picked_samples(
            boxes[r], _flatten_bins(picks)[r], x.shape[2:], _regions(**a)
        )
        np.multiply(images[image][channels, places], weights.astype(x.dtype), out=flat[r])


def _put_into(xp: Any, out: Any, g: Any, boxes: Any, batch: Any, picks: Any, **a: Any) -> None:
    rows = _image_indices(batch, out.shape[0])
    out[...] = 0
    flat, size = out.reshape(-1), out.shape[2] * out.shape[3]
    for r, image in enumerate(rows):
        places, weights = picked_samples(
            boxes[r], _flatten_bins(picks)[r], out.shape[2:], _regions(**a)
        )
        starts = (int(image) * out.shape[1] + np.arange(out.shape[1])) * size
        updates = _flatten_bins(g)[r] * weights.astype(g.dtype)
        np.add.at(flat, (starts[:, None] + places).reshape(-1), updates.reshape(-1))


def _cost(x: TensorSpec, boxes: TensorSpec, *others: TensorSpec, **a: Any) -> Cost:
    samples = (a["samples"] or 2) ** 2
    return Cost(flops=boxes.shape[0] * x.shape[1] * a["size"][0] * a["size"][1] * samples * 8)


def _image_space(x: Tensor) -> Shape:
    return (x.shape[0], *x.shape[2:])


_X, _BOXES, _BATCH = spec("float32", (2, 2, 4, 3)), spec("float32", (3, 4)), spec("int64", (3,))
_G, _PICKS = spec("float32", (3, 2, 2, 2)), spec("int32", (3, 2, 2, 2))
_FIXED: dict[str, Any] = {"size": (2, 2), "scale": 1.5, "samples": 2, "half_pixel": True}
_ADAPTIVE: dict[str, Any] = {"size": (2, 2), "scale": 2.0, "samples": 0, "half_pixel": False}


def _roi_op(name: str, infer: Any, into: Any, vjp: Any, inputs: Any, **more: Any) -> Op:
    """Register an op that is cut along channels and boxes; sums added to images are partial."""
    rest = ["r.", "r", *["rc.."] * (len(inputs) - 3)]
    puts = "space" in more
    ends = ("rc..", ".c..") if puts else (".c..", "rc..")
    text = sharding.equation([ends[0], *rest], [ends[1]])
    return register(
        Op(
            name,
            infer=infer,
            kernel=kernel_from_into(infer, into),
            into=into,
            vjp=vjp,
            sharding=sharding.equation_rule(text),
            cost=_cost,
            samples=tuple(
                sample(*inputs, **attrs, **more, classes=2, fixed=(1,))
                for attrs in (_FIXED, _ADAPTIVE)
            ),
            device_kinds=("cpu",),
        )
    )


roi_mean: Op = _roi_op(
    "roi_mean",
    _infer,
    _mean_into,
    lambda g, y, x, boxes, batch, **a: (
        roi_mean_grad(g, boxes, batch, space=_image_space(x), **a),
        None,
        None,
    ),
    (_X, _BOXES, _BATCH),
)
roi_mean_grad: Op = _roi_op(
    "roi_mean_grad",
    _infer_spread,
    _spread_into,
    lambda h, y, g, boxes, batch, space, **a: (roi_mean(h, boxes, batch, **a), None, None),
    (_G, _BOXES, _BATCH),
    space=(2, 4, 3),
)
# The number of the largest among the weighted elements of each bin.
roi_max_places: Op = _roi_op(
    "roi_max_places", _infer_places, _places_into, None, (_X, _BOXES, _BATCH)
)
# The weighted elements at these numbers, and the transpose of selecting them.
roi_pick: Op = _roi_op(
    "roi_pick",
    lambda x, boxes, batch, picks, **a: _infer(x, boxes, batch, **a),
    _pick_into,
    lambda g, y, x, boxes, batch, picks, **a: (
        roi_put(g, boxes, batch, picks, space=_image_space(x), **a),
        None,
        None,
        None,
    ),
    (_X, _BOXES, _BATCH, _PICKS),
)
roi_put: Op = _roi_op(
    "roi_put",
    _infer_spread,
    _put_into,
    lambda h, y, g, boxes, batch, picks, space, **a: (
        roi_pick(h, boxes, batch, picks, **a),
        None,
        None,
        None,
    ),
    (_G, _BOXES, _BATCH, _PICKS),
    space=(2, 4, 3),
)


@function
def roi_align(
    x: Any,
    boxes: Any,
    batch: Any,
    size: Any,
    scale: float = 1.0,
    samples: int = 0,
    mode: str = "avg",
    half_pixel: bool = True,
) -> Tensor:
    """Cut regions of images into bins, and sample each bin between the elements.

    Args:
        x: floats (batch, channels, height, width).
        boxes: (regions, 4): left, top, right, bottom. They have no gradient.
        batch: (regions,) ints: the image of each region. One outside is an OpError in the step.
        size: bins of a region, an int or (down, across).
        scale: elements of x for one unit of the boxes.
        samples: samples along each side of a bin. 0: the side's length, rounded up; a box that is
            not finite is then an OpError in the step.
        mode: "avg", the mean of the samples, or "max", the largest of the elements around the
            samples times their bilinear weights (as ONNX has it).
        half_pixel: True: coordinate 0 is the edge of the first element; False: its centre.

    Returns:
        (regions, channels, *size).

    Raises:
        ShapeError, DTypeError, ArgumentError: the arguments do not fit each other.

    Source: He, Gkioxari, Dollár & Girshick, Mask R-CNN, ICCV 2017.
    """
    x, boxes = promote_inputs("roi_align", (x, boxes))
    if mode not in ("avg", "max"):
        raise ArgumentError(f"mode must be 'avg' or 'max', got {mode!r}")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0:
        raise ArgumentError(f"scale must be a positive number, got {scale!r}")
    attrs: dict[str, Any] = {
        "size": per_axis("size", size, 2),
        "scale": float(scale),
        "samples": per_axis("samples", samples, 1, least=0)[0],
        "half_pixel": bool(half_pixel),
    }
    images = as_tensor(batch)
    if mode == "avg":
        result: Tensor = roi_mean(x, boxes, images, **attrs)
    else:
        result = roi_pick(x, boxes, images, roi_max_places(x, boxes, images, **attrs), **attrs)
    return result
