"""Steps that the threads of a pass take together: meet, deal rows, add the copies of weights.

Each thread runs the same loop with its number `k`; shared arrays hold all that they tell each other
between two meetings.
"""

from __future__ import annotations

from typing import Any

from graphflow.linear.loops.dot_products import dense_dot
from graphflow.ops.kernels.compiled_loops.atomics import atomic_add, atomic_load, yield_thread

MASK = 0x7FFFFFFF
PATIENCE = 4000
"""Looks at a counter before a thread lets others run between two looks."""
BUCKET = 8
"""Neighbouring rows that stay together: their dual variables share a cache line."""
WORTH = 1.15
"""How many times faster several threads have to be than one."""
LINE = 8
"""Numbers of a cache line: what threads write often lies that far apart."""


def meet(meeting: Any, threads: int, count: int) -> int:
    """Wait until every thread has come to its meeting `count`; return the number of the next one.

    Args:
        meeting: (1,) int64, at first 0: how often threads have come.
    """
    atomic_add(meeting, 0, 1)
    looks = 0
    while atomic_load(meeting, 0) < count * threads:
        looks += 1
        if looks > PATIENCE:
            yield_thread()
    return count + 1


def shuffle_buckets(order: Any, active: int, state: int, bucket: int) -> int:
    """Shuffle the buckets of the first `active` rows, which stay together; return the new state.

    Args:
        order: rows; a rest that fills no bucket stays where it is.
        active: how many rows are shuffled.
        state: of the random numbers, 31 bits.
        bucket: rows of a bucket.
    """
    for i in range(active // bucket - 1, 0, -1):
        state = (state * 1103515245 + 12345) & MASK
        j = (state * (i + 1)) >> 31
        if j != i:
            for p in range(bucket):
                row = order[i * bucket + p]
                order[i * bucket + p] = order[j * bucket + p]
                order[j * bucket + p] = row
    return state


def count_parts(active: int, end: float, overlap: float, threads: int) -> int:
    """Return how many threads visit `active` rows: all of them, or one if these gain little.

    Args:
        end: how many rows a thread visits in the time that the end of a turn takes.
        overlap: of the steps of threads: all of them go as far as so many times fewer steps of one.
    """
    each = active / threads + end
    if active < threads * BUCKET or active < WORTH * max(overlap, 1.0) * each:
        return 1
    return threads


def begin_turn(rows: Any, beta: Any, old: Any, w: Any, copy: Any) -> None:
    """Note the dual variables of a thread's rows, and copy the weights."""
    for i in range(len(rows)):
        old[rows[i]] = beta[rows[i]]
    for j in range(len(w)):
        copy[j] = w[j]


def add_steps(k: int, parts: int, shared: Any, n: int, size: int, steps: Any, sums: Any) -> None:
    """Add the steps of all copies in a thread's range of weights, and their squares.

    Args:
        k, parts: the thread, and how many there are.
        shared: ((parts + 1) * size,) the weights, and a copy for each thread with its steps.
        n: the number of weights.
        steps: (n,) is written: the sum of the steps.
        sums: (2 * parts * LINE,) is written: squares of the sum, and of each copy's steps.
    """
    first, last = n * k // parts, n * (k + 1) // parts
    mine, alone = steps[first:last], 0.0
    for q in range(parts):
        at = (q + 1) * size
        alone += add_step(
            shared[at + first : at + last], shared[first:last], mine, q == 0, last - first
        )
    sums[2 * k * LINE] = dense_dot(mine, 0, mine, last - first)
    sums[2 * k * LINE + LINE] = alone


def add_step(copy: Any, w: Any, steps: Any, is_first: bool, n: int) -> float:
    """Add `copy - w` to n steps, which are 0 at the first time; return its square.

    Several sums stand beside each other: one would wait for each addition.
    """
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    if is_first:
        for j in range(n):
            steps[j] = 0.0
    j = 0
    while j + 8 <= n:
        d0, d1 = copy[j] - w[j], copy[j + 1] - w[j + 1]
        d2, d3 = copy[j + 2] - w[j + 2], copy[j + 3] - w[j + 3]
        d4, d5 = copy[j + 4] - w[j + 4], copy[j + 5] - w[j + 5]
        d6, d7 = copy[j + 6] - w[j + 6], copy[j + 7] - w[j + 7]
        steps[j] += d0
        steps[j + 1] += d1
        steps[j + 2] += d2
        steps[j + 3] += d3
        steps[j + 4] += d4
        steps[j + 5] += d5
        steps[j + 6] += d6
        steps[j + 7] += d7
        s0 += d0 * d0
        s1 += d1 * d1
        s2 += d2 * d2
        s3 += d3 * d3
        s4 += d4 * d4
        s5 += d5 * d5
        s6 += d6 * d6
        s7 += d7 * d7
        j += 8
    while j < n:
        d0 = copy[j] - w[j]
        steps[j] += d0
        s0 += d0 * d0
        j += 1
    return ((s0 + s4) + (s1 + s5)) + ((s2 + s6) + (s3 + s7))


def find_overlap(parts: int, sums: Any) -> float:
    """Return |Σ Δ|² / Σ |Δ|² of the steps Δ of all threads; 0 if there are none."""
    alone = together = 0.0
    for q in range(parts):
        together += sums[2 * q * LINE]
        alone += sums[2 * q * LINE + LINE]
    return together / alone if alone > 0.0 else 0.0


def end_turn(
    k: int, parts: int, rows: Any, beta: Any, old: Any, w: Any, steps: Any, foreseen: float,
    found: float,
) -> None:  # fmt: skip
    """Take the steps of all threads in a thread's range of weights, shortened if necessary.

    Args:
        rows: the thread's rows, whose dual variables are shortened as the steps are.
        foreseen: the overlap that the threads' steps were made for.
        found: the overlap that they have.
    """
    length = min(1.0, foreseen / found) if found > 0.0 else 1.0
    n = len(w)
    for j in range(n * k // parts, n * (k + 1) // parts):
        w[j] += length / foreseen * steps[j]
    if length < 1.0:
        for i in range(len(rows)):
            row = rows[i]
            beta[row] = old[row] + length * (beta[row] - old[row])


def next_overlap(foreseen: float, found: float, parts: int) -> float:
    """Return the overlap to foresee after one that was found; from 1 to the number of threads."""
    return min(max(1.1 * found, 0.7 * foreseen, 1.0), float(parts))


def drop_idle(order: Any, active: int, pieces: int, kept: Any, spare: Any) -> int:
    """Move the rows that pieces keep to the front of `order`; return how many there are.

    Args:
        order: pieces of nearly equal length, of `active` rows together, each with its kept rows
            first.
        kept: (pieces,) how many rows each keeps.
        spare: room for all other rows.
    """
    front = idle = 0
    for piece in range(pieces):
        first, last = active * piece // pieces, active * (piece + 1) // pieces
        stay = first + kept[piece]
        for p in range(stay, last):
            spare[idle] = order[p]
            idle += 1
        for p in range(first, stay):
            order[front] = order[p]
            front += 1
    for p in range(idle):
        order[front + p] = spare[p]
    return front
