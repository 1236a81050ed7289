"""Pipelines: the same training as one device has, in the order that the schedule asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ScheduleError, ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.pipelining.schedule import SCHEDULES, Schedule, Task
from graphflow.parallel.pipelining.stages import stages_of
from graphflow.parallel.pipelining.staleness import staleness
from graphflow.parallel.pipelining.standard_schedules import one_f_one_b, pipedream
from graphflow.parallel.pipelining.timeline import run
from graphflow.parallel.sharding.emission.sharded_graph import FeedSlice
from graphflow.passes import optimize
from graphflow.placement.plans.plan_records import Interval, MeasuredSteps
from graphflow.placement.plans.reports.plan_notices import constraints
from graphflow.placement.view.schedule import picture, rows

LAYERS, WIDTH, BATCH, STEPS = 4, 8, 26, 3
rng = np.random.default_rng(0)
WEIGHTS = [rng.normal(size=(WIDTH, WIDTH)) / 3 for _ in range(LAYERS)]
X, Y = rng.normal(size=(BATCH, WIDTH)), rng.normal(size=(BATCH, WIDTH))
SCOPES = [["layer0", "layer1"], ["layer2"], ["layer3", "loss"]]


def tower(skip: bool = False, tied: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Placeholders and loss of a chain of layers in float64."""
    x, y = (gf.placeholder("float64", ("B", WIDTH), name=name) for name in "xy")
    h, first, weights = x, x, []
    for i, value in enumerate(WEIGHTS):
        with gf.name_scope(f"layer{i}"):
            weights.append(gf.variable(value, name=f"w{i}"))
            h = gf.tanh(h @ weights[0 if tied and i == LAYERS - 1 else i])
            first = h if i == 0 else first
    with gf.name_scope("loss"):
        return x, y, gf.mean(gf.square((h + first if skip else h) - y))


def run_training(
    strategy: Any, cluster: gf.Cluster | None = None, optimizer: Any = None, **kind: bool
) -> tuple[list[float], list[Any], float]:
    """The losses of some steps, the weights after them, and the loss on other data."""
    x, y, loss = tower(**kind)
    train = (optimizer or gf.optim.Adam(0.01)).minimize(loss, strategy=strategy)
    with gf.Session(cluster) as s:
        losses = [float(s.run([loss, train], {x: X, y: Y})[0]) for _ in range(STEPS)]
        weights = [s.get(v.outputs[0]) for v in Graph([loss]).variables]
        return losses, weights, float(s.run(loss, {x: X[:11], y: Y[:11]}))


@cache
def train_on_one_device(**kind: bool) -> tuple[list[float], list[Any], float]:
    """What is trained on one device: many strategies are compared with it."""
    return run_training(None, **kind)


def assert_same(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


P = gf.parallel.Pipeline
SYNCHRONOUS = {
    "gpipe": P(2, "gpipe", 4),
    "1f1b": P(2, microbatches=4),
    "1f1b, uneven micro-batches": P(4, "1f1b", 7),
    "1f1b, scopes": P(SCOPES, "1f1b", 3),
    "1f1b, recomputing": P(2, "1f1b", 4, recompute=True),
    "interleaved": P(4, "interleaved", 4),
    "zb-h1": P(2, "zb-h1", 4),
    "zb-h2": P(4, "zb-h2", 5),
    "zb-v": P(4, "zb-v", 5),
    "chimera": P(2, "chimera", 4),
    "one's own": P(2, one_f_one_b(2, 3)),
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_pipeline_that_flushes_trains_as_one_device_does(name: str) -> None:
    assert_same(run_training(SYNCHRONOUS[name]), train_on_one_device())


@pytest.mark.parametrize("kind", [{"skip": True}, {"tied": True}], ids=["skip", "tied"])
def test_skips_and_tied_weights_cross_stages(kind: dict[str, bool]) -> None:
    assert_same(run_training(P(SCOPES, "zb-h1", 4), **kind), train_on_one_device(**kind))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "chimera"])
def test_two_workers_give_the_bits_of_one_process(name: str) -> None:
    here = run_training(SYNCHRONOUS[name])
    there = run_training(SYNCHRONOUS[name], gf.Cluster.local(2))
    assert here[0] == there[0] and here[2] == there[2]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(here[1], there[1], strict=True))


@pytest.mark.parametrize("beside", [None, gf.parallel.Data(2)], ids=["alone", "replicas"])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_the_graph_of_a_pipeline_is_the_same_on_one_device_and_on_many(
    name: str, beside: Any
) -> None:
    """A sum over micro-batches that another stage reads is added up where it was made, also where
    both stages are on one device: another order of adding gives other bits."""
    written = []
    for devices in (1, 8):
        loss = tower(skip=True, tied=True)[-1]
        strategy = SYNCHRONOUS[name] if beside is None else SYNCHRONOUS[name] * beside
        train = gf.optim.Adam(0.01).minimize(loss, strategy=replace(strategy))
        graph = strategy.divide(Graph([loss, train]), gf.Cluster.local(devices)).graph
        index = {node: i for i, node in enumerate(graph.nodes)}
        written.append(
            [(n.op.name, n.name, [index[t.node] for t in n.inputs]) for n in graph.nodes]
        )
    assert written[0] == written[1]


