"""The report of stale sums: what a turn takes with and without them, and where they pay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from graphflow.base.formatting import show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.frontend.pytree import symbols_of
from graphflow.ir.spec import Dim
from graphflow.parallel.report import StrategyReport
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph
from graphflow.passes import optimize
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import Link
from graphflow.placement.plans.building.outlook import outlook
from graphflow.placement.plans.building.plan_fetches import known_of

LINKS = {
    "10 Gbit/s, 50 µs": (50e-6, 1.16e9),
    "1 Gbit/s, 100 µs": (100e-6, 1.16e8),
    "100 Mbit/s, 1 ms": (1e-3, 1.16e7),
    "10 Mbit/s, 20 ms": (20e-3, 1.16e6),
}
"""Links between workers for which times are predicted besides: latency in seconds, bytes/s."""


class TurnTime(NamedTuple):
    """The predicted seconds of a turn over some links.

    Attributes:
        links: the links between workers, in words.
        stale: seconds of a turn of a window.
        exact: seconds of a step that exchanges all sums.
    """

    links: str
    stale: float
    exact: float

    @property
    def gain(self) -> float:
        """How many turns of a window fit into the time of one step that exchanges all sums."""
        return self.exact / self.stale


@dataclass(frozen=True)
class StaleReport(StrategyReport):
    """The report of an AsyncModel. `bytes`, `collectives` and `fed` are those of a window.

    Attributes:
        exact: the partitioned graph of a step that exchanges all sums.
        refresh: the turns of a window.
        more_turns: how many times as many turns training needs, if the user knows.
    """

    exact: ShardedGraph
    refresh: int
    more_turns: float | None = None

    @cached_property
    def turn_times(self) -> tuple[TurnTime, ...]:
        """Predicted seconds of a turn: on the cluster as it is, then with the links of `LINKS`."""
        clusters = {"this cluster": self.cluster}
        if len(self.cluster.workers) > 1:
            clusters |= {name: _with_links(self.cluster, *link) for name, link in LINKS.items()}
        return tuple(
            TurnTime(
                name,
                _predict_seconds(self.division, cluster) / self.refresh,
                _predict_seconds(self.exact, cluster),
            )
            for name, cluster in clusters.items()
        )

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        yield from super()._lines()
        yield f"a window is {self.refresh} turns on one batch, with the exchanges of one step"
        yield "  a turn, predicted:  stale  exact  pays if it takes less than"
        for links, stale, exact in self.turn_times:
            gain = exact / stale
            answer = "never" if gain <= 1 else f"{gain:.2f} times as many turns"
            if self.more_turns is not None:
                answer += ": it pays" if gain > self.more_turns else ": it does not pay"
            yield f"  {links}: {show_seconds(stale)}  {show_seconds(exact)}  {answer}"
        if self.more_turns is None:
            yield "  how many more turns training takes is not known; see report(more_turns=)"
        else:
            yield f"  training takes {self.more_turns:g} times as many turns, as you say"


def _predict_seconds(division: ShardedGraph, cluster: Cluster) -> float:
    """Return the predicted seconds of a run; open sizes count as what reports assume."""
    graph, partitioner = optimize(division.graph), division.partitioner
    open_sizes = symbols_of(graph.nodes)
    bindings = {symbol: partitioner.guess(Dim.symbol(symbol)) for symbol in open_sizes}
    learned, steps = known_of(cluster)
    return outlook(graph, cluster, bindings, learned=learned, steps=steps).seconds


def _with_links(cluster: Cluster, latency: float, bandwidth: float) -> Cluster:
    """Return the cluster with other links between its workers."""
    ends = [f"/worker:{i}" for i in range(len(cluster.workers))]
    between = [Link(a, b, latency, bandwidth) for a in ends for b in ends if a != b]
    return replace(cluster, links=tuple(between), ports=())


__all__ = ["StaleReport", "TurnTime"]
