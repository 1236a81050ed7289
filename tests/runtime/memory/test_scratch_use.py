"""Predicted scratch memory of kernels is the memory that they take."""

from __future__ import annotations

from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.ir.op import Tensor
from graphflow.ops.kernels.gemm import native_product
from graphflow.ops.kernels.jit import scratch_memory
from graphflow.runtime.memory.backend import CpuBackend
from graphflow.runtime.memory.memory_layout import plan_layout
from graphflow.runtime.memory.memory_use import memory_use
from tests.runtime.programs import compile_program, make_partition


@pytest.fixture(autouse=True)
def jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)


class Convolution(NamedTuple):
    """A drawn convolution."""

    images: int
    inputs: int  # of a group
    outputs: int  # of a group
    groups: int
    space: tuple[int, ...]
    kernel: int
    stride: int
    padding: int
    dilation: int

    def fetches(self, dtype: str = "float32") -> list[Tensor]:
        """Return the result and both gradients."""
        rank = len(self.space)
        x = gf.placeholder(dtype, (self.images, self.groups * self.inputs, *self.space))
        w = gf.placeholder(dtype, (self.groups * self.outputs, self.inputs, *[self.kernel] * rank))
        y = gf.nn.conv(
            x, w, stride=self.stride, padding=self.padding, dilation=self.dilation,
            groups=self.groups,
        )  # fmt: skip
        g = gf.placeholder(dtype, y.shape)
        return [y, *gf.gradients(gf.sum(y * g), [x, w])]


@st.composite
def convolutions(draw: Any) -> Convolution:
    channels = st.sampled_from([1, 3, 8, 17, 32, 72])
    kernel, dilation = draw(st.sampled_from([1, 2, 3, 5])), draw(st.integers(1, 2))
    padding = draw(st.integers(0, kernel // 2))
    least = max(1, (kernel - 1) * dilation + 1 - 2 * padding)
    size = st.integers(least, max(least, 20))
    return Convolution(
        draw(st.integers(1, 9)), draw(channels), draw(channels),
        draw(st.sampled_from([1, 1, 2, 6])),
        tuple(draw(st.lists(size, min_size=1, max_size=2))), kernel,
        draw(st.integers(1, 3)), padding, dilation,
    )  # fmt: skip


class AskedBackend(CpuBackend):
    """Notes how much scratch memory a program asks for: its prediction first, then its kernels."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.asked: list[int] = []

    def shared_scratch(self, nbytes: int) -> Any:
        self.asked.append(nbytes)
        return super().shared_scratch(nbytes)


@given(convolutions(), st.sampled_from([1, 2, 3, 8]))
@settings(max_examples=80)
def test_kernels_of_convolutions_take_what_is_predicted(case: Convolution, threads: int) -> None:
    backend = AskedBackend(threads)
    program = compile_program(make_partition(*case.fetches()), backend=backend)
    predicted, *asked = backend.asked
    assert predicted == program.memory.shared_scratch == max(asked, default=0)
    assert backend.shared_scratch(0).nbytes == predicted
    backend.close()


@given(convolutions(), st.sampled_from(["float64", "float16"]))
@settings(max_examples=60)
def test_kernels_that_run_as_python_keep_what_is_predicted(case: Convolution, dtype: str) -> None:
    part = make_partition(*case.fetches(dtype))
    program = compile_program(part)
    feeds = {
        part.graph.names[n]: np.ones(n.outputs[0].spec.shape, dtype)  # type: ignore[arg-type]
        for n in part.graph.of_op("placeholder")
    }
    kept: list[int] = []

    def run() -> None:
        program.compute(feeds, 1, 0)
        kept.extend(buffer.nbytes for buffer in scratch_memory._local.__dict__.values())
        kept.append(max(0, getattr(native_product._thread_local, "nbytes", 0)))

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert sum(kept) <= program.memory.kept_scratch <= 1.5 * sum(kept)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("sizes", [(700, 300, 500), (64, 4000, 64), (2000, 30, 2000)])
def test_products_take_no_more_than_is_predicted(threads: int, sizes: tuple[int, ...]) -> None:
    rows, depth, columns = sizes
    x = gf.placeholder("float32", (rows, depth))
    w = gf.placeholder("float32", (depth, columns))
    backend = AskedBackend(threads)
    compile_program(
        make_partition(gf.nn.relu(x @ w + 1.0), gf.matmul(x, x, transpose_a=True)), backend=backend
    )
    predicted, *asked = backend.asked
    most = max(asked, default=0)
    assert most <= predicted <= 2 * most
    backend.close()


def test_kernels_share_the_largest_scratch_memory() -> None:
    small, large = (Convolution(4, 32, 32, 1, (n, n), 3, 1, 1, 1).fetches() for n in (8, 20))
    alone_bytes, together = (
        compile_program(make_partition(*fetches)).memory.shared_scratch
        for fetches in (large, [*small, *large])
    )
    assert alone_bytes == together > 0


def test_plans_count_the_scratch_memory_of_each_thread() -> None:
    fetches = Convolution(16, 64, 64, 1, (32, 32), 3, 1, 1, 1).fetches()
    peaks = []
    for threads in (1, 8):
        (peak,) = gf.plan(fetches, gf.Cluster.here(["cpu:0"], threads=threads)).peak_memory.values()
        peaks.append(peak)
        program = compile_program(make_partition(*fetches), backend=CpuBackend(threads))
        assert peak == pytest.approx(program.peak, rel=1e-4)
    assert peaks[1] > peaks[0] + (5 << 20)


def cpus(*memory: int) -> gf.Cluster:
    """A cluster of CPU devices of this process, with so many bytes and two threads each."""
    devices = [
        gf.placement.Device(f"/worker:0/cpu:{i}", "cpu", room, 2) for i, room in enumerate(memory)
    ]
    return gf.Cluster((gf.placement.Worker(0, None, tuple(devices)),))


def test_a_step_whose_scratch_memory_does_not_fit_is_refused() -> None:
    x = gf.placeholder("float32", (16, 64, 32, 32))
    w = gf.variable(np.ones((64, 64, 3, 3), "float32"))
    y = gf.nn.conv2d(x, w, padding=1)
    use = compile_program(make_partition(y), backend=CpuBackend(2)).memory
    short, feeds = use.peak - use.scratch // 2, {x: np.ones(x.shape, "float32")}
    with gf.Session(cpus(short)) as s, pytest.raises(gf.errors.MemoryLimitError):
        s.run(y, feeds)
    with gf.Session(cpus(use.peak)) as s:
        s.run(y, feeds)


def test_loops_keep_the_scratch_memory_of_their_kernels() -> None:
    x = gf.placeholder("float32", (4, 32, 16, 16))
    w = gf.placeholder("float32", (32, 32, 3, 3))

    def step(h: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return gf.nn.conv2d(h, w, padding=1), h[0, 0, 0, 0]

    part = make_partition(gf.scan(step, x, gf.arange(3))[0])
    once = make_partition(gf.nn.conv2d(x, w, padding=1))
    of_loop, of_one = (memory_use(p, plan_layout(p, {}), {}, 2) for p in (part, once))
    assert of_loop.shared_scratch == of_one.kept_scratch == 0
    assert of_loop.kept_scratch == pytest.approx(of_one.shared_scratch, rel=0.01)
