"""Copies past the caches: the same bytes, and none beside them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from graphflow.ops.kernels.jit.array_address import empty_aligned
from graphflow.runtime.transport import nontemporal_copy as bypass
from graphflow.runtime.transport.nontemporal_copy import (
    BLOCK_BYTES,
    STREAMED_FROM,
    CopyStrategyTuner,
    copy,
    make_adder,
    whole_blocks,
)

MB = 1 << 20


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("extra", [-1, 0, 1, 63, 64, 255, 256, 4097])
@pytest.mark.parametrize("offset", [0, 1, 8, 31])
def test_every_byte_is_copied_and_no_other_is_touched(extra: int, offset: int, past: bool) -> None:
    nbytes = STREAMED_FROM + extra
    source = np.random.default_rng(0).integers(0, 256, nbytes + offset, np.uint8)[offset:]
    memory = empty_aligned(nbytes + 64)
    memory[:] = 7
    copy(memory[:nbytes], source, past)
    assert (memory[:nbytes] == source).all() and (memory[nbytes:] == 7).all()


@pytest.mark.parametrize("nbytes", [0, 1, 300, 100_000])
def test_small_arrays_are_copied_too(nbytes: int) -> None:
    source = np.arange(nbytes, dtype=np.uint8)
    target = empty_aligned(nbytes)
    copy(target, source, True)
    assert (target == source).all()


def test_several_threads_copy_at_a_time() -> None:
    sources = [np.full(STREAMED_FROM + 99, value, np.uint8) for value in range(4)]
    targets = [empty_aligned(source.nbytes) for source in sources]
    threads = [
        threading.Thread(target=copy, args=(*pair, True))
        for pair in zip(targets, sources, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((t == s).all() for t, s in zip(targets, sources, strict=True))


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_have_the_bits_of_numpy(dtype: str, halved: bool) -> None:
    add = make_adder(dtype, halved=halved)
    assert add is not None
    rng = np.random.default_rng(0)
    size = 64 * BLOCK_BYTES
    first, second = (rng.integers(0, 256, size, np.uint8).view(dtype) for _ in range(2))
    both = np.isnan(first) & np.isnan(second)  # numpy keeps now the one's bits, now the other's
    second[both] = first[both]
    target = empty_aligned(size + BLOCK_BYTES).view(dtype)
    target[:] = 7
    with np.errstate(all="ignore"):
        expected = first + second
        if halved:
            expected /= 2
    add(target[:0], first[:0], second[:0])
    assert (target == 7).all()
    add(target[: first.size], first, second)
    assert target[: first.size].tobytes() == expected.tobytes()
    assert (target[first.size :] == 7).all()


def test_of_other_dtypes_numpy_adds() -> None:
    assert make_adder("int32", halved=False) is None and make_adder("bfloat16", halved=True) is None


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
@pytest.mark.parametrize("astray", [0, 1, 2, 7, 16, 63])
def test_turns_begin_with_a_line_and_leave_few_elements_beside_them(
    dtype: str, astray: int
) -> None:
    memory = empty_aligned(2048).view(dtype)
    for count in (0, 1, 5, 100, memory.size):
        array = memory[astray:][:count]
        inner = whole_blocks(array)
        part = array[inner]
        assert part.nbytes % BLOCK_BYTES == 0
        assert not part.size or part.ctypes.data % 64 == 0
        assert array.nbytes - part.nbytes < BLOCK_BYTES + 64
    crooked = empty_aligned(2048)[1:2041].view(dtype)
    assert dtype == "uint8" or crooked[whole_blocks(crooked)].size == 0


def ways(pace: CopyStrategyTuner, copies: int, seconds: dict[bool, float]) -> list[bool]:
    """Whether each of some copies goes past the caches, if copies take so long a byte."""
    found = []
    for _ in range(copies):
        found.append(pace.nontemporal)
        pace.record(pace.nontemporal, seconds[pace.nontemporal], 1e-10 if pace.is_trial else 0.0)
    return found


def test_the_way_that_is_clearly_quicker_is_taken_once_both_were_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bypass, "_last_cache", lambda: 32 * MB)
    both = [False] * 4 + [True] * 4
    assert ways(CopyStrategyTuner(4 * MB), 12, {False: 2e-10, True: 1e-10}) == both + [True] * 4
    assert ways(CopyStrategyTuner(4 * MB), 12, {False: 1e-10, True: 1e-10}) == both + [False] * 4
    pace = CopyStrategyTuner(4 * MB)
    ways(pace, 256, {False: 1e-10, True: 5e-10})  # then somebody else takes the cache
    assert ways(pace, 12, {False: 9e-10, True: 5e-10}) == both + [True] * 4


def test_sizes_that_lie_in_no_cache_or_in_ones_own_are_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bypass, "_last_cache", lambda: 32 * MB)
    for nbytes, past in ((MB, False), (6 * MB, True), (64 * MB, True)):
        assert ways(CopyStrategyTuner(nbytes), 3, {False: 1e-10, True: 1e-10}) == [past] * 3
    monkeypatch.setattr(bypass, "_last_cache", lambda: 0)
    assert CopyStrategyTuner(4 * MB).nontemporal
