"""Generated kernels of elementwise ops: numpy's bits where an op has exact ones, any shape, any
length, any cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.ir.op import REGISTRY, Op
from graphflow.ir.spec import is_inexact
from graphflow.ops.kernels.codegen.region import Operand, Region, RegionOp, freeze_attributes
from graphflow.ops.kernels.fusion.region_kernels import KernelLaunch, kernel_of, trace_op
from graphflow.ops.kernels.fusion.row_ops import collapse_axes
from graphflow.ops.kernels.jit.array_address import address, empty_aligned
from graphflow.ops.kernels.jit.compiler import compiler
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool

Array = np.ndarray[Any, Any]
FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, 3.5, -2.5, 1e-40, -1e-40, 1e38, 3.4e38, np.inf, -np.inf,
     np.nan, 127.0, 2.0**31, 1.0000001]
)  # fmt: skip
INTS = [0, 1, 2, 3, 7, 31, 63, 64, 100, 127]


def launch_region(
    region: Region, arrays: Sequence[Array], shape: tuple[int, ...], out: list[Array] | None = None
) -> list[Array]:
    """What a region makes of arrays."""
    form = collapse_axes(shape, [a.shape for a in arrays])
    kernel = kernel_of(region)
    if out is None:
        out = [np.empty(shape, d) for d in kernel.source.dtypes]
    KernelLaunch(kernel, form.sizes, [address(a) for a in (*arrays, *out)])()
    return out


def of_op(op: Op, arrays: Sequence[Array], attrs: Any) -> Array:
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    form = collapse_axes(shape, [a.shape for a in arrays])
    operands = tuple(Operand(a.dtype.name, x) for a, x in zip(arrays, form.axes, strict=True))
    items = freeze_attributes(attrs)
    assert items is not None
    applied = RegionOp(op, items, tuple((False, i) for i in range(len(arrays))))
    region = Region(len(form.sizes), operands, (applied,), (0,))
    return launch_region(region, arrays, shape)[0]


def exact_calls() -> list[Any]:
    """Ops and dtypes with a kernel whose bits are a matter of IEEE 754 alone."""
    found = []
    for name, op in sorted(REGISTRY.items()):
        if not op.elementwise or op.expr is None:
            continue
        for number, sample in enumerate(op.samples):
            dtypes = {s.dtype.name for s in sample.inputs} - {"bool"}
            swaps = {
                "float32": ("float32", "float64", "float16", "bfloat16"),
                "int32": ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"),
            }
            others = {d for own in dtypes for d in swaps.get(own, (own,))} or {"bool"}
            for other in sorted(others):
                given = [s.dtype if s.dtype == bool else np.dtype(other) for s in sample.inputs]
                known = trace_op(op, given, sample.attrs)
                if known is not None and not known.approximate:
                    case = (op, given, dict(sample.attrs))
                    found.append(pytest.param(*case, id=f"{name}-{other}-{number}"))
    return found


def values(dtype: np.dtype[Any], size: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, size).astype(bool)
    if is_inexact(dtype):
        with np.errstate(over="ignore"):
            pool = np.concatenate([FLOATS, rng.normal(size=20)]).astype(dtype)
        return rng.choice(pool, size)
    info = np.iinfo(dtype)
    pool = [*INTS, *(-i for i in INTS if info.min), info.min, info.max]
    return np.array(pool, dtype)[rng.integers(0, len(pool), size)]


def has_same_bits(a: Array, b: Array) -> bool:
    if is_inexact(a.dtype):
        a, b = (np.where(np.isnan(t), t.dtype.type("nan"), t) for t in (a, b))
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("op", "dtypes", "attrs"), exact_calls())
def test_a_kernel_gives_numpys_bits(op: Op, dtypes: Any, attrs: Any) -> None:
    arrays = [values(d, 64 * 5 + 7, seed) for seed, d in enumerate(dtypes)]
    with np.errstate(all="ignore"):
        (want,) = op.run(np, arrays, attrs, plain=True)
    assert has_same_bits(of_op(op, arrays, attrs), np.asarray(want))


SHAPES = st.sampled_from(
    [
        [(7,), (7,)], [(), (33,)], [(5, 1), (1, 9)], [(4, 3), (3,)], [(40, 17), (40, 1)],
        [(2, 3, 5), (3, 1)], [(2, 1, 5), (1, 3, 1)], [(2, 3, 4, 5), (2, 1, 4, 1)], [(1,), (1, 1)],
        [(0, 3), (3,)], [(3, 0), (3, 1)], [(2, 3, 1, 5, 1, 2), (3, 1, 5, 1, 1)], [(), ()],
        [(3, 100), (100,)],
    ]
)  # fmt: skip


@given(SHAPES, st.booleans())
def test_any_broadcasting_is_a_loop_nest(shapes: Any, swapped: bool) -> None:
    rng = np.random.default_rng(len(str(shapes)))
    a, b = (rng.normal(size=s).astype("float32") for s in (shapes[::-1] if swapped else shapes))
    have = of_op(REGISTRY["subtract"], [a, b], {})
    assert have.shape == (a - b).shape and has_same_bits(have, np.asarray(a - b))


CHAIN = ("tanh", "exp", "negative", "sigmoid", "square")


def chain(operand: Operand, names: Sequence[str], results: tuple[int, ...]) -> Region:
    ops = tuple(RegionOp(REGISTRY[n], (), ((i > 0, max(i - 1, 0)),)) for i, n in enumerate(names))
    return Region(len(operand.axes), (operand,), ops, results)


@given(st.integers(1, 4), st.integers(1, 70))
def test_however_a_region_is_cut_it_gives_the_same_bits(cut: int, size: int) -> None:
    x = np.random.default_rng(size).normal(size=size).astype("float32")
    operand = Operand("float32", (size > 1,))
    whole = launch_region(chain(operand, CHAIN, (cut - 1, 4)), [x], (size,))
    first = launch_region(chain(operand, CHAIN[:cut], (cut - 1,)), [x], (size,))
    second = launch_region(chain(operand, CHAIN[cut:], (len(CHAIN) - cut - 1,)), first, (size,))
    assert has_same_bits(whole[0], first[0]) and has_same_bits(whole[1], second[0])


@pytest.mark.parametrize("shape", [(200_001,), (1003, 130)])
def test_any_number_of_threads_gives_the_same_bits(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=s).astype("float32") for s in (shape, shape[-1:])]
    gelu = REGISTRY["gelu"]
    alone = of_op(gelu, [of_op(REGISTRY["add"], arrays, {})], {})
    for threads in (2, 3, 5):
        pool = Pool(threads)
        with use_pool(pool):
            shared = of_op(gelu, [of_op(REGISTRY["add"], arrays, {})], {})
        pool.close()
        assert has_same_bits(alone, shared)


def test_a_result_may_be_written_over_an_operand() -> None:
    x = np.random.default_rng(0).normal(size=1001).astype("float32")
    region = chain(Operand("float32", (True,)), ("tanh", "exp"), (0, 1))
    want = launch_region(region, [x], x.shape)
    over, beside = x.copy(), np.empty_like(x)
    launch_region(region, [over], x.shape, [beside, over])
    assert has_same_bits(over, want[1]) and has_same_bits(beside, want[0])


@pytest.mark.parametrize("name", ["gelu", "tanh", "log1p", "sin"])
@pytest.mark.parametrize("length", [2, 7, 63, 64, 65, 100, 257])
def test_an_elements_bits_do_not_depend_on_how_many_a_row_has(name: str, length: int) -> None:
    x = np.random.default_rng(0).normal(size=(9, length)).astype("float32")
    bias = np.zeros(length, "float32")
    operands = (Operand("float32", (True, True)), Operand("float32", (False, True)))
    ops = (
        RegionOp(REGISTRY["add"], (), ((False, 0), (False, 1))),
        RegionOp(REGISTRY[name], (), ((True, 0),)),
    )
    (rows,) = launch_region(Region(2, operands, ops, (1,)), [x, bias], x.shape)
    (flat,) = launch_region(
        chain(Operand("float32", (True,)), (name,), (0,)), [x.ravel()], (x.size,)
    )
    assert has_same_bits(rows.ravel(), flat)


def test_a_kernels_code_uses_vector_registers() -> None:
    kernel = kernel_of(chain(Operand("float32", (True,)), ("gelu",), (0,)))
    code = compiler().assembly(kernel.task((1000,)).text)
    features = compiler().features.split(",")
    if "+avx512f" in features:
        assert "vfmadd" in code and "zmm" in code
    elif "+avx2" in features:
        assert "vmulps" in code and "ymm" in code
    elif "+neon" in features:
        assert "fmul" in code and ".4s" in code
    else:
        pytest.skip("vector registers of this processor are not known here")
    assert "expf" not in code and "call" not in code


@pytest.mark.parametrize("name", ["gelu", "negative", "isnan"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 63, 1000, 200_003])
def test_stores_past_the_caches_change_no_bits(name: str, dtype: str, size: int) -> None:
    kernel = kernel_of(chain(Operand(dtype, (True,)), (name,), (0,)))
    task = kernel.streamed_task((size,))
    assert task is not None
    x = np.linspace(-3, 3, size).astype(dtype)
    wanted, found = (empty_aligned(size * 8).view(kernel.source.dtypes[0])[:size] for _ in "ab")
    KernelLaunch(kernel, (size,), [address(x), address(wanted)])()
    with use_pool(Pool(2)):
        launch = KernelLaunch(kernel, (size,), [None, None], task)
        for _ in range(2):
            found[...] = 0
            launch(x, found)
            assert has_same_bits(wanted, found)
    code = compiler().assembly(task.text)
    if "+avx" in compiler().features.split(","):
        assert "movnt" in code


def test_only_kernels_of_one_axis_store_past_the_caches() -> None:
    operands = (Operand("float32", (True, True)), Operand("float32", (False, True)))
    ops = (RegionOp(REGISTRY["add"], (), ((False, 0), (False, 1))),)
    assert kernel_of(Region(2, operands, ops, (0,))).streamed_task((3, 4)) is None


@pytest.mark.parametrize(
    "expr",
    [
        lambda xp, x: np.exp(x),
        lambda xp, x: x if x > 0 else -x,
        lambda xp, x: xp.fft(x),
        lambda xp, x: x.sum(),
        lambda xp, x: 1.0,
        lambda xp, x: x + "a",
        lambda xp, x: x.astype("int32"),
    ],
)
def test_an_expression_that_does_anything_else_keeps_its_plain_kernel(expr: Any) -> None:
    op = Op("strange", infer=lambda x: x, expr=expr, elementwise=True)
    assert trace_op(op, [np.dtype("float32")], {}) is None


def test_complex_numbers_keep_their_plain_kernels() -> None:
    assert trace_op(REGISTRY["exp"], [np.dtype("complex64")], {}) is None


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_reductions_and_bits_of_halves_keep_their_plain_kernels(half: str) -> None:
    assert trace_op(REGISTRY["softmax"], [np.dtype(half)], {"axis": -1}) is None
    assert trace_op(REGISTRY["bitcast"], [np.dtype(half)], {"dtype": "int16"}) is None
    assert trace_op(REGISTRY["astype"], [np.dtype("float64")], {"dtype": half}) is None


def test_every_float32_becomes_the_nearest_bfloat16_and_back() -> None:
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    single = ((np.arange(1 << 16, dtype=np.uint32) << 16) | low[:, None]).view(np.float32).ravel()
    with np.errstate(invalid="ignore"):
        rounded = single.astype("bfloat16")
    found = of_op(REGISTRY["astype"], [single], {"dtype": "bfloat16"})
    np.testing.assert_array_equal(found.view(np.uint16), rounded.view(np.uint16))
    wide = of_op(REGISTRY["astype"], [rounded], {"dtype": "float32"})
    np.testing.assert_array_equal(wide.view(np.uint32) >> 16, rounded.view(np.uint16))
    assert not (wide.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@given(st.integers(1, 4), st.integers(1, 70))
def test_values_between_ops_of_halves_are_rounded_wherever_a_region_is_cut(
    half: str, cut: int, size: int
) -> None:
    x = np.random.default_rng(size).normal(size=size).astype(half)
    operand = Operand(half, (size > 1,))
    whole = launch_region(chain(operand, CHAIN, (cut - 1, 4)), [x], (size,))
    first = launch_region(chain(operand, CHAIN[:cut], (cut - 1,)), [x], (size,))
    second = launch_region(chain(operand, CHAIN[cut:], (len(CHAIN) - cut - 1,)), first, (size,))
    assert has_same_bits(whole[0], first[0]) and has_same_bits(whole[1], second[0])
    step = x
    for name in CHAIN:
        (step,) = REGISTRY[name].run(np, [step], {})
    assert has_same_bits(whole[1], step)
