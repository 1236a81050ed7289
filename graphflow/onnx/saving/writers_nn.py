"""Writers of ONNX nodes: products, convolutions, pooling, norms, losses, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.ir.op import Node
from graphflow.ir.spec import Dim
from graphflow.onnx.saving.export import Export, Unwritable, writes
from graphflow.onnx.saving.writers import cast, like


def _swap_last_axes(e: Export, name: str, rank: int) -> str:
    """Exchange the last two axes."""
    return e.emit("Transpose", [name], perm=[*range(rank - 2), rank - 1, rank - 2])


@writes("matmul")
def _matmul(e: Export, node: Node, inputs: list[str]) -> str:
    a, b = inputs
    if node.attrs.get("transpose_a"):
        a = _swap_last_axes(e, a, len(node.inputs[0].shape))
    if node.attrs.get("transpose_b"):
        b = _swap_last_axes(e, b, len(node.inputs[1].shape))
    return e.emit("MatMul", [a, b])


def _pads(padding: Sequence[tuple[Any, Any]]) -> list[int]:
    """Convert padding to ONNX's order: all before, then all after the axes."""
    pads = [*(before for before, _ in padding), *(after for _, after in padding)]
    if any(isinstance(p, Dim) for p in pads):
        raise Unwritable("padding that depends on a size that is not known")
    return [int(p) for p in pads]


