"""Generated kernels of ops along rows and columns: close to numpy, in one order of summation, with
numpy's results for odd values."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY, Op, Tensor
from graphflow.ops.kernels.codegen.region import Operand, Region, RegionOp
from graphflow.ops.kernels.fusion import reductions
from graphflow.ops.kernels.fusion.region_kernels import RegionKernel, kernel_of, run_op
from graphflow.ops.kernels.fusion.row_ops import collapse_axes, orientation
from graphflow.ops.kernels.fusion.row_passes import LANES
from graphflow.ops.kernels.jit.compiler import compiler
from tests.ops.kernels.sharing import check_threads

Array = np.ndarray[Any, Any]
SHAPES = [
    (1,), (5,), (33,), (1, 1), (3, 4), (5, 1), (1, 7), (6, 33), (2, 100), (40, 3), (2, 3, 40),
    (17, 64), (3, 5, 7), (2, 3, 4, 5), (2, 1025), (3000, 2),
]  # fmt: skip
REDUCTIONS = ("sum", "mean", "max", "min", "logsumexp", "var", "std")


def attributes_of(name: str, axes: tuple[int, ...], keepdims: bool) -> dict[str, Any]:
    more = {"correction": 0.0} if name in ("var", "std") else {}
    return {"axis": axes, "keepdims": keepdims, **more}


def run_both(op: Op, arrays: list[Array], attrs: dict[str, Any]) -> tuple[Array, Array]:
    """What the generated kernel gives, and what numpy does."""
    with np.errstate(all="ignore"):
        have = run_op(op, np, arrays, attrs)
        (want,) = op.run(np, arrays, attrs, plain=True)
    want = np.asarray(want)
    if have is None:
        return want, want
    assert have.shape == want.shape and have.dtype == want.dtype
    return have, want


def close(have: Array, want: Array) -> bool:
    tolerance = 2e-5 if have.dtype == np.float32 else 1e-12
    return np.allclose(have, want, rtol=tolerance, atol=tolerance, equal_nan=True)


CASES = st.sampled_from(SHAPES).flatmap(
    lambda shape: st.tuples(
        st.just(shape),
        st.sets(st.integers(0, len(shape) - 1), min_size=1).map(lambda s: tuple(sorted(s))),
    )
)


@given(CASES, st.sampled_from(REDUCTIONS), st.booleans(), st.sampled_from(["float32", "float64"]))
def test_reductions_over_any_axes_are_close_to_numpys(
    case: tuple[tuple[int, ...], tuple[int, ...]], name: str, keepdims: bool, dtype: str
) -> None:
    shape, axes = case
    x = np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)
    assert close(*run_both(REGISTRY[name], [x], attributes_of(name, axes, keepdims)))


@given(CASES, st.sampled_from(["sum", "max", "min"]))
def test_whole_numbers_are_reduced_exactly(
    case: tuple[tuple[int, ...], tuple[int, ...]], name: str
) -> None:
    shape, axes = case
    rng = np.random.default_rng(1)
    for dtype in ("int8", "uint8", "int32", "int64", "uint64", "int16"):
        x = rng.integers(0, 120, shape).astype(dtype)
        have, want = run_both(REGISTRY[name], [x], attributes_of(name, axes, False))
        assert np.array_equal(have, want)


@given(CASES, st.sampled_from(["any", "all"]))
def test_truth_is_reduced_exactly(case: tuple[tuple[int, ...], tuple[int, ...]], name: str) -> None:
    shape, axes = case
    rng = np.random.default_rng(2)
    for x in (rng.random(shape) < 0.02, rng.random(shape) < 0.98, rng.integers(0, 2, shape)):
        have, want = run_both(REGISTRY[name], [x], {"axis": axes, "keepdims": False})
        assert np.array_equal(have, want)


@given(st.sampled_from(SHAPES), st.data(), st.sampled_from(["float32", "float64"]))
def test_softmax_and_its_kin_are_close_to_numpys(
    shape: tuple[int, ...], data: st.DataObject, dtype: str
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    rng = np.random.default_rng(3)
    x, g = (rng.normal(size=shape).astype(dtype) * 5 for _ in range(2))
    for name in ("softmax", "log_softmax"):
        assert close(*run_both(REGISTRY[name], [x], {"axis": axis}))
        assert close(*run_both(REGISTRY[f"{name}_grad"], [g, x * 0.1], {"axis": axis}))
    for centred in (True, False):
        attrs = {"axis": (axis,), "epsilon": 0.1, "centred": centred}
        assert close(*run_both(REGISTRY["standardize"], [x], attrs))
        assert close(*run_both(REGISTRY["standardize_grad"], [g, x], attrs))
        for parameters in ([g[:1].reshape(-1)[: shape[axis]]] * 2, [x.reshape(-1)[: shape[axis]]]):
            fits = all(p.size == shape[axis] for p in parameters)
            if fits:
                more = {"along": (axis,), **attrs}
                assert close(*run_both(REGISTRY["affine_norm"], [x, *parameters], more))


@pytest.mark.parametrize("shape", [(1, 1), (4, 3), (7, 40), (2, 3, 10), (5,)])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_cross_entropy_is_close_to_numpys(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=shape).astype("float32") * 20
    labels = rng.integers(0, shape[-1], shape[:-1]).astype(dtype)
    g = rng.normal(size=shape[:-1]).astype("float32")
    assert close(*run_both(REGISTRY["cross_entropy"], [x, labels], {}))
    assert close(*run_both(REGISTRY["cross_entropy_grad"], [g, x, labels], {}))
    with pytest.raises(IndexError, match="class numbers"):
        run_op(REGISTRY["cross_entropy"], np, [x, labels + np.asarray(90, dtype)], {})


ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1.0, 3e37]


@given(
    st.integers(1, 70), st.lists(st.tuples(st.integers(0, 69), st.sampled_from(ODD)), max_size=4)
)
def test_odd_values_are_as_numpy_has_them(size: int, odd: list[tuple[int, float]]) -> None:
    x = np.linspace(-2, 2, size, dtype="float32")
    for place, value in odd:
        x[place % size] = value
    for matrix in (np.stack([x, x[::-1]]), np.stack([x, x[::-1]], axis=1)):
        axis = int(matrix.shape[0] == size and matrix.shape != (2, 2))
        for axes in ((axis,), (1 - axis,), (0, 1)):
            for name in ("sum", "max", "min", "mean", "logsumexp"):
                have, want = run_both(REGISTRY[name], [matrix], attributes_of(name, axes, False))
                assert np.array_equal(np.isnan(have), np.isnan(want)), name
                assert close(have, want), name
        have, want = run_both(REGISTRY["softmax"], [matrix], {"axis": axis})
        assert np.array_equal(np.isnan(have), np.isnan(want)) and close(have, want)


def test_denormals_are_summed_exactly() -> None:
    x = np.full((3, 50), 1e-45, "float32")
    have, _ = run_both(REGISTRY["sum"], [x], attributes_of("sum", (1,), False))
    assert np.array_equal(have, np.full(3, 50, "float32") * np.float32(1e-45))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (2, 0, 3), (0, 0)])
def test_rows_of_nothing_and_no_rows_are_as_numpy_has_them(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, "float32")
    for axes in [(0,), (len(shape) - 1,), tuple(range(len(shape)))]:
        for name in ("sum", "mean"):
            have, want = run_both(REGISTRY[name], [x], attributes_of(name, axes, False))
            assert np.array_equal(have, want, equal_nan=True)
            assert not np.signbit(have[~np.isnan(have)]).any()


@pytest.mark.parametrize("size", [1000, 40_000, 1_000_000])
@pytest.mark.parametrize("down", [False, True])
def test_long_sums_are_as_accurate_as_pairwise_ones(size: int, down: bool) -> None:
    rng = np.random.default_rng(size)
    ours = theirs = 0.0
    for _ in range(5):
        x = rng.uniform(0, 1, size).astype("float32")
        exact = math.fsum(x.tolist())
        given = np.stack([x, x], axis=1 if down else 0)
        axes = (0,) if down else (1,)
        have = run_op(REGISTRY["sum"], np, [given], attributes_of("sum", axes, False))
        ours += (float(have[0]) - exact) ** 2
        theirs += (float(np.sum(given, axes)[0]) - exact) ** 2
    assert ours <= 4 * theirs + 5 * (exact * 2.0**-24) ** 2


def test_a_rows_bits_depend_on_its_elements_alone() -> None:
    x = np.random.default_rng(0).normal(size=(7, 5000)).astype("float32")
    attrs = attributes_of("sum", (1,), False)
    whole = run_op(REGISTRY["sum"], np, [x], attrs)
    rows = [run_op(REGISTRY["sum"], np, [row[None].copy()], attrs)[0] for row in x]
    flat = [run_op(REGISTRY["sum"], np, [row], attributes_of("sum", (0,), False)) for row in x]
    assert whole.tobytes() == np.array(rows).tobytes() == np.array(flat).tobytes()


def sum_in_turn(parts: Array) -> Array:
    total = np.zeros(parts.shape[1:], parts.dtype)
    for part in parts:
        total = total + part
    return total


def by_blocks(rows: Array) -> Array:
    """Rows added up by chunks, and blocks of chunks."""
    chunk, block = reductions.CHUNK, reductions.CHUNK * reductions.BLOCK
    blocks = []
    for some in np.split(rows, range(block, len(rows), block)):
        blocks.append(
            sum_in_turn(
                np.stack([sum_in_turn(c) for c in np.split(some, range(chunk, len(some), chunk))])
            )
        )
    return np.stack(blocks)


def test_lanes_chunks_and_blocks_are_summed_in_the_order_that_is_written_down() -> None:
    size = 2 * LANES * reductions.CHUNK * reductions.BLOCK + 3 * 1024 + 37
    x = np.random.default_rng(5).normal(size=size).astype("float32")
    have = run_op(REGISTRY["sum"], np, [x], attributes_of("sum", (0,), False))
    tail = np.zeros(LANES, "float32")
    tail[: size % LANES] = x[size // LANES * LANES :]
    blocks = by_blocks(x[: size // LANES * LANES].reshape(-1, LANES))
    total = sum_in_turn(np.concatenate([blocks, tail[None]]))
    while len(total) > 1:
        half = len(total) // 2
        total = total[:half] + total[half:]
    assert have.tobytes() == total[0].tobytes()


@pytest.mark.parametrize("shape", [(2, 2100, 70), (1, 300, 1100), (3, 7, 33), (1, 9000, 40)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_columns_are_summed_in_the_same_order_however_many_go_down_together(
    shape: tuple[int, int, int], dtype: str
) -> None:
    x = np.random.default_rng(7).normal(size=shape).astype(dtype)
    attrs = attributes_of("sum", (1,), False)
    have = run_op(REGISTRY["sum"], np, [x], attrs)
    want = np.stack([sum_in_turn(by_blocks(rows)) for rows in x])
    assert have.tobytes() == want.tobytes()
    check_threads(lambda: [run_op(REGISTRY["sum"], np, [x], attrs)], [want])


@pytest.mark.parametrize("rows", [0, 1, 8, 33])
def test_columns_of_several_reductions_and_of_no_rows(rows: int) -> None:
    x = gf.placeholder("float32", (None, 50), name="x")
    fetches = [gf.sum(x, 0), gf.sum(gf.astype(x, "int32"), 0), gf.any(x > 1, 0), x * 2 + 1,
               gf.mean(gf.tanh(x), 0)]  # fmt: skip
    given = np.random.default_rng(8).normal(size=(rows, 50)).astype("float32")
    with gf.Session(gf.Cluster.here(threads=1)) as s, np.errstate(all="ignore"):
        total, whole, some, line, mean = s.run(fetches, {x: given})
        assert close(total, given.sum(0)) and close(line, given * 2 + 1)
        assert (whole == given.astype("int32").sum(0)).all() and (some == (given > 1).any(0)).all()
        assert close(mean, np.tanh(given).mean(0) if rows else np.full(50, np.nan, "float32"))


@pytest.mark.parametrize("name", ["softmax", "standardize"])
@pytest.mark.parametrize("axis", [0, 1])
def test_any_number_of_threads_gives_the_same_bits(name: str, axis: int) -> None:
    x = np.random.default_rng(6).normal(size=(801, 301)).astype("float32")
    attrs: Any = {"axis": axis} if name == "softmax" else {"axis": (axis,), "epsilon": 0.1}
    alone = run_op(REGISTRY[name], np, [x], attrs)
    check_threads(lambda: [run_op(REGISTRY[name], np, [x], attrs)], [alone])


def kernel(names: list[str], over: str = "rows") -> RegionKernel:
    axis = (("axis", 1, "1"),)
    ops = tuple(
        RegionOp(REGISTRY[n], axis if n == "softmax" else (), ((i > 0, max(i - 1, 0)),))
        for i, n in enumerate(names)
    )
    axes = (True, True) if over == "rows" else (True, True, True)
    return kernel_of(Region(len(axes), (Operand("float32", axes),), ops, (len(ops) - 1,), over))


@pytest.mark.parametrize("over", ["rows", "columns"])
def test_a_kernel_with_reductions_computes_in_vector_registers(over: str) -> None:
    sizes = (64, 64) if over == "rows" else (1, 64, 64)
    text = compiler().assembly(kernel(["tanh", "softmax"], over).task(sizes).text)
    registers = re.findall(r"\b(?:z|y|x)mm\d+|\bv\d+\.4s", text)
    assert len(registers) > 100
    assert re.search(r"v?addps\b.*[xyz]mm|fadd\s+v", text)


def test_what_is_dear_waits_for_later_passes_and_what_is_cheap_is_computed_anew() -> None:
    assert kernel(["softmax"]).source.passes == 3
    assert kernel(["softmax"]).source.kept == 1  # the exponentials
    assert kernel(["negative", "softmax"]).source.kept == 1
    assert kernel(["tanh", "softmax"]).source.kept == 2


def test_more_passes_and_steps_cost_more() -> None:
    plain, long = kernel(["softmax"]), kernel(["tanh", "softmax"])
    assert 0 < plain.estimate_nanoseconds(1000) < long.estimate_nanoseconds(1000)
    assert plain.estimate_nanoseconds(2000) == pytest.approx(2 * plain.estimate_nanoseconds(1000))
    few, many = (plain.task(sizes).nanoseconds for sizes in ((10, 1000), (1000, 10)))
    assert few < many  # short rows take long


@pytest.mark.parametrize(
    ("shape", "axes", "want"),
    [
        ((3, 4), (1,), "rows"),
        ((3, 4), (0,), "columns"),
        ((3, 4), (0, 1), "rows"),
        ((3, 1), (1,), "rows"),
        ((2, 3, 4), (1,), "columns"),
        ((2, 3, 4), (0, 2), None),
        ((2, 3, 1), (0, 2), "columns"),
        ((1, 3, 4), (0, 2), "rows"),
    ],
)
def test_which_way_a_reduction_goes(
    shape: tuple[int, ...], axes: tuple[int, ...], want: str | None
) -> None:
    assert orientation(shape, axes) == want
    form = collapse_axes(shape, [shape], axes)
    assert (form.over if form else None) == want


STEPS = [
    lambda a, b: a + gf.sum(b, axis=1, keepdims=True),
    lambda a, b: gf.nn.softmax(a) * b,
    lambda a, b: a * gf.expand_dims(gf.max(b, axis=1), 1),
    lambda a, b: gf.nn.log_softmax(a + b),
    lambda a, b: gf.nn.layer_norm(a) - b,
    lambda a, b: a - gf.mean(b, axis=0),
    lambda a, b: gf.nn.softmax(a, axis=0) + b,
    lambda a, b: gf.tanh(a) + gf.logsumexp(b, axis=1, keepdims=True),
    lambda a, b: a / (1.0 + gf.var(b, axis=0)),
    lambda a, b: gf.broadcast_to(gf.mean(a), (6, 40)) * b,
    lambda a, b: gf.where(a > gf.min(b, axis=1, keepdims=True), a, b),
]


@given(
    st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=40)
def test_random_graphs_of_reductions_are_close_to_plain_kernels(steps: Any) -> None:
    x: Tensor = gf.placeholder("float64", (6, 40), name="x")
    values = [x, gf.tanh(x)]
    for build, i, j in steps:
        values.append(build(values[i % len(values)], values[j % len(values)]))
    fed = {x: np.random.default_rng(len(steps)).normal(size=(6, 40))}
    have = evaluate([values[-1]], fed)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHFLOW_JIT", "off")
        want = evaluate([values[-1]], fed)[0]
    assert np.allclose(have, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("first", [gf.sum, gf.max])
def test_a_region_of_more_than_ten_passes_over_its_rows_compiles(first: Any) -> None:
    x = gf.placeholder("float32", (6, 40), name="x")
    y = x - first(x, axis=-1, keepdims=True)
    for i in range(12):
        reduced = (gf.sum, gf.max)[i % 2]
        y = gf.tanh(y - reduced(y, axis=-1, keepdims=True))
    fed = {x: np.random.default_rng(0).normal(size=(6, 40)).astype("float32")}
    with gf.Session() as session:
        assert session.run(y, fed).tobytes() == np.asarray(evaluate([y], fed)[0]).tobytes()
