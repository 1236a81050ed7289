"""Control flow on the host: each body is a program, run once per iteration under the deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TypeProto

from graphflow.errors import OnnxError
from graphflow.onnx.loading.host.host_nodes import HostNode, HostRun, host_routine
from graphflow.onnx.loading.reading.value_kinds import Array, onnx_dtype


def _subgraph(run: HostRun, node: HostNode, name: str) -> Any:
    graph = node.attr(name)
    if graph is None:
        raise OnnxError(f"{node.label}: attribute {name!r} is missing")
    for attribute in node.proto.attribute:
        if attribute.name == name:
            graph = attribute.g
    return run.program_for(graph, run.importer.subgraph(graph, node.opsets))


@host_routine("If")
def _if(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    branch = "then_branch" if bool(np.asarray(inputs[0]).item()) else "else_branch"
    return _subgraph(run, node, branch).run(run, outer)


@host_routine("Loop")
def _loop(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    body = _subgraph(run, node, "body")
    most = None if inputs[0] is None else int(np.asarray(inputs[0]).item())
    go = True if len(inputs) < 2 or inputs[1] is None else bool(np.asarray(inputs[1]).item())
    state = list(inputs[2:])
    names = body.body.inputs
    scanned: list[list[Any]] = [[] for _ in range(len(body.body.outputs) - 1 - len(state))]
    step = 0
    while go and (most is None or step < most):
        run.check(f"{node.label}, iteration {step + 1}")
        values = [np.array(step, np.int64), np.array(go), *state]
        given = dict(zip(names, values, strict=False))
        results = body.run(run, {**outer, **given})
        go = bool(np.asarray(results[0]).item())
        state = results[1 : 1 + len(state)]
        for rows, row in zip(scanned, results[1 + len(state) :], strict=True):
            rows.append(row)
        step += 1
    types = _types(node, 1 + len(state))
    return [*state, *map(_stack_rows, scanned, types)]


def _stack_rows(rows: list[Array], kind: TypeProto) -> Array:
    """Stack the outputs of iterations; without iterations, return an empty array of `kind`."""
    if rows:
        return np.stack(rows)
    sizes = [max(dim.dim_value, 0) for dim in kind.tensor_type.shape.dim]
    return np.zeros((0, *sizes), onnx_dtype(kind.tensor_type.elem_type) or np.float32)


def _types(node: HostNode, skip: int) -> list[TypeProto]:
    """Return the types of a body's outputs after the first `skip`."""
    return [output.type for output in node.attr("body").output][skip:]


@host_routine("Scan")
def _scan(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    """Run a Scan of opset 9 or later: scanned inputs are last; each has an axis and a direction."""
    body = _subgraph(run, node, "body")
    if node.version < 9:
        return _scan_8(run, node, inputs, outer, body)
    count = node.attr("num_scan_inputs")
    state, scanned = list(inputs[: len(inputs) - count]), list(inputs[len(inputs) - count :])
    axes = node.attr("scan_input_axes") or [0] * count
    backward = node.attr("scan_input_directions") or [0] * count
    rows = [
        np.moveaxis(x, axis, 0)[:: -1 if back else 1]
        for x, axis, back in zip(scanned, axes, backward, strict=True)
    ]
    results = _run_scan(run, node, body, state, rows, outer)
    outputs = len(body.body.outputs) - len(state)
    axes = node.attr("scan_output_axes") or [0] * outputs
    backward = node.attr("scan_output_directions") or [0] * outputs
    last = [
        np.moveaxis(x[:: -1 if back else 1], 0, axis)
        for x, axis, back in zip(results[len(state) :], axes, backward, strict=True)
    ]
    return [*results[: len(state)], *last]


def _scan_8(
    run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any], body: Any
) -> Any:
    """Run a Scan of opset 8: the first axis is the batch, and input 0 holds sequence lengths."""
    count = node.attr("num_scan_inputs")
    values = list(inputs[1:])
    batches = []
    for b in range(values[0].shape[0]):
        one = [x[b] for x in values]
        rows = one[len(one) - count :]
        if inputs[0] is not None:
            rows = [x[: int(inputs[0][b])] for x in rows]
        batches.append(_run_scan(run, node, body, one[: len(one) - count], rows, outer))
    return [np.stack(parts) for parts in zip(*batches, strict=True)]


def _run_scan(
    run: HostRun,
    node: HostNode,
    body: Any,
    state: list[Any],
    rows: list[Any],
    outer: Mapping[str, Any],
) -> list[Any]:
    collected: list[list[Any]] = [[] for _ in range(len(body.body.outputs) - len(state))]
    kept = len(state)
    for step in range(len(rows[0])):
        run.check(f"{node.label}, step {step + 1}")
        now = [np.array(x[step], order="C") for x in rows]
        given = dict(zip(body.body.inputs, [*state, *now], strict=True))
        results = body.run(run, {**outer, **given})
        state = results[:kept]
        for made, row in zip(collected, results[kept:], strict=True):
            made.append(row)
    return [*state, *map(_stack_rows, collected, _types(node, kept))]


@host_routine("SequenceMap")
def _map(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    """Apply the body to the elements of the first sequence, and of further ones in parallel."""
    body = _subgraph(run, node, "body")
    made: list[list[Any]] = [[] for _ in body.body.outputs]
    for i in range(len(inputs[0])):
        run.check(f"{node.label}, element {i + 1}")
        now = [x[i] if isinstance(x, list) else x for x in inputs]
        given = dict(zip(body.body.inputs, now, strict=True))
        for items, item in zip(made, body.run(run, {**outer, **given}), strict=True):
            items.append(item)
    return made
