"""Threads share long native calls: cut where it pays, with the bits of one thread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.ir.op import Tensor
from graphflow.ops.kernels.gemm.contiguous_products import plan_if_faster_than_blas
from graphflow.ops.kernels.gemm.kernel_form import GemmSize
from graphflow.runtime.memory.backend import CpuBackend
from graphflow.runtime.program.program import Program
from graphflow.runtime.program.span_recorder import Span
from tests.properties.random_graphs import has_same_bits
from tests.runtime.programs import compile_program, make_partition


@pytest.fixture(autouse=True)
def jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)


def jobs(program: Program) -> int:
    """Return how many calls of the compute part threads share."""
    return sum(len(job) > 1 for segment in program._code.compute.segments for job in segment._jobs)


def layer(rows: int, width: int, out: int, transposed: bool = False) -> Tensor:
    """A product of a feed by a constant, with an epilogue, and its gradient in the constant."""
    random = np.random.default_rng(0)
    x = gf.placeholder("float32", (rows, width), name="x")
    w = gf.constant(random.normal(size=(out, width) if transposed else (width, out)), "float32")
    y = gf.nn.gelu(gf.matmul(x, w, transpose_b=transposed) + 0.5)
    return gf.sum(gf.matmul(x, y, transpose_a=True), 0) + gf.mean(y)


@given(st.integers(1, 200), st.integers(1, 300), st.integers(1, 300), st.booleans(),
       st.integers(2, 5))  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_layers_of_any_size_give_the_bits_of_one_thread(
    rows: int, width: int, out: int, transposed: bool, threads: int
) -> None:
    part = make_partition(layer(rows, width, out, transposed))
    one, many = compile_program(part), compile_program(part, backend=CpuBackend(threads))
    for seed in range(2):  # feeds at other addresses
        x = np.random.default_rng(seed).normal(size=(rows, width)).astype("float32")
        want = one.compute({"x": x}, 1, 0)["0"]
        assert has_same_bits(many.compute({"x": x}, 1, 0)["0"], want)


def test_long_calls_are_shared_inside_of_one_native_call_and_short_ones_are_not() -> None:
    part = make_partition(layer(512, 256, 512))
    shared, whole = compile_program(part, backend=CpuBackend(2)), compile_program(part)
    assert jobs(shared) >= 2 and jobs(whole) == 0
    assert len(shared._code.compute.lines) == len(whole._code.compute.lines)
    assert jobs(compile_program(make_partition(layer(8, 16, 8)), backend=CpuBackend(2))) == 0


def test_products_of_few_rows_are_cut_by_columns_even_of_a_feed() -> None:
    w = gf.constant(np.random.default_rng(0).normal(size=(16, 400)), "float32")
    x = gf.placeholder("float32", (400, 512), name="x")
    part = make_partition(w @ x)
    one, many = compile_program(part), compile_program(part, backend=CpuBackend(2))
    (segment,) = many._code.compute.segments
    assert segment.offsets.any()
    value = np.random.default_rng(1).normal(size=(400, 512)).astype("float32")
    for given_value in (value, value + 1):
        want = one.compute({"x": given_value}, 1, 0)["0"]
        assert has_same_bits(many.compute({"x": given_value}, 1, 0)["0"], want)


def test_a_traced_step_tells_the_time_of_each_call_and_has_the_same_bits() -> None:
    program = compile_program(make_partition(layer(1024, 256, 1024)), backend=CpuBackend(2))
    x = np.ones((1024, 256), "float32")
    spans: list[Span] = []
    traced = program.compute({"x": x}, 1, 0, spans)["0"]
    assert has_same_bits(traced, program.compute({"x": x}, 2, 0)["0"])
    spent = {name: end - start for _, name, start, end in spans}
    assert sum(time > 0 for name, time in spent.items() if "matmul" in name) == 2


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 400), st.booleans(),
       st.booleans(), st.booleans(), st.integers(1, 8))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_shares_of_a_product_cover_it_once(
    m: int, k: int, n: int, ta: bool, tb: bool, added: bool, count: int
) -> None:
    a, b = ((k, m) if ta else (m, k)), ((n, k) if tb else (k, n))
    product = plan_if_faster_than_blas(a, b, "float32", ta, tb, added)
    if product is None:
        return
    shares = product.cut(count)
    assert 1 <= len(shares) <= count
    if any(share.sizes for share in shares):
        columns = [share.sizes[GemmSize.COLUMNS] for share in shares]
        assert sum(columns) == product.sizes[GemmSize.COLUMNS] and min(columns) > 0
        assert all((s.start, s.stop) == (0, product.units) for s in shares)
    else:
        assert [s.start for s in shares] == [0, *(s.stop for s in shares[:-1])]
        assert shares[-1].stop == product.units
