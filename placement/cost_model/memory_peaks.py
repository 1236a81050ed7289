"""Footprints: what a placed graph takes of each device's memory, as the runtime will lay it out.

Placers weigh memory by the liveness of tensors, each with memory of its own. How programs reuse it
(in place, fused, in one arena) is the runtime's to know, which enters a function here; a plan's
`peak_memory` is worked out by it when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from graphflow.ir.graph import Graph
from graphflow.ir.op import Node

MemoryPredictor = Callable[
    [Graph, Mapping[Node, str], Sequence[Node], Mapping[str, int], Sequence[str]],
    Mapping[str, int],
]  # fmt: skip
_predictors: list[MemoryPredictor] = []  # one, when the runtime is there


def register_predictor(function: MemoryPredictor) -> None:
    """Let a function (graph, devices, order, bindings, names of the cluster's devices) ->
    bytes by device tell what a placed graph takes."""
    _predictors[:] = [function]


class MemoryPeaks(Mapping[str, int]):
    """Bytes by device, worked out when first looked at: large graphs take a while.

    Args:
        known: by liveness alone, which stands where no runtime says more.
    """

    def __init__(
        self,
        known: Mapping[str, int],
        graph: Graph,
        devices: Mapping[Node, str],
        order: Sequence[Node],
        bindings: Mapping[str, int],
        available: Sequence[str],
    ) -> None:
        self._known: Mapping[str, int] | None = None if _predictors else known
        self._of: Any = (graph, devices, order, bindings, available)

    def _peaks(self) -> Mapping[str, int]:
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