def test_each_device_runs_its_tasks_in_the_order_of_the_schedule() -> None:
    x, y, loss = tower()
    schedule = one_f_one_b(2, 4)
    train = gf.optim.SGD(0.1).minimize(loss, strategy=P(2, schedule))
    plan = gf.plan([loss, train], gf.Cluster.local(2), {x: X.shape, y: Y.shape})
    for device, order in zip(plan.cluster.devices, schedule.orders, strict=True):
        seen = []
        for node in plan.nodes:
            if node.device == device and node.op == "matmul":
                micro, _, rest = node.name.partition("/")
                phase = "B" if rest.startswith("gradients/") else "F"
                task = (phase, int(micro.removeprefix("micro=")))
                if not seen or seen[-1] != task:
                    seen.append(task)
        assert seen == [(task.phase, task.microbatch) for task in order]


# Without flush --------------------------------------------------------------------------------


def by_hand(
    schedule: Schedule, optimizer: Any, tied: bool = False
) -> tuple[list[float], list[Any]]:
    """Micro-batch by micro-batch, each stage with the weights that the schedule gives it."""
    x, y, loss = tower(tied=tied)
    stages = stages_of(loss, schedule.stages)
    variables = Graph([loss]).variables
    tensors = [v.outputs[0] for v in variables]
    grads = gf.gradients(loss, tensors)
    given = [gf.placeholder("float64", v.shape) for v in tensors]
    update = optimizer.apply(given, tensors)
    used = [staleness(schedule, s).used for s in range(schedule.stages)]
    m, losses = schedule.microbatches, []
    with gf.Session() as state, gf.Session() as passes:
        for _ in range(STEPS):
            versions = [[state.get(t) for t in tensors]]
            found, waiting = [], []
            for i, (a, b) in enumerate(
                zip(np.array_split(X, m), np.array_split(Y, m), strict=True)
            ):
                for k, v in enumerate(variables):
                    passes.set(tensors[k], versions[used[stages[v]][i]][k])
                value, *gs = passes.run([loss, *grads], {x: a, y: b})
                found.append(value)
                waiting.append(gs)
                if len(waiting) == schedule.group or i == m - 1:
                    mean = [sum(g[k] for g in waiting) / len(waiting) for k in range(len(tensors))]
                    state.run(update, dict(zip(given, mean, strict=True)))
                    versions.append([state.get(t) for t in tensors])
                    waiting = []
            losses.append(float(np.mean(found)))
        return losses, [state.get(t) for t in tensors]


@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [
        (pipedream(2, 4), gf.optim.SGD(0.1)),
        (pipedream(4, 6), gf.optim.Adam(0.01)),
        (pipedream(3, 6, "vertical"), gf.optim.SGD(0.1, momentum=0.9)),
        (pipedream(2, 6, "double-buffered", 3), gf.optim.Adam(0.01)),
    ],
    ids=["stash", "stash, Adam", "vertical", "2BW"],
)
def test_gradients_without_flush_are_those_at_the_mixed_weights(
    schedule: Schedule, optimizer: Any
) -> None:
    losses, weights, _ = run_training(P(schedule.stages, schedule), optimizer=optimizer)
    assert_same((losses, weights), by_hand(schedule, optimizer))


def test_without_flush_a_tied_weight_has_the_version_of_the_stage_where_it_lives() -> None:
    """The last stage would wait for each update of the first one otherwise."""
    found = run_training(P(3, pipedream(3, 6)), optimizer=gf.optim.SGD(0.1), tied=True)
    assert_same(found[:2], by_hand(pipedream(3, 6), gf.optim.SGD(0.1), tied=True))


def test_pipedream_on_two_workers_gives_the_bits_of_one_process() -> None:
    strategy = P(2, "pipedream", 4)
    here, there = run_training(strategy), run_training(P(2, "pipedream", 4), gf.Cluster.local(2))
    assert here[0] == there[0]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(here[1], there[1], strict=True))


@pytest.mark.parametrize("strategy", [P(2, "pipedream", 4), P(4, "zb-v", 4)], ids=str)
def test_every_pipeline_has_a_report(strategy: Any) -> None:
    _, _, loss = tower()
    train = gf.optim.Adam(0.01).minimize(loss, strategy=strategy)
    report = strategy.report([loss, train], gf.Cluster.local(2))
    told = str(report)
    assert told.startswith("mesh micro 4: /worker:0/cpu:0, /worker:1/cpu:0\n")
    assert f"{strategy.stages} stages, 4 micro-batches" in told and "idle: " in told
    assert sum(row.parameters for row in report.stages) == LAYERS * WIDTH**2


