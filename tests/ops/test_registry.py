"""Properties of every op: shape rule, kernels, buffers, gradients, numpy against cupy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import DifferentiationError, GraphflowError
from graphflow.frontend.builders import placeholder
from graphflow.ir.op import FUNCTIONS, REGISTRY, Op, Sample, owner_module
from graphflow.ir.spec import is_inexact
from graphflow.transforms.op_testing import (
    check_cost,
    check_into,
    check_kernel,
    check_symbolic_sizes,
    check_writing_in_place,
    draw,
    is_differentiable,
)
from graphflow.transforms.op_testing import check_gradients as check_op_gradients
from graphflow.transforms.op_testing import compare_gradients as check_gradients
from graphflow.transforms.reverse_mode import gradients
from tests.ops.signs import fix_signs

G = FUNCTIONS
# The executor gives these their values; they compute nothing.
OF_THE_EXECUTOR = {
    "constant", "placeholder", "variable", "assign", "group", "send", "recv", "collective_start",
    "collective_finish", "send_where", "recv_any", "received_from", "used_rows",
}  # fmt: skip
# They need another party at the other end; tests/ops/communication/test_channels.py checks them.
OF_CHANNELS = {"channel_send", "channel_receive", "merge", "replayed_order"}
# What these compute is the user's; tests/ops/control_flow/test_control.py checks them.
HOLD_BODIES = {"call", "cond", "scan", "while_loop", "concurrent", "numbered_call"}
CASES = [
    pytest.param(op, sample, id=f"{op.name}-{i}")
    for op in REGISTRY.values()
    for i, sample in enumerate(op.samples)
]


def test_every_op_has_samples_and_a_cost() -> None:
    ours = [
        op for op in REGISTRY.values() if owner_module(op) is None
    ]  # other tests register their own
    computing = [op for op in ours if op.name not in OF_THE_EXECUTOR | OF_CHANNELS | HOLD_BODIES]
    assert [op.name for op in computing if not op.samples] == []
    assert [op.name for op in ours if op.cost is None] == []


def test_every_op_computes_or_is_the_executors() -> None:
    silent = {op.name for op in REGISTRY.values() if op.kernel is None and op.expr is None}
    assert silent <= OF_THE_EXECUTOR


@pytest.mark.parametrize("op, sample", CASES)
def test_kernels_agree_with_the_shape_rule_and_leave_their_inputs_alone(
    op: Op, sample: Sample
) -> None:
    check_kernel(op, sample)


@pytest.mark.parametrize("op, sample", CASES)
def test_costs_are_finite_and_not_negative(op: Op, sample: Sample) -> None:
    check_cost(op, sample)


@pytest.mark.parametrize("op, sample", [c for c in CASES if c.values[1].inputs])
def test_the_shape_rule_commutes_with_binding_a_leading_symbol(op: Op, sample: Sample) -> None:
    check_symbolic_sizes(op, sample)


@pytest.mark.parametrize("op, sample", [c for c in CASES if len(c.values[1].inputs) > 1])
def test_sizes_that_one_symbol_fits_may_turn_out_to_be_equal(op: Op, sample: Sample) -> None:
    """So they do where a strategy gathers an axis: its size is the sum of the pieces'."""

    def build(size: Any, name: Callable[[int, int], str]) -> None:
        shapes = [
            tuple(name(i, d) if n == size else n for d, n in enumerate(spec.shape))
            for i, spec in enumerate(sample.inputs)
        ]
        pairs = zip(sample.inputs, shapes, strict=True)
        op(*(placeholder(spec.dtype, shape) for spec, shape in pairs), **sample.attrs)

    for size in {n for spec in sample.inputs for n in spec.shape} - {1}:
        try:
            build(size, lambda i, d: "n")
        except GraphflowError:
            continue  # it has to be known
        build(size, lambda i, d: f"n{i}{d}")


