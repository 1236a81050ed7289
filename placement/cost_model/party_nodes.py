"""The parties of `concurrent` nodes, and the devices that run them.

A `concurrent` node is one node of the graph. Its parties on other devices than its own are further
nodes of the placement problem (`PartyNode`), since they read operands and keep their devices busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Body, Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import evaluate
from graphflow.ops.control_flow.concurrent import parties_of
from graphflow.ops.control_flow.control import UNPLACED_OPS
from graphflow.placement.clusters.cluster import Cluster


@dataclass(frozen=True)
class PartyNode:
    """The parties of a `concurrent` node on a device that is not the node's own."""

    node: Node
    device: str
    parties: tuple[int, ...]


def party_nodes(graph: Graph, cluster: Cluster) -> tuple[PartyNode, ...]:
    """Return the parties of a graph's `concurrent` nodes that are on other devices than these."""
    found = []
    for node in graph.of_op("concurrent"):
        home = home_of(node, cluster)
        by_device: dict[str, list[int]] = {}
        for i, device in enumerate(party_devices(node, cluster, home)):
            by_device.setdefault(device, []).append(i)
        by_device.pop(home, None)
        found += [PartyNode(node, device, tuple(mine)) for device, mine in by_device.items()]
    return tuple(found)


def home_of(node: Node, cluster: Cluster) -> str:
    """Return the first device that a `concurrent` node's pin allows."""
    return next(_devices_for(node.device, cluster), cluster.devices[0])


def party_devices(node: Node, cluster: Cluster, home: str) -> list[str]:
    """Return the device of each party if the node is on `home`, as the partitioner chooses it."""
    return [_party_device(body, cluster, home) for body in parties_of(node.attrs)]


def _party_device(body: Body, cluster: Cluster, home: str) -> str:
    for node in body.graph.walk():
        if node.device and node.op.name not in UNPLACED_OPS:
            if cluster.pinned(node.device).matches(DeviceName.parse(home)):
                return home
            return next(_devices_for(node.device, cluster), home)
    return home


def _devices_for(pin: DeviceName, cluster: Cluster) -> Iterator[str]:
    here = cluster.pinned(pin)
    return (d for d in cluster.devices if here.matches(DeviceName.parse(d)))


def operands_of(node: Node, parties: Sequence[int]) -> list[Tensor]:
    """Return the operands of a `concurrent` node that some of its parties read."""
    bodies = parties_of(node.attrs)
    read = {
        k
        for i in parties
        for k, parameter in enumerate(bodies[i].inputs)
        if parameter in bodies[i].graph.names
    }
    return list(dict.fromkeys(node.inputs[k] for k in sorted(read)))


def party_ends(node: Node, others: Mapping[int, int]) -> list[Tensor]:
    """Return a token, which has no bytes, for each of a node's `PartyNode` and for its own parties.

    Args:
        others: party -> number of its `PartyNode`.
    """
    ends: dict[int, Tensor] = {}
    outputs = iter(node.outputs)
    for i, body in enumerate(parties_of(node.attrs)):
        last = [next(outputs) for _ in body.outputs][-1]
        if last.spec.is_concrete and not evaluate(last.spec.size, {}):
            ends.setdefault(others.get(i, -1), last)
    return list(ends.values())


def makers_of(node: Node, others: Mapping[int, int], own: int) -> list[int]:
    """Return for each output of a `concurrent` node the number of its maker.

    Args:
        others: party -> number of its `PartyNode`; parties that are not there have the number
            `own`.
    """
    bodies = parties_of(node.attrs)
    return [others.get(i, own) for i, body in enumerate(bodies) for _ in body.outputs]
