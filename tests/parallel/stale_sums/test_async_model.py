"""Stale sums: block iterations written by hand in numpy, what travels, and what has no meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ShardingError
from tests.parallel.models import Model, gpt, mlp

AsyncModel, Data, Shard = gf.parallel.AsyncModel, gf.parallel.Data, gf.parallel.Shard
Array = np.ndarray[Any, Any]
COUNTS = (1, 2, 4, 8, 16)
NUMBER: Any = 3
FEATURES: dict[Any, Any] = {"x": (None, "model"), "w": ("model",)}


def correlated_features() -> tuple[Array, Array, list[Array]]:
    """200 examples of 40 features with a common factor, targets, and the features of 4 workers."""
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 40)) + 0.45 * random.normal(size=(200, 1))
    return x, random.normal(size=200), np.array_split(np.arange(40), 4)


class LeastSquares:
    """Least squares with a bias, its features split over workers."""

    def __init__(self, workers: int, refresh: int, rate: float, product: Any = None) -> None:
        self.features, self.targets, _ = correlated_features()
        x = gf.placeholder("float64", (None, 40), name="x")
        y = gf.placeholder("float64", (None,), name="y")
        self.weights = gf.variable(np.zeros(40), name="w")
        self.bias = gf.variable(np.zeros(()), name="b")
        self.prediction = x @ self.weights + self.bias
        self.loss = 0.5 * gf.mean(gf.square(self.prediction - y))
        shard = Shard({"model": workers}, FEATURES)
        self.strategy: Any = AsyncModel("model", refresh=refresh) * (product or shard)
        self.train = gf.optim.SGD(rate).minimize(self.loss, strategy=self.strategy)
        self.feeds = {x: self.features, y: self.targets}

    def run(self, windows: int, cluster: gf.Cluster | None = None) -> tuple[Array, Array, float]:
        """Losses of some windows, the weights and the bias after them."""
        with gf.Session(cluster) as s:
            losses = [s.run([self.loss, self.train], self.feeds)[0] for _ in range(windows)]
            return np.array(losses), s.get(self.weights), float(s.get(self.bias))


def iterate(
    x: Array, y: Array, blocks: list[Array], refresh: int, rate: float, windows: int
) -> tuple[Array, Array, float]:
    """The same by hand: each worker has the others' sums of the window's begin; the first has the
    bias."""
    w, bias, losses = np.zeros(x.shape[1]), 0.0, []
    for _ in range(windows):
        parts = [x[:, block] @ w[block] for block in blocks]
        total = np.sum(parts, axis=0)
        losses.append(0.5 * np.mean((total + bias - y) ** 2))
        after, next_bias = w.copy(), bias
        for k, block in enumerate(blocks):
            own, shift = w[block], bias
            for _ in range(refresh):
                error = (total - parts[k] + x[:, block] @ own + shift - y) / len(y)
                own = own - rate * x[:, block].T @ error
                shift = shift - rate * error.sum() if k == 0 else bias
            after[block] = own
            next_bias += shift - bias if k == 0 else 0.0
        w, bias = after, next_bias
    return np.array(losses), w, bias


@pytest.mark.parametrize("refresh", COUNTS)
def test_a_window_is_the_block_iteration_by_hand(refresh: int) -> None:
    x, y, blocks = correlated_features()
    wanted = iterate(x, y, blocks, refresh, 0.02, 4)
    found = LeastSquares(4, refresh, 0.02).run(4)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


def window_matrix(gram: Array, blocks: list[Array], refresh: int, rate: float) -> Array:
    """The matrix that a window applies to the distance of the weights from the optimum."""
    own = np.zeros_like(gram)
    for block in blocks:
        own[np.ix_(block, block)] = gram[np.ix_(block, block)]
    turn = np.eye(len(gram)) - rate * own
    power, total = np.eye(len(gram)), np.zeros_like(gram)
    for _ in range(refresh):
        power, total = power @ turn, total + power
    moved: Array = power - rate * total @ (gram - own)
    return moved


def growth(refresh: int, scaled_rate: float) -> float:
    """The factor by which a window's error grows, for a rate times the largest curvature."""
    x, _, blocks = correlated_features()
    gram = x.T @ x / len(x)
    rate = scaled_rate / np.linalg.eigvalsh(gram)[-1]
    return float(abs(np.linalg.eigvals(window_matrix(gram, blocks, refresh, rate))).max())


