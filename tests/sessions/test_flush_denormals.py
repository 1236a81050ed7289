"""Denormal numbers are kept, or count as zero where a session says so: on every thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DeviceError
from graphflow.ops.kernels.jit import denormals
from graphflow.ops.kernels.jit.denormals import FlushDenormals

pytestmark = pytest.mark.skipif(not denormals.is_x86(), reason="needs an x86 processor")

SIZE = 300_000  # threads share it
SMALL = np.full(SIZE, 1e-20, np.float32)


def product(values: np.ndarray) -> np.ndarray:
    return values * np.float32(1e-20)  # 1e-40 is denormal


@pytest.mark.every(5)
@pytest.mark.parametrize("flush", [False, True], ids=["kept", "flushed"])
@pytest.mark.parametrize(
    "cluster",
    [
        pytest.param(lambda: gf.Cluster.here(devices=["cpu:0"], threads=1), id="one thread"),
        pytest.param(lambda: gf.Cluster.here(devices=["cpu:0"], threads=3), id="three threads"),
        pytest.param(lambda: gf.Cluster.local(workers=1, threads=2), id="a worker"),
    ],
)
def test_denormal_results_and_updates_are_zero_only_where_the_session_says_so(
    cluster: Callable[[], gf.Cluster], flush: bool
) -> None:
    x = gf.placeholder("float32", (SIZE,))
    v = gf.variable(SMALL, name="v")
    y, update = x * 1e-20, gf.assign(v, v * 1e-20)
    with gf.Session(cluster(), flush_denormals=flush, deadline=60.0) as session:
        for _ in range(3):  # by the general and by the short path
            v_before = np.asarray(session.run(y, {x: SMALL}))
            assert ((v_before == 0) == flush).all()
        session.run(update)
        assert ((session.run(v) == 0) == flush).all()
    assert product(SMALL).all()  # this thread is as it was


def test_parts_in_python_take_over_the_mode_of_the_caller() -> None:
    from graphflow.ops.kernels.jit.thread_pool import Pool

    pool = Pool(3)
    found = np.zeros((6, SIZE), np.float32)

    def part(i: int) -> None:
        found[i] = product(SMALL)

    with FlushDenormals():
        pool.run(part, 6)
    assert not found.any()
    pool.run(part, 6)
    pool.close()
    assert found.all()


def test_other_processors_and_other_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="flush_denormals must be"):
        gf.Session(gf.Cluster.here(devices=["cpu:0"]), flush_denormals="yes")  # type: ignore[arg-type]
    monkeypatch.setattr(denormals.platform, "machine", lambda: "arm64")
    with pytest.raises(DeviceError, match="needs an x86 processor, this is arm64"):
        FlushDenormals()
