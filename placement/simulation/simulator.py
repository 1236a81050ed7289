"""The simulator: Problem + Assignment -> Timeline, with the runtime's own rules.

Each device runs its nodes one at a time, in the assignment's order restricted to it. A tensor
leaves for every other device that reads it as soon as it is made, once per device. A transfer takes
latency + bytes / bandwidth; under contention a link moves the bytes of one tensor at a time, first
ready first served, while latencies overlap, and what several links share (network cards, switches)
is divided fairly among them (`sharing`). The same engine, given priorities in place of an order,
makes one (`schedule`): so what a placer predicts is what the simulator says.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ProblemError
from graphflow.placement.problems.problem import Assignment, Floats, Ints, Problem
from graphflow.placement.simulation.execution_result import ExecutionResult, TransferRow
from graphflow.placement.simulation.link_contention import EventQueue, Transfer, Transfers
from graphflow.placement.simulation.memory_use import peak_memory
from graphflow.placement.simulation.native_execution import execute_native, is_large

TRANSFER = np.dtype(
    [
        ("tensor", np.int64),
        ("node", np.int64),
        ("source", np.int64),
        ("target", np.int64),
        ("start", np.float64),
        ("finish", np.float64),
        ("bytes", np.float64),
    ]
)
"""A transfer: tensor id, the node that made it, source and target device, seconds, bytes."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated step: when nodes and transfers run, in seconds from its start.

    Args:
        start, finish: (n,) of each node.
        device: (n,) where each node runs.
        order: (n,) the nodes as they run, producers first.
        transfers: (t,) records of dtype `TRANSFER`, in order of readiness; `finish` is the arrival.
        makespan: when the last node finishes.
        peak_memory: (d,) bytes, persistent and live transient memory together.
        busy: (d,) seconds each device computes.
    """

    start: Floats
    finish: Floats
    device: Ints
    order: Ints
    transfers: NDArray[Any]
    makespan: float
    peak_memory: Floats
    busy: Floats

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.busy)

    @property
    def idle(self) -> Floats:
        """(d,) seconds each device does not compute before the makespan."""
        return self.makespan - self.busy

    def on(self, device: int) -> Ints:
        """The nodes of one device in the order they run."""
        mine: Ints = self.order[self.device[self.order] == device]
        return mine

    @cached_property
    def traffic(self) -> dict[tuple[int, int], float]:
        """Bytes over each link (source, target) in use."""
        total: dict[tuple[int, int], float] = {}
        for row in self.transfers:
            link = (int(row["source"]), int(row["target"]))
            total[link] = total.get(link, 0.0) + float(row["bytes"])
        return total


@checks_argument_names(ProblemError)
def simulate(problem: Problem, assignment: Assignment) -> Timeline:
    """Simulate what the runtime will do with an assignment.

    Time O((n + e) log n) for n nodes and e edges.

    Raises:
        ProblemError: not a problem and an assignment, or they do not fit each other (see
            `Assignment.validate`).
    """
    if not (isinstance(problem, Problem) and isinstance(assignment, Assignment)):
        raise ProblemError(
            "simulate() takes a Problem and an Assignment (what place() gives), not "
            f"{type(problem).__name__} and {type(assignment).__name__}"
        )
    assignment.validate(problem)
    order = assignment.order.tolist()
    position = [0] * len(order)
    for place, node in enumerate(order):
        position[node] = place
    return timeline(problem, execute(problem, assignment.device.tolist(), position, order))


def schedule(problem: Problem, device: list[int], priority: list[float]) -> ExecutionResult:
    """Run a device map without a given order: an idle device takes its ready node of least
    `priority`.

    Simulating the resulting order gives the same times.
    """
    return execute(problem, device, priority, None)


def execute(
    problem: Problem,
    device: list[int],
    priority: list[int] | list[float],
    order: list[int] | None,
) -> ExecutionResult:
    """The event loop behind `simulate` (with an order) and `schedule` (without one).

    `started` and `finished` number the starts and ends of nodes as they are processed: they order
    what happens at one instant, where nodes that cost nothing start and end together.
    """
    if is_large(problem):
        return execute_native(problem, device, priority, order)
    devices = _Devices(problem, device, priority, order)
    run = _execute_shared if problem.ways else _alone
    transfers = run(problem, devices)
    return ExecutionResult(
        device, devices.start, devices.finish, devices.started, devices.finished, devices.ran,
        transfers, max(devices.finish, default=0.0),
    )  # fmt: skip


class _Devices:
    """The devices of a simulated step: their nodes, times and ready nodes. This part does not
    depend on how transfers share links."""

    def __init__(
        self,
        problem: Problem,
        device: list[int],
        priority: list[int] | list[float],
        order: list[int] | None,
    ) -> None:
        n, d = problem.nodes, problem.devices
        self.device, self.priority = device, priority
        self.start, self.finish, self.arrival = [0.0] * n, [0.0] * n, [0.0] * n
        self.started, self.finished = [0] * n, [0] * n
        self.missing = list(problem.input_counts)
        self.ran: list[int] = []
        self.ready: list[list[tuple[float, int]]] = [[] for _ in range(d)]
        self.busy = [False] * d
        self._queues = _queues(order, device, d)
        self._position = [0] * d
        self._tick = 0
        for node in range(n):
            if self.missing[node] == 0:
                self.add(node)

    def add(self, node: int) -> None:
        """A node whose inputs are all there."""
        heappush(self.ready[self.device[node]], (self.priority[node], node))

    def begin(self, places: Iterable[int], now: float) -> list[int]:
        """Start what idle devices can start; these nodes."""
        begun = []
        for at in places:
            ready = self.ready[at]
            if self.busy[at] or not ready:
                continue
            node = ready[0][1]
            if self._queues is not None:
                if self._queues[at][self._position[at]] != node:
                    continue
                self._position[at] += 1
            heappop(ready)
            self.busy[at] = True
            self.start[node], self.started[node] = now, self._tick
            self._tick += 1
            self.ran.append(node)
            begun.append(node)
        return begun

    def end(self, node: int, now: float) -> None:
        """A node is done; its device is idle."""
        self.busy[self.device[node]] = False
        self.finish[node], self.finished[node] = now, self._tick
        self._tick += 1


def _alone(problem: Problem, devices: _Devices) -> list[TransferRow]:
    """Every pair of devices has a link of its own: a tensor's arrival is known when it is made."""
    n, d, device = problem.nodes, problem.devices, devices.device
    compute, outputs = problem.compute_rows, problem.outputs
    latency, bandwidth, contention = (
        problem.latency_rows,
        problem.bandwidth_rows,
        problem.contention,
    )
    arrival, missing, ready = devices.arrival, devices.missing, devices.ready
    priority, begin, end = devices.priority, devices.begin, devices.end  # called very often
    free: dict[int, float] = {}
    transfers: list[TransferRow] = []
    events: list[tuple[float, int]] = []
    now = 0.0
    touched = set(range(d))
    while True:
        for node in begin(sorted(touched) if len(touched) > 1 else touched, now):
            heappush(events, (now + compute[node][device[node]], node))
        if not events:
            return transfers
        now = events[0][0]
        touched = set()
        while events and events[0][0] == now:
            code = heappop(events)[1]
            if code >= n:  # the last input of a node arrived
                node = code - n
                heappush(ready[device[node]], (priority[node], node))
                touched.add(device[node])
                continue
            at = device[code]
            end(code, now)
            touched.add(at)
            for tensor, size, readers in outputs[code]:
                arrived = {at: now}
                for reader in readers:
                    to = device[reader]
                    comes = arrived.get(to)
                    if comes is None:
                        leaves, moving = now, size / bandwidth[at][to]
                        if contention:
                            link = at * d + to
                            leaves = max(now, free.get(link, 0.0))
                            free[link] = leaves + moving
                        arrived[to] = comes = leaves + latency[at][to] + moving
                        transfers.append((tensor, code, at, to, leaves, comes, size))
                    if comes > arrival[reader]:
                        arrival[reader] = comes
                    missing[reader] -= 1
                    if missing[reader] == 0:
                        if arrival[reader] <= now:
                            heappush(ready[to], (priority[reader], reader))
                            touched.add(to)
                        else:
                            heappush(events, (arrival[reader], n + reader))


