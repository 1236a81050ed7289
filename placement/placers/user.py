"""The user's own decisions, and another placer for what they leave open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlacementError
from graphflow.placement.placers.base import Placer, get_placer, register_placer
from graphflow.placement.problems.problem import Assignment, Problem


@dataclass(frozen=True)
class User(Placer):
    """Nodes where the user says; all others by another placer, which sees these as pinned.

    Without pins of its own (as registered) it takes those of the problem, and leaves everything
    that is not pinned on one device.

    Args:
        pins: node -> device index.
        rest: placer of all other nodes, and of the order.

    Raises:
        PlacementError: a pin names no node or no device, or a device that the node cannot use.
        ProblemError: pins tear a group.
    """

    pins: Mapping[int, int] = field(default_factory=dict)
    rest: str | Placer = "single"

    def place(self, problem: Problem) -> Assignment:
        if not self.pins:
            return get_placer(self.rest).place(problem)
        compute = np.array(problem.compute)
        for node, device in self.pins.items():
            if any(
                isinstance(i, bool) or not isinstance(i, int | np.integer) for i in (node, device)
            ):
                raise PlacementError(
                    f"pin of node {node!r} to device {device!r}: a problem's nodes and devices are "
                    "numbers"
                )
            if not 0 <= node < problem.nodes or not 0 <= device < problem.devices:
                raise PlacementError(
                    f"pin of node {node} to device {device}: there are {problem.nodes} nodes and "
                    f"{problem.devices} devices"
                )
            if not np.isfinite(problem.compute[node, device]):
                usable = np.flatnonzero(np.isfinite(problem.compute[node])).tolist()
                raise PlacementError(
                    f"node {node} is pinned to device {device}, which cannot run it; pin it to one "
                    f"of {usable}"
                )
            elsewhere = np.arange(problem.devices) != device
            compute[node, elsewhere] = np.inf
        return get_placer(self.rest).place(replace(problem, compute=compute))


register_placer("user", User())
