"""Sessions that take the GPUs of this machine by themselves, with a stand-in for CuPy."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import graphflow as gf
from benchmarks.random_models import draw
from graphflow.cli.main import app
from graphflow.errors import ArgumentError, DeviceError, SessionError
from graphflow.placement.calibration import calibrate
from graphflow.placement.clusters.machine import host_facts, machine_devices
from graphflow.runtime.diagnostics import crash_recorder
from graphflow.runtime.gpu.gpu_backend import GpuBackend
from graphflow.runtime.host.host import DeviceHost
from graphflow.runtime.partitioning.partition import partition
from graphflow.runtime.worker import serving
from tests.gpu import cuda_on_cpu, fake_cupy
from tests.placement.speeds import profile, speeds

CPU, GPU = "/worker:0/cpu:0", "/worker:0/gpu:0"
X = np.random.default_rng(0).random((64, 256), "float32")
needs_compiler = pytest.mark.skipif(
    cuda_on_cpu.explain_missing_compiler() is not None,
    reason=str(cuda_on_cpu.explain_missing_compiler()),
)


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine whose GPUs were not looked for yet, and whose speeds are not kept."""
    monkeypatch.delenv("GRAPHFLOW_DEVICES")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    afresh = cache(machine_devices._look_for_gpus.__wrapped__)
    monkeypatch.setattr(machine_devices, "_look_for_gpus", afresh)


def install(
    monkeypatch: pytest.MonkeyPatch, devices: int = 1, memory: int = 1 << 30
) -> fake_cupy.World:
    """A machine with GPUs that compute a hundred times as fast as its CPU."""
    world = fake_cupy.install(monkeypatch, devices, memory)
    monkeypatch.setattr(calibrate, "measure_machine", make_profile)
    return world


def make_profile(kinds: Sequence[str]) -> dict[str, Any]:
    slow = speeds()
    quick = {
        "matmul": {k: [[f, s / 100] for f, s in points] for k, points in slow["matmul"].items()},
        "traffic": [[size, seconds / 100] for size, seconds in slow["traffic"]],
        "ops": {},
        "classes": {
            name: {**c, "launch": 1e-6, "rate": 1e11} for name, c in slow["classes"].items()
        },
        "product": calibrate.gpu_product(),
    }
    made = {"cpu": slow, "gpu": speeds(**quick)}
    links = {"gpu": [20e-6, 1e10], "thread": [1e-5, None]}
    return {
        **profile(links),
        "key": calibrate.machine_key(),
        "devices": {kind: made[kind] for kind in kinds},
        "steps": {"here": [1e-5, 3e-5], "gpu": [1e-5, 3e-5]},
    }


