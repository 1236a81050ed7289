"""Promise: what an output does not read gets no part of its cotangent, not even of an infinite one.

A gradient rule that multiplies by the 0 of a mask makes 0 · inf = NaN of it. The chain rule does so
to users of `sqrt(relu(x))`, whose root has an infinite slope at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.autodiff import gradients
from graphflow.build import placeholder
from graphflow.interpret import evaluate
from graphflow.op import REGISTRY, Op, Sample, Tensor
from graphflow.opcheck import doubled, draw, is_differentiable, is_smooth

Array = np.ndarray[Any, Any]
CASES = [
    pytest.param(op, sample, id=f"{op.name}-{i}")
    for op in REGISTRY.values()
    for i, sample in enumerate(op.samples)
    if is_differentiable(op, sample) and not op.random
]


@pytest.mark.parametrize("op, sample", CASES)
def test_infinite_cotangents_do_not_reach_inputs_that_the_output_does_not_read(
    op: Op, sample: Sample
) -> None:
    sample = doubled(sample)
    arrays = draw(sample, op.name)
    if any(a.dtype.kind == "c" for a in arrays):
        return  # products of complex numbers mix inf with 0 themselves
    with np.errstate(all="ignore"):
        check_cut_off(lambda *xs: op(*xs, **sample.attrs), arrays)


def check_cut_off(build: Callable[..., Any], arrays: Sequence[Array]) -> None:
    """Make the cotangent of one output element infinite: the gradients of the input elements that
    this output element does not depend on stay as they are."""
    xs = [placeholder(a.dtype, a.shape) for a in arrays]
    ys = build(*xs)
    outputs = [y for y in (ys if isinstance(ys, tuple) else (ys,)) if is_smooth(y.spec)]
    if any(y.dtype.kind == "c" for y in outputs):
        return
    wanted = [i for i, x in enumerate(xs) if is_smooth(x.spec)]
    gs = [placeholder(y.dtype, y.shape) for y in outputs]
    slopes = gradients(outputs, [xs[i] for i in wanted], gs)
    rng = np.random.default_rng(0)

    def values(tensors: Sequence[Tensor], inputs: Sequence[Array], seeds: Sequence[Array]) -> Any:
        feeds = dict(zip((*xs, *gs), (*inputs, *seeds), strict=True))
        return evaluate(tensors, feeds)

    plain = [rng.uniform(0.5, 1.5, y.shape) for y in outputs]
    depends = dependences(lambda a: values(outputs, a, plain), arrays, wanted)
    for k, y in enumerate(outputs):
        for at in np.ndindex(y.shape):
            seeds = [g.copy() for g in plain]
            seeds[k][at] = 0
            before = values(slopes, arrays, seeds)
            for bad in (np.inf, np.nan):
                seeds[k][at] = bad
                after = values(slopes, arrays, seeds)
                for i, old, new in zip(wanted, before, after, strict=True):
                    free = ~depends[i][k][(..., *at)]
                    same = np.allclose(new[free], old[free], rtol=1e-12, atol=1e-12)
                    assert same, (
                        f"cotangent {bad} of output {k} at {at}: input {i} gets {new}, not {old}"
                    )


def dependences(
    f: Callable[[Sequence[Array]], Any], arrays: Sequence[Array], wanted: Sequence[int]
) -> dict[int, list[Array]]:
    """Of each input, for each output: (*input's shape, *output's shape), whether a small change of
    the input's element changes the output's."""
    here = f(arrays)
    found: dict[int, list[Array]] = {}
    for i in wanted:
        shape = arrays[i].shape
        found[i] = [np.zeros((*shape, *y.shape), bool) for y in here]
        for at in np.ndindex(shape):
            for by in (1e-3, -1e-3):
                moved = list(arrays)
                moved[i] = arrays[i].copy()
                moved[i][at] += by
                for k, (a, b) in enumerate(zip(f(moved), here, strict=True)):
                    found[i][k][at] |= ~((a == b) | (np.isnan(a) & np.isnan(b)))
    return found
