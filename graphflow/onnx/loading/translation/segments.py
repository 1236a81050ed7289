"""Data types of the import: bodies and scopes (input), segments of graphs (output)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import OnnxError
from graphflow.ir.op import Tensor
from graphflow.onnx.loading.reading.value_kinds import Array, Fixed, Known, Value


@dataclass(frozen=True)
class OnnxBody:
    """A list of nodes with the names of its inputs and outputs: a graph, subgraph or function."""

    nodes: Sequence[NodeProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opsets: Mapping[str, int]
    initializers: Mapping[str, Value] = field(default_factory=dict)
    defaults: Mapping[str, AttributeProto] = field(default_factory=dict)  # of a function
    main: bool = False  # the model's own graph


@dataclass
class Scope:
    """The values of names while nodes are read, and the opsets of these nodes."""

    values: dict[str, Value]
    opsets: Mapping[str, int]
    outer: Scope | None = None
    main: bool = False  # the model's own graph, whose names are those of weights

    def find(self, name: str) -> Value | None:
        """Return the value of a name in this scope or an outer one; None if there is none."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        return None


@dataclass(frozen=True)
class Stop:
    """The reason why a pass ended before the last node.

    Attributes:
        kind: "host" (the node runs on the host), "value" (a computed value decides shapes), "input"
            (an input of the segment decides shapes), "shapes" (symbolic sizes must be known) or
            "rank" (an input has no rank).
        index: the node at which the pass ended.
        why: the reason, for messages.
        name: the value that decides shapes.
        fed: integer inputs that decide shapes; `load(values=…)` for them may avoid the stop.
        sized: True if `load(shapes=…)` may avoid the stop.
    """

    kind: str
    index: int
    why: str
    name: str = ""
    fed: tuple[str, ...] = ()
    sized: bool = False


FetchPlan = tuple[dict[str, Tensor], dict[str, Tensor]]
"""The tensors to fetch from a segment's graph, and the placeholders to feed, by name."""


@dataclass
class ImportedSegment:
    """The graph of the nodes from `start` to `stop`."""

    start: int
    inputs: dict[str, Tensor]  # placeholders
    values: dict[str, Value]  # of names where the pass ended
    stop: Stop | None
    given: dict[str, Value]  # of names where the pass began
    children: dict[Any, ImportedSegment] = field(default_factory=dict)
    plan: FetchPlan | None = None


def captured_names(node: NodeProto) -> list[str]:
    """Return the names that the subgraphs of a node read from outside."""
    names: dict[str, None] = {}
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            names.update(dict.fromkeys(_free_names(attribute.g)))
    return list(names)


def _free_names(graph: GraphProto) -> Iterator[str]:
    inside = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    for node in graph.node:
        yield from (n for n in [*node.input, *captured_names(node)] if n and n not in inside)
        inside.update(node.output)
    yield from (o.name for o in graph.output if o.name not in inside)


def concrete_value(value: Value) -> Any:
    """Return the plain value of a known or fixed value."""
    if isinstance(value, Known):
        return value.array
    if isinstance(value, Fixed):
        return value.value
    raise OnnxError(f"{value!r} is not known before the model runs")


def known_array(array: Array, parameter: str | None = None) -> Known:
    """Wrap an array as a known value, contiguous; `parameter` marks a weight."""
    return Known(np.ascontiguousarray(array).reshape(array.shape), array.dtype, parameter)
