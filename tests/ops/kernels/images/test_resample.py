"""Generated kernels of resampling give the bits of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ops.kernels.images import resample
from graphflow.ops.kernels.images.resample import COORDINATES, MODES, ResampleRule, table_for


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transpose", [False, True])
def test_generated_kernels_give_the_bits_of_numpy(
    mode: str, axis: int, transpose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(axis)
    shape = (3, 2, 19, 35)
    x = random.normal(size=shape).astype("float32")
    x[1, 1, 3, 4] = np.nan
    for m in (1, 7, 40):
        for coordinates in COORDINATES[:5]:
            rule = ResampleRule(mode, coordinates, antialias=m == 7)
            table = table_for(shape[axis], m, rule, transpose)
            sizes = (*shape[:axis], m, *shape[axis + 1 :])
            results: list[Any] = []
            for generated in (True, False):
                monkeypatch.setattr(resample, "is_jit_enabled", lambda on=generated: on)
                results.append(np.full(sizes, np.inf, "float32"))
                resample.resample(np, results[-1], x, axis, table)
            assert np.array_equal(*results, equal_nan=True), (m, coordinates)


def test_a_recorded_step_gives_the_same_bits_on_two_threads() -> None:
    x = np.random.default_rng(0).normal(size=(5, 7, 20, 24)).astype("float32")
    fed = gf.placeholder("float32", x.shape)
    y = gf.nn.interpolate(fed, scale=2.0, mode="linear")
    grad = gf.gradients(gf.sum(y * y), [fed])[0]
    results = []
    for threads in (1, 2):
        with gf.Session(gf.Cluster.here(devices=["cpu:0"], threads=threads)) as session:
            results += [session.run([y, grad], {fed: x}) for _ in range(3)]
    for result in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(result, results[0], strict=True))
