"""Windows of tables on parameter servers by one loop of numpy, in the orders that came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Gradient = Callable[[Array, int], Array]
"""The gradient of the whole table, given the values that a worker sees and its micro-batch."""


class HandRules(NamedTuple):
    """The rules of a window: see `gf.parallel.ParameterServer`."""

    workers: int
    turns: int
    aggregate: int = 1
    staleness: int | None = None  # of "ssp"


def window_by_hand(
    table: Array,
    owners: Array,
    orders: Array,
    numbers: Array,
    rules: HandRules,
    gradient: Gradient,
    rate: float,
) -> Array:
    """Return a table after a window of row-wise SGD.

    Args:
        table: the table before it.
        owners: the server of each row.
        orders: the worker of each push, at each server.
        numbers: the micro-batch of each push, at each server.
    """
    table = table.copy()
    servers = range(len(orders))
    seen = [table.copy() for _ in range(rules.workers)]
    answered = np.ones((len(orders), rules.workers), bool)
    clocks = np.zeros((len(orders), rules.workers), int)
    pushed: list[list[Array]] = [[] for _ in servers]
    at = [0 for _ in servers]
    made: dict[tuple[int, int], Array] = {}
    while any(at[s] < len(orders[s]) for s in servers):
        before = list(at)
        for s in servers:
            if at[s] == len(orders[s]):
                continue
            k, number = int(orders[s][at[s]]), int(numbers[s][at[s]])
            key = k, int(clocks[s, k])
            if key not in made:
                if not answered[:, k].all() or (clocks[:, k] < key[1]).any():
                    continue
                made[key] = gradient(seen[k], number)
                answered[:, k] = False
            own = owners == s
            pushed[s].append(made[key] * own[:, None])
            clocks[s, k] += 1
            if len(pushed[s]) == rules.aggregate:
                table -= rate * (sum(pushed[s]) / rules.aggregate)
                pushed[s] = []
            waiting = (
                [k]
                if rules.staleness is None
                else _find_released_workers(clocks[s], answered[s], rules)
            )
            for worker in waiting:
                seen[worker][own] = table[own]
                answered[s, worker] = True
            at[s] += 1
        assert at != before, "the orders fit no window"
    return table


def _find_released_workers(clocks: Array, answered: Array, rules: HandRules) -> Sequence[int]:
    """Return the waiting workers that a bound of staleness lets go on."""
    running = clocks < rules.turns
    least = clocks[running].min() if running.any() else 0
    assert rules.staleness is not None
    near = clocks - least <= rules.staleness
    return [*np.flatnonzero(~answered & running & near)]
