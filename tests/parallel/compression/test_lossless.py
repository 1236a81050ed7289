"""Lossless: replicas have the bits of an exchange without a filter, and fewer bytes travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError
from graphflow.ops.communication.byte_planes import pack_planes, unpack_planes
from tests.parallel.compression.test_data_compress import Regression

Data, Lossless = gf.parallel.Data, gf.parallel.Lossless
SPECIAL = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-42, -1.0, 3.4e38]


def numbers(seed: int, dtype: str) -> Any:
    """Return numbers of a random scale, shape and share of zeros, some of them special."""
    random = np.random.default_rng(seed)
    shape = (int(random.integers(1, 9)), int(random.integers(200, 900)))
    drawn = random.normal(size=shape) * np.exp(random.normal(size=shape) * random.integers(0, 9))
    drawn[random.random(shape) < random.random()] = 0
    drawn.flat[:8] = SPECIAL
    return drawn.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(8))
def test_numbers_come_back_to_the_bit(seed: int, dtype: str) -> None:
    given = numbers(seed, dtype)
    rule, x = Lossless(), gf.placeholder(dtype, given.shape)
    parts, _ = rule.encode(x, ())
    with gf.Session() as s:
        codes, back = s.run([parts[0], rule.decode(parts, x.spec)], {x: given})
    assert back.tobytes() == given.tobytes()
    used = int(np.flatnonzero(codes)[-1]) + 1
    assert used < 0.97 * given.nbytes


def test_planes_that_do_not_shrink_are_stored() -> None:
    random = np.random.default_rng(0)
    planes = [random.integers(0, 256, 5000).astype("uint8"), np.zeros(5000, "uint8")]
    codes, number = pack_planes.kernel(np, *planes)
    assert 5008 < number < 5100
    codes[int(number) :] = 7  # what does not travel
    for have, want in zip(unpack_planes.kernel(np, codes, planes=2), planes, strict=True):
        np.testing.assert_array_equal(have, want)


def test_damaged_codes_are_refused() -> None:
    codes, number = pack_planes.kernel(np, np.repeat(np.arange(9), 50).astype("uint8"))
    codes[9 : int(number)] = 255
    with pytest.raises(ArgumentError, match="450 bytes"):
        unpack_planes.kernel(np, codes, planes=1)


@pytest.mark.parametrize("strategy", [Data, gf.parallel.LocalSGD, gf.parallel.Gossip])
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_train_as_without_it(
    strategy: Any, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphflow.parallel.compression.filters.lossless.LEAST", 1)
    how = {"period": 2} if strategy is gf.parallel.LocalSGD else {}
    how |= {"topology": "ring"} if strategy is gf.parallel.Gossip else {}
    rule = Lossless(0.5)  # so that it pays for these few numbers
    results = []
    filtered: dict[str, Any] = {"compress": rule}
    filtered |= {"consensus": 1.0} if strategy is gf.parallel.Gossip else {}
    for compress in ({}, filtered):
        step = Regression(strategy(replicas, **how, **compress))
        with gf.Session() as s:
            found = [s.run([step.loss, step.train], step.feeds(i))[0] for i in range(4)]
            results.append([*found, s.get(step.w), s.get(step.v)])
    for have, want in zip(*results, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)


@pytest.mark.every(2)
@pytest.mark.parametrize("replicas", [2, 3])
def test_fewer_bytes_travel_and_the_bits_stay(replicas: int) -> None:
    random = np.random.default_rng(0)
    w = gf.variable(random.normal(size=(64, 96)).astype("float32"), name="w")
    x = gf.placeholder("float32", (12, 64), name="x")
    loss = gf.mean(gf.square(x @ w))
    fed = {x: random.normal(size=(12, 64)).astype("float32")}
    results, moved = [], []
    for compress in (None, Lossless()):
        strategy = Data(replicas, compress=compress)
        train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
        cluster = gf.Cluster.local(replicas, threads=1)
        with gf.Session(cluster) as s:
            s.run(train, fed)
            with s.trace() as trace:
                s.run(train, fed)
            results.append(s.get(w))
            moved.append([e.bytes for e in trace.edges if "used_rows" in e.tensor])
    assert results[0].tobytes() == results[1].tobytes()
    plain = 2 * (replicas - 1) * w.size * 4
    assert 0.7 * plain < sum(moved[1]) < 0.9 * plain
    told = strategy.report(train, cluster)
    assert told.filtered is not None
    assert sum(moved[1]) < 1.05 * told.filtered[0] < 0.95 * told.filtered[1]


def test_few_numbers_travel_as_they_are() -> None:
    with pytest.raises(gf.errors.ShardingError, match=r"saves nothing|applies to"):
        Regression(Data(2, compress=Lossless()))


@pytest.mark.parametrize("share", [0, 1.5, "all"])
def test_a_wrong_share_is_refused_at_the_users_line(share: Any) -> None:
    with pytest.raises(ArgumentError, match=r"test_lossless.py.*share must be above 0"):
        Lossless(share)