def test_a_report_says_what_each_stage_has_and_hands_on() -> None:
    _, _, loss = tower()
    strategy = P([["layer0", "layer1"], ["layer2", "layer3", "loss"]], "1f1b", 4)
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    report = strategy.report([loss, train], gf.Cluster.local(2))
    first, last = report.stages
    assert first.devices == ("/worker:0/cpu:0",) and last.devices == ("/worker:1/cpu:0",)
    assert first.names == ("layer0", "layer1") and last.names == ("layer2", "layer3", "loss")
    assert first.parameters == 2 * WIDTH**2 and first.bytes == 8 * first.parameters
    assert (
        first.nodes + last.nodes == len(Graph([loss]).nodes) - 2 - LAYERS
    )  # placeholders, weights
    each = 64 // 4 * WIDTH * 8  # a size that only a feed fixes counts as 64
    assert (first.forward, first.backward) == (each, 0)
    assert (last.forward, last.backward) == (0, each)
    assert report.between == report.bytes == 4 * 2 * each
    assert report.timeline is not None and 0 < report.timeline.bubble < 1
    assert report.timeline.stored == (2, 1)
    told = str(report)
    assert all("  " + line in told for line in gf.parallel.draw(one_f_one_b(2, 4)).splitlines())
    assert "layer2, layer3, loss" in told and f"{4 * 2 * each:,} bytes a step from stage" in told


