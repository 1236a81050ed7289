"""The results of a search, to be printed; and the best of them, to be used as a strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from math import inf
from typing import Any, NoReturn

from graphflow.base.formatting import show_bytes
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphflowError, MemoryLimitError, ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Location, Node, user_location
from graphflow.parallel.mesh.count_arguments import set_frozen_fields
from graphflow.parallel.pipeline_strategy import Pipeline
from graphflow.parallel.report import StrategyReport, report_of
from graphflow.parallel.shard_strategy import Shard
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.placement.clusters.cluster import Cluster

MAX_SHOWN = 10
"""The most candidates without simulation that are printed."""
SAME_TIME = 1.03
"""Times that differ by less than this factor count as equal. Predictions for one model differ by
more than that from one strategy to the next, and so do measured steps from run to run."""


@dataclass(frozen=True)
class CandidateResult:
    """A strategy, and what the simulator predicts of it.

    Attributes:
        name: the strategy in a few words.
        strategy: the strategy; None for one device.
        seconds: the seconds of a step; infinite if it cannot run.
        memory: the bytes of the fullest device; 0 if it was not simulated.
        why_not: why it cannot run, or "".
        simulated: whether its graph was written and simulated. Otherwise `seconds` is by closed
            forms: it would not have been the best, or the search had done enough.
        measured: the measured seconds of a step on the cluster, if `auto` was asked to measure.
        devices: the number of devices.
        sent: the bytes that these send each other in a step; 0 if it was not simulated. Both are
            means if some steps exchange more than others.
        seldom: the seconds, among `seconds`, of exchanges that most steps do not make.
        trade: what it changes in the numbers of training, or "".
    """

    name: str
    strategy: Any
    seconds: float
    memory: int
    why_not: str = ""
    simulated: bool = True
    measured: float | None = None
    devices: int = 1
    sent: int = 0
    seldom: float = 0.0
    trade: str = ""

    @property
    def key(self) -> tuple[bool, bool, bool, float]:
        """The sort key: measured results come before simulated ones, and these before estimates;
        then the seconds."""
        return *self.confidence, self.best_seconds

    @property
    def confidence(self) -> tuple[bool, bool, bool]:
        """How well the seconds are known; less is better."""
        return bool(self.why_not), not self.simulated, self.measured is None

    @property
    def best_seconds(self) -> float:
        """The seconds of a step, measured if they were measured."""
        return self.seconds if self.measured is None else self.measured


@dataclass(frozen=True, eq=False, repr=False)
class Search:
    """The results of a search, the fastest first. It is a strategy itself: the best one. Print it.

    Attributes:
        tried: the results.
        device: the fastest device, which one device would be.
    """

    tried: tuple[CandidateResult, ...]
    device: str
    line: Location = field(default_factory=user_location, init=False)

    @cached_property
    def best(self) -> CandidateResult:
        """The fastest result; among those within 3 %, one that leaves the numbers of training as
        they are, then the one with the fewest devices, and then the one that sends least."""
        first = self.tried[0]
        alike = [
            t
            for t in self.tried
            if t.confidence == first.confidence and t.best_seconds <= first.best_seconds * SAME_TIME
        ]
        return (
            first if first.why_not else min(alike, key=lambda t: (t.trade != "", t.devices, t.sent))
        )

    def _best_strategy(self, cluster: Cluster) -> Any:
        """Return the best strategy. On a cluster of one device, where steps are checked, all of it
        is there."""
        found = self.best.strategy
        if found is None:
            found = Shard(mesh={"one": 1}, devices=[self.device])
        if len(cluster.devices) > 1 or found.devices is None:
            return found
        made = replace(found, devices=None)
        set_frozen_fields(made, line=found.line)
        if isinstance(made, Pipeline) and isinstance(found, Pipeline):
            made.set_stages(found.stages_found)
        return made

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, ShardedVariable] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> ShardedGraph:
        """Partition a graph as the best strategy does."""
        division: ShardedGraph = self._best_strategy(cluster).divide(graph, cluster, known, fed)
        return division

    def report(self, fetches: Any, cluster: Cluster | None = None) -> StrategyReport:
        """Return what the best strategy makes of some fetches. Print it."""
        return report_of(self, fetches, cluster)

    def __mul__(self, other: Any) -> NoReturn:
        raise ShardingError(
            f"at {user_location()}: auto has tried products, too, and chose {self.best.name}; "
            "what it found is .best.strategy, and goes into products itself"
        )

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"<auto: {self.best.name}, the best of {len(self.tried)}>"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        """Yield the lines of the printed table."""
        width = max(len(each.name) for each in self.tried)
        one = next((t.seconds for t in self.tried if t.strategy is None), inf)
        rough = [each for each in self.tried if not each.simulated and not each.why_not]
        for each in self.tried:
            if each in rough[MAX_SHOWN:]:
                continue
            name = each.name.ljust(width)
            if each.why_not:
                yield f"  {name}  {each.why_not}"
            elif not each.simulated:
                yield f"  {name}  {each.seconds * 1e3:9.2f} ms, about: not simulated"
            else:
                times = f"{one / each.seconds:5.2f} x" if one < inf else "       "
                yield (
                    f"  {name}  {each.seconds * 1e3:9.2f} ms  {times}  {each.memory / 1e6:9.1f} MB"
                    + (f"  measured {each.measured * 1e3:.2f} ms" if each.measured else "")
                )
                if each.trade:
                    yield f"      sends {show_bytes(each.sent)} a step; {each.trade}"
        if len(rough) > MAX_SHOWN:
            yield f"  … and {len(rough) - MAX_SHOWN} more that were not simulated"
        if not self.best.why_not:
            yield f"chosen: {self.best.name}{self._why()}"

    def _why(self) -> str:
        """Explain why the best strategy was chosen and not the fastest of the others."""
        best, first = self.best, self.tried[0]
        if best is not first:
            more = f"{first.devices} devices instead of {best.devices}"
            if first.trade and not best.trade:
                more = f"other numbers: {first.trade}"
            elif first.devices == best.devices:
                more = f"{show_bytes(first.sent)} sent a step instead of {show_bytes(best.sent)}"
            ratio = best.best_seconds / first.best_seconds
            return (
                f"; {first.name} would be {ratio:.3f} times as fast, less than can be told apart, "
                f"for {more}"
            )
        second = next((t for t in self.tried[1:] if not t.why_not and t.simulated), None)
        if second is None:
            return ", as nothing else is possible"
        both = bool(best.measured and second.measured)
        ratio = second.best_seconds / best.best_seconds if both else second.seconds / best.seconds
        return f", {ratio:.2f} times as fast as {second.name}"


def refuse(name: str, strategy: Any, error: GraphflowError) -> CandidateResult:
    """Return the result of a strategy that cannot run, with the reason."""
    why, needed = _first_line(error), 0
    if isinstance(error, MemoryLimitError):
        why, needed = f"memory: {why}", max(error.needed, default=0)
    return CandidateResult(name, strategy, inf, needed, why)


def _first_line(error: GraphflowError) -> str:
    """Return the first line of an error's message, shortened."""
    line = str(error).partition("\n")[0]
    return line if len(line) <= 90 else line[:89] + "…"
