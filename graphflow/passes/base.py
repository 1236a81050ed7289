"""What a pass is."""

from __future__ import annotations

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph


@dataclass(frozen=True)
class Pass:
    """A frozen value that turns a valid graph into a valid graph of the same outputs."""

    def __call__(self, graph: Graph) -> Graph:
        raise NotImplementedError
