"""What a pass is."""

from __future__ import annotations

from graphflow.graph import Graph
from graphflow.values import dataclass


@dataclass(frozen=True)
class Pass:
    """A frozen value that turns a valid graph into a valid graph of the same outputs."""

    def __call__(self, graph: Graph) -> Graph:
        raise NotImplementedError
