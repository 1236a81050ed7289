"""Promise: an input that an output element does not read gets no part of its cotangent, not even
of an infinite one.

A gradient rule that multiplies by the 0 of a mask makes NaN of it. `sqrt(relu(x))` has such a
cotangent: the slope of the root at 0 is infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY, Op, Sample, Tensor
from graphflow.transforms.forward_mode import jvp
from graphflow.transforms.op_testing import draw, is_differentiable, is_smooth, to_double
from graphflow.transforms.reverse_mode import gradients

Array = np.ndarray[Any, Any]
Place = tuple[int, ...]
# These add up products, some of which have a factor that is 0 (a weight of an interpolation, the
# padding of a convolution, the other triangle, a probability): arithmetic, not a choice.
SUMS_OF_PRODUCTS = (
    "attention", "cholesky", "conv", "gram", "lu", "qr", "resize", "roi_", "triangular_solve",
)  # fmt: skip
WITHOUT = "gammainc_slope"  # its derivative by the first argument is NaN everywhere
_LONG = ("lstm", "lstm_grad", "gru", "gru_grad")  # every step's cotangent through every step: 30 s
CASES = [
    pytest.param(
        op, sample, id=f"{op.name}-{i}", marks=[pytest.mark.slow] if op.name in _LONG else []
    )
    for op in REGISTRY.values()
    for i, sample in enumerate(op.samples)
    if is_differentiable(op, sample) and not op.random
    if not op.name.startswith((*SUMS_OF_PRODUCTS, WITHOUT))
    if not any(spec.dtype.kind == "c" for spec in sample.inputs)  # their products mix both parts
]


@pytest.mark.every(5)
@pytest.mark.parametrize("op, sample", CASES)
def test_infinite_cotangents_and_tangents_stop_at_what_is_not_read(op: Op, sample: Sample) -> None:
    sample = to_double(sample)
    with np.errstate(all="ignore"):
        check_cut_off(lambda *xs: op(*xs, **sample.attrs), draw(sample, op.name), op.name)


def check_cut_off(build: Callable[..., Any], arrays: Sequence[Array], name: str = "") -> None:
    """Make the cotangent of one output element infinite, or the tangent of one input element. What
    is known of the elements that do not depend on each other stays as it is."""
    xs = [placeholder(a.dtype, a.shape) for a in arrays]
    ys = build(*xs)
    outputs = [y for y in (ys if isinstance(ys, tuple) else (ys,)) if is_smooth(y.spec)]
    if any(y.dtype.kind == "c" for y in outputs):
        return
    wanted = [x for x in xs if is_smooth(x.spec)]
    gs, ts = ([placeholder(t.dtype, t.shape) for t in some] for some in (outputs, wanted))
    slopes = gradients(outputs, wanted, gs)
    tangents = jvp(outputs, wanted, ts)
    rng = np.random.default_rng(len(name))
    given = dict(zip(xs, arrays, strict=True))
    plain = {t: rng.uniform(0.5, 1.5, t.shape) for t in (*gs, *ts)}

    def unread(x: Tensor, at: Place) -> list[Array]:
        """Where each output stays as it is when an element of an input moves a little."""
        here = evaluate(outputs, given)
        ends = [
            evaluate(outputs, given | {x: move_element(given[x], at, by)}) for by in (1e-3, -1e-3)
        ]
        return [
            np.logical_and.reduce([(a == b) | (np.isnan(a) & np.isnan(b)) for a in both])
            for b, *both in zip(here, *ends, strict=True)
        ]

    def evaluate_with_seed(
        which: Sequence[Tensor], seed: Tensor, at: Place, value: float
    ) -> list[Array]:
        seeds = plain | {seed: np.where(marks(seed.shape, at), value, plain[seed])}
        return list(evaluate(which, given | seeds))

    for i, (x, t) in enumerate(zip(wanted, ts, strict=True)):
        for at in some_places(x.shape, rng, 4):
            free = unread(x, at)
            for bad in (np.inf, np.nan):
                both = (evaluate_with_seed(tangents, t, at, v) for v in (0.0, bad))
                for before, after, mine in zip(*both, free, strict=True):
                    same = np.allclose(after[mine], before[mine], rtol=1e-12, atol=1e-12)
                    assert same, f"a tangent {bad} of input {i} at {at} reaches {after}"
                for g, mine in zip(gs, free, strict=True):
                    for place in list(map(tuple, np.argwhere(mine)))[:3]:
                        before, after = (
                            evaluate_with_seed([slopes[i]], g, place, v)[0] for v in (0.0, bad)
                        )
                        assert np.isclose(after[at], before[at], rtol=1e-12, atol=1e-12), (
                            f"a cotangent {bad} of the output at {place} makes {after[at]} of "
                            f"{before[at]} in input {i} at {at}"
                        )


def marks(shape: Sequence[int], at: Place) -> Array:
    found = np.zeros(shape, bool)
    found[at] = True
    return found


def move_element(array: Array, at: Place, by: float) -> Array:
    return np.where(marks(array.shape, at), array + by, array)


def some_places(shape: Sequence[int], rng: np.random.Generator, count: int) -> list[Place]:
    places = list(np.ndindex(*shape))
    return [places[i] for i in rng.permutation(len(places))[:count]]


# What is made of several ops --------------------------------------------------------------------

LINE = np.array([-4.0, -1.7, -0.3, 0.2, 0.9, 2.5, 7.0])
COMPOSED: dict[str, Callable[[Tensor], Any]] = {
    "relu6": gf.nn.relu6,
    "hard_tanh": gf.nn.hard_tanh,
    "hard_sigmoid": gf.nn.hard_sigmoid,
    "hard_swish": gf.nn.hard_swish,
    "hard_shrink": gf.nn.hard_shrink,
    "soft_shrink": gf.nn.soft_shrink,
    "thresholded_relu": gf.nn.thresholded_relu,
    "relu": gf.nn.relu,
    "leaky_relu with slope 0": lambda x: gf.nn.leaky_relu(x, 0.0),
    "elu with alpha 0": lambda x: gf.nn.elu(x, 0.0),
    "prelu": lambda x: gf.nn.prelu(x, gf.constant(0.3 + 0 * LINE)),
    "clip": lambda x: gf.clip(x, -1.0, 1.0),
    "clip between tensors": lambda x: gf.clip(x, gf.constant(-1.0 + 0 * LINE), 0.5),
    "maximum": lambda x: gf.maximum(x, 0.4),
    "minimum": lambda x: gf.minimum(x, 0.4),
    "where": lambda x: gf.where(x > 0, x, 1.0),
    "max": gf.max,
    "min": gf.min,
    "sort": gf.sort,
    "cummax": gf.cummax,
    "norm": lambda x: gf.linalg.vector_norm(x, ord=float("inf")),
    "tril": lambda x: gf.tril(gf.broadcast_to(x, (7, 7))),
}


@pytest.mark.parametrize("build", COMPOSED.values(), ids=COMPOSED)
def test_functions_of_several_ops_cut_infinite_cotangents_off(
    build: Callable[[Tensor], Any],
) -> None:
    with np.errstate(all="ignore"):
        check_cut_off(build, [LINE])
        x = placeholder("float64", LINE.shape)
        cotangent = np.ones_like(evaluate([build(x)], {x: LINE})[0])
        check_cut_off(lambda x, g: gradients(build(x), [x], [g])[0], [LINE, cotangent])


@pytest.mark.parametrize(
    "build",
    [
        lambda x: gf.sqrt(gf.nn.relu(x)),
        lambda x: gf.log(gf.nn.relu6(x)),
        lambda x: 1 / gf.clip(x, 0.0, 9.0),
        lambda x: gf.sqrt(gf.maximum(x, 0.0)),
    ],
)
def test_a_root_of_what_is_cut_to_0_has_the_gradient_0(build: Callable[[Tensor], Tensor]) -> None:
    x = placeholder("float64", (2,))
    slope = gradients(build(x), [x])[0]
    with np.errstate(all="ignore"):
        found = evaluate([slope, *gradients(slope, [x])], {x: np.array([-1.0, -3.0])})
    assert [f.tolist() for f in found[:1]] == [[0.0, 0.0]]
