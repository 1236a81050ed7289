"""Control flow: If, Loop and Scan as `cond` and `scan`.

This works if every value in a body is a tensor whose shape does not change. Otherwise the node runs
on the host, and its body is a program (see host_control_flow.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.errors import GraphflowError
from graphflow.frontend import control_flow as control
from graphflow.ir.op import Tensor
from graphflow.onnx.loading.reading.value_kinds import Known, Value, make_known
from graphflow.onnx.loading.translation.node_call import NodeCall, RunOnHost, Signal
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.ops.tensors.creation import arange
from graphflow.ops.tensors.shape import moveaxis, squeeze
from graphflow.ops.tensors.slicing import flip

MOST_ITERATIONS = 1 << 20
"""The longest loop inside a graph; longer ones run on the host, where a deadline ends them."""


def _tensors(values: Sequence[Value | None]) -> list[Tensor]:
    """Convert the results of a body to tensors. Signals RunOnHost if one is none."""
    if not all(isinstance(v, Tensor | Known) for v in values):
        raise RunOnHost("an output of its body is not a tensor")
    return [v.tensor() if isinstance(v, Known) else v for v in values]  # type: ignore[misc]


def _try_build(build: Callable[[], Outputs], otherwise: str) -> Outputs:
    """Call `build`. Signals RunOnHost if a body cannot be part of a graph."""
    try:
        return build()
    except (Signal, GraphflowError) as error:
        raise RunOnHost(f"{otherwise}: {error}") from error


@operator("If")
def _if(call: NodeCall) -> Outputs:
    """Translate an If: inline the branch of a known condition, else build a `cond`.

    If the branches have different shapes, the model is specialised by the value of the condition.
    """
    condition = call.value(0)
    if not isinstance(condition, Tensor) or condition.ndim > 1:
        holds = bool(call.known_array(0).reshape(-1)[0])
        return call.inline("then_branch" if holds else "else_branch", [])
    pred = squeeze(condition) if condition.ndim else condition
    try:
        chosen = control.cond(
            pred,
            lambda: _tensors(call.inline("then_branch", [])),
            lambda: _tensors(call.inline("else_branch", [])),
        )
    except (Signal, GraphflowError):
        holds = bool(call.known_array(0).reshape(-1)[0])
        return call.inline("then_branch" if holds else "else_branch", [])
    return list(chosen)


@operator("Loop")
def _loop(call: NodeCall) -> Outputs:
    """Translate a Loop of known length whose condition stays true; run others on the host."""
    return _try_build(lambda: _build_loop(call), "Loop: its body is run once per iteration")


def _build_loop(call: NodeCall) -> Outputs:
    count = int(call.scalar(0)) if call.has(0) else MOST_ITERATIONS + 1
    if not 0 < count <= MOST_ITERATIONS:
        raise RunOnHost("its number of iterations is not known, or out of range")
    if call.has(1) and not bool(call.scalar(1)):
        raise RunOnHost("it begins with a false condition")
    state = [call.tensor(i) for i in range(2, len(call.values))]

    def body(carry: Any, index: Any) -> Any:
        results = call.inline("body", [index, make_known(np.array(True)), *carry])
        if not isinstance(results[0], Known) or not bool(results[0].array.reshape(-1)[0]):
            raise RunOnHost("its condition is computed")
        tensors = _tensors(results[1:])
        return tensors[: len(state)], tensors[len(state) :]

    carry, stacked = control.scan(body, state, arange(count))
    return [*carry, *stacked]


@operator("Scan", since=9)
def _scan(call: NodeCall) -> Outputs:
    """Translate a Scan: scanned inputs are last, and each has an axis and a direction."""
    return _try_build(lambda: _build_scan(call), "Scan: its body is run once per step")


def _build_scan(call: NodeCall) -> Outputs:
    scanned = call.required_attr("num_scan_inputs")
    tensors = call.tensors()
    state, rows = tensors[: len(tensors) - scanned], tensors[len(tensors) - scanned :]
    axes = call.attr("scan_input_axes", [0] * scanned)
    backward = call.attr("scan_input_directions", [0] * scanned)
    rows = [
        _reverse_if(moveaxis(x, axis, 0), back)
        for x, axis, back in zip(rows, axes, backward, strict=True)
    ]

    def body(carry: Any, now: Any) -> Any:
        made = _tensors(call.inline("body", [*carry, *now]))
        return made[: len(state)], made[len(state) :]

    carry, stacked = control.scan(body, state, rows)
    axes = call.attr("scan_output_axes", [0] * len(stacked))
    backward = call.attr("scan_output_directions", [0] * len(stacked))
    outputs = [
        moveaxis(_reverse_if(y, back), 0, axis)
        for y, axis, back in zip(stacked, axes, backward, strict=True)
    ]
    return [*carry, *outputs]


def _reverse_if(x: Tensor, back: int) -> Tensor:
    return flip(x, 0) if back else x


@operator("Scan", since=8)
def _scan_8(call: NodeCall) -> Outputs:
    raise RunOnHost("Scan of opset 8, with lengths for each of a batch, runs on the host")
