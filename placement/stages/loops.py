"""The loops of `split_stages`: dynamic programs over contiguous splits, and annealing.

Run as machine code (`native`), written for it: flat arrays, results in arrays that are given. The
hypergraph is that of `StageUnits`; tables by device are flat, `compute[unit * d + device]`.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import Any

INF = float("inf")


def segment_loads(
    members: Any, start: Any, n: int, column: Any, d: int, within: Any, mine: Any, loads: Any,
    compute: Any, memory: Any, capacity: Any, enter: Any, leave: Any, maker: Any, made: Any,
    readers: Any, reader_start: Any, inputs: Any, input_start: Any,
) -> None:  # fmt: skip
    """loads[c, i, j] of items i..j-1 on a device of class c; left inf where it cannot be.

    The units of item i are `members[start[i]:start[i + 1]]`.
    """
    for c in range(len(column)):
        p = column[c]
        for i in range(n):
            for t in range(len(maker)):
                within[t], mine[t] = 0, 0
            load, used = 0.0, 0.0
            for j in range(i, n):
                for m in range(start[j], start[j + 1]):
                    u = members[m]
                    load += compute[u * d + p]
                    used += memory[u]
                    for t in range(made[u], made[u + 1]):
                        if within[t] > 0:
                            load -= enter[t * d + p]
                        mine[t] = 1
                        if within[t] < reader_start[t + 1] - reader_start[t]:
                            load += leave[t * d + p]
                    for e in range(input_start[u], input_start[u + 1]):
                        t = inputs[e]
                        within[t] += 1
                        if mine[t] > 0:
                            if within[t] == reader_start[t + 1] - reader_start[t]:
                                load -= leave[t * d + p]
                        elif within[t] == 1:
                            load += enter[t * d + p]
                if used > capacity[p] or load == INF:
                    break
                loads[(c * n + i) * (n + 1) + j + 1] = load


def chain_split(
    classes: int, n: int, states: int, loads: Any, follow: Any, best: Any, since: Any, state: Any,
    kind: Any,
) -> None:  # fmt: skip
    """Least max load over cuts of a chain: for each state the class and start of its last piece.

    `follow[s, c]` is the state after a device of class c is taken in state s, or -1.
    """
    best[0] = 0.0
    for i in range(n):
        for s in range(states):
            if best[i * states + s] == INF:
                continue
            for c in range(classes):
                f = follow[s * classes + c]
                if f < 0:
                    continue
                for j in range(i + 1, n + 1):
                    value = max(best[i * states + s], loads[(c * n + i) * (n + 1) + j])
                    at = j * states + f
                    if value < best[at]:
                        best[at], since[at], state[at], kind[at] = value, i, s, c


def piece_load(
    items: int, c: int, classes: int, p: int, d: int, words: int, limit: float, room: float,
    piece: Any, weight: Any, memory: Any, enter: Any, leave: Any, makers: Any, masks: Any,
) -> float:  # fmt: skip
    """Load of a set of items on a device of a class; inf where it has no room or is beyond."""
    load, used = 0.0, 0.0
    for x in range(items):
        if (piece[x // 64] >> (x % 64)) & 1:
            load += weight[x * classes + c]
            used += memory[x]
    if used > room or load == INF or load >= limit:
        return INF
    for t in range(len(makers)):
        some, other = 0, 0
        for w in range(words):
            some |= masks[t * words + w] & piece[w]
            other |= masks[t * words + w] & ~piece[w]
        x = makers[t]
        if (piece[x // 64] >> (x % 64)) & 1:
            if other != 0:
                load += leave[t * d + p]
        elif some != 0:
            load += enter[t * d + p]
    return load


def ideal_split(
    count: int, words: int, states: int, d: int, ideals: Any, follow: Any, column: Any,
    weight: Any, memory: Any, capacity: Any, enter: Any, leave: Any, makers: Any, masks: Any,
    piece: Any, best: Any, since: Any, state: Any, kind: Any,
) -> None:  # fmt: skip
    """The same over ideals (rows of 64-bit words, smaller ones first); items weigh (item, class).

    `makers` (t,) item that makes each tensor, `masks` (t, words) items that read it.
    """
    classes = len(column)
    best[0] = 0.0
    for j in range(1, count):
        for i in range(j):
            beyond = 0
            for w in range(words):
                beyond |= ideals[i * words + w] & ~ideals[j * words + w]
                piece[w] = ideals[j * words + w] & ~ideals[i * words + w]
            if beyond != 0:
                continue
            limit = 0.0
            for s in range(states):
                limit = max(limit, best[j * states + s])
            for c in range(classes):
                load = piece_load(
                    len(memory), c, classes, column[c], d, words, limit, capacity[column[c]],
                    piece, weight, memory, enter, leave, makers, masks,
                )  # fmt: skip
                if load == INF:
                    continue
                for s in range(states):
                    f = follow[s * classes + c]
                    if f >= 0 and best[i * states + s] < INF:
                        value = max(best[i * states + s], load)
                        at = j * states + f
                        if value < best[at]:
                            best[at], since[at], state[at], kind[at] = value, i, s, c


def move(
    u: int, b: int, d: int, where: Any, load: Any, used: Any, within: Any, spread: Any,
    compute: Any, memory: Any, enter: Any, leave: Any, maker: Any, made: Any, inputs: Any,
    input_start: Any,
) -> None:  # fmt: skip
    """Move a unit to a device: loads follow from what changes, tensors in and out."""
    a = where[u]
    load[a] -= compute[u * d + a]
    load[b] += compute[u * d + b]
    used[a] -= memory[u]
    used[b] += memory[u]
    for t in range(made[u], made[u + 1]):
        row = t * d
        if spread[t] > 0:
            load[a] -= leave[row + a]
        if within[row + a] > 0:
            load[a] += enter[row + a]
            spread[t] += 1
        if within[row + b] > 0:
            load[b] -= enter[row + b]
            spread[t] -= 1
        if spread[t] > 0:
            load[b] += leave[row + b]
    where[u] = b
    for e in range(input_start[u], input_start[u + 1]):
        t = inputs[e]
        row, p, before = t * d, where[maker[t]], spread[t]
        within[row + a] -= 1
        if within[row + a] == 0 and a != p:
            load[a] -= enter[row + a]
            spread[t] -= 1
        within[row + b] += 1
        if within[row + b] == 1 and b != p:
            load[b] += enter[row + b]
            spread[t] += 1
        if before == 0 and spread[t] > 0:
            load[p] += leave[row + p]
        elif before > 0 and spread[t] == 0:
            load[p] -= leave[row + p]


def tally(
    d: int, where: Any, load: Any, used: Any, within: Any, spread: Any, compute: Any, memory: Any,
    enter: Any, leave: Any, maker: Any, readers: Any, reader_start: Any,
) -> None:  # fmt: skip
    """Loads from scratch."""
    for p in range(d):
        load[p], used[p] = 0.0, 0.0
    for i in range(len(within)):
        within[i] = 0
    for u in range(len(where)):
        load[where[u]] += compute[u * d + where[u]]
        used[where[u]] += memory[u]
    for t in range(len(maker)):
        for e in range(reader_start[t], reader_start[t + 1]):
            within[t * d + where[readers[e]]] += 1
        p = where[maker[t]]
        spread[t] = 0
        for q in range(d):
            if q != p and within[t * d + q] > 0:
                spread[t] += 1
                load[q] += enter[t * d + q]
        if spread[t] > 0:
            load[p] += leave[t * d + p]


def highest(load: Any) -> float:
    """The greatest load."""
    top = 0.0
    for p in range(len(load)):
        top = max(top, load[p])
    return top


def energy(load: Any, reference: float, squarings: int) -> float:
    """A smooth stand-in for the max load: the norm of the loads of degree 2 ** squarings."""
    total = 0.0
    for p in range(len(load)):
        x = load[p] / reference
        for _ in range(squarings):
            x *= x
        total += x
    for _ in range(squarings):
        total = sqrt(total)
    return total * reference


def draw(state: Any, below: int) -> int:
    """The next random whole number from 0."""
    state[0] = state[0] * 48271 % 2147483647
    return int(state[0] // 8 % below)


def chance(state: Any) -> float:
    """The next random number between 0 and 1."""
    state[0] = state[0] * 48271 % 2147483647
    return float(state[0] / 2147483647.0)


def neighbour(
    u: int, state: Any, maker: Any, made: Any, readers: Any, reader_start: Any, inputs: Any,
    input_start: Any,
) -> int:  # fmt: skip
    """A random unit that shares a tensor with u, or u itself."""
    makes = made[u + 1] - made[u]
    reads = input_start[u + 1] - input_start[u]
    if makes + reads == 0:
        return u
    k = draw(state, makes + reads)
    t = made[u] + k
    if k >= makes:
        t = inputs[input_start[u] + k - makes]
        if chance(state) < 0.7:
            return int(maker[t])
    first = reader_start[t]
    return int(readers[first + draw(state, reader_start[t + 1] - first)])


def anneal(
    steps: int, hot: float, cold: float, squarings: int, largest: int, bound: float, d: int,
    state: Any, best: Any, where: Any, load: Any, used: Any, within: Any, spread: Any, moved: Any,
    origin: Any, mark: Any, compute: Any, memory: Any, capacity: Any, enter: Any, leave: Any,
    maker: Any, made: Any, readers: Any, reader_start: Any, inputs: Any, input_start: Any,
) -> float:  # fmt: skip
    """The best split met by annealing from `where` (into `best`), and its max load.

    Moves of one unit, of a connected group of up to `largest` (a walk over tensors: often a path),
    and swaps. Temperatures are shares of the max load at the start. Stops where `bound` is reached.
    `state` holds the random numbers' seed; `mark` must be negative.
    """
    units = len(where)
    tally(d, where, load, used, within, spread, compute, memory, enter, leave, maker, readers,
          reader_start)  # fmt: skip
    least = reference = highest(load)
    now = energy(load, reference, squarings)
    heat = reference * hot
    for u in range(units):
        best[u] = where[u]
    for step in range(steps):
        if step % 1_000 == 0:
            if least <= bound:
                break
            heat = reference * hot * exp(log(cold / hot) * step / steps)
        if step % 100_000 == 0:  # rounding must not pile up
            tally(d, where, load, used, within, spread, compute, memory, enter, leave, maker,
                  readers, reader_start)  # fmt: skip
            now = energy(load, reference, squarings)
        u = draw(state, units)
        a = where[u]
        b = where[
            neighbour(u, state, maker, made, readers, reader_start, inputs, input_start)
        ]  # fmt: skip
        if b == a or chance(state) < 0.2:
            b = draw(state, d)
            if b == a:
                continue
        count, kind, swap = 1, chance(state), False
        moved[0] = u
        if kind < 0.3:  # a group: walk over units of the same device
            wanted = 2 + draw(state, largest - 1)
            mark[u] = step
            for _ in range(2 * wanted):
                x = moved[count - 1 - draw(state, min(count, 3))]
                w = neighbour(x, state, maker, made, readers, reader_start, inputs, input_start)
                if where[w] == a and mark[w] != step:
                    mark[w] = step
                    moved[count] = w
                    count += 1
                    if count == wanted:
                        break
        elif kind < 0.5:
            w = draw(state, units)
            if where[w] == b:
                moved[1], count, swap = w, 2, True
        possible = True
        for k in range(count):
            to = a if swap and k == 1 else b
            possible = possible and compute[moved[k] * d + to] < INF
        if not possible:
            continue
        for k in range(count):
            to = a if swap and k == 1 else b
            origin[k] = where[moved[k]]
            move(moved[k], to, d, where, load, used, within, spread, compute, memory, enter,
                 leave, maker, made, inputs, input_start)  # fmt: skip
        value = energy(load, reference, squarings)
        fits = used[b] <= capacity[b] and used[a] <= capacity[a]
        if fits and (value <= now or chance(state) < exp((now - value) / heat)):
            now = value
            top = highest(load)
            if top < least * (1.0 - 1e-12):
                least = top
                for k in range(units):
                    best[k] = where[k]
        else:
            for k in range(count - 1, -1, -1):
                move(moved[k], origin[k], d, where, load, used, within, spread, compute, memory,
                     enter, leave, maker, made, inputs, input_start)  # fmt: skip
    return least


def pipedream_level(
    n: int, workers: int, weights: Any, sent: Any, below: Any, alone: Any, time: Any, cut: Any,
    share: Any,
) -> None:  # fmt: skip
    """One level of PipeDream's recurrence for all i <= j and 1 <= m <= workers.

    `below[i, j]` is the time of layers i..j on one machine of the level below, `weights` (n + 1,)
    the running sum of seconds to pass them between two workers, `sent[s]` those for an activation
    and its gradient after layer s. Times, and the last cut and its workers (-1: none), by
    (i, j, m) for m up to `workers` included; `alone` is room for as many.
    """
    wide = workers + 1
    for i in range(n):
        for j in range(i, n):
            for m in range(1, wide):
                sync = 2.0 * (m - 1) * (weights[j + 1] - weights[i])
                alone[(i * n + j) * wide + m] = max(below[i * n + j], sync) / m
    for length in range(1, n + 1):
        for i in range(n - length + 1):
            j = i + length - 1
            for m in range(1, wide):
                at = (i * n + j) * wide + m
                time[at] = alone[at]
                for s in range(i, j):
                    for last in range(1, m):
                        first = time[(i * n + s) * wide + m - last]
                        piece = alone[((s + 1) * n + j) * wide + last]
                        value = max(first, sent[s], piece)
                        if value < time[at]:
                            time[at], cut[at], share[at] = value, s, last
