"""Checks of a problem when it is created; every error names the place and the numbers.

Whole arrays are checked at once. Only if a check fails, the wrong element is searched for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphflow.errors import ProblemError
from graphflow.placement.problems.arrays import Ints, ProblemArrays, error_at, reject


def check(problem: ProblemArrays, own_tensors: bool) -> None:
    """Check all but cycles.

    Args:
        own_tensors: Edges may carry one tensor.

    Raises:
        ProblemError: See `Problem`.
    """
    check_values(problem)
    _indices(problem)
    if own_tensors:
        _tensors(problem)
    _routes(problem)
    _devices(problem)


def check_values(problem: ProblemArrays) -> None:
    """Check that no value is NaN, negative, or infinite where that is meaningless."""
    apart = ~np.eye(problem.devices, dtype=bool)
    for name in ("compute", "bytes", "memory", "capacity", "output_memory"):
        array = getattr(problem, name)
        if array is None or not array.size:
            continue
        if not array.min() >= 0.0:
            reject(name, array, np.isnan(array), "is NaN")
            reject(name, array, array < 0, "is negative")
        if name not in ("compute", "capacity") and array.max() == np.inf:
            reject(name, array, np.isinf(array), "is infinite")
    for name in ("latency", "bandwidth"):
        array = getattr(problem, name)
        reject(name, array, np.isnan(array) & apart, "is NaN")
        reject(name, array, (array < 0) & apart, "is negative")
    what = "is zero: these devices are not connected; leave out one of them, or give them a link"
    reject("bandwidth", problem.bandwidth, (problem.bandwidth == 0) & apart, what)
    what = (
        "is infinite: these devices are not connected; leave out one of them, or give them a link"
    )
    reject("latency", problem.latency, np.isinf(problem.latency) & apart, what)


def _indices(problem: ProblemArrays) -> None:
    """Check that indices are in range."""
    n, edges = problem.nodes, problem.edges
    if len(edges) and not (edges.min() >= 0 and edges.max() < n):
        reject("edges", edges, (edges < 0) | (edges >= n), f"is not a node (there are {n})")
    loops = np.flatnonzero(edges[:, 0] == edges[:, 1])
    if len(loops):
        raise error_at(
            f"edge {loops[0]} leads from node {edges[loops[0], 0]} to itself",
            [int(edges[loops[0], 0])],
        )
    what = f"is neither a node (of {n}) nor -1"
    reject("prefer", problem.prefer, (problem.prefer < -1) | (problem.prefer >= n), what)
    reject("groups", problem.groups, problem.groups < -1, "is below -1")
    client = problem.client
    if client is not None and (
        isinstance(client, bool) or not isinstance(client, int | np.integer)
    ):
        raise ProblemError(f"client must be the index of a device, not {client!r}")
    if client is not None and not 0 <= client < problem.devices:
        raise ProblemError(f"client is {problem.client}; there are {problem.devices} devices")


def _tensors(problem: ProblemArrays) -> None:
    """Check that edges of one tensor come from one node and have one size."""
    tensor, source, size = problem.tensor, problem.edges[:, 0], problem.bytes
    order = np.argsort(tensor, kind="stable")
    one, next_ = order[:-1], order[1:]
    same = tensor[one] == tensor[next_]
    wrong = same & ((source[one] != source[next_]) | (size[one] != size[next_]))
    if not wrong.any():
        return
    first = dict(zip(tensor[order[::-1]].tolist(), order[::-1].tolist(), strict=True))
    edge = int(next_[wrong].min())
    other = first[int(tensor[edge])]
    for edge in np.sort(next_[wrong]).tolist():
        other = first[int(tensor[edge])]
        if source[other] != source[edge]:
            raise ProblemError(
                f"edges {other} and {edge} carry tensor {tensor[edge]} but come from nodes "
                f"{source[other]} and {source[edge]}"
            )
    raise ProblemError(
        f"edges {other} and {edge} carry tensor {tensor[edge]} with {size[other]:g} and "
        f"{size[edge]:g} bytes"
    )


def _routes(problem: ProblemArrays) -> None:
    """Check the routes over shared links."""
    reject("shared", problem.shared, ~(problem.shared > 0), "is not above 0 bytes/s")
    for column, count, what in (
        (0, problem.devices, "device"),
        (1, problem.devices, "device"),
        (2, len(problem.shared), "shared link"),
    ):
        values = problem.routes[:, column]
        bad = np.zeros(problem.routes.shape, dtype=bool)
        bad[:, column] = (values < 0) | (values >= count)
        reject("routes", problem.routes, bad, f"is not a {what} (there are {count})")


def _devices(problem: ProblemArrays) -> None:
    """Check that every node, and every group, has a device."""
    compute = problem.compute
    homeless = np.flatnonzero(compute.min(axis=1) == np.inf) if len(compute) else np.zeros(0)
    if len(homeless):
        more = f" (and {len(homeless) - 1} more nodes)" if len(homeless) > 1 else ""
        raise error_at(
            f"node {homeless[0]} has no device: compute[{homeless[0]}] is inf everywhere{more}",
            homeless,
        )
    if not (problem.groups >= 0).any():
        return
    homeless = np.flatnonzero(~problem.allowed.any(axis=1))
    if len(homeless):
        group = int(problem.groups[homeless[0]])
        members = np.flatnonzero(problem.groups == group)
        usable = np.isfinite(compute)
        chain = find_conflict(usable, members)
        allow = "; ".join(f"node {v}: {np.flatnonzero(usable[v]).tolist()}" for v in chain)
        raise error_at(
            f"group {group} has no device that all its {len(members)} nodes can use ({allow}); "
            "loosen a pin or split the group",
            chain,
        )


def find_conflict(usable: NDArray[np.bool_], members: Ints) -> list[int]:
    """Return nodes of a group that leave no device: each rules out what others allow."""
    left: Any = np.ones(usable.shape[1], dtype=bool)
    chain: list[int] = []
    for v in members.tolist():
        if (left & ~usable[v]).any():
            chain.append(v)
            left &= usable[v]
    for v in list(chain):  # drop those without which it is still impossible
        rest = [u for u in chain if u != v]
        if rest and not usable[rest].all(axis=0).any():
            chain = rest
    return chain
