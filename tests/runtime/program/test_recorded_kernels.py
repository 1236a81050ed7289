"""Kernels of several native calls: recorded once, they give each step's bits on any threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.op import Tensor
from graphflow.ops.kernels.conv.direct.float_loops import add_floats
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.kernel_recording import (
    ArrayStandIn,
    KernelRecording,
    NotRecordable,
    operand_place,
    region,
    region_number,
)
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.runtime.memory.backend import CpuBackend
from graphflow.runtime.program.kernel_emitter import KernelEmitter
from graphflow.runtime.program.program import Program
from graphflow.runtime.program.span_recorder import Span
from tests.properties.random_graphs import has_same_bits
from tests.runtime.programs import compile_program, make_partition

RECORDING = ("conv", "conv_transpose", "conv_weight_grad", "max_pool", "max_pool_taps", "pool_put",
             "avg_pool", "avg_pool_grad", "batch_norm", "batch_norm_grad", "sum")  # fmt: skip


@pytest.fixture(autouse=True)
def jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)


def convolution(
    images: int, inputs: int, outputs: int, size: int, kernel: int, **attrs: Any
) -> list[Tensor]:
    """A convolution of a feed, and its gradients for a second feed."""
    groups = attrs.get("groups", 1)
    x = gf.placeholder("float32", (images, inputs, size, size), name="x")
    w = gf.placeholder("float32", (outputs, inputs // groups, kernel, kernel), name="w")
    y = gf.nn.conv2d(x, w, **attrs)
    g = gf.placeholder("float32", y.shape, name="g")
    return [y, *gf.gradients(gf.sum(y * g), [x, w])]


def normalized_and_pooled() -> list[Tensor]:
    """Batch norm, and both kinds of pooling, with their gradients."""
    x = gf.placeholder("float32", (4, 24, 20, 20), name="x")
    scale = gf.placeholder("float32", (24,), name="w")
    moments = gf.constant(np.ones(24), "float32")
    y, _, variance = gf.nn.batch_norm(x, scale, scale, moments, moments, training=True)
    found = gf.nn.max_pool2d(y, 2) + gf.nn.avg_pool2d(y, 2)
    g = gf.placeholder("float32", found.shape, name="g")
    return [found, variance, *gf.gradients(gf.sum(found * g), [x, scale])]


CASES = {
    "few channels": lambda: convolution(5, 3, 20, 24, 5),
    "joined images": lambda: convolution(8, 6, 16, 14, 5),
    "depthwise, strided": lambda: convolution(3, 24, 24, 17, 3, stride=2, groups=24),
    "masks": lambda: convolution(1, 2, 4, 9, 3, padding=1),
    "depthwise": lambda: convolution(3, 24, 24, 17, 3, padding=1, groups=24),
    "winograd": lambda: convolution(3, 32, 80, 16, 3, padding=1),
    "winograd of few tiles": lambda: convolution(2, 64, 256, 8, 3, padding=1),
    "winograd of one block": lambda: convolution(6, 64, 64, 32, 3, padding=1),
    "implicit product": lambda: convolution(4, 24, 72, 15, 3, stride=2, padding=1),
    "no taps at some places": lambda: convolution(2, 24, 40, 17, 3, stride=2, dilation=2),
    "pointwise, strided": lambda: convolution(5, 24, 40, 16, 1, stride=2),
    "norm and pools": normalized_and_pooled,
    "sums of channels": lambda: [
        gf.sum(gf.placeholder("float32", (9, 40, 14, 14), name="x"), (0, 2, 3))
    ],
}


def python_lines(program: Program) -> list[str]:
    """Return the ops that a program computes in lines of Python."""
    return [line[0].op.name for line in program._code.compute.lines if isinstance(line, tuple)]


def values(fetches: Sequence[Tensor], seed: int, offset: int = 0) -> dict[str, Any]:
    """Return feeds by name; `offset` moves them off the boundaries of cache lines."""
    random = np.random.default_rng(seed)
    feeds = {}
    for node in make_partition(*fetches).graph.nodes:
        if node.op.name == "placeholder":
            spec = node.outputs[0].spec
            room = np.zeros(spec.size + 16, "float32")
            room[offset : offset + spec.size] = random.normal(size=spec.size)
            name = node.name.rpartition("/")[2]
            feeds[name] = room[offset : offset + spec.size].reshape(spec.shape)
    return feeds


@pytest.mark.parametrize("case", CASES)
def test_recorded_kernels_give_the_bits_of_one_call_after_another(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = CASES[case]()
    part = make_partition(*fetches)
    with monkeypatch.context() as patched:
        patched.setattr(KernelEmitter, "_emit_recording", lambda *given: False)
        plain = compile_program(part)
    assert set(python_lines(plain)) & set(RECORDING)
    programs = [compile_program(part, backend=CpuBackend(threads)) for threads in (1, 2, 3)]
    for program in programs:
        assert not set(python_lines(program)) & set(RECORDING)
    for seed in range(2):
        given = values(fetches, seed, offset=seed)
        want = plain.compute(given, seed, 0)
        for program in programs:
            for _ in range(2):
                found = program.compute(given, seed, 0)
                for key, array in want.items():
                    assert has_same_bits(found[key], array), (key, program)


def test_a_traced_step_tells_the_time_of_a_recorded_kernel() -> None:
    fetches = CASES["winograd"]()
    program, given = (
        compile_program(make_partition(*fetches), backend=CpuBackend(2)),
        values(fetches, 0),
    )
    spans: list[Span] = []
    traced = program.compute(given, 1, 0, spans)
    want = program.compute(given, 2, 0)
    assert all(has_same_bits(traced[key], array) for key, array in want.items())
    spent = {name: end - start for _, name, start, end in spans}
    assert sum(time > 0 for name, time in spent.items() if "conv" in name) == 3


def test_recordings_of_a_device_share_scratch_memory() -> None:
    backend = CpuBackend(2)
    parts = [
        make_partition(*CASES[case]()) for case in ("winograd", "winograd", "implicit product")
    ]
    programs = [compile_program(part, backend=backend) for part in parts]
    calls = [c for p in programs for s in p._code.compute.segments for c in s.calls if c.recording]
    largest = max(call.recording.scratch_nbytes for call in calls if call.recording)
    assert backend.shared_scratch(0).nbytes <= 2 * largest


# Stand-ins ---------------------------------------------------------------------------------------


def test_a_stand_in_has_the_addresses_of_a_contiguous_array() -> None:
    array = np.zeros((4, 3, 5), "float32")
    place = operand_place(array)
    stand_in = ArrayStandIn(place, array.shape, array.dtype)
    assert stand_in.strides == array.strides
    assert (stand_in.ndim, stand_in.size, stand_in.nbytes) == (array.ndim, array.size, array.nbytes)
    for of in (lambda a: a[1:3], lambda a: a[2:], lambda a: a[..., 0:3, 0:5], lambda a: a[:4],
               lambda a: a.reshape(12, -1), lambda a: a.reshape((2, 30))):  # fmt: skip
        assert operand_place(of(stand_in)) == operand_place(of(array))
        assert of(stand_in).shape == of(array).shape
    assert [operand_place(row) for row in stand_in] == [operand_place(row) for row in array]


@pytest.mark.parametrize(
    "read",
    [
        np.asarray, lambda a: np.add(a, 1), lambda a: np.copyto(np.zeros(4), a),
        lambda a: a[0], lambda a: a[::2], lambda a: a[:, 1:], lambda a: a.T, lambda a: a + 1,
        lambda a: a.__setitem__(slice(None), 0), lambda a: np.matmul(np.ones((4, 4)), a),
        lambda a: np.zeros((4, 4)).__setitem__(slice(None), a), lambda a: a.copy(),
    ],
)  # fmt: skip
def test_a_kernel_that_reads_elements_in_python_is_not_recorded(read: Any) -> None:
    with pytest.raises(NotRecordable):
        KernelRecording(2).record(lambda: read(ArrayStandIn(region(2), (4, 4), "float32")))


def test_a_recording_refuses_pointers_to_memory_that_nobody_keeps() -> None:
    kept, lost = np.zeros(8, "float32"), np.zeros(8, "float32")
    add_floats(operand_place(kept), operand_place(kept), 8)
    KernelRecording(1).record(lambda: add_floats(region(2), operand_place(kept) + 4, 7))
    with pytest.raises(NotRecordable):
        KernelRecording(1).record(lambda: add_floats(region(2), address(lost), 8))


def test_scratch_memory_of_a_recording_is_one_region() -> None:
    recording = KernelRecording(2)
    places: list[int] = []

    def run() -> None:
        for size in (8, 64, 8):
            places.append(operand_place(scratch(np, "of a test", (size,), np.float32)))

    recording.record(run)
    assert places[0] == places[2] != places[1]
    assert all(region_number(place) == 1 for place in places)
    assert recording.scratch_nbytes == 64 + 256
