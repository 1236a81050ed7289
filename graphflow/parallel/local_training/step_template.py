"""The training step of one replica, which all replicas and turns copy.

graph ─for one device→       the graph itself
      ─inner strategy→       a graph of shards for the devices of one replica
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.ir.spec import Span
from graphflow.parallel.mesh.layouts import CommunicationRecord, Layout, whole
from graphflow.parallel.sharding.emission.sharded_graph import FeedSlice
from graphflow.passes import MergeBodies
from graphflow.placement.clusters.cluster import Cluster


@dataclass(frozen=True)
class TemplateVariable:
    """The variables of one replica that stand for one of the user's.

    Attributes:
        nodes: the variable of each device of the replica.
        spans: which part of the whole each one has, axis by axis.
        layout: the layout of the whole variable over the devices of the replica.
    """

    nodes: tuple[Node, ...]
    spans: tuple[tuple[Span, ...], ...]
    layout: Layout


@dataclass(frozen=True, eq=False)
class StepTemplate:
    """The training step of one replica.

    Attributes:
        source: the user's graph.
        graph: the graph of one replica. Output i stands for output i of the user's graph.
        devices: the devices of the first replica.
        mesh: the sizes of the mesh over which the devices of a replica share the step; empty for
            one device.
        sizes: the same, with the micro-batches that a device runs one after the other.
        variables: the variables of the replica, for each of the user's.
        shares: which part of the user's placeholder each placeholder is fed.
        symbols: the mesh axes that split each symbolic size within the replica.
        records: the collectives within the replica.
    """

    source: Graph
    graph: Graph
    devices: tuple[DeviceName, ...]
    mesh: Mapping[str, int]
    sizes: Mapping[str, int]
    variables: Mapping[Node, TemplateVariable]
    shares: Mapping[Node, FeedSlice] = field(default_factory=dict)
    symbols: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    records: tuple[CommunicationRecord, ...] = ()


def build_template(
    graph: Graph, inner: Any, devices: Sequence[DeviceName], cluster: Cluster
) -> StepTemplate:
    """Return the training step of one replica.

    Args:
        graph: the graph as the user built it, with gradients and updates.
        inner: the strategy by which the devices of a replica share the step; None for one device.
        devices: the devices of the first replica.
        cluster: the cluster.

    Raises:
        ShardingError: the inner strategy refuses the graph.
    """
    if inner is None:
        graph = MergeBodies()(graph) if graph.holders else graph
        variables = {node: whole_variable(node) for node in graph.variables}
        return StepTemplate(graph, graph, tuple(devices), {}, {}, variables)
    placed = replace(inner, devices=[str(device) for device in devices])
    division = placed.divide(graph, cluster)
    return StepTemplate(
        division.source,
        division.graph,
        tuple(devices),
        dict(inner.mesh),
        division.mesh.sizes,
        {
            node: TemplateVariable(
                tuple(dict.fromkeys(pieces.nodes)),
                tuple(dict(zip(pieces.nodes, pieces.spans, strict=True)).values()),
                pieces.layout,
            )
            for node, pieces in division.variables.items()
        },
        division.shares,
        division.partitioner.symbols,
        division.records,
    )


def whole_variable(node: Node, devices: int = 1) -> TemplateVariable:
    """Return a variable that each device of a replica has in full."""
    spans = tuple(Span(0, int(size)) for size in node.specs[0].shape)
    return TemplateVariable((node,) * devices, (spans,) * devices, whole(len(spans)))


__all__ = ["StepTemplate", "TemplateVariable", "build_template", "whole_variable"]
