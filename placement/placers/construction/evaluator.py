"""Evaluation of device maps for placers: run the simulator's engine, compare memory, time, traffic,
wishes.
"""

from __future__ import annotations

from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.progress import show_stage
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.placement.problems.problem import Problem
from graphflow.placement.simulation import event_loop
from graphflow.placement.simulation.execution_result import ExecutionResult
from graphflow.placement.simulation.memory_use import peak_memory
from graphflow.placement.simulation.native_execution import is_large, link_arrays
from graphflow.placement.simulation.simulator import execute, schedule

Key = tuple[float, float, float, int]
"""Less is better: bytes over capacity; seconds of makespan (and a share of the transfers'); seconds
of transfer; nodes away from where they prefer to be."""


SURELY = 1 + 1e-9
"""Sums of seconds that differ by more are so in whatever order they are added."""


@dataclass(frozen=True)
class EvaluatedPlacement:
    """A device map that was run."""

    key: Key
    run: ExecutionResult

    @property
    def fits(self) -> bool:
        """Whether every device's peak memory is within its capacity."""
        return self.key[0] == 0.0


class Evaluator:
    """Runs device maps and counts how many; knows when memory cannot matter and then does not look.

    `thrift` is what a second of transfer counts for, in seconds of makespan.
    """

    def __init__(self, problem: Problem, thrift: float = 0.0) -> None:
        self.problem, self.thrift = problem, thrift
        self.evaluations = 0
        self.natural = _positions(problem.topological.tolist())
        self._limited = _may_exceed(problem)
        self._preferences = [(v, p) for v, p in enumerate(problem.prefer.tolist()) if p >= 0]

    @cached_property
    def frugal(self) -> list[int]:
        """The order that keeps little alive; it depends on no device map."""
        return frugal_order(self.problem)

    def by_rank(self, device: list[int]) -> EvaluatedPlacement:
        """Critical path first: an idle device takes the ready node with the longest way to the
        end.
        """
        return self._judge_ranks(device, upward_ranks(self.problem, device))

    def rival(self, device: list[int], best: EvaluatedPlacement) -> EvaluatedPlacement | None:
        """As `by_rank`; None where that takes longer than a candidate that fits, which is known
        without running it: no step is shorter than its longest path, or what one device does."""
        ranks = upward_ranks(self.problem, device)
        if not self.problem.ways:
            seconds = self.problem.compute[np.arange(len(device)), device]
            busy = np.bincount(device, weights=seconds).tolist()
            if max(*busy, max(ranks, default=0.0)) > best.key[1] * SURELY:
                self.evaluations += 1
                return None
        return self._judge_ranks(device, ranks)

    def _judge_ranks(self, device: list[int], ranks: list[float]) -> EvaluatedPlacement:
        return self.judge(schedule(self.problem, device, [-rank for rank in ranks]))

    def by_order(self, device: list[int], order: list[int]) -> EvaluatedPlacement:
        """Exactly this order on every device."""
        return self.judge(execute(self.problem, device, _positions(order), order))

    def by_nature(self, device: list[int]) -> EvaluatedPlacement:
        """The order in which the graph was built, ready nodes first."""
        return self.judge(schedule(self.problem, device, self.natural))

    def best(self, device: list[int]) -> EvaluatedPlacement:
        """The best order known for a device map; the plainest one where they tie."""
        found = self.by_nature(device)
        if found.fits and not found.run.transfers:
            return found  # nothing to wait for: every order takes as long
        found = min(found, self.by_rank(device), key=lambda candidate: candidate.key)
        if not found.fits:
            found = min(found, self.by_order(device, self.frugal), key=lambda c: c.key)
        return found

    def judge(self, run: ExecutionResult) -> EvaluatedPlacement:
        """Attach the key to a run."""
        self.evaluations += 1
        show_stage("placements simulated", self.evaluations)
        over = 0.0
        if self._limited:
            excess = peak_memory(self.problem, run) - self.problem.capacity
            over = float(np.maximum(excess, 0.0).sum())
        traffic = sum(row[5] - row[4] for row in run.transfers)
        away = sum(run.device[v] != run.device[p] for v, p in self._preferences)
        # Rounded, because equal schedules summed in another order differ in the last bits.
        seconds = run.makespan + self.thrift * traffic
        return EvaluatedPlacement(
            (over, float(f"{seconds:.11g}"), float(f"{traffic:.9g}"), away), run
        )


