"""Calibration of a GPU: what it is busy with is told from what the host takes to start it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from graphflow.errors import DeviceError
from graphflow.ir.op import REGISTRY
from graphflow.ir.spec import spec
from graphflow.placement.calibration import calibrate, measure, measure_gpu, profile_file
from graphflow.placement.calibration.measure_gpu import (
    GpuKernelTimer,
    gpu_product,
    measure_gpu_link,
)
from graphflow.placement.calibration.roofline import Rates
from tests.gpu import fake_cupy

SOME = ("add", "pow", "gelu", "tanh", "mean", "softmax", "matmul", "reshape", "cumsum", "normal",
        "eig", "gather")  # fmt: skip


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.World:
    """A GPU that computes as a CPU does: some ops, in sizes for that."""
    some = {name: REGISTRY[name] for name in SOME if name in REGISTRY}
    monkeypatch.setattr(measure, "REGISTRY", some)
    monkeypatch.setattr(measure_gpu, "SIDES", (24, 256, 1 << 16))
    monkeypatch.setattr(measure_gpu, "LARGER", (8, 32, 128, 192))
    monkeypatch.setattr(measure_gpu, "STREAMS", (1 << 12, 1 << 14, 1 << 18))
    monkeypatch.setattr(measure_gpu, "FILLER_ELEMENTS", 1 << 14)
    return fake_cupy.install(monkeypatch)


@pytest.fixture
def clock(world: fake_cupy.World) -> Iterator[GpuKernelTimer]:
    with measure_gpu._exclusive_stream() as (cupy, stream):
        yield GpuKernelTimer(cupy, stream)


def test_a_gpu_is_measured_in_the_form_of_a_profile_and_its_memory_goes_back(
    world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_gpu, "_has_nvmath", lambda: True)
    gpu = measure_gpu.measure_gpu()
    made = {"format": profile_file.FORMAT, "devices": {"gpu": gpu}, "links": {"gpu": [1e-5, 1e10]}}
    assert profile_file.is_profile(json.loads(json.dumps(made)))
    assert gpu["product"] == "Imaginary 1000, CuPy 14.2.0, nvmath-python" == gpu_product()
    assert gpu["cache_bytes"] == 1 << 22
    for points in (gpu["traffic"], *gpu["matmul"].values()):
        assert points == sorted(points) and all(seconds > 0 for _, seconds in points)
        assert [s for _, s in points] == sorted(s for _, s in points)
    assert not world.violations and world.taken == 0


def test_what_graphs_start_has_their_launch_and_what_is_called_that_of_a_call(
    clock: GpuKernelTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = clock.ops()
    assert "eig" not in ops
    for name in ("add", "gelu", "softmax", "reshape", "matmul"):
        assert ops[name]["launch"] == clock.launch
    assert ops["cumsum"]["launch"] <= clock.called["cumsum"]
    monkeypatch.setattr(GpuKernelTimer, "_is_captured", lambda self, call: False)
    ops = clock.ops()
    for name in ("cumsum", "matmul"):
        assert ops[name]["launch"] == clock.called[name]


def test_graphs_take_what_neither_waits_nor_copies_from_the_host(
    clock: GpuKernelTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = clock._xp.ones(8, "float32")
    assert clock._is_captured(lambda: clock._xp.add(few, few, out=few))
    assert not clock._is_captured(lambda: float(few[0]))

    def product() -> None:
        raise NotImplementedError("calling cuBLAS API during stream capture is unsupported")

    for has in (True, False):
        monkeypatch.setattr(measure_gpu, "_has_nvmath", lambda has=has: has)
        assert clock._is_captured(product) == has


def test_an_op_that_is_several_kernels_of_cupys_and_one_of_ours_goes_by_a_single_ones_rate(
    clock: GpuKernelTimer,
) -> None:
    ops = clock.ops()
    single = max(ops[name]["rate"] for name in ("add", "tanh") if "rate" in ops[name])
    assert ops["gelu"]["rate"] == ops["softmax"]["rate"] == single


@pytest.mark.parametrize("has", [False, True])
def test_products_of_16_bits_are_measured_where_programs_compute_them(
    has: bool, world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_gpu, "_has_nvmath", lambda: has)
    gpu = measure_gpu.measure_gpu()
    assert ("float16" in gpu["matmul"]) == has


def test_the_hosts_part_of_a_call_is_not_counted(
    clock: GpuKernelTimer, world: fake_cupy.World
) -> None:
    def call() -> None:
        time.sleep(40e-3)  # the host starts it
        world.enqueue(lambda: time.sleep(1e-3))

    assert 1e-3 <= clock.busy(call) < 20e-3
    assert clock.seconds(call) >= 41e-3


def test_a_small_card_is_measured_with_what_has_room(
    world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.memory = 4 << 20
    gpu = measure_gpu.measure_gpu()
    assert [size for size, _ in gpu["traffic"]] == [12.0 * (1 << 12), 12.0 * (1 << 14)]
    assert [flops for flops, _ in gpu["matmul"]["float64"]] == [2.0 * 8**3, 2.0 * 32**3]
    assert world.taken == 0


def test_where_no_graph_can_be_made_a_kernel_starts_by_a_call(
    world: fake_cupy.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_not_supported(self: Any, mode: int | None = None) -> None:
        raise fake_cupy.CUDARuntimeError("cudaErrorNotSupported")

    monkeypatch.setattr(fake_cupy.Stream, "begin_capture", raise_not_supported)
    with measure_gpu._exclusive_stream() as (cupy, stream):
        assert GpuKernelTimer(cupy, stream).launch > 0


def test_the_way_to_a_gpu_is_timed_both_ways(world: fake_cupy.World) -> None:
    seconds = measure_gpu_link((1 << 10, 1 << 20), rounds=3)
    assert len(seconds) == 2 and min(seconds) > 0
    assert world.crossings == ["in", "out"] * 8


def test_where_cupy_finds_no_gpu_there_is_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch, devices=0)
    monkeypatch.setattr(fake_cupy.Runtime, "getDeviceProperties", fake_cupy.Device)
    assert gpu_product() is None
    with pytest.raises(DeviceError, match="gpu:0"):
        measure_gpu_link((1,))


# On a real one --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> tuple[dict[str, Any], float]:
    start = time.perf_counter()
    found = measure_gpu.measure_gpu()
    return found, time.perf_counter() - start


@pytest.mark.gpu
def test_a_real_gpu_is_measured_in_some_seconds_and_its_memory_goes_back(
    real: tuple[dict[str, Any], float],
) -> None:
    import cupy

    gpu, taken = real
    print(f"\n{gpu['product']}: {taken:.2f} s", json.dumps({**gpu, "ops": {}}))
    print(json.dumps(gpu["ops"]))
    assert taken < 15  # 6 where kernels of CuPy's are compiled already
    assert cupy.get_default_memory_pool().total_bytes() < 64 << 20


@pytest.mark.gpu
def test_speeds_of_a_real_gpu_are_such_as_gpus_have(real: tuple[dict[str, Any], float]) -> None:
    gpu, _ = real
    assert 2e-7 < gpu["launch"] < 1e-5 < gpu["call"]
    moved, seconds = gpu["traffic"][-1]
    assert 5e10 < moved / seconds < 2e13
    for name, most in (("float32", 2e14), ("float64", 1e14), ("float16", 3e15)):
        if name in gpu["matmul"]:
            flops, seconds = gpu["matmul"][name][-1]
            assert 1e11 < flops / seconds < most
    rates = {name: entry["rate"] for name, entry in gpu["ops"].items() if "rate" in entry}
    assert len(rates) > 100 and max(rates.values()) < 5e14
    assert rates["add"] < 2e13


@pytest.mark.gpu
@pytest.mark.parametrize("name, side", [("add", 8192), ("add", 3000), ("matmul", 3000)])
def test_a_real_gpu_takes_what_is_predicted(
    name: str, side: int, real: tuple[dict[str, Any], float]
) -> None:
    import cupy

    x = spec("float32", (side, side))
    predicted = Rates(real[0]).seconds(REGISTRY[name], (x, x), (x,), {})
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        a, b, out = (cupy.ones((side, side), "float32") for _ in range(3))
        taken = GpuKernelTimer(cupy, stream).busy(partial(getattr(cupy, name), a, b, out=out))
    print(f"\n{name} {side}: predicted {predicted:.2e} s, took {taken:.2e} s")
    assert 0.5 < predicted / taken < 2


@pytest.mark.gpu
def test_the_way_to_a_real_gpu_is_such_as_slots_have() -> None:
    link = calibrate.fit_link(calibrate.SIZES, measure_gpu_link(calibrate.SIZES))
    print(f"\nlink {link[0]:.2e} s, {link[1]:.2e} bytes/s")
    assert link[0] < 1e-3 and 5e8 < link[1] < 5e11
    assert np.isfinite(link).all()
