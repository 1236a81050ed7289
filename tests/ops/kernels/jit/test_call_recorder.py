"""Parts of native calls, collected and run by threads: what each would have done at once."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.call_recorder import current_recorder
from graphflow.ops.kernels.jit.call_table_driver import copy_task
from graphflow.ops.kernels.jit.compiler import compiler
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import Pool, run_native_parts, run_parts, use_pool


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_parts_with_scratch_memory_of_several_sizes_do_not_disturb_each_other(threads: int) -> None:
    task = copy_task(0)
    copy = compiler().function(task.name, task.text)
    random = np.random.default_rng(0)
    rows = [random.integers(0, 255, 4096 + 64 * (i % 3), np.uint8) for i in range(11)]
    found = [np.zeros_like(row) for row in rows]

    def part(i: int) -> None:
        own = scratch(np, "rows of a test", rows[i].shape, np.uint8)
        own[:] = i  # before any collected call runs
        call_native(copy, (address(rows[i]), address(own)), (), 0, rows[i].nbytes)
        call_native(copy, (address(own), address(found[i])), (), 0, rows[i].nbytes)

    with closing(Pool(threads)) as pool, use_pool(pool):
        for _ in range(3):
            run_native_parts(part, len(rows))
            for have, want in zip(found, rows, strict=True):
                np.testing.assert_array_equal(have, want)
                have[:] = 0


def test_parts_inside_of_collected_parts_run_in_order_on_the_same_thread() -> None:
    seen: list[tuple[int, int]] = []

    def part(i: int) -> None:
        assert current_recorder() is not None
        run_parts(lambda j: seen.append((i, j)), 3)
        run_native_parts(lambda j: seen.append((i, 3 + j)), 2)

    with closing(Pool(2)) as pool, use_pool(pool):
        run_native_parts(part, 4)
    assert seen == [(i, j) for i in range(4) for j in range(5)]
    assert current_recorder() is None


def test_an_error_while_calls_are_collected_ends_the_collection() -> None:
    def part(i: int) -> None:
        raise IndexError(f"part {i}")

    with closing(Pool(2)) as pool, use_pool(pool):
        with pytest.raises(IndexError, match="part 0"):
            run_native_parts(part, 4)
        assert current_recorder() is None
