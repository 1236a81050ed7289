"""Normalisation by moments and norms, and dropout."""

from __future__ import annotations

from typing import Any

from graphflow.ir.op import Tensor
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.onnx.operators.shape import axis_of
from graphflow.ops.networks import batch_norm, norm
from graphflow.ops.networks.dropout import masked
from graphflow.ops.pointwise import arithmetic, comparison, select, transcendental
from graphflow.ops.pointwise.convert import astype, ones_like
from graphflow.ops.randomness.random import keep_mask
from graphflow.ops.reductions import reduce
from graphflow.ops.reductions.variance import var
from graphflow.ops.tensors import slicing as window
from graphflow.ops.tensors.padding import pad
from graphflow.ops.tensors.repetition import repeat


@operator("BatchNormalization")
def _batch_norm(call: NodeCall) -> Outputs:
    x, scale, bias, mean, variance = (call.tensor(i) for i in range(5))
    epsilon = call.attr("epsilon", 1e-5)
    if call.version < 7 and not call.attr("is_test", 0) and call.wants(1):
        raise call.unsupported_error("training as opsets before 7 have it; export for opset 15")
    if not call.attr("training_mode", 0):
        return batch_norm.batch_norm(x, scale, bias, mean, variance, epsilon=epsilon)
    return list(
        batch_norm.batch_norm(
            x,
            scale,
            bias,
            mean,
            variance,
            training=True,
            momentum=1.0 - call.attr("momentum", 0.9),
            epsilon=epsilon,
            unbiased=False,
        )
    )


@operator("InstanceNormalization")
def _instance_norm(call: NodeCall) -> Outputs:
    epsilon = call.attr("epsilon", 1e-5)
    return norm.instance_norm(call.tensor(0), call.tensor(1), call.tensor(2), epsilon=epsilon)


@operator("GroupNormalization", since=18)
def _group_norm(call: NodeCall) -> Outputs:
    x, scale, bias = call.tensors()
    groups = call.required_attr("num_groups")
    if call.version < 21:  # one scale for each group
        each = call.static_size(x.shape[1]) // groups
        scale, bias = repeat(scale, each), repeat(bias, each)
    wide = _upcast(call, x)
    y = norm.group_norm(
        wide,
        groups,
        astype(scale, wide.dtype),
        astype(bias, wide.dtype),
        epsilon=call.attr("epsilon", 1e-5),
    )
    return astype(y, x.dtype)


def _upcast(call: NodeCall, x: Tensor) -> Tensor:
    """Convert x to the dtype of its statistics (`stash_type`)."""
    if x.dtype.itemsize >= 4:
        return x
    return astype(x, call.dtype("stash_type", 1))


@operator("LayerNormalization", since=17)
def _layer_norm(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    axes = tuple(range(axis_of(call, -1, x.ndim), x.ndim))
    epsilon = call.attr("epsilon", 1e-5)
    wide = _upcast(call, x)
    scale, bias = call.tensor(1), call.optional(2)
    y = _normalize_and_scale(wide, x, scale, bias, axes, epsilon)
    if not (call.wants(1) or call.wants(2)):
        return y
    mean = reduce.mean(wide, axis=axes, keepdims=True)
    variance = var(wide, axis=axes, keepdims=True)
    return [y, mean, transcendental.rsqrt(variance + epsilon)]


def _normalize_and_scale(
    wide: Tensor,
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    axes: tuple[int, ...],
    epsilon: float,
) -> Tensor:
    """Normalise in the wide dtype, and scale in that of x."""
    sizes = tuple(x.shape[a] for a in axes)
    fits = scale.shape == sizes and (bias is None or bias.shape == sizes)
    if fits and wide is x:
        return norm.layer_norm(x, scale, bias, axis=axes, epsilon=epsilon)
    plain = astype(norm.layer_norm(wide, axis=axes, epsilon=epsilon), x.dtype)
    result: Tensor = plain * scale
    return result if bias is None else result + bias


@operator("RMSNormalization", since=23)
def _rms_norm(call: NodeCall) -> Outputs:
    x, scale = call.tensor(0), call.tensor(1)
    axes = tuple(range(axis_of(call, -1, x.ndim), x.ndim))
    epsilon = call.attr("epsilon", 1e-5)
    wide = _upcast(call, x)
    if wide is x and scale.shape == tuple(x.shape[a] for a in axes) and scale.dtype == x.dtype:
        return norm.rms_norm(x, scale, axis=axes, epsilon=epsilon)
    plain = astype(norm.rms_norm(wide, axis=axes, epsilon=epsilon), scale.dtype)
    return plain * scale


@operator("LRN")
def _lrn(call: NodeCall) -> Outputs:
    """Translate LRN: x / (bias + alpha/size · Σ x² over `size` neighbouring channels)^beta."""
    x, size = call.tensor(0), call.required_attr("size")
    before = (size - 1) // 2
    widths = [(before, size - 1 - before) if i == 1 else (0, 0) for i in range(x.ndim)]
    squares = pad(arithmetic.square(x), widths)
    channels = x.shape[1]
    total: Any = window.window(squares, 1, 0, channels)
    for shift in range(1, size):
        total = total + window.window(squares, 1, shift, channels)
    base = call.attr("bias", 1.0) + total * (call.attr("alpha", 0.0001) / size)
    return x / arithmetic.pow(base, call.attr("beta", 0.75))


@operator("LpNormalization")
def _lp_normalization(call: NodeCall) -> Outputs:
    """Translate LpNormalization; vectors of zeros stay zeros."""
    x, p = call.tensor(0), call.attr("p", 2)
    axis = axis_of(call, -1, x.ndim)
    if p == 1:
        size = reduce.sum(arithmetic.abs(x), axis=axis, keepdims=True)
    elif p == 2:
        size = transcendental.sqrt(reduce.sum(arithmetic.square(x), axis=axis, keepdims=True))
    else:
        raise call.unsupported_error(f"p = {p}; 1 and 2 are known")
    return x / select.where(comparison.equal(size, 0), 1, size)


@operator("Dropout")
def _dropout(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    if call.version < 12:
        ratio, training = call.attr("ratio", 0.5), False
    else:
        ratio = call.scalar(1) if call.has(1) else 0.5
        training = bool(call.scalar(2)) if call.has(2) else False
    if not training or ratio == 0:
        return [x, ones_like(x, "bool")]
    if not 0 <= ratio < 1:
        raise call.unsupported_error(f"ratio {ratio}; it is at least 0 and below 1")
    mask = keep_mask(x.shape, 1.0 - ratio)
    return [masked(x, mask, scale=1.0 / (1.0 - ratio)), mask]
