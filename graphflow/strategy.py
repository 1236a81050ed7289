"""The protocol of strategies: how a graph is partitioned before it is optimised and placed.

A training node carries its strategy, and whoever places a graph looks it up here. The strategies
themselves are in `graphflow.parallel`, which builds on all other folders.
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
    """The variables that replace one variable of the user's."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """A variable for each shard; shards on one device may be one variable."""

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """The part of the whole variable that each shard holds."""


class PartitionedGraph(Protocol):
    """A partitioned graph."""

    @property
    def graph(self) -> Graph:
        """The partitioned graph; its output i stands for output i of the user's graph."""

    @property
    def variables(self) -> Mapping[Node, Any]:
        """`VariableShards` of each variable of the user's."""

    @property
    def tasks(self) -> Sequence[str]:
        """The pipeline task of each node, in the order of execution; empty without a pipeline."""

    def bindings(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of all symbols, given those of the user's graph."""

    def suits(self, sizes: Mapping[str, int]) -> bool:
        """Return True if a step with symbols of these sizes would be partitioned in the same
        way."""

    def feeds(self, arrays: Mapping[Node, Array], sizes: Mapping[str, int]) -> Mapping[Node, Array]:
        """Return the feeds of the partitioned graph, given the user's feeds and sizes."""


class Strategy(Protocol):
    """Partitions graphs."""

    def divide(
        self,
        graph: Graph,
        cluster: Any,
        known: Mapping[Node, Any] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> PartitionedGraph:
        """Return the graph, partitioned for the devices of a cluster.

        Args:
            known: shards of variables that are partitioned already.
            fed: sizes of symbols, if a step is about to run.
        """


def check_strategy(strategy: object) -> None:
    """Refuse an object that is no strategy.

    Raises:
        ArgumentError: it has no method `divide`.
    """
    if isinstance(strategy, type) or not callable(getattr(strategy, "divide", None)):
        raise ArgumentError(
            f"minimize at {user_location()}: strategy must be one of gf.parallel's, such as "
            f"gf.parallel.Data(replicas=2), not {strategy!r}"
        )


def strategy_of(graph: Graph) -> Strategy | None:
    """Return the strategy of a graph's training nodes; None if they have none.

    Raises:
        ShardingError: there are two different strategies.
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
                f"{second.name!r} (made at {second.location}) {b!r}: fetches of one step "
                "must share one strategy; give both the same, or fetch them in separate steps"
            )
    return next(iter(found.values()))[0] if found else None


def divide_graph(
    graph: Graph, cluster: Any, fed: Mapping[str, int] | None = None
) -> tuple[Graph, PartitionedGraph | None]:
    """Partition a graph by the strategy of its training nodes, if they have one.

    Return the graph to place, and the `Division` or None.
    """
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
    """Partition a graph by a strategy; an error names the line that created the strategy.

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
