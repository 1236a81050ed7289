"""Tells weights, which become variables, from other initializers of a model.

ONNX does not distinguish a weight from the 3.0 of `x ** 3`: both are initializers. The operators
that read an initializer do, so all its uses are examined, also in subgraphs and functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from graphflow.base.source_location import user_location
from graphflow.errors import OnnxError
from graphflow.ir.spec import kind
from graphflow.onnx.loading.reading.domains import normal_domain
from graphflow.onnx.loading.reading.reader import tensor_to_array
from graphflow.onnx.loading.reading.value_kinds import Array, is_native
from graphflow.onnx.loading.translation.node_call import attribute_value
from graphflow.onnx.loading.translation.segments import OnnxBody

HUGE = 1e9
"""Larger numbers stand for infinity in masks."""

# How an input is used.
WEIGHT = "weight"  # the operator has a place for weights
BIAS = "bias"  # it is added to a product
FORMULA = "formula"  # any other arithmetic
OPTION = "option"  # it configures the operator
MOMENT = "moment"  # a running mean or variance

_PRODUCTS = {"Conv", "ConvTranspose", "DeformConv", "Einsum", "Gemm", "MatMul"}
_PLACES = _PRODUCTS | {
    "BatchNormalization", "CausalConvWithState", "GRU", "Gather", "GroupNormalization",
    "InstanceNormalization", "LSTM", "LayerNormalization", "PRelu", "RMSNormalization", "RNN",
}  # fmt: skip

# The first input that is an option, by operator.
_OPTIONS = {
    "Clip": 1, "DequantizeLinear": 1, "Dropout": 1, "DynamicQuantizeLSTM": 8, "Mod": 1,
    "NonMaxSuppression": 2, "OneHot": 0, "Pad": 2, "Pow": 1, "QLinearConv": 0, "QLinearMatMul": 0,
    "QuantizeLinear": 1, "Range": 0, "Resize": 1, "Upsample": 1,
}  # fmt: skip

# Operators whose result has the elements of the first input.
_SAME = {
    "Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze",
}  # fmt: skip

Uses = dict[str, set[str]]


def find_weights(
    nodes: Sequence[NodeProto],
    arrays: Mapping[str, Array],
    functions: Mapping[tuple[str, str], OnnxBody],
) -> dict[str, bool]:
    """Return the float initializers that are weights; True if training changes them.

    Scalars are no weights. Nor are tensors of one element (unless they are an operator's weight or
    bias), options such as exponents and bounds, and masks.
    """
    uses = _uses_of_names(nodes, functions, {})
    found: dict[str, bool] = {}
    for name, array in arrays.items():
        kinds = uses.get(name, set())
        if not kinds or not _holds_floats(array):
            continue
        if MOMENT in kinds:
            found[name] = False
        elif array.ndim and (
            WEIGHT in kinds
            or (BIAS in kinds and not _is_mask(array))
            or (FORMULA in kinds and array.size > 1 and not _is_mask(array))
        ):
            found[name] = True
    return found


def find_named_constants(
    names: Any, nodes: Sequence[NodeProto], arrays: Mapping[str, Array], file: str
) -> dict[str, Array]:
    """Return the values of Constant nodes that the user names as weights.

    Raises:
        OnnxError: a name is neither an initializer nor the output of a Constant, or does not hold
            floats.
    """
    if not isinstance(names, list | tuple | set | frozenset):
        raise OnnxError(f"load at {user_location()}: variables are a list of names, not {names!r}")
    found: dict[str, Array] = {}
    for name in names:
        if name not in arrays:
            found[name] = _constant(name, nodes, file)
        array = arrays[name] if name in arrays else found[name]
        if not _holds_floats(array):
            raise OnnxError(
                f"{file} at {user_location()}: {name!r} holds {array.dtype}; a variable of a model "
                "holds floats"
            )
    return found


def _constant(name: Any, nodes: Sequence[NodeProto], file: str) -> Array:
    """Return the value of the Constant node that makes a name."""
    for node in nodes:
        if name in node.output and node.op_type == "Constant":
            for attribute in node.attribute:
                value = attribute_value(attribute)
                if isinstance(value, TensorProto):
                    return tensor_to_array(value, file)
                return np.asarray(value, "float32" if "float" in attribute.name else None)
    raise OnnxError(
        f"{file} at {user_location()}: {name!r} is neither an initializer nor a Constant of the "
        "model; variables names those"
    )


def _holds_floats(array: Array) -> bool:
    return is_native(array.dtype) and kind(array.dtype) in ("float", "complex")


def _is_mask(array: Array) -> bool:
    """Return True if some numbers are infinite or stand for infinity."""
    if not array.size or kind(array.dtype) == "complex":
        return False
    return not (float(array.max()) < HUGE and float(array.min()) > -HUGE)


def _uses_of_names(
    nodes: Sequence[NodeProto],
    functions: Mapping[tuple[str, str], OnnxBody],
    of_functions: dict[tuple[str, str], list[set[str]]],
) -> Uses:
    """Return how nodes, also of subgraphs, use each name."""
    uses: Uses = {}
    makers = {name: node for node in nodes for name in node.output}
    for node in reversed(nodes):  # only later nodes use a node's outputs
        for i, name in enumerate(node.input):
            if name:
                uses.setdefault(name, set()).update(
                    _use_of_input(node, i, uses, makers, functions, of_functions)
                )
        for attribute in node.attribute:
            if attribute.HasField("g"):
                for name, kinds in _uses_of_names(
                    attribute.g.node, functions, of_functions
                ).items():
                    uses.setdefault(name, set()).update(kinds)
    return uses


def _use_of_input(
    node: NodeProto,
    i: int,
    uses: Uses,
    makers: Mapping[str, NodeProto],
    functions: Mapping[tuple[str, str], OnnxBody],
    of_functions: dict[tuple[str, str], list[set[str]]],
) -> set[str]:
    """Return how a node uses its input i."""
    key, name = (normal_domain(node.domain), node.op_type), node.op_type
    if key in functions:
        if key not in of_functions:
            body = functions[key]
            inside = _uses_of_names(body.nodes, functions, of_functions)
            of_functions[key] = [inside.get(formal, set()) for formal in body.inputs]
        formals = of_functions[key]
        return formals[i] if i < len(formals) else set()
    if name == "BatchNormalization" and i > 2:
        return {MOMENT}
    if i >= _OPTIONS.get(name, len(node.input)):
        return {OPTION}
    if name in _SAME:
        made = (uses.get(output, set()) for output in node.output)
        return set().union(*made) if i == 0 else {OPTION}
    if name in _PLACES or key[0]:
        return {WEIGHT}
    others = [other for j, other in enumerate(node.input) if j != i]
    added = name in ("Add", "Sum") and any(_is_product(other, makers) for other in others)
    return {BIAS if added else FORMULA}


def _is_product(name: str, makers: Mapping[str, NodeProto]) -> bool:
    """Return True if a tensor is a product, perhaps reshaped or cast."""
    while name in makers and makers[name].op_type in _SAME:
        name = makers[name].input[0]
    return name in makers and makers[name].op_type in _PRODUCTS
