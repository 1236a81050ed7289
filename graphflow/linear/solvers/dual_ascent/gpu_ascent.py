"""Dual coordinate ascent by rows on an NVIDIA GPU: "tpa".

The table, the dual variables and the weights lie in the GPU's memory. A block of threads visits a
row (`ops/kernels/cuda/coordinate_rows.py`); some hundred blocks run at the same time, and their
steps do not know of each other. Certificates are computed here, from the dual variables alone. If
the gap does not fall from one to the next, the variables of the best certificate come back, and
half as many blocks run.

Source: Parnell et al., IPDPS Workshops 2017 (TPA-SCD).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.errors import DeviceError, LinearModelError
from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.dual_ascent.sequential_ascent import DualAscent, first_dual
from graphflow.ops.kernels.cuda.coordinate_rows import MOST_THREADS, NAME, row_source
from graphflow.ops.kernels.cuda.cupy_module import import_cupy
from graphflow.ops.kernels.cuda.nvrtc import compile_module

_BLOCKS = 8
"""Blocks for each multiprocessor at first."""
_APART = 32
"""Rows for each block, at least: of few rows that are visited at once, few share much."""


def ascend_on_gpu(problem: LinearProblem, monitor: FitMonitor, *, seed: int = 0) -> Floats:
    """Solve a problem with an l2 penalty alone and no free intercept on a GPU.

    Args:
        problem: its dense matrix is C-contiguous, its sparse one CSR.
        monitor: is given certified models.
        seed: of the order of rows; the result depends on more than that.

    Returns:
        the dual variables.

    Raises:
        LinearModelError: there is no GPU or no CuPy; says what to use instead.
    """
    beta = first_dual(problem)
    GpuAscent(problem, beta, np.random.default_rng(seed), monitor, _find_gpu()).run(monitor)
    return beta


def _find_gpu() -> Any:
    """Return CuPy of a machine with a GPU."""
    try:
        cupy = import_cupy()
    except DeviceError as error:
        raise LinearModelError(f"solver='tpa': {error}; or use solver='sdca'") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # of the driver, if there is none
        reason = f"CuPy finds no GPU: {error}"
    else:
        if count:
            return cupy
        reason = "this machine has no NVIDIA GPU"
    raise LinearModelError(f"solver='tpa': {reason}; use solver='sdca', which runs on processors")


class GpuAscent(DualAscent):
    """Visits rows on a GPU.

    Args:
        problem: the problem.
        beta: the dual variables, which follow.
        random: of the order of rows.
        monitor: says whether the gap still falls.
        cupy: CuPy.

    Attributes:
        blocks: that run at the same time, at most.
    """

    def __init__(
        self, problem: LinearProblem, beta: Floats, random: np.random.Generator,
        monitor: FitMonitor, cupy: Any,
    ) -> None:  # fmt: skip
        super().__init__(problem, beta, random)
        self._cupy, self._monitor, self._best = cupy, monitor, beta.copy()
        x, place = problem.x, cupy.asarray
        if problem.is_sparse:
            values, places, offsets = (place(a) for a in (x.data, x.indices, x.indptr))
            row, index = x.nnz / max(problem.rows, 1), x.indices.dtype
        else:
            values, places = place(x.reshape(-1)), place(np.zeros(1, np.int64))
            offsets, row, index = places, float(problem.columns), None
        numbers = np.array([1.0 / problem.l2, problem.bias, problem.loss.parameter])
        self._table = (values, places, offsets)
        self._rows = tuple(map(place, (self.squares, problem.y, problem.c, numbers)))
        self._threads = 2 ** min(max(round(math.log2(max(row, 1.0))), 5), 8)
        assert self._threads <= MOST_THREADS
        device = cupy.cuda.Device().id
        processors = cupy.cuda.runtime.getDeviceProperties(device)["multiProcessorCount"]
        self.blocks = max(1, min(_BLOCKS * processors, problem.rows // _APART))
        self._kernel = compile_module(cupy, row_source(x.dtype, index)).get_function(NAME)

    def _go(self, wanted: float) -> float:
        problem, cupy = self.problem, self._cupy
        passes = max(1, round(wanted))
        beta, w = cupy.asarray(self.beta), cupy.asarray(self.w)
        sizes = np.uint64(problem.rows), np.uint64(problem.columns), np.uint64(problem.loss.code)
        for _ in range(passes):
            order = cupy.asarray(self.random.permutation(problem.rows))
            given = (order, *self._table, *self._rows, beta, w, *sizes)
            self._kernel((self.blocks,), (self._threads,), given)
        found = beta.get()
        self.beta[:] = found if np.isfinite(found).all() else self._best
        return float(passes)

    def _go_on(self) -> None:
        if not self._monitor.is_stalled:
            self._best[:] = self.beta
            return
        self.blocks = max(1, self.blocks // 2)
        self.beta[:] = self._best
        self._compute_weights()


__all__ = ["GpuAscent", "ascend_on_gpu"]
