"""Passes over rows that several threads make together, with the same bits in each run.

Each thread runs the same loop with its number `k`. The arrays that all share:

    plan      int64: the rows that are active, the state of random numbers, the rows visited so far
    numbers   float64: the overlap that is foreseen, and the one that was found last
    ends      float64, a line for each thread: the least and greatest projected slope of its rows,
              and the sum of their gaps
"""

from __future__ import annotations

from typing import Any

from graphflow.linear.loops.row_passes import (
    dense_rows,
    dense_svm_rows,
    sparse_rows,
    sparse_svm_rows,
    widen_bounds,
)
from graphflow.linear.loops.thread_meetings import (
    BUCKET,
    LINE,
    add_steps,
    begin_turn,
    count_parts,
    drop_idle,
    end_turn,
    find_overlap,
    meet,
    next_overlap,
    shuffle_buckets,
)

INF = float("inf")


def visit_rows(
    rows: Any, is_svm: bool, is_sparse: bool, bounds: Any, values: Any, places: Any, offsets: Any,
    d: int, squares: Any, y: Any, c: Any, loss: int, parameter: float, inverse: float, bias: float,
    beta: Any, w: Any,
) -> int:  # fmt: skip
    """Visit rows by the loop for them; return how many stay active."""
    if is_svm and is_sparse:
        return sparse_svm_rows(
            rows, len(rows), bounds, values, places, offsets, d, squares, y, c, loss == 3, inverse,
            bias, beta, w,
        )  # fmt: skip
    if is_svm:
        return dense_svm_rows(
            rows, len(rows), bounds, values, d, squares, y, c, loss == 3, inverse, bias, beta, w
        )
    if is_sparse:
        sparse_rows(
            rows, values, places, offsets, d, squares, y, c, loss, parameter, inverse, bias, beta, w
        )
    else:
        dense_rows(rows, values, d, squares, y, c, loss, parameter, inverse, bias, beta, w)
    return len(rows)


def threaded_rows(
    k: int, threads: int, end: float, long: int, wanted: int, enough: float, is_svm: bool,
    is_sparse: bool, plan: Any, numbers: Any, ends: Any, meeting: Any, order: Any, spare: Any,
    kept: Any, shared: Any, size: int, steps: Any, old: Any, sums: Any, bounds: Any, values: Any,
    places: Any, offsets: Any, d: int, squares: Any, y: Any, c: Any, loss: int, parameter: float,
    inverse: float, bias: float, beta: Any,
) -> None:  # fmt: skip
    """Make passes until `wanted` rows were visited, or the gaps of an SVM's rows add up to little,
    or so few of them are active that one thread passes faster.

    Args:
        k, threads: the thread, and how many there are.
        end: rows that a thread visits in the time that the end of a turn takes.
        long: rows of a thread that are worth a turn of their own.
        wanted, enough: the visits after which no pass begins, and the sum of gaps.
        is_svm: True for passes that leave out rows at a bound, for a (squared) hinge loss.
        is_sparse: True for a matrix in CSR form; a dense one has its numbers in `values`.
        order, spare: (rows,) the rows, the active ones first; and room for as many.
        kept: (rows // long + 2 * threads,) room for a number of each piece of a pass.
        shared, size: ((threads + 1) * size,) the weights, and room for a copy for each thread.
        steps, old, sums: room for (columns + 1,), (rows,) and (2 * threads * LINE,) numbers.
        bounds: (threads * LINE,) five numbers of each thread as in `dense_svm_rows`.
        squares, y, c, loss, parameter, inverse, bias, beta: as of `dense_rows`.
    """
    w, bound = shared[0 : d + 1], bounds[k * LINE : k * LINE + 5]
    overlap, found = numbers[0], numbers[1]
    count, visited = 1, 0
    going = True
    while going:
        if k == 0:
            plan[1] = shuffle_buckets(order, plan[0], plan[1], BUCKET)
        count = meet(meeting, threads, count)
        active = plan[0]
        parts = count_parts(active, end, found, threads)
        turns = max(1, active // (long * parts))
        pieces = turns * parts
        low, high, gap = INF, -INF, 0.0
        for turn in range(turns):
            piece = min(turn * parts + k, pieces)
            rows = order[active * piece // pieces : active * min(piece + 1, pieces) // pieces]
            foreseen = min(overlap, float(parts))
            at = (k + 1) * size if parts > 1 else 0
            copy = shared[at : at + d + 1]
            if k < parts:
                if parts > 1:
                    begin_turn(rows, beta, old, w, copy)
                kept[piece] = visit_rows(
                    rows, is_svm, is_sparse, bound, values, places, offsets, d, squares, y, c,
                    loss, parameter, inverse * foreseen, bias, beta, copy,
                )  # fmt: skip
                low, high, gap = min(low, bound[2]), max(high, bound[3]), gap + bound[4]
            if parts > 1:
                count = meet(meeting, threads, count)
                if k < parts:
                    add_steps(k, parts, shared, d + 1, size, steps, sums)
                count = meet(meeting, threads, count)
                found = find_overlap(parts, sums)
                if k < parts:
                    end_turn(k, parts, rows, beta, old, w, steps, foreseen, found)
                overlap = next_overlap(foreseen, found, parts)
                count = meet(meeting, threads, count)
        ends[k * LINE], ends[k * LINE + 1], ends[k * LINE + 2] = low, high, gap
        count = meet(meeting, threads, count)
        low, high, gap = INF, -INF, 0.0
        for q in range(threads):
            low, high = min(low, ends[q * LINE]), max(high, ends[q * LINE + 1])
            gap += ends[q * LINE + 2]
        bound[2], bound[3], bound[4] = low, high, gap
        widen_bounds(bound)
        visited += active
        going = visited < wanted
        if is_svm:
            staying = 0
            for piece in range(pieces):
                staying += kept[piece]
            is_worth = count_parts(staying, end, found, threads) > 1
            going = going and gap > enough and is_worth
        if k == 0:
            plan[2], numbers[0], numbers[1] = visited, overlap, found
            if is_svm:
                plan[0] = drop_idle(order, active, pieces, kept, spare)