@pytest.mark.parametrize("op, sample", [c for c in CASES if c.values[1].inputs])
def test_no_size_is_a_size_like_any_other(op: Op, sample: Sample) -> None:
    """What the shape rule takes, the kernel computes, or says in words why not."""
    if op.name in OF_THE_EXECUTOR | HOLD_BODIES or op.name.endswith("_grad"):
        return  # gradients trust that their inputs fit each other
    for size in {n for x in sample.inputs for n in x.shape}:
        specs = [x.with_shape(tuple(0 if n == size else n for n in x.shape)) for x in sample.inputs]
        arrays = [np.ones(x.shape, x.dtype) for x in specs]
        try:
            expected = op.infer(*specs, **sample.attrs)
            with np.errstate(all="ignore"):
                results = op.run(np, arrays, sample.attrs)
        except (GraphflowError, IndexError):  # such as labels of no classes
            continue
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert [(r.shape, r.dtype) for r in results] == [(e.shape, e.dtype) for e in expected]


@pytest.mark.parametrize("op, sample", [c for c in CASES if c.values[0].into is not None])
def test_into_a_used_buffer_gives_the_bits_of_the_kernel(op: Op, sample: Sample) -> None:
    check_into(op, sample)


@pytest.mark.parametrize(
    "op, sample", [c for c in CASES if c.values[0].into is not None and c.values[0].elementwise]
)
def test_an_elementwise_op_may_write_over_an_input_of_its_results_spec(
    op: Op, sample: Sample
) -> None:
    check_writing_in_place(op, sample)


# Gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op, sample", [c for c in CASES if is_differentiable(*c.values)])
def test_vjp_matches_finite_differences_to_second_order(op: Op, sample: Sample) -> None:
    check_op_gradients(op, sample)


@pytest.mark.parametrize(
    "op, sample",
    [
        c
        for c in CASES
        if c.values[0].elementwise and len(c.values[1].inputs) > 1 and is_differentiable(*c.values)
    ],
)
def test_an_elementwise_ops_inputs_may_be_broadcast_which_its_vjp_need_not_know(
    op: Op, sample: Sample
) -> None:
    for narrow in range(len(sample.inputs)):
        inputs = [
            placeholder(spec.dtype, ("n", 2) if i != narrow else (2,))
            for i, spec in enumerate(sample.inputs)
        ]
        floats = [x for x in inputs if is_inexact(x.dtype)]
        firsts = gradients(G["sum"](G["real"](op(*inputs, **sample.attrs))), floats)
        seconds = gradients(G["sum"](G["real"](firsts[0] * firsts[0])), floats)
        assert [g.shape for g in (*firsts, *seconds)] == [x.shape for x in floats] * 2


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
    "diff": lambda x, y: G["diff"](x * y, 2),
    "einsum": lambda x, y: G["einsum"]("ij,kj,k->ik", x, y, x[:, 0]),
    "flip": lambda x, y: G["flip"](x, 1),
    "full": lambda x, y: G["full"]((2, 3), G["sum"](x)),
    "gather": lambda x, y: G["gather"](x, np.array([[0, 1], [3, 3], [1, 0]])),
    "getitem": lambda x, y: x[1:, None, ::-2] * y[0, [1, 1]],
    "matrix_transpose": lambda x, y: x.mT * 2.0,
    "meshgrid": lambda x, y: G["meshgrid"](x[0], y[1], x[:, 0], indexing="ij"),
    "moveaxis": lambda x, y: G["moveaxis"](x, 0, -1),
    "outer": lambda x, y: G["outer"](x[0], y[:, 1]),
    "pad": lambda x, y: G["pad"](x, 5, "reflect") * G["pad"](y, 5, "wrap"),
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

    if "gpu" not in op.device_kinds:
        pytest.skip("for cpus only")
    arrays = draw(sample, op.name)
    with np.errstate(all="ignore"):
        wanted = op.run(np, arrays, sample.attrs)
    there = [cupy.asarray(a) for a in arrays]
    found = [cupy.asnumpy(x) for x in op.run(cupy, there, sample.attrs)]
    for have, want in zip(fix_signs(op, found), fix_signs(op, wanted), strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)
    if op.into is not None:
        outs = tuple(cupy.full(np.shape(w), 1, w.dtype) for w in wanted)
        step = {"step": 0} if op.random else {}
        op.into(cupy, outs[0] if len(outs) == 1 else outs, *there, **step, **sample.attrs)
        for have, want in zip(outs, wanted, strict=True):
            np.testing.assert_allclose(cupy.asnumpy(have), want, rtol=2e-5, atol=2e-6)
