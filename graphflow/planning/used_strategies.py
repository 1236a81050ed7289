"""The strategies of a session: which one partitioned each variable, and so its later graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from graphflow.execution.step_executor import StepExecutor
from graphflow.execution.variable_store import VariableStore
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.placement.clusters.cluster import Cluster
from graphflow.planning.turn_counts import TurnCounts
from graphflow.strategy import COUNTER, PartitionedGraph, Strategy, divide_with, strategy_of


class UsedStrategies:
    """The strategies that partition graphs of a session.

    Attributes:
        counts: the values of their counters of turns.
    """

    def __init__(self, state: VariableStore, steps: StepExecutor) -> None:
        self.counts = TurnCounts(state, steps)
        self._state = state
        self._by_variable: dict[Node, Strategy] = {}
        self._replaced: list[tuple[Strategy, Strategy]] = []

    def __iter__(self) -> Iterator[Strategy]:
        return iter({id(each): each for each in self._by_variable.values()}.values())

    def find(self, variable: Node) -> Strategy | None:
        """Return the strategy that partitioned a variable, if one did."""
        return self._by_variable.get(variable)

    def divide(
        self, source: Graph, fed: Mapping[str, int], cluster: Cluster
    ) -> PartitionedGraph | None:
        """Partition a graph by its own strategy, or by the one that partitioned its variables
        before."""
        pieces = self._state.shards
        strategy = strategy_of(source)
        if strategy is None:
            strategy = next((self._by_variable[v] for v in source.variables if v in pieces), None)
        if strategy is None:
            return None
        strategy = next((now for was, now in self._replaced if was is strategy), strategy)
        find = getattr(strategy, "counter_of", None)
        counter = self.read_counter(None if find is None else find(source))
        division = divide_with(strategy, source, cluster, pieces, {**fed, **counter})
        self._by_variable |= dict.fromkeys(division.variables, strategy)
        return division

    def replace(self, before: Strategy, after: Strategy) -> None:
        """Let another strategy partition the graphs of one from now on."""
        replaced = [(was, after if now is before else now) for was, now in self._replaced]
        self._replaced = [*replaced, (before, after)]
        for variable, strategy in self._by_variable.items():
            if strategy is before:
                self._by_variable[variable] = after

    def read_counter(self, counter: Node | None) -> dict[str, int]:
        """Return the value of a strategy's counter as a size; nothing if there is no counter."""
        return {} if counter is None else {COUNTER: self.counts.read(counter)}
