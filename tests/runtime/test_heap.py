"""The heap of a worker's C library."""

from __future__ import annotations

import platform
import resource

import numpy as np
import pytest

from graphflow.runtime.heap import keep_freed_memory


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="the C library does as it likes")
def test_what_arrays_leave_free_takes_those_of_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    keep_freed_memory()
    faults = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        arrays = [np.ones(3 << 20, np.uint8) for _ in range(6)]
        del arrays
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    assert min(faults[1:]) < 100  # pages of 4608
