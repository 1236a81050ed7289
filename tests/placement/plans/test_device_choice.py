"""The choice between a CPU and a GPU, in plans for a machine that is not here."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import MemoryLimitError
from graphflow.placement.clusters.devices import CLIENT, Device, Link, Worker
from graphflow.placement.plans.device_choice import describe_choice

CPU, GPU = "/worker:0/cpu:0", "/worker:0/gpu:0"


def machine(gpu_memory: int = 1 << 30, gpus: bool = True) -> gf.Cluster:
    """A CPU of 100 Gflop/s, and a GPU of 10 Tflop/s that is 50 µs and 10 GB/s away."""
    cpu = Device(CPU, "cpu", 1 << 34, flops=1e11, bandwidth=1e10, launch=1e-6)
    gpu = Device(GPU, "gpu", gpu_memory, flops=1e13, bandwidth=1e12, launch=1e-6)
    devices = (cpu, gpu) if gpus else (cpu,)
    near, ends = (CPU, CLIENT), (CPU, CLIENT, *([GPU] if gpus else []))
    links = tuple(
        Link(a, b, *((0.0, 1e12) if {a, b} <= {*near} else (50e-6, 1e10)))
        for a in ends for b in ends if a != b
    )  # fmt: skip
    return gf.Cluster((Worker(0, None, devices),), links, kind="hypothetical")


def step(batch: int, width: int, layers: int = 4) -> list[gf.Tensor]:
    x = gf.constant(np.ones((batch, width), "float32"))
    h = x
    for i in range(layers):
        h = gf.tanh(h @ gf.variable(np.ones((width, width), "float32"), name=f"w{i}"))
    loss = gf.mean(h)
    return [loss, gf.optim.SGD(0.1).minimize(loss)]


@pytest.mark.parametrize(("batch", "device"), [(4, CPU), (1024, GPU)])
def test_small_graphs_stay_on_the_cpu_and_large_ones_go_to_the_gpu(batch: int, device: str) -> None:
    plan = gf.plan(step(batch, 32 if device == CPU else 512), machine())
    assert {n.device for n in plan.nodes if n.finish > n.start} == {device}
    assert describe_choice(plan).startswith(f"{device}, ")
    assert f"chosen: {device}, " in str(plan) and "numbers: the same bits" in str(plan)


def test_a_plan_for_devices_of_one_kind_says_nothing_of_a_choice() -> None:
    plan = gf.plan(step(4, 32), machine(gpus=False))
    assert describe_choice(plan) == "" and "chosen" not in str(plan)


def test_a_step_of_more_memory_than_the_gpu_has_is_divided() -> None:
    fetches = step(64, 512, layers=8)
    room = int(8 * 512 * 512 * 4 / 1.2)  # of which the weights alone are 120 %
    plan = gf.plan(fetches, machine(room))
    assert 0 < plan.peak_memory[GPU] <= room
    assert plan.makespan < plan.baselines[f"one device: {CPU}"]
    with pytest.raises(MemoryLimitError):
        with gf.device("gpu"):
            pinned = step(64, 512, layers=8)
        gf.plan(pinned, machine(room // 2))
