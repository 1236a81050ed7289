"""Products of rows with the weights, and the weights' updates: the innermost loops.

Several sums stand beside each other. They become one vector, in an order that is the same on every
machine.
"""

from __future__ import annotations

from typing import Any

from graphflow.ops.kernels.compiled_loops.memory_hints import prefetch


def dense_dot(x: Any, start: int, w: Any, n: int) -> float:
    """Return the product of `x[start : start + n]` and `w[:n]`."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    j = 0
    while j + 8 <= n:
        p = start + j
        s0 += float(x[p]) * w[j]
        s1 += float(x[p + 1]) * w[j + 1]
        s2 += float(x[p + 2]) * w[j + 2]
        s3 += float(x[p + 3]) * w[j + 3]
        s4 += float(x[p + 4]) * w[j + 4]
        s5 += float(x[p + 5]) * w[j + 5]
        s6 += float(x[p + 6]) * w[j + 6]
        s7 += float(x[p + 7]) * w[j + 7]
        j += 8
    while j < n:
        s0 += float(x[start + j]) * w[j]
        j += 1
    return ((s0 + s4) + (s1 + s5)) + ((s2 + s6) + (s3 + s7))


def streamed_dot(x: Any, start: int, w: Any, n: int) -> float:
    """Return the product of `x[start : start + n]` and `w[:n]`, of rows that are read in order.

    What follows some rows later is loaded meanwhile: without that, the next row waits for memory.
    """
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    r0 = r1 = r2 = r3 = r4 = r5 = r6 = r7 = 0.0
    j = 0
    while j + 16 <= n:
        p = start + j
        prefetch(x, p + 1024)
        prefetch(x, p + 1032)
        s0 += float(x[p]) * w[j]
        s1 += float(x[p + 1]) * w[j + 1]
        s2 += float(x[p + 2]) * w[j + 2]
        s3 += float(x[p + 3]) * w[j + 3]
        s4 += float(x[p + 4]) * w[j + 4]
        s5 += float(x[p + 5]) * w[j + 5]
        s6 += float(x[p + 6]) * w[j + 6]
        s7 += float(x[p + 7]) * w[j + 7]
        r0 += float(x[p + 8]) * w[j + 8]
        r1 += float(x[p + 9]) * w[j + 9]
        r2 += float(x[p + 10]) * w[j + 10]
        r3 += float(x[p + 11]) * w[j + 11]
        r4 += float(x[p + 12]) * w[j + 12]
        r5 += float(x[p + 13]) * w[j + 13]
        r6 += float(x[p + 14]) * w[j + 14]
        r7 += float(x[p + 15]) * w[j + 15]
        j += 16
    while j < n:
        s0 += float(x[start + j]) * w[j]
        j += 1
    s0, s1, s2, s3 = s0 + r0, s1 + r1, s2 + r2, s3 + r3
    s4, s5, s6, s7 = s4 + r4, s5 + r5, s6 + r6, s7 + r7
    return ((s0 + s4) + (s1 + s5)) + ((s2 + s6) + (s3 + s7))


def dense_add(x: Any, start: int, factor: float, w: Any, n: int) -> None:
    """Add `factor * x[start : start + n]` to `w[:n]`."""
    for j in range(n):
        w[j] += factor * float(x[start + j])


def multiply_rows(n: int, d: int, x: Any, w: Any, out: Any) -> None:
    """Write the products of n rows `x[i * d : i * d + d]` and `w`."""
    for i in range(n):
        out[i] = streamed_dot(x, i * d, w, d)


def add_columns(n: int, d: int, x: Any, factors: Any, out: Any) -> None:
    """Add n columns `x[i * d : i * d + d]`, times their factors, to `out`; four at once."""
    i = 0
    while i + 4 <= n:
        p, q, r, t = i * d, i * d + d, i * d + 2 * d, i * d + 3 * d
        f0, f1, f2, f3 = factors[i], factors[i + 1], factors[i + 2], factors[i + 3]
        for j in range(d):
            a = f0 * float(x[p + j]) + f1 * float(x[q + j])
            out[j] += a + (f2 * float(x[r + j]) + f3 * float(x[t + j]))
        i += 4
    while i < n:
        dense_add(x, i * d, factors[i], out, d)
        i += 1


def sparse_dot(values: Any, places: Any, start: int, stop: int, w: Any) -> float:
    """Return the sum of `values[p] * w[places[p]]` for p from start to stop."""
    s0 = s1 = s2 = s3 = 0.0
    p = start
    while p + 4 <= stop:
        s0 += float(values[p]) * w[places[p]]
        s1 += float(values[p + 1]) * w[places[p + 1]]
        s2 += float(values[p + 2]) * w[places[p + 2]]
        s3 += float(values[p + 3]) * w[places[p + 3]]
        p += 4
    while p < stop:
        s0 += float(values[p]) * w[places[p]]
        p += 1
    return (s0 + s2) + (s1 + s3)


def sparse_add(values: Any, places: Any, start: int, stop: int, factor: float, w: Any) -> None:
    """Add `factor * values[p]` to `w[places[p]]` for p from start to stop."""
    for p in range(start, stop):
        w[places[p]] += factor * float(values[p])
