"""Floats of 16 bits: every op gives its float32 result of the same numbers, rounded once."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import GraphError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY, Op, Sample
from graphflow.ir.spec import TensorSpec, is_half, is_inexact
from graphflow.transforms.reverse_mode import gradients
from tests.ops.signs import fix_signs

HALVES = ["bfloat16", "float16"]
OF_THE_EXECUTOR = {"constant", "placeholder", "variable", "assign", "group", "send", "recv"}
CASES = [
    pytest.param(op, sample, id=f"{op.name}-{i}")
    for op in REGISTRY.values()
    for i, sample in enumerate(op.samples)
    if op.name not in OF_THE_EXECUTOR and any(s.dtype == np.float32 for s in sample.inputs)
]


def inputs_of(op: Op, sample: Sample, half: str) -> list[Any]:
    """The sample's arrays, floats in 16 bits."""
    rng = np.random.default_rng(zlib.crc32(op.name.encode()))
    arrays: list[Any] = []
    for spec in sample.inputs:
        if is_inexact(spec.dtype):
            array = rng.uniform(sample.low, sample.high, spec.shape)
        else:
            array = rng.integers(0, 2 if spec.dtype == bool else sample.classes, spec.shape)
        arrays.append(np.asarray(array).astype(spec.dtype))
    if sample.make is not None:
        arrays = sample.make(arrays)
    return [a.astype(half) if a.dtype == np.float32 else a for a in arrays]


def specs_of(op: Op, arrays: list[Any], sample: Sample) -> tuple[TensorSpec, ...] | None:
    """The outputs' specs; None if the op refuses 16 bits."""
    try:
        result = op.infer(*(TensorSpec(a.shape, a.dtype) for a in arrays), **sample.attrs)
    except GraphError:
        return None
    return (result,) if isinstance(result, TensorSpec) else result


def widen(arrays: list[Any]) -> list[Any]:
    return [a.astype("float32") if is_half(a.dtype) else a for a in arrays]


def has_same_values(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(
        np.array_equal(np.asarray(a, "float64"), np.asarray(b, "float64"), equal_nan=True)
        if a.dtype.kind != "c" else np.array_equal(a, b, equal_nan=True)
    )  # fmt: skip


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("op, sample", CASES)
def test_every_op_rounds_its_float32_result_once(op: Op, sample: Sample, half: str) -> None:
    arrays = inputs_of(op, sample, half)
    specs = specs_of(op, arrays, sample)
    if specs is None:
        pytest.skip("refuses 16 bits")
    with np.errstate(all="ignore"):
        wanted = op.run(np, widen(arrays), sample.attrs)
        results = op.run(np, arrays, sample.attrs)
        into = op.into_for([TensorSpec(a.shape, a.dtype) for a in arrays])
        outs = tuple(np.empty(s.shape, s.dtype) for s in specs)
        step = {"step": 0} if op.random else {}
        if into is not None:
            into(np, outs if len(outs) > 1 else outs[0], *arrays, **step, **sample.attrs)
        for have, want, out, spec in zip(results, wanted, outs, specs, strict=True):
            want = np.asarray(want).astype(spec.dtype)
            assert have.dtype == spec.dtype and has_same_values(np.asarray(have), want)
            assert into is None or has_same_values(out, want)


def is_differentiable_in_half(op: Op, arrays: list[Any], sample: Sample) -> bool:
    specs = specs_of(op, arrays, sample)
    return op.vjp is not None and specs is not None and any(is_half(s.dtype) for s in specs)


@pytest.mark.every(2)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("op, sample", [c for c in CASES if c.values[1].make is None])
def test_gradients_in_16_bits_are_near_those_in_float32(op: Op, sample: Sample, half: str) -> None:
    arrays = inputs_of(op, sample, half)
    if not is_differentiable_in_half(op, arrays, sample):
        pytest.skip("no gradient in 16 bits")
    values = []
    for given in (arrays, widen(arrays)):
        xs = [placeholder(a.dtype, a.shape) for a in given]
        targets = [x for x in xs if is_inexact(x.dtype)]
        ys = op(*xs, **sample.attrs)
        ys = [y for y in (ys if isinstance(ys, tuple) else (ys,)) if is_inexact(y.dtype)]
        grads = gradients(ys, targets)
        assert [g.dtype for g in grads] == [x.dtype for x in targets]
        values.append(evaluate(grads, dict(zip(xs, given, strict=True))))
    for have, want in zip(*values, strict=True):
        eps = 2.0**-7 if half == "bfloat16" else 2.0**-10
        scale = float(np.abs(want).max(initial=1.0))
        # a few roundings along the chain of nodes, some of them of larger numbers that cancel
        np.testing.assert_allclose(
            have.astype("float64"), want, rtol=16 * eps, atol=16 * eps * scale
        )


@pytest.mark.parametrize("half", HALVES)
def test_a_long_sum_of_small_numbers_does_not_get_stuck(half: str) -> None:
    x = placeholder(half, (None,))
    ones = np.ones(4096, half)
    with gf.Session() as s:
        total, mean, product = s.run([gf.sum(x), gf.mean(x), gf.matmul(x, x)], {x: ones})
    assert (float(total), float(mean), float(product)) == (4096, 1, 4096)


@pytest.mark.parametrize("half", HALVES)
def test_bodies_of_loops_round_at_each_of_their_nodes(half: str) -> None:
    xs, w = placeholder(half, (5, 3)), placeholder(half, (3, 3))

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        new = gf.tanh(carry @ w) + x
        return new, gf.sum(new)

    start = gf.zeros((1, 3), half)
    carry, sums = gf.scan(body, start, xs)
    (g,) = gradients(gf.sum(carry), [w])
    assert {carry.dtype.name, sums.dtype.name, g.dtype.name} == {half}
    rng = np.random.default_rng(3)
    a, b = (rng.uniform(-1, 1, s).astype(half) for s in [(5, 3), (3, 3)])
    state, totals = np.zeros((1, 3), half), []
    for row in a:
        wide = (state.astype("f") @ b.astype("f")).astype(half).astype("f")
        state = (np.tanh(wide).astype(half).astype("f") + row.astype("f")).astype(half)
        totals.append(state.astype("f").sum().astype(half))
    with gf.Session() as s:
        have = s.run([carry, sums, g], {xs: a, w: b})
    assert has_same_values(have[0], state) and has_same_values(have[1], np.array(totals))
    assert has_same_values(have[2], evaluate([g], {xs: a, w: b})[0])


@pytest.mark.gpu
@pytest.mark.parametrize("op, sample", CASES)
def test_cupy_gives_numpys_numbers_in_float16(op: Op, sample: Sample) -> None:
    import cupy

    arrays = inputs_of(op, sample, "float16")
    if specs_of(op, arrays, sample) is None or "gpu" not in op.device_kinds:
        pytest.skip("refuses 16 bits, or a gpu")
    with np.errstate(all="ignore"):
        wanted = op.run(np, arrays, sample.attrs)
    there = [*map(cupy.asarray, arrays)]
    found = [cupy.asnumpy(x) for x in op.run(cupy, there, sample.attrs)]
    for have, want in zip(fix_signs(op, found), fix_signs(op, wanted), strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=2.0**-9, atol=2.0**-9)
