"""The answer to a placement problem: where nodes run, and in which order."""

from __future__ import annotations

import numpy as np

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ProblemError
from graphflow.placement.problems.arrays import Ints, ProblemArrays, array_of, error_at, put, reject


@checks_arguments(ProblemError)
@dataclass(frozen=True, eq=False)
class Assignment:
    """A device for each node, and the order in which nodes run.

    Args:
        device: (n,) device index of each node.
        order: (n,) all nodes, producers first; each device runs its nodes in this order.
        reproducible: The same placer gives it again. False if a clock ended the search.
    """

    device: Ints
    order: Ints
    reproducible: bool = True

    def __post_init__(self) -> None:
        put(self, "device", array_of("device", self.device, np.int64, 1))
        put(self, "order", array_of("order", self.order, np.int64, 1))
        if not np.array_equal(np.sort(self.order), np.arange(len(self.device))):
            raise ProblemError(
                f"order (length {len(self.order)}) must name each of the {len(self.device)} nodes "
                "exactly once"
            )

    def validate(self, problem: ProblemArrays) -> None:
        """Check the assignment against a problem. The simulator checks the memory.

        Raises:
            ProblemError: A device is unknown or impossible for its node, the order is not
                topological, or a colocation group is split.
        """
        n, d = problem.nodes, problem.devices
        if len(self.device) != n:
            raise ProblemError(
                f"the assignment places {len(self.device)} nodes; the problem has {n}"
            )
        reject(
            "device",
            self.device,
            (self.device < 0) | (self.device >= d),
            f"is not a device (there are {d})",
        )
        wrong = np.flatnonzero(~np.isfinite(problem.compute[np.arange(n), self.device]))
        if len(wrong):
            raise error_at(
                f"node {wrong[0]} cannot run on device {self.device[wrong[0]]}: "
                "its compute is inf there",
                wrong,
            )
        position = np.empty(n, dtype=np.int64)
        position[self.order] = np.arange(n)
        late = np.flatnonzero(position[problem.edges[:, 0]] >= position[problem.edges[:, 1]])
        if len(late):
            source, target = problem.edges[late[0]].tolist()
            raise ProblemError(
                f"order is not topological: node {target} comes before its input, node {source}"
            )
        members = np.flatnonzero(problem.groups >= 0)
        home: dict[int, int] = {}
        for node, group, device in zip(
            members.tolist(),
            problem.groups[members].tolist(),
            self.device[members].tolist(),
            strict=True,
        ):
            if home.setdefault(group, device) != device:
                raise error_at(
                    f"group {group} is torn: devices {home[group]} and {device} (node {node})",
                    [node],
                )
