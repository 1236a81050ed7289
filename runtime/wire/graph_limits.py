"""Limits of a worker on graphs from the wire, whoever sends them."""

from __future__ import annotations

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError

MAX_DRAWN = 1 << 40
"""The most numbers of a variable of which a worker draws a part."""
MAX_ITERATIONS = 10**12


@dataclass(frozen=True)
class GraphLimits:
    """Limits on each device's part of a graph.

    Attributes:
        nodes: Nodes, those of bodies included.
        nbytes: Bytes of the variables together, and of any one tensor. None: the memory of this
            host.
        iterations: Iterations of all loops, those of nested ones multiplied. If given, each loop
            needs a bound (`max_iterations`). None: 10**12, and loops need no bound.
    """

    nodes: int = 1_000_000
    nbytes: int | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "nbytes", "iterations"):
            value = getattr(self, name)
            if value is None and name != "nodes":
                continue
            if type(value) is not int or value < 1:
                raise ArgumentError(f"limit on {name} must be a whole number from 1, got {value!r}")
