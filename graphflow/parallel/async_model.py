"""AsyncModel: model parallelism that exchanges its sums once in several turns.

    gf.parallel.AsyncModel("model", refresh=4)
    * gf.parallel.Shard({"model": 2}, {"x": (None, "model"), "w": ("model",)})

With features split over workers, Xw = Σ_k X_k w_k. In between two exchanges, each worker adds to
its own partial sum, which is up to date, what the others had at the last exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Location, Node, user_location
from graphflow.parallel.data import Data
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.parallel.report import report_of
from graphflow.parallel.shard_strategy import Shard
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.parallel.stale_sums.divide_window import divide_window
from graphflow.parallel.stale_sums.stale_report import StaleReport
from graphflow.placement.clusters.cluster import Cluster


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class AsyncModel:
    """Tensor parallelism with stale sums, as a product with the Shard that says what is cut.

    One `run` of a training step is a window of `refresh` turns on the same feeds. Turn 0 computes
    as the Shard does. In a later turn, a sum over the axis is a place's own part, plus what the
    others had in turn 0. Each turn updates the variables; the window commits as a whole.

    Fetches are those of turn 0, as the Shard would return them; assignments those after the window.
    A variable that is whole along the axis, such as a bias, is trained by the first place, and the
    others receive it at the end of the window.

    Args:
        axis: the mesh axis over which sums are exchanged once a window.
        refresh: the turns of a window; 1: the Shard itself.
        beside: the strategy that says what is cut, as a product sets it.

    Raises:
        ShardingError: when a graph is partitioned: the mesh has no such axis, or it cuts the batch;
            no trained variable is cut along it; nothing is summed over it; something else than a
            sum would have to travel along it in each turn.

    Source: Bertsekas & Tsitsiklis, "Parallel and Distributed Computation", 1989, chapter 7
        (partially asynchronous iterations).
    """

    axis: str
    refresh: int = 1
    beside: Any = None
    line: Location = field(default_factory=user_location, init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"AsyncModel at {self.line}"
        if not isinstance(self.axis, str) or not self.axis:
            raise ShardingError(
                f"{where}: axis must be the name of an axis of the Shard's mesh, not {self.axis!r}"
            )
        turns = as_count(self.refresh)
        if turns is None:
            raise ShardingError(
                f"{where}: refresh must be an int of at least 1, not {self.refresh!r}"
            )
        set_frozen_fields(self, refresh=turns)
        if self.beside is not None:
            _check_beside(self.axis, self.beside, where)

    def __mul__(self, other: Any) -> AsyncModel:
        """Return the product with the Shard that says what is cut, or with a Data."""
        beside = other if self.beside is None else self.beside * other
        _check_beside(self.axis, beside, f"AsyncModel at {user_location()}")
        product = replace(self, beside=beside)
        set_frozen_fields(product, line=user_location())
        return product

    __rmul__ = __mul__

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, ShardedVariable] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> ShardedGraph:
        """Return the partitioned window for the devices of a cluster.

        Args:
            graph: the graph of one turn, with gradients and updates.
            cluster: the cluster.
            known: the shards of variables that exist already.
            fed: the sizes of symbols, if a step is about to be fed.

        Raises:
            ShardingError: see `AsyncModel`.
        """
        if not isinstance(self.beside, Shard):
            raise ShardingError(
                f"AsyncModel does not say what is cut along {self.axis!r}; write "
                f"AsyncModel({self.axis!r}, refresh={self.refresh}) * gf.parallel.Shard("
                f'{{{self.axis!r}: 2}}, {{"x": (None, {self.axis!r}), "w": ({self.axis!r},)}})'
            )
        if self.refresh == 1 or not graph.of_op("assign"):
            return self.beside.divide(graph, cluster, known, fed)
        return divide_window(self.beside, self.axis, self.refresh, graph, cluster, known, fed)

    def report(
        self, fetches: Any, cluster: Cluster | None = None, more_turns: float | None = None
    ) -> StaleReport:
        """Return what the strategy makes of some fetches, and on which links it pays. Print it.

        Args:
            fetches: what a step fetches.
            cluster: the cluster; default: this process.
            more_turns: how many times as many turns you found that training needs; None: not known.

        Raises:
            ShardingError: `more_turns` is no number of at least 1; see `AsyncModel`.
        """
        number = isinstance(more_turns, int | float) and not isinstance(more_turns, bool)
        if more_turns is not None and (not number or not 1 <= more_turns < float("inf")):
            raise ShardingError(
                f"report at {user_location()}: more_turns must be a number of at least 1 (times as "
                f"many turns as without stale sums), not {more_turns!r}"
            )
        own = report_of(self, fetches, cluster)
        exact = own if self.refresh == 1 else report_of(self.beside, fetches, cluster)
        return StaleReport(own.division, own.cluster, exact.division, self.refresh, more_turns)


def _check_beside(axis: str, beside: Any, where: str) -> None:
    """Check that sums over an axis of another strategy may be stale.

    Raises:
        ShardingError: it is neither a Data nor a Shard; the mesh lacks the axis; the axis cuts the
            batch or the sequence; or there are micro-batches.
    """
    if not isinstance(beside, Data | Shard):
        raise ShardingError(
            f"{where}: an AsyncModel goes with a Shard, and a Data if you like, not with "
            f"{beside!r}; write AsyncModel(…) * gf.parallel.Shard(…)"
        )
    if isinstance(beside, Data):
        return  # a Shard is still to come
    if axis not in beside.mesh:
        raise ShardingError(
            f"{where}: axis must be one of the mesh ({', '.join(beside.mesh)}), not {axis!r}"
        )
    for what in ("batch", "sequence"):
        if getattr(beside, what) == axis:
            raise ShardingError(
                f"{where}: {axis!r} cuts the {what}, whose sums are gradients of the same "
                "variables; cut variables along another axis, and make that one stale"
            )
    if beside.accumulate > 1:
        raise ShardingError(
            f"{where}: accumulate={beside.accumulate} splits a batch into micro-batches, and a "
            "window repeats one batch; leave out accumulate="
        )


__all__ = ["AsyncModel"]
