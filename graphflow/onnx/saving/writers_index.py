"""Writers of ONNX nodes: flat indices, scatters, sorts, vector norms, rotary embeddings."""

from __future__ import annotations

import math

import numpy as np

from graphflow.ir.op import Node
from graphflow.ir.spec import Size, product
from graphflow.onnx.saving.export import Export, Unwritable, writes
from graphflow.onnx.saving.writers import as_int64, cast, like


def _normalize_indices(e: Export, index: str, size: Size) -> str:
    """Add the size to negative indices, which count from the end."""
    zero, n = e.size(0), e.size(size)
    return e.emit("Where", [e.emit("Less", [index, zero]), e.emit("Add", [index, n]), index])


@writes("flat_rows")
def _flat_rows(e: Export, node: Node, inputs: list[str]) -> str:
    sizes, batch = node.attrs["sizes"], node.attrs["batch_dims"]
    indices = as_int64(e, node, inputs[0], 0)
    shape = node.specs[0].shape
    numbers = e.emit("Range", [e.size(0), e.size(product(sizes[:batch])), e.size(1)])
    alone = (*shape[:batch], *(1,) * (len(shape) - batch))
    numbers = e.emit("Reshape", [numbers, e.shape(alone)])
    numbers = e.emit("Expand", [numbers, e.shape(shape)])
    for i, n in enumerate(sizes[batch:]):
        column = _normalize_indices(e, e.emit("Gather", [indices, e.size(i)], axis=-1), n)
        numbers = e.emit("Add", [e.emit("Mul", [numbers, e.size(n)]), column])
    return numbers


@writes("flat_elements")
def _flat_elements(e: Export, node: Node, inputs: list[str]) -> str:
    shape, axis = node.attrs["shape"], node.attrs["axis"]
    numbers = _normalize_indices(e, as_int64(e, node, inputs[0], 0), shape[axis])
    numbers = e.emit("Mul", [numbers, e.size(product(shape[axis + 1 :]))])
    rank = len(shape)
    for i, n in enumerate(node.inputs[0].shape):
        if i != axis:
            steps = e.emit("Range", [e.size(0), e.size(n), e.size(1)])
            steps = e.emit("Mul", [steps, e.size(product(shape[i + 1 :]))])
            others = e.ints([k for k in range(rank) if k != i])
            numbers = e.emit("Add", [numbers, e.emit("Unsqueeze", [steps, others])])
    return numbers


@writes("scatter_add")
def _scatter_add(e: Export, node: Node, inputs: list[str]) -> str:
    axis, rank = node.attrs["axis"], node.inputs[0].ndim
    x, indices, updates = inputs
    moved, places = rank - 1, node.inputs[1].ndim
    before = [axis, *(i for i in range(rank) if i != axis)]
    if axis:
        x = e.emit("Transpose", [x], perm=before)
        inside = range(axis, axis + places)
        others = (i for i in range(moved + places) if i not in inside)
        updates = e.emit("Transpose", [updates], perm=[*inside, *others])
    result = _scatter_nd(e, x, as_int64(e, node, indices, 1), updates, "add")
    return e.emit("Transpose", [result], perm=np.argsort(before).tolist()) if axis else result


@writes("scatter_rows")
def _scatter_rows(e: Export, node: Node, inputs: list[str]) -> str:
    x, rows, updates = inputs
    axes, shape = node.attrs.get("axes", 1), node.inputs[0].shape
    if axes != 1:
        x = e.emit("Reshape", [x, e.shape((product(shape[:axes]), *shape[axes:]))])
    rows = as_int64(e, node, rows, 1)
    result = _scatter_nd(e, x, rows, updates, node.attrs["reduction"])
    return e.emit("Reshape", [result, e.shape(shape)]) if axes != 1 else result


def _scatter_nd(e: Export, x: str, rows: str, updates: str, reduction: str) -> str:
    places = e.emit("Unsqueeze", [rows, e.ints([-1])])
    return e.emit("ScatterND", [x, places, updates], reduction=reduction)


@writes("sort", "argsort")
def _sort(e: Export, node: Node, inputs: list[str]) -> str:
    axis = node.attrs["axis"]
    count = e.shape([node.inputs[0].shape[axis]])
    largest = int(node.attrs["descending"])
    x, dtype = inputs[0], node.inputs[0].dtype
    x = cast(e, x, "int32") if dtype.kind == "b" else x
    ordered, places = e.emit_many("TopK", [x, count], 2, axis=axis, largest=largest)
    if node.op.name == "argsort":
        return places
    return cast(e, ordered, dtype) if dtype.kind == "b" else ordered


@writes("vector_norm")
def _vector_norm(e: Export, node: Node, inputs: list[str]) -> str:
    order, keep = node.attrs["ord"], int(node.attrs["keepdims"])
    if node.inputs[0].dtype.kind == "c":
        raise Unwritable("the norm of complex numbers")
    if not node.attrs["axis"]:
        raise Unwritable("a norm along no axis")
    axes = e.ints(node.attrs["axis"])
    if order in (1.0, 2.0):
        return e.emit(f"ReduceL{order:.0f}", [inputs[0], axes], keepdims=keep)
    sizes = e.emit("Abs", inputs)
    if math.isinf(order):
        name = "ReduceMax" if order > 0 else "ReduceMin"
        return e.emit(name, [sizes, axes], keepdims=keep)
    if order == 0.0:
        there = cast(e, e.emit("Greater", [sizes, like(e, node, 0)]), node.specs[0].dtype)
        return e.emit("ReduceSum", [there, axes], keepdims=keep)
    powers = e.emit("Pow", [sizes, like(e, node, order)])
    total = e.emit("ReduceSum", [powers, axes], keepdims=keep)
    return e.emit("Pow", [total, like(e, node, 1 / order)])


@writes("rotate_pairs")
def _rotate_pairs(e: Export, node: Node, inputs: list[str]) -> str:
    x, cos, sin = inputs
    rank, pairs = node.inputs[0].ndim, int(node.inputs[1].shape[-1])
    last = e.ints([-1])

    def part(first: int, stop: int, step: int = 1) -> str:
        bounds = [e.ints([first]), e.ints([stop])]
        return e.emit("Slice", [x, *bounds, last, e.ints([step])])

    among = node.attrs["interleaved"]
    a = part(0, 2 * pairs, 2) if among else part(0, pairs)
    b = part(1, 2 * pairs, 2) if among else part(pairs, 2 * pairs)
    new = [
        e.emit("Sub", [e.emit("Mul", [a, cos]), e.emit("Mul", [b, sin])]),
        e.emit("Add", [e.emit("Mul", [b, cos]), e.emit("Mul", [a, sin])]),
    ]
    if among:
        columns = [e.emit("Unsqueeze", [each, last]) for each in new]
        flat = e.ints([*[0] * (rank - 1), 2 * pairs])
        new = [e.emit("Reshape", [e.emit("Concat", columns, axis=-1), flat])]
    if 2 * pairs != node.inputs[0].shape[-1]:
        new.append(part(2 * pairs, np.iinfo(np.int64).max))
    return e.emit("Concat", new, axis=-1)
