"""Strategies: what divides a graph before it is optimised and placed.

A training node carries its strategy; whoever places a graph asks for it here. Strategies themselves
are in `graphflow.parallel`, which builds on everything: this is what the rest knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from graphflow.errors import ArgumentError, DeviceError, ScheduleError, ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, user_location
from graphflow.ir.spec import Span

Array = np.ndarray[Any, Any]


class VariableShards(Protocol):
    """The variables that stand for one of the user's."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """A variable for each shard; shards that share a device may share it."""

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """What part of the whole each one has."""


class PartitionedGraph(Protocol):
    """A graph that was divided."""

    @property
    def graph(self) -> Graph:
        """Output i stands for that of the whole graph."""

    @property
    def variables(self) -> Mapping[Node, Any]:
        """`Pieces` of the user's variables."""

    @property
    def tasks(self) -> Sequence[str]:
        """What the nodes of a pipeline belong to, by their turns; else nothing."""

    def bindings(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of all symbols, by those of the whole graph."""

    def suits(self, sizes: Mapping[str, int]) -> bool:
        """Whether a step with symbols of these sizes would be divided as this is."""

    def feeds(self, arrays: Mapping[Node, Array], sizes: Mapping[str, int]) -> Mapping[Node, Array]:
        """What the divided graph is fed, by what the user feeds."""


class Strategy(Protocol):
    """Divides graphs."""

    def divide(
        self,
        graph: Graph,
        cluster: Any,
        known: Mapping[Node, Any] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> PartitionedGraph:
        """A graph for the devices of a cluster.

        Args:
            known: variables that are divided already.
            fed: sizes of symbols, where a step is about to be fed.
        """


def check_strategy(strategy: object) -> None:
    """Refuse what is no strategy.

    Raises:
        ArgumentError: it divides nothing.
    """
    if isinstance(strategy, type) or not callable(getattr(strategy, "divide", None)):
        raise ArgumentError(
            f"minimize at {user_location()}: strategy is one of gf.parallel's, such as "
            f"gf.parallel.Data(replicas=2), not {strategy!r}"
        )


def strategy_of(graph: Graph) -> Strategy | None:
    """The strategy by which a graph is to be divided; None where it is not.

    Raises:
        ShardingError: there are two.
    """
    found: dict[int, tuple[Strategy, Node]] = {}
    for node in graph.of_op("group"):
        strategy = node.attrs.get("strategy")
        if strategy is not None:
            found.setdefault(id(strategy), (strategy, node))
    if len(found) > 1:
        (a, first), (b, second), *_ = found.values()
        if a != b:
            raise ShardingError(
                f"{first.name!r} (made at {first.location}) has the strategy {a!r}, and "
                f"{second.name!r} (made at {second.location}) {b!r}: what is fetched together is "
                "divided by one strategy; give both the same, or fetch them apart"
            )
    return next(iter(found.values()))[0] if found else None


def divide_graph(
    graph: Graph, cluster: Any, fed: Mapping[str, int] | None = None
) -> tuple[Graph, PartitionedGraph | None]:
    """A graph as it is to be placed, and how it was divided, if it was."""
    strategy = strategy_of(graph)
    if strategy is None:
        return graph, None
    division = divide_with(strategy, graph, cluster, None, fed)
    return division.graph, division


def divide_with(
    strategy: Strategy,
    graph: Graph,
    cluster: Any,
    known: Mapping[Node, Any] | None = None,
    fed: Mapping[str, int] | None = None,
) -> PartitionedGraph:
    """A graph as a strategy divides it; what it refuses names the line that made the strategy.

    Raises:
        ShardingError, ScheduleError, DeviceError: see the strategy.
    """
    try:
        return strategy.divide(graph, cluster, known, fed)
    except (ShardingError, ScheduleError, DeviceError) as error:
        line = getattr(strategy, "line", None)
        if line is not None and f" at {line}: " not in str(error):
            error.args = (f"{type(strategy).__name__} at {line}: {error}",)
        raise
