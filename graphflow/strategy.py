"""The interface of strategies, which partition a graph before it is optimised and placed.

A training node carries its strategy. Sessions, plans and the search look it up here. The strategies
of the package are in `graphflow.parallel`, which builds on everything else.

A new strategy is a class in one file. Each user of strategies asks for this much:

    minimize, Session, plan      `divide`, and a `line` for errors, if it has one
    minimize                     `filter_gradients`, if it changes the exchange of gradients, and
                                 `leaves_rows(variable)`, if it exchanges some tables whole
    s.replan()                   `move_rows`, if it deals rows of tables in ranges
    s.add_server()               `change_servers`, if it has servers that may join and leave
    Session                      `state_copies`, 2 if variables are to have mirrors
    search, reports              `divide` returns a `sharded_graph.ShardedGraph`
    Pipeline * strategy          `partitioner.MeshStrategy`: mesh, layouts, replication, …
    strategy * strategy          `__mul__` and `__rmul__` of its own

`divide_over_mesh` in `graphflow/parallel/sharding/partitioner.py` does the work for every strategy
that lays a mesh over a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, DeviceError, ScheduleError, ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor, user_location
from graphflow.ir.spec import Span

Array = np.ndarray[Any, Any]

COUNTER = "<counter>"
"""The name among the sizes of symbols under which a strategy finds the value of its counter."""


class VariableShards(Protocol):
    """The variables that stand for one variable of the user's."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """A variable for each shard. Shards that share a device may share a variable."""

    @property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Return the part of the whole variable that each shard has."""

    @property
    def independent(self) -> bool:
        """True if shards with the same part have values of their own. The variable's value is their
        mean."""

    @property
    def derived(self) -> bool:
        """True if the strategy made the variable. A checkpoint is complete without it."""


@dataclass(frozen=True)
class RowMoves:
    """Ranges of tables' rows that are to move to other owners.

    Attributes:
        updates: the assignments that bring rows to their new owners.
        shards: the shards of the tables and their slots, once the updates have run.
        ranges: the number of ranges that move.
        nbytes: the bytes that travel, with those of slots.
        before, after: the rows asked of the busiest owner over the mean of the owners; of the table
            where that is most.
    """

    updates: tuple[Tensor, ...]
    shards: Mapping[Node, Any]
    ranges: int
    nbytes: int
    before: float
    after: float


@dataclass(frozen=True)
class ServerChange:
    """A server that joins or leaves.

    Attributes:
        joining: the device of a new server; None if none joins.
        leaving: the number of a server that leaves; None if none does.
    """

    joining: str | None = None
    leaving: int | None = None


@dataclass(frozen=True)
class RowCopies:
    """Ranges of rows that new variables get of those before.

    Attributes:
        pairs: the variables that have the rows, each with the one that gets them.
        sources, targets: the first row of each range, in the one and in the other, int64 (n,).
        width: the rows of a range.
    """

    pairs: tuple[tuple[Node, Node], ...]
    sources: Array
    targets: Array
    width: int


@dataclass(frozen=True)
class ServerMoves:
    """The moves that let a server join or leave.

    Attributes:
        strategy: the strategy from then on.
        shards: the shards of the user's variables, once rows and variables are copied.
        whole: variables that are copied whole, each with the one that gets its value.
        rows: the ranges of rows that are copied.
        servers: the number of servers from then on.
        devices: those of servers and workers from then on.
        left: the device of the server that leaves, if one does.
        ranges: the number of ranges that move to other servers.
    """

    strategy: Strategy
    shards: Mapping[Node, Any]
    whole: tuple[tuple[Node, Node], ...]
    rows: tuple[RowCopies, ...]
    servers: int
    devices: tuple[str, ...]
    left: str | None
    ranges: int


class StepFacts(Protocol):
    """Values that each step of a partitioned graph records beside the user's fetches."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """The indices of the graph's outputs that are recorded."""

    @property
    def optional(self) -> frozenset[Node]:
        """The placeholders that users may feed, and need not."""

    def complete_feeds(self, arrays: Mapping[Node, Array]) -> Mapping[Node, Array]:
        """Return feeds with those of optional placeholders.

        Raises:
            FeedError: the feed of an optional placeholder does not fit.
        """

    def replayed_feeds(self, values: Sequence[Array]) -> Mapping[Node, Array]:
        """Return the feeds by which a step that recorded some values gives the same bits again."""

    def describe(self, step: int, values: Sequence[Array]) -> Any:
        """Return what `Session.history` tells about a step that recorded some values."""


class PartitionedGraph(Protocol):
    """A graph that a strategy has partitioned."""

    @property
    def graph(self) -> Graph:
        """The graph of shards. Its output i stands for output i of the whole graph."""

    @property
    def variables(self) -> Mapping[Node, Any]:
        """The `VariableShards` of each of the user's variables."""

    @property
    def tasks(self) -> Sequence[str]:
        """The labels of a pipeline's tasks by turn; () if there is no pipeline."""

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about the strategy, for plans and reports."""

    @property
    def counter(self) -> Node | None:
        """The variable whose value decides how the graph is partitioned, if there is one."""

    @property
    def counter_step(self) -> int:
        """The number by which a step of the graph moves the counter."""

    @property
    def facts(self) -> StepFacts | None:
        """What each step records; None if it records nothing."""

    @property
    def id_feeds(self) -> frozenset[Node]:
        """The placeholders behind the ids of tables whose rows lie in ranges."""

    def count_rows(self, batches: Sequence[Mapping[Node, Array]]) -> Mapping[Node, Array]:
        """Return how many rows of each range some batches ask for, by table."""

    def bindings(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of all symbols, given those of the whole graph."""

    def suits(self, sizes: Mapping[str, int]) -> bool:
        """Return True if a step with symbols of these sizes would be partitioned as this one.

        If there is a counter, its value is among the sizes, as `COUNTER`.
        """

    def feeds(self, arrays: Mapping[Node, Array], sizes: Mapping[str, int]) -> Mapping[Node, Array]:
        """Return what the partitioned graph is fed, given what the user feeds."""


