"""Block proximal gradient: by hand, beside scikit-learn, divided, filtered, and what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import CheckError, ShardingError
from graphflow.parallel.blocks.proximal_window import block_columns
from tests.parallel.blocks.problems import Array, LassoProblem, Model

BlockProximal, Data, Shard = gf.parallel.BlockProximal, gf.parallel.Data, gf.parallel.Shard
L1 = gf.linear.L1
ANY: Any = "3"


def iterate(
    problem: LassoProblem, columns: Array, bounds: Array, delay: int, kkt: float | None, passes: int
) -> Array:
    """The method by hand, with blocks in order: weights after some passes, each one a window."""
    x, y, strength = problem.features, problem.targets, problem.strength
    w, active = np.zeros(x.shape[1]), np.ones(x.shape[1], bool)
    for _ in range(passes):
        p, waiting = x @ w, list[tuple[Array, Array, Array]]()
        for turn in range(len(columns) + delay):
            if turn < len(columns):
                block = columns[turn]
                waiting.append((block, x[:, block].T @ (p - y), active[block].copy()))
            if turn >= delay:
                block, gradient, sent = waiting.pop(0)
                step = 1.0 / bounds[block]
                moved = w[block] - step * gradient
                moved = np.sign(moved) * np.maximum(abs(moved) - strength * step, 0)
                moved = np.where(sent, moved, w[block])
                p = p + x[:, block] @ (moved - w[block])
                w[block] = moved
                if kkt is not None:
                    rests = (moved == 0) & (abs(gradient) < strength - kkt)
                    active[block] &= ~(sent & rests)
    return w


@pytest.mark.parametrize("kkt", [None, 0.0, 3.0])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_run_is_the_pass_by_hand(delay: int, kkt: float | None) -> None:
    problem = LassoProblem(30, 23)
    penalty = L1(problem.strength)
    strategy = BlockProximal(5, delay, penalty, kkt=kkt, order="cyclic", tol=0.0)
    model = Model(problem, strategy)
    with gf.Session() as s:
        for _ in range(4):
            s.run(model.train, model.feeds)
        found, bounds = s.get(model.weights), s.get(model.state("bounds"))
    wanted = iterate(problem, block_columns(23, 5), bounds, delay, kkt, 4)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def test_blocks_cover_all_columns_and_have_one_width() -> None:
    for columns, blocks in ((10, 4), (10, 6), (7, 7), (100, 7), (5, 1), (2000, 20)):
        found = block_columns(columns, blocks)
        assert found.shape == (blocks, -(-columns // blocks))
        assert {*found.ravel().tolist()} == {*range(columns)}


@pytest.mark.parametrize("scales", [0.0, 2.0])
def test_the_measured_curvature_bounds_what_a_step_meets(scales: float) -> None:
    """At least half of the largest eigenvalue within each block, and no more than all of it."""
    problem = LassoProblem(60, 48, alike=6, share=0.7)
    problem.features *= np.exp(scales * np.random.default_rng(1).normal(size=48))
    problem.features[:, 7] = 0
    model = Model(problem, BlockProximal(4, penalty=L1(problem.strength)))
    with gf.Session() as s:
        s.run(model.train, model.feeds)
        bounds = s.get(model.state("bounds"))
    for block in block_columns(48, 4):
        x = problem.features[:, block]
        norms = (x**2).sum(0)
        unit = x / np.sqrt(np.where(norms > 0, norms, 1))
        largest = np.linalg.norm(unit, 2) ** 2
        used = norms > 0
        ratio = bounds[block][used] / (norms[used] * largest)
        assert np.all(ratio > 0.5) and np.all(ratio < 1 + 1e-12)
    assert bounds[7] == 0


# The optimum --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lasso() -> tuple[LassoProblem, float]:
    """A lasso of 500 examples and 2,000 columns, and its least value."""
    problem = LassoProblem(500, 2000)
    return problem, problem.find_least_value()


@pytest.mark.parametrize(
    ("delay", "passes"), [(0, 45), (4, 45), pytest.param(16, 60, marks=pytest.mark.slow)]
)
def test_a_lasso_reaches_the_optimum(
    delay: int, passes: int, lasso: tuple[LassoProblem, float]
) -> None:
    problem, least = lasso
    strategy = BlockProximal(20, delay, L1(problem.strength))
    excess = problem.excess(Model(problem, strategy).run(passes), least)
    assert excess < (1e-14 if delay == 0 else 5e-12)


@pytest.mark.parametrize(
    "delay", [0, pytest.param(4, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.slow)]
)
def test_the_filter_sends_a_few_percent_and_reaches_the_same_optimum(
    delay: int, lasso: tuple[LassoProblem, float]
) -> None:
    problem, least = lasso
    strategy = BlockProximal(20, delay, L1(problem.strength), kkt=0.0)
    model = Model(problem, strategy)
    with gf.Session() as s:
        for _ in range(150):
            s.run(model.train, model.feeds)
            progress = strategy.progress(s, model.weights)
            if progress.converged:
                break
        weights = s.get(model.weights)
    assert progress.converged and progress.turns == 20 * progress.passes
    assert problem.excess(weights, least) < 5e-12
    assert progress.sent < 0.1 and progress.sent * progress.passes < 6.5  # 28 passes without it
    assert progress.active < 100 and np.count_nonzero(weights) <= progress.active


def test_a_column_that_was_left_out_too_early_comes_back() -> None:
    """The first passes leave out columns that the optimum uses."""
    problem = LassoProblem(50, 40, alike=4, share=0.5, strength=0.02, seed=3)
    least = problem.find_least_value()
    strategy = BlockProximal(6, 2, L1(problem.strength), kkt=0.0, tol=1e-8)
    model = Model(problem, strategy)
    early: set[int] = set()
    with gf.Session() as s:
        for _ in range(2000):
            s.run(model.train, model.feeds)
            early |= {*np.flatnonzero(~s.get(model.state("active"))).tolist()}
            if strategy.progress(s, model.weights).converged:
                break
        weights = s.get(model.weights)
    assert early & {*np.flatnonzero(weights).tolist()}
    assert problem.excess(weights, least) < 1e-9


def test_a_logistic_loss_needs_a_bound_and_reaches_the_optimum() -> None:
    from sklearn.linear_model import LogisticRegression

    random = np.random.default_rng(0)
    features = random.normal(size=(120, 40))
    signs = np.where(features[:, 0] + 0.5 * random.normal(size=120) > 0, 1.0, -1.0)
    x, y, w = gf.constant(features), gf.constant(signs), gf.variable(np.zeros(40), name="w")
    loss = gf.sum(gf.nn.softplus(-y * (x @ w)))
    unbound = gf.optim.SGD(1.0).minimize(loss, strategy=BlockProximal(4, penalty=L1(3.0)))
    with (
        gf.Session() as s,
        pytest.raises(ShardingError, match="give curvature="),
    ):
        s.run(unbound)
    strategy = BlockProximal(4, 1, L1(3.0), curvature=0.25)
    train = gf.optim.SGD(1.0).minimize(loss, strategy=strategy)
    with gf.Session() as s:
        for _ in range(400):
            s.run(train)
        found = s.get(w)
    solver = LogisticRegression(
        l1_ratio=1.0, C=1 / 3, solver="liblinear", fit_intercept=False, tol=1e-12, max_iter=10_000
    )
    wanted = solver.fit(features, signs).coef_[0]

    def objective(weights: Array) -> float:
        return float(np.logaddexp(0, -signs * (features @ weights)).sum() + 3 * abs(weights).sum())

    assert objective(found) <= objective(wanted) * (1 + 1e-9)


def test_float32_weights_converge_to_their_rounding() -> None:
    problem = LassoProblem(60, 40)
    x, w = gf.constant(problem.features.astype("float32")), gf.variable(np.zeros(40, "float32"))
    loss = 0.5 * gf.sum(gf.square(x @ w - problem.targets.astype("float32")))
    strategy = BlockProximal(4, 1, L1(problem.strength), kkt=0.0)
    train = gf.optim.SGD(1.0).minimize(loss, strategy=strategy)
    with gf.Session() as s:
        for _ in range(300):
            s.run(train)
            if strategy.progress(s, w).converged:
                break
        assert strategy.progress(s, w).converged
        assert problem.excess(np.float64(s.get(w)), problem.find_least_value()) < 1e-5


def test_rows_of_a_weight_matrix_share_their_zeros() -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(50, 30))
    targets = features[:, :3] @ random.normal(size=(3, 2)) + 0.1 * random.normal(size=(50, 2))
    x, w = gf.constant(features), gf.variable(np.zeros((30, 2)), name="w")
    loss = 0.5 * gf.sum(gf.square(x @ w - targets))
    strategy = BlockProximal(5, penalty=gf.linear.GroupL1(15.0), kkt=0.0)
    train = gf.optim.SGD(1.0).minimize(loss, strategy=strategy * Shard({"rows": 1}))
    with gf.Session() as s:
        for _ in range(60):
            s.run(train)
        found = s.get(w)
    from sklearn.linear_model import MultiTaskLasso

    solver = MultiTaskLasso(15.0 / 50, fit_intercept=False, tol=1e-14, max_iter=100_000)
    np.testing.assert_allclose(found, solver.fit(features, targets).coef_.T, atol=1e-8)
    assert np.all((found == 0).all(1) == (found == 0).any(1))


# Divided ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kkt", [pytest.param(None, marks=pytest.mark.slow), 0.0])
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_workers_with_parts_of_the_examples_compute_what_one_device_does(
    workers: int, kkt: float | None
) -> None:
    """The order of blocks is drawn by seed and step, so it is the same on any number of them."""
    problem = LassoProblem(40, 30)
    gf.random.seed(5)
    alone = Model(problem, BlockProximal(6, 2, L1(problem.strength), kkt=kkt)).run(6)
    gf.random.seed(5)
    strategy = BlockProximal(6, 2, L1(problem.strength), kkt=kkt) * Data(workers)
    cluster = gf.Cluster.here(devices=[f"cpu:{i}" for i in range(workers)])
    found = Model(problem, strategy).run(6, cluster)
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-12)
    assert np.count_nonzero(alone)


def test_a_pass_visits_each_block_once_and_orders_differ() -> None:
    problem = LassoProblem(20, 24)
    model = Model(problem, BlockProximal(8, penalty=L1(problem.strength), window=4))
    orders = []
    with gf.Session() as s:
        for _ in range(6):
            s.run(model.train, model.feeds)
            orders.append(tuple(s.get(model.state("order")).tolist()))
    assert orders[0::2] == orders[1::2]  # two runs make a pass
    assert all(sorted(order) == [*range(8)] for order in orders)
    assert len({*orders}) == 3


@pytest.mark.parametrize("window", [3, 6, 12])
def test_the_turns_of_a_run_do_not_change_the_method(window: int) -> None:
    """With blocks in order and no delay, passes in parts or together are the same."""
    problem = LassoProblem(30, 24)
    strategy = BlockProximal(6, penalty=L1(problem.strength), order="cyclic", window=window)
    found = Model(problem, strategy).run(24 // window)
    whole = BlockProximal(6, penalty=L1(problem.strength), order="cyclic")
    np.testing.assert_allclose(found, Model(problem, whole).run(4), rtol=0, atol=1e-12)


def test_a_session_shows_the_plan_of_later_runs_once_they_ran() -> None:
    """The first run measures the curvature, in a program of its own."""
    problem = LassoProblem(20, 24)
    model = Model(problem, BlockProximal(4, penalty=L1(problem.strength)))
    counts = []
    with gf.Session() as s:
        for _ in range(3):
            s.run(model.train, model.feeds)
            assert s.plan(model.train).makespan == s.plan().makespan
            counts.append(len(s.plan(model.train).nodes))
    assert counts[0] > counts[1] == counts[2]


def test_features_that_lie_on_workers_are_cut_by_a_shard() -> None:
    problem = LassoProblem(40, 30)
    rules: dict[Any, Any] = {"features": ("rows",), "targets": ("rows",)}
    found = []
    for workers in (1, 2):
        x = gf.variable(problem.features, name="features", trainable=False)
        y = gf.variable(problem.targets, name="targets", trainable=False)
        w = gf.variable(np.zeros(30), name="w")
        loss = 0.5 * gf.sum(gf.square(x @ w - y))
        strategy = BlockProximal(6, 1, L1(problem.strength), kkt=0.0, order="cyclic")
        product = strategy * Shard({"rows": workers}, rules)
        train = gf.optim.SGD(1.0).minimize(loss, strategy=product)
        with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"])) as s:
            losses = [s.run([loss, train])[0] for _ in range(5)]
            found.append((losses, s.get(w), s.run(loss)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    losses, weights, after = found[0]
    assert losses[0] == pytest.approx(0.5 * problem.targets @ problem.targets)
    assert after == pytest.approx(0.5 * np.sum((problem.features @ weights - problem.targets) ** 2))


@pytest.mark.slow  # starts two processes, seven seconds
def test_two_workers_have_the_bits_of_two_devices_and_send_active_rows_only() -> None:
    problem = LassoProblem(40, 60)
    found, sent = [], []
    for cluster in (gf.Cluster.here(devices=["cpu:0", "cpu:1"]), gf.Cluster.local(2, threads=1)):
        gf.random.seed(1)
        model = Model(problem, BlockProximal(4, 1, L1(problem.strength), kkt=0.0) * Data(2))
        with gf.Session(cluster) as s:
            for _ in range(3):
                s.run(model.train, model.feeds)
                before = s.get(model.state("sent"))
            with s.trace() as trace:
                s.run(model.train, model.feeds)
            rows = int(s.get(model.state("sent")) - before)
            found.append(s.get(model.weights).tobytes())
        sent.append((rows, sum(e.bytes for e in trace.edges if "used_rows" in e.tensor)))
    assert found[0] == found[1]
    rows, moved = sent[1]
    assert sent[0][0] == rows < 30  # of 60 columns
    assert moved == 2 * 8 * rows


@pytest.mark.slow  # starts two processes, five seconds
def test_the_bytes_of_a_report_are_those_of_a_trace() -> None:
    problem = LassoProblem(40, 60)
    model = Model(problem, BlockProximal(4, 1, L1(problem.strength)) * Data(2))
    cluster = gf.Cluster.local(2, threads=1)
    with gf.Session(cluster) as s:
        for _ in range(2):
            s.run(model.train, model.feeds)
        with s.trace() as trace:
            s.run(model.train, model.feeds)
    edges = (e for e in trace.edges if "client" not in e.source + e.target)
    sent = sum(e.bytes * e.count for e in edges)
    sent += sum(2 * e.bytes * e.count for e in trace.exchanges)
    assert sent == model.strategy.report(model.train, cluster).bytes
    assert sent == 2 * 8 * (60 + 1)  # a pass, and the sum of squares of the features


def test_a_report_counts_all_rows_and_a_plan_shows_turns(tmp_path: Path) -> None:
    problem = LassoProblem(40, 60)
    cluster = gf.Cluster.local(2)
    model = Model(problem, BlockProximal(4, 1, L1(problem.strength), kkt=0.0) * Data(2))
    report = model.strategy.report(model.train, cluster)
    assert report.bytes_by_kind["active rows"] == 2 * 8 * 60
    assert "BlockProximal: 4 turns a run, one of 4 blocks each, each applied 1 turn later" in str(
        report
    )
    shapes = {t: a.shape for t, a in model.feeds.items()}
    plan = gf.plan(model.train, cluster, shapes)
    assert {node.task for node in plan.nodes} >= {"T0", "T3", "A1", "A4"}
    assert {str(node.device) for node in plan.nodes} >= set(cluster.devices)
    assert plan.makespan > 0
    plan.save(tmp_path / "plan.html")
    plan.save(tmp_path / "plan.svg")
    assert (tmp_path / "plan.html").stat().st_size > 10_000
    assert "turn3" in (tmp_path / "plan.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("kkt", [pytest.param(None, marks=pytest.mark.slow), 0.0])
def test_a_plan_predicts_that_a_delay_hides_the_exchange(kkt: float | None) -> None:
    """Where a turn computes for 5 ms and its exchange takes 5 ms."""
    cluster = gf.Cluster.hypothetical(
        2, flops=1e10, bandwidth=1e10, memory=1 << 33, link_latency=5e-3, link_bandwidth=1e8
    )
    seconds = []
    for delay in (0, 1, 4):
        x = gf.variable(gf.init.zeros((20_000, 2_000)), name="x", trainable=False)
        w = gf.variable(gf.init.zeros((2_000,)), name="w")
        loss = 0.5 * gf.sum(gf.square(x @ w - 1.0))
        strategy = BlockProximal(10, delay, L1(1.0), kkt=kkt) * Shard({"n": 2}, {"x": ("n",)})
        train = gf.optim.SGD(1.0).minimize(loss, strategy=strategy)
        seconds.append(gf.plan(train, cluster).makespan)
    assert seconds[1] < 0.65 * seconds[0]
    assert seconds[2] < 0.95 * seconds[1]


@pytest.mark.parametrize("kkt", [pytest.param(None, marks=pytest.mark.slow), 0.0])
def test_a_checkpoint_between_windows_goes_on_bit_equal(kkt: float | None, tmp_path: Path) -> None:
    problem = LassoProblem(40, 30)

    def make() -> Model:
        gf.random.seed(2)
        strategy = BlockProximal(6, 2, L1(problem.strength), kkt=kkt, window=3) * Data(2)
        return Model(problem, strategy)

    whole = make()
    with gf.Session() as s:
        for run in range(8):
            if run == 3:
                s.save(tmp_path)
            s.run(whole.train, whole.feeds)
        wanted = s.get(whole.weights)
    rest = make()
    with gf.Session() as s:
        s.load(tmp_path)
        for _ in range(5):
            s.run(rest.train, rest.feeds)
        found = s.get(rest.weights)
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.slow  # starts five processes, eight seconds
def test_a_worker_that_dies_costs_no_bit(tmp_path: Path) -> None:
    problem = LassoProblem(40, 30)
    found = []
    for dying in (None, 4):
        gf.random.seed(3)
        model = Model(problem, BlockProximal(6, 2, L1(problem.strength), kkt=0.0) * Data(2))
        with gf.Session(gf.Cluster.local(2), checkpoint=tmp_path / str(dying), every=3) as s:
            for run in range(7):
                if run == dying:
                    os.kill(s._life.hosts.pids[1], signal.SIGKILL)
                s.run(model.train, model.feeds)
            found.append(s.get(model.weights).tobytes())
    assert found[0] == found[1]


# Refusals -----------------------------------------------------------------------------------------


def two_variables() -> None:
    x = gf.placeholder("float64", (None, 3), name="x")
    w, b = gf.variable(np.ones(3), name="w"), gf.variable(np.ones(()), name="b")
    gf.optim.SGD(1.0).minimize(gf.sum(gf.square(x @ w + b)), strategy=BlockProximal(2))


def run_step(
    loss_of: Callable[..., gf.Tensor], optimizer: Any = None, strategy: Any = None
) -> None:
    """Run a step of a loss of features and weights."""
    x = gf.placeholder("float64", ("n", 4), name="x")
    w = gf.variable(np.ones(4), name="w")
    optimizer = optimizer or gf.optim.SGD(1.0)
    train = optimizer.minimize(loss_of(x, w), strategy=strategy or BlockProximal(2))
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"])) as s:
        s.run(train, {x: np.ones((6, 4))})


def two_steps() -> None:
    strategy = BlockProximal(2)
    x = gf.constant(np.ones((5, 4)))
    steps = []
    for name in ("v", "w"):
        weights = gf.variable(np.ones(4), name=name)
        steps.append(gf.optim.SGD(1.0).minimize(squares(x, weights), strategy=strategy))
    with gf.Session() as s:
        s.run(steps)


def sum_centred_squares(predictions: gf.Tensor) -> gf.Tensor:
    return gf.sum(gf.square(predictions - gf.mean(predictions)))


def squares(x: gf.Tensor, w: gf.Tensor) -> gf.Tensor:
    return gf.sum(gf.square(x @ w))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no count": (lambda: BlockProximal(0), "blocks must be an int of at least 1, not 0"),
    "a late step": (
        lambda: BlockProximal(4, delay=4), r"delay=4 has to be less than the 4 turns of a run"
    ),
    "a window between": (
        lambda: BlockProximal(6, window=4), "divides the 6 blocks, or a multiple of them, not 4"
    ),
    "no prox": (
        lambda: BlockProximal(4, penalty=ANY), r"penalty must have a method prox\(weights, step\)"
    ),
    "a filter without zeros": (
        lambda: BlockProximal(4, penalty=gf.linear.L2(1.0), kkt=0.1),
        r"kkt=0\.1 needs a penalty that keeps weights at 0",
    ),
    "a negative margin": (
        lambda: BlockProximal(4, penalty=L1(1.0), kkt=-1), "kkt must be a number from 0, not -1"
    ),
    "no order": (lambda: BlockProximal(4, order="sorted"), 'must be "random" or "cyclic"'),
    "no curvature": (lambda: BlockProximal(4, curvature=0), "curvature must be a positive number"),
    "a Pipeline": (
        lambda: BlockProximal(4) * gf.parallel.Pipeline(2), "goes with a Data or a Shard"
    ),
    "micro-batches": (lambda: BlockProximal(4) * Data(2, accumulate=2), "accumulate=2 splits"),
    "more blocks than columns": (
        lambda: run_step(squares, strategy=BlockProximal(5)),
        r"blocks=5, but 'w' \(made at .*test_block_proximal.py:\d+\) has only 4 columns",
    ),
    "two variables": (two_variables, "this step trains 2: 'w', 'b'; .*centre the features"),
    "a momentum": (
        lambda: run_step(squares, gf.optim.SGD(1.0, momentum=0.9)), "takes the steps of plain desc"
    ),
    "another optimiser": (
        lambda: run_step(squares, gf.optim.Adam(1.0)), "takes the steps of plain descent"
    ),
    "a penalty in the loss": (
        lambda: run_step(lambda x, w: squares(x, w) + gf.sum(gf.square(w))),
        r"must read 'w' .* by one product .*; a penalty goes into penalty=",
    ),
    "predictions that meet": (
        lambda: run_step(lambda x, w: gf.sum(gf.square(x @ w - gf.mean(x @ w)))),
        "by one product",
    ),
    "slopes of others": (
        lambda: run_step(lambda x, w: sum_centred_squares(x @ w)),
        "may depend on other predictions, by '",
    ),
    "two steps": (two_steps, r"'train/step' \(made at .* and .* at once; run one after the other"),
    "a compressed exchange": (
        lambda: BlockProximal(2) * Data(2, compress=gf.parallel.TopK(0.1)), "compress=TopK"
    ),
    "no product": (lambda: run_step(lambda x, w: gf.sum(gf.square(x * w))), "by one product"),
    "cut columns": (
        lambda: run_step(
            squares,
            strategy=BlockProximal(2) * Shard({"model": 2}, {"w": ("model",)}),
        ),
        r"is cut along its columns by 'model'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ShardingError, match=words) as raised:
        make()
    assert "test_block_proximal.py" in str(raised.value)


def test_other_features_than_those_of_the_first_run_are_refused() -> None:
    problem = LassoProblem(30, 20)
    model = Model(problem, BlockProximal(4, penalty=L1(problem.strength)))
    x, y = model.feeds
    with gf.Session() as s:
        s.run(model.train, model.feeds)
        weights = s.get(model.weights)
        with pytest.raises(CheckError, match="the features differ from those of the first run"):
            s.run(model.train, {x: 1.1 * problem.features, y: problem.targets})
        assert s.get(model.weights).tobytes() == weights.tobytes()
        s.run(model.train, model.feeds)