def with_terms(strategy: Any, clipped: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """A chain whose loss is a sum, of which no term has a gradient of the sum's own, and the last
    is no more than a term for a weight; gradients are clipped together."""
    h = x = gf.placeholder("float64", ("B", WIDTH), name="x")
    weights = [gf.variable(value, name=f"w{i}") for i, value in enumerate(WEIGHTS)]
    for i, w in enumerate(weights):
        with gf.name_scope(f"layer{i}"):
            h = gf.tanh(h @ w)
    with gf.name_scope("loss"):
        loss = gf.mean(gf.square(h - x)) + 0.01 * gf.sum(gf.square(weights[0]))
    clip = (lambda g: gf.optim.clip_by_global_norm(g, 0.1)[0]) if clipped else None
    return x, loss, gf.optim.SGD(0.1).minimize(loss, strategy=strategy, transform=clip)


def trained_with_terms(strategy: Any) -> list[Any]:
    x, loss, train = with_terms(strategy, clipped=True)
    with gf.Session() as s:
        losses = [s.run([loss, train], {x: X + i})[0] for i in range(3)]
        return [*losses, *(s.get(v.outputs[0]) for v in Graph([loss]).variables)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_a_loss_of_several_terms_is_in_stages_as_a_whole(schedule: str) -> None:
    strategy = P([["layer0", "layer1"], ["layer2", "layer3", "loss"]], schedule, 3)
    _, loss, train = with_terms(strategy)
    report = strategy.report([loss, train], gf.Cluster.local(2))
    whole = [n for n in Graph([loss]).nodes if n.op.name not in ("constant", "placeholder")]
    assert sum(stage.nodes for stage in report.stages) == len(whole) - LAYERS
    assert sum(stage.parameters for stage in report.stages) == LAYERS * WIDTH**2
    for a, b in zip(trained_with_terms(strategy), trained_with_terms(None), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_a_step_without_flush_has_a_loss_of_several_terms() -> None:
    x, loss, train = with_terms(P(2, "pipedream", 3))
    with gf.Session() as s:
        first, second = (float(s.run([loss, train], {x: X})[0]) for _ in range(2))
        assert second < first


def looked_up(strategy: Any, dense: bool = False) -> tuple[list[Tensor], Tensor, Tensor]:
    """A table of which a step updates the rows that occur, a weight that is not trained, and ids
    whose second axis is the batch."""
    random = np.random.default_rng(0)
    ids = gf.placeholder("int64", (3, "B"), name="ids")
    y = gf.placeholder("float64", ("B", 4), name="y")
    table = gf.variable(random.normal(size=(9, 4)), name="table")
    fixed = gf.variable(random.normal(size=(4, 4)), name="fixed", trainable=False)
    rows = gf.nn.embedding(ids, table * 1.0 if dense else table)
    loss = gf.mean(gf.square(gf.tanh(gf.sum(rows, axis=0) @ fixed) - y))
    return [ids, y], loss, gf.optim.Adagrad(0.1).minimize(loss, strategy=strategy)


def fed(batch: int) -> list[Any]:
    random = np.random.default_rng(1)
    return [random.integers(0, 9, (3, batch)), random.normal(size=(batch, 4))]


def test_without_flush_one_stage_trains_on_one_micro_batch_after_another() -> None:
    """Rows of tables, weights that stay, and a batch along any axis."""
    ids, y = fed(8)
    (x, t), loss, train = looked_up(P(1, "pipedream", 3))
    with gf.Session() as s:
        s.run([loss, train], {x: ids, t: y})
        table = next(v.outputs[0] for v in Graph([loss]).variables if v.name == "table")
        found = s.get(table)
    (x, t), loss, train = looked_up(None)
    with gf.Session() as s:
        for part in np.array_split(np.arange(8), 3):
            s.run([loss, train], {x: ids[:, part], t: y[part]})
        table = next(v.outputs[0] for v in Graph([loss]).variables if v.name == "table")
        np.testing.assert_allclose(found, s.get(table), rtol=1e-12)


def test_rows_of_a_table_are_updated_by_a_group_of_micro_batches() -> None:
    """Two versions of the weights: rows of several micro-batches are in one update."""
    ids, y = fed(8)
    results = []
    for dense in (False, True):
        schedule = gf.parallel.pipedream(1, 4, "double-buffered", 2)
        (x, t), loss, train = looked_up(P(1, schedule), dense)
        with gf.Session() as s:
            results.append([s.run([loss, train], {x: ids, t: y})[0] for _ in range(3)])
    np.testing.assert_allclose(*results, rtol=1e-12)


def test_two_losses_of_one_strategy_are_in_its_stages() -> None:
    strategy = P(2, "1f1b", 2)
    x, loss, train = with_terms(strategy)
    mine = gf.variable(np.ones((WIDTH, WIDTH)), name="mine")
    other = gf.mean(gf.square(gf.tanh(x @ mine) - x))
    both = gf.optim.Adam(0.1).minimize(other, strategy=strategy)
    report = strategy.report([loss, train, both], gf.Cluster.local(2))
    assert sum(stage.parameters for stage in report.stages) == (LAYERS + 1) * WIDTH**2


def test_gradients_that_are_clipped_together_stay_where_they_are() -> None:
    """Of the stages' norms only numbers travel."""
    strategy = P([["layer0", "layer1"], ["layer2", "layer3", "loss"]], "1f1b", 3)
    plain, clipped = (
        strategy.report(with_terms(strategy, clip)[2], gf.Cluster.local(2)).between
        for clip in (False, True)
    )
    assert plain < clipped <= plain + 4 * 8


def test_replicas_of_a_stage_exchange_its_small_gradients_together() -> None:
    strategy = P([["layer0", "layer1"], ["layer2", "layer3", "loss"]], "1f1b", 3)
    product = strategy * gf.parallel.Data(2)
    _, loss, train = with_terms(product)
    report = product.report([loss, train], gf.Cluster.local(4))
    weights = 2 * LAYERS * WIDTH**2 * 8
    large = [move for move in report.collectives if move.bytes > 64]
    assert [move.bytes for move in large if "all-reduce" in move.kind] == [weights // 2] * 2
    alone = gf.parallel.Data(2, bucket=0)
    assert len((strategy * alone).report(train, gf.Cluster.local(4)).collectives) >= LAYERS


def test_a_plan_shows_the_schedule_predicted_and_measured(tmp_path: Path) -> None:
    x, y, loss = tower()
    schedule = one_f_one_b(2, 3)
    train = gf.optim.SGD(0.1).minimize(loss, strategy=P(2, schedule))
    with gf.Session(gf.Cluster.local(2)) as s:
        s.run([loss, train], {x: X, y: Y})
        with s.trace():
            s.run([loss, train], {x: X, y: Y})
        plan = s.plan()
    drawn = rows(plan)
    told = [(row.device, row.kind) for row in drawn]
    assert told == [(d, k) for d in plan.cluster.devices for k in ("predicted", "measured")]
    for row, order in zip(drawn[::2], schedule.orders, strict=True):
        tasks = [bar.task for bar in row.bars if bar.task]
        assert list(dict.fromkeys(tasks)) == [f"{t.phase}{t.microbatch}" for t in order]
        assert 0 <= row.idle < 1 and row.busy <= row.span * 1.000001
    page = picture(drawn)
    assert page.count("<rect") == sum(len(row.bars) for row in drawn) and "<title>F0: " in page
    assert rows(gf.Plan.load(plan.save(tmp_path / "plan.json"))) == drawn
    assert {each.why for each in constraints(plan)} >= {f"its strategy has it on {told[0][0]}"}
    assert rows(gf.plan(loss, None, {x: X.shape, y: Y.shape})) == []


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_measured_idle_is_that_of_the_spans_of_a_trace(name: str) -> None:
    """Of spans that are as long as a schedule says, the closed form's share of the time between two
    batches."""
    f, b, w = 1.0, 1.0, 0.5
    stages, devices, m = (4, 2, 4) if name == "interleaved" else (2, 2, 4)
    made = replace(SCHEDULES[name](stages, m), recompute=False)
    x, y, loss = tower()
    train = gf.optim.SGD(0.1).minimize(loss, strategy=P(stages, made))
    plan = gf.plan([loss, train], gf.Cluster.local(2), {x: X.shape, y: Y.shape})
    first = {(n.device, n.task): n.name for n in reversed(plan.nodes)}
    timeline = run(made, f, b, w)
    last = [*plan.cluster.devices][-1]
    early = Interval(last, first[last, ""], -9.0, -8.0, "compute")  # that of no task does not count
    spans = tuple(
        Interval(device, first[device, label], start, end, "compute")
        for device, each in zip(plan.cluster.devices, timeline.spans, strict=True)
        for t, start, end in each
        for label in [f"{t.phase}{t.microbatch}" + f"/{t.stage}" * made.several]
    )
    measured = plan.with_measured(MeasuredSteps(timeline.makespan, (early, *spans), {}, 1))
    v, both = stages // devices, f + b + w
    closed = (devices - 1) * (f + b - w if name == "zb-h1" else both)  # both: of one stage
    for row in rows(measured)[1::2]:
        assert row.kind == "measured" and row.busy == pytest.approx(m * v * both)
        assert row.idle * row.span == pytest.approx(row.span - row.busy)
    longest = max(row.span for row in rows(measured)[1::2])
    assert longest - m * v * both == pytest.approx(closed)


def test_the_order_of_a_product_does_not_matter() -> None:
    data = gf.parallel.Data(2)
    assert_same(
        run_training(data * P(2, microbatches=2)), run_training(P(2, microbatches=2) * data)
    )


def test_a_product_of_three_trains_as_one_device_does() -> None:
    shard = gf.parallel.Shard({"model": 2}, {"layer*/w*": (None, "model")})
    wanted = train_on_one_device()
    assert_same(run_training(P(2, microbatches=2) * gf.parallel.Data(2) * shard), wanted)
    assert_same(run_training(shard * (gf.parallel.Data(2) * P(2, microbatches=2))), wanted)


def test_pipedream_takes_placeholders_whose_sizes_an_op_makes_equal() -> None:
    def losses(*batch: Any) -> list[float]:
        x, y = (gf.placeholder("float64", (size, WIDTH)) for size in batch)
        loss = gf.mean(gf.square(gf.tanh(gf.tanh(x @ gf.variable(WEIGHTS[0])) - 0.5) - y))
        train = gf.optim.SGD(0.1).minimize(loss, strategy=P(2, "pipedream", 4))
        with gf.Session() as s:
            return [float(s.run([loss, train], {x: X, y: Y})[0]) for _ in range(STEPS)]

    assert losses(None, None) == losses("B", "B")


# Layers ---------------------------------------------------------------------------------------


class Block(gf.nn.Layer):
    """A layer of a user's own, under a name."""

    def __init__(self, name: str) -> None:
        with self.scope(name):
            self.linear = gf.nn.Linear(WIDTH, WIDTH, dtype="float64")

    def __call__(self, x: Tensor) -> Tensor:
        return gf.tanh(self.linear(x))


def blocks() -> tuple[Tensor, Tensor]:
    with gf.random.seed(0):
        x = gf.placeholder("float64", ("B", WIDTH), name="x")
        h = Block("first")(x)
        h = gf.nn.LayerNorm(WIDTH, dtype="float64", name="norm")(h)
        with gf.name_scope("second"):
            block = Block("inner")
        h = block(h)
        with gf.name_scope("loss"):
            return x, gf.mean(gf.square(h))


def test_layers_are_stages_by_their_names() -> None:
    def losses(strategy: Any) -> list[float]:
        x, loss = blocks()
        train = gf.optim.Adam(0.01).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            return [float(s.run([loss, train], {x: X})[0]) for _ in range(STEPS)]

    assert_same(losses(P(["first", ["norm", "second", "loss"]], "1f1b", 4)), losses(None))
    assert_same(losses(P([["first", "norm"], "second/inner", "loss"], "zb-h1", 4)), losses(None))


def test_a_scope_that_is_not_there_is_refused_with_those_that_are() -> None:
    _, loss = blocks()
    told = (
        r"stage 0: no node is under the name scope 'scond/inner'; did you mean 'second/inner'.*"
        "There are first, norm, second, loss"
    )
    with pytest.raises(ScheduleError, match=told):
        stages_of(loss, ["scond/inner", "first"])


# Without training -----------------------------------------------------------------------------

ANY = {
    "replicas": gf.parallel.Data(4),
    "replicas, state in shares": gf.parallel.Data(2, shard_state=True),
    "replicas that take turns": gf.parallel.Data(2, accumulate=3),
    "a mesh": gf.parallel.Shard({"data": 4}, {"x": ("data",), "y": ("data",)}),
    "replicas of a mesh": gf.parallel.Data(2) * gf.parallel.Shard({"m": 2}, {"*w0": (None, "m")}),
    "a pipeline": P(2, microbatches=4),
    "replicas of a pipeline": P(2, microbatches=4) * gf.parallel.Data(2),
    "recomputing": P(2, "gpipe", microbatches=4),
    "two directions": P(2, "chimera", microbatches=4),
    "no flush": P(2, "pipedream", microbatches=4),
}


@pytest.mark.parametrize("name", ANY)
def test_a_batch_of_any_size_is_evaluated(name: str) -> None:
    x, y, loss = tower()
    train = gf.optim.SGD(0.1).minimize(loss, strategy=ANY[name])
    with gf.Session() as s:
        s.run([loss, train], {x: X, y: Y})
        h = X
        weights = [s.get(v.outputs[0]) for v in Graph([loss]).variables]
        for w in weights:
            h = np.tanh(h @ w)
        for size in (BATCH, 1, 3, 2, 9, BATCH, 1):
            found = s.run(loss, {x: X[:size], y: Y[:size]})
            np.testing.assert_allclose(found, np.mean((h - Y)[:size] ** 2), rtol=1e-12)
        small = [{x: X[:n], y: Y[:n]} for n in (8, 1, 8, 8, 1)]
        streamed = [float(v) for v in s.run(loss, small, steps=5)]
        assert streamed == [float(s.run(loss, feeds)) for feeds in small]
        with pytest.raises(ShardingError, match="a batch of 1"):
            s.run([loss, train], {x: X[:1], y: Y[:1]})


def test_a_small_batch_is_evaluated_on_workers_with_the_bits_of_one_process() -> None:
    def losses(cluster: gf.Cluster | None) -> list[float]:
        x, y, loss = tower()
        train = gf.optim.SGD(0.1).minimize(loss, strategy=P(2, microbatches=4))
        with gf.Session(cluster) as s:
            s.run([loss, train], {x: X, y: Y})
            s.warmup(loss, {x: [(1, WIDTH), (8, WIDTH)], y: [(1, WIDTH), (8, WIDTH)]})
            return [float(s.run(loss, {x: X[:n], y: Y[:n]})) for n in (1, 8, 3)]

    assert losses(None) == losses(gf.Cluster.local(2))


def test_a_smaller_batch_of_known_size_is_evaluated() -> None:
    weight = gf.variable(WEIGHTS[0])
    x, few = gf.placeholder("float64", (8, WIDTH)), gf.placeholder("float64", (3, WIDTH))
    loss, seen = gf.mean(gf.square(x @ weight)), few @ weight
    for strategy in (gf.parallel.Data(4), gf.parallel.Shard({"d": 4}, batch="d"), P(1, "1f1b", 4)):
        train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            s.run(train, {x: X[:8]})
            found = s.run(seen, {few: X[:3]})
            np.testing.assert_allclose(found, X[:3] @ s.get(weight), rtol=1e-12)


# Bad input ------------------------------------------------------------------------------------


def divide_step(strategy: Any, batch: Any = "B", cluster: gf.Cluster | None = None) -> object:
    x = gf.placeholder("float64", (batch, WIDTH), name="x")
    loss = gf.mean(gf.square(gf.tanh(x @ gf.variable(WEIGHTS[0]))))
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    return gf.plan(train, cluster or gf.Cluster.here(), {} if batch != "B" else {x: (4, WIDTH)})


def no_batch() -> object:
    loss = gf.sum(gf.square(gf.variable(WEIGHTS[0])))
    return gf.plan(gf.optim.SGD(0.1).minimize(loss, strategy=P(2, "1f1b", 2)))


def backwards(stages: int, microbatches: int) -> Schedule:
    tasks: Sequence[Task] = [Task("B", 0, 0), Task("F", 0, 0)]
    return Schedule("backwards", stages, microbatches, (tuple(tasks),))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: P("many"), ScheduleError, "stages must be an int of at least 1.*not 'many'"),
        (lambda: P(2.5), ScheduleError, "stages must be an int of at least 1.*not 2.5"),
        (lambda: P(None), ScheduleError, "stages must be an int of at least 1.*not None"),
        (lambda: P([]), ScheduleError, r"stages must be an int of at least 1.*not \[\]"),
        (lambda: P(2, recompute="yes"), ScheduleError,
         "recompute must be True or False, not 'yes'"),
        (lambda: P(2, beside=5), ScheduleError, "goes with one Data or Shard, not 5"),
        (lambda: P(2) * gf.parallel.Data(2) * gf.parallel.Data(2), ShardingError, r"Data\(4\)"),
        (lambda: P(2, lambda stages: None), ScheduleError, "micro-batches, but too many"),
        (lambda: P(2, []), ScheduleError, r"schedule must be one of gpipe.*not \[\]"),
        (lambda: divide_step(P(2, lambda a, b: 1 / 0)), ScheduleError, "raised ZeroDivisionError"),
        (lambda: P(2, lambda a, b, c: None), ScheduleError, "missing a required argument: 'c'"),
        (lambda: divide_step(P(2, "1f1b", 10**7), 4), ShardingError,
         "a batch of 4.*10000000 micro"),
        (lambda: divide_step(P(2, "1f1b", 10**7)), ShardingError,
         "a batch of 4.*microbatches=4 at"),
        (lambda: P(2, one_f_one_b(2, 4)) * gf.parallel.Data(2, accumulate=2), ScheduleError,
         "accumulate=2 asks for 2 times as many; make it for 8, and leave out accumulate="),
        (lambda: divide_step(P(2, "1f1b", 2) * gf.parallel.Data(1, accumulate=3)), ShardingError,
         "a batch of 4.*than the 6 micro-batches.*microbatches=1 at most, or a smaller accumulate"),
        (lambda: P(2) * gf.parallel.Shard({"stage": 2}), ScheduleError, "axis 'stage'"),
        (lambda: divide_step(P(2, lambda p, m: 1)), ScheduleError,
         r"<lambda> gives a schedule.*not 1"),
        (lambda: divide_step(P(2, one_f_one_b(3, 2))), ScheduleError, "2 stages, but the schedule"),
        (lambda: P(2, "2f2b"), ScheduleError, "schedule must be one of gpipe, 1f1b.*not '2f2b'"),
        (lambda: P(2, "Interleave"), ScheduleError, "not 'Interleave'; did you mean 'interleaved'"),
        (lambda: divide_step(P(3)), ShardingError, "a batch of 4.*is smaller than the 6 micro"),
        (lambda: divide_step(P(2, "1f1b", 4) * gf.parallel.Data(2)), ShardingError,
         "a batch of 4.*smaller than its 8 shards, 2 .data. × 4 micro-batches; feed at least 8"),
        (lambda: divide_step(P(2, "chimera", 4) * gf.parallel.Data(2)), ShardingError,
         "its 8 shards, 2 .data. × 4 micro-batches; feed at least 8"),
        (lambda: P(2, "1f1b", 0), ScheduleError,
         "microbatches must be an int of at least 1, not 0"),
        (lambda: P(2) * 3, ScheduleError, "goes with one Data or Shard, not 3"),
        (lambda: divide_step(P(9, "1f1b", 2)), ScheduleError, "9 stages for a network of"),
        (lambda: divide_step(P(3, "1f1b", 2), cluster=gf.Cluster.local(2)), ShardingError,
         "takes 3 devices, and the cluster has 2"),
        (lambda: divide_step(P(["a", "b"], "1f1b", 2)), ScheduleError, "no node is under the name"),
        (lambda: divide_step(P(1, backwards, 1)), ScheduleError, "would deadlock"),
        (lambda: divide_step(P(2, "1f1b", 8)), ShardingError,
         "a batch of 4.*is smaller than the 8"),
        (lambda: divide_step(P(2, "pipedream", 2), 4), ScheduleError,
         "does not flush.*leave the"),
        (no_batch, ShardingError, "which placeholders hold the batch"),
    ],
)  # fmt: skip
def test_what_is_no_pipeline_is_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def step_with_bodies(strategy: Any, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """A chain of layers, of which some hold a loop or a branch: its placeholder, loss and step."""
    x = gf.placeholder("float64", ("B", 3, WIDTH), name="x")
    h: Tensor = x
    for i, value in enumerate(WEIGHTS):
        with gf.name_scope(f"layer{i}"):
            w = gf.variable(value, name=f"w{i}")
            if i in (1, 2) and kind == "scan":
                rows = gf.permute_dims(h, (1, 0, 2))
                begin = gf.zeros((x.shape[0], WIDTH), "float64")
                _, found = gf.scan(lambda s, r, w=w: (gf.tanh(r + s @ w),) * 2, begin, rows)
                h = gf.permute_dims(found, (1, 0, 2))
            elif i in (1, 2):
                h = gf.cond(
                    gf.sum(w) > (1.0 if i == 1 else -100.0),
                    lambda h=h, w=w: gf.tanh(h @ w),
                    lambda h=h, w=w: gf.sin(h @ w),
                )
            else:
                h = gf.tanh(h @ w)
    with gf.name_scope("loss"):
        loss = gf.mean(gf.square(h))
    return x, loss, gf.optim.Adam(0.01).minimize(loss, strategy=strategy)


def with_bodies(strategy: Any, kind: str, cluster: gf.Cluster | None = None) -> tuple[Any, ...]:
    """Losses of some steps, and the weights after them."""
    x, loss, train = step_with_bodies(strategy, kind)
    batch = np.random.default_rng(3).normal(size=(9, 3, WIDTH))
    with gf.Session(cluster) as s:
        losses = [float(s.run([loss, train], {x: batch})[0]) for _ in range(2)]
        return losses, [s.get(v.outputs[0]) for v in Graph([loss]).variables]


@pytest.mark.parametrize("kind", ["scan", "cond"])
@pytest.mark.parametrize(
    "strategy", [P(2, "1f1b", 3), P(SCOPES, "zb-h1", 4), P(SCOPES, "gpipe", 3)], ids=str
)
def test_stages_hold_loops_and_branches(strategy: Any, kind: str) -> None:
    assert_same(with_bodies(strategy, kind), with_bodies(None, kind))


def test_a_loop_is_where_its_stage_is() -> None:
    strategy = P([SCOPES[0], [*SCOPES[1], *SCOPES[2]]], "1f1b", 3)
    here, there = (with_bodies(strategy, "scan", c) for c in (None, gf.Cluster.local(2)))
    assert here[0] == there[0]
    _, loss, train = step_with_bodies(strategy, "scan")
    graph = strategy.divide(Graph([loss, train]), gf.Cluster.local(2)).graph
    found = {(n.name.split("/")[1], str(n.device)) for n in graph.of_op("scan")}
    assert {("layer1", "/worker:0/cpu:0"), ("layer2", "/worker:1/cpu:0")} <= found


@pytest.mark.parametrize("size", [None, 2_000_000])
@pytest.mark.parametrize("number", [1_000_000])
def test_more_microbatches_than_can_be_written_are_refused_at_once(size: Any, number: int) -> None:
    x = gf.placeholder("float32", (size, 2), name="x")
    w = gf.variable(np.ones((2, 2), "float32"), name="w")
    strategy = gf.parallel.Pipeline(1, microbatches=number)
    train = gf.optim.SGD(0.1).minimize(gf.mean(gf.tanh(x @ w)), strategy=strategy)
    with pytest.raises(ScheduleError, match=r"1,000,000 micro-batches .* nodes .* at most"):
        strategy.report([train], gf.Cluster.local(1))


def test_products_that_are_added_up_keep_their_turns() -> None:
    """Else ZB-H1 would compute weights' gradients at once, and put nothing off."""
    x = gf.placeholder("float32", (16, 64), name="x")
    h = x
    for _ in range(4):
        h = gf.nn.relu(gf.nn.Linear(64, 64)(h))
    loss = gf.mean(gf.square(h))
    strategy = gf.parallel.Pipeline(2, "zb-h1", microbatches=4)
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    cut = strategy.divide(Graph([loss, train]), gf.Cluster.here())
    graph = optimize(cut.graph)
    products = [*graph.of_op("matmul"), *graph.of_op("accumulate_product")]
    told = [cut.tasks[node.turn][0] for node in products]
    assert graph.of_op("accumulate_product")
    assert (told.count("F"), told.count("B"), told.count("W")) == (16, 12, 16)


def test_a_step_that_was_built_for_one_device_is_told_what_a_pipeline_makes_of_it() -> None:
    _, _, loss = tower()
    strategy = P(2, microbatches=4)
    plain = gf.optim.SGD(0.1).minimize(loss)
    told = gf.optim.SGD(0.1).minimize(loss, strategy=P(2, microbatches=4))
    cut, same = (s.divide(Graph([loss, t]), gf.Cluster.here()) for s, t in
                 ((strategy, plain), (told.node.attrs["strategy"], told)))  # fmt: skip
    assert sorted(n.turn for n in cut.graph.nodes) == sorted(n.turn for n in same.graph.nodes)
    assert max(n.turn for n in cut.graph.nodes) > 0
    assert "idle" in str(strategy.report([loss, plain]))


def test_where_a_micro_batch_begins_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a sum over all before it: worked out for each node or in each step, a thousand
    micro-batches would take a minute to write and a second a step."""
    worked, number = [], 24
    for owner, name in ((SizePartitioner, "_piece"), (FeedSlice, "index")):
        before = getattr(owner, name)

        def record_call(*given: Any, before: Any = before, name: str = name) -> Any:
            worked.append((name, *given[1:]))
            return before(*given)

        monkeypatch.setattr(owner, name, record_call)
    x, y, loss = tower()
    train = gf.optim.SGD(0.1).minimize(loss, strategy=P(2, microbatches=number))
    with gf.Session() as s:
        for _ in range(3):
            s.run([loss, train], {x: np.ones((number + 1, WIDTH)), y: np.ones((number + 1, WIDTH))})
    pieces = [each for each in worked if each[0] == "_piece"]
    assert len(set(pieces)) == len(pieces)
    assert len(worked) - len(pieces) == 2 * number
