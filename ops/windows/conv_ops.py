"""Convolution of any rank: one op, and its gradients in the input and in the weight.

The three are the partial derivatives of one trilinear form, Σ y[n,o,p] · w[o,c,k] · x[n,c,q] with
q = p·stride - before + k·dilation. So the gradients of each are the two others. Transposed
convolution is the gradient in the input.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import (
    Cost,
    Op,
    WeightLayout,
    register,
    sample,
)
from graphflow.ir.spec import Shape, Size, TensorSpec, equate, product, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.kernels.conv import kernel_table
from graphflow.ops.kernels.conv.conv_shape import ConvShape
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.jit.kept_layouts import KeptLayouts
from graphflow.ops.windows import sharding_rules as window_sharding
from graphflow.ops.windows.window_arguments import (
    Ints,
    Pairs,
    Windows,
    drop_unseen_taps,
    positions_shape,
)

# Shape rules ------------------------------------------------------------------------------------


def _require_weight(x: TensorSpec, w: TensorSpec, groups: int, axis: int) -> None:
    """Refuse weights that do not fit the channels of x, which axis `axis` of w multiplies."""
    require_kind(x, "float")
    shapes = f"x {show_shape(x.shape)}, weight {show_shape(w.shape)}, groups {groups}"
    if x.rank < 3 or x.rank != w.rank:
        raise ShapeError(
            f"expected x of (batch, channels, *space) and a weight of that rank, got {shapes}"
        )
    if x.dtype != w.dtype:
        raise ArgumentError(f"x is {x.dtype}, the weight {w.dtype}; convert one with .astype")
    channels = w.shape[axis] * (groups if axis else 1)
    last = " (are they last? then channels_last=True)" if x.shape[-1] == channels else ""
    equate(x.shape[1], channels, f"{shapes}: channels differ{last}")
    outputs = w.shape[0]
    if isinstance(outputs, int) and outputs % groups:
        raise ShapeError(f"{shapes}: the weight's first axis is no multiple of the groups")


def _infer_conv(
    x: TensorSpec,
    w: TensorSpec,
    stride: Ints,
    padding: Pairs,
    dilation: Ints,
    groups: int,
    exact: bool = False,
) -> TensorSpec:
    _require_weight(x, w, groups, axis=1)
    out = positions_shape(x.shape[2:], w.shape[2:], stride, padding, dilation)
    return x.with_shape((x.shape[0], w.shape[0], *out))


def _infer_transpose(
    g: TensorSpec,
    w: TensorSpec,
    sizes: Shape,
    stride: Ints,
    padding: Pairs,
    dilation: Ints,
    groups: int,
    exact: bool = False,
) -> TensorSpec:
    _require_weight(g, w, groups, axis=0)
    _equate_positions(g, positions_shape(sizes, w.shape[2:], stride, padding, dilation))
    return g.with_shape((g.shape[0], w.shape[1] * groups, *sizes))


def _infer_weight(
    x: TensorSpec,
    g: TensorSpec,
    kernel: Shape,
    stride: Ints,
    padding: Pairs,
    dilation: Ints,
    groups: int,
    exact: bool = False,
) -> TensorSpec:
    require_kind(x, "float")
    shapes = f"x {show_shape(x.shape)}, gradient {show_shape(g.shape)}, groups {groups}"
    if x.rank != g.rank or x.dtype != g.dtype:
        raise ShapeError(
            f"expected x and gradient of one rank and dtype, got {shapes}, {x.dtype} and {g.dtype}"
        )
    for channels in (x.shape[1], g.shape[1]):
        if isinstance(channels, int) and channels % groups:
            raise ShapeError(f"{shapes}: {channels} channels are no multiple of the groups")
    equate(x.shape[0], g.shape[0], "batch sizes")
    _equate_positions(g, positions_shape(x.shape[2:], kernel, stride, padding, dilation))
    inputs = x.shape[1] // groups
    return x.with_shape((g.shape[1], inputs, *kernel))


def _equate_positions(g: TensorSpec, wanted: Shape) -> None:
    for have, want in zip(g.shape[2:], wanted, strict=True):
        equate(have, want, f"positions {show_shape(g.shape[2:])}, windows {show_shape(wanted)}")


def _cost_conv(x: TensorSpec, w: TensorSpec, **attrs: Any) -> Cost:
    out = _infer_conv(x, w, **attrs)
    columns = _columns(x.shape[0] * x.shape[1], w.shape[2:], out.shape[2:])
    return _cost(out.size * product(w.shape[1:]), columns, (x, w, out))


def _cost_transpose(g: TensorSpec, w: TensorSpec, groups: int, **attrs: Any) -> Cost:
    columns = _columns(g.shape[0] * w.shape[1] * groups, w.shape[2:], g.shape[2:])
    return _cost(g.size * product(w.shape[1:]), columns, (g, w))


def _cost_weight(x: TensorSpec, g: TensorSpec, groups: int, **attrs: Any) -> Cost:
    kernel = attrs["kernel"]
    columns = _columns(x.shape[0] * x.shape[1], kernel, g.shape[2:])
    return _cost(g.size * (x.shape[1] // groups) * product(kernel), columns, (x, g))


def _columns(images: Size, kernel: Shape, windows: Shape) -> Size:
    """Count the elements of all windows laid out for a product; 1×1 windows stay in place."""
    return 0 if all(k == 1 for k in kernel) else images * product(kernel) * product(windows)


def _cost(products: Size, columns: Size, specs: tuple[TensorSpec, ...]) -> Cost:
    """Return two flops for a product, and the bytes of inputs, outputs and laid-out windows."""
    moved = sum((s.nbytes for s in specs), columns * 2 * specs[0].dtype.itemsize)
    return Cost(flops=products * 2, bytes=moved)


# Kernels ----------------------------------------------------------------------------------------


def _conv_into(
    xp: Any, out: Any, x: Any, w: Any, kept: KeptLayouts | None = None, **attrs: Any
) -> None:
    if not out.size or not w.size:
        out[...] = 0
        return
    shape = _shape(xp, x, w, out, **attrs)
    windows, taps = drop_unseen_taps(shape.windows, shape.space)
    if kept is not None and windows != shape.windows:
        w, kept = _keep_taps(w, windows, taps, kept), None
    else:
        w = w[(..., *taps)]
    shape = shape._replace(windows=windows)
    given = () if kept is None else (kept,)
    kernel_table.choose(shape, "y").forward(shape, out, x, w, *given)


def _keep_taps(w: Any, windows: Windows, taps: tuple[slice, ...], kept: KeptLayouts) -> Any:
    """Return a contiguous copy of some taps, which stays for later calls."""
    shape = (*w.shape[:2], *windows.kernel)

    def write(memory: Any) -> None:
        memory.view(w.dtype).reshape(shape)[...] = w[(..., *taps)]

    memory = kept.get(("taps", w.shape, str(taps)), math.prod(shape) * w.dtype.itemsize, write)
    return memory.view(w.dtype).reshape(shape)


def _conv_layout(x: TensorSpec, w: TensorSpec, **attrs: Any) -> int:
    """Return the bytes of the weights as the kernel on a CPU lays them out; 0 if it does not."""
    y = _infer_conv(x, w, **attrs)
    if 0 in (*y.shape, *w.shape):
        return 0
    shape = _shape(np, x, w, y, **attrs)
    windows, _ = drop_unseen_taps(shape.windows, shape.space)
    if windows != shape.windows:
        return math.prod((*map(int, w.shape[:2]), *windows.kernel)) * w.dtype.itemsize
    return kernel_table.choose(shape, "y").layout_bytes(shape, "y")


def _native_conv(x: TensorSpec, w: TensorSpec, **attrs: Any) -> KernelTask | None:
    """Return the generated kernel of a convolution on a CPU if one native call computes it."""
    y = _infer_conv(x, w, **attrs)
    if 0 in (*y.shape, *w.shape):
        return None
    shape = _shape(np, x, w, y, **attrs)
    if drop_unseen_taps(shape.windows, shape.space)[0] != shape.windows:
        return None
    return kernel_table.choose(shape, "y").task(shape)


def _transpose_into(
    xp: Any,
    out: Any,
    g: Any,
    w: Any,
    sizes: Ints,
    kept: KeptLayouts | None = None,
    **attrs: Any,
) -> None:
    if not out.size or not g.size or not w.size:
        out[...] = 0
        return
    shape = _shape(xp, out, w, g, **attrs)
    given = () if kept is None else (kept,)
    kernel_table.choose(shape, "x").back_to_input(shape, out, g, w, *given)


def _transpose_layout(g: TensorSpec, w: TensorSpec, **attrs: Any) -> int:
    """Return the bytes of the weights as the kernel on a CPU lays them out; 0 if it does not."""
    x = _infer_transpose(g, w, **attrs)
    if 0 in (*x.shape, *g.shape, *w.shape):
        return 0
    del attrs["sizes"]
    shape = _shape(np, x, w, g, **attrs)
    return kernel_table.choose(shape, "x").layout_bytes(shape, "x")


def _weight_into(xp: Any, out: Any, x: Any, g: Any, kernel: Ints, **attrs: Any) -> None:
    if not out.size or not x.size:
        out[...] = 0
        return
    shape = _shape(xp, x, out, g, **attrs)
    kernel_table.choose(shape, "w").back_to_weight(shape, out, x, g)


def _shape(
    xp: Any, x: Any, w: Any, y: Any, stride: Ints, padding: Any, dilation: Ints, groups: int,
    exact: bool = False,
) -> ConvShape:  # fmt: skip
    """Describe a convolution by its three arrays."""
    windows = Windows.from_attributes(w.shape[2:], stride, padding, dilation, y.shape[2:])
    return ConvShape(
        xp, x.dtype, x.shape[0], x.shape[1], w.shape[0], x.shape[2:], windows, groups, exact
    )


def _conv_kernel(xp: Any, x: Any, w: Any, **attrs: Any) -> Any:
    padding = attrs["padding"]
    out = positions_shape(x.shape[2:], w.shape[2:], attrs["stride"], padding, attrs["dilation"])
    return _allocate_and_run(xp, _conv_into, (x.shape[0], w.shape[0], *out), x, w, attrs)


def _transpose_kernel(xp: Any, g: Any, w: Any, **attrs: Any) -> Any:
    shape = (g.shape[0], w.shape[1] * attrs["groups"], *attrs["sizes"])
    return _allocate_and_run(xp, _transpose_into, shape, g, w, attrs)


def _weight_kernel(xp: Any, x: Any, g: Any, **attrs: Any) -> Any:
    shape = (g.shape[1], x.shape[1] // attrs["groups"], *attrs["kernel"])
    return _allocate_and_run(xp, _weight_into, shape, x, g, attrs)


def _allocate_and_run(xp: Any, into: Any, shape: Any, a: Any, b: Any, attrs: Any) -> Any:
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
        records=True,
        native=_native_conv,
        layout=WeightLayout(1, _conv_layout),
        vjp=lambda g, y, x, w, **attrs: (
            conv_transpose_op(g, w, sizes=x.shape[2:], **attrs),
            conv_weight_op(x, g, kernel=w.shape[2:], **attrs),
        ),
        batch=batching.convolution(1, 0, out=1),
        sharding=window_sharding.conv,
        cost=_cost_conv,
        rate="half_product",
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
        records=True,
        layout=WeightLayout(1, _transpose_layout),
        vjp=lambda h, y, g, w, sizes, **attrs: (
            conv_op(h, w, **attrs),
            conv_weight_op(h, g, kernel=w.shape[2:], **attrs),
        ),
        batch=batching.convolution(1, 0, out=1),
        sharding=window_sharding.conv_transpose,
        cost=_cost_transpose,
        rate="half_product",
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
        records=True,
        vjp=lambda h, y, x, g, kernel, **attrs: (
            conv_transpose_op(g, h, sizes=x.shape[2:], **attrs),
            conv_op(x, h, **attrs),
        ),
        batch=batching.convolution(1, 1, out=0),
        sharding=window_sharding.conv_weight_grad,
        cost=_cost_weight,
        rate="half_product",
        samples=(
            sample(_f(2, 3, 5, 4), _f(2, 4, 2, 2), kernel=(3, 2), **_STRIDED),
            sample(_f(3, 2, 5), _f(3, 4, 6), kernel=(2,), **_DILATED),
            sample(_f(2, 3, 4, 5), _f(2, 3, 2, 3), kernel=(3, 3), **_DEEP),
            sample(_f(2, 2, 3, 3), _f(2, 4, 3, 3), kernel=(2, 2), **_FLAT_DEEP),
        ),
    )
)
