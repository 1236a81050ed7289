"""What the ops on matrices share: batches in blocks, and errors that name the matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import CheckError
from graphflow.ir.op import REGISTRY
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool

RNG = np.random.default_rng(0)
BATCH = RNG.standard_normal((40, 20, 20)) + 20 * np.eye(20)
SIGNALS = RNG.standard_normal((60, 3, 512)).astype("float32")
SPECTRA = (SIGNALS + 1j).astype("complex64")
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "svd": (BATCH, {"full_matrices": True}),
    "eigh": (BATCH, {}),
    "inv": (BATCH, {}),
    "qr": (BATCH, {"mode": "reduced"}),
    "fft": (SPECTRA, {"axes": (2,), "inverse": True, "norm": "ortho"}),
    "rfft": (SIGNALS, {"axis": 2, "norm": "backward", "inner": 1.0}),
    "irfft": (SPECTRA, {"size": 1022, "axis": 2, "norm": "backward", "inner": 0.5}),
}


BY_SHAPE = ("fft", "rfft", "irfft")
"""Few and short transforms go to numpy: how a matrix is transformed depends on the whole shape."""


@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_threads_gives_the_same_bits_which_are_those_of_each_alone(name: str) -> None:
    array, attrs = CALLS[name]
    op = REGISTRY[name]
    with threadpool_limits(1):
        alone = op.run(np, [array], attrs)
        for i in () if name in BY_SHAPE else (0, 7, len(array) - 1):
            for whole, one in zip(alone, op.run(np, [array[i : i + 1]], attrs), strict=True):
                assert whole[i : i + 1].tobytes() == one.tobytes()
        for threads in (2, 3):
            pool = Pool(threads)
            with use_pool(pool):
                shared = op.run(np, [array], attrs)
            pool.close()
            for a, b in zip(alone, shared, strict=True):
                assert a.shape == b.shape and a.tobytes() == b.tobytes()


def test_a_matrix_at_fault_is_named_in_a_batch_that_threads_share() -> None:
    batch = BATCH.copy()
    batch[31] = 1.0
    pool = Pool(2)
    with use_pool(pool), pytest.raises(CheckError, match=r"index \(31,\) of shape \(20, 20\)"):
        REGISTRY["inv"].run(np, [batch], {})
    pool.close()


def test_a_matrix_without_batch_is_called_the_matrix() -> None:
    with pytest.raises(CheckError, match=r"^the matrix of shape \(2, 2\) is singular"):
        REGISTRY["inv"].run(np, [np.ones((2, 2))], {})