def _execute_shared(problem: Problem, devices: _Devices) -> list[TransferRow]:
    """Transfers divide shared links: a tensor's arrival is not known before."""
    n, device = problem.nodes, devices.device
    compute, latency = problem.compute_rows, problem.latency_rows
    arrival, missing = devices.arrival, devices.missing
    flows, clock, sent = (
        Transfers(problem),
        EventQueue(),
        dict[tuple[int, int], TransferRow | None](),
    )
    now = 0.0
    touched = set(range(problem.devices))  # where something may begin now

    def arrives(reader: int, comes: float) -> None:
        arrival[reader] = max(arrival[reader], comes)
        missing[reader] -= 1
        if missing[reader] == 0 and arrival[reader] <= now:
            devices.add(reader)
            touched.add(device[reader])
        elif missing[reader] == 0:
            clock.add(arrival[reader], n + reader)

    def sends(node: int) -> None:
        at = device[node]
        for tensor, size, readers in problem.outputs[node]:
            away: dict[int, list[int]] = {}
            for reader in readers:
                if device[reader] == at:
                    arrives(reader, now)
                else:
                    away.setdefault(device[reader], []).append(reader)
            for to, there in away.items():
                sent[tensor, to] = None  # in order of readiness
                flows.add(Transfer(tensor, node, at, to, size, tuple(there)), now)

    while True:
        for node in devices.begin(sorted(touched), now):
            clock.add(now + compute[node][device[node]], node)
        touched.clear()
        for when, flow in flows.settle(now):
            clock.leaves(when, flow, 2 * n)
        upcoming = clock.next()
        if upcoming is None:
            return [row for row in sent.values() if row is not None]
        now = upcoming
        for code, left in clock.due(now, 2 * n):
            if left is not None:
                flows.finish(left, now)
                comes = now + latency[left.source][left.target]
                sent[left.tensor, left.target] = (
                    left.tensor, left.node, left.source, left.target, left.start, comes, left.size,
                )  # fmt: skip
                for reader in left.readers:
                    arrives(reader, comes)
            elif code >= n:
                devices.add(code - n)
                touched.add(device[code - n])
            else:
                devices.end(code, now)
                touched.add(device[code])
                sends(code)


def timeline(problem: Problem, run: ExecutionResult) -> Timeline:
    """A run as arrays, with its memory."""
    device = np.array(run.device, dtype=np.int64)
    nodes = np.arange(problem.nodes)
    busy = np.bincount(device, weights=problem.compute[nodes, device], minlength=problem.devices)
    result = Timeline(
        start=np.array(run.start, dtype=np.float64),
        finish=np.array(run.finish, dtype=np.float64),
        device=device,
        order=np.array(run.order, dtype=np.int64),
        transfers=np.array(run.transfers, dtype=TRANSFER),
        makespan=run.makespan,
        peak_memory=peak_memory(problem, run),
        busy=busy.astype(np.float64),
    )
    for array in (
        result.start,
        result.finish,
        result.device,
        result.order,
        result.transfers,
        result.peak_memory,
        result.busy,
    ):
        array.setflags(write=False)
    return result


def _queues(order: list[int] | None, device: list[int], devices: int) -> list[list[int]] | None:
    if order is None:
        return None
    queues: list[list[int]] = [[] for _ in range(devices)]
    for node in order:
        queues[device[node]].append(node)
    return queues
