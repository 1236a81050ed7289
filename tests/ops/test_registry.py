"""Properties of every op: shape rule, kernels, buffers, gradients, numpy against cupy."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.autodiff import gradients
from graphflow.build import placeholder
from graphflow.errors import DifferentiationError
from graphflow.interpret import evaluate
from graphflow.op import FUNCTIONS, REGISTRY, Op, Sample, Tensor, as_tensor
from graphflow.spec import Dim, TensorSpec, is_inexact, kind
from graphflow.spec import evaluate as size_of

G = FUNCTIONS
# The executor gives these their values; they compute nothing.
OF_THE_EXECUTOR = {"constant", "placeholder", "variable", "assign", "group", "send", "recv"}
# What these compute is the user's; tests/ops/test_control.py checks them.
HOLD_BODIES = {"call", "cond", "scan", "while_loop"}
CASES = [
    pytest.param(op, sample, id=f"{op.name}-{i}")
    for op in REGISTRY.values()
    for i, sample in enumerate(op.samples)
]


def is_smooth(spec: TensorSpec) -> bool:
    """Whether gradients flow through it."""
    return is_inexact(spec.dtype)


DOUBLE = {"float": "float64", "complex": "complex128"}


def doubled(sample: Sample) -> Sample:
    """The sample in float64 or complex128, so that finite differences mean something."""
    inputs = tuple(
        s if i in sample.fixed else s.with_dtype(DOUBLE.get(kind(s.dtype), s.dtype))
        for i, s in enumerate(sample.inputs)
    )
    wide = dict.fromkeys(("bfloat16", "float16", "float32"), "float64") | {
        "complex64": "complex128"
    }
    attrs = {k: wide.get(v, v) if isinstance(v, str) else v for k, v in sample.attrs.items()}
    return replace(sample, inputs=inputs, attrs=attrs)


def draw(sample: Sample, seed: str) -> list[np.ndarray]:
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    arrays = []
    for spec in sample.inputs:
        if kind(spec.dtype) == "complex":
            parts = rng.uniform(sample.low, sample.high, (2, *spec.shape))
            array = parts[0] + 1j * parts[1]
        elif is_smooth(spec):
            array = rng.uniform(sample.low, sample.high, spec.shape)
        elif kind(spec.dtype) == "bool":
            array = rng.integers(0, 2, spec.shape)
        else:
            array = rng.integers(0, sample.classes, spec.shape)
        array = np.asarray(array).astype(spec.dtype)
        arrays.append(array)
    if sample.make is not None:
        arrays = sample.make(arrays)
    for array in arrays:
        array.flags.writeable = False
    return arrays


def inferred(op: Op, sample: Sample, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    result = op.infer(*specs, **sample.attrs)
    return (result,) if isinstance(result, TensorSpec) else result


def same_bits(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_every_op_has_samples_and_a_cost() -> None:
    computing = [op for op in REGISTRY.values() if op.name not in OF_THE_EXECUTOR | HOLD_BODIES]
    assert [op.name for op in computing if not op.samples] == []
    assert [op.name for op in REGISTRY.values() if op.cost is None] == []


def test_every_op_computes_or_is_the_executors() -> None:
    silent = {op.name for op in REGISTRY.values() if op.kernel is None and op.expr is None}
    assert silent <= OF_THE_EXECUTOR


@pytest.mark.parametrize("op, sample", CASES)
def test_kernels_agree_with_the_shape_rule_and_leave_their_inputs_alone(
    op: Op, sample: Sample
) -> None:
    arrays = draw(sample, op.name)
    before = [a.tobytes() for a in arrays]
    with np.errstate(all="ignore"):
        results = op.run(np, arrays, sample.attrs)
        again = op.run(np, arrays, sample.attrs)
    for spec, result, second in zip(
        inferred(op, sample, sample.inputs), results, again, strict=True
    ):
        assert (np.shape(result), result.dtype) == (spec.shape, spec.dtype)
        assert same_bits(np.asarray(result), np.asarray(second))
        assert np.asarray(result).flags.c_contiguous or op.elementwise
    assert [a.tobytes() for a in arrays] == before


@pytest.mark.parametrize("op, sample", CASES)
def test_costs_are_finite_and_not_negative(op: Op, sample: Sample) -> None:
    assert op.cost is not None
    cost = op.cost(*sample.inputs, **sample.attrs)
    assert cost.flops >= 0
    assert cost.bytes is None or cost.bytes >= 0


@pytest.mark.parametrize("op, sample", [c for c in CASES if c.values[1].inputs])
def test_the_shape_rule_commutes_with_binding_a_leading_symbol(op: Op, sample: Sample) -> None:
    bindings: dict[str, int] = {}

    def symbolic(spec: TensorSpec) -> TensorSpec:
        if not spec.shape or spec.shape[0] in (0, 1):
            return spec
        bindings[f"n{spec.shape[0]}"] = spec.shape[0]
        return spec.with_shape((Dim.symbol(f"n{spec.shape[0]}"), *spec.shape[1:]))

    known = inferred(op, sample, sample.inputs)
    unknown = inferred(op, sample, [symbolic(s) for s in sample.inputs])
    assert tuple(s.bind(bindings) for s in unknown) == known
    cost = op.cost(*map(symbolic, sample.inputs), **sample.attrs)
    assert size_of(cost.flops, bindings) == op.cost(*sample.inputs, **sample.attrs).flops


@pytest.mark.parametrize("op, sample", [c for c in CASES if c.values[0].into is not None])
def test_into_a_used_buffer_gives_the_bits_of_the_kernel(op: Op, sample: Sample) -> None:
    arrays = draw(sample, op.name)
    step = {"step": 0} if op.random else {}
    with np.errstate(all="ignore"):
        wanted = op.run(np, arrays, sample.attrs)
        outs = tuple(np.empty(np.shape(w), w.dtype) for w in wanted)
        for out in outs:
            out.reshape(-1).view(np.uint8)[...] = 1 if out.dtype == bool else 0xCD
        op.into(np, outs[0] if len(outs) == 1 else outs, *arrays, **step, **sample.attrs)
        for out, result in zip(outs, wanted, strict=True):
            assert same_bits(out, np.asarray(result))


@pytest.mark.parametrize(
    "op, sample", [c for c in CASES if c.values[0].into is not None and c.values[0].elementwise]
)
def test_an_elementwise_op_may_write_over_an_input_of_its_results_spec(
    op: Op, sample: Sample
) -> None:
    arrays = draw(sample, op.name)
    step = {"step": 0} if op.random else {}
    with np.errstate(all="ignore"):
        (wanted,) = op.run(np, arrays, sample.attrs)
        for i, array in enumerate(arrays):
            if (array.shape, array.dtype) == (np.shape(wanted), wanted.dtype):
                copies = [a.copy() for a in arrays]
                op.into(np, copies[i], *copies, **step, **sample.attrs)
                assert same_bits(copies[i], np.asarray(wanted))


# Gradients --------------------------------------------------------------------------------------


def projected(outputs: Any, rng: np.random.Generator) -> Tensor | None:
    """A real scalar out of the float and complex outputs: their sum, weighted at random."""
    tensors = [outputs] if isinstance(outputs, Tensor) else outputs
    total: Tensor | None = None
    for y in tensors:
        if is_smooth(y.spec):
            weights = rng.uniform(0.5, 1.5, y.shape).astype(y.dtype)
            if kind(y.dtype) == "complex":
                weights = weights + 1j * rng.uniform(0.5, 1.5, y.shape)
            part = G["real"](G["sum"](y * as_tensor(weights)))
            total = part if total is None else total + part
    return total


def check_gradients(
    build: Callable[..., Any], arrays: Sequence[np.ndarray], rng: np.random.Generator
) -> None:
    """Compare derivatives along random directions with central differences, to second order.

    A complex direction moves real and imaginary parts; the slope along it is Re(g · conj(d)).
    """
    xs = [placeholder(a.dtype, a.shape) for a in arrays]
    wanted = [i for i, a in enumerate(arrays) if a.dtype in (np.float64, np.complex128)]
    directions = {i: rng.uniform(-1, 1, arrays[i].shape) for i in wanted}
    for i in wanted:
        if arrays[i].dtype == np.complex128:
            directions[i] = directions[i] + 1j * rng.uniform(-1, 1, arrays[i].shape)
    scalar = projected(build(*xs), rng)
    for _ in range(2):
        assert scalar is not None
        slopes = gradients(scalar, [xs[i] for i in wanted])
        assert [g.shape for g in slopes] == [arrays[i].shape for i in wanted]

        def shifted(by: float, scalar: Tensor = scalar) -> float:
            values = [
                a + by * directions[i] if i in directions else a for i, a in enumerate(arrays)
            ]
            return float(evaluate([scalar], dict(zip(xs, values, strict=True)))[0])

        numeric = (shifted(1e-5) - shifted(-1e-5)) / 2e-5
        values = evaluate(slopes, dict(zip(xs, arrays, strict=True)))
        assert [g.dtype for g in values] == [arrays[i].dtype for i in wanted]
        exact = sum(
            float((g * directions[i].conj()).sum().real)
            for i, g in zip(wanted, values, strict=True)
        )
        assert exact == pytest.approx(numeric, rel=2e-5, abs=2e-6)
        scalar = sum((projected(g, rng) for g in slopes[1:]), start=projected(slopes[0], rng))


def is_differentiable(op: Op, sample: Sample) -> bool:
    outputs = inferred(op, sample, sample.inputs)
    smooth = any(map(is_smooth, sample.inputs)) and any(map(is_smooth, outputs))
    return op.vjp is not None and smooth


@pytest.mark.parametrize("op, sample", [c for c in CASES if is_differentiable(*c.values)])
def test_vjp_matches_finite_differences_to_second_order(op: Op, sample: Sample) -> None:
    sample = doubled(sample)
    rng = np.random.default_rng(zlib.crc32(op.name.encode()))
    check_gradients(lambda *xs: op(*xs, **sample.attrs), draw(sample, op.name), rng)


def test_an_op_without_gradient_is_refused_by_name_and_line() -> None:
    opaque = Op("opaque", infer=lambda x: x, kernel=lambda xp, x: x)
    x = placeholder("float32", (3,))
    y = opaque(x)
    with pytest.raises(DifferentiationError, match=r"opaque.*test_registry\.py:\d+.*stop_gradient"):
        gradients(y * 2.0, [x])


# Functions made of several ops: name -> a call with (3, 4) float tensors x and y.
COMPOSITES: dict[str, Callable[[Any, Any], Any]] = {
    "broadcast_arrays": lambda x, y: G["broadcast_arrays"](x, G["take"](y, 0, 0)),
    "diagonal": lambda x, y: G["diagonal"](x[:, :3]),
    "einsum": lambda x, y: G["einsum"]("ij,kj,k->ik", x, y, x[:, 0]),
    "flip": lambda x, y: G["flip"](x, 1),
    "full": lambda x, y: G["full"]((2, 3), G["sum"](x)),
    "gather": lambda x, y: G["gather"](x, np.array([[0, 1], [3, 3], [1, 0]])),
    "getitem": lambda x, y: x[1:, None, ::-2] * y[0, [1, 1]],
    "matrix_transpose": lambda x, y: x.mT * 2.0,
    "moveaxis": lambda x, y: G["moveaxis"](x, 0, -1),
    "outer": lambda x, y: G["outer"](x[0], y[:, 1]),
    "repeat": lambda x, y: G["repeat"](x, [0, 2, 1], 0) * G["repeat"](y, 3, 0)[:3],
    "roll": lambda x, y: G["roll"](x, (1, -6), (0, 1)) * y,
    "split": lambda x, y: [a * a for a in G["split"](x, [1, 3], 1)],
    "stack": lambda x, y: G["stack"]([x, y, x], 1),
    "swapaxes": lambda x, y: G["swapaxes"](x, 0, 1),
    "tensordot": lambda x, y: G["tensordot"](x, y, ([0, 1], [0, 1])),
    "tile": lambda x, y: G["tile"](x, (2, 1, 2)),
    "trace": lambda x, y: G["trace"](x[:, 1:]),
    "unstack": lambda x, y: [a * a for a in G["unstack"](x, 1)],
    "vecdot": G["vecdot"],
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_functions_made_of_several_ops_are_differentiable_twice(name: str) -> None:
    rng = np.random.default_rng(5)
    arrays = [rng.uniform(-2, 2, (3, 4)) for _ in range(2)]
    check_gradients(COMPOSITES[name], arrays, rng)


def test_at_least_seventy_public_functions_are_differentiable() -> None:
    ops = {
        op.name
        for op in REGISTRY.values()
        if not op.name.startswith("_")
        and not op.name.endswith("_grad")
        and any(is_differentiable(op, sample) for sample in op.samples)
    }
    assert len(ops | set(COMPOSITES)) >= 70, sorted(ops | set(COMPOSITES))


def test_every_name_the_array_api_gives_these_families_is_public() -> None:
    named = """
        reshape permute_dims matrix_transpose expand_dims squeeze concat stack split unstack getitem
        pad flip tile repeat roll broadcast_to broadcast_arrays moveaxis swapaxes take gather
        take_along_axis scatter_add one_hot matmul einsum outer tensordot vecdot tril triu zeros
        ones full arange eye linspace
    """
    assert [name for name in named.split() if name not in FUNCTIONS] == []


@pytest.mark.gpu
@pytest.mark.parametrize("op, sample", CASES)
def test_cupy_agrees_with_numpy(op: Op, sample: Sample) -> None:
    import cupy

    arrays = draw(sample, op.name)
    with np.errstate(all="ignore"):
        wanted = op.run(np, arrays, sample.attrs)
    there = [cupy.asarray(a) for a in arrays]
    for have, want in zip(op.run(cupy, there, sample.attrs), wanted, strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(cupy.asnumpy(have), want, rtol=2e-5, atol=2e-6)
    if op.into is not None:
        outs = tuple(cupy.full(np.shape(w), 1, w.dtype) for w in wanted)
        step = {"step": 0} if op.random else {}
        op.into(cupy, outs[0] if len(outs) == 1 else outs, *there, **step, **sample.attrs)
        for have, want in zip(outs, wanted, strict=True):
            np.testing.assert_allclose(cupy.asnumpy(have), want, rtol=2e-5, atol=2e-6)
