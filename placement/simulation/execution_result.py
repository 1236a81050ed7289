"""The raw result of a simulated step."""

from __future__ import annotations

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.problems.problem import Assignment

TransferRow = tuple[int, int, int, int, float, float, float]
"""A transfer as the fields of a record of `simulator.TRANSFER`."""


@dataclass
class ExecutionResult:
    """Raw result of one execution: lists, because the placers make thousands of them."""

    device: list[int]
    start: list[float]
    finish: list[float]
    started: list[int]
    finished: list[int]
    order: list[int]
    transfers: list[TransferRow]
    makespan: float

    def assignment(self) -> Assignment:
        """The device map with the order in which the nodes ran."""
        return Assignment(
            np.array(self.device, dtype=np.int64), np.array(self.order, dtype=np.int64)
        )
