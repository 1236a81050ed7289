"""PlanData: the values of a plan, which reports and drawings read.

`Plan` (plan.py) adds the methods that users call. Reports and views take a `PlanData`, so that they
need not import the class whose methods call them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cached_property

from graphflow.base.formatting import show_margin
from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.plans.plan_model import PlanModel
from graphflow.placement.plans.plan_records import (
    ON_ONE,
    Interval,
    LinkTotal,
    MeasuredSteps,
    PlacementVerdict,
    PlannedNode,
    PlannedTransfer,
    PlannedWindow,
    Rival,
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
    low: float | None = None
    high: float | None = None
    rival: Rival | None = None
    model: PlanModel | None = field(default=None, compare=False, repr=False)
    verdict: PlacementVerdict | None = field(default=None, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    windows: tuple[PlannedWindow, ...] = ()

    @property
    def placement(self) -> Mapping[str, str]:
        """Node name -> device name."""
        return {node.name: node.device for node in self.nodes}

    @property
    def timeline(self) -> tuple[Interval, ...]:
        """What devices and links are predicted to do, by start."""
        drawn = {window.node for window in self.windows if window.bars}
        rows = [
            Interval(node.device, node.name, node.start, node.finish, "compute")
            for node in self.nodes
            if node.finish > node.start and node.name not in drawn
        ]
        rows += [bar for window in self.windows for bar in window.bars]
        rows += [
            Interval(f"{t.source} → {t.target}", t.tensor, t.start, t.finish, "transfer")
            for t in self.transfers
        ]
        return tuple(sorted(rows, key=lambda row: (row.start, row.finish, row.track, row.name)))

    @property
    def moved(self) -> tuple[LinkTotal, ...]:
        """Totals of moves between devices: each transfer, and the messages of windows by link."""
        rows = [
            LinkTotal(t.source, t.target, 1, t.bytes, t.finish - t.start) for t in self.transfers
        ]
        return (*rows, *(link for window in self.windows for link in window.links))

    @property
    def no_gain(self) -> str:
        """Say that several devices need not be faster than one; "" if they surely are.

        "no gain expected: 2.1 ms ± 0.3 here, 2 ms ± 0.3 on one device"
        """
        steps = self.steps_alike
        return f"no gain expected: {steps[0]} here, {steps[1]}" if steps else ""

    @property
    def steps_alike(self) -> tuple[str, str] | None:
        """The steps here and on one device (or over several) if the gain may be chance."""
        rival = self.rival
        if rival is None or self.low is None or self.high is None:
            return None
        saved = rival.seconds - self.makespan
        if rival.where != ON_ONE:
            saved = -saved
        if saved > rival.least_gain:
            return None
        here = show_margin(self.makespan, (self.high - self.low) / 2)
        return here, f"{show_margin(rival.seconds, rival.margin)} {rival.where}"

    @cached_property
    def by_name(self) -> dict[str, PlannedNode]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    def maker(self, tensor: str) -> str:
        """The node that makes a tensor: "split:1" is the second output of "split"."""
        return tensor if tensor in self.by_name else tensor.rpartition(":")[0]