def upward_ranks(problem: Problem, device: list[int]) -> list[float]:
    """Seconds from each node's start to the end of the step along its longest path, for a device
    map.
    """
    if is_large(problem):
        slots, found = problem.slots, np.zeros(problem.nodes)
        native(event_loop, "upward_ranks")(
            problem.nodes, problem.devices, np.array(device, dtype=np.int64), problem.topological,
            *link_arrays(problem), slots.start, slots.size, slots.read_start, slots.reader, found,
        )  # fmt: skip
        return list(found.tolist())
    compute, outputs = problem.compute_rows, problem.outputs
    latency, bandwidth = problem.latency_rows, problem.bandwidth_rows
    ranks = [0.0] * problem.nodes
    for node in reversed(problem.topological.tolist()):
        at = device[node]
        longest = 0.0
        for _, size, readers in outputs[node]:
            for reader in readers:
                to = device[reader]
                way = ranks[reader]
                if to != at:
                    way += latency[at][to] + size / bandwidth[at][to]
                if way > longest:
                    longest = way
        ranks[node] = longest + compute[node][at]
    return ranks


def frugal_order(problem: Problem) -> list[int]:
    """A topological order that keeps little alive: of the ready nodes, the one that adds least
    memory.

    A node adds its outputs and releases the outputs it is the last to read. Time O((n + e) log n).
    """
    size = (
        [0.0] * problem.nodes if problem.output_memory is None else problem.output_memory.tolist()
    )
    makers: list[list[int]] = [[] for _ in range(problem.nodes)]
    unread: list[int] = [0] * problem.nodes
    readers_of: list[list[int]] = []
    for node, outputs in enumerate(problem.outputs):
        readers = sorted({reader for _, _, of_tensor in outputs for reader in of_tensor})
        readers_of.append(readers)
        unread[node] = len(readers)
        for reader in readers:
            makers[reader].append(node)
    missing = [len(of_node) for of_node in makers]

    def growth(node: int) -> float:
        return size[node] - sum(size[maker] for maker in makers[node] if unread[maker] == 1)

    ready = [(growth(node), node) for node in range(problem.nodes) if missing[node] == 0]
    ready.sort()
    done = [False] * problem.nodes
    order: list[int] = []
    while ready:
        _, node = heappop(ready)
        if done[node]:
            continue
        done[node] = True
        order.append(node)
        for maker in makers[node]:
            unread[maker] -= 1
            if unread[maker] == 1:  # its last reader has become cheaper than its entry says
                for reader in readers_of[maker]:
                    if not done[reader] and missing[reader] == 0:
                        heappush(ready, (growth(reader), reader))
        for reader in readers_of[node]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heappush(ready, (growth(reader), reader))
    return order


def lower_bound(problem: Problem) -> float:
    """No placement is faster: the critical path at each node's best, and the work shared out
    evenly. Seconds.
    """
    fastest = np.where(problem.allowed, problem.compute, np.inf).min(axis=1)
    best = fastest.tolist()
    longest = [0.0] * problem.nodes
    for node in reversed(problem.topological.tolist()):
        after = max(
            (longest[r] for _, _, readers in problem.outputs[node] for r in readers), default=0.0
        )
        longest[node] = best[node] + after
    usable = max(1, int(problem.allowed.any(axis=0).sum()))
    return max(max(longest, default=0.0), float(fastest.sum()) / usable)


def _positions(order: list[int]) -> list[float]:
    position = [0.0] * len(order)
    for place, node in enumerate(order):
        position[node] = float(place)
    return position


def _may_exceed(problem: Problem) -> bool:
    """Return True if all there is, copied to every device, could be more than some device holds."""
    total = float(problem.memory.sum())
    if problem.output_memory is not None:
        received = sum(size for outputs in problem.outputs for _, size, _ in outputs)
        total += float(problem.output_memory.sum()) + received
    return bool(np.any(total > problem.capacity))
