"""One run of the search for the best strategy: which candidates are partitioned and simulated.

Candidates are tried in the order of their closed forms. The search ends when no other one can win
and showing more of them would take longer than a moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Any

from graphflow import optim
from graphflow.base.formatting import show_bytes
from graphflow.base.process.gc_pause import without_collection
from graphflow.errors import (
    DeviceError,
    GraphflowError,
    MemoryLimitError,
    ScheduleError,
    ShardingError,
)
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.frontend.builders import placeholder
from graphflow.frontend.pytree import bind
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import evaluate
from graphflow.parallel.data import Data
from graphflow.parallel.local_training.local_sgd import LocalSGD
from graphflow.parallel.pipeline_strategy import Pipeline
from graphflow.parallel.pipelining.stages import stages_of
from graphflow.parallel.searching.candidates import StrategyCandidate, candidates, tensor_rules
from graphflow.parallel.searching.cost_bounds import StepBounds, StepModel
from graphflow.parallel.searching.inexact_strategies import (
    InexactStrategy,
    describe_drift,
    inexact_strategies,
)
from graphflow.parallel.searching.search_result import SAME_TIME, CandidateResult, refuse
from graphflow.parallel.sharding.propagation.batch_axis import batch_placeholders
from graphflow.passes import optimize
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.problem_builder import build_problem
from graphflow.placement.plans.building.outlook import outlook
from graphflow.placement.plans.building.plan_fetches import known_of, sizes_of
from graphflow.planning.feedback.trace_feedback import is_known, save_corrections
from graphflow.planning.trials.profiling_run import SEARCH, profile_first_steps
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from graphflow.sessions.session import Session

NODE_BUDGET = 60_000
"""How many nodes of candidates are written: some seconds' worth. At least `MIN_SIMULATED`
candidates are simulated, and more until one fits in memory."""
HOPELESS_BUDGET = 20_000
"""The part of the budget for candidates that cannot win by closed forms. They are shown for
comparison."""
MIN_SIMULATED = 3
"""The least number of candidates that are simulated."""
MEMORY_MARGIN = 1.1
"""If a candidate exceeds the memory by this factor, candidates that need about as much are refused,
too."""


class StrategySearch:
    """One search: the step, the cluster, and the results so far."""

    def __init__(
        self,
        loss: Tensor,
        cluster: Cluster,
        shapes: Mapping[Tensor, Sequence[int]],
        optimizer: optim.Optimizer,
        memory: int | None,
        trial: bool,
    ) -> None:
        self._loss, self._cluster, self._memory, self._trial = loss, cluster, memory, trial
        self._optimizer = optimizer
        train = optimizer.minimize(loss, strategy=Data(1))  # strategies partition such a graph
        self._fetches = (loss, train)
        self._source = Graph(self._fetches).verify()
        self._sizes = sizes_of(self._source, shapes)
        self._bindings = bind(self._source, self._sizes)
        if trial:
            _measure_workers(cluster)
        learned, self._steps = known_of(cluster)
        self._learned = learned or TraceCorrections()
        self._rules = tensor_rules(loss)
        self._stages: dict[int, dict[Node, int] | GraphflowError] = {}
        self._too_large: list[tuple[StrategyCandidate, int]] = []
        self._doing = ""
        self._names = cluster.devices
        self._taken = () if cluster.is_automatic else self._names  # unless a strategy names devices
        problem = build_problem(self._source, cluster, self._bindings, learned=self._learned)
        overhead = self._steps or (0.0, 0.0)
        self._outline = StepModel(problem, loss, cluster, self._rules, overhead)
        totals = self._outline.totals()
        order = sorted(range(len(self._names)), key=lambda i: (totals[i], i))
        self.fastest = [self._names[i] for i in order]

    def progress(self, seconds: float) -> str:
        """Describe the current candidate."""
        return f"strategies: {self._doing}"

    # Search -----------------------------------------------------------------------------------

    def run(self) -> list[CandidateResult]:
        """Return the results of all candidates, in any order."""
        queue, tried = self._rank_candidates()
        spent, written, best = 0, 0, inf
        while queue:
            rough, candidate = queue.pop(0)
            nodes = len(self._source.nodes) * candidate.places
            room = HOPELESS_BUDGET if rough.min_seconds >= best * SAME_TIME else NODE_BUDGET
            enough = written >= MIN_SIMULATED and best < inf and spent + nodes > room
            if len(candidate.devices) > 1 and enough:
                strategy = self._strategy(candidate)
                tried.append(
                    CandidateResult(
                        candidate.name, strategy, rough.seconds, 0, simulated=False,
                        devices=len(candidate.devices),
                    )
                )  # fmt: skip
                continue
            self._doing = f"{candidate.name}, {len(tried) + 1} of {len(tried) + len(queue) + 1}"
            found = self._refuse_by_memory(candidate, rough)
            if found is None:
                found = self._simulate(candidate)
                spent, written = spent + nodes, written + 1
            tried.append(found)
            if found.why_not.startswith("memory"):
                self._too_large.append((candidate, found.memory))
                again = candidate.leaner()
                if again is not None:
                    queue.insert(0, (self._bounds(again), again))
            best = min(best, found.seconds)
        return tried

    def _rank_candidates(
        self,
    ) -> tuple[list[tuple[StepBounds, StrategyCandidate]], list[CandidateResult]]:
        """Return candidates with their bounds, the most promising first; and results of impossible
        ones."""
        queue, refused = [], []
        for candidate in candidates(self.fastest, self._rules):
            try:
                queue.append((self._bounds(candidate), candidate))
            except (ScheduleError, ShardingError) as error:
                refused.append(self._refuse(candidate, error))
        return sorted(queue, key=lambda pair: pair[0].seconds), refused

    def _bounds(self, candidate: StrategyCandidate) -> StepBounds:
        """Return the bounds of a candidate by closed forms.

        Raises:
            ScheduleError, ShardingError: the candidate is impossible.
        """
        shares = candidate.data * candidate.microbatches
        if shares > 1 and self._batch < shares:
            raise ShardingError(f"a batch of {self._batch} is smaller than its {shares} parts")
        return self._outline.bounds(candidate, self._stages_of(candidate))

    @cached_property
    def _batch(self) -> int:
        """The number of samples in a step."""
        sizes = [evaluate(t.shape[0], self._bindings) for t in batch_placeholders(self._source)]
        if not sizes:
            raise ShardingError("nothing is fed that could be cut as a batch")
        return int(min(sizes))

    def _stages_of(self, candidate: StrategyCandidate) -> dict[Node, int] | None:
        """Return the stages of a candidate's pipeline, None if it has none. Each number of stages
        is split once.

        Raises:
            ScheduleError: there is no such split.
        """
        if not candidate.schedule:
            return None
        count = candidate.stages * candidate.chunks
        if count not in self._stages:
            try:
                self._stages[count] = stages_of(self._loss, count, self._cluster)
            except ScheduleError as error:
                self._stages[count] = error
        found = self._stages[count]
        if isinstance(found, GraphflowError):
            raise found
        return found

    def _strategy(self, candidate: StrategyCandidate) -> Any:
        """Return the strategy of a candidate, with the stages that were found."""
        made = candidate.strategy(self._rules, self._taken)
        if isinstance(made, Pipeline):
            found = self._stages_of(candidate)
            assert found is not None
            made.set_stages(found)
        return made

    def _refuse(self, candidate: StrategyCandidate, error: GraphflowError) -> CandidateResult:
        """Return the result of a candidate that cannot run."""
        return refuse(candidate.name, candidate.strategy(self._rules, self._taken), error)

    def _refuse_by_memory(
        self, candidate: StrategyCandidate, rough: StepBounds
    ) -> CandidateResult | None:
        """Return a result if a candidate surely needs too much memory; None if it has to be
        simulated.

        It does if its lower bound exceeds the memory, or if a candidate that needs no more was
        refused.
        """
        room = max(self._memory_limit(name) for name in candidate.devices)
        needed, why = int(rough.min_memory), "at least"
        for other, known in self._too_large:
            if known > max(needed, MEMORY_MARGIN * room) and candidate.takes_as_much_as(other):
                needed, why = known, f"as {other.name},"
        if needed <= room:
            return None
        why = f"memory: {why} {show_bytes(needed)} of {show_bytes(room)}"
        return CandidateResult(candidate.name, self._strategy(candidate), inf, needed, why)

    def _memory_limit(self, name: str) -> float:
        """Return the bytes of a device that may be used."""
        return min(self._cluster.device(name).memory, self._memory or inf)

    def try_inexact(self, tried: Sequence[CandidateResult]) -> list[CandidateResult]:
        """Return the results of strategies that change the numbers of training.

        Args:
            tried: the results of exact ones.
        """
        best = min(tried, key=lambda t: t.key)
        counts = sorted({len(self.fastest), best.devices} - {1})
        return [
            self._simulate_inexact(each, count)
            for count in counts
            for each in inexact_strategies(count, self._name_devices(self.fastest[:count]))
        ]

    def _name_devices(self, devices: Sequence[str]) -> Sequence[str] | None:
        """Return names of devices; None for the first ones of the cluster."""
        return None if list(devices) == list(self._names[: len(devices)]) else devices

    def _simulate_inexact(self, each: InexactStrategy, devices: int) -> CandidateResult:
        """Partition and simulate a strategy that changes the numbers of training."""
        self._doing = each.name
        strategy = each.strategy
        if not isinstance(strategy, LocalSGD):
            source = Graph(self.training_fetches(strategy))  # filters have variables of their own
            found = self._predict(each.name, strategy, devices, source)
            return replace(found, trade=each.trade)
        try:
            choice = strategy.choose_period(self._source, self._cluster, self._bindings)
        except (MemoryLimitError, ShardingError, ScheduleError, DeviceError) as error:
            return refuse(each.name, strategy, error)
        ending = replace(strategy, period=choice.period)
        found = self._predict(each.name, ending, devices)
        exchange = max(0.0, found.seconds - choice.turn)
        mean = exchange / choice.period
        return replace(
            found,
            seconds=found.seconds - exchange + mean,
            sent=round(found.sent / choice.period),
            seldom=mean if choice.period > 1 else 0.0,
            trade=describe_drift(each.trade, choice.period),
        )

    def _simulate(self, candidate: StrategyCandidate) -> CandidateResult:
        """Partition and simulate a candidate."""
        return self._predict(candidate.name, self._strategy(candidate), len(candidate.devices))

    @without_collection
    def _predict(
        self, name: str, strategy: Any, devices: int, source: Graph | None = None
    ) -> CandidateResult:
        """Partition the step by a strategy over so many devices, and simulate it.

        Args:
            source: the step, if it is another than for exact strategies.
        """
        try:
            bindings, graph = self._bindings, source or self._source
            if strategy is not None:
                cut = strategy.divide(graph, self._cluster, None, bindings)
                bindings, graph = cut.bindings(bindings), cut.graph
            graph = optimize(graph)
            self._profile_nodes(graph, bindings, devices > 1)
            placer = "single" if strategy is None else "greedy"
            seen = outlook(graph, self._cluster, bindings, placer, self._learned, self._steps)
        except (MemoryLimitError, ShardingError, ScheduleError, DeviceError) as error:
            return refuse(name, strategy, error)
        peak = max(seen.peak_memory.values())
        for device, own in seen.peak_memory.items():
            limit = self._memory_limit(device)
            if own > limit:
                why = f"memory: {show_bytes(own)} of {show_bytes(limit)}"
                return CandidateResult(name, strategy, inf, own, why)
        return CandidateResult(name, strategy, seen.seconds, peak, devices=devices, sent=seen.sent)

    def _profile_nodes(self, graph: Graph, bindings: Mapping[str, int], busy: bool) -> None:
        """Profile the nodes of a candidate in this process, if that is allowed."""
        if not self._trial or not is_known(self._cluster):
            return
        made = CompiledFetches(tuple(graph.outputs), graph, graph)
        if profile_first_steps(
            self._learned, self._cluster, ClusterSurvey(), made, bindings, busy=busy, limits=SEARCH
        ):
            save_corrections(self._learned, self._cluster)

    # Measuring --------------------------------------------------------------------------------

    def training_fetches(self, strategy: Any) -> list[Tensor]:
        """Return the fetches of a training step with a strategy."""
        return [self._loss, self._optimizer.minimize(self._loss, strategy=strategy)]

    @cached_property
    def synthetic_feeds(self) -> dict[Tensor, Any]:
        """Random arrays for all placeholders."""
        from graphflow.planning.trials.profiling_run import synthetic_feeds

        return {n.outputs[0]: a for n, a in synthetic_feeds(self._source, self._bindings).items()}


def _measure_workers(cluster: Cluster) -> None:
    """Measure the overheads of steps and links on this machine's workers, if they are not known
    yet."""
    if cluster.kind != "local" or len(cluster.workers) < 2:
        return
    if known_of(cluster)[1] is None:
        x = placeholder("float32", ())
        with Session(cluster, trial=False) as session:  # the session measures its cluster
            session.run(x + 1.0, {x: 0.0})
