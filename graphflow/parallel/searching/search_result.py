"""Found: what a search over strategies tried, to be printed; and the best of it, to be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from math import inf
from typing import Any, NoReturn

from graphflow.base.formatting import show_bytes
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Location, Node, user_location
from graphflow.parallel.mesh.count_arguments import set_frozen_fields
from graphflow.parallel.pipeline_strategy import Pipeline
from graphflow.parallel.report import StrategyReport, report_of
from graphflow.parallel.shard_strategy import Shard
from graphflow.parallel.sharding.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.placement.clusters.cluster import Cluster

MAX_SHOWN = 10
"""Strategies that were not simulated, and are printed."""
SAME_TIME = 1.03
"""Seconds that are apart by less than this factor are the same: predictions of a model's strategies
are off by more than that from one to the next, and a measured step is from run to run."""


@dataclass(frozen=True)
class CandidateResult:
    """A strategy, and what the simulator says of it.

    Attributes:
        name: in a few words.
        strategy: None for one device.
        seconds: of a step; infinite if it cannot be.
        memory: bytes of the device that needs most; 0 where it was not simulated.
        why_not: why it cannot be, or "".
        simulated: whether its graph was written and simulated; else `seconds` is by closed forms,
            and it would not have been the best, or the search had done enough.
        measured: seconds of a step on the cluster, where `auto` was told to measure.
        devices: over how many.
        sent: bytes that these send each other in a step; 0 where it was not simulated.
    """

    name: str
    strategy: Shard | Pipeline | None
    seconds: float
    memory: int
    why_not: str = ""
    simulated: bool = True
    measured: float | None = None
    devices: int = 1
    sent: int = 0

    @property
    def key(self) -> tuple[bool, bool, bool, float]:
        """Less is faster: what was measured counts before what was simulated, and that before what
        is roughly known."""
        return *self.confidence, self.best_seconds

    @property
    def confidence(self) -> tuple[bool, bool, bool]:
        """How well the seconds are known: less is better."""
        return bool(self.why_not), not self.simulated, self.measured is None

    @property
    def best_seconds(self) -> float:
        """Seconds of a step, as well as they are known."""
        return self.seconds if self.measured is None else self.measured


@dataclass(frozen=True, eq=False, repr=False)
class Search:
    """What was tried, the fastest first. It is a strategy itself: the best one. Print it.

    Attributes:
        device: what one device would be: the fastest.
    """

    tried: tuple[CandidateResult, ...]
    device: str
    line: Location = field(default_factory=user_location, init=False)

    @cached_property
    def best(self) -> CandidateResult:
        """What a step takes the least time with; of several that cannot be told apart the simplest,
        over the fewest devices, and then that which sends least."""
        first = self.tried[0]
        alike = [
            t
            for t in self.tried
            if t.confidence == first.confidence and t.best_seconds <= first.best_seconds * SAME_TIME
        ]
        return first if first.why_not else min(alike, key=lambda t: (t.devices, t.sent))

    def _best_strategy(self, cluster: Cluster) -> Shard | Pipeline:
        """The best strategy; on a cluster of one device, where all is checked, all of it there."""
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
        """As the best strategy does."""
        return self._best_strategy(cluster).divide(graph, cluster, known, fed)

    def report(self, fetches: Any, cluster: Cluster | None = None) -> StrategyReport:
        """What the best strategy makes of some fetches. Print it."""
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
        if len(rough) > MAX_SHOWN:
            yield f"  … and {len(rough) - MAX_SHOWN} more that were not simulated"
        if not self.best.why_not:
            yield f"chosen: {self.best.name}{self._why()}"

    def _why(self) -> str:
        """Why it was chosen, against the fastest of the others."""
        best, first = self.best, self.tried[0]
        if best is not first:
            more = f"{first.devices} devices instead of {best.devices}"
            if first.devices == best.devices:
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