class Strategy(Protocol):
    """Partitions graphs."""

    def divide(
        self,
        graph: Graph,
        cluster: Any,
        known: Mapping[Node, Any] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> PartitionedGraph:
        """Return a graph for the devices of a cluster.

        Args:
            graph: the whole graph, with gradients and updates.
            cluster: the cluster.
            known: the shards of variables that exist already.
            fed: the sizes of symbols, if a step is about to be fed; and the counter's value, if the
                strategy has a method `counter_of(graph)` that returns a variable.
        """


@runtime_checkable
class ServedStrategy(Strategy, Protocol):
    """Partitions graphs for servers and workers, whose number may change in a session."""

    def devices_of_parties(self, cluster: Any) -> tuple[list[str], list[str]]:
        """Return the devices of servers, and those of workers, by their numbers."""

    def change_servers(
        self,
        change: ServerChange,
        cluster: Any,
        graphs: Sequence[Graph],
        shards: Mapping[Node, Any],
    ) -> ServerMoves:
        """Return the moves that let a server join or leave.

        Args:
            change: the server.
            cluster: the cluster.
            graphs: the graphs that the session runs.
            shards: the shards of their variables.
        """


def check_strategy(strategy: object) -> None:
    """Check that an argument is a strategy.

    Raises:
        ArgumentError: it is a class, or has no `divide`.
    """
    if isinstance(strategy, type) or not callable(getattr(strategy, "divide", None)):
        raise ArgumentError(
            f"minimize at {user_location()}: strategy must be one of gf.parallel's, such as "
            f"gf.parallel.Data(replicas=2), not {strategy!r}"
        )


def filtered_gradients(
    strategy: Strategy | None,
    gradients: Sequence[Tensor],
    variables: Sequence[Tensor],
    scale: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return gradients as a strategy exchanges them, and updates of the state of that exchange.

    Most strategies leave gradients as they are.

    Args:
        strategy: the strategy of a training step, or None.
        gradients: the gradients.
        variables: the variable of each.
        scale: the number by which the gradients are multiplied, if they are.
    """
    change = getattr(strategy, "filter_gradients", None)
    if change is None:
        return [*gradients], []
    sums, updates = change(gradients, variables, scale)
    return [*sums], [*updates]


def strategy_of(graph: Graph) -> Strategy | None:
    """Return the strategy of a graph's training steps; None if it has none.

    Raises:
        ShardingError: there are two different ones.
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
    """Return the graph that is to be placed, and its partitioning if a strategy partitioned it."""
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
    """Partition a graph by a strategy. Errors name the line that made the strategy.

    Raises:
        ShardingError, ScheduleError, DeviceError: the strategy refuses the graph or the cluster.
    """
    with name_strategy_in_errors(strategy):
        return strategy.divide(graph, cluster, known, fed)


@contextmanager
def name_strategy_in_errors(strategy: Strategy | None) -> Iterator[None]:
    """Let errors of a block begin with the strategy and the line that made it."""
    try:
        yield
    except (ShardingError, ScheduleError, DeviceError) as error:
        line = getattr(strategy, "line", None)
        if line is not None and f" at {line}: " not in str(error):
            error.args = (f"{type(strategy).__name__} at {line}: {error}",)
        raise
