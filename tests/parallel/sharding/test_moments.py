"""Moments of what is cut: one exchange tells all shards the mean and the variance of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel.resharding.local_ops import combine_all

Data, Shard, Pipeline = gf.parallel.Data, gf.parallel.Shard, gf.parallel.Pipeline


@pytest.mark.parametrize("away", [0.0, 1e3, 1e6])
@pytest.mark.parametrize("sizes", [(1, 4), (5, 2), (3, 3, 1), (2, 7, 1, 4)])
def test_parts_of_any_sizes_have_the_moments_of_the_whole_however_far_from_zero(
    sizes: tuple[int, ...], away: float
) -> None:
    """Sums of squares would lose all digits of the variance where the mean is a million times as
    large as the deviation."""
    x = np.random.default_rng(0).normal(size=(sum(sizes), 3)) + away
    pieces = np.split(x, np.cumsum(sizes)[:-1])
    parts = [
        gf.constant(np.stack([np.full(3, len(p) / len(x)), p.mean(0), p.var(0)])) for p in pieces
    ]
    with gf.Session() as s:
        share, mean, variance = s.run(combine_all("moments", parts))
    np.testing.assert_allclose(share, 1.0, rtol=1e-14)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-14, atol=1e-15)
    # x itself is rounded by away·1e-16: no one knows the deviations from the mean better.
    np.testing.assert_allclose(variance, x.var(0), rtol=1e-13 + away * 1e-15)


def two_norms(strategy: Any) -> tuple[list[Any], Callable[[], dict[Any, Any]], list[Any]]:
    random = np.random.default_rng(0)
    x = gf.placeholder("float64", ("n", 6), name="x")
    layers = [gf.nn.Linear(6, 6, dtype="float64", name=f"linear{i}") for i in range(2)]
    norms = [gf.nn.BatchNorm1d(6, dtype="float64", name=f"norm{i}") for i in range(2)]
    h = x
    with gf.nn.training() as updates:
        for layer, norm in zip(layers, norms, strict=True):
            h = gf.nn.relu(norm(layer(h)))
    loss = gf.mean(gf.square(h - 1.0))
    train = gf.optim.SGD(0.1, momentum=0.9).minimize(loss, strategy=strategy)
    kept = [v for each in (*layers, *norms) for v in each.parameters().values()]
    kept += [v for norm in norms for v in norm.buffers().values()]
    return [loss, train, *updates], lambda: {x: random.normal(size=(11, 6)) * 3 + 50}, kept


def test_a_synchronised_norm_takes_one_exchange_each_way() -> None:
    """Its moments forwards, the sums of its gradient backwards, with those of the layer behind it:
    running moments take none of their own."""
    strategy = Data(2)
    report = strategy.report(two_norms(strategy)[0])
    forward = [m for m in report.collectives if m.cause.startswith("norm")]
    assert [m.cause for m in forward] == ["norm0/batch_norm", "norm1/batch_norm"]
    assert [m.bytes for m in forward] == [2 * 3 * 6 * 8] * 2
    assert report.count("all-reduce") == len(report.collectives) == 5


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "strategy",
    [
        Data(2), Data(3), Data(3, shard_state=True), Data(2, accumulate=2),
        Pipeline(2, microbatches=3), Pipeline(2, microbatches=2) * Data(2),
    ],
    ids=["2", "3", "state", "accumulate", "pipeline", "both"],
)  # fmt: skip
def test_norms_of_a_batch_that_is_far_from_zero_train_as_on_one_device(strategy: Any) -> None:
    found = []
    for each in (strategy, None):
        gf.random.seed(1)
        fetches, feeds, kept = two_norms(each)
        with gf.Session() as s:
            losses = [s.run(fetches, feeds())[0] for _ in range(3)]
            found.append([*losses, *(s.get(v) for v in kept)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: gf.var(x, axis=1), lambda x: gf.std(x, axis=(0, 1), correction=1),
        lambda x: gf.var(x, axis=1, keepdims=True, correction=0.5),
        gf.nn.layer_norm, gf.nn.instance_norm,
    ],
    ids=["var", "std", "half", "layer", "instance"],
)  # fmt: skip
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_variances_along_what_is_cut_are_those_of_the_whole_in_one_exchange(
    function: Callable[[Any], Any], axis: int
) -> None:
    value = np.random.default_rng(0).normal(size=(4, 6, 6)) + 9.0
    rule = tuple("m" if d == axis else None for d in range(3))
    w = gf.variable(value, name="w")
    y = function(w)
    strategy = Shard({"m": 2}, {"w": rule})
    loss = gf.sum(gf.sin(y))
    step = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    report = strategy.report([loss, step], gf.Cluster.local(2))
    moments = [m for m in report.collectives if "gradients" not in m.cause and m.cause != "sum"]
    assert len(moments) <= 1
    with gf.Session() as alone, gf.Session() as together:
        plain = gf.optim.SGD(0.1).minimize(loss)
        for session, train in ((alone, plain), (together, step)):
            session.run(train)
        np.testing.assert_allclose(together.get(w), alone.get(w), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_hold_the_moments_of_more_values_than_they_can_count(dtype: str) -> None:
    """70,000 is no float16, and 257 no bfloat16: shards tell which part of all they have."""
    short = gf.placeholder(dtype, ()).dtype
    value = np.random.default_rng(0).normal(size=(70_000,)).astype(short)
    x = gf.placeholder(dtype, (70_000,), name="x")
    with gf.Session() as s:
        y = gf.var(x)
        strategy = Shard({"m": 3}, {"x": ("m",)})
        w = gf.variable(np.zeros((), short), name="w")
        train = gf.optim.SGD(0.0).minimize(gf.square(w) + y, strategy=strategy)
        found = s.run([y, train], {x: value})[0]
    assert abs(float(found) - float(value.astype("float64").var())) < 2e-2


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "strategy, workers",
    [(Pipeline(2, microbatches=3), 2), (Pipeline(2, microbatches=2) * Data(2), 4)],
    ids=["stages", "replicas of stages"],
)  # fmt: skip
def test_running_moments_are_where_their_stage_is(strategy: Any, workers: int) -> None:
    """A loss does not read them; each lives with the norm that assigns it."""
    found = []
    for cluster in (None, gf.Cluster.local(workers, threads=1)):
        gf.random.seed(1)
        fetches, feeds, kept = two_norms(strategy)
        with gf.Session(cluster) as s:
            losses = [s.run(fetches, feeds())[0] for _ in range(2)]
            found.append([*losses, *(s.get(v) for v in kept)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sizes", [(4, 4), (5, 4)], ids=["even", "uneven"])
def test_replicas_that_are_not_synchronised_keep_the_mean_of_their_own_statistics(
    sizes: tuple[int, ...],
) -> None:
    """Each takes its own moments, and corrects its variance by its own number of values."""

    def one(strategy: Any, x: Any) -> Any:
        norm = gf.nn.BatchNorm1d(3, dtype="float64", name="norm")
        fed = gf.placeholder("float64", ("n", 3), name="x")
        with gf.nn.training() as updates:
            loss = gf.mean(gf.square(norm(fed)))
        train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            s.run([loss, train, *updates], {fed: x})
            return [s.get(v) for v in norm.buffers().values()]

    x = np.random.default_rng(0).normal(size=(sum(sizes), 3)) * 3 + 5
    found = one(Data(2, synchronised=False), x)
    apart = [one(None, share) for share in np.split(x, [sizes[0]])]
    for value, *own in zip(found, *apart, strict=True):
        np.testing.assert_allclose(value, sum(own) / 2, rtol=1e-12)
