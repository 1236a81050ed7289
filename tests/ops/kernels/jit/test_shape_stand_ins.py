"""Arrays of a shape without elements have the shapes of real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from graphflow.ops.kernels.jit.kernel_recording import NotRecordable
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.shape_stand_ins import ShapeStandIn, SlotCount
from graphflow.ops.kernels.jit.thread_pool import run_parts

VIEWS: list[Callable[[Any], Any]] = [
    lambda a: a[1:, ::2], lambda a: a[..., 1:3], lambda a: a[0], lambda a: a[:, :, ::-1],
    lambda a: a.reshape(4, -1), lambda a: a.reshape((2, 3, 2, 2)), lambda a: a.swapaxes(0, 2),
    lambda a: a.transpose(1, 2, 0), lambda a: np.moveaxis(a, 0, 2), lambda a: a + a[0],
    lambda a: a.astype("float64"), lambda a: list(a)[1], lambda a: np.add(a, a, out=a),
]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_results_have_the_shapes_of_those_of_arrays(view: Callable[[Any], Any]) -> None:
    array = np.ones((2, 3, 4), "float32")
    found, want = view(ShapeStandIn(1 << 48, array.shape, array.dtype)), view(array)
    assert (found.shape, found.dtype) == (want.shape, want.dtype)


def test_whoever_needs_elements_is_refused() -> None:
    array = ShapeStandIn(1 << 48, (2, 3), "float32")
    needs: list[Callable[[Any], Any]] = [np.asarray, np.linalg.norm, np.add.reduce]
    for each in needs:
        with pytest.raises(NotRecordable):
            each(array)


@pytest.mark.parametrize(("threads", "want"), [(1, 800), (2, 1600), (8, 2400)])
def test_each_thread_has_the_largest_memory_of_its_parts(threads: int, want: int) -> None:
    count = SlotCount(threads)

    def part(i: int) -> None:
        memory = scratch(np, "of a part", (80 + 20 * (i == 1),), np.float64)
        memory[...] = 0

    count.record(lambda: run_parts(part, 3))
    assert sum(count.slots.values()) == pytest.approx(want, rel=0.25)