def note_opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with a GPU, and the numbers of the GPUs that are opened from now on."""
    install(monkeypatch)
    opened: list[int] = []
    begin = GpuBackend.__init__

    def note(self: GpuBackend, index: int) -> None:
        opened.append(index)
        begin(self, index)

    monkeypatch.setattr(GpuBackend, "__init__", note)
    return opened


def build_large_model(width: int = 256, layers: int = 3) -> tuple[gf.Tensor, gf.Tensor, gf.Tensor]:
    """A placeholder, a variable and a loss whose products are worth a GPU."""
    x = gf.placeholder("float32", (64, width), name="x")
    w = gf.variable(np.eye(width, dtype="float32"), name="w")
    h = x
    for _ in range(layers):
        h = gf.tanh(h @ w)
    return x, w, gf.mean(h)


@needs_compiler
def test_a_graph_goes_to_the_gpu_where_that_is_faster_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = install(monkeypatch)
    x, _, loss = build_large_model()
    with caplog.at_level(logging.INFO, "graphflow.session"), gf.Session() as session:
        assert session.cluster.devices == gf.Cluster.here().devices == (CPU, GPU)
        value = session.run(loss, {x: X})
        plan = session.plan()
    assert world.launches > 0
    assert {node.device for node in plan.nodes if node.finish > node.start} == {GPU}
    text = str(plan)
    assert f"chosen: {GPU}, " in text and f"(alone: {CPU} " in text
    assert "numbers: the same bits in each run and on each device of a kind" in text
    (line,) = [r.getMessage() for r in caplog.records if "devices.chosen" in r.getMessage()]
    assert GPU in line and f"alone: {CPU} " in line and "last bits" in line
    with gf.Session(devices=["cpu:0"]) as session:
        np.testing.assert_allclose(value, session.run(loss, {x: X}), rtol=1e-5)


def test_a_small_graph_stays_on_the_cpu_and_takes_nothing_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = note_opened(monkeypatch)
    calibrate.profile(["cpu"])
    x = gf.placeholder("float32", (4,), name="x")
    with caplog.at_level(logging.INFO, "graphflow.session"), gf.Session() as session:
        assert session.run(gf.sum(x * 2.0), {x: np.ones(4, "float32")}) == 8.0
        assert "no GPU is asked for: predicted" in str(session.plan())
    assert opened == []
    assert "no GPU is asked for" in caplog.text


@needs_compiler
def test_variables_that_a_small_graph_placed_follow_a_large_one_to_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    calibrate.profile(["cpu"])
    x, w, loss = build_large_model()
    v = gf.variable(np.zeros(2, "float32"), name="v")
    train = gf.optim.SGD(0.1).minimize(loss, [w])
    with gf.Session() as session:
        session.run(gf.assign(v, v + 1.0))
        session.run(w[0, 0])
        losses = [float(session.run([loss, train], {x: X})[0]) for _ in range(4)]
        assert session.plan().placement["w"] == GPU
        assert session.run(v).tolist() == [1.0, 1.0]
    with gf.Session(devices=["cpu:0"]) as session:
        wanted = [float(session.run([loss, train], {x: X})[0]) for _ in range(4)]
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)


@needs_compiler
def test_a_pin_to_a_gpu_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = install(monkeypatch, devices=2)
    with gf.device("gpu:1"):
        y = gf.placeholder("float32", (3,), name="y") * 3.0
    with gf.Session() as session:
        assert session.run(y, {"y": np.ones(3, "float32")}).tolist() == [3.0, 3.0, 3.0]
    assert world.launches > 0


# Broken GPUs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["getDeviceCount", "getDeviceProperties"])
def test_cupy_that_finds_no_driver_is_told_once_and_the_cpu_goes_on(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)

    def fail(*given: int) -> int:
        raise fake_cupy.CUDARuntimeError("cudaErrorInsufficientDriver: too old")

    monkeypatch.setattr(fake_cupy.Runtime, call, staticmethod(fail))
    x, _, loss = build_large_model()
    with pytest.warns(RuntimeWarning, match=r"CuPy .*InsufficientDriver.*goes on with the CPU"):
        assert gf.Cluster.here().devices == (CPU,)
    with warnings.catch_warnings(action="error"), gf.Session() as session:
        session.run(loss, {x: X})
        assert session.cluster.devices == (CPU,)


def test_cupy_that_cannot_be_imported_is_told_and_the_cpu_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('libcublas.so.13 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    machine_devices._is_cupy_installed.cache_clear()
    x, _, loss = build_large_model()
    with gf.Session() as session, pytest.warns(RuntimeWarning, match="libcublas"):
        session.run(loss, {x: X})
    machine_devices._is_cupy_installed.cache_clear()


@needs_compiler
@pytest.mark.parametrize("what", ["context", "sum", "calibration"])
def test_a_gpu_that_fails_when_it_is_opened_is_left_out(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch)

    def fail(*given: Any, **named: Any) -> Any:
        raise fake_cupy.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")

    if what == "context":
        monkeypatch.setattr(fake_cupy.Stream, "__init__", fail)
    elif what == "sum":
        monkeypatch.setattr(fake_cupy.Runtime, "memGetInfo", staticmethod(fail))
    else:
        monkeypatch.setattr(calibrate, "measure_machine", fail)
    x, _, loss = build_large_model()
    with gf.Session() as session:
        value = session.run(loss, {x: X})
        assert session.cluster.devices == (CPU,)
        session.run(loss, {x: X})
    assert np.isfinite(value)
    told = [r.getMessage() for r in caplog.records if "gpu.unusable" in r.getMessage()]
    assert len(told) == 1 and "out of memory" in told[0]


def test_a_plan_without_a_session_leaves_out_gpus_that_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)

    def fail(kinds: Sequence[str]) -> dict[str, Any]:
        if "gpu" in kinds:
            raise fake_cupy.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        return make_profile(kinds)

    monkeypatch.setattr(calibrate, "measure_machine", fail)
    x, _, loss = build_large_model()
    with pytest.warns(RuntimeWarning, match=r"GPUs are left out: .*out of memory"):
        plan = gf.plan(loss, shapes={x: X.shape})
    assert plan.cluster.devices == (CPU,)


@needs_compiler
def test_one_of_two_gpus_that_fails_is_left_out_and_the_other_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, devices=2)
    enter = fake_cupy.Device.__enter__

    def fail(self: fake_cupy.Device) -> fake_cupy.Device:
        if self.id == 0:
            raise fake_cupy.CUDARuntimeError("cudaErrorDevicesUnavailable: busy")
        return enter(self)

    monkeypatch.setattr(fake_cupy.Device, "__enter__", fail)
    x, _, loss = build_large_model()
    with gf.Session() as session:
        session.run(loss, {x: X})
        assert session.cluster.devices == (CPU, "/worker:0/gpu:1")
        assert "/worker:0/gpu:1" in session.plan().placement.values()


# What is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cpu", ["cpu:0"]),
        ("cpu:0, gpu:1", ["cpu:0", "gpu:1"]),
        ("gpu", ["gpu:0", "gpu:1"]),
        ("gpu:1", ["gpu:1"]),
        ("cpu,gpu", ["cpu:0", "gpu:0", "gpu:1"]),
    ],
)
def test_the_environment_restricts_what_is_taken(
    text: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, devices=2)
    monkeypatch.setenv("GRAPHFLOW_DEVICES", text)
    assert gf.Cluster.here().devices == tuple(f"/worker:0/{name}" for name in names)
    with gf.Session() as session:
        assert session.cluster.devices == gf.Cluster.here().devices
    assert gf.Cluster.here(devices=["gpu:0"]).devices == (GPU,), "what is named is taken"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu:2", r"no 'gpu:2': there is cpu:0, gpu:0, gpu:1; did you mean 'gpu:"),
        ("gup", r"'gup': there is cpu:0, gpu:0, gpu:1; did you mean 'gpu'"),
        ("GPU", r"no 'GPU': there is .*; did you mean 'gpu'"),
        (",", "names no device; give 'cpu', 'gpu'"),
    ],
)
def test_a_typo_in_the_environment_says_what_exists(
    text: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, devices=2)
    monkeypatch.setenv("GRAPHFLOW_DEVICES", text)
    for take in (gf.Session, gf.Cluster.here):
        with pytest.raises(ArgumentError, match=told):
            take()


def test_gpus_in_the_environment_of_a_machine_without_say_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setenv("GRAPHFLOW_DEVICES", "gpu")
    with pytest.raises(ArgumentError, match=r"no 'gpu': there is cpu:0 \(CuPy is not installed"):
        gf.Session()


def test_a_pin_to_a_gpu_that_is_missing_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with gf.device("gpu"):
        y = gf.placeholder("float32", (3,), name="y") * 3.0
    with gf.Session() as session, pytest.raises(DeviceError, match="CuPy is not installed"):
        session.run(y, {"y": np.ones(3, "float32")})


def test_hidden_gpus_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gf.Cluster.here().devices == (CPU,)


def test_a_session_takes_a_cluster_or_devices() -> None:
    with pytest.raises(SessionError, match="a cluster or devices, not both"):
        gf.Session(gf.Cluster.here(["cpu:0"]), devices=["cpu:0"])


def test_strategies_take_several_gpus_by_themselves_or_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = gf.placeholder("float32", (4, 3))
    w = gf.variable(np.ones((3, 2), "float32"))
    loss = gf.mean(x @ w)
    for gpus, places in ((1, {CPU}), (2, {GPU, "/worker:0/gpu:1"})):
        install(monkeypatch, devices=gpus)
        train = gf.optim.SGD(0.1).minimize(loss, strategy=gf.parallel.Data(2))
        placement = gf.plan([loss, train], shapes={x: (4, 3)}).placement
        assert set(placement.values()) - {"/client"} == places


# Memory ---------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("trains", [False, True])
def test_a_graph_of_more_memory_than_a_gpu_has_free_is_divided(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = install(monkeypatch, memory=32 << 20)
    x = gf.placeholder("float32", (64, 256), name="x")
    weights = [gf.variable(np.eye(256, dtype="float32"), name=f"w{i}") for i in range(8)]
    h = x
    for w in weights:
        h = gf.tanh(h @ w)
    loss = gf.mean(h)
    fetches = [loss, gf.optim.SGD(0.1).minimize(loss)] if trains else [loss]
    needed = gf.plan(fetches, gf.Cluster.here(devices=["gpu:0"])).peak_memory[GPU]
    world.taken = world.memory - int(needed / 1.2 / 0.8)  # another process has the rest
    with gf.Session() as session:
        values = [float(session.run(fetches, {x: X})[0]) for _ in range(2)]
        plan = session.plan()
        room = session.cluster.device(GPU).memory
    assert needed == pytest.approx(1.2 * room, rel=0.01)
    assert 0 < plan.peak_memory[GPU] <= room
    assert f"chosen: {CPU} and {GPU}, " in str(plan)
    assert f"{GPU} does not fit in memory)" in str(plan)
    with gf.Session(devices=["cpu:0"]) as session:
        wanted = [float(session.run(fetches, {x: X})[0]) for _ in range(2)]
    np.testing.assert_allclose(values, wanted, rtol=1e-4)


@pytest.mark.parametrize(("seed", "memory"), [(9105, 1 << 18), (9121, 1 << 21)])
def test_plans_of_drawn_models_keep_to_the_memory_of_small_gpus(
    seed: int, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The placer's own count is some percent too low for these."""
    install(monkeypatch, devices=2, memory=memory)
    step = draw(seed, 0).build()
    shapes = {placeholder: array.shape for placeholder, array in step.feeds.items()}
    cluster = gf.Cluster.here()
    plan = gf.plan(list(step.fetches), cluster, shapes=shapes)
    assert all(plan.peak_memory[name] <= cluster.device(name).memory for name in cluster.devices)