@writes("conv")
def _conv(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit(
        "Conv",
        inputs,
        strides=list(node.attrs["stride"]),
        dilations=list(node.attrs["dilation"]),
        pads=_pads(node.attrs["padding"]),
        group=node.attrs["groups"],
    )


@writes("conv_transpose")
def _conv_transpose(e: Export, node: Node, inputs: list[str]) -> str:
    """Write a transposed convolution; `output_padding` makes up for sizes beyond the padding."""
    pads = _pads(node.attrs["padding"])
    rank = len(pads) // 2
    extra = []
    for i in range(rank):
        n, kernel = node.inputs[0].shape[2 + i], node.inputs[1].shape[2 + i]
        stride, dilation = node.attrs["stride"][i], node.attrs["dilation"][i]
        plain = (n - 1) * stride + (kernel - 1) * dilation + 1 - pads[i] - pads[rank + i]
        more = node.attrs["sizes"][i] - plain
        if isinstance(more, Dim):
            raise Unwritable("sizes that are not known, and do not follow from the padding")
        pads[rank + i] += -more if more < 0 else 0
        extra.append(max(more, 0))
    return e.emit(
        "ConvTranspose",
        inputs,
        strides=list(node.attrs["stride"]),
        dilations=list(node.attrs["dilation"]),
        pads=pads,
        output_padding=extra,
        group=node.attrs["groups"],
    )


def _window(node: Node) -> dict[str, Any]:
    return {
        "kernel_shape": list(node.attrs["kernel"]),
        "strides": list(node.attrs["stride"]),
        "dilations": list(node.attrs["dilation"]),
        "pads": _pads(node.attrs["padding"]),
        "ceil_mode": int(node.attrs["ceil_mode"]),
    }


@writes("max_pool")
def _max_pool(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("MaxPool", inputs, **_window(node))


@writes("avg_pool")
def _avg_pool(e: Export, node: Node, inputs: list[str]) -> str:
    divisor = node.attrs["divisor"]
    include = int(divisor != "inside")
    mean = e.emit("AveragePool", inputs, count_include_pad=include, **_window(node))
    if isinstance(divisor, str):
        return mean
    if node.attrs["ceil_mode"]:
        raise Unwritable("a divisor of one's own together with ceil_mode")
    return e.emit("Mul", [mean, like(e, node, math.prod(node.attrs["kernel"]) / divisor)])


# Norms ----------------------------------------------------------------------------------------


def _emit_standardize(e: Export, node: Node, x: str) -> str:
    axes = e.ints(node.attrs["axis"])
    if node.attrs.get("centred", True):
        x = e.emit("Sub", [x, e.emit("ReduceMean", [x, axes], keepdims=1)])
    variance = e.emit("ReduceMean", [e.emit("Mul", [x, x]), axes], keepdims=1)
    spread = e.emit("Sqrt", [e.emit("Add", [variance, like(e, node, node.attrs["epsilon"])])])
    return e.emit("Div", [x, spread])


@writes("standardize")
def _standardize(e: Export, node: Node, inputs: list[str]) -> str:
    return _emit_standardize(e, node, inputs[0])


@writes("affine_norm")
def _affine_norm(e: Export, node: Node, inputs: list[str]) -> str:
    axis, along = tuple(node.attrs["axis"]), tuple(node.attrs["along"])
    rank = len(node.inputs[0].shape)
    trailing = axis == along == tuple(range(rank - len(axis), rank))
    if trailing and node.attrs.get("centred", True):
        return e.emit(
            "LayerNormalization", inputs, axis=rank - len(axis), epsilon=node.attrs["epsilon"]
        )
    result = _emit_standardize(e, node, inputs[0])
    sizes = [node.inputs[0].shape[i] if i in along else 1 for i in range(rank)]
    result = e.emit("Mul", [result, e.emit("Reshape", [inputs[1], e.shape(sizes)])])
    if len(inputs) == 3:
        result = e.emit("Add", [result, e.emit("Reshape", [inputs[2], e.shape(sizes)])])
    return result


@writes("channel_affine")
def _channel_affine(e: Export, node: Node, inputs: list[str]) -> str:
    if node.attrs["channel"] != 1:
        raise Unwritable("ONNX has the channels after the batch; use channels_last=False")
    return e.emit("BatchNormalization", inputs, epsilon=node.attrs["epsilon"])


# Losses ---------------------------------------------------------------------------------------


@writes("cross_entropy")
def _cross_entropy(e: Export, node: Node, inputs: list[str]) -> str:
    """Write -log softmax(logits)[label] for each row."""
    chances = e.emit("LogSoftmax", [inputs[0]], axis=-1)
    last = e.ints([-1])
    places = e.emit("Unsqueeze", [cast(e, inputs[1], "int64"), last])
    rows = len(node.inputs[1].shape)
    chosen = e.emit("GatherElements", [chances, places], axis=rows)
    return e.emit("Neg", [e.emit("Squeeze", [chosen, last])])


# Attention ------------------------------------------------------------------------------------


@writes("attention")
def _attention(e: Export, node: Node, inputs: list[str]) -> list[str]:
    """Write attention with explicit scores; query heads that share keys get copies of these."""
    q, k, v = inputs[:3]
    rank = len(node.inputs[0].shape)
    heads, shared = node.inputs[0].shape[-3], node.inputs[1].shape[-3]
    if heads != shared:
        k, v = (_repeat_heads(e, node, i) for i in (1, 2))
    scaled = e.emit("Mul", [q, like(e, node, node.attrs["scale"])])
    scores = e.emit("MatMul", [scaled, _swap_last_axes(e, k, rank)])
    cap = node.attrs["softcap"]
    if cap is not None:
        bounded = e.emit("Tanh", [e.emit("Div", [scores, like(e, node, cap)])])
        scores = e.emit("Mul", [bounded, like(e, node, cap)])
    seen = _visible_keys(e, node)
    if len(inputs) == 4:
        if node.inputs[3].dtype == np.bool_:
            seen = inputs[3] if seen is None else e.emit("And", [seen, inputs[3]])
        else:
            scores = e.emit("Add", [scores, inputs[3]])
    if seen is not None:
        scores = e.emit("Where", [seen, scores, like(e, node, -np.inf)])
    chances = e.emit("Softmax", [scores], axis=-1)
    if seen is not None:  # a query that sees nothing gives zeros
        chances = e.emit("Where", [seen, chances, like(e, node, 0)])
    result = e.emit("MatMul", [chances, v])
    return [result] + [""] * (len(node.outputs) - 1)


def _repeat_heads(e: Export, node: Node, i: int) -> str:
    shape = node.inputs[i].shape
    heads, shared = node.inputs[0].shape[-3], shape[-3]
    if isinstance(heads, Dim) or isinstance(shared, Dim):
        raise Unwritable("heads that share keys, in a number that is not known")
    apart = e.emit("Unsqueeze", [e.names[node.inputs[i]], e.ints([len(shape) - 2])])
    times = heads // shared
    wide = e.emit("Expand", [apart, e.shape([*shape[:-2], times, *shape[-2:]])])
    return e.emit("Reshape", [wide, e.shape([*shape[:-3], heads, *shape[-2:]])])


def _visible_keys(e: Export, node: Node) -> str | None:
    """Return the mask of the keys that each query sees by its position; None if it sees all."""
    left, right, offset = (node.attrs[key] for key in ("left", "right", "offset"))
    if left is None and right is None:
        return None
    sizes = e.shape([node.inputs[0].shape[-2], node.inputs[1].shape[-2]])
    result = e.emit("Expand", [e.constant(np.array(1.0, np.float32)), sizes])
    if right is not None:
        result = e.emit("Trilu", [result, e.size(offset + right)], upper=0)
    if left is not None:
        result = e.emit("Trilu", [result, e.size(offset - left)], upper=1)
    return cast(e, result, "bool")
