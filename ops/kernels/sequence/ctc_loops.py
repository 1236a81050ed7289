"""The loops of connectionist temporal classification: plain Python that `native` compiles.

State s of 2·labels + 1 is the blank for even s and label s // 2 for odd s. A probability is a pair
(m, k) that stands for m·2**(512·k). It neither overflows nor underflows, as a logarithm does not,
and needs no exp and log in each state. `low`, -infinity, is the exponent of 0.
"""

from __future__ import annotations

from math import log
from typing import Any


def at_exponent(m: float, k: float, top: float) -> float:
    """Return the m of a probability for another k, which is not smaller."""
    if k == top:
        return m
    if k == top - 1.0:
        return m * 7.458340731200207e-155  # 2**-512
    return 0.0


def larger(a: float, b: float) -> float:
    """Return the larger number."""
    if b > a:
        return b
    return a


def forward(
    b: int, x: Any, kx: Any, labels: Any, steps: int, count: int, time: int, classes: int,
    most: int, blank: int, low: float, paths: Any, exponents: Any,
) -> float:  # fmt: skip
    """Write the probabilities of beginnings that end in each state; return the log of the whole.

    Args:
        b: the sequence.
        x, kx: the probabilities (sequences, time, classes).
        labels: (sequences, most).
        steps, count: of time and of labels that count.
        paths, exponents: (steps, 2·count + 1).
    """
    states = 2 * count + 1
    for i in range(steps * states):
        paths[i] = 0.0
        exponents[i] = low
    for t in range(steps):
        here = (b * time + t) * classes
        row = t * states
        first = states - 2 * (steps - t)  # states before it cannot reach the end
        if first < 0:
            first = 0
        last = 2 * t + 2
        if last > states:
            last = states
        for s in range(first, last):
            total = 1.0
            top = 0.0
            symbol = here + blank
            two = low
            if s & 1 == 1:
                label = b * most + (s >> 1)
                symbol = here + int(labels[label])
                if t > 0 and s > 2 and labels[label] != labels[label - 1]:
                    two = float(exponents[row - states + s - 2])
            if t > 0:
                before = row - states + s
                one = low
                if s > 0:
                    one = float(exponents[before - 1])
                top = larger(larger(float(exponents[before]), one), two)
                total = at_exponent(float(paths[before]), float(exponents[before]), top)
                if one > low:
                    total += at_exponent(float(paths[before - 1]), one, top)
                if two > low:
                    total += at_exponent(float(paths[before - 2]), two, top)
            total *= float(x[symbol])
            top += float(kx[symbol])
            if total == 0.0:
                top = low
            elif total < 8.636168555094445e-78:  # 2**-256
                total *= 1.3407807929942597e154
                top -= 1.0
            elif total > 1.157920892373162e77:
                total *= 7.458340731200207e-155
                top += 1.0
            paths[row + s] = total
            exponents[row + s] = top
    if steps == 0:
        return 0.0 if count == 0 else low
    end = steps * states - 1
    top = float(exponents[end])
    total = float(paths[end])
    if count > 0:
        top = larger(top, float(exponents[end - 1]))
        total = at_exponent(total, float(exponents[end]), top)
        total += at_exponent(float(paths[end - 1]), float(exponents[end - 1]), top)
    if top == low:
        return low
    return log(total) + top * 354.89135644669199


def write_losses(
    first: int, last: int, x: Any, kx: Any, labels: Any, steps: Any, counts: Any, time: int,
    classes: int, most: int, blank: int, low: float, paths: Any, exponents: Any, rests: Any,
    rest_exponents: Any, losses: Any, slopes: Any,
) -> None:  # fmt: skip
    """Write the negative log-probability of each sequence from `first` to `last`, and its slopes.

    Args:
        slopes: 0 before; then minus the probability of each class at each time.
        rests, rest_exponents: two rows of 2·most + 1: the probabilities of the rest from each state
            on, with the state's own.
    """
    for b in range(first, last):
        n = int(steps[b])
        count = int(counts[b])
        states = 2 * count + 1
        whole = forward(
            b, x, kx, labels, n, count, time, classes, most, blank, low, paths, exponents
        )
        losses[b] = -whole
        if n == 0 or whole == low:
            continue
        end = n * states - 1
        k_whole = float(exponents[end])
        if count > 0:
            k_whole = larger(k_whole, float(exponents[end - 1]))
        inverse = at_exponent(float(paths[end]), float(exponents[end]), k_whole)
        if count > 0:
            inverse += at_exponent(float(paths[end - 1]), float(exponents[end - 1]), k_whole)
        inverse = 1.0 / inverse
        for t in range(n - 1, -1, -1):
            here = (b * time + t) * classes
            now = (t % 2) * (2 * most + 1)
            later = ((t + 1) % 2) * (2 * most + 1)
            for s in range(states):
                symbol = here + blank
                if s & 1 == 1:
                    symbol = here + int(labels[b * most + (s >> 1)])
                total = 0.0
                top = low
                if t == n - 1:
                    if s >= states - 2:
                        total = 1.0
                        top = 0.0
                else:
                    one = low
                    if s + 1 < states:
                        one = float(rest_exponents[later + s + 1])
                    two = low
                    if s + 2 < states and s & 1 == 1:
                        label = b * most + (s >> 1)
                        if labels[label] != labels[label + 1]:
                            two = float(rest_exponents[later + s + 2])
                    top = larger(larger(float(rest_exponents[later + s]), one), two)
                    if top > low:
                        total = at_exponent(
                            float(rests[later + s]), float(rest_exponents[later + s]), top
                        )
                        if one > low:
                            total += at_exponent(float(rests[later + s + 1]), one, top)
                        if two > low:
                            total += at_exponent(float(rests[later + s + 2]), two, top)
                k_path = float(exponents[t * states + s])
                if top > low and k_path > low:
                    share = float(paths[t * states + s]) * inverse * total
                    k = k_path + top - k_whole
                    if k < 0.0:
                        share = at_exponent(share, k, 0.0)
                    elif k > 0.0:
                        share *= 1.3407807929942597e154
                    slopes[symbol] -= share
                total *= float(x[symbol])
                top += float(kx[symbol])
                if total == 0.0:
                    top = low
                elif total < 8.636168555094445e-78:
                    total *= 1.3407807929942597e154
                    top -= 1.0
                elif total > 1.157920892373162e77:
                    total *= 7.458340731200207e-155
                    top += 1.0
                rests[now + s] = total
                rest_exponents[now + s] = top