def test_memory_that_other_processes_have_taken_is_not_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nvml:
        def nvmlDeviceGetHandleByPciBusId_v2(self, address: Any, handle: Any) -> int:
            return 0 if address.value == b"FFFF:FF:01.0" else 6

        def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
            memory._obj.free = 100 << 20
            return 0

    install(monkeypatch, devices=2)
    monkeypatch.setattr(host_facts, "_load_nvml", Nvml)
    gpus = gf.Cluster.here().workers[0].devices[1:]
    shares = [gpu.memory / host_facts.MEMORY_SHARE for gpu in gpus]
    assert shares == pytest.approx([1 << 30, 100 << 20])


@needs_compiler
def test_a_batch_that_outgrows_the_gpu_is_placed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, memory=6 << 20)
    x = gf.placeholder("float32", (None, 256), name="x")
    weights = [gf.variable(np.eye(256, dtype="float32"), name=f"w{i}") for i in range(8)]
    hidden = [x]
    for w in weights:
        hidden.append(gf.tanh(hidden[-1] @ w))
    loss = gf.mean(gf.concat(hidden))
    large_batch = np.tile(X, (12, 1))
    with gf.Session() as session:
        small = session.run(loss, {x: X})
        assert set(session.plan().placement.values()) == {GPU, "/client"}
        value = session.run(loss, {x: large_batch})
        assert CPU in session.plan().placement.values()
        assert session.run(loss, {x: X}) == pytest.approx(small, rel=1e-5)
    with gf.Session(devices=["cpu:0"]) as session:
        assert session.run(loss, {x: large_batch}) == pytest.approx(value, rel=1e-5)


