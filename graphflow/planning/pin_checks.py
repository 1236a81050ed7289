"""Checks that the devices to which users pin nodes are there."""

from __future__ import annotations

from graphflow.errors import DeviceError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.machine.machine_devices import find_gpus


def check_pins(source: Graph, cluster: Cluster) -> None:
    """Refuse pins that match no device, also of nodes that optimisation removes."""
    pinned: dict[DeviceName, Node] = {}
    last: DeviceName | None = None
    for node in source.walk():
        if node.device is not last:  # neighbouring nodes mostly share the object: compare it first
            last = node.device
            if last:
                pinned.setdefault(last, node)
    for device, node in pinned.items():
        try:
            cluster.match(str(device))
        except DeviceError as error:
            lacks = find_gpus().reason if device.kind == "gpu" and cluster.kind == "here" else ""
            raise DeviceError(
                f"{source.names.get(node, node.name)!r} (made at {node.location}) is pinned: "
                f"{error}{f'; {lacks}' if lacks else ''}"
            ) from None
