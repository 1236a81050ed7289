"""Data of the import: bodies and scopes that are read, and the segments of graph that come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import OnnxError
from graphflow.ir.op import Tensor
from graphflow.onnx.loading.value_kinds import Array, Fixed, Known, Value


@dataclass(frozen=True)
class OnnxBody:
    """A list of nodes with names for what goes in and out: a graph, a subgraph or a function."""

    nodes: Sequence[NodeProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opsets: Mapping[str, int]
    initializers: Mapping[str, Value] = field(default_factory=dict)
    defaults: Mapping[str, AttributeProto] = field(default_factory=dict)  # of a function
    main: bool = False  # the model's own graph


@dataclass
class Scope:
    """Names in force while nodes are read, and the opsets they are meant in."""

    values: dict[str, Value]
    opsets: Mapping[str, int]
    outer: Scope | None = None
    main: bool = False  # of the model's own graph, whose names are those of the weights

    def find(self, name: str) -> Value | None:
        """What a name stands for, here or further out."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.outer
        return None


@dataclass(frozen=True)
class Stop:
    """Why a pass ended before the last node.

    kind: "host" (the node runs on the host), "value" (a computed value decides shapes), "input"
    (the same for an input of the segment), "shapes" (symbolic sizes would have to be known), "rank"
    (an input has none).
    fed: inputs of ints whose values decide, so that giving them may avoid the stop.
    sized: whether giving sizes may avoid the stop.
    """

    kind: str
    index: int
    why: str
    name: str = ""
    fed: tuple[str, ...] = ()
    sized: bool = False


FetchPlan = tuple[dict[str, Tensor], dict[str, Tensor]]
"""What a graph is run for, and the placeholders that are fed to it, by name."""


@dataclass
class ImportedSegment:
    """A graph made of the nodes from `start` to `stop`."""

    start: int
    inputs: dict[str, Tensor]  # placeholders
    values: dict[str, Value]  # what names stand for where the pass ended
    stop: Stop | None
    given: dict[str, Value]  # what names stood for where the pass began
    children: dict[Any, ImportedSegment] = field(default_factory=dict)
    plan: FetchPlan | None = None


def captured_names(node: NodeProto) -> list[str]:
    """Names that the subgraphs of a node read from outside."""
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
    """The value of something known."""
    if isinstance(value, Known):
        return value.array
    if isinstance(value, Fixed):
        return value.value
    raise OnnxError(f"{value!r} is not known before the model runs")


def known_array(array: Array, parameter: str | None = None) -> Known:
    return Known(np.ascontiguousarray(array).reshape(array.shape), array.dtype, parameter)
