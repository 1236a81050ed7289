"""Writers of ONNX nodes: elementwise ops, shapes, reductions, indexing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import helper

from graphflow.ir.op import Node
from graphflow.ir.spec import Dim
from graphflow.onnx.saving.export import Export, Unwritable, writes

# Ops that are one ONNX operator with the same inputs.
_SAME = {
    "abs": "Abs", "acos": "Acos", "acosh": "Acosh", "add": "Add", "asin": "Asin",
    "asinh": "Asinh", "atan": "Atan", "atanh": "Atanh", "bitwise_and": "BitwiseAnd",
    "bitwise_invert": "BitwiseNot", "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor",
    "ceil": "Ceil", "cos": "Cos", "cosh": "Cosh", "det": "Det", "divide": "Div",
    "equal": "Equal", "erf": "Erf", "exp": "Exp", "floor": "Floor", "gelu": "Gelu",
    "greater": "Greater", "greater_equal": "GreaterOrEqual", "hard_swish": "HardSwish",
    "isinf": "IsInf", "isnan": "IsNaN", "less": "Less", "less_equal": "LessOrEqual",
    "log": "Log", "logical_and": "And", "logical_not": "Not", "logical_or": "Or",
    "logical_xor": "Xor", "maximum": "Max", "minimum": "Min", "mish": "Mish",
    "multiply": "Mul", "negative": "Neg", "positive": "Identity", "pow": "Pow",
    "prelu": "PRelu", "reciprocal": "Reciprocal", "relu": "Relu", "round": "Round",
    "sigmoid": "Sigmoid", "sign": "Sign", "sin": "Sin", "sinh": "Sinh", "softplus": "Softplus",
    "softsign": "Softsign", "sqrt": "Sqrt", "stop_gradient": "Identity", "subtract": "Sub",
    "tan": "Tan", "tanh": "Tanh", "where": "Where",
}  # fmt: skip


@writes(*_SAME)
def _write_same(e: Export, node: Node, inputs: list[str]) -> str:
    if node.op.name in ("ceil", "floor", "round") and node.specs[0].dtype.kind != "f":
        return e.emit("Identity", inputs)
    return e.emit(_SAME[node.op.name], inputs)


@writes("gelu_tanh")
def _gelu_tanh(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("Gelu", inputs, approximate="tanh")


# Ops that are one ONNX operator: its name, and the names of attributes (ours, ONNX's).
_RENAMED_ATTRIBUTES = {
    "leaky_relu": ("LeakyRelu", {"slope": "alpha"}),
    "elu": ("Elu", {"alpha": "alpha"}),
    "celu": ("Celu", {"alpha": "alpha"}),
    "selu": ("Selu", {"alpha": "alpha", "scale": "gamma"}),
    "hard_sigmoid": ("HardSigmoid", {"slope": "alpha", "offset": "beta"}),
    "thresholded_relu": ("ThresholdedRelu", {"threshold": "alpha"}),
    "shrink": ("Shrink", {"threshold": "lambd", "bias": "bias"}),
    "softmax": ("Softmax", {"axis": "axis"}),
    "log_softmax": ("LogSoftmax", {"axis": "axis"}),
    "concat": ("Concat", {"axis": "axis"}),
    "take": ("Gather", {"axis": "axis"}),
    "take_along_axis": ("GatherElements", {"axis": "axis"}),
    "permute_dims": ("Transpose", {"axes": "perm"}),
}


@writes(*_RENAMED_ATTRIBUTES)
def _write_renamed(e: Export, node: Node, inputs: list[str]) -> str:
    name, attributes = _RENAMED_ATTRIBUTES[node.op.name]
    if name == "GatherElements" or name == "Gather":
        inputs = [inputs[0], as_int64(e, node, inputs[1], 1)]
    return e.emit(name, inputs, **{theirs: node.attrs[ours] for ours, theirs in attributes.items()})


def as_int64(e: Export, node: Node, name: str, i: int) -> str:
    """Cast input i, whose name is given, to int64."""
    return name if node.inputs[i].dtype == np.int64 else cast(e, name, "int64")


def cast(e: Export, name: str, dtype: Any) -> str:
    """Add a Cast, and return its output."""
    return e.emit("Cast", [name], to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def like(e: Export, node: Node, value: float, i: int = 0) -> str:
    """Add a scalar constant of the dtype of input i."""
    return e.constant(np.array(value, node.inputs[i].dtype))


# Compositions ---------------------------------------------------------------------------------


@writes("astype")
def _astype(e: Export, node: Node, inputs: list[str]) -> str:
    return cast(e, inputs[0], node.specs[0].dtype)


@writes("not_equal")
def _not_equal(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("Not", [e.emit("Equal", inputs)])


@writes("square")
def _square(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("Mul", [inputs[0], inputs[0]])


@writes("rsqrt")
def _rsqrt(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("Reciprocal", [e.emit("Sqrt", inputs)])


@writes("expm1")
def _expm1(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("Sub", [e.emit("Exp", inputs), like(e, node, 1)])


@writes("log1p")
def _log1p(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("Log", [e.emit("Add", [inputs[0], like(e, node, 1)])])


@writes("log2", "log10")
def _log_base(e: Export, node: Node, inputs: list[str]) -> str:
    base = 2 if node.op.name == "log2" else 10
    return e.emit("Div", [e.emit("Log", inputs), like(e, node, math.log(base))])


@writes("silu")
def _silu(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("Mul", [inputs[0], e.emit("Sigmoid", inputs)])


@writes("log_sigmoid")
def _log_sigmoid(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("Neg", [e.emit("Softplus", [e.emit("Neg", inputs)])])


@writes("trunc")
def _trunc(e: Export, node: Node, inputs: list[str]) -> str:
    if node.specs[0].dtype.kind != "f":
        return e.emit("Identity", inputs)
    return e.emit("Mul", [e.emit("Sign", inputs), e.emit("Floor", [e.emit("Abs", inputs)])])


@writes("isfinite")
def _isfinite(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("Not", [e.emit("Or", [e.emit("IsNaN", inputs), e.emit("IsInf", inputs)])])


@writes("floor_divide")
def _floor_divide(e: Export, node: Node, inputs: list[str]) -> str:
    kind = node.specs[0].dtype.kind
    if kind == "i":
        raise Unwritable("ONNX divides ints towards zero; divide floats, or unsigned ints")
    quotient = e.emit("Div", inputs)
    return e.emit("Floor", [quotient]) if kind == "f" else quotient


@writes("remainder")
def _remainder(e: Export, node: Node, inputs: list[str]) -> str:
    if node.specs[0].dtype.kind != "f":
        return e.emit("Mod", inputs)
    whole = e.emit("Floor", [e.emit("Div", inputs)])
    return e.emit("Sub", [inputs[0], e.emit("Mul", [whole, inputs[1]])])


@writes("fmod")
def _fmod(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("Mod", inputs, fmod=1)


@writes("clip")
def _clip(e: Export, node: Node, inputs: list[str]) -> str:
    low, high = node.attrs["min"], node.attrs["max"]
    limits = ["" if limit is None else like(e, node, limit) for limit in (low, high)]
    return e.emit("Clip", [*inputs, *limits])


@writes("masked")
def _mask_and_scale(e: Export, node: Node, inputs: list[str]) -> str:
    kept = e.emit("Mul", [inputs[0], cast(e, inputs[1], node.specs[0].dtype)])
    return e.emit("Mul", [kept, like(e, node, node.attrs["scale"])])


# Shapes ---------------------------------------------------------------------------------------


@writes("reshape")
def _reshape(e: Export, node: Node, inputs: list[str]) -> str:
    sizes = node.attrs["shape"]
    unknown = [s for s in sizes if isinstance(s, Dim)]
    if len(unknown) == 1 and 0 not in sizes:
        target = e.ints([-1 if isinstance(s, Dim) else s for s in sizes])
        return e.emit("Reshape", [inputs[0], target])
    return e.emit("Reshape", [inputs[0], e.shape(sizes)], allowzero=1 if 0 in sizes else None)


@writes("expand_dims", "squeeze")
def _dims(e: Export, node: Node, inputs: list[str]) -> str:
    name = "Squeeze" if node.op.name == "squeeze" else "Unsqueeze"
    return e.emit(name, [inputs[0], e.ints(node.attrs["axes"])])


@writes("broadcast_to")
def _broadcast(e: Export, node: Node, inputs: list[str]) -> str:
    return e.emit("Expand", [inputs[0], e.shape(node.attrs["shape"])])


@writes("slice")
def _slice(e: Export, node: Node, inputs: list[str]) -> str:
    start, size, step = (node.attrs[key] for key in ("start", "size", "step"))
    axes = [
        i for i, n in enumerate(node.inputs[0].shape) if (start[i], size[i], step[i]) != (0, n, 1)
    ]
    starts = e.shape([start[i] for i in axes])
    ends = []
    for i in axes:
        end = start[i] + size[i] * step[i]
        if step[i] < 0 and not isinstance(end, Dim) and end < 0:
            end = -(1 << 62)  # before the first element
        elif step[i] < 0 and isinstance(end, Dim):
            raise Unwritable("a negative step along a size that is not known")
        ends.append(end)
    steps = e.ints([step[i] for i in axes])
    return e.emit("Slice", [inputs[0], starts, e.shape(ends), e.ints(axes), steps])


@writes("pad")
def _pad(e: Export, node: Node, inputs: list[str]) -> str:
    if any(step != 1 for step in node.attrs["step"]):
        raise Unwritable("elements apart from each other (the gradient of a slice with a step)")
    before = list(node.attrs["start"])
    sizes = zip(node.attrs["shape"], before, node.inputs[0].shape, strict=True)
    after = [whole - b - n for whole, b, n in sizes]
    value = like(e, node, node.attrs["value"])
    return e.emit("Pad", [inputs[0], e.shape([*before, *after]), value])


@writes("tril", "triu")
def _triangle(e: Export, node: Node, inputs: list[str]) -> str:
    k = e.constant(np.array(node.attrs["k"], np.int64))
    return e.emit("Trilu", [inputs[0], k], upper=int(node.op.name == "triu"))


@writes("fill")
def _fill(e: Export, node: Node, inputs: list[str]) -> str:
    value = e.constant(np.array(node.attrs["value"], node.specs[0].dtype))
    return e.emit("Expand", [value, e.shape(node.attrs["shape"])])


@writes("arange")
def _arange(e: Export, node: Node, inputs: list[str]) -> str:
    start, step, size = (node.attrs[key] for key in ("start", "step", "size"))
    dtype = node.specs[0].dtype
    if not any(isinstance(part, Dim) for part in (start, step, size)):
        return e.constant((np.arange(size) * step + start).astype(dtype))
    steps = e.emit("Range", [e.size(0), e.size(size), e.size(1)])
    return cast(e, e.emit("Add", [e.emit("Mul", [steps, e.size(step)]), e.size(start)]), dtype)


@writes("eye")
def _eye(e: Export, node: Node, inputs: list[str]) -> str:
    rows, columns = node.attrs["rows"], node.attrs["columns"]
    if isinstance(rows, Dim) or isinstance(columns, Dim):
        raise Unwritable("an identity matrix of a size that is not known")
    return e.constant(np.eye(rows, columns, node.attrs["k"], node.specs[0].dtype))


@writes("size_of")
def _size_of(e: Export, node: Node, inputs: list[str]) -> str:
    return cast(e, e.size(node.attrs["size"]), node.specs[0].dtype)


# Reductions and indexing ----------------------------------------------------------------------

_REDUCTIONS = {
    "sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin",
    "prod": "ReduceProd", "logsumexp": "ReduceLogSumExp",
}  # fmt: skip


@writes(*_REDUCTIONS)
def _reduce(e: Export, node: Node, inputs: list[str]) -> str:
    axis = node.attrs["axis"]
    keep = int(node.attrs.get("keepdims", True))
    x = inputs[0]
    if node.specs[0].dtype != node.inputs[0].dtype:
        x = cast(e, x, node.specs[0].dtype)
    axes = (axis,) if isinstance(axis, int) else axis
    if not axes:
        return e.emit("Identity", [x])
    return e.emit(_REDUCTIONS[node.op.name], [x, e.ints(axes)], keepdims=keep)


@writes("any", "all")
def _truth(e: Export, node: Node, inputs: list[str]) -> str:
    name = "ReduceMax" if node.op.name == "any" else "ReduceMin"
    if not node.attrs["axis"]:
        return cast(e, inputs[0], "bool")
    axes = e.ints(node.attrs["axis"])
    counted = cast(e, cast(e, inputs[0], "bool"), "int32")
    return cast(e, e.emit(name, [counted, axes], keepdims=int(node.attrs["keepdims"])), "bool")


@writes("var")
def _var(e: Export, node: Node, inputs: list[str]) -> str:
    axis = node.attrs["axis"]
    axes = e.ints(axis)
    about = e.emit("Sub", [inputs[0], e.emit("ReduceMean", [inputs[0], axes], keepdims=1)])
    squares = e.emit("Mul", [about, about])
    keep = int(node.attrs["keepdims"])
    correction = node.attrs["correction"]
    if correction == 0:
        return e.emit("ReduceMean", [squares, axes], keepdims=keep)
    total = e.emit("ReduceSum", [squares, axes], keepdims=keep)
    count: Any = 1
    for i in axis:
        count = count * node.inputs[0].shape[i]
    count = cast(e, e.size(count), node.specs[0].dtype)
    return e.emit("Div", [total, e.emit("Sub", [count, like(e, node, correction)])])


@writes("argmax", "argmin")
def _extremum(e: Export, node: Node, inputs: list[str]) -> str:
    name = "ArgMax" if node.op.name == "argmax" else "ArgMin"
    axis, keep = node.attrs["axis"], bool(node.attrs["keepdims"])
    if axis is not None:
        return e.emit(name, inputs, axis=axis, keepdims=int(keep))
    flat = e.emit("Reshape", [inputs[0], e.ints([-1])])
    found = e.emit(name, [flat], axis=0, keepdims=0)
    ones = [1] * len(node.inputs[0].shape)
    return e.emit("Reshape", [found, e.ints(ones)]) if keep else found


@writes("cumsum")
def _cumsum(e: Export, node: Node, inputs: list[str]) -> str:
    x = inputs[0]
    if node.specs[0].dtype != node.inputs[0].dtype:
        x = cast(e, x, node.specs[0].dtype)
    axis = e.constant(np.array(node.attrs["axis"], np.int64))
    return e.emit("CumSum", [x, axis], reverse=int(node.attrs.get("reverse", False)))


@writes("top_k")
def _top_k(e: Export, node: Node, inputs: list[str]) -> list[str]:
    attributes = {key: int(node.attrs[key]) for key in ("axis", "largest", "sorted")}
    return e.emit_many("TopK", [inputs[0], e.ints([node.attrs["k"]])], 2, **attributes)


@writes("one_hot")
def _one_hot(e: Export, node: Node, inputs: list[str]) -> str:
    dtype = node.specs[0].dtype
    values = e.constant(np.array([0, 1], np.int32 if dtype.kind == "b" else dtype))
    hot = e.emit("OneHot", [inputs[0], e.size(node.attrs["depth"]), values], axis=-1)
    return cast(e, hot, dtype) if dtype.kind == "b" else hot
