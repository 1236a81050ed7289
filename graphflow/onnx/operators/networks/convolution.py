"""Convolutions and their transposes."""

from __future__ import annotations

from typing import Any

from graphflow.ir.op import Tensor
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.ops.windows import conv

_AUTOMATIC = {"SAME_UPPER": "same", "SAME_LOWER": "same_lower", "VALID": "valid"}


def padding_of(call: NodeCall, rank: int) -> Any:
    """Convert the attributes `pads` and `auto_pad` to our padding."""
    automatic = call.attr("auto_pad", "NOTSET")
    if automatic in _AUTOMATIC:
        return _AUTOMATIC[automatic]
    if automatic not in ("NOTSET", ""):
        raise call.unsupported_error(f"auto_pad {automatic!r}")
    pads = call.attr("pads", [0] * (2 * rank))
    if len(pads) != 2 * rank:
        raise call.unsupported_error(f"{len(pads)} pads for {rank} spatial axes")
    return [(pads[i], pads[rank + i]) for i in range(rank)]


def steps_of(call: NodeCall, rank: int) -> dict[str, Any]:
    """Return strides and dilations; default: 1."""
    return {
        "stride": tuple(call.attr("strides", [1] * rank)),
        "dilation": tuple(call.attr("dilations", [1] * rank)),
    }


def _check_kernel(call: NodeCall, weight: Tensor) -> int:
    rank = weight.ndim - 2
    kernel = call.attr("kernel_shape")
    if kernel is not None and tuple(kernel) != weight.shape[2:]:
        raise call.unsupported_error(f"kernel_shape {kernel} for a weight of shape {weight.shape}")
    return rank


@operator("Conv")
def _conv(call: NodeCall) -> Outputs:
    x, weight = call.tensor(0), call.tensor(1)
    rank = _check_kernel(call, weight)
    return conv.conv(
        x,
        weight,
        call.optional(2),
        padding=padding_of(call, rank),
        groups=call.attr("group", 1),
        **steps_of(call, rank),
    )


@operator("ConvTranspose")
def _conv_transpose(call: NodeCall) -> Outputs:
    x, weight = call.tensor(0), call.tensor(1)
    rank = _check_kernel(call, weight)
    padding = padding_of(call, rank)
    wanted = call.attr("output_shape")
    extra = call.attr("output_padding", [0] * rank)
    steps = steps_of(call, rank)
    if wanted is not None and not isinstance(padding, str):
        padding = _padding_for_sizes(call, x, weight, wanted[-rank:], extra, steps)
    return conv.conv_transpose(
        x,
        weight,
        call.optional(2),
        padding=padding,
        output_padding=0 if wanted is not None else extra,
        groups=call.attr("group", 1),
        output_size=None if wanted is None else tuple(wanted[-rank:]),
        **steps,
    )


def _padding_for_sizes(
    call: NodeCall, x: Tensor, weight: Tensor, wanted: Any, extra: Any, steps: dict[str, Any]
) -> Any:
    """Return the padding that gives an output of `wanted` sizes; an odd element goes before."""
    pairs = []
    for i, size in enumerate(wanted):
        n, kernel = call.static_size(x.shape[2 + i]), call.static_size(weight.shape[2 + i])
        span = (kernel - 1) * steps["dilation"][i] + 1
        total = max(0, steps["stride"][i] * (n - 1) + extra[i] + span - size)
        pairs.append((total - total // 2, total // 2))
    return pairs
