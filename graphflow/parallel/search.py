"""The search over strategies: meshes, stages, schedules, micro-batches and recomputation, each
planned in the simulator with what the cluster was measured to take.

    found = gf.parallel.auto(loss, gf.Cluster.local(2), shapes={x: (64, 784)})
    train = gf.optim.Adam(1e-3).minimize(loss, strategy=found)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from graphflow import optim
from graphflow.errors import (
    ArgumentError,
    GraphflowError,
    MemoryLimitError,
    ScheduleError,
    ShardingError,
)
from graphflow.graph import Graph
from graphflow.op import Node, Tensor, user_location
from graphflow.parallel.data import Data
from graphflow.parallel.pipelines import Pipeline
from graphflow.parallel.report import Report
from graphflow.parallel.shard import Pieces, Sharded
from graphflow.parallel.strategies import Shard, report_of
from graphflow.placement.cluster import Cluster
from graphflow.placement.plan import plan
from graphflow.progress import telling

SCHEDULES = ("1f1b", "zb-h1", "interleaved")
"""Schedules that are tried; GPipe stores more than 1F1B and is never sooner done."""
TURNS = (1, 2, 4)
"""Micro-batches that are tried, in multiples of the stages."""


@dataclass(frozen=True)
class Tried:
    """A strategy, and what the simulator says of it.

    Attributes:
        name: in a few words.
        strategy: None for one device.
        seconds: of a step; infinite if it cannot be.
        memory: bytes of the device that needs most.
        why_not: why it cannot be, or "".
    """

    name: str
    strategy: Any
    seconds: float
    memory: int
    why_not: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Search:
    """What was tried, best first. It is a strategy itself: the best one. Print it."""

    tried: tuple[Tried, ...]

    @property
    def best(self) -> Tried:
        """What a step takes the least time with."""
        return self.tried[0]

    def divide(
        self,
        graph: Graph,
        cluster: Cluster,
        known: Mapping[Node, Pieces] | None = None,
        fed: Mapping[str, int] | None = None,
    ) -> Sharded:
        """As the best strategy does."""
        chosen = self.best.strategy
        whole = Shard(mesh={"one": 1}) if chosen is None else chosen
        made: Sharded = whole.divide(graph, cluster, known, fed)
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
        one = next((t.seconds for t in self.tried if t.strategy is None), self.best.seconds)
        for each in self.tried:
            if each.why_not:
                yield f"  {each.name.ljust(width)}  {each.why_not}"
            else:
                yield (
                    f"  {each.name.ljust(width)}  {each.seconds * 1e3:9.2f} ms  "
                    f"{one / each.seconds:5.2f} x  {each.memory / 1e6:9.1f} MB"
                )
        yield f"chosen: {self.best.name}{self._why()}"

    def _why(self) -> str:
        second = next((t for t in self.tried[1:] if not t.why_not), None)
        if second is None:
            return ", as nothing else is possible"
        return f", {second.seconds / self.best.seconds:.2f} times as fast as {second.name}"


def auto(
    loss: Tensor,
    cluster: Cluster | None = None,
    *,
    shapes: Mapping[Tensor, Sequence[int]] | None = None,
    optimizer: optim.Optimizer | None = None,
    memory: int | None = None,
    quiet: bool = False,
) -> Search:
    """Look for the strategy with which a training step takes the least time, and print what was
    tried.

    Data, tensor and pipeline parallelism and their combinations, over as many devices as the
    cluster has; splits into stages by the planner; several schedules and numbers of micro-batches;
    with recomputation where it does not fit in memory without.

    Args:
        cluster: default: this process.
        shapes: of placeholders with sizes that are not known.
        optimizer: default: Adam.
        memory: bytes of each device that may be used; default: what the devices have.
        quiet: print nothing.

    Raises:
        MemoryLimitError: nothing fits; the message lists what was tried.
        PlanError: a shape is missing.
        ArgumentError: another argument is not what it should be.
    """
    _check(cluster, optimizer, memory)
    there = Cluster.here() if cluster is None else cluster
    made = optimizer or optim.Adam()
    count = len(there.devices)
    candidates = list(_candidates(loss, count))
    tried = []
    with telling("strategies", len(candidates)):
        for name, strategy in candidates:
            found = _tried(name, strategy, loss, there, shapes, made, memory)
            tried.append(found)
            if found.why_not.startswith("memory") and isinstance(strategy, Pipeline):
                again = replace(strategy, recompute=True)
                name = f"{name}, recomputing"
                tried.append(_tried(name, again, loss, there, shapes, made, memory))
    ranked = Search(tuple(sorted(tried, key=lambda t: (t.seconds, len(t.name)))))
    if ranked.best.why_not:
        raise MemoryLimitError(f"auto at {user_location()}: no strategy fits\n{ranked}")
    if not quiet:
        print(ranked)
    return ranked


def _check(cluster: Any, optimizer: Any, memory: Any) -> None:
    where = f"auto at {user_location()}"
    if cluster is not None and not isinstance(cluster, Cluster):
        raise ArgumentError(f"{where}: a search is for a gf.Cluster, not {cluster!r}")
    if optimizer is not None and not isinstance(optimizer, optim.Optimizer):
        raise ArgumentError(
            f"{where}: optimizer is one of gf.optim's, such as gf.optim.Adam(), not {optimizer!r}"
        )
    if memory is not None and (
        isinstance(memory, bool) or not isinstance(memory, int) or memory < 1
    ):
        raise ArgumentError(
            f"{where}: memory is a number of bytes for each device, such as 8 << 30, not {memory!r}"
        )


def _tried(
    name: str,
    strategy: Any,
    loss: Tensor,
    cluster: Cluster,
    shapes: Mapping[Tensor, Sequence[int]] | None,
    optimizer: optim.Optimizer,
    memory: int | None,
) -> Tried:
    train = optimizer.minimize(loss, strategy=strategy)
    try:
        placer = "single" if strategy is None else "greedy"
        made = plan([loss, train], cluster, shapes, placer)
    except MemoryLimitError as error:
        return Tried(name, strategy, float("inf"), 0, f"memory: {_first(error)}")
    except (ShardingError, ScheduleError) as error:
        return Tried(name, strategy, float("inf"), 0, _first(error))
    peak = max(made.peak_memory.values())
    if memory is not None and peak > memory:
        why = f"memory: {peak / 1e6:.1f} MB of {memory / 1e6:.1f}"
        return Tried(name, strategy, float("inf"), peak, why)
    return Tried(name, strategy, made.makespan, peak)


def _first(error: GraphflowError) -> str:
    line = str(error).partition("\n")[0]
    return line if len(line) <= 90 else line[:89] + "…"


# Candidates -----------------------------------------------------------------------------------


def _candidates(loss: Tensor, count: int) -> Iterator[tuple[str, Any]]:
    """One device, and each way to divide a number of devices into data, model and stages."""
    yield "one device", None
    rules = tensor_rules(loss)
    for data, model, stages in _meshes(count):
        if model > 1 and not rules:
            continue
        parts = [f"data {data}"] * (data > 1) + [f"model {model}"] * (model > 1)
        beside = _beside(data, model, rules)
        if stages == 1:
            yield " × ".join(parts), beside
            continue
        for schedule in SCHEDULES:
            total = stages * (2 if schedule == "interleaved" else 1)
            for turns in TURNS:
                pipe: Any = Pipeline(total, schedule, stages * turns)
                pipe = pipe if beside is None else pipe * beside
                told = f"{total} stages {schedule} of {stages * turns}"
                yield " × ".join([*parts, told]), pipe


def _meshes(count: int) -> Iterator[tuple[int, int, int]]:
    for data in range(1, count + 1):
        for model in range(1, count // data + 1):
            if count % (data * model) == 0 and (data, model, count) != (1, 1, 1):
                yield data, model, count // (data * model)


def _beside(data: int, model: int, rules: Mapping[Tensor, Sequence[Any]]) -> Any:
    if model > 1:
        mesh = {"data": data, "model": model} if data > 1 else {"model": model}
        return Shard(mesh, rules, batch="data" if data > 1 else None)
    return Data(data) if data > 1 else None


def tensor_rules(loss: Tensor) -> dict[Tensor, tuple[str | None, ...]]:
    """Column and row parallel layers by turns: the weights of a product are cut along what they
    make, and those of the next one along what they read, so that a pair takes one sum.

    Source: Shoeybi et al., "Megatron-LM", 2019.
    """
    rules: dict[Tensor, tuple[str | None, ...]] = {}
    cut: set[Tensor] = set()
    for node in Graph([loss]).nodes:
        weight = next((t for t in node.inputs[1:] if _is_weight(t)), None)
        if node.op.name == "matmul" and weight is not None and weight.ndim == 2:
            if node.inputs[0] in cut:
                rules.setdefault(weight, ("model", None))
                continue
            rules.setdefault(weight, (None, "model"))
            cut.add(node.outputs[0])
        elif any(t in cut for t in node.inputs) and node.outputs[0].ndim:
            cut.update(node.outputs)
            for t in node.inputs:
                if _is_weight(t) and t.ndim == 1:
                    rules.setdefault(t, ("model",))
    return rules


def _is_weight(tensor: Tensor) -> bool:
    return tensor.node.op.name == "variable"
