"""Rows in use: tensors with room for more rows than a step fills, of which only some are computed.

An update of a table's rows has room for as many rows as there are lookups. Ids repeat, so a step
fills fewer of them, and counts them. A reader that takes this count (`Op.counted`) reads only so
many rows. So the ops before it need not compute the others:

    merge_keys → rows, number        update_rows(table, rows, values, number) reads `number` rows
    old = take(table, rows), values = old - rate * gradient: both compute `number` rows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil

from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec, broadcast_shapes, evaluate
from graphflow.ops.communication.send_recv import expected_rows

Specs = Mapping[Tensor, TensorSpec]
RowsInUse = Mapping[Tensor, Tensor]
"""The number of rows in use, a scalar, of each tensor whose other rows nothing reads."""


def find_rows_in_use(graph: Graph, specs: Specs) -> RowsInUse:
    """Return the tensors of which only the first rows are read, with the number of these rows.

    The number is known before the tensor is computed.

    Args:
        specs: concrete spec of each tensor.
    """
    counts = (n.op.counted(len(n.inputs)) for n in graph.nodes if n.op.counted)
    if not any(counts):
        return {}
    position = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[Tensor, Tensor | None] = dict.fromkeys(graph.outputs)
    for node in reversed(graph.nodes):
        for tensor in node.outputs:
            number = found.get(tensor)
            if number is not None and position[number.node] >= position[node]:
                found[tensor] = None
        counted = node.op.counted(len(node.inputs)) if node.op.counted else {}
        numbers = {found.get(tensor) for tensor in node.outputs}
        number = numbers.pop() if len(numbers) == 1 else None
        aligned = () if number is None else aligned_inputs(node, specs)
        for i, tensor in enumerate(node.inputs):
            here = node.inputs[counted[i]] if i in counted else number if i in aligned else None
            if found.setdefault(tensor, here) is not here:
                found[tensor] = None
    return {tensor: number for tensor, number in found.items() if number is not None}


def aligned_inputs(node: Node, specs: Specs) -> tuple[int, ...]:
    """Return the inputs whose first n rows, with all of the other inputs, are enough for the first
    n rows of the outputs."""
    op = node.op
    if op.leading is not None:
        return op.leading(**node.attrs) or ()
    shapes = [specs[t].shape for t in node.inputs]
    shape = specs[node.outputs[0]].shape
    if op.refuse is not None or not shape:
        return ()
    if op.alias:
        return (0,) if shapes[0][:1] == shape[:1] else ()
    if op.elementwise:
        rank = len(shape)
        return tuple(i for i, s in enumerate(shapes) if len(s) == rank and s[0] == shape[0])
    if op.rows is None:
        return ()
    form = op.rows(*shapes, **node.attrs)
    whole = form.whole or broadcast_shapes(*form.shapes)
    if 0 in (form.axes or ()) or whole[0] != shape[0]:
        return ()
    views = zip(shapes, form.shapes, strict=True)
    rows = (len(v) == len(whole) and s[:1] == v[:1] == whole[:1] for s, v in views)
    return tuple(i for i, aligned in enumerate(rows) if aligned)


def has_counting_readers(tensor: Tensor, readers: Iterable[Node]) -> bool:
    """Return True if there are readers, and each reads only as many rows of a tensor as it is
    told."""
    reads = [(n, i) for n in readers for i, each in enumerate(n.inputs) if each is tensor]
    return bool(reads) and all(
        node.op.counted is not None and i in node.op.counted(len(node.inputs)) for node, i in reads
    )


def expected_specs(
    graph: Graph, specs: Specs, bindings: Mapping[str, int]
) -> dict[Tensor, TensorSpec]:
    """Return the specs of tensors that have rows in use, with as many rows as may be expected.

    Nobody knows the ids of a step before it is fed. So all rows of a table count as equally likely.

    Args:
        specs: concrete spec of each tensor.
        bindings: sizes of symbols.
    """
    used = find_rows_in_use(graph, specs)
    expected: dict[Tensor, float] = {}
    for node in graph.of_op("update_rows") if used else ():
        table, room = (int(specs[t].shape[0]) for t in node.inputs[:2])
        expected[node.inputs[3]] = expected_rows(room, table, table)
    for node in graph.of_op("used_rows") if used else ():
        lookups = evaluate(node.attrs["lookups"], bindings)
        number = node.inputs[1]
        expected[number] = expected_rows(lookups, node.attrs["rows"], node.attrs["piece"])
    made = {}
    for tensor, number in used.items():
        first, *rest = specs[tensor].shape
        rows = min(int(first), ceil(expected.get(number, int(first))))
        made[tensor] = specs[tensor].with_shape((rows, *rest))
    return made


__all__ = [
    "RowsInUse", "aligned_inputs", "expected_specs", "find_rows_in_use", "has_counting_readers",
]  # fmt: skip
