"""What is known of the errors of nodes: from traced steps, from similar ones, from calibration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphflow.frontend.builders import placeholder
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS
from graphflow.placement.calibration.cluster_rates import device_classes
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.node_errors import NodeErrors
from graphflow.placement.cost_model.node_times import NodeTimes
from graphflow.placement.cost_model.problem_builder import build_problems
from tests.placement.speeds import profile, scatter

TWO = Cluster.local(workers=2, threads=1)
PROFILES = {i: profile(scatter=scatter(0.4)) for i in range(2)}


def build_small_graph() -> Graph:
    x = placeholder("float32", (256, 256), name="x")
    return Graph([FUNCTIONS["matmul"](FUNCTIONS["sort"](x), x), FUNCTIONS["cumsum"](x, axis=0)])


def errors_of(
    graph: Graph, learned: TraceCorrections | None = None, **options: Any
) -> tuple[NodeErrors, NodeErrors]:
    """Return the errors without busy neighbours, and with them."""
    alone, shared = build_problems(graph, TWO, {}, profiles=PROFILES, learned=learned, **options)
    assert alone.errors is not None and shared.errors is not None
    return alone.errors, shared.errors


def learn_ratios(
    graph: Graph, op: str, ratios: list[float], busy: bool = False
) -> TraceCorrections:
    times, learned = NodeTimes(graph, TWO, {}), TraceCorrections()
    node = next(node for node in times.nodes if node.op.name == op)
    bucket = times.bucket(node, device_classes(TWO)[TWO.devices[0]], busy, 1e-3)
    for ratio in ratios:
        learned.observe(bucket, ratio * 1e-3, 1e-3)
    return learned


def row(graph: Graph, op: str) -> int:
    nodes = [node for node in graph.nodes if node.op.name not in ("constant", "group")]
    return next(i for i, node in enumerate(nodes) if node.op.name == op)


def basis(errors: NodeErrors, node: int) -> str:
    return errors.sources.bases[errors.source[node, 0]]


def test_without_traces_calibration_is_the_basis() -> None:
    graph = build_small_graph()
    alone, _ = errors_of(graph)
    assert alone.deviation[row(graph, "sort"), :2] == pytest.approx(0.4)
    assert basis(alone, row(graph, "sort")) == "calibration of similar ops"
    assert (alone.deviation[row(graph, "placeholder")] == 0).all()
    assert (alone.slowdown == 0).all()


def test_traced_nodes_are_surer_and_say_how_often_they_were_observed() -> None:
    graph = build_small_graph()
    alone, _ = errors_of(graph, learn_ratios(graph, "sort", [2.0] * 7))
    assert (alone.deviation[row(graph, "sort"), :2] < 0.2).all()
    assert basis(alone, row(graph, "sort")) == "7 observations in traced steps"


def test_nodes_like_traced_ones_are_less_sure_than_these() -> None:
    graph = build_small_graph()
    alone, _ = errors_of(graph, learn_ratios(graph, "sort", [2.0] * 7))
    sort, other = row(graph, "sort"), row(graph, "cumsum")
    assert basis(alone, other) == "similar ops in traced steps"
    assert alone.deviation[sort, 0] < alone.deviation[other, 0] < 0.4


def test_busy_neighbours_add_to_errors_unless_they_were_observed() -> None:
    graph = build_small_graph()
    sort = row(graph, "sort")
    _, guessed = errors_of(graph, learn_ratios(graph, "sort", [2.0] * 7))
    _, known = errors_of(graph, learn_ratios(graph, "sort", [2.0] * 7, busy=True))
    assert guessed.slowdown[sort, 0] > 0
    assert known.slowdown[sort, 0] == 0
    assert (known.deviation[:, :2] <= errors_of(graph)[1].deviation[:, :2] + 1e-12).all()


def test_nodes_of_one_bucket_err_together_and_others_do_not() -> None:
    x = placeholder("float32", (256, 256), name="x")
    graph = Graph([FUNCTIONS["sort"](x), FUNCTIONS["sort"](x * 2.0), FUNCTIONS["argsort"](x)])
    learned = learn_ratios(graph, "sort", [1.0] * 3)
    alone, shared = errors_of(graph, learned)
    nodes = [node for node in graph.nodes if node.op.name not in ("constant", "group")]
    sorts = [i for i, node in enumerate(nodes) if node.op.name == "sort"]
    assert len(set(alone.source[sorts, 0])) == 1
    assert alone.source[row(graph, "argsort"), 0] != alone.source[sorts[0], 0]
    # Without observations beside busy neighbours, the error is that of idle ones.
    assert shared.source[sorts[0], 0] == alone.source[sorts[0], 0]


def test_described_devices_and_older_profiles_have_no_errors() -> None:
    graph = build_small_graph()
    described = Cluster.hypothetical("2xh100")
    assert build_problems(graph, described, {})[0].errors is None
    older = {i: profile() for i in range(2)}
    assert build_problems(graph, TWO, {}, profiles=older)[1].errors is None
    single = Cluster.local(workers=1, threads=1)
    made = build_problems(graph, single, {}, profiles=PROFILES)[0].errors
    assert made is not None and np.isfinite(made.deviation).all()
