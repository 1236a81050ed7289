"""Rounds of CoCoA by other frameworks: as Ray tasks, and by a pool of processes.

Each does what ours does: H local steps of the same kernel on each worker's rows, and a sum of the
changes. The rows stay at the workers. As tasks keep no state, dual variables are an argument and a
result: in Ray they stay in its object store, a pool pickles them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Arrays = tuple[Any, ...]


class Contender(Protocol):
    """Runs rounds."""

    def round(self, steps: int) -> None:
        """Run a round of so many steps on each worker."""

    def dual_variables(self) -> list[Any]:
        """Return those of each worker's rows."""

    def reset(self) -> None:
        """Forget what was learnt."""

    def close(self) -> None:
        """End the workers."""


def local_steps(rows: Arrays, attrs: dict[str, Any], state: Arrays, steps: int) -> Arrays:
    """Return dual variables and the change of the weights after some steps.

    Args:
        rows: targets, weights, squares, and the three arrays of a CSR matrix.
        attrs: of `coordinate_pass`.
        state: dual variables, weights, the steps before, the number of the worker.
    """
    from graphflow.ir.op import REGISTRY

    own, shared, position, number = state
    order, _ = REGISTRY["coordinate_order"].run(
        np, [np.asarray(position), np.zeros((steps, 0))], {"count": len(own), "seed": number}
    )
    own, after = REGISTRY["coordinate_pass"].run(np, [own, shared, order, *rows], attrs)
    return own, (after - shared) / attrs["sigma"]


class PoolRounds:
    """A pool of processes with a pipe each; arguments and results are pickled."""

    def __init__(self, parts: Sequence[Arrays], attrs: dict[str, Any], width: int) -> None:
        self._sizes, self._width = [len(part[0]) for part in parts], width
        self.reset()
        context = multiprocessing.get_context("spawn")
        self._pools = [
            context.Pool(1, _keep_rows, (part, attrs)) for part in parts
        ]  # one process each, so that rows stay where they are

    def reset(self) -> None:
        """Forget what was learnt."""
        self._own = [np.zeros(size) for size in self._sizes]
        self._shared, self._position = np.zeros(self._width), 0

    def round(self, steps: int) -> None:
        """Run a round."""
        waiting = [
            pool.apply_async(_pool_steps, ((own, self._shared, self._position, k), steps))
            for k, (pool, own) in enumerate(zip(self._pools, self._own, strict=True))
        ]
        found = [each.get() for each in waiting]
        self._own = [own for own, _ in found]
        self._shared = self._shared + sum(change for _, change in found)
        self._position += steps

    def dual_variables(self) -> list[Any]:
        """Return those of each worker's rows."""
        return self._own

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools:
            pool.terminate()


_KEPT: list[Any] = []


def _keep_rows(rows: Arrays, attrs: dict[str, Any]) -> None:
    _KEPT[:] = [rows, attrs]


def _pool_steps(state: Arrays, steps: int) -> Arrays:
    return local_steps(_KEPT[0], _KEPT[1], state, steps)


class RayRounds:
    """Ray tasks: rows and dual variables are objects of its store."""

    def __init__(self, parts: Sequence[Arrays], attrs: dict[str, Any], width: int) -> None:
        import ray

        self._ray = ray
        ray.init(num_cpus=len(parts), include_dashboard=False, logging_level="error")
        self._task = ray.remote(num_returns=2)(_ray_steps)
        self._rows = [ray.put(part) for part in parts]
        self._sizes, self._width, self._attrs = [len(p[0]) for p in parts], width, attrs
        self.reset()

    def reset(self) -> None:
        """Forget what was learnt."""
        self._own = [self._ray.put(np.zeros(size)) for size in self._sizes]
        self._shared, self._position = np.zeros(self._width), 0

    def round(self, steps: int) -> None:
        """Run a round."""
        shared = self._ray.put(self._shared)
        found = [
            self._task.remote(rows, self._attrs, own, shared, self._position, k, steps)
            for k, (rows, own) in enumerate(zip(self._rows, self._own, strict=True))
        ]
        self._own = [own for own, _ in found]
        self._shared = self._shared + sum(self._ray.get([change for _, change in found]))
        self._position += steps

    def dual_variables(self) -> list[Any]:
        """Return those of each worker's rows."""
        return list(self._ray.get(self._own))

    def close(self) -> None:
        """End Ray."""
        self._ray.shutdown()


def _ray_steps(
    rows: Arrays, attrs: dict[str, Any], own: Any, shared: Any, position: int, number: int,
    steps: int,
) -> Arrays:  # fmt: skip
    return local_steps(rows, attrs, (own, shared, position, number), steps)


def seconds_to_gap(
    contender: Contender, gap_of: Callable[[list[Any]], float], steps: int, check: int, limit: float
) -> float:
    """Return the seconds of rounds until a gap is small enough; infinite beyond a limit.

    Args:
        gap_of: dual variables -> the gap over the wanted one.
        steps: of a round.
        check: rounds between two looks at the gap, which is not timed.
        limit: seconds.
    """
    spent, before = 0.0, (0.0, np.inf)
    while spent < limit:
        start = time.perf_counter()
        for _ in range(check):
            contender.round(steps)
        spent += time.perf_counter() - start
        gap = gap_of(contender.dual_variables())
        if gap <= 1.0:
            if not np.isfinite(before[1]):
                return spent
            share = np.log(before[1]) / np.log(before[1] / gap)
            return float(before[0] + share * (spent - before[0]))
        before = spent, gap
    return float("inf")
