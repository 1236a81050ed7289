"""Two hosts whose devices meet in passages: what one of them did not do never becomes a tensor, or
a wait, of another step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import OpError, SessionError, StepTimeout
from graphflow.ir.graph import Graph
from graphflow.runtime.host.host import DeviceHost
from graphflow.runtime.host.session_state import FAILED
from graphflow.runtime.partitioning.partition import SPECIALISATION_LIMITS, Partition, partition
from graphflow.runtime.wire.step_values import Computed, TensorParcel
from tests.runtime.collectives.test_shared_memory_edges import needs_memory
from tests.runtime.programs import CPU, place_nodes

FAR = "/worker:1/cpu:0"


class Hosts:
    """Two hosts, each of which hands the other what it sends."""

    def __init__(self) -> None:
        self.hosts = [DeviceHost(0, [CPU], 1, self._outbox), DeviceHost(1, [FAR], 1, self._outbox)]
        self.mailed: list[Any] = []  # edges that went as messages
        self._pool = ThreadPoolExecutor(2)
        for host in self.hosts:
            host.open("s")
            host.connect_mail("s", lambda over, seconds: False, lambda: None, lambda *what: None)

    def _outbox(self, parcel: TensorParcel) -> None:
        if isinstance(parcel.edge, int):
            self.mailed.append(parcel.edge)
        array = parcel.array.copy()
        self.hosts[parcel.target_worker].deliver("s", parcel.step, parcel.edge, array)

    def begin(
        self, worker: int, step: int, *, seconds: float = 20.0, failed: int = 0, **feeds: Any
    ) -> Future[Computed]:
        """One worker's part of a step; the size of what is fed is that of `n`."""
        sizes = {"n": len(next(iter(feeds.values())))} | ({FAILED: failed} if failed else {})
        given = feeds if worker == 0 else {}
        compute: Callable[..., Computed] = self.hosts[worker].compute
        return self._pool.submit(compute, "s", "p", step, sizes, given, False, seconds)

    def step(self, step: int, **feeds: Any) -> list[float]:
        """A step of both: what the second one fetched."""
        both = [self.begin(worker, step, **feeds) for worker in (0, 1)]
        (value,) = [each.result(30).fetches for each in both][1].values()
        for host in self.hosts:
            host.commit("s", step)
        return list(np.ravel(value))

    def forms(self) -> list[list[Any]]:
        """The sizes for which each has a program, the one used last at the end."""
        return [
            list(device)
            for host in self.hosts
            for device in host._sessions["s"]._programs["p"].compiled.values()
        ]

    def close(self) -> None:
        self._pool.shutdown()
        for host in self.hosts:
            host.close("s")


@pytest.fixture
def two() -> Iterator[Hosts]:
    made = Hosts()
    try:
        yield made
    finally:
        made.close()


def _partition_lookup() -> dict[str, Partition]:
    """A look into a table on one worker, and twice what was found on the other."""
    k = gf.placeholder("int32", ("n",), name="k")
    table = gf.constant(np.arange(10, dtype="float32"))
    graph = Graph([gf.multiply(gf.take(table, k), 2.0, name="twice")])
    return partition(graph, place_nodes(graph, CPU, twice=FAR))


def k(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, "int32")


@needs_memory
def test_a_step_after_one_that_failed_here_sends_nothing_to_who_still_waits_for_that_one(
    two: Hosts,
) -> None:
    """Steps that change nothing begin before those ahead of them are decided."""
    parts = _partition_lookup()
    two.hosts[0].add("s", "p", [parts[CPU]])
    two.hosts[1].add("s", "p", [parts[FAR]])
    assert two.step(1, k=k(1, 2)) == [2, 4] and len(two.mailed) == 1
    assert two.step(2, k=k(3, 4)) == [6, 8] and len(two.mailed) == 1
    with pytest.raises(OpError, match="index 99 is outside"):
        two.begin(0, 3, k=k(99, 0)).result(20)
    waiting = two.begin(1, 3, seconds=0.5, k=k(0, 0))
    with pytest.raises(SessionError, match="step 4 was not run, because the one before it failed"):
        two.begin(0, 4, k=k(5, 6)).result(20)
    with pytest.raises(StepTimeout, match="edge 0 from /worker:0/cpu:0"):
        waiting.result(20)
    for host in two.hosts:
        host.abort("s", 4)
    assert two.step(5, failed=1, k=k(7, 8)) == [14, 16] and len(two.mailed) == 2
    assert two.step(6, failed=1, k=k(9, 1)) == [18, 2] and len(two.mailed) == 2


@needs_memory
def test_both_ends_let_go_of_the_same_sizes_though_one_ran_something_else_meanwhile(
    two: Hosts,
) -> None:
    parts = _partition_lookup()
    two.hosts[0].add("s", "p", [parts[CPU]])
    two.hosts[1].add("s", "p", [parts[FAR]])
    alone = Graph([gf.constant(1.0) + 1.0])
    two.hosts[0].add("s", "q", list(partition(alone, place_nodes(alone)).values()))
    sizes = list(range(1, SPECIALISATION_LIMITS[0] + 1))
    for step, n in enumerate(sizes):
        two.step(step, k=np.zeros(n, "int32"))
    for host in two.hosts:
        host.prepare("s", "p", {"n": 3})  # which they have
    two.hosts[0].compute("s", "q", 100, {}, {}, False, 5.0)
    two.hosts[0].commit("s", 100)
    two.step(101, k=np.zeros(SPECIALISATION_LIMITS[0], "int32"))
    first, second = two.forms()
    assert first == second
