"""Mixing matrices of gossip: how each replica weighs its neighbours' parameters.

Entry (i, j) is the weight of replica j's parameters at replica i. A matrix is doubly stochastic:
its rows and columns sum to 1, so that the mean over replicas stays. The second largest singular
value tells by how much a turn shrinks the distance to the mean.

Source: Xiao & Boyd, Systems & Control Letters 53, 2004; Assran et al., "Stochastic Gradient Push",
    ICML 2019 (exponential graphs, one peer a turn).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt
from typing import Any

import numpy as np

from graphflow.errors import ShardingError

Matrix = np.ndarray[Any, Any]
MOST_REPLICAS = 4096
"""The most replicas of a topology: matrices have so many rows and columns."""
TOLERANCE = 1e-9
"""The most by which a row or column may miss the sum of 1."""


def mixing_matrix(topology: Any, replicas: int, where: str) -> Matrix:
    """Return the mixing matrix of a topology: equal weights for a replica and its neighbours.

    Args:
        topology: a name of `TOPOLOGIES`, or a matrix.
        replicas: the number of replicas.
        where: the strategy and its line, for errors.

    Raises:
        ShardingError: there is no such topology for this number of replicas, or the matrix has
            another shape or is not doubly stochastic.
    """
    if isinstance(topology, str):
        rounds = peers_of(topology, replicas, where)
        each = [np.eye(replicas), *map(_permutation, rounds)]
        mean: Matrix = np.mean(each, axis=0)
        return mean
    try:
        matrix = np.array(topology, float)
    except (TypeError, ValueError):
        matrix = np.zeros(())
    if matrix.shape != (replicas, replicas):
        names = ", ".join(map(repr, TOPOLOGIES))
        raise ShardingError(
            f"{where}: topology must be one of {names}, or a matrix of {replicas} × {replicas} "
            f"weights, not {topology!r}"
        )
    _check_doubly_stochastic(matrix, where)
    return matrix


def peer_matrices(topology: Any, replicas: int, where: str) -> list[Matrix]:
    """Return the mixing matrices of one peer a turn, in rotation: half of itself, half of one
    neighbour.

    Raises:
        ShardingError: the topology is a matrix, or does not exist for this number of replicas.
    """
    if not isinstance(topology, str):
        raise ShardingError(
            f"{where}: one_peer=True rotates the neighbours of a topology by name, "
            f"{', '.join(map(repr, TOPOLOGIES))}; a matrix has no such order"
        )
    rounds = peers_of(topology, replicas, where)
    return [(np.eye(replicas) + _permutation(peers)) / 2 for peers in rounds] or [np.eye(1)]


def peers_of(topology: str, replicas: int, where: str) -> list[Sequence[int]]:
    """Return for each neighbour in turn the peer of each replica.

    Raises:
        ShardingError: there is no such topology for this number of replicas.
    """
    if replicas > MOST_REPLICAS:
        raise ShardingError(f"{where}: replicas must be at most {MOST_REPLICAS:,}, not {replicas}")
    if topology not in TOPOLOGIES:
        names = ", ".join(map(repr, TOPOLOGIES))
        raise ShardingError(
            f"{where}: topology must be one of {names}, or a matrix, not {topology!r}"
        )
    if topology == "hypercube" and replicas & (replicas - 1):
        raise ShardingError(
            f"{where}: a hypercube takes a power of 2 of replicas, not {replicas}; take 'ring', "
            "'torus' or 'exponential'"
        )
    return TOPOLOGIES[topology](replicas) if replicas > 1 else []


def _ring(n: int) -> list[Sequence[int]]:
    """Return the next and the previous replica of each."""
    return [[(i + step) % n for i in range(n)] for step in ((1, -1) if n > 2 else (1,))]


def _torus(n: int) -> list[Sequence[int]]:
    """Return the neighbours in the rows and columns of the grid that is nearest to a square."""
    rows = next(r for r in range(isqrt(n), 0, -1) if n % r == 0)
    columns = n // rows
    across = [[row * columns + p for row in range(rows) for p in q] for q in _ring_or_none(columns)]
    down = [[p * columns + c for p in q for c in range(columns)] for q in _ring_or_none(rows)]
    return [*across, *down]


def _ring_or_none(n: int) -> list[Sequence[int]]:
    """Return the neighbours in a ring; none if it has one place."""
    return _ring(n) if n > 1 else []


def _hypercube(n: int) -> list[Sequence[int]]:
    """Return the replicas whose numbers differ in one bit."""
    return [[i ^ (1 << bit) for i in range(n)] for bit in range((n - 1).bit_length())]


def _exponential(n: int) -> list[Sequence[int]]:
    """Return the replicas 1, 2, 4, … places further."""
    return [[(i + (1 << k)) % n for i in range(n)] for k in range((n - 1).bit_length())]


TOPOLOGIES: dict[str, Callable[[int], list[Sequence[int]]]] = {
    "ring": _ring, "torus": _torus, "hypercube": _hypercube, "exponential": _exponential,
}  # fmt: skip
"""For each topology a function from the number of replicas to the peers of each, neighbour by
neighbour."""


def _permutation(peers: Sequence[int]) -> Matrix:
    """Return the matrix by which each replica takes over its peer's parameters."""
    return np.eye(len(peers))[[*peers]]


def _check_doubly_stochastic(matrix: Matrix, where: str) -> None:
    """Refuse a matrix whose rows or columns do not sum to 1, or that has a negative weight.

    Raises:
        ShardingError: see above; the message has the row or column and its sum.
    """
    remedy = "rows and columns of a mixing matrix sum to 1, so that the mean over replicas stays"
    for what, axis in (("row", 1), ("column", 0)):
        sums = matrix.sum(axis=axis)
        worst = int(np.argmax(np.nan_to_num(np.abs(sums - 1), nan=np.inf)))
        if not abs(sums[worst] - 1) <= TOLERANCE:
            raise ShardingError(
                f"{where}: {what} {worst} of the topology sums to {float(sums[worst]):.10g}; "
                f"{remedy}"
            )
    if matrix.min() < 0:
        i, j = (int(k) for k in np.unravel_index(matrix.argmin(), matrix.shape))
        raise ShardingError(
            f"{where}: the weight ({i}, {j}) of the topology is {float(matrix[i, j]):g}; weights "
            "must not be negative"
        )


__all__ = ["TOPOLOGIES", "mixing_matrix", "peer_matrices", "peers_of"]
