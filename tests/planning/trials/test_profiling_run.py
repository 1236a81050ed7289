"""What is tried out before fetches are placed: it teaches, changes nothing, and leaves alone what
touches anything outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, OpError
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.ir.graph import Graph
from graphflow.ir.spec import sole_symbol
from graphflow.passes import optimize
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.cost_model.trace_observations import trace_observations
from graphflow.planning.feedback.node_observations import replace_outliers
from graphflow.planning.trials.profiling_run import (
    ProfilingLimits,
    may_profile,
    profile_first_steps,
)
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from graphflow.runtime.partitioning.partition import partition

TWO = gf.Cluster.here(devices=("cpu:0", "cpu:1"), threads=1)
PATIENT = ProfilingLimits(step_seconds=60.0, seconds=60.0, characters=10_000_000)

pytestmark = pytest.mark.usefixtures("own_cache")


def build_training() -> tuple[list[Any], gf.Tensor]:
    x = gf.placeholder("float32", (None, 64))
    h = gf.nn.relu(x @ gf.variable(np.ones((64, 64), "float32") / 64, name="w"))
    loss = gf.mean(gf.square(gf.nn.dropout(h, 0.5) - 1.0))
    return [loss, gf.optim.SGD(0.1, momentum=0.9).minimize(loss)], x


def compile_fetches(fetches: list[Any]) -> CompiledFetches:
    graph = Graph(fetches)
    return CompiledFetches(tuple(fetches), graph, optimize(graph))


def dims(fetches: list[Any], x: gf.Tensor, rows: int = 32) -> dict[str, int]:
    return {sole_symbol(x.shape[0]): rows}


def test_it_learns_of_every_node_that_takes_time_and_then_knows_enough() -> None:
    fetches, x = build_training()
    learned = TraceCorrections("a")
    made = compile_fetches(fetches)
    assert profile_first_steps(learned, TWO, ClusterSurvey(), made, dims(fetches, x)) > 0
    assert len(learned) > 5
    assert profile_first_steps(learned, TWO, ClusterSurvey(), made, dims(fetches, x)) == 0


def test_a_processor_that_is_taken_away_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of the test's own, since other load on the machine would change the real one."""
    fetches, x = build_training()
    quiet, noisy = TraceCorrections("a"), TraceCorrections("a")
    ends = []
    for learned, share in ((quiet, 0.0), (noisy, 0.05)):
        random, now = np.random.default_rng(0), 0

        def clock(share: float = share, random: np.random.Generator = random) -> int:
            nonlocal now
            now += 50_000
            if random.random() < share:
                now += int(random.exponential(2e7))  # a time slice or two
            return now

        monkeypatch.setattr("graphflow.planning.trials.profiling_run.thread_time_ns", clock)
        made, sizes = compile_fetches(fetches), dims(fetches, x)
        profile_first_steps(learned, TWO, ClusterSurvey(), made, sizes, limits=PATIENT)
        ends.append(now)
    assert ends[1] > 10 * ends[0]  # so the mean of all steps would be wrong
    ratios = [noisy.factor(bucket) / quiet.factor(bucket) for bucket in quiet._nodes]
    assert len(ratios) > 5 and np.median(ratios) == pytest.approx(1.0, rel=0.1)
    assert max(ratios) < 10  # a slice is hundreds of times what these nodes take


def test_a_node_that_was_delayed_counts_with_the_least_of_some_steps() -> None:
    steps = [{"a": 2.0, "b": 1.0}, {"a": 2.2, "b": 300.0}, {"a": 9.0, "b": 1.9}, {"a": 2.1}]
    kept = [{"a": 2.0, "b": 1.0}, {"a": 2.2, "b": 1.0}, {"a": 2.0, "b": 1.9}, {"a": 2.1}]
    assert replace_outliers(steps) == kept


def test_beside_a_neighbour_it_learns_of_busy_devices() -> None:
    fetches, x = build_training()
    learned = TraceCorrections("a")
    made = compile_fetches(fetches)
    assert profile_first_steps(learned, TWO, ClusterSurvey(), made, dims(fetches, x), busy=True) > 0
    assert len(learned) > 5 and all(bucket.busy for bucket in learned._nodes)
    assert (
        profile_first_steps(learned, TWO, ClusterSurvey(), made, dims(fetches, x), busy=True) == 0
    )
    assert (
        profile_first_steps(learned, TWO, ClusterSurvey(), made, dims(fetches, x)) == 0
    )  # which tells of idle ones


def test_a_session_gives_the_same_bits_with_and_without_it() -> None:
    fetches, x = build_training()
    data = np.random.default_rng(0).random((32, 64), "float32")
    seen = []
    for trial in (True, False):
        with gf.Session(TWO, trial=trial) as session:
            seen.append([session.run(fetches, {x: data})[0].tobytes() for _ in range(3)])
    assert seen[0] == seen[1]


