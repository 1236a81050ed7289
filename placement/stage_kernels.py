"""The compiled loops of `split_stages`: dynamic programs over contiguous splits, and annealing.

Imported only when a split is made: numba loads with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

INF = float("inf")


def _segment_loads(
    item: Any, n: int, column: Any, compute: Any, memory: Any, capacity: Any, enter: Any,
    leave: Any, maker: Any, made: Any, readers: Any, reader_start: Any, inputs: Any,
    input_start: Any,
) -> Any:  # fmt: skip
    """(classes, n, n + 1) load of items i..j-1 on a device of a class; inf where it cannot be."""
    units, tensors = compute.shape[0], maker.shape[0]
    members = np.argsort(item)
    start = np.zeros(n + 1, np.int64)
    for u in range(units):
        start[item[u] + 1] += 1
    for i in range(n):
        start[i + 1] += start[i]
    loads = np.full((len(column), n, n + 1), INF)
    within = np.zeros(tensors, np.int64)
    mine = np.zeros(tensors, np.bool_)
    for c in range(len(column)):
        p = column[c]
        for i in range(n):
            within[:] = 0
            mine[:] = False
            load, used = 0.0, 0.0
            for j in range(i, n):
                for m in range(start[j], start[j + 1]):
                    u = members[m]
                    load += compute[u, p]
                    used += memory[u]
                    for t in range(made[u], made[u + 1]):
                        if within[t] > 0:
                            load -= enter[t, p]
                        mine[t] = True
                        if within[t] < reader_start[t + 1] - reader_start[t]:
                            load += leave[t, p]
                    for e in range(input_start[u], input_start[u + 1]):
                        t = inputs[e]
                        within[t] += 1
                        if mine[t]:
                            if within[t] == reader_start[t + 1] - reader_start[t]:
                                load -= leave[t, p]
                        elif within[t] == 1:
                            load += enter[t, p]
                if used > capacity[p] or load == INF:
                    break
                loads[c, i, j + 1] = load
    return loads


def _chain_split(loads: Any, follow: Any) -> Any:
    """Least max load over cuts of a chain: for each state the class and start of its last piece.

    `follow[s, c]` is the state after a device of class c is taken in state s, or -1.
    """
    classes, n, _ = loads.shape
    states = follow.shape[0]
    best = np.full((n + 1, states), INF)
    since = np.full((n + 1, states), -1, np.int64)
    state = np.full((n + 1, states), -1, np.int64)
    kind = np.full((n + 1, states), -1, np.int64)
    best[0, 0] = 0.0
    for i in range(n):
        for s in range(states):
            if best[i, s] == INF:
                continue
            for c in range(classes):
                f = follow[s, c]
                if f < 0:
                    continue
                for j in range(i + 1, n + 1):
                    value = max(best[i, s], loads[c, i, j])
                    if value < best[j, f]:
                        best[j, f], since[j, f], state[j, f], kind[j, f] = value, i, s, c
    return best, since, state, kind


def _ideal_split(
    ideals: Any, follow: Any, column: Any, weight: Any, memory: Any, capacity: Any, enter: Any,
    leave: Any, makers: Any, masks: Any,
) -> Any:  # fmt: skip
    """The same over ideals (rows of 64-bit words, smaller ones first); items weigh (item, class).

    `makers` (t,) item that makes each tensor, `masks` (t, words) items that read it.
    """
    count, words = ideals.shape
    items, classes = weight.shape
    states = follow.shape[0]
    best = np.full((count, states), INF)
    since = np.full((count, states), -1, np.int64)
    state = np.full((count, states), -1, np.int64)
    kind = np.full((count, states), -1, np.int64)
    best[0, 0] = 0.0
    piece = np.zeros(words, np.uint64)
    one = np.uint64(1)
    for j in range(1, count):
        for i in range(j):
            inside = True
            for w in range(words):
                if ideals[i, w] & ~ideals[j, w]:
                    inside = False
                piece[w] = ideals[j, w] & ~ideals[i, w]
            if not inside:
                continue
            for c in range(classes):
                p = column[c]
                load, used = 0.0, 0.0
                for x in range(items):
                    if (piece[x // 64] >> np.uint64(x % 64)) & one:
                        load += weight[x, c]
                        used += memory[x]
                if used > capacity[p] or load == INF or load >= best[j].max():
                    continue
                for t in range(len(makers)):
                    some, other = False, False
                    for w in range(words):
                        some = some or (masks[t, w] & piece[w]) != 0
                        other = other or (masks[t, w] & ~piece[w]) != 0
                    x = makers[t]
                    if (piece[x // 64] >> np.uint64(x % 64)) & one:
                        load += leave[t, p] if other else 0.0
                    elif some:
                        load += enter[t, p]
                for s in range(states):
                    f = follow[s, c]
                    if f >= 0 and best[i, s] < INF:
                        value = max(best[i, s], load)
                        if value < best[j, f]:
                            best[j, f], since[j, f], state[j, f], kind[j, f] = value, i, s, c
    return best, since, state, kind


def _move(
    u: int, b: int, where: Any, load: Any, used: Any, within: Any, spread: Any, compute: Any,
    memory: Any, enter: Any, leave: Any, maker: Any, made: Any, inputs: Any, input_start: Any,
) -> None:  # fmt: skip
    """Move a unit to a device: loads follow from what changes, tensors in and out."""
    a = where[u]
    load[a] -= compute[u, a]
    load[b] += compute[u, b]
    used[a] -= memory[u]
    used[b] += memory[u]
    for t in range(made[u], made[u + 1]):
        if spread[t] > 0:
            load[a] -= leave[t, a]
        if within[t, a] > 0:
            load[a] += enter[t, a]
            spread[t] += 1
        if within[t, b] > 0:
            load[b] -= enter[t, b]
            spread[t] -= 1
        if spread[t] > 0:
            load[b] += leave[t, b]
    where[u] = b
    for e in range(input_start[u], input_start[u + 1]):
        t = inputs[e]
        p = where[maker[t]]
        before = spread[t]
        within[t, a] -= 1
        if within[t, a] == 0 and a != p:
            load[a] -= enter[t, a]
            spread[t] -= 1
        within[t, b] += 1
        if within[t, b] == 1 and b != p:
            load[b] += enter[t, b]
            spread[t] += 1
        if before == 0 and spread[t] > 0:
            load[p] += leave[t, p]
        elif before > 0 and spread[t] == 0:
            load[p] -= leave[t, p]


def _tally(
    where: Any, load: Any, used: Any, within: Any, spread: Any, compute: Any, memory: Any,
    enter: Any, leave: Any, maker: Any, readers: Any, reader_start: Any,
) -> None:  # fmt: skip
    """Loads from scratch."""
    load[:] = 0.0
    used[:] = 0.0
    within[:] = 0
    spread[:] = 0
    for u in range(len(where)):
        load[where[u]] += compute[u, where[u]]
        used[where[u]] += memory[u]
    for t in range(len(maker)):
        for e in range(reader_start[t], reader_start[t + 1]):
            within[t, where[readers[e]]] += 1
        p = where[maker[t]]
        for q in range(len(load)):
            if q != p and within[t, q] > 0:
                spread[t] += 1
                load[q] += enter[t, q]
        if spread[t] > 0:
            load[p] += leave[t, p]


def _energy(load: Any, reference: float, squarings: int) -> float:
    """A smooth stand-in for the max load: the norm of the loads of degree 2 ** squarings."""
    total = 0.0
    for p in range(len(load)):
        x = load[p] / reference
        for _ in range(squarings):
            x *= x
        total += x
    return float(total ** (0.5**squarings) * reference)


def _neighbour(
    u: int, maker: Any, made: Any, readers: Any, reader_start: Any, inputs: Any, input_start: Any
) -> int:
    """A random unit that shares a tensor with u, or u itself."""
    makes = made[u + 1] - made[u]
    reads = input_start[u + 1] - input_start[u]
    if makes + reads == 0:
        return u
    k = np.random.randint(makes + reads)
    if k < makes:
        t = made[u] + k
        return int(readers[np.random.randint(reader_start[t], reader_start[t + 1])])
    t = inputs[input_start[u] + k - makes]
    if np.random.random() < 0.7:
        return int(maker[t])
    return int(readers[np.random.randint(reader_start[t], reader_start[t + 1])])


move = njit(cache=True)(_move)
tally = njit(cache=True)(_tally)
energy = njit(cache=True)(_energy)
neighbour = njit(cache=True)(_neighbour)


def _anneal(
    begin: Any, steps: int, hot: float, cold: float, squarings: int, largest: int, seed: int,
    compute: Any, memory: Any, capacity: Any, enter: Any, leave: Any, maker: Any, made: Any,
    readers: Any, reader_start: Any, inputs: Any, input_start: Any,
) -> Any:  # fmt: skip
    """The best split met by annealing from `begin`, and its max load.

    Moves of one unit, of a connected group of up to `largest` (a walk over tensors: often a path),
    and swaps. Temperatures are shares of the max load at the start.
    """
    np.random.seed(seed)
    units, d = compute.shape
    where = begin.copy()
    load, used = np.zeros(d), np.zeros(d)
    within = np.zeros((len(maker), d), np.int64)
    spread = np.zeros(len(maker), np.int64)
    tally(where, load, used, within, spread, compute, memory, enter, leave, maker, readers,
          reader_start)  # fmt: skip
    best, least = where.copy(), load.max()
    reference = least
    now = energy(load, reference, squarings)
    moved = np.zeros(largest + 2, np.int64)
    origin = np.zeros(largest + 2, np.int64)
    for step in range(steps):
        if step % 100_000 == 0:  # rounding must not pile up
            tally(where, load, used, within, spread, compute, memory, enter, leave, maker, readers,
                  reader_start)  # fmt: skip
            now = energy(load, reference, squarings)
        heat = reference * hot * (cold / hot) ** (step / steps)
        u = np.random.randint(units)
        a = where[u]
        v = neighbour(u, maker, made, readers, reader_start, inputs, input_start)
        b = where[v]
        if b == a or np.random.random() < 0.2:
            b = np.random.randint(d)
            if b == a:
                continue
        count, draw = 1, np.random.random()
        moved[0] = u
        swap = False
        if draw < 0.3:  # a group: walk over units of the same device
            wanted = 1 + np.random.randint(1, largest)
            for _ in range(2 * wanted):
                back = min(count, 3)
                x = moved[count - 1 - np.random.randint(back)]
                w = neighbour(x, maker, made, readers, reader_start, inputs, input_start)
                fresh = where[w] == a
                for k in range(count):
                    fresh = fresh and moved[k] != w
                if fresh:
                    moved[count] = w
                    count += 1
                    if count == wanted:
                        break
        elif draw < 0.5:
            w = np.random.randint(units)
            if where[w] == b:
                moved[1], count, swap = w, 2, True
        possible = True
        for k in range(count):
            to = a if swap and k == 1 else b
            possible = possible and compute[moved[k], to] < INF
        if not possible:
            continue
        for k in range(count):
            to = a if swap and k == 1 else b
            origin[k] = where[moved[k]]
            move(moved[k], to, where, load, used, within, spread, compute, memory, enter, leave,
                 maker, made, inputs, input_start)  # fmt: skip
        value = energy(load, reference, squarings)
        fits = used[b] <= capacity[b] and used[a] <= capacity[a]
        if fits and (value <= now or np.random.random() < np.exp((now - value) / heat)):
            now = value
            top = load.max()
            if top < least * (1.0 - 1e-12):
                least = top
                best[:] = where
        else:
            for k in range(count - 1, -1, -1):
                move(moved[k], origin[k], where, load, used, within, spread, compute, memory,
                     enter, leave, maker, made, inputs, input_start)  # fmt: skip
    return best, least


def _pipedream(seconds: Any, weights: Any, sent: Any, below: Any, workers: int) -> Any:
    """One level of PipeDream's recurrence for all i <= j and 1 <= m <= workers.

    `below[i, j]` is the time of layers i..j on one machine of the level below, `weights` (n + 1,)
    the running sum of seconds to pass them between two workers, `sent[s]` those for an activation
    and its gradient after layer s. Returns times, and the last cut and its workers (-1: none).
    """
    n = len(seconds)
    time = np.full((n, n, workers + 1), INF)
    cut = np.full((n, n, workers + 1), -1, np.int64)
    share = np.full((n, n, workers + 1), -1, np.int64)
    alone = np.full((n, n, workers + 1), INF)
    for i in range(n):
        for j in range(i, n):
            for m in range(1, workers + 1):
                sync = 2.0 * (m - 1) * (weights[j + 1] - weights[i])
                alone[i, j, m] = max(below[i, j], sync) / m
    for length in range(1, n + 1):
        for i in range(n - length + 1):
            j = i + length - 1
            for m in range(1, workers + 1):
                time[i, j, m] = alone[i, j, m]
                for s in range(i, j):
                    for last in range(1, m):
                        value = max(time[i, s, m - last], sent[s], alone[s + 1, j, last])
                        if value < time[i, j, m]:
                            time[i, j, m], cut[i, j, m], share[i, j, m] = value, s, last
    return time, cut, share


segment_loads = njit(cache=True)(_segment_loads)
chain_split = njit(cache=True)(_chain_split)
ideal_split = njit(cache=True)(_ideal_split)
anneal = njit(cache=True)(_anneal)
pipedream_level = njit(cache=True)(_pipedream)
