"""Atomic steps of loops lose no write of another thread, and are Python's on one thread."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from graphflow.errors import CompileError
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.ops.kernels.jit.thread_pool import Pool

SOURCE = """
from graphflow.ops.kernels.compiled_loops.atomics import atomic_add, atomic_load, yield_thread


def count(whole, real, times):
    seen = 0
    for i in range(times):
        seen = max(seen, atomic_add(whole, 1, 3))
        atomic_add(real, 0, 0.5)
        yield_thread()
    return seen + atomic_load(whole, 1)


def wrong(narrow):
    atomic_add(narrow, 0, 1)
"""


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = Path(tmp_path_factory.mktemp("atomics")) / "atomic_loops.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("atomic_loops", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_write_is_lost(loops: ModuleType) -> None:
    whole, real, count = np.zeros(2, np.int64), np.zeros(1), native(loops, "count")
    with closing(Pool(3)) as pool:
        pool.run(lambda _: count(whole, real, 20_000), 3)
    assert whole.tolist() == [0, 180_000] and real[0] == 30_000.0


def test_one_thread_counts_as_python_does(loops: ModuleType) -> None:
    found = []
    for count in (loops.count, native(loops, "count")):
        whole, real = np.array([5, 2]), np.array([0.25])
        found.append((count(whole, real, 4), whole.tolist(), real.tolist()))
    assert found[0] == found[1] == (25, [5, 14], [2.25])


def test_arrays_of_32_bits_are_refused(loops: ModuleType) -> None:
    with pytest.raises(CompileError, match="atomic_add"):
        native(loops, "wrong")(np.zeros(1, np.int32))
