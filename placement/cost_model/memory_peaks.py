"""Memory peaks of a placed graph on each device, as the runtime will lay it out.

Placers weigh memory by the liveness of tensors, each with memory of its own. Only the runtime knows
how programs reuse memory (in place, fused, in one arena). It registers a predictor here, which a
plan's `peak_memory` calls when it is first read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from graphflow.ir.graph import Graph
from graphflow.ir.op import Node

MemoryPredictor = Callable[
    [Graph, Mapping[Node, str], Sequence[Node], Mapping[str, int], Mapping[str, int]],
    Mapping[str, int],
]  # fmt: skip
_predictors: list[MemoryPredictor] = []  # one, once the runtime is loaded


def register_predictor(function: MemoryPredictor) -> None:
    """Predict the memory of placed graphs by a function from now on.

    It takes (graph, devices, order, bindings, threads of each device of the cluster) and returns
    bytes by device.
    """
    _predictors[:] = [function]


class MemoryPeaks(Mapping[str, int]):
    """Bytes by device, computed when first read, because large graphs take a while.

    Args:
        known: Bytes by liveness alone, which count if no predictor is registered.
        threads: Of each device of the cluster.
    """

    def __init__(
        self,
        known: Mapping[str, int],
        graph: Graph,
        devices: Mapping[Node, str],
        order: Sequence[Node],
        bindings: Mapping[str, int],
        threads: Mapping[str, int],
    ) -> None:
        self._known: Mapping[str, int] | None = None if _predictors else known
        self._of: Any = (graph, devices, order, bindings, threads)

    def _peaks(self) -> Mapping[str, int]:
        """Return the bytes by device."""
        if self._known is None:
            self._known = _predictors[0](*self._of)
            self._of = None
        return self._known

    def __getitem__(self, name: str) -> int:
        return self._peaks()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._peaks())

    def __len__(self) -> int:
        return len(self._peaks())

    def __repr__(self) -> str:
        return repr(dict(self))
