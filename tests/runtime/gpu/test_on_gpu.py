"""On a real GPU: programs against numpy, replayed graphs against steps one by one, bit for bit.

pytest -m gpu           where CuPy sees a GPU these run by themselves
pytest -m gpu --run-gpu to see why they do not
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import GraphflowError
from graphflow.ir.op import REGISTRY, Op, Sample
from graphflow.ir.spec import TensorSpec
from graphflow.runtime.gpu.gpu_backend import DeviceCopy, GpuBackend
from graphflow.runtime.gpu.input_buffer import InputBuffer
from graphflow.transforms.op_testing import draw
from tests.gpu.regions import Single, draw_numbers, singles
from tests.ops.kernels.cuda.test_region_kernels import FORMS, are_equal
from tests.ops.signs import fix_signs
from tests.runtime.gpu.test_gpu_backend import GpuFetches
from tests.runtime.gpu.test_vendor_libraries import check_products_of_views

pytestmark = pytest.mark.gpu
# What is the executor's, the host's, or holds bodies.
_OTHERS = {"constant", "placeholder", "variable", "assign", "group", "send", "recv", "call", "cond",
           "scan", "while_loop", "print", "check", "host_call", "pure_host_call"}  # fmt: skip
CASES = [
    pytest.param(op, sample, id=f"{op.name}-{i}")
    for op in REGISTRY.values()
    if op.name not in _OTHERS and "gpu" in op.device_kinds
    for i, sample in enumerate(op.samples)
    if sample.inputs
]


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[gf.Session]:
    with gf.Session(gf.Cluster.here(devices=["gpu:0"])) as session:
        yield session


@pytest.mark.parametrize("op, sample", CASES)
def test_every_op_gives_numpys_numbers_eager_captured_and_replayed(
    on_gpu: gf.Session, op: Op, sample: Sample
) -> None:
    given = [draw(sample, op.name), draw(sample, f"{op.name}, other numbers")]
    inputs = [gf.placeholder(a.dtype, a.shape) for a in given[0]]
    outs = op(*inputs, **sample.attrs)
    fetches = list(outs) if isinstance(outs, tuple) else [outs]
    with np.errstate(all="ignore"):
        try:
            wanted = [op.run(np, arrays, sample.attrs) for arrays in given]
        except GraphflowError:
            pytest.skip("the sample is refused")
    # the first is eager and the second captured; what is replayed has other numbers each time
    turns = (0, 1, 0, 1)
    runs = [on_gpu.run(fetches, dict(zip(inputs, given[i], strict=True))) for i in turns]
    for i in (0, 1):
        for have, want in zip(fix_signs(op, runs[i]), fix_signs(op, wanted[i]), strict=True):
            assert have.dtype == want.dtype and have.shape == want.shape
            if have.dtype.kind in "fc" and not op.random:
                np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)
        if not op.random:
            assert [a.tobytes() for a in runs[i + 2]] == [a.tobytes() for a in runs[i]]


@pytest.mark.parametrize("single", list(singles()), ids=str)
def test_an_elementwise_kernel_gives_the_bits_of_a_cpu(on_gpu: gf.Session, single: Single) -> None:
    shapes = FORMS[len(single.dtypes)][0]
    arrays = [
        draw_numbers(d, s, i) for i, (d, s) in enumerate(zip(single.dtypes, shapes, strict=True))
    ]
    inputs = [gf.placeholder(a.dtype, a.shape) for a in arrays]
    have = on_gpu.run(
        single.op(*inputs, **dict(single.attrs)), dict(zip(inputs, arrays, strict=True))
    )
    with np.errstate(all="ignore"):
        wanted = np.asarray(single.op.run(np, arrays, dict(single.attrs))[0])
    exactly = single.op.name not in ("sin", "cos", "pow") and "16" not in str(single.dtypes)
    assert are_equal(have, wanted, exactly)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_products_of_any_views_are_numpys(data: Any) -> None:
    check_products_of_views(_backend(), data.draw)


@cache
def _backend() -> GpuBackend:
    return GpuBackend(0)


def _model() -> tuple[Any, Any, Any]:
    x, labels = gf.placeholder("float32", (64, 100)), gf.placeholder("int32", (64,))
    rng = np.random.default_rng(0)
    w, v = (gf.variable(rng.normal(size=s).astype("float32") / 10) for s in ((100, 256), (256, 10)))
    loss = gf.mean(gf.nn.cross_entropy(gf.nn.gelu(x @ w) @ v, labels))
    return x, labels, [loss, gf.optim.Adam(0.01).minimize(loss)]


def _run_training(devices: list[str], steps: int = 12) -> np.ndarray[Any, Any]:
    x, labels, fetches = _model()
    rng = np.random.default_rng(1)
    feeds = {x: rng.normal(size=(64, 100)).astype("float32")}
    feeds[labels] = rng.integers(0, 10, 64, "int32")
    with gf.Session(gf.Cluster.here(devices=devices)) as session:
        return np.array([float(session.run(fetches, feeds)[0]) for _ in range(steps)])


def test_a_model_trains_as_on_a_cpu() -> None:
    np.testing.assert_allclose(_run_training(["gpu:0"]), _run_training(["cpu:0"]), rtol=2e-3)


def test_replayed_graphs_give_the_bits_of_steps_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captured = _run_training(["gpu:0"])
    assert "gpu.uncaptured" not in caplog.text
    monkeypatch.setenv("GRAPHFLOW_CUDA_GRAPHS", "off")
    assert captured.tobytes() == _run_training(["gpu:0"]).tobytes()


def test_two_runs_give_the_same_bits() -> None:
    assert _run_training(["gpu:0"]).tobytes() == _run_training(["gpu:0"]).tobytes()


def test_steps_in_flight_do_not_mix_their_feeds(on_gpu: gf.Session) -> None:
    x = gf.placeholder("float32", (1 << 20,))
    total = gf.variable(np.zeros(1 << 20, "float32"))
    step = gf.assign(total, total + x)
    group = REGISTRY["group"](step)
    for i in range(16):
        on_gpu.run(group, {x: np.full(1 << 20, 2.0**i, "float32")})
    assert (on_gpu.get(total) == 2.0**16 - 1).all()


def test_memory_comes_back_when_a_session_ends() -> None:
    import cupy

    def measure_leak() -> int:
        """Bytes that three sessions leave taken. Others that use the GPU meanwhile make it more or
        less."""
        free = cupy.cuda.runtime.memGetInfo()[0]
        for _ in range(3):
            _run_training(["gpu:0"], 2)
        return int(free - cupy.cuda.runtime.memGetInfo()[0])

    _run_training(["gpu:0"], 2)
    assert min(measure_leak() for _ in range(5)) < 32 << 20


def test_a_step_takes_the_memory_that_was_planned() -> None:
    x = gf.placeholder("float32", (1024, 1024), name="x")
    here = GpuFetches(gf.tanh(gf.tanh(x @ x) @ x))
    for _ in range(3):
        here.step(x=np.ones((1024, 1024), "float32"))
    memory = here.backend.memory_usage()
    assert memory.plain == here.program.memory.arena + (4 << 20)  # the place of the feed
    assert memory.pool == 0
    assert here.code.steps.graphs == 1


def test_a_tensor_goes_from_one_gpu_to_another() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    one, other = GpuBackend(0), GpuBackend(1)
    x = np.random.default_rng(0).normal(size=(1000, 1000)).astype("float32")
    value = one.to_device(x)
    handed = one.hand_over(value, "gpu")
    assert isinstance(handed, DeviceCopy)
    inlet = InputBuffer(other, TensorSpec(x.shape, x.dtype))
    inlet(handed)
    assert other.to_host(inlet.array).tobytes() == x.tobytes()
    np.testing.assert_allclose(
        _run_training(["gpu:0", "gpu:1"]), _run_training(["gpu:0"]), rtol=1e-4
    )
