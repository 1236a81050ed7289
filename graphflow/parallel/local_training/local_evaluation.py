"""Graphs that do not train, for variables of which each replica has a value of its own.

They run on the devices of the first replica, with the mean of each variable over replicas. All
copies of a variable get what they assign to it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor, origin_scope
from graphflow.ir.spec import is_inexact
from graphflow.parallel.data import Data
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import CommunicationRecord, SentTensor
from graphflow.parallel.pipelining.stage_report import REPLICATED_OPS
from graphflow.parallel.resharding.communication_log import CommunicationLog, user_name
from graphflow.parallel.resharding.shard_builder import ShardBuilder
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.placement.clusters.cluster import Cluster


def divide_evaluation(
    graph: Graph,
    inner: Any,
    owners: Sequence[DeviceName],
    replicas: int,
    cluster: Cluster,
    known: Mapping[Node, ShardedVariable],
    equal: Container[Node],
) -> ShardedGraph:
    """Return a graph that does not train, for the devices of the first replica.

    Args:
        graph: the graph.
        inner: the strategy of the devices within a replica; None for one device.
        owners: the devices of all replicas, those of a replica next to each other.
        replicas: the number of replicas.
        cluster: the cluster.
        known: the shards of variables that exist already.
        equal: variables that all replicas have the same values of by now.
    """
    places = len(owners) // replicas
    strategy = Data(1) if inner is None else inner
    placed = replace(strategy, devices=[str(device) for device in owners[:places]])
    own = {v: pieces for v, pieces in known.items() if v in graph.names}
    firsts = {
        v: replace(
            pieces, nodes=pieces.nodes[:places], spans=pieces.spans[:places],
            mesh=placed.mesh, independent=False,
        )
        for v, pieces in own.items()
    }  # fmt: skip
    division: ShardedGraph = placed.divide(graph, cluster, firsts)
    builder = ShardBuilder(Mesh({"replica": replicas}, owners[::places]), division.partitioner)
    means: dict[Tensor, Tensor] = {}
    fetched: list[CommunicationRecord] = []
    for variable, pieces in own.items():
        if pieces.independent and variable not in equal and is_inexact(variable.specs[0].dtype):
            for place in dict.fromkeys(range(places)):
                copies = [node.outputs[0] for node in pieces.nodes[place::places]]
                log = CommunicationLog(builder, variable, user_name(variable), fetched)
                log("fetch", ("replica",), _sent_bytes(copies, owners[place::places]))
                with origin_scope(variable, "mean/", owners[place]):
                    means[copies[0]] = reduce(add, copies) * (1.0 / replicas)

    def read_mean(node: Node, inputs: tuple[Tensor, ...]) -> list[Tensor] | None:
        kept = int(node.op.name == "assign")  # the variable itself is its first input
        if means.keys().isdisjoint(inputs[kept:]):
            return None
        changed = (*inputs[:kept], *(means.get(t, t) for t in inputs[kept:]))
        return [*node.with_inputs(changed).outputs]

    changed = division.map_graph(lambda every: every.rewrite(read_mean))
    outputs = [means.get(t, t) for t in changed.graph.outputs]
    copies = _assign_other_copies(changed.graph, own, places, builder, fetched)
    if copies:
        with origin_scope(copies[0].node, "", DeviceName()):
            outputs.append(REGISTRY["group"](*copies, name="copies"))
    return replace(
        changed,
        graph=Graph(outputs).verify(),
        variables={**changed.variables, **own},
        fetched=(*changed.fetched, *fetched),
    )


def _assign_other_copies(
    graph: Graph,
    known: Mapping[Node, ShardedVariable],
    places: int,
    builder: ShardBuilder,
    fetched: list[CommunicationRecord],
) -> list[Tensor]:
    """Write the assignments of other replicas' copies of what a graph assigns at the first."""
    others = {
        first: (variable, pieces.nodes[place + places :: places])
        for variable, pieces in known.items()
        for place, first in enumerate(pieces.nodes[:places])
    }
    found: list[Tensor] = []
    for node in graph.of_op("assign"):
        variable, copies = others.get(node.inputs[0].node, (node, ()))
        value = node.inputs[1]
        sent: dict[SentTensor, float] = {}
        for copy in copies:
            with origin_scope(variable, "copies/", copy.device):
                found.append(REGISTRY["assign"](copy.outputs[0], value))
            if copy.device != value.node.device and value.node.op.name not in REPLICATED_OPS:
                sent[value, copy.device] = float(value.spec.nbytes)
        log = CommunicationLog(builder, variable, user_name(variable), fetched)
        log("fetch", ("replica",), sent)
    return found


def _sent_bytes(copies: Sequence[Tensor], owners: Sequence[DeviceName]) -> dict[SentTensor, float]:
    """Return the bytes of copies that other devices send to the first."""
    return {
        (copy, owners[0]): float(copy.spec.nbytes)
        for copy, owner in zip(copies, owners, strict=True)
        if owner != owners[0]
    }


__all__ = ["divide_evaluation"]
