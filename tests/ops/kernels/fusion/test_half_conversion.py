"""Kernels of float32 on 16-bit arrays: native conversions around them, alone and in programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ops.kernels.fusion.half_conversion import run_in_float32
from graphflow.runtime.native_calls.native_segments import NativeSegment
from tests.ops.kernels.sharing import check_threads
from tests.runtime.programs import compile_program, make_partition

HALVES = ["float16", "bfloat16"]
Array = np.ndarray[Any, Any]


def add(xp: Any, out: Any, a: Any, b: Any) -> None:
    assert {out.dtype, a.dtype, b.dtype} == {np.dtype("float32")}
    xp.add(a, b, out=out)


def draw(*shape: int, dtype: str) -> Array:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("half", HALVES)
def test_operands_are_widened_and_the_result_is_rounded_once(half: str) -> None:
    a, b = draw(300, 7, dtype=half), draw(300, 7, dtype="float32")
    out = np.empty((300, 7), half)
    run_in_float32(add, out, [a, b], {})
    np.testing.assert_array_equal(out, (a.astype("float32") + b).astype(half))


def test_results_that_are_float32_already_are_written_where_they_belong() -> None:
    def both(xp: Any, out: Any, a: Any) -> None:
        xp.multiply(a, 3, out=out[0])
        xp.multiply(a, 3, out=out[1])

    a = draw(40, dtype="bfloat16")
    outs = np.empty(40, "float32"), np.empty(40, "bfloat16")
    run_in_float32(both, outs, [a], {})
    np.testing.assert_array_equal(outs[0], a.astype("float32") * 3)
    np.testing.assert_array_equal(outs[1], outs[0].astype("bfloat16"))


def test_arrays_that_are_not_contiguous_and_empty_ones() -> None:
    a, out = draw(20, 30, dtype="bfloat16"), np.zeros((30, 40), "bfloat16")
    run_in_float32(add, out[:, ::2], [a.T, a.T], {})
    np.testing.assert_array_equal(out[:, ::2], (a.T.astype("float32") * 2).astype("bfloat16"))
    run_in_float32(add, out[:0], [out[:0], out[:0]], {})


def test_a_kernel_within_a_kernel_leaves_the_outer_ones_operands_alone() -> None:
    a, out = draw(1000, dtype="bfloat16"), np.empty(1000, "bfloat16")

    def run_inner_kernel(xp: Any, result: Any, x: Any) -> None:
        inner = np.empty_like(out)
        run_in_float32(add, inner, [-a, -a], {})
        xp.copyto(result, x)

    run_in_float32(run_inner_kernel, out, [a], {})
    np.testing.assert_array_equal(out, a)


def test_a_failing_kernel_leaves_the_next_one_its_memory() -> None:
    def fail(xp: Any, out: Any, a: Any) -> None:
        raise ValueError

    a, out = draw(1000, dtype="bfloat16"), np.empty(1000, "bfloat16")
    with pytest.raises(ValueError):
        run_in_float32(fail, out, [a], {})
    run_in_float32(add, out, [a, a], {})
    np.testing.assert_array_equal(out, (a.astype("float32") * 2).astype("bfloat16"))


def test_threads_change_no_bits() -> None:
    a = draw(1 << 19, dtype="bfloat16")

    def compute() -> list[Array]:
        out = np.empty_like(a)
        run_in_float32(add, out, [a, a], {})
        return [out]

    check_threads(compute, compute())


@pytest.mark.parametrize("half", HALVES)
def test_a_convolution_of_halves_is_recorded_with_its_conversions(half: str) -> None:
    x, w = gf.placeholder(half, (2, 16, 12, 12), name="x"), draw(24, 16, 3, 3, dtype=half)
    y = gf.nn.relu(gf.nn.conv(x, w, padding=1))
    program = compile_program(make_partition(y))
    (line,) = program._code.compute.lines
    assert isinstance(line, NativeSegment)
    value = draw(2, 16, 12, 12, dtype=half)
    found = program.compute({"x": value}, 1, 0)["0"]
    np.testing.assert_array_equal(found, evaluate([y], {x: value})[0])


def test_without_generated_kernels_numpy_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    a, out = draw(1000, dtype="bfloat16"), np.empty(1000, "bfloat16")
    run_in_float32(add, out, [a, a], {})
    np.testing.assert_array_equal(out, (a.astype("float32") * 2).astype("bfloat16"))
