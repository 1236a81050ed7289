"""Found: what a search over strategies tried, to be printed; and the best of it, to be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NoReturn

from graphflow.errors import ShardingError
from graphflow.graph import Graph
from graphflow.op import Location, Node, user_location
from graphflow.parallel.counts import settle
from graphflow.parallel.pipelines import Pipeline
from graphflow.parallel.report import Report
from graphflow.parallel.shard import Pieces, Sharded
from graphflow.parallel.strategies import Shard, report_of
from graphflow.placement.cluster import Cluster

SHOWN = 10
"""Strategies that were not simulated, and are printed."""


@dataclass(frozen=True)
class Tried:
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
    """

    name: str
    strategy: Any
    seconds: float
    memory: int
    why_not: str = ""
    simulated: bool = True
    measured: float | None = None

    @property
    def key(self) -> tuple[bool, bool, float, float]:
        """Less is better: what was measured counts before what was simulated, and that before what
        is roughly known."""
        told = self.seconds if self.measured is None else self.measured
        return bool(self.why_not), not self.simulated, self.measured is None, told


@dataclass(frozen=True, eq=False, repr=False)
class Search:
    """What was tried, best first. It is a strategy itself: the best one. Print it.

    Attributes:
        device: what one device would be: the fastest.
    """

    tried: tuple[Tried, ...]
    device: str
    line: Location = field(default_factory=user_location, init=False)

    @property
    def best(self) -> Tried:
        """What a step takes the least time with."""
        return self.tried[0]

    def _chosen(self, cluster: Cluster) -> Any:
        """The best strategy; on a cluster of one device, where all is checked, all of it there."""
        found = self.best.strategy
        if found is None:
            found = Shard(mesh={"one": 1}, devices=[self.device])
        if len(cluster.devices) > 1 or found.devices is None:
            return found
        made = replace(found, devices=None)
        settle(made, line=found.line)
        if isinstance(made, Pipeline):
            made.found(found.stages_found)
        return made

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, Pieces] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> Sharded:
        """As the best strategy does."""
        made: Sharded = self._chosen(cluster).divide(graph, cluster, known, fed)
        return made

    def report(self, fetches: Any, cluster: Cluster | None = None) -> Report:
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
            if each in rough[SHOWN:]:
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
        if len(rough) > SHOWN:
            yield f"  … and {len(rough) - SHOWN} more that were not simulated"
        if not self.best.why_not:
            yield f"chosen: {self.best.name}{self._why()}"

    def _why(self) -> str:
        second = next((t for t in self.tried[1:] if not t.why_not and t.simulated), None)
        if second is None:
            return ", as nothing else is possible"
        if self.best.measured and second.measured:
            ratio = second.measured / self.best.measured
        else:
            ratio = second.seconds / self.best.seconds
        return f", {ratio:.2f} times as fast as {second.name}"
