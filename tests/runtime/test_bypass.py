"""Copies past the caches: the same bytes, and none beside them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from graphflow.ops.kernels.address import fresh
from graphflow.runtime.transport.bypass import STREAMED_FROM, copy


@pytest.mark.parametrize("extra", [-1, 0, 1, 63, 64, 255, 256, 4097])
@pytest.mark.parametrize("offset", [0, 1, 8, 31])
def test_every_byte_is_copied_and_no_other_is_touched(extra: int, offset: int) -> None:
    nbytes = STREAMED_FROM + extra
    source = np.random.default_rng(0).integers(0, 256, nbytes + offset, np.uint8)[offset:]
    memory = fresh(nbytes + 64)
    memory[:] = 7
    copy(memory[:nbytes], source)
    assert (memory[:nbytes] == source).all() and (memory[nbytes:] == 7).all()


@pytest.mark.parametrize("nbytes", [0, 1, 300, 100_000])
def test_small_arrays_are_copied_too(nbytes: int) -> None:
    source = np.arange(nbytes, dtype=np.uint8)
    target = fresh(nbytes)
    copy(target, source)
    assert (target == source).all()


def test_several_threads_copy_at_a_time() -> None:
    sources = [np.full(STREAMED_FROM + 99, value, np.uint8) for value in range(4)]
    targets = [fresh(source.nbytes) for source in sources]
    threads = [
        threading.Thread(target=copy, args=pair) for pair in zip(targets, sources, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((t == s).all() for t, s in zip(targets, sources, strict=True))