@pytest.mark.parametrize(
    ("refresh", "limit", "best", "turns", "exchanges"),
    [
        (1, 2.0, 1.93, 189, 189), (2, 1.277, 1.2, 325, 163), (4, 0.728, 0.675, 605, 151),
        (8, 0.39, 0.357, 1177, 147), (16, 0.202, 0.185, 2309, 144),
    ],
)  # fmt: skip
def test_the_rates_that_the_documentation_gives(
    refresh: int, limit: float, best: float, turns: int, exchanges: int
) -> None:
    assert growth(refresh, limit * 0.99) < 1 < growth(refresh, limit * 1.01)
    fastest = growth(refresh, best)
    assert fastest < min(growth(refresh, best * 0.95), growth(refresh, best * 1.05))
    windows = np.log(1e-6) / np.log(fastest)
    assert windows == pytest.approx(exchanges, rel=0.02)
    assert windows * refresh == pytest.approx(turns, rel=0.02)


@pytest.mark.parametrize("refresh", [4, 16])
def test_training_is_stable_up_to_the_limit(refresh: int) -> None:
    """The limit is that of the features; a bias would be one more."""
    x, _, _ = correlated_features()
    largest = np.linalg.eigvalsh(x.T @ x / len(x))[-1]
    limit = {4: 0.728, 16: 0.202}[refresh]
    below, above = (LeastSquares(4, refresh, factor * limit / largest) for factor in (0.9, 1.1))
    assert np.all(np.diff(below.run(40)[0][20:]) <= 0)
    assert above.run(40)[0][-1] > above.run(1)[0][-1]


def test_one_turn_is_the_shard_itself() -> None:
    shard = Shard({"model": 2}, {"w1": (None, "model")})
    stale = mlp(AsyncModel("model", refresh=1) * shard).train()
    exact = mlp(shard).train()
    assert stale[0] == exact[0]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(stale[1], exact[1], strict=True))


