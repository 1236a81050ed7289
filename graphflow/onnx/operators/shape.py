"""Constants, shapes, concatenation and splitting, slicing and padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.ir.op import Tensor
from graphflow.ir.spec import Size, floordiv, product
from graphflow.onnx.loading.reading.reader import tensor_to_array
from graphflow.onnx.loading.reading.value_kinds import Fixed, Known, is_native, make_known
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.ops.matrices.triangles import tril, triu
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.tensors import creation, repetition, shape
from graphflow.ops.tensors import slicing as window
from graphflow.ops.tensors.getitem import getitem
from graphflow.ops.tensors.padding import pad

SMALL = 1024
"""Elements of the largest value that is made while a model is read; larger ones are nodes."""

MOST_ON_HOST = 1 << 24
"""Elements of the largest value of a dtype that tensors lack."""


def axis_of(call: NodeCall, default: int, rank: int) -> int:
    """Return the attribute `axis`, counted from the front."""
    axis = int(call.attr("axis", default))
    if not -rank <= axis < max(rank, 1):
        raise call.unsupported_error(f"axis {axis} is outside of a tensor of rank {rank}")
    return axis % max(rank, 1)


def axes_of(call: NodeCall, since: int) -> list[int] | None:
    """Return the axes: an attribute before opset `since`, input 1 from then on."""
    if call.version < since:
        axes = call.attr("axes")
        return None if axes is None else list(axes)
    return [int(a) for a in call.known_array(1).reshape(-1)] if call.has(1) else None


# Known values ---------------------------------------------------------------------------------


@operator("Constant")
def _constant(call: NodeCall) -> Outputs:
    for name, dtype in (("value_float", "float32"), ("value_floats", "float32"),
                        ("value_int", "int64"), ("value_ints", "int64")):  # fmt: skip
        value = call.attr(name)
        if value is not None:
            return make_known(np.array(value, dtype))
    for name in ("value_string", "value_strings"):
        text = call.attr(name)
        if text is not None:
            return Fixed(np.array(text, object))
    if call.attr("sparse_value") is not None:
        raise call.unsupported_error("a sparse constant; store it dense")
    tensor = call.required_attr("value")
    array = tensor_to_array(tensor, call.label)
    return make_known(array) if is_native(array.dtype) else Fixed(array)


@operator("ConstantOfShape")
def _constant_of_shape(call: NodeCall) -> Outputs:
    tensor = call.attr("value")
    value = np.zeros(1, np.float32) if tensor is None else tensor_to_array(tensor, call.label)
    if not is_native(value.dtype):
        wanted = tuple(int(s) for s in call.known_array(0))
        if math.prod(wanted) > MOST_ON_HOST:
            raise call.unsupported_error(f"{math.prod(wanted)} elements of {value.dtype} at once")
        return Fixed(np.full(wanted, value.reshape(-1)[0]))
    sizes = call.sizes(0)
    count = product(sizes)
    if isinstance(count, int) and count <= SMALL:
        return make_known(np.full(tuple(sizes), value.reshape(-1)[0], value.dtype))
    return creation.full(tuple(sizes), value.reshape(-1)[0].item(), dtype=value.dtype)


@operator("Shape")
def _shape(call: NodeCall) -> Outputs:
    sizes = call.spec(0).shape
    start, end = call.attr("start", 0), call.attr("end", len(sizes))
    chosen = list(sizes)[slice(max(start, -len(sizes)), end)]
    return make_known(np.array(chosen, object).reshape(len(chosen))) if chosen else _empty_shape()


def _empty_shape() -> Known:
    return make_known(np.zeros(0, np.int64))


@operator("Size")
def _size(call: NodeCall) -> Outputs:
    return make_known(np.array(product(call.spec(0).shape), object))


@operator("Range")
def _range(call: NodeCall) -> Outputs:
    dtype = call.spec(0).dtype
    if dtype.kind in "iu" or any(call.is_symbolic(i) for i in range(3)):
        first, last = (call.sizes(i)[0] for i in range(2))
        return astype(creation.arange(first, last, int(call.known_array(2).reshape(-1)[0])), dtype)
    start, stop, step = (call.known_array(i).reshape(()) for i in range(3))
    count = max(0, math.ceil((stop - start) / step))
    if count <= SMALL:
        return make_known((start + np.arange(count) * step).astype(dtype))
    return astype(creation.arange(count), dtype) * step.item() + start.item()


@operator("EyeLike")
def _eye_like(call: NodeCall) -> Outputs:
    rows, columns = call.spec(0).shape
    code = call.attr("dtype")
    dtype = call.spec(0).dtype if code is None else call.dtype_of(code)
    return creation.eye(rows, columns, k=call.attr("k", 0), dtype=dtype)


# The same elements ----------------------------------------------------------------------------


@operator("Reshape", since=5)
def _reshape(call: NodeCall) -> Outputs:
    return _reshape_to(call, call.tensor(0), call.sizes(1))


@operator("Reshape")
def _reshape_1(call: NodeCall) -> Outputs:
    return _reshape_to(call, call.tensor(0), call.attr("shape", []))


def _reshape_to(call: NodeCall, x: Tensor, sizes: Sequence[Size]) -> Tensor:
    """Reshape x; a size of 0 copies that of x, unless `allowzero` is set."""
    keep = not call.attr("allowzero", 0)
    if keep and any(s == 0 and i >= x.ndim for i, s in enumerate(sizes)):
        raise call.unsupported_error(f"shape {sizes} copies a size that {x.shape} does not have")
    wanted = [x.shape[i] if s == 0 and keep else s for i, s in enumerate(sizes)]
    if x.size == 0 and -1 in wanted:
        rest = [s for s in wanted if s != -1]
        wanted = [0 if s == -1 and 0 not in rest else s for s in wanted]
    return shape.reshape(x, tuple(wanted))


@operator("Flatten")
def _flatten(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    axis = call.attr("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return shape.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:])))


@operator("Squeeze")
def _squeeze(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    axes = axes_of(call, 13)
    if axes is None:
        axes = [i for i, s in enumerate(x.shape) if call.static_size(s) == 1]
    return shape.squeeze(x, tuple(axes)) if axes else x


@operator("Unsqueeze")
def _unsqueeze(call: NodeCall) -> Outputs:
    return shape.expand_dims(call.tensor(0), tuple(axes_of(call, 13) or ()))


@operator("Transpose")
def _transpose(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    return shape.permute_dims(x, tuple(call.attr("perm", list(range(x.ndim))[::-1])))


@operator("DepthToSpace")
def _depth_to_space(call: NodeCall) -> Outputs:
    x, b = call.tensor(0), call.required_attr("blocksize")
    n, c, h, w = x.shape
    deep = floordiv(c, b * b)
    if call.attr("mode", "DCR") == "DCR":
        parts = shape.permute_dims(shape.reshape(x, (n, b, b, deep, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        parts = shape.permute_dims(shape.reshape(x, (n, deep, b, b, h, w)), (0, 1, 4, 2, 5, 3))
    return shape.reshape(parts, (n, deep, h * b, w * b))


@operator("SpaceToDepth")
def _space_to_depth(call: NodeCall) -> Outputs:
    x, b = call.tensor(0), call.required_attr("blocksize")
    n, c, h, w = x.shape
    parts = shape.reshape(x, (n, c, floordiv(h, b), b, floordiv(w, b), b))
    if call.attr("mode", "DCR") == "DCR":
        parts = shape.permute_dims(parts, (0, 3, 5, 1, 2, 4))
    else:
        parts = shape.permute_dims(parts, (0, 1, 3, 5, 2, 4))
    return shape.reshape(parts, (n, c * b * b, floordiv(h, b), floordiv(w, b)))


# Joining, parting, repeating ------------------------------------------------------------------


@operator("Concat")
def _concat(call: NodeCall) -> Outputs:
    tensors = call.tensors()
    return window.concat(tensors, axis_of(call, 1, tensors[0].ndim))


@operator("Split")
def _split(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    axis = axis_of(call, 0, x.ndim)
    if call.version < 13:
        sizes = call.attr("split")
    else:
        sizes = call.sizes(1) if call.has(1) else None
    parts = call.attr("num_outputs", len(call.proto.output))
    if sizes is None:
        each = floordiv(x.shape[axis] + (parts - 1), parts)
        sizes = [each] * (parts - 1)
        sizes.append(x.shape[axis] - each * (parts - 1))
    return window.split(x, sizes, axis)


@operator("Tile", since=6)
def _tile(call: NodeCall) -> Outputs:
    return repetition.tile(call.tensor(0), tuple(call.sizes(1)))


@operator("Trilu")
def _trilu(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    k = call.scalar(1) if call.has(1) else 0
    function = triu if call.attr("upper", 1) else tril
    return function(x, k=k)


@operator("Slice", since=10)
def _slice(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    starts, ends = call.sizes(1), call.sizes(2)
    axes = [int(a) for a in call.known_array(3)] if call.has(3) else list(range(len(starts)))
    steps = [int(s) for s in call.known_array(4)] if call.has(4) else [1] * len(starts)
    return slice_axes(x, starts, ends, axes, steps)


@operator("Slice")
def _slice_1(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    starts, ends = call.required_attr("starts"), call.required_attr("ends")
    axes = call.attr("axes", list(range(len(starts))))
    return slice_axes(x, starts, ends, axes, [1] * len(starts))


def slice_axes(
    x: Tensor,
    starts: Sequence[Size],
    ends: Sequence[Size],
    axes: Sequence[int],
    steps: Sequence[int],
) -> Tensor:
    """Return x[start:end:step] along some axes; bounds are clipped as in numpy."""
    index: list[Any] = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis % x.ndim] = _bounds(x.shape[axis % x.ndim], start, end, step)
    return getitem(x, tuple(index))


_FAR = 1 << 31


def _bounds(n: Size, start: Size, end: Size, step: int) -> slice:
    """Return a Python slice; with symbolic sizes, bounds far beyond every axis become None."""
    if isinstance(n, int) and isinstance(start, int) and isinstance(end, int):
        low, high, _ = slice(start, end if end >= -n or step > 0 else None, step).indices(n)
        return slice(low, None if high < 0 else high, step)
    first: Any = start
    last: Any = end
    if isinstance(end, int) and abs(end) >= _FAR - 1:
        last = None
    if isinstance(start, int) and (
        abs(start) >= _FAR - 1 or start == 0 or (start == -1 and step < 0)
    ):
        first = None
    return slice(first, last, step)


@operator("Pad", since=11)
def _pad(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    widths = call.sizes(1)
    axes = [int(a) for a in call.known_array(3)] if call.has(3) else list(range(x.ndim))
    value = call.scalar(2) if call.has(2) else 0
    return pad_axes(call, x, widths, axes, value)


@operator("Pad")
def _pad_1(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    widths = call.attr("pads", call.attr("paddings"))
    return pad_axes(call, x, widths, list(range(x.ndim)), call.attr("value", 0.0))


def pad_axes(
    call: NodeCall, x: Tensor, widths: Sequence[Size], axes: Sequence[int], value: Any
) -> Tensor:
    """Pad x by `widths` (all before, then all after the axes); negative widths crop."""
    half = len(axes)
    pairs: list[tuple[Size, Size]] = [(0, 0)] * x.ndim
    for i, axis in enumerate(axes):
        pairs[axis % x.ndim] = (widths[i], widths[half + i])
    mode = call.attr("mode", "constant")
    index = [
        slice(max(0, -_int_or_zero(b)) or None, -max(0, -_int_or_zero(a)) or None) for b, a in pairs
    ]
    if any(s.start or s.stop for s in index):
        x = getitem(x, tuple(index))
        pairs = [(max(0, _int_or_zero(b)), max(0, _int_or_zero(a))) for b, a in pairs]
    if mode == "constant":
        if x.dtype.kind == "b":
            value = bool(value)
        elif x.dtype.kind in "iu":
            value = int(value)
        return pad(x, pairs, value=value)
    if mode not in ("edge", "reflect", "wrap"):
        raise call.unsupported_error(f"mode {mode!r}; constant, edge, reflect and wrap are known")
    return pad(x, pairs, mode=mode)


def _int_or_zero(size: Size) -> int:
    return size if isinstance(size, int) else 0
