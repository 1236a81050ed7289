"""Philox 4x32-10: random words as a function of (seed, stream, step, index), without state.

A node draws the words of one stream. Its elements have global indices, so any part of a tensor can
be drawn anywhere and comes out the same. numpy and CuPy give the same words.

Source: Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_ROUNDS = 10
_FEW = 256
"""Number of words below which numpy draws them; a generated loop would have to be loaded first."""
# Blocks drawn at once. On the CPU their intermediates fit a core's cache; a GPU takes more.
_BLOCKS = {"numpy": 1 << 13, "cupy": 1 << 24}


def philox(xp: Any, counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, ...]:
    """Return four arrays of words (as uint64) from counters of four words and a key of two."""
    c0, c1, c2, c3 = (xp.asarray(c, "uint64") for c in counter)
    m0, m1 = map(np.uint64, _MULTIPLIERS)
    low, half = np.uint64(_LOW), np.uint64(32)
    for i in range(_ROUNDS):
        k0, k1 = (np.uint64((k + i * w) & _LOW) for k, w in zip(key, _WEYL, strict=True))
        p0, p1 = c0 * m0, c2 * m1
        c0, c1 = (p1 >> half) ^ (c1 ^ k0), p1 & low
        c2, c3 = (p0 >> half) ^ (c3 ^ k1), p0 & low
    return c0, c1, c2, c3


def words(xp: Any, count: int, stream: tuple[int, int], step: int, first: int = 0) -> Any:
    """Return the words of a stream in a step from `first` on, as uint32, shape (count,).

    Word i is word i % 4 of block i // 4. The counter is (block, step, number of the stream), the
    key is the seed. So no two streams, steps or blocks share words.
    """
    if _is_generated(xp, count):
        from graphflow.ops.kernels import philox_kernel as random_words

        return random_words.random_words(count, stream, step, first)
    seed, number = stream
    key = (seed & _LOW, (seed >> 32) & _LOW)
    before = first // 4
    blocks = -(-(first + count) // 4) - before
    result = xp.empty((blocks, 4), "uint32")
    chunk = _BLOCKS.get(xp.__name__, 1 << 24)
    for start in range(0, blocks, chunk):
        part = result[start : start + chunk]
        begin = before + start
        index = xp.arange(begin, begin + part.shape[0], dtype="uint64")
        # Blocks stay below 2**48, so the second word has room for steps beyond 2**32.
        high = (index >> np.uint64(32)) | np.uint64(((step >> 32) & 0xFFFF) << 16)
        rest = (np.uint64(step & _LOW), np.uint64(number & _LOW))
        drawn = philox(xp, (index & np.uint64(_LOW), high, *rest), key)
        for i in range(4):
            part[:, i] = drawn[i]
    return result.reshape(-1)[first - 4 * before :][:count]


def draw_below(
    xp: Any, count: int, bound: int, stream: tuple[int, int], step: int, first: int = 0
) -> Any:
    """Return for each word from `first` on whether it is below a bound < 2³²; bool, (count,)."""
    if _is_generated(xp, count):
        from graphflow.ops.kernels import philox_kernel as random_words

        return random_words.random_below(count, bound, stream, step, first)
    return words(xp, count, stream, step, first) < np.uint32(bound)


def _is_generated(xp: Any, count: int) -> bool:
    """Return True if a generated loop draws the words, with the same result."""
    if xp is not np or count < _FEW:
        return False
    from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled

    return is_jit_enabled()


def uniform(
    xp: Any, count: int, dtype: str, stream: tuple[int, int], step: int, first: int = 0
) -> Any:
    """Draw numbers uniform on [0, 1): multiples of 2**-8 (bfloat16), 2**-11, 2**-24 or 2**-53.

    Args:
        first: the element of the stream to begin with.
    """
    if dtype == "float64":
        pairs = xp.ascontiguousarray(words(xp, 2 * count, stream, step, 2 * first)).view("uint64")
        return (pairs >> np.uint64(11)) * 2.0**-53
    bits = {"bfloat16": 8, "float16": 11}.get(dtype, 24)
    kept = words(xp, count, stream, step, first) >> np.uint32(32 - bits)
    return (kept.astype("float32") * np.float32(2.0**-bits)).astype(dtype, copy=False)


def integers(
    xp: Any, count: int, below: int, stream: tuple[int, int], step: int, first: int = 0
) -> Any:
    """Draw integers in [0, below) with below at most 2**64; uint64, shape (count,).

    Each is the upper half of the product of 64 random bits and `below`.

    Source: Lemire, Fast Random Integer Generation in an Interval, ACM TOMACS 29(1), 2019.
    """
    drawn = xp.ascontiguousarray(words(xp, 2 * count, stream, step, 2 * first)).view("uint64")
    if below == 2**64:
        return drawn
    half, low = np.uint64(32), np.uint64(_LOW)
    little, big = np.uint64(below & _LOW), np.uint64(below >> 32)
    less, more = drawn & low, drawn >> half
    middle = more * little + (less * little >> half)  # below 2**64, as the next
    other = less * big + (middle & low)
    return more * big + (middle >> half) + (other >> half)


def normal(
    xp: Any, count: int, dtype: str, stream: tuple[int, int], step: int, first: int = 0
) -> Any:
    """Draw normal numbers of mean 0 and deviation 1, two from each pair of uniforms.

    Source: Box & Muller, Annals of Mathematical Statistics 29(2), 1958.
    """
    wide = "float64" if dtype == "float64" else "float32"
    odd = first % 2
    pairs = (odd + count + 1) // 2
    drawn = uniform(xp, 2 * pairs, wide, stream, step, first - odd).reshape(-1, 2)
    # 1 - u is in (0, 1]: its logarithm is finite.
    radius = xp.sqrt(xp.log1p(-drawn[:, 0]) * -2)
    angle = drawn[:, 1] * (2 * np.pi)
    result = xp.empty(drawn.shape, wide)
    xp.multiply(radius, xp.cos(angle), out=result[:, 0])
    xp.multiply(radius, xp.sin(angle), out=result[:, 1])
    return result.reshape(-1)[odd:][:count].astype(dtype, copy=False)
