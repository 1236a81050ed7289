"""Orders in which coordinates are visited: one permutation after the other, computed element by
element.

The place of a step in its permutation is a number of some bits, which a Feistel network of keyed
rounds maps to another one. So any part of an order costs as much as it is long, and no permutation
is kept in memory. Numbers stay below 2**31, so that products fit in 64 bits.

Source: Luby and Rackoff, SIAM J. Comput. 17(2), 1988; Black and Rogaway, CT-RSA 2002 (numbers
outside the range are mapped again).
"""

from __future__ import annotations

from typing import Any

MASK = 0x7FFFFFFF


def mix(x: int) -> int:
    """Return a number of 31 bits that depends on all bits of another one."""
    h = (x ^ (x >> 16)) & MASK
    h = (h * 0x45D9F3B) & MASK
    h = h ^ (h >> 15)
    h = (h * 0x2C1B3C6D) & MASK
    return h ^ (h >> 14)


def permute(place: int, key: int, low: int, high: int) -> int:
    """Return where a permutation of the numbers of `low + high` bits maps a number."""
    left, right = place >> low, place & ((1 << low) - 1)
    for turn in range(3):
        left = left ^ (mix(right + mix(key + 2 * turn)) & ((1 << high) - 1))
        right = right ^ (mix(left + mix(key + 2 * turn + 1)) & ((1 << low) - 1))
    return (left << low) | right


def write_order(order: Any, position: int, count: int, seed: int) -> None:
    """Write the coordinates of some steps.

    Args:
        order: (steps,) is written.
        position: the number of steps before.
        count: the number of coordinates, at least 1.
        seed: of the permutations.
    """
    bits = 0
    while (1 << bits) < count:
        bits += 1
    low = (bits + 1) // 2
    high = bits - low
    turn = position // count
    place = position - turn * count
    key = mix(mix(seed & MASK) + turn)
    for k in range(len(order)):
        found = permute(place, key, low, high)
        while found >= count:
            found = permute(found, key, low, high)
        order[k] = found
        place += 1
        if place == count:
            place = 0
            turn += 1
            key = mix(mix(seed & MASK) + turn)


def shuffle(order: Any, count: int, seed: int) -> int:
    """Shuffle the first `count` numbers of an order, at most 2**31; return the next seed.

    Args:
        seed: a number of 31 bits.
    """
    for k in range(count - 1):
        seed = (seed + 0x9E3779B) & MASK
        other = k + ((mix(seed) * (count - k)) >> 31)
        order[k], order[other] = order[other], order[k]
    return seed


def find_wrong_row(order: Any, count: int, places: Any, offsets: Any, size: int) -> int:
    """Return the first step that visits no row, or a row with an entry outside the matrix; else -1.

    Args:
        order: the rows to visit.
        count: the number of rows.
        places, offsets: columns and row offsets of a CSR matrix.
        size: the number of columns.
    """
    for k in range(len(order)):
        i = order[k]
        if i < 0 or i >= count:
            return k
        first, stop = int(offsets[i]), int(offsets[i + 1])
        if first < 0 or stop < first or stop > len(places):
            return k
        for p in range(first, stop):
            j = int(places[p])
            if j < 0 or j >= size:
                return k
    return -1
