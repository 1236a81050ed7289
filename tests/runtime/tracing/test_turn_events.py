"""Turns, updates and sends of windows, from the sends and waits of their parties."""

from __future__ import annotations

import numpy as np

from graphflow.ir.graph import Graph
from graphflow.runtime.partitioning.partition import partition
from graphflow.runtime.tracing.trace import Trace
from graphflow.runtime.tracing.turn_events import WindowEdge, window_edges
from tests.ops.communication.servers import server_and_workers, window_rules

SERVER, ONE, TWO = (f"/worker:{i}/cpu:0" for i in range(3))
EDGES = {
    1: ("push", ONE, SERVER, 8), 2: ("push", TWO, SERVER, 8),
    3: ("pull", SERVER, ONE, 8), 4: ("pull", SERVER, TWO, 8),
}  # fmt: skip


def spans(*rows: tuple[str, str, int, int]) -> list[tuple[str, str, int, int]]:
    return [(track, name, start * 1000, end * 1000) for track, name, start, end in rows]


STEP = spans(
    (SERVER, "window", 1, 60), (ONE, "window@" + ONE, 1, 50), (TWO, "window@" + TWO, 1, 55),
    (SERVER, "send/3", 1, 2), (SERVER, "send/4", 2, 3),
    (ONE, "recv/3", 1, 3), (TWO, "recv/4", 1, 4),
    (ONE, "send/1", 13, 14), (TWO, "send/2", 24, 25),
    # a merge waits, then receives
    (SERVER, "recv/1", 4, 15), (SERVER, "recv/1", 15, 15), (SERVER, "send/3", 18, 19),
    (ONE, "recv/3", 14, 20), (ONE, "send/1", 30, 31),
    (SERVER, "recv/2", 20, 26), (SERVER, "recv/1", 29, 32), (SERVER, "send/4", 36, 37),
)  # fmt: skip


def make_trace(is_pool: bool) -> Trace:
    ends = {1: (1, 0), 2: (2, 0), 3: (0, 1), 4: (0, 2)}
    windows = {e: WindowEdge("window", *pair, (0,), is_pool) for e, pair in ends.items()}
    trace = Trace()
    trace.add_step(0, 0, 61_000, STEP, EDGES, windows=windows)
    return trace


def parts(trace: Trace, letters: str) -> list[tuple[str, int, int]]:
    return [
        (e.name, e.start // 1000, e.end // 1000)
        for e in trace.steps[0].events
        if e.name.rpartition("/")[2][0] in letters and e.kind != "wait" and "@" not in e.name
    ]


def test_turns_and_updates_lie_between_messages() -> None:
    assert parts(make_trace(False), "TA") == [
        ("window/1/T0", 3, 13), ("window/2/T0", 4, 24), ("window/0/A0", 15, 18),
        ("window/0/A0", 19, 20), ("window/1/T1", 20, 30), ("window/0/A1", 26, 29),
        ("window/0/A2", 32, 36),
    ]  # fmt: skip
    assert parts(make_trace(False), "E") == [
        ("window/0/E0", 1, 2), ("window/0/E0", 2, 3), ("window/1/E0", 13, 14),
        ("window/0/E0", 18, 19), ("window/2/E0", 24, 25), ("window/1/E1", 30, 31),
        ("window/0/E2", 36, 37),
    ]  # fmt: skip


def test_turns_of_a_pool_are_numbered_over_all_workers() -> None:
    names = [name for name, _, _ in parts(make_trace(True), "T")]
    assert names == ["window/1/T0", "window/2/T1", "window/1/T2"]
    sends = [name for name, _, _ in parts(make_trace(True), "E") if "/0/" not in name]
    assert sends == ["window/1/E0", "window/2/E1", "window/1/E2"]


def test_a_plan_shows_the_turns_in_place_of_their_window() -> None:
    timeline = make_trace(False).measured().timeline
    computed = {bar.name for bar in timeline if bar.kind == "compute"}
    assert computed == {name for name, _, _ in parts(make_trace(False), "TA")}


def test_edges_of_a_cut_window_know_their_parties() -> None:
    pins = ["/worker:0", "/worker:1", "/worker:1"]
    weights, came, _ = server_and_workers(np.ones(3), [2, 1], pins=pins)
    graph = Graph([weights, came])
    (node,) = graph.of_op("concurrent")
    found = window_edges(graph, partition(graph, {node: SERVER}, available=[SERVER, ONE]))
    assert sorted((e.sender, e.receiver) for e in found.values()) == [
        (0, 1), (0, 2), (1, 0), (2, 0),
    ]  # fmt: skip
    assert {e.window for e in found.values()} == {graph.names[node]}
    assert {e.servers for e in found.values()} == {window_rules([2, 1]).servers}
