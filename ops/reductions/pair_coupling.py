"""Probabilities of classes from those of pairs of classes, as support vector machines give them.

Source: Wu, Lin & Weng, JMLR 5, 2004, second method; Gauss-Seidel steps as in libsvm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.op import FUNCTIONS, Cost, Op, Tensor, as_tensor, register, sample
from graphflow.ir.spec import TensorSpec, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.kernels.compiled_loops.loop_compiler import native_rows
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_native_parts
from graphflow.ops.pointwise import arithmetic, comparison, select
from graphflow.ops.reductions import extrema, pair_coupling_loops, reduce
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.creation import full
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.shape import reshape, reshape_op, swapaxes
from graphflow.ops.tensors.slicing import concat
from graphflow.ops.tensors.take import take

_LARGEST_RESIDUAL = 0.005
"""Residual of a row that has converged, times the number of classes."""
_ITERATION_NANOSECONDS = 3.0
"""Nanoseconds of an iteration for each element of Q."""
_ITERATIONS = 10
"""Iterations that rows take, about."""
_PART_NANOSECONDS = 50_000
"""Nanoseconds of the rows that a thread takes at once, about."""


def _most_iterations(count: int) -> int:
    return max(100, count)


def _infer(chance: TensorSpec, count: int) -> TensorSpec:
    pairs = count * (count - 1) // 2
    if chance.rank != 2 or chance.shape[1] != pairs or chance.dtype != np.float64:
        raise ShapeError(f"expected float64 (rows, {pairs}) for {count} classes, got {chance}")
    return chance.with_shape((chance.shape[0], count))


@cache
def _loop() -> Callable[..., None]:
    return native_rows(pair_coupling_loops, "couple")


def _couple_into(xp: Any, out: Any, chance: Any, count: int) -> None:
    rows = len(chance)
    given, found = chance.reshape(-1), out.reshape(-1)
    numbers = (count, _LARGEST_RESIDUAL / count, _most_iterations(count))
    of_row = count * count * _ITERATIONS * _ITERATION_NANOSECONDS
    step = max(1, int(_PART_NANOSECONDS / of_row))

    def part(i: int) -> None:
        q, qp = (
            scratch(np, slot, (n,), np.float64) for slot, n in (("q", count * count), ("qp", count))
        )
        _loop()(i * step, min((i + 1) * step, rows), given, *numbers, q, qp, found)

    run_native_parts(part, -(-rows // step))


def _kernel(xp: Any, chance: Any, count: int) -> Any:
    out = np.empty((len(chance), count))
    _couple_into(xp, out, chance, count)
    return out


def _vjp(g: Tensor, y: Tensor, chance: Tensor, count: int) -> tuple[Tensor]:
    chance = reshape_op(chance, shape=chance.shape)  # not what it was made of, whatever that is
    found: list[Tensor] = FUNCTIONS["gradients"]([_couple_by_loop(chance, count)], [chance], [g])
    return (found[0],)


def _couple_by_loop(chance: Tensor, count: int) -> Tensor:
    """Compute the same by a loop over ordinary ops, for derivatives of any order."""
    rows = chance.shape[0]
    pairs = list(combinations(range(count), 2))
    places = np.full((count, count), 2 * len(pairs))
    for at, (i, j) in enumerate(pairs):
        places[i, j], places[j, i] = at, len(pairs) + at
    # Rows of the data lie last from here on, since there are more of them than classes.
    chance = swapaxes(chance, 0, 1)
    every = concat([chance, 1 - chance, chance[:1] * 0], 0)
    won = reshape(take(every, as_tensor(places.reshape(-1)), 0), (count, count, -1))
    own = reduce.sum(won * won, axis=0, keepdims=True) * np.eye(count)[:, :, None]
    q = own - won * swapaxes(won, 0, 1)  # won[i, j]: the probability of i among i and j

    def residual(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q·p, p·Q·p, and True for rows that have not converged."""
        qp = reduce.sum(q * p, axis=1)  # q is symmetric
        pqp = reduce.sum(p * qp, axis=0, keepdims=True)
        error = extrema.max(arithmetic.abs(qp - pqp), axis=0, keepdims=True)
        return qp, pqp, comparison.greater_equal(error, _LARGEST_RESIDUAL / count)

    def step(p: Tensor) -> Tensor:
        qp, pqp, moves = residual(p)
        new = p
        for t in range(count):
            own, part = q[t, t : t + 1], qp[t : t + 1]
            change = (pqp - part) / own
            grown = change + 1
            one = np.eye(count)[t][:, None]
            pqp = (pqp + change * (change * own + part * 2)) / (grown * grown)
            new = (new + change * one) / grown
            qp = (qp + change * q[t]) / grown
        return select.where(moves, new, p)

    start = broadcast_to(full((count, 1), 1 / count, "float64"), (count, rows))
    settled: Tensor = FUNCTIONS["while_loop"](
        lambda p: reduce.any(residual(p)[2]), step, start,
        max_iterations=_most_iterations(count),
    )  # fmt: skip
    return swapaxes(settled, 0, 1)


def _strictly_inside(arrays: list[Any]) -> list[Any]:
    """Return probabilities from 0.2 to 0.8."""
    return [0.5 + 0.3 * np.sin(x) for x in arrays]


# Probabilities (rows, classes) from those of the first class of each pair, in the order of
# `itertools.combinations`.
couple_pairs: Op = register(
    Op(
        "couple_pairs",
        infer=_infer,
        kernel=_kernel,
        into=_couple_into,
        records=True,
        vjp=_vjp,
        batch=batching.merge_batches,
        sharding=sharding.equation_rule("b.->b."),
        cost=lambda chance, count: Cost(flops=chance.shape[0] * count * count * _ITERATIONS * 4),
        samples=(sample(spec("float64", (4, 3)), make=_strictly_inside, count=3),),
        device_kinds=("cpu",),
        doc="Probabilities of classes from those of pairs of classes.",
    )
)
