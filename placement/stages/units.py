"""A problem as pipeline stages see it: units that stay together, and the tensors between them.

First step of `split_stages`: colocated nodes become one unit, tensors inside a unit vanish, and
every transfer is priced once per device that it enters or leaves.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.problems.problem import Floats, Ints, Problem


@dataclass(frozen=True, eq=False)
class StageUnits:
    """u units, t tensors and d devices; tensors are sorted by the unit that makes them.

    Args:
        unit: (n,) unit of each node.
        compute: (u, d) seconds, inf where impossible.
        memory: (u,) bytes.
        capacity: (d,) bytes.
        enter: (t, d) seconds that a device spends on receiving a tensor from the host.
        leave: (t, d) seconds that it spends on sending one there.
        maker: (t,) unit that makes the tensor.
        made: (u + 1,) where the tensors of each unit start.
        readers, reader_start: units that read each tensor, its maker excluded, in CSR form.
        inputs, input_start: tensors that each unit reads, in CSR form.
    """

    unit: Ints
    compute: Floats
    memory: Floats
    capacity: Floats
    enter: Floats
    leave: Floats
    maker: Ints
    made: Ints
    readers: Ints
    reader_start: Ints
    inputs: Ints
    input_start: Ints

    @property
    def count(self) -> int:
        """Units."""
        return len(self.compute)

    @property
    def devices(self) -> int:
        """Devices."""
        return len(self.capacity)

    @cached_property
    def hypergraph(self) -> tuple[Any, ...]:
        """Return the arguments of the loops as flat arrays."""
        return (
            self.compute.ravel(), self.memory, self.capacity, self.enter.ravel(),
            self.leave.ravel(), self.maker, self.made, self.readers, self.reader_start,
            self.inputs, self.input_start,
        )  # fmt: skip

    def readers_of(self, tensor: int) -> Ints:
        """Units that read a tensor."""
        return self.readers[self.reader_start[tensor] : self.reader_start[tensor + 1]]

    def loads(self, where: Ints) -> Floats:
        """(d,) seconds per sample that each device is busy, if unit u is on `where[u]`."""
        loads: Floats = np.zeros(self.devices)
        np.add.at(loads, where, self.compute[np.arange(len(where)), where])
        for t, u in enumerate(self.maker.tolist()):
            home = int(where[u])
            others = set(where[self.readers_of(t)].tolist()) - {home}
            for p in others:
                loads[p] += self.enter[t, p]
            if others:
                loads[home] += self.leave[t, home]
        return loads

    def max_load(self, where: Ints) -> float:
        """Seconds per sample of the busiest device."""
        return float(self.loads(where).max(initial=0.0))

    def fits(self, where: Ints) -> bool:
        """Return True if every device can run and hold what lies on it."""
        used = np.bincount(where, weights=self.memory, minlength=self.devices)
        possible = np.isfinite(self.compute[np.arange(len(where)), where]).all()
        return bool(possible and np.all(used <= self.capacity))


def stage_units(problem: Problem, devices: Ints, hosts: Ints) -> StageUnits:
    """The units of a problem on these devices (the hosts among them pay for no transfer)."""
    unit = _units(problem.groups)
    count = int(unit.max()) + 1 if len(unit) else 0
    compute = np.zeros((count, len(devices)))
    np.add.at(compute, unit, problem.compute[:, devices])
    memory = np.zeros(count)
    np.add.at(memory, unit, problem.memory)
    rows: list[tuple[int, float, list[int]]] = []
    for node, outputs in enumerate(problem.outputs):
        home = int(unit[node])
        for _, bytes_, nodes in outputs:
            others = sorted({int(unit[r]) for r in nodes} - {home})
            if others:
                rows.append((home, bytes_, others))
    rows.sort(key=lambda row: row[0])
    maker = np.array([row[0] for row in rows], dtype=np.int64)
    size = np.array([row[1] for row in rows], dtype=np.float64)
    reader_start = np.cumsum([0, *(len(row[2]) for row in rows)], dtype=np.int64)
    readers = np.array([r for row in rows for r in row[2]], dtype=np.int64)
    tensor_of = np.repeat(np.arange(len(rows), dtype=np.int64), np.diff(reader_start))
    enter, leave = _prices(problem, size, devices, hosts)
    return StageUnits(
        unit, compute, memory, problem.capacity[devices].copy(), enter, leave, maker,
        _starts(maker, count), readers, reader_start,
        tensor_of[np.argsort(readers, kind="stable")], _starts(readers, count),
    )  # fmt: skip


def _units(groups: Ints) -> Ints:
    free = np.where(groups < 0, groups.max(initial=-1) + 1 + np.arange(len(groups)), groups)
    unit: Ints = np.unique(free, return_inverse=True)[1].astype(np.int64)
    return unit


def _starts(owner: Ints, count: int) -> Ints:
    start = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(owner, minlength=count), out=start[1:])
    return start


def _prices(
    problem: Problem, size: Floats, devices: Ints, hosts: Ints
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds to and from the host; without one, over the slowest link to another stage."""
    enter, leave = np.zeros((2, len(size), len(devices)))
    for column, device in enumerate(devices.tolist()):
        if device in hosts:
            continue
        peers = [int(hosts[0])] if len(hosts) else [p for p in devices.tolist() if p != device]
        for peer in peers:
            there = problem.latency[device, peer] + size / problem.bandwidth[device, peer]
            back = problem.latency[peer, device] + size / problem.bandwidth[peer, device]
            leave[:, column] = np.maximum(leave[:, column], there)
            enter[:, column] = np.maximum(enter[:, column], back)
    return enter, leave