@pytest.mark.parametrize("turn", [1, 3])
def test_a_network_between_two_cuts_trains_as_its_workers_would_by_hand(turn: int) -> None:
    """Two layers with a cut hidden axis, plain descent, one window."""
    strategy = AsyncModel("model", refresh=turn) * Shard({"model": 2}, {"w1": (None, "model")})
    model = mlp(strategy, optimizer=gf.optim.SGD(0.1))
    random = np.random.default_rng(0)
    w1, b1, w2 = random.normal(size=(6, 8)), np.zeros(8), random.normal(size=(8, 3))
    feeds = model.feeds(np.random.default_rng(1), 7)
    x, t = feeds.values()
    halves = [slice(0, 4), slice(4, 8)]
    parts = [np.maximum(x @ w1[:, k] + b1[k], 0) @ w2[k] for k in halves]
    wanted = []
    for k, others in zip(halves, reversed(parts), strict=True):
        a, b, c = w1[:, k], b1[k], w2[k]
        for _ in range(turn):
            hidden = np.maximum(x @ a + b, 0)
            error = 2 * (hidden @ c + others - t) / t.size
            back = (error @ c.T) * (hidden > 0)
            a, b, c = a - 0.1 * x.T @ back, b - 0.1 * back.sum(0), c - 0.1 * hidden.T @ error
        wanted.append((a, b, c))
    _, found = model.train(steps=1)
    together = [
        np.concatenate(p, axis)
        for p, axis in zip(zip(*wanted, strict=True), (1, 0, 0), strict=True)
    ]
    for mine, theirs in zip(found, together, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


def test_replicas_of_workers_with_stale_sums_train_as_the_workers_alone() -> None:
    alone = LeastSquares(2, 3, 0.02).run(3)
    shard = Shard({"model": 2}, FEATURES)
    for product in (Data(2) * shard, Data(2, shard_state=True) * shard):
        found = LeastSquares(2, 3, 0.02, product).run(3)
        for mine, theirs in zip(found, alone, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


def test_values_that_all_workers_compute_alike_advance_at_all_of_them() -> None:
    """Adam's count of steps is the same everywhere, so the second worker corrects by it, too."""
    refresh, rate = 3, 0.05
    model = LeastSquares(2, refresh, rate)
    train = gf.optim.Adam(rate).minimize(model.loss, strategy=model.strategy)
    with gf.Session() as s:
        s.run(train, model.feeds)
        found, bias = s.get(model.weights), s.get(model.bias)
    x, y = model.features, model.targets
    wanted = []
    for k, block in enumerate(np.array_split(np.arange(40), 2)):
        w, first, second = np.zeros(21), np.zeros(21), np.zeros(21)  # the last one is the bias
        own = np.concatenate([x[:, block], np.full((200, 1), k == 0)], axis=1)
        for turn in range(1, refresh + 1):
            gradient = own.T @ (own @ w - y) / 200
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            scale = np.sqrt(second / (1 - 0.999**turn)) + 1e-8
            w = w - rate * first / (1 - 0.9**turn) / scale
        wanted.append(w)
    np.testing.assert_allclose(found, np.concatenate([w[:20] for w in wanted]), atol=1e-12)
    np.testing.assert_allclose(bias, wanted[0][20], atol=1e-12)


# Around a window ----------------------------------------------------------------------------------


def test_fetches_are_of_the_first_turn_and_assignments_of_the_last() -> None:
    model = LeastSquares(2, 3, 0.02)
    count = gf.variable(np.int64(0), name="count")
    counted = gf.assign(count, count + 1)
    with gf.Session() as s:
        w = s.get(model.weights)
        prediction, now, after, _ = s.run(
            [model.prediction, count, counted, model.train], model.feeds
        )
        np.testing.assert_allclose(prediction, model.features @ w, atol=1e-12)
        assert (now, after, s.get(count)) == (0, 3, 3)
        exact = s.run(model.loss, model.feeds)  # without training: no window
        assert exact == s.run([model.loss, model.train], model.feeds)[0]


def test_a_session_that_predicted_first_trains_alike() -> None:
    model, other = LeastSquares(2, 3, 0.02), LeastSquares(2, 3, 0.02)
    with gf.Session() as s:
        s.run(model.loss, model.feeds)
        losses = [s.run([model.loss, model.train], model.feeds)[0] for _ in range(3)]
        found = np.array(losses), s.get(model.weights), s.get(model.bias)
    for mine, theirs in zip(found, other.run(3), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-15)


def test_a_checkpoint_goes_on_with_another_refresh(tmp_path: Any) -> None:
    whole = LeastSquares(2, 3, 0.02)
    with gf.Session() as s:
        for _ in range(2):
            s.run(whole.train, whole.feeds)
        s.save(tmp_path)
        wanted = [s.run([whole.loss, whole.train], whole.feeds)[0] for _ in range(2)]
    for refresh, workers in ((3, 2), (1, 4)):
        model = LeastSquares(workers, refresh, 0.02)
        with gf.Session() as s:
            s.run(model.loss, model.feeds)
            s.load(tmp_path)
            losses = [s.run([model.loss, model.train], model.feeds)[0] for _ in range(2)]
        np.testing.assert_allclose(losses[0], wanted[0], rtol=1e-13)
        if refresh == 3:
            assert losses == wanted


def test_two_workers_have_the_bits_of_one_device() -> None:
    cluster = gf.Cluster.local(2, threads=1)
    here, there = LeastSquares(2, 4, 0.02).run(3), LeastSquares(2, 4, 0.02).run(3, cluster)
    for mine, theirs in zip(there, here, strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def test_a_plan_shows_the_turns() -> None:
    model = LeastSquares(2, 3, 0.02)
    shapes = {t: a.shape for t, a in model.feeds.items()}
    plan = gf.plan([model.loss, model.train], gf.Cluster.local(2), shapes)
    assert {str(node.device) for node in plan.nodes} >= set(gf.Cluster.local(2).devices)
    turns = {node.name.split("turn")[1][0] for node in plan.nodes if "turn" in node.name}
    assert turns == {"1", "2"} and plan.makespan > 0


@pytest.mark.every(2)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_transformer_trains_with_stale_sums(dropout: float) -> None:
    rules = {"*attention/weight": ("model",), "*linear1/weight": ("model",)}
    stale = gpt(AsyncModel("model", 3) * Shard({"model": 2}, rules), dropout=dropout)
    losses, _ = stale.train(steps=6)
    exact, _ = gpt(dropout=dropout).train(steps=1)
    assert losses[0] == pytest.approx(exact[0], abs=1e-12)
    assert losses[-1] < losses[0]


# Reports ------------------------------------------------------------------------------------------


def test_a_window_of_any_length_exchanges_what_one_step_does() -> None:
    cluster = gf.Cluster.hypothetical(
        4, flops=1e11, bandwidth=1e10, memory=1 << 30, link_latency=1e-3, link_bandwidth=1e7
    )
    sums = 200 * 8 * 2 * 3  # an all-reduce of a number an example over 4 workers
    for refresh in COUNTS:
        model = LeastSquares(4, refresh, 0.02, Shard({"model": 4}, FEATURES))
        model.train = gf.optim.SGD(0.1).minimize(model.loss, strategy=model.strategy)
        x, _ = model.feeds
        report = model.strategy.report(model.train, cluster)
        size = report.division.partitioner.guess(x.shape[0])
        assert report.count("all-reduce") == 1
        assert report.collectives[0].bytes == sums * size // 200


def test_a_report_tells_on_which_links_it_pays() -> None:
    cluster = gf.Cluster.hypothetical(
        2, flops=1e11, bandwidth=1e10, memory=1 << 30, link_latency=1e-2, link_bandwidth=1e7
    )
    model = LeastSquares(2, 4, 0.02)
    report = model.strategy.report([model.loss, model.train], cluster)
    slow = report.turn_times[0]
    assert slow.gain == pytest.approx(4, rel=0.1)  # the exchange is nearly all of a step
    assert "is not known" in str(report) and "times as many turns" in str(report)
    paid, unpaid = (
        str(model.strategy.report(model.train, cluster, more_turns=turns)).splitlines()
        for turns in (1.5, 8)
    )
    assert sum(line.endswith(": it pays") for line in paid) >= 3
    assert not any(line.endswith(": it pays") for line in unpaid)


# Refusals -----------------------------------------------------------------------------------------


def columns(loss_of: Callable[[gf.Tensor], gf.Tensor]) -> Model:
    """A product whose result is cut, and a loss of it."""
    x = gf.placeholder("float64", (None, 6), name="x")
    w = gf.variable(np.ones((6, 8)), name="w")
    strategy = AsyncModel("model", 2) * Shard({"model": 2}, {"w": (None, "model")})
    loss = loss_of(x @ w)
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    return Model([loss, train], [w], lambda random, batch: {x: random.normal(size=(batch, 6))})


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no Shard": (lambda: mlp(AsyncModel("model", refresh=2)).train(), "does not say what is cut"),
    "a Data only": (
        lambda: mlp(AsyncModel("model", refresh=2) * Data(2)).train(),
        "does not say what is cut",
    ),
    "no such axis": (
        lambda: AsyncModel("models") * Shard({"model": 2}, {"w1": (None, "model")}),
        r"must be one of the mesh \(model\), not 'models'",
    ),
    "no count": (lambda: AsyncModel("model", refresh=0), "refresh must be an int"),
    "no name": (lambda: AsyncModel(NUMBER), "axis must be the name"),
    "a Pipeline": (lambda: AsyncModel("m") * gf.parallel.Pipeline(2), "goes with a Shard"),
    "the axis of the batch": (
        lambda: AsyncModel("data", 2) * (Data(2) * Shard({"model": 2}, {"w1": (None, "model")})),
        "cuts the batch",
    ),
    "micro-batches": (
        lambda: AsyncModel("model", 2) * Shard({"model": 2}, {"w1": (None, "model")}, accumulate=2),
        "repeats one batch",
    ),
    "a batch that a rule cuts": (
        lambda: mlp(AsyncModel("rows", 2) * Shard({"rows": 2}, {"x": ("rows",)})).train(),
        "no trained variable is cut along 'rows'",
    ),
    "nothing to refresh": (
        lambda: columns(gf.mean).train(),
        r"no update reads a sum",
    ),
    "a maximum in each turn": (
        lambda: columns(lambda scores: gf.mean(gf.logsumexp(scores, axis=-1))).train(),
        r"'logsumexp' .* is a max over 'model'",
    ),
    "a sort in each turn": (
        lambda: columns(lambda scores: gf.mean(gf.sort(scores, axis=-1)[:, 0])).train(),
        r"takes an all-gather of 'matmul' over 'model' in each turn",
    ),
    "a print in each turn": (
        lambda: columns(
            lambda scores: gf.mean(gf.square(gf.debug.print(scores, "scores")))
        ).train(),
        r"runs at the first place only",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ShardingError, match=words):
        make()
