"""How data move to a "gpu" device and back, with a stand-in for CuPy (`tests/gpu/fake_cupy.py`).

It shows that what a GPU needs of the cluster, the cost model, partitions and programs is there:
copies at the border, synchronisation, memory limits. What kernels do on a real GPU the tests marked
`gpu` show.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import DeviceError
from graphflow.placement.clusters.machine.host_facts import gpu_memory
from tests.gpu import cuda_on_cpu, fake_cupy

pytestmark = pytest.mark.skipif(
    cuda_on_cpu.explain_missing_compiler() is not None,
    reason=str(cuda_on_cpu.explain_missing_compiler()),
)


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[list[str]]:
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    yield fake_cupy.install(monkeypatch, version="13.6.0").crossings


def test_a_graph_trains_across_a_cpu_and_a_gpu(crossings: list[str]) -> None:
    x = gf.placeholder("float32", (None, 6))
    with gf.device("gpu"):
        w = gf.variable(np.full((6, 4), 0.1, "float32"))
        h = gf.nn.relu(x @ w)
    with gf.device("cpu"):
        v = gf.variable(np.full((4, 1), 0.1, "float32"))
        loss = gf.mean((h @ v - 1.0) ** 2)
    train = gf.optim.SGD(0.1, momentum=0.9).minimize(loss)
    data = np.random.default_rng(0).random((5, 6), "float32")
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "gpu:0"])) as both:
        losses = [float(both.run([loss, train], {x: data})[0]) for _ in range(5)]
        placement = both.plan([loss, train]).placement
        there = both.get(w)
    assert losses[-1] < losses[0]
    assert placement["variable"] == "/worker:0/gpu:0"
    assert placement["variable_1"] == "/worker:0/cpu:0"
    assert "in" in crossings and "out" in crossings
    assert type(there) is np.ndarray

    plain_x = gf.placeholder("float32", (None, 6))
    plain_w = gf.variable(np.full((6, 4), 0.1, "float32"))
    plain_v = gf.variable(np.full((4, 1), 0.1, "float32"))
    plain = gf.mean((gf.nn.relu(plain_x @ plain_w) @ plain_v - 1.0) ** 2)
    step = gf.optim.SGD(0.1, momentum=0.9).minimize(plain)
    with gf.Session() as here:
        for _ in range(5):
            here.run([plain, step], {plain_x: data})
        assert np.allclose(here.get(plain_w), there, rtol=1e-5)


def test_a_gpu_that_is_not_there_is_refused_by_name(crossings: list[str]) -> None:
    with pytest.raises(DeviceError, match="gpu:1"):
        gf.Cluster.here(devices=["gpu:1"])


def test_a_gpus_memory_is_known_without_taking_any_of_it(
    crossings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context takes some hundred MB, and GPUs in exclusive mode allow one process to have one."""

    def fails(*given: object) -> None:
        raise AssertionError("this begins a context")

    monkeypatch.setattr(fake_cupy.Runtime, "memGetInfo", fails)
    monkeypatch.setattr(fake_cupy.Device, "__enter__", fails)
    assert gpu_memory("gpu:0") == 1 << 30


def test_bfloat16_on_a_cupy_that_has_none_is_refused_with_a_remedy(crossings: list[str]) -> None:
    x = gf.placeholder("float32", (2,))
    with gf.device("gpu"):
        y = gf.exp(x.astype("bfloat16"))
    both = gf.Session(gf.Cluster.here(devices=["cpu:0", "gpu:0"]))
    with both as s, pytest.raises(DeviceError, match="has no bfloat16; update it to 14"):
        s.run(y, {x: [1.0, 2.0]})


def test_float16_is_computed_in_float32_there_too(crossings: list[str]) -> None:
    x = gf.placeholder("float16", (None,))
    with gf.device("gpu"):
        y = gf.mean(x)
    with gf.Session(gf.Cluster.here(devices=["cpu:0", "gpu:0"])) as s:
        assert s.run(y, {x: np.full(1000, 1000, "float16")}) == 1000
