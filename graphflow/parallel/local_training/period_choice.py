"""The choice of the period of LocalSGD from predictions: of a turn, and of an exchange."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from graphflow.base.formatting import show_count, show_seconds
from graphflow.frontend.pytree import symbols_of
from graphflow.ir.spec import Dim
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph
from graphflow.passes import optimize
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.plans.building.outlook import outlook
from graphflow.placement.plans.building.plan_fetches import known_of

EXCHANGE_SHARE = 0.1
"""The most that an exchange may take, as a share of the turns between two exchanges."""


class PeriodChoice(NamedTuple):
    """A period, and the predictions that it follows from.

    Attributes:
        period: the least number of turns of which an exchange takes at most `EXCHANGE_SHARE`.
        turn: the predicted seconds of a turn without an exchange.
        exchange: the seconds that an exchange adds.
    """

    period: int
    turn: float
    exchange: float

    def __str__(self) -> str:
        return (
            f"period {show_count(self.period, 'turn')}: the least for which an exchange of "
            f"{show_seconds(self.exchange)} takes at most {EXCHANGE_SHARE:.0%} of turns of "
            f"{show_seconds(self.turn)}"
        )


def choose_period(
    quiet: ShardedGraph,
    exchanging: ShardedGraph,
    window: int,
    cluster: Cluster,
    fed: Mapping[str, int],
) -> PeriodChoice:
    """Return the least period for which exchanges take at most a tenth of the turns.

    Args:
        quiet: a window without an exchange.
        exchanging: the same window, with one exchange.
        window: the number of turns in a window.
        cluster: the cluster, whose links and devices are measured or described.
        fed: the sizes of symbols, as far as they are known.
    """
    alone, both = (_predict_seconds(division, cluster, fed) for division in (quiet, exchanging))
    turn, exchange = alone / window, max(0.0, both - alone)
    return PeriodChoice(max(1, ceil(exchange / (EXCHANGE_SHARE * turn) - 1e-9)), turn, exchange)


def _predict_seconds(division: ShardedGraph, cluster: Cluster, fed: Mapping[str, int]) -> float:
    """Return the seconds of a step that the simulator predicts."""
    graph = optimize(division.graph)
    known = division.bindings(fed)
    bindings = {
        symbol: known.get(symbol, division.partitioner.guess(Dim.symbol(symbol)))
        for symbol in symbols_of(graph.nodes)
    }
    learned, steps = known_of(cluster)
    return outlook(graph, cluster, bindings, learned=learned, steps=steps).seconds


__all__ = ["PeriodChoice", "choose_period"]
