"""Simulated windows: turns of workers that run beside each other, with a server between them.

Worker k's turn c is a node, and so is the server's update with its result:

    turn(k, c) → update(k, c) → turn(k, c + 1)          the worker waits for its own update
    update(q, c - s) → turn(k, c + 1)  for all q        bounded staleness s

The list scheduler over ready nodes is the race between the workers, so windows need no simulator of
their own. In a pool, a worker that is free takes the next turn of one queue.
"""

from __future__ import annotations

import heapq

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ProblemError
from graphflow.placement.problems.arrays import Floats
from graphflow.placement.problems.problem import Problem
from graphflow.placement.simulation.simulator import schedule


@dataclass(frozen=True)
class SimulatedWindow:
    """A window as it is predicted.

    Attributes:
        seconds: from its start to the end of its last update.
        start, finish: seconds at which each turn starts and ends, in the shape of the turns.
        order: (turns of all workers,) the worker of each update, in the order of the updates.
    """

    seconds: float
    start: Floats
    finish: Floats
    order: np.ndarray[tuple[int], np.dtype[np.int32]]


def simulate_turns(
    turns: Floats, update: float = 0.0, staleness: int | None = None
) -> SimulatedWindow:
    """Simulate a window in which each worker takes its turns one after the other.

    Args:
        turns: (workers, turns) seconds of each turn, with what its messages take.
        update: seconds of the server for the result of a turn.
        staleness: updates by which a worker may be ahead of the slowest; None: any number.

    Raises:
        ProblemError: turns are no matrix of non-negative finite numbers, or another argument is
            negative.
    """
    turns = _check_seconds("turns", turns, 2)
    if update < 0 or (staleness is not None and staleness < 0):
        raise ProblemError(
            f"update and staleness are not negative, got {update!r} and {staleness!r}"
        )
    workers, count = turns.shape
    numbers = np.arange(workers * count).reshape(workers, count)  # of turns; updates follow
    edges = [np.stack([numbers, numbers + turns.size], -1).reshape(-1, 2)]
    edges.append(np.stack([numbers[:, :-1] + turns.size, numbers[:, 1:]], -1).reshape(-1, 2))
    if staleness is not None:
        late = numbers[:, staleness + 1 :]  # turn c + 1 waits for update c - s of all
        first = numbers[:, : late.shape[1]] + turns.size
        pairs = np.broadcast_arrays(first[:, None, :], late[None, :, :])
        edges.append(np.stack(pairs, -1).reshape(-1, 2))
    compute = np.full((2 * turns.size, workers + 1), np.inf)
    owner = np.repeat(np.arange(workers), count)
    compute[np.arange(turns.size), owner] = turns.ravel()
    compute[turns.size :, workers] = update
    every = np.unique(np.concatenate(edges), axis=0)
    problem = Problem(compute=compute, edges=every, bytes=np.zeros(len(every)))
    device = [*owner.tolist(), *[workers] * turns.size]
    result = schedule(problem, device, [float(i % count) for i in range(2 * turns.size)])
    start, finish = np.array(result.start), np.array(result.finish)
    updates = np.array([node for node in result.order if node >= turns.size], np.int64)
    return SimulatedWindow(
        result.makespan,
        start[: turns.size].reshape(turns.shape),
        finish[: turns.size].reshape(turns.shape),
        owner[updates - turns.size].astype(np.int32),
    )


def simulate_pool(
    turns: Floats, slowness: Floats, update: float = 0.0, aggregate: int = 1
) -> SimulatedWindow:
    """Simulate a window in which a worker that is free takes the next turn of one queue.

    Args:
        turns: (turns,) seconds of each turn on a worker of slowness 1.
        slowness: (workers,) factor of the seconds on each worker.
        update: seconds of the server for an update.
        aggregate: results of turns that make one update.

    Raises:
        ProblemError: an array has another shape, or holds a number that is negative or not finite;
            `aggregate` is not positive.
    """
    turns, slowness = _check_seconds("turns", turns, 1), _check_seconds("slowness", slowness, 1)
    if update < 0 or aggregate < 1:
        raise ProblemError(
            f"update is not negative, and aggregate is positive, got {update!r} and {aggregate!r}"
        )
    free = [(0.0, k) for k in range(len(slowness))]
    start, finish = np.zeros(len(turns)), np.zeros(len(turns))
    owner = np.zeros(len(turns), np.int32)
    for i, seconds in enumerate(turns.tolist()):
        start[i], owner[i] = heapq.heappop(free)
        finish[i] = start[i] + seconds * slowness[owner[i]]
        heapq.heappush(free, (float(finish[i]), int(owner[i])))
    came = np.argsort(finish, kind="stable")
    ready = 0.0
    for last in range(aggregate - 1, len(came) + aggregate - 1, aggregate):
        ready = max(ready, float(finish[came[min(last, len(came) - 1)]])) + update
    return SimulatedWindow(ready, start, finish, owner[came])


def _check_seconds(name: str, values: Floats, rank: int) -> Floats:
    array = np.asarray(values, np.float64)
    if array.ndim != rank or not array.size or not np.isfinite(array).all() or array.min() < 0:
        raise ProblemError(
            f"{name} has {rank} axes of finite numbers that are not negative; got {array!r}"
        )
    return array
