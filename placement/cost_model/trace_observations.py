"""Observations about the times of nodes, from traces of a placed graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.placement.calibration.cluster_rates import device_classes, rates
from graphflow.placement.calibration.node_bucket import Bucket
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.device_constraints import DeviceConstraints
from graphflow.placement.cost_model.node_times import UNPLACED, NodeTimes


@dataclass(frozen=True)
class TraceObservation:
    """One observation of a placed node.

    Attributes:
        bucket: Of its ratio.
        predicted: Seconds that calibration alone predicts, at full speed.
        worker: The worker that runs it.
    """

    bucket: Bucket
    predicted: float
    worker: int


def trace_observations(
    graph: Graph,
    cluster: Cluster,
    bindings: Mapping[str, int],
    devices: Mapping[Node, str],
    profiles: Mapping[int, Mapping[str, Any]] | None = None,
    busy: bool = False,
) -> dict[str, TraceObservation]:
    """Return by name the nodes whose spans in a trace teach something.

    Args:
        devices: Where each node runs; others run where they may.
        busy: Neighbours compute meanwhile, also if all these nodes are on one device.
    """
    predictions = NodeTimes(graph, cluster, bindings)
    at = {name: i for i, name in enumerate(cluster.devices)}
    pinned = {node: device for node, device in devices.items() if device in at}
    limits = DeviceConstraints(
        graph, cluster, {n: d for n, d in pinned.items() if n.op.name == "variable"}
    )
    working = {
        device for node, device in pinned.items() if node.op.name not in ("variable", *UNPLACED)
    }
    busy = busy or len(working) > 1
    compute = predictions.compute(limits, rates(cluster, profiles, busy))
    named = device_classes(cluster)
    workers = {d.name: worker.index for worker in cluster.workers for d in worker.devices}
    found = {}
    for i, node in enumerate(predictions.nodes):
        if node.op.joint is not None or node.op.name == "concurrent":
            continue  # most of its time is spent on links, or waiting for other parties
        device = pinned.get(node) or min(limits.allowed_devices(node))
        predicted = float(compute[i, at[device]])
        if 0 < predicted < np.inf:
            bucket = predictions.bucket(node, named[device], busy, predicted)
            found[graph.names[node]] = TraceObservation(bucket, predicted, workers[device])
    return found
