"""The heap of a worker's C library."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from graphflow.runtime.memory.malloc_tuning import raise_trim_threshold

if sys.argv[1:]:
    raise_trim_threshold()
faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    arrays = [np.ones(3 << 20, np.uint8) for _ in range(6)]
    del arrays
    faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
print(min(faults[1:]))
"""


def faults(*arguments: str) -> int:
    """Pages that a step's arrays had cleared anew, in a process whose heap nobody else has used."""
    heeded = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, *arguments],
        env={name: value for name, value in os.environ.items() if name not in heeded},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="the C library does as it likes")
def test_what_arrays_leave_free_takes_those_of_the_next_step() -> None:
    assert faults() > 1000, "else there is nothing to keep"
    assert faults("keep") < 100  # pages of 4608