@needs_compiler
def test_a_larger_batch_of_a_small_graph_moves_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    calibrate.profile(["cpu"])
    x = gf.placeholder("float32", (None, 64), name="x")
    w = gf.variable(np.eye(64, dtype="float32"), name="w")
    y = gf.tanh(gf.tanh(x @ w) @ w)
    with gf.Session() as session:
        for rows, device in ((1, CPU), (4096, GPU)):
            for _ in range(2):
                session.run(y, {x: np.ones((rows, 64), "float32")})
            assert session.plan().placement["w"] == device


# Workers --------------------------------------------------------------------------------------


def test_a_worker_offers_what_its_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    offered: list[Any] = []
    monkeypatch.setattr(serving, "serve", lambda *a, devices, **rest: offered.append(devices))
    monkeypatch.setattr(crash_recorder, "supervise", lambda announce: nullcontext())
    for given in ([], ["--devices", "gpu:0"]):
        done = CliRunner().invoke(app, ["worker", "--listen", "tcp://127.0.0.1:*", *given])
        assert done.exit_code == 0, done.output
    assert offered == [["cpu:0", "gpu:0"], ["gpu:0"]]


def test_a_worker_opens_a_gpu_when_a_program_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = note_opened(monkeypatch)
    host = DeviceHost(0, [CPU, GPU], 1, lambda parcel: None)
    host.open("s")
    y = gf.constant(np.ones(3, "float32")) * 2.0
    graph = gf.Graph([y])
    host.add("s", "p", [*partition(graph, dict.fromkeys(graph.nodes, CPU)).values()])
    assert opened == [] and host.usage("s").arenas == {CPU: 0, GPU: 0}
    host.add("s", "q", [*partition(graph, dict.fromkeys(graph.nodes, GPU)).values()])
    host.prepare("s", "q", {})
    assert opened == [0]
    host.close("s")


@pytest.mark.gpu
def test_a_gpu_of_this_machine_gets_a_graph_that_gains_by_it() -> None:
    x, _, loss = build_large_model(width=2048, layers=8)
    fed = {x: np.ones((64, 2048), "float32")}
    with gf.Session() as session:
        value = session.run(loss, fed)
        assert GPU in session.plan().placement.values()
    with gf.Session(devices=["cpu:0"]) as session:
        np.testing.assert_allclose(value, session.run(loss, fed), rtol=1e-4)
