"""NaN among numbers that are compared: every op has numpy's answer, by kernels and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate

INF, NAN = np.inf, np.nan
MIXED = np.array(
    [[1, NAN, 3, NAN], [NAN, 2, -INF, 0], [1, 2, 3, 4], [INF, NAN, -INF, -NAN], [0, 0, NAN, 1]]
)
BOUNDS = np.array([0, 1, 2, NAN])
Make = Callable[[Any], Any]


def _largest_first(x: Any) -> Any:
    return np.flip(np.sort(x, axis=-1), -1)


OPS: dict[str, tuple[Make, Make]] = {
    "argmax": (lambda x: gf.argmax(x, axis=-1), lambda x: np.argmax(x, axis=-1)),
    "argmax of columns": (lambda x: gf.argmax(x, axis=0), lambda x: np.argmax(x, axis=0)),
    "argmax of all": (gf.argmax, np.argmax),
    "argmin": (lambda x: gf.argmin(x, axis=-1), lambda x: np.argmin(x, axis=-1)),
    "argmin of columns": (lambda x: gf.argmin(x, axis=0), lambda x: np.argmin(x, axis=0)),
    "max": (lambda x: gf.max(x, axis=-1), lambda x: np.max(x, axis=-1)),
    "max of all": (gf.max, np.max),
    "min": (lambda x: gf.min(x, axis=-1), lambda x: np.min(x, axis=-1)),
    "min of columns": (lambda x: gf.min(x, axis=0), lambda x: np.min(x, axis=0)),
    "maximum": (lambda x: gf.maximum(x, 1.5), lambda x: np.maximum(x, 1.5)),
    "minimum": (lambda x: gf.minimum(x, 1.5), lambda x: np.minimum(x, 1.5)),
    "clip": (lambda x: gf.clip(x, 0, 2), lambda x: np.clip(x, 0, 2)),
    "relu": (gf.nn.relu, lambda x: np.maximum(x, 0)),
    "sign": (gf.sign, np.sign),
    "sort": (gf.sort, np.sort),
    "sort of columns": (lambda x: gf.sort(x, axis=0), lambda x: np.sort(x, axis=0)),
    "sort, descending": (lambda x: gf.sort(x, descending=True), _largest_first),
    "argsort": (gf.argsort, lambda x: np.argsort(x, kind="stable")),
    "top_k": (lambda x: gf.top_k(x, 2)[0], lambda x: _largest_first(x)[..., :2]),
    "top_k, smallest": (
        lambda x: gf.top_k(x, 2, largest=False)[0], lambda x: np.sort(x, axis=-1)[..., :2],
    ),
    "cummax": (
        lambda x: gf.cummax(x, axis=-1), lambda x: np.maximum.accumulate(x, axis=-1),
    ),
    "median": (lambda x: gf.median(x, axis=-1), lambda x: np.median(x, axis=-1)),
    "quantile": (
        lambda x: gf.quantile(x, 0.25, axis=-1), lambda x: np.quantile(x, 0.25, axis=-1),
    ),
    "searchsorted": (
        lambda x: gf.searchsorted(BOUNDS.astype(x.dtype), gf.reshape(x, (-1,))),
        lambda x: np.searchsorted(BOUNDS.astype(x.dtype), x.reshape(-1)),
    ),
    "count_nonzero": (gf.count_nonzero, np.count_nonzero),
    "to bool": (lambda x: gf.astype(x, "bool"), lambda x: x.astype(bool)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("times", [1, 40], ids=["few", "many"])
@pytest.mark.parametrize("name", OPS)
def test_nan_is_where_numpy_has_it(name: str, times: int, dtype: str) -> None:
    ours, numpys = OPS[name]
    values = np.tile(MIXED, (times, times)).astype(dtype)
    x = gf.placeholder(dtype, values.shape)
    with np.errstate(all="ignore"):
        wanted = numpys(values)
        with gf.Session() as s:
            by_program = s.run(ours(x), {x: values})
        (by_kernel,) = evaluate([ours(x)], {x: values})
    for have in (by_program, by_kernel):
        if name in ("median", "quantile"):
            np.testing.assert_allclose(have, wanted, rtol=1e-6)
        else:
            np.testing.assert_array_equal(have, wanted)