def test_graphs_that_touch_anything_outside_are_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x = gf.placeholder("float32", (4,))
    calls: list[int] = []

    def outside(array: Any) -> Any:
        calls.append(1)
        return array

    printed = gf.debug.print(x * 2.0, "value")
    called = gf.host_call(outside, x, spec=gf.spec("float32", (4,)))
    for y in (printed, called):
        assert not may_profile(TWO, optimize(Graph([y])), {})
    assert may_profile(TWO, optimize(Graph([x * 2.0])), {})
    assert not may_profile(gf.Cluster.hypothetical("8xh100"), optimize(Graph([x * 2.0])), {})
    with gf.Session(TWO) as session:
        session.run([printed, called], {x: np.ones(4, "float32")})
    assert len(calls) == 1 and capsys.readouterr().out.count("value") == 1


def test_a_graph_that_fails_on_made_up_feeds_fails_only_in_its_step() -> None:
    x = gf.placeholder("int64", (3,))
    table = gf.variable(np.ones((2, 2), "float32"))
    y = gf.take(table, x + 5, axis=0)
    with gf.Session(TWO) as session:
        np.testing.assert_array_equal(session.run(y, {x: [-5, -4, -5]}), np.ones((3, 2)))
        with pytest.raises(OpError, match="take"):
            session.run(y, {x: [0, 0, 0]})


@pytest.mark.parametrize("trial", ["no", 1, None])
def test_whether_to_try_out_is_yes_or_no(trial: Any) -> None:
    with pytest.raises(ArgumentError, match="trial must be True or False"):
        gf.Session(trial=trial)


def test_loops_over_a_batch_of_unknown_size_are_placed_by_what_they_taught() -> None:
    x = gf.placeholder("float32", (None, 64), name="x")
    w = gf.constant(np.eye(64, dtype="float32"))
    start = (gf.constant(0), x)
    loop = gf.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] @ w), start)
    data = np.ones((256, 64), "float32")
    with gf.Session(TWO) as session:
        assert np.array_equal(session.run(loop[1], {x: data}), data)


def test_a_body_that_is_pinned_to_several_devices_is_not_tried_out_and_runs() -> None:
    x = gf.placeholder("float32", (4,))

    def body(carry: gf.Tensor, row: gf.Tensor) -> tuple[gf.Tensor, gf.Tensor]:
        with gf.device("cpu:0"):
            carry = gf.sin(carry) + row
        with gf.device("cpu:1"):
            return carry * 2.0, carry

    _, ys = gf.scan(body, x, gf.placeholder("float32", (3, 4), name="xs"))
    made = compile_fetches([ys])
    assert profile_first_steps(TraceCorrections("a"), TWO, ClusterSurvey(), made, {}) == 0


def test_the_first_plan_of_a_session_rests_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fetches, x = build_training()
    told: list[float] = []
    observe = TraceCorrections.observe

    def slower(self: TraceCorrections, bucket: Any, measured: float, predicted: float) -> None:
        told.append(measured)
        observe(self, bucket, 1000 * measured, predicted)

    monkeypatch.setattr(TraceCorrections, "observe", slower)
    with gf.Session(TWO) as session:
        session.run(fetches, {x: np.ones((32, 64), "float32")})
        slow = session.plan(fetches).makespan
    assert told and slow > 100 * min(told)
    with gf.Session(TWO) as session:  # kept for the next
        session.run(fetches, {x: np.ones((32, 64), "float32")})
        assert session.plan(fetches).makespan > slow / 2


def test_micro_batches_are_tried_out_in_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which they were built, all would find a layer's weights in the cache."""
    orders: list[list[int]] = []

    def record_order(graph: Graph, devices: Any, order: Any, *rest: Any) -> Any:
        orders.append([node.turn for node in order or ()])
        return partition(graph, devices, order, *rest)

    monkeypatch.setattr("graphflow.planning.trials.profiling_run.partition", record_order)
    fetches, x = build_training()
    sizes = dims(fetches, x)
    assert (
        profile_first_steps(
            TraceCorrections("a"), TWO, ClusterSurvey(), compile_fetches(fetches), sizes
        )
        > 0
    )
    cut = gf.parallel.Pipeline(2, microbatches=4).divide(Graph(fetches), TWO)
    made = CompiledFetches(tuple(cut.graph.outputs), cut.graph, optimize(cut.graph))
    assert (
        profile_first_steps(TraceCorrections("a"), TWO, ClusterSurvey(), made, cut.bindings(sizes))
        > 0
    )
    plain, turned = orders
    assert not plain and [t for t in turned if t >= 0] == sorted(t for t in turned if t >= 0)
    assert [n.turn for n in made.graph.nodes if n.turn >= 0] != [t for t in turned if t >= 0]


def test_products_that_read_other_operands_across_are_other_lessons() -> None:
    fetches, x = build_training()
    made = compile_fetches(fetches).graph
    known = trace_observations(made, TWO, dims(fetches, x), {}).values()
    assert {"matmul", "matmul·a"} <= {each.bucket.op for each in known}
