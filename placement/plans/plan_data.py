"""PlanData: the values of a plan, which reports and drawings read.

`Plan` (plan.py) adds the methods that users call. Reports and views take a `PlanData`, so that they
need not import the class whose methods call them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cached_property

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.plans.plan_model import PlanModel
from graphflow.placement.plans.plan_records import (
    Interval,
    MeasuredSteps,
    PlacementVerdict,
    PlannedNode,
    PlannedTransfer,
)


@dataclass(frozen=True)
class PlanData:
    """The values of a plan; `Plan` documents each."""

    cluster: Cluster
    placer: str
    nodes: tuple[PlannedNode, ...]
    transfers: tuple[PlannedTransfer, ...]
    makespan: float
    peak_memory: Mapping[str, int]
    baselines: Mapping[str, float]
    shapes: Mapping[str, tuple[int, ...]]
    fingerprint: str
    measured: MeasuredSteps | None = None
    reproducible: bool = True
    overhead: float = 0.0
    model: PlanModel | None = field(default=None, compare=False, repr=False)
    verdict: PlacementVerdict | None = field(default=None, compare=False)

    @property
    def placement(self) -> Mapping[str, str]:
        """Node name -> device name."""
        return {node.name: node.device for node in self.nodes}

    @property
    def timeline(self) -> tuple[Interval, ...]:
        """What devices and links are predicted to do, by start."""
        rows = [
            Interval(node.device, node.name, node.start, node.finish, "compute")
            for node in self.nodes
            if node.finish > node.start
        ]
        rows += [
            Interval(f"{t.source} → {t.target}", t.tensor, t.start, t.finish, "transfer")
            for t in self.transfers
        ]
        return tuple(sorted(rows, key=lambda row: (row.start, row.finish, row.track, row.name)))

    @cached_property
    def by_name(self) -> dict[str, PlannedNode]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    def maker(self, tensor: str) -> str:
        """The node that makes a tensor: "split:1" is the second output of "split"."""
        return tensor if tensor in self.by_name else tensor.rpartition(":")[0]
