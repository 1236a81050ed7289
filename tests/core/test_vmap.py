"""vmap: every op equals a stack of calls; nests, gradients, control flow, bad input."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, OpError, ShapeError, VariableError
from graphflow.interpret import evaluate
from graphflow.op import Op, Sample
from graphflow.ops.control import is_control
from tests.ops.test_registry import CASES, doubled, draw

BATCH = 3
MAPPED = [c for c in CASES if c.values[1].inputs and not is_control(c.values[0])]


def patterns(count: int) -> list[tuple[bool, ...]]:
    """Which inputs are mapped: all, and each alone."""
    alone = [tuple(i == j for j in range(count)) for i in range(count)]
    return list(dict.fromkeys([(True,) * count, *alone]))


def stacked(op: Op, sample: Sample, has: tuple[bool, ...]) -> list[list[np.ndarray]]:
    """Arrays for each call; what is not mapped is the same in all."""
    first = draw(sample, f"{op.name} 0")
    rows = [first]
    for i in range(1, BATCH):
        fresh = draw(sample, f"{op.name} {i}")
        rows.append([f if b else a for a, f, b in zip(first, fresh, has, strict=True)])
    return rows


@pytest.mark.parametrize("op, sample", MAPPED)
def test_the_map_of_an_op_is_a_stack_of_calls(op: Op, sample: Sample) -> None:
    if op.vjp is not None:
        sample = doubled(sample)
    for has in patterns(len(sample.inputs)):
        rows = stacked(op, sample, has)
        with np.errstate(all="ignore"):
            calls = [op.run(np, arrays, sample.attrs) for arrays in rows]
        given = [
            np.stack(column) if b else column[0]
            for column, b in zip(zip(*rows, strict=True), has, strict=True)
        ]
        xs = [gf.placeholder(a.dtype, a.shape) for a in given]
        mapped = gf.vmap(lambda *ts: op(*ts, **sample.attrs), tuple(0 if b else None for b in has))
        ys = mapped(*xs)
        ys = ys if isinstance(ys, tuple) else (ys,)
        with np.errstate(all="ignore"):
            values = evaluate(ys, dict(zip(xs, given, strict=True)))
        for y, value, parts in zip(ys, values, zip(*calls, strict=True), strict=True):
            want = np.stack([np.asarray(p) for p in parts])
            assert (value.shape, value.dtype) == (want.shape, want.dtype) == (y.shape, y.dtype)
            near = 1e-11 if want.dtype.name in ("float64", "complex128") else 1e-5
            np.testing.assert_allclose(value, want, rtol=near, atol=near)
