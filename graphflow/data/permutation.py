"""Permutations of row numbers that are computed element by element.

A Feistel network permutes numbers of so many bits; a number beyond the size is permuted again
until it lies within ("cycle walking"). So row i of an epoch's order takes the same few operations
whatever the number of rows, and nothing is stored.

Source: Black & Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]
_ROUNDS = 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIXER = np.uint64(0xBF58476D1CE4E5B9)


def permute(indices: Indices, size: int, key: Sequence[int]) -> Indices:
    """Return where a permutation of `size` numbers takes some of them.

    Args:
        indices: int64, from 0, below `size`.
        key: ints from 0 that choose the permutation, such as (seed, epoch).
    """
    if size < 2:
        return indices.copy()
    bits = max(2, (size - 1).bit_length())
    keys = _round_keys(tuple(key))
    found = _permute_bits(indices.astype(np.uint64), bits, keys)
    beyond = np.flatnonzero(found >= size)
    while len(beyond):
        found[beyond] = _permute_bits(found[beyond], bits, keys)
        beyond = beyond[found[beyond] >= size]
    numbers: Indices = found.astype(np.int64)
    return numbers


@lru_cache(maxsize=64)
def _round_keys(key: tuple[int, ...]) -> tuple[np.uint64, ...]:
    """Return a number for each round. numpy promises that these stay the same in later versions."""
    return tuple(np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64))


def _permute_bits(x: Any, bits: int, keys: Sequence[np.uint64]) -> Any:
    """Permute the numbers of so many bits by alternating rounds on both halves."""
    low = np.uint64(bits // 2)
    masks = (np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1))
    right, left = x & masks[0], x >> low
    for number, key in enumerate(keys):
        if number % 2:
            right = right ^ (_hash(left, key) & masks[0])
        else:
            left = left ^ (_hash(right, key) & masks[1])
    return (left << low) | right


def _hash(x: Any, key: np.uint64) -> Any:
    """Mix a number with a key, as splitmix64 does."""
    x = (x + key) * _MULTIPLIER
    x = (x ^ (x >> np.uint64(30))) * _MIXER
    return x ^ (x >> np.uint64(31))
