"""Edges in loops: a reader that is slow holds its writer back, and nobody waits in a circle."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.runtime.program.bodies import loop_edge_flow_control as windows
from graphflow.runtime.program.bodies.loop_edge_flow_control import LoopEdgeChannel, credit_size
from graphflow.runtime.transport.tensor_mailbox import Awaited, TensorMailbox
from graphflow.runtime.wire.step_values import EDGE_BITS
from tests.faults import hazards
from tests.runtime.programs import NO_RINGS, NoRings

MB = 1 << 20
SECONDS = 20.0


@dataclass(frozen=True)
class Wire:
    """What one device of several has of a step's mail; notes how far writers are ahead."""

    mail: TensorMailbox
    lead: dict[int, int]
    most: dict[int, int]
    rings: NoRings = NO_RINGS

    def send(self, step: int, edge: int, target: str, array: Any) -> None:
        number = edge & ((1 << EDGE_BITS) - 1)
        self.lead[number] = self.lead.get(number, 0) + 1
        self.most[number] = max(self.most.get(number, 0), self.lead[number])
        self.mail.put(step, edge, array)

    def recv(self, step: int, edge: int) -> Any:
        array = self.mail.take(step, edge, Awaited(f"edge {edge}"))
        self.lead[edge & ((1 << EDGE_BITS) - 1)] -= 1
        return array

    def grant_credit(self, step: int, edge: int, portion: int) -> None:
        self.mail.put(step, f"taken/{edge}/{portion}", None)

    def wait_for_credit(self, step: int, edge: int, portion: int, target: str) -> None:
        self.mail.take(step, f"taken/{edge}/{portion}", Awaited(f"room on edge {edge}"))


@dataclass(frozen=True)
class Edge:
    number: int
    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class Loop:
    times: int
    body: tuple[Loop | Edge, ...]


@st.composite
def loops(draw: st.DrawFn, devices: int) -> Loop:
    """A loop with edges between devices in it, and loops with such."""
    count = iter(range(1000))

    def body(depth: int) -> tuple[Loop | Edge, ...]:
        parts: list[Loop | Edge] = []
        for _ in range(draw(st.integers(1, 4))):
            if depth < 2 and draw(st.booleans()):
                parts.append(Loop(draw(st.integers(0, 5)), body(depth + 1)))
                continue
            source, target = draw(st.permutations(range(devices)))[:2]
            nbytes = draw(st.sampled_from([0, 1, 4096, 3 * MB, 40 * MB]))
            parts.append(Edge(next(count), source, target, nbytes))
        return tuple(parts)

    return Loop(draw(st.integers(1, 30)), body(0))


def run(part: Loop | Edge, device: int, ends: LoopEdgeChannel, step: int) -> None:
    """What a device does: its part of the one order of everything."""
    if isinstance(part, Loop):
        for _ in range(part.times):
            for each in part.body:
                run(each, device, ends, step)
    elif device == part.source:
        memory = np.empty(1, np.uint8)
        ends.send(step, part.number, str(part.target), np.broadcast_to(memory, (part.nbytes,)))
    elif device == part.target:
        ends.recv(step, part.number)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 4), st.sampled_from([2, 3, 64]))
def test_no_loops_and_cuts_make_devices_wait_in_a_circle(
    data: st.DataObject, devices: int, ahead: int
) -> None:
    loop = data.draw(loops(devices))
    mail = TensorMailbox()
    mail.deadline = threading.TIMEOUT_MAX
    lead: dict[int, int] = {}
    most: dict[int, int] = {}
    before, windows.MAX_TENSORS_AHEAD = windows.MAX_TENSORS_AHEAD, ahead
    try:
        threads = []
        for device in range(devices):
            ends = LoopEdgeChannel(Wire(mail, lead, most))  # type: ignore[arg-type]
            threads.append(threading.Thread(target=run, args=(loop, device, ends, 1), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        stuck = [thread for thread in threads if thread.is_alive()]
        assert not stuck, f"{len(stuck)} devices wait for {dict(mail.waits)}"
        # Who receives says so after it has taken: it may hold one tensor that still counts.
        assert all(count <= ahead + 1 for count in most.values())
    finally:
        windows.MAX_TENSORS_AHEAD = before


@pytest.mark.parametrize(
    ("nbytes", "portion"), [(0, 32), (4, 32), (256 << 10, 32), (MB, 8), (8 * MB, 1), (1 << 40, 1)]
)
def test_a_portion_is_half_of_what_may_be_under_way(nbytes: int, portion: int) -> None:
    assert credit_size(nbytes) == portion


def test_each_step_begins_with_a_whole_window() -> None:
    mail = TensorMailbox()
    mail.deadline = threading.TIMEOUT_MAX
    ends = LoopEdgeChannel(Wire(mail, {}, {}))  # type: ignore[arg-type]
    for step in range(1, 4):
        for _ in range(windows.MAX_TENSORS_AHEAD):  # nobody receives, and nobody waits
            ends.send(step, 5, "there", np.zeros(4))
        mail.finish(step)


def resident(pid: int) -> int:
    """The most memory that a process ever had, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.mark.every(2)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
@pytest.mark.parametrize("shared", ["on", "off"])
def test_a_slow_reader_in_a_loop_holds_its_writer_back(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 MB cross; unchecked, most of them would wait in the memory of one of the two."""
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", shared)
    rows, columns, times = 512, 512, 300
    start = gf.placeholder("float32", (rows, columns), name="start")

    def body(state: Any, row: Any) -> Any:
        x, seen = state
        with gf.device("/worker:1"):
            after = x + row
        y = hazards.sleep(after[0, 0], seconds=0.01)
        return (after, seen + after[0, 0] + y * 0.0), row

    with gf.device("/worker:0"):
        (_, total), _ = gf.scan(body, (start, gf.constant(0.0)), gf.ones((times,)))
    feeds = {start: np.zeros((rows, columns), np.float32)}
    cluster = gf.Cluster.local(2, threads=1, deadline=120)
    with gf.Session(cluster, trial=False, ops=["tests.faults.hazards"]) as session:
        session.warmup(total)
        pids = session._life.hosts.pids
        before = [resident(pid) for pid in pids]
        assert session.run(total, feeds) == times * (times + 1) / 2
        growth = [resident(pid) - then for pid, then in zip(pids, before, strict=True)]
    assert max(growth) < 140 * MB
