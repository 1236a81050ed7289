"""Pages that the graph reads and a session writes to without the graph's seeing it."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest

from graphflow.base.process.memory_pages import (
    SMALL,
    Pages,
    PrivatePages,
    is_supported,
    round_to_pages,
)

pytestmark = pytest.mark.skipif(not is_supported(), reason="there are no files without a name")


def map_arrays(*values: Any) -> list[Any]:
    """Arrays of some values, each in pages of its own."""
    pages, start, found = Pages(sum(round_to_pages(v.nbytes) for v in values)), 0, []
    for value in values:
        os.pwrite(pages.descriptor, value.tobytes(), start)
        found.append(pages.view(start, value.nbytes).view(value.dtype).reshape(value.shape))
        start += round_to_pages(value.nbytes)
    return found


def test_what_a_session_writes_stays_its_own() -> None:
    a, b = map_arrays(np.arange(40000.0), np.ones((300, 100), "float32"))
    first, second = PrivatePages(), PrivatePages()
    mine, yours = first.array(a), second.array(a)
    other = first.array(b)
    assert mine is not None and yours is not None and other is not None
    mine[:] = 7
    assert np.array_equal(a, np.arange(40000.0)) and np.array_equal(yours, a)
    assert other.shape == (300, 100) and (other == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        a[0] = 1


def test_pages_that_may_have_been_written_to_are_given_once() -> None:
    (a,) = map_arrays(np.zeros(SMALL))
    private = PrivatePages()
    assert private.array(a) is not None and private.array(a) is None


def test_parts_that_overlap_or_begin_within_a_page_are_copied() -> None:
    (a,) = map_arrays(np.zeros((64, 512)))  # a row is a page
    private = PrivatePages()
    assert private.array(a[16:48]) is not None
    assert all(private.array(a[i:j]) is None for i, j in ((0, 17), (0, 64), (47, 64), (20, 40)))
    assert private.array(a[48:]) is not None and private.array(a[:16]) is not None
    assert PrivatePages().array(a.reshape(-1)[1:]) is None


def test_other_arrays_and_small_ones_are_copied() -> None:
    (small,) = map_arrays(np.zeros(10))
    assert PrivatePages().array(small) is None and PrivatePages().array(np.zeros(SMALL)) is None


def test_memory_of_a_session_outlives_the_arrays_it_began_as() -> None:
    (a,) = map_arrays(np.full(SMALL, 3.0))
    before = len(os.listdir("/proc/self/fd"))
    memory = PrivatePages().array(a)
    del a
    gc.collect()
    assert memory is not None and (memory == 3).all()
    del memory
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before
