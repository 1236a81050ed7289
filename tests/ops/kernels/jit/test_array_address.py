"""Where arrays are: memory that begins where vectors are loaded fastest."""

from __future__ import annotations

import numpy as np
import pytest

from graphflow.ops.kernels.jit.array_address import ALIGNMENT, address, align_up, empty_aligned


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1 << 20])
def test_fresh_memory_is_of_its_size_and_begins_at_a_line(nbytes: int) -> None:
    memory = empty_aligned(nbytes)
    assert (memory.dtype, memory.shape) == (np.uint8, (nbytes,))
    assert address(memory) % ALIGNMENT == 0
    memory[...] = 7
    assert (memory == 7).all()


@pytest.mark.parametrize(("place", "first"), [(0, 0), (1, 64), (64, 64), (65, 128), (4096, 4096)])
def test_the_next_place_for_a_buffer(place: int, first: int) -> None:
    assert align_up(place) == first


def test_an_address_is_what_numpy_says_of_any_array() -> None:
    block = np.arange(24, dtype=np.float32).reshape(4, 6)
    for array in (block, block[1:, 2:], block.T, block[::2], np.zeros(())):
        assert address(array) == array.ctypes.data
