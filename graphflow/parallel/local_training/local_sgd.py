"""LocalSGD: replicas that train by themselves, and exchange their parameters every H turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NamedTuple

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Location, Node, Tensor, next_stream, user_location
from graphflow.optim import SGD, Optimizer
from graphflow.parallel.compression.filter import Filter, require_rule_for_changes
from graphflow.parallel.compression.replica_differences import DifferenceFilter
from graphflow.parallel.local_training.exchange_schedule import (
    TurnExchanges,
    schedule_exchanges,
    split_parameters,
)
from graphflow.parallel.local_training.outer_step import (
    OuterStep,
    build_outer_step,
    is_averaging,
)
from graphflow.parallel.local_training.parameter_exchange import (
    Exchanged,
    ExchangedBucket,
    Mean,
    begin_exchange,
    finish_exchange,
    mean_over_replicas,
    require_equal,
)
from graphflow.parallel.local_training.period_choice import PeriodChoice, choose_period
from graphflow.parallel.local_training.replica_strategy import ReplicaStrategy
from graphflow.parallel.local_training.replica_unroller import (
    APPLIES,
    REPLICA,
    SENDS_AFTER,
    ReplicaUnroller,
)
from graphflow.parallel.local_training.replicated_state import ReplicatedState
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields
from graphflow.parallel.resharding.gradient_buckets import BUCKET_BYTES
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.placement.clusters.cluster import Cluster
from graphflow.strategy import COUNTER, strategy_of


class _Sent(NamedTuple):
    """A fragment whose means are under way.

    Attributes:
        number: the number of the fragment.
        due: the turn after which they are applied.
        values: what each device had of each parameter when it was sent.
        means: the means of what went through a filter.
        plain: the other values that are exchanged: the same, or their differences from θ.
        buckets: the buckets in which these travel.
    """

    number: int
    due: int
    values: Sequence[Exchanged]
    means: Mapping[Node, Sequence[Tensor]]
    plain: Sequence[Exchanged]
    buckets: Sequence[ExchangedBucket]


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class LocalSGD(ReplicaStrategy):
    """Replicas that train by themselves and exchange their parameters every `period` turns.

    A run is a window of turns. It is fed the micro-batches of all replicas and turns, one after the
    other along the first axis: those of the first turn come first. Floats without axes come back as
    means over turns and replicas, tensors that the batch leads in the order of the feeds.
    `Session.get` returns the mean of a variable over replicas.

    Args:
        replicas: their number.
        period: the number of turns between two exchanges, H; "auto": the least for which an
            exchange takes at most a tenth of the turns, as the cluster's measured devices and links
            predict for the first step. Plans and reports print it.
        outer: the optimiser of the exchange, whose gradient is the mean over replicas of θ − θ_k: θ
            is the result of the last exchange, θ_k what a replica made of it. None (or SGD of rate
            1) takes the mean of the replicas. DiLoCo is `gf.optim.SGD(0.7, momentum=0.9,
            nesterov=True)`.
        fragments: the number of parts of the parameters that are exchanged at turns of their own,
            evenly over the period, so that a link is used more evenly.
        delay: the number of turns between sending a fragment and applying the result. The replicas
            train on meanwhile, and keep what they learn. A run ends with everything applied.
        window: the number of turns in a run.
        batch: the placeholders that hold the batch, or their names; default: those whose first axis
            has the symbol that most have. That axis has to be open.
        bucket: bytes of parameters that are exchanged at once; 0: each by itself.
        compress: a filter, such as `FixedPoint(8)`, through which replicas exchange differences
            from θ. A parameter of which it saves nothing travels as it is.
        devices: the devices of the replicas; default: the first of the cluster. In a product a list
            for each replica.
        inner: the strategy of the devices within a replica, as a product sets it.

    Raises:
        ShardingError: a count is invalid, the delay does not fit in a window; when a graph is
            partitioned: there are more replicas than devices, more fragments than parameters, the
            batch has a fixed size, or is smaller than replicas × turns, or `compress` saves
            nothing.
        CheckError: in a step that exchanges: integers that depend on the batch differ.

    Source: McMahan et al., AISTATS 2017 (FedAvg); Stich, ICLR 2019 (local SGD); Douillard et al.,
        arXiv:2311.08105 (DiLoCo) and arXiv:2501.18512 (streaming DiLoCo).
    """

    replicas: int
    period: int | str = "auto"
    outer: Optimizer | None = None
    fragments: int = 1
    delay: int = 0
    window: int = 1
    batch: Sequence[Tensor | str] | None = None
    bucket: int = BUCKET_BYTES
    devices: Sequence[str] | Sequence[Sequence[str]] | None = None
    inner: Any = None
    compress: Filter | None = None
    line: Location = field(default_factory=user_location, init=False, repr=False)
    _counters: dict[Node, Node] = field(default_factory=dict, init=False, repr=False)
    _outer: dict[tuple[Node, ...], OuterStep] = field(default_factory=dict, init=False, repr=False)
    _chosen: dict[int, tuple[Cluster, LocalSGD]] = field(
        default_factory=dict, init=False, repr=False
    )
    """For each cluster, by identity, the strategy with the period that was chosen."""
    _why: str = field(default="", init=False, repr=False)
    _filter: DifferenceFilter | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        where = f"LocalSGD at {self.line}"
        self.check_counts("replicas", "fragments", "window")
        if self.period != "auto":
            self.check_counts("period")
        delay = as_count(self.delay, least=0)
        if delay is None:
            raise ShardingError(f"{where}: delay must be a number of turns, not {self.delay!r}")
        set_frozen_fields(self, delay=delay)
        period = self.window if self.period == "auto" else self.turns_apart
        if delay and delay >= min(self.window, period):
            raise ShardingError(
                f"{where}: delay={delay} has to be less than the period of {self.period} turns, "
                f"and than the {self.window} turns of a run (window=), which ends with everything "
                "applied"
            )
        if self.outer is not None and not isinstance(self.outer, Optimizer):
            raise ShardingError(
                f"{where}: outer must be an optimiser, such as gf.optim.SGD(0.7, momentum=0.9, "
                f"nesterov=True), or None for the mean, not {self.outer!r}"
            )
        if isinstance(getattr(self.outer, "lr", None), Tensor):
            raise ShardingError(f"{where}: the rate of the outer optimiser must be a number")
        if self.compress is not None:
            if not isinstance(self.compress, Filter):
                raise ShardingError(
                    f"{where}: compress must be a filter, such as gf.parallel.FixedPoint(8), not "
                    f"{self.compress!r}"
                )
            require_rule_for_changes(self.compress, where)
            made = DifferenceFilter(self.compress, self.replicas, next_stream(), where)
            set_frozen_fields(self, _filter=made)

    @property
    def _outer_optimizer(self) -> Optimizer | None:
        """The optimiser of the exchange; None if the means of parameters are taken as they are."""
        if not is_averaging(self.outer):
            return self.outer
        return None if self.compress is None else SGD(1.0)  # a filter needs differences

    @property
    def cycle(self) -> int:
        """The number of turns after which the plans of windows repeat."""
        return self.turns_apart

    @property
    def first_differs(self) -> bool:
        """True if the plan of the first window is another than those of later ones."""
        return self._outer_optimizer is not None and (self.fragments > 1 or self.delay > 0)

    def is_in_step(self, done: int) -> bool:
        """Return True if all replicas have the same parameters after a number of turns."""
        if self.fragments > 1 or self.delay:
            return done == 0
        return self.window % self.turns_apart == 0 or done % self.turns_apart == 0

    def plan_window(self, done: int) -> tuple[TurnExchanges, ...]:
        """Return the fragments that are exchanged around each turn of a window.

        Args:
            done: the number of turns before the window.
        """
        turns = schedule_exchanges(done, self.window, self.turns_apart, self.fragments, self.delay)
        if self._outer_optimizer is None:  # nothing has to be noted at the beginning of a round
            return tuple(TurnExchanges((), turn.sent) for turn in turns)
        return turns

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, ShardedVariable] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> ShardedGraph:
        """Return the graph of a window for the devices of a cluster; see `ReplicaStrategy.divide`.

        With `period="auto"`, the first graph that trains on a cluster decides the period.

        Raises:
            ShardingError: see `LocalSGD`.
        """
        if self.period != "auto":
            return super().divide(graph, cluster, known, fed)
        key = id(cluster)
        if strategy_of(graph) is None:
            _, chosen = self._chosen.get(key, (cluster, self._with_period(1)))
            return chosen.divide(graph, cluster, known, fed)
        if key not in self._chosen:
            choice = self.choose_period(graph, cluster, fed)
            self._chosen[key] = cluster, self._with_period(choice.period, str(choice))
        return self._chosen[key][1].divide(graph, cluster, known, fed)

    def choose_period(
        self, graph: Graph, cluster: Cluster, fed: Mapping[str, int] | None = None
    ) -> PeriodChoice:
        """Return the period that "auto" stands for, and the predictions that it follows from.

        Args:
            graph: the graph, with gradients and updates.
            cluster: the cluster.
            fed: the sizes of symbols, as far as they are known.

        Raises:
            ShardingError: see `LocalSGD`.
        """
        sizes = {s: n for s, n in (fed or {}).items() if s != COUNTER}
        plain = replace(self._with_period(2 * self.window), fragments=1, delay=0)
        quiet = plain.divide(graph, cluster, None, {**sizes, COUNTER: 0})
        ending = plain.divide(graph, cluster, None, {**sizes, COUNTER: self.window})
        return choose_period(quiet, ending, self.window, cluster, sizes)

    def _with_period(self, period: int, why: str = "") -> LocalSGD:
        """Return the strategy with another period, and the same counters."""
        made = replace(self, period=period, delay=min(self.delay, max(0, period - 1)))
        set_frozen_fields(
            made, line=self.line, _counters=self._counters, _outer=self._outer, _why=why,
            _filter=self._filter,
        )  # fmt: skip
        return made

    @property
    def turns_apart(self) -> int:
        """The number of turns between two exchanges of a parameter."""
        assert isinstance(self.period, int)
        return self.period

    def describe_window(self, unroller: ReplicaUnroller) -> Sequence[str]:
        """Return sentences for plans and reports: how often, and how much."""
        records = [r for r in unroller.builder.records if REPLICA in r.axis.split("×")]
        total = sum(record.bytes for record in records)
        name = show_count(self.fragments, "fragment")
        each = f"in {name} " if self.fragments > 1 else ""
        note = (
            f"LocalSGD: parameters are exchanged {each}every {show_count(self.turns_apart, 'turn')}"
        )
        if total:
            note += f", {total:,} bytes in this run between replicas"
        return (note, self._why) if self._why else (note,)

    def emit_window(
        self, unroller: ReplicaUnroller, state: ReplicatedState, plan: Sequence[TurnExchanges]
    ) -> None:
        """Write the turns of a window, and the exchanges between them.

        Raises:
            ShardingError: there are more fragments than parameters.
        """
        if self.fragments > len(state.parameters):
            raise ShardingError(
                f"fragments={self.fragments}, but the step trains only {len(state.parameters)} "
                "variables, and each fragment is one at least"
            )
        fragments = split_parameters(state.parameters, self.fragments)
        steps = [self._outer_step(unroller, fragment) for fragment in fragments]
        under_way: list[_Sent] = []
        for turn, (begins, sent) in enumerate(plan):
            for number in begins:
                self._note_references(unroller, fragments[number], steps[number])
            unroller.emit_turn(turn)
            for number in sent:
                if number == 0:
                    unroller.enter(turn, APPLIES)
                    self._average(unroller, state)
                unroller.enter(turn, SENDS_AFTER)
                due = min(turn + self.delay, self.window - 1)
                under_way.append(
                    self._send(unroller, number, due, fragments[number], steps[number])
                )
            unroller.enter(turn, APPLIES)
            for each in under_way:
                if each.due == turn:
                    self._apply(unroller, each, steps[each.number])

    def _outer_step(self, unroller: ReplicaUnroller, fragment: Sequence[Node]) -> OuterStep | None:
        """Return the outer step of a fragment, with its variables among the unroller's; None if the
        mean is taken."""
        outer = self._outer_optimizer
        if outer is None:
            return None
        key = tuple(fragment)
        if key not in self._outer:
            self._outer[key] = build_outer_step(outer, fragment)
        for node in self._outer[key].graph.variables:
            unroller.add_derived(node)
        return self._outer[key]

    def _note_references(
        self, unroller: ReplicaUnroller, fragment: Sequence[Node], step: OuterStep | None
    ) -> None:
        """Take the parameters, which all replicas have by now, as the θ of a round."""
        if step is not None:
            for node in fragment:
                unroller.current[step.references[node]] = [*unroller.current[node]]

    def _average(self, unroller: ReplicaUnroller, state: ReplicatedState) -> None:
        """Take the means of float state that is not trained, and check integers."""
        values = [Exchanged(v, unroller.current[v]) for v in state.averaged]
        for value, mean in zip(
            values, mean_over_replicas(unroller, values, self.bucket), strict=True
        ):
            unroller.current[value.variable] = mean
        for node in state.equal:
            unroller.current[node] = require_equal(unroller, node)

    def _send(
        self,
        unroller: ReplicaUnroller,
        number: int,
        due: int,
        fragment: Sequence[Node],
        step: OuterStep | None,
    ) -> _Sent:
        """Begin the exchange of a fragment, whose result is applied after turn `due`."""
        values = [Exchanged(node, [*unroller.current[node]]) for node in fragment]
        given = values
        if step is not None:
            given = [
                Exchanged(
                    node,
                    unroller.difference(node, unroller.current[step.references[node]], own),
                )
                for node, own in values
            ]
        means: dict[Node, list[Tensor]] = {}
        if self._filter is not None:
            means = self._filter.exchange(unroller, given, (unroller.rank, number), self.bucket)
        plain = [each for each in given if each.variable not in means]
        buckets = begin_exchange(unroller, plain, self.bucket)
        return _Sent(number, due, values, means, plain, buckets)

    def _apply(self, unroller: ReplicaUnroller, sent: _Sent, step: OuterStep | None) -> None:
        """Continue from the result of an exchange, with what was learnt since it was sent."""
        found = finish_exchange(unroller, sent.plain, sent.buckets, Mean())
        fresh: dict[Node, Sequence[Tensor]] = {**sent.means}
        fresh |= {value.variable: mean for value, mean in zip(sent.plain, found, strict=True)}
        if step is not None:
            step.take(unroller, fresh)
            fresh = {node: unroller.current[step.references[node]] for node in fresh}
        for node, before in sent.values:
            now, after = unroller.current[node], fresh[node]
            if any(a is not b for a, b in zip(now, before, strict=True)):
                after = unroller.add(node, after, unroller.difference(node, now, before))
            unroller.current[node] = [*after]


__all__ = ["LocalSGD"]
