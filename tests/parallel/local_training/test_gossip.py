"""Gossip: mixing matrices, and replicas that mix with their neighbours, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ShardingError
from graphflow.parallel import Data, Gossip
from graphflow.parallel.local_training.mixing_matrices import mixing_matrix, peer_matrices
from tests.parallel.local_training.test_local_sgd import copies_of, largest_difference
from tests.parallel.models import mlp

Array = np.ndarray[Any, Any]
TOPOLOGIES = ("ring", "torus", "hypercube", "exponential")


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("replicas", [1, 2, 4, 8, 16])
def test_matrices_are_doubly_stochastic(topology: str, replicas: int) -> None:
    for w in (mixing_matrix(topology, replicas, ""), *peer_matrices(topology, replicas, "")):
        assert w.shape == (replicas, replicas) and w.min() >= 0
        assert np.abs(w.sum(0) - 1).max() < 1e-12 and np.abs(w.sum(1) - 1).max() < 1e-12


@pytest.mark.parametrize(
    ("topology", "second"),
    [("ring", 0.9493), ("torus", 0.6), ("hypercube", 0.6), ("exponential", 0.6)],
)
def test_second_singular_values_of_sixteen_replicas(topology: str, second: float) -> None:
    values = np.linalg.svd(mixing_matrix(topology, 16, ""), compute_uv=False)
    assert values[0] == pytest.approx(1)
    assert values[1] == pytest.approx(second, abs=5e-5)


@pytest.mark.parametrize("topology", ["hypercube", "exponential"])
def test_four_rounds_of_one_peer_are_the_exact_mean_of_sixteen(topology: str) -> None:
    product = np.linalg.multi_dot(peer_matrices(topology, 16, ""))
    assert np.array_equal(product, np.full((16, 16), 1 / 16))


class Pushes:
    """A vector that each replica moves by what it is fed, at rate 1."""

    def __init__(self, strategy: Any, replicas: int) -> None:
        self.replicas = replicas
        self.x = gf.placeholder("float64", ("B", 3), name="x")
        self.w = gf.variable(np.zeros(3), name="w")
        loss = gf.mean(gf.sum(self.x * self.w, 1))
        self.train = gf.optim.SGD(1.0).minimize(loss, strategy=strategy)

    def copies(self, feeds: list[Array], window: int = 1) -> Array:
        """The vector of each replica after some turns."""
        with gf.Session() as s:
            for i in range(0, len(feeds), window):
                s.run(self.train, {self.x: np.concatenate(feeds[i : i + window])})
            return np.array(copies_of(s, self.w))


@pytest.mark.parametrize("one_peer", [False, True])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_turn_mixes_what_was_there_and_takes_a_step(topology: str, one_peer: bool) -> None:
    random = np.random.default_rng(0)
    feeds = [random.normal(size=(8, 3)) for _ in range(6)]
    strategy = Gossip(8, topology, one_peer)
    rounds = strategy.matrices
    wanted = np.zeros((8, 3))
    for turn, feed in enumerate(feeds):
        wanted = rounds[turn % len(rounds)] @ wanted - feed
    for window in (1, 3):
        found = Pushes(Gossip(8, topology, one_peer, window=window), 8).copies(feeds, window)
        assert np.abs(found - wanted).max() < 1e-13


def test_one_peer_reaches_the_mean_where_nothing_pushes() -> None:
    random = np.random.default_rng(1)
    first = random.normal(size=(16, 3))
    found = Pushes(Gossip(16, "exponential", one_peer=True), 16).copies(
        [first, *[np.zeros((16, 3))] * 4]
    )
    assert np.abs(found + first.mean(0)).max() < 1e-15


def test_parameters_that_are_mixed_agree_and_mixed_gradients_do_not() -> None:
    """After replicas were pushed apart, mixing their parameters brings them together at the rate of
    the second singular value. Mixing their gradients leaves them apart for ever."""
    random = np.random.default_rng(2)
    first, turns = random.normal(size=(8, 3)), 40
    found = Pushes(Gossip(8, "ring"), 8).copies([first, *[np.zeros((8, 3))] * turns])
    w = mixing_matrix("ring", 8, "")
    second = np.linalg.svd(w, compute_uv=False)[1]

    def spread(x: Array) -> float:
        return float(np.linalg.norm(x - x.mean(0)))

    apart = -first
    assert spread(found) <= spread(apart) * second**turns * 1.0001
    for _ in range(turns):
        apart = apart - w @ np.zeros((8, 3))  # gradients are zero, and so is what is mixed
    assert spread(apart) == spread(first)


def test_replicas_of_two_devices_are_replicas_of_one() -> None:
    def weights(strategy: Any, cluster: Any = None) -> list[Any]:
        model = mlp(strategy, optimizer=gf.optim.SGD(0.1))
        random = np.random.default_rng(1)
        with gf.Session(cluster) as s:
            for _ in range(4):
                s.run(model.fetches, model.feeds(random, 8))
            return [s.get(v) for v in model.variables]

    flat, product = weights(Gossip(2)), weights(Gossip(2) * Data(2))
    assert largest_difference(flat, product) < 1e-12
    assert largest_difference(flat, weights(Data(2) * Gossip(2), gf.Cluster.local(4))) < 1e-12


def test_each_link_carries_the_parameters_of_a_neighbour_once() -> None:
    model = mlp(strategy := Gossip(4, "ring"))
    report = strategy.report(model.fetches, gf.Cluster.local(4))
    parameters = sum(v.spec.nbytes for v in model.variables)
    assert [move.kind for move in report.collectives] == ["neighbours"]
    assert report.collectives[0].bytes == 4 * 2 * parameters


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("star",), r"topology must be one of 'ring', .*not 'star'"),
        ((np.eye(2),), r"a matrix of 3 × 3 weights"),
        ((np.ones((3, 3)) / 2,), r"row 0 of the topology sums to 1.5"),
        (([[1, 0, 0], [1, 0, 0], [0, 0, 1]],), r"column 0 of the topology sums to 2"),
        (([[1, 0, 0], [0, 2, -1], [0, -1, 2]],), r"weight \(1, 2\) of the topology is -1"),
        (("hypercube",), r"a power of 2 of replicas, not 3"),
        ((np.eye(3), True), r"a matrix has no such order"),
        (("ring", 1), r"one_peer must be True or False"),
    ],
)
def test_what_is_no_topology_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ShardingError, match=rf"Gossip at .*test_gossip.*{message}"):
        Gossip(3, *arguments)


def test_sums_within_a_billionth_are_taken() -> None:
    Gossip(2, np.full((2, 2), 0.5) + 1e-10)
    with pytest.raises(ShardingError, match=r"row 0 of the topology sums to 1.00000002"):
        Gossip(2, np.full((2, 2), 0.5) + 1e-8)
