"""Generated pooling against numpy's: values, indices of equals and NaN, transposes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphflow.errors import ShapeError
from graphflow.ir.op import REGISTRY
from graphflow.ir.spec import spec
from graphflow.ops.kernels.images import pooling as native
from graphflow.ops.windows.pooling_rules import pooled_shape, windows_of
from tests.ops.kernels.sharing import check_threads

Array = np.ndarray[Any, Any]


def five(x: Array, divisor: Any, attrs: dict[str, Any]) -> list[Array]:
    """Largest elements, their taps, cotangents put back there; means, and their transpose."""
    run = REGISTRY
    (y,) = run["max_pool"].run(np, [x], attrs)
    (chosen,) = run["max_pool_taps"].run(np, [x, y], attrs)
    g = np.arange(y.size, dtype="float32").reshape(y.shape) % 17 + 1
    (back,) = run["pool_put"].run(np, [g, chosen], {**attrs, "sizes": x.shape[2:]})
    means = {**attrs, "divisor": divisor}
    (mean,) = run["avg_pool"].run(np, [x], means)
    (spread,) = run["avg_pool_grad"].run(np, [g], {**means, "sizes": x.shape[2:]})
    return [y, chosen, back, mean, spread]


@st.composite
def cases(draw: Any) -> tuple[Array, Any, dict[str, Any]]:
    rank = draw(st.integers(1, 2))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    kernel = each(1, 4)
    padding = tuple((draw(st.integers(0, k - 1)), draw(st.integers(0, k - 1))) for k in kernel)
    attrs = {
        "kernel": kernel,
        "stride": each(1, 4),
        "padding": padding,
        "dilation": each(1, 2),
        "ceil_mode": draw(st.booleans()),
    }
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 5)), *each(1, 45))
    try:
        out = pooled_shape(spec("float32", shape), **attrs)
    except ShapeError:
        assume(False)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x = rng.integers(-4, 4, shape).astype("float32")
    special = draw(st.sampled_from([None, np.nan, np.inf, -np.inf]))
    if special is not None:
        x[rng.random(shape) < 0.2] = special
    assume(0 not in out)
    return x, draw(st.sampled_from(["padded", "inside", 3])), attrs


@given(cases())
@settings(max_examples=150, deadline=None)
def test_generated_kernels_give_what_numpy_does(case: tuple[Array, Any, dict[str, Any]]) -> None:
    x, divisor, attrs = case
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.delenv("GRAPHFLOW_JIT", raising=False)
        have = five(x, divisor, attrs)
        patch.setenv("GRAPHFLOW_JIT", "off")
        want = five(x, divisor, attrs)
    for a, b in zip(have[:3], want[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(have[3:], want[3:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)
    x = np.random.default_rng(0).normal(size=(7, 30, 57, 49)).astype("float32")
    attrs = {
        "kernel": (3, 3), "stride": (2, 2), "padding": ((1, 1),) * 2, "dilation": (1, 1),
        "ceil_mode": False,
    }  # fmt: skip
    alone = five(x, "inside", attrs)
    assert native.is_supported(np, x, windows_of(alone[0], **attrs))
    check_threads(lambda: five(x, "inside", attrs), alone)
