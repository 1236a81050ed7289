"""Connectionist temporal classification: the loss of labels without a place in time.

The sums over alignments run in log space, sequence by sequence. Public as `gf.nn.ctc_loss`.

Source: Graves, Fernández, Gomez & Schmidhuber, ICML 2006.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import TensorSpec, equate, kind, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import is_zeros, require_int, require_kind
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.ops.kernels.jit.thread_pool import current_pool
from graphflow.ops.kernels.sequence import ctc_loops
from graphflow.ops.networks.losses.losses import reduce_loss
from graphflow.ops.pointwise.arithmetic import divide
from graphflow.ops.pointwise.comparison import equal, less, not_equal
from graphflow.ops.pointwise.select import maximum, where
from graphflow.ops.reductions.extrema import logsumexp
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.creation import arange, full
from graphflow.ops.tensors.shape import expand_dims, moveaxis, reshape, reshape_op
from graphflow.ops.tensors.slicing import concat, stack
from graphflow.ops.tensors.take_along_axis import take_along_axis

_LOW = -1e30
"""A log-probability of nothing, in derivatives of derivatives: NaN-free, unlike -infinity."""
_LOG_UNIT = 512 * math.log(2)
"""The log of the unit of exponents in `ctc_loops`."""
_STATE_NANOSECONDS, _THREADING_NANOSECONDS = 5, 200_000
"""What one state at one time takes, and the least work that threads share."""


# The ops ----------------------------------------------------------------------------------------


def _infer(
    x: TensorSpec, labels: TensorSpec, steps: TensorSpec, counts: TensorSpec, blank: int
) -> tuple[TensorSpec, TensorSpec]:
    require_kind(x, "float")
    text = ", ".join(
        f"{name} {show_shape(each.shape)}"
        for name, each in (
            ("log-probabilities", x), ("targets", labels), ("input lengths", steps),
            ("target lengths", counts),
        )
    )  # fmt: skip
    if (x.rank, labels.rank, steps.rank, counts.rank) != (3, 2, 1, 1):
        raise ShapeError(f"expected (B, T, classes), (B, S), (B,) and (B,), got {text}")
    for each in (labels, steps, counts):
        require_kind(each, "int")
        equate(each.shape[0], x.shape[0], f"{text}: batches differ")
    if isinstance(x.shape[2], int) and not 0 <= blank < x.shape[2]:
        raise ShapeError(f"the blank {blank} is none of {x.shape[2]} classes")
    return x.with_shape(x.shape[:1]), x


def _require_inside(x: Any, labels: Any, steps: Any, counts: Any) -> None:
    """Refuse lengths and labels that do not exist.

    Raises:
        IndexError: with the sequence and the numbers.
    """
    for what, lengths, most in (("input", steps, x.shape[1]), ("target", counts, labels.shape[1])):
        wrong = np.flatnonzero((lengths < 0) | (lengths > most))
        if wrong.size:
            b = int(wrong[0])
            raise IndexError(f"{what} length {lengths[b]} of sequence {b} is outside [0, {most}]")
    used = np.arange(labels.shape[1]) < counts[:, None]
    wrong = np.flatnonzero(used & ((labels < 0) | (labels >= x.shape[2])))
    if wrong.size:
        b, i = np.unravel_index(wrong[0], labels.shape)
        raise IndexError(f"target {labels[b, i]} of sequence {b} is none of {x.shape[2]} classes")


def _ctc_into(xp: Any, out: Any, x: Any, labels: Any, steps: Any, counts: Any, blank: int) -> None:
    """Run the compiled loop over all sequences, each on one thread."""
    _require_inside(x, labels, steps, counts)
    losses, slopes = out
    slopes[...] = 0
    batch, time, classes = x.shape
    states = 2 * labels.shape[1] + 1
    exponents = np.rint(x * (1 / _LOG_UNIT), dtype="float64")
    exponents[~np.isfinite(exponents)] = 0
    probabilities = np.exp(x - exponents * _LOG_UNIT)
    ints = (np.ascontiguousarray(a, np.int64) for a in (labels, steps, counts))
    given = [a.reshape(-1) for a in (probabilities, exponents, *ints)]
    numbers = (time, classes, labels.shape[1], blank, -math.inf)
    pool = current_pool()
    work = batch * time * states * _STATE_NANOSECONDS
    parts = min(pool.threads, batch) if pool is not None and work > _THREADING_NANOSECONDS else 1

    def part(i: int) -> None:
        scratch = [np.empty(size) for size in (*(time * states,) * 2, *(2 * states,) * 2)]
        ends = batch * i // parts, batch * (i + 1) // parts
        _loop()(*ends, *given, *numbers, *scratch, losses, slopes.reshape(-1))

    if pool is not None and parts > 1:
        pool.run(part, parts)
    else:
        part(0)


@cache
def _loop() -> Callable[..., Any]:
    return native(ctc_loops, "write_losses")


def _ctc_kernel(
    xp: Any, x: Any, labels: Any, steps: Any, counts: Any, blank: int
) -> tuple[Any, Any]:
    out = np.empty(x.shape[:1], x.dtype), np.empty(x.shape, x.dtype)
    _ctc_into(xp, out, x, labels, steps, counts, blank)
    return out


def _ctc_vjp(
    gs: Sequence[Tensor], ys: Sequence[Tensor], x: Tensor, *lengths: Tensor, blank: int
) -> tuple[Tensor | None, ...]:
    g, of_slopes = gs
    unread = equal(ys[1], 0)  # frames past the end, and classes that no label names
    found = where(unread, 0, ys[1] * expand_dims(g, (1, 2)))
    if not is_zeros(of_slopes):
        gradients = FUNCTIONS["gradients"]
        x = reshape_op(x, shape=x.shape)  # not what it was made of, whatever that is
        slopes = gradients(_by_scan(x, *lengths, blank=blank), [x])
        found = found + gradients(slopes, [x], of_slopes)[0]
    return found, None, None, None


def _by_scan(x: Tensor, labels: Tensor, steps: Tensor, counts: Tensor, *, blank: int) -> Tensor:
    """Compute the losses by a scan over ordinary ops, for derivatives of any order."""
    batch, most = labels.shape
    states = most * 2 + 1
    blanks = full((batch, most), blank, "int64")
    pairs = reshape(stack([blanks, labels], -1), (batch, most * 2))
    symbols = concat([pairs, full((batch, 1), blank, "int64")], 1)
    odd = equal(arange(states) % 2, 1)
    symbols = where(less(arange(states), expand_dims(counts * 2 + 1, 1)), symbols, blank)
    before = concat([full((batch, 2), blank, "int64"), symbols], 1)[:, :-2]
    two_back = where(FUNCTIONS["logical_and"](odd, not_equal(symbols, before)), 0.0, _LOW)
    two_back = FUNCTIONS["astype"](two_back, x.dtype)
    emitted = maximum(
        take_along_axis(
            moveaxis(x, 1, 0), FUNCTIONS["broadcast_to"](symbols, (x.shape[1], batch, states)), 2
        ),
        _LOW,
    )
    edge = full((batch, 2), _LOW, x.dtype)
    start = FUNCTIONS["astype"](where(equal(arange(states), 0), 0.0, _LOW), x.dtype)
    start = FUNCTIONS["broadcast_to"](start, (batch, states))

    def body(paths: Tensor, item: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        wide = concat([edge, paths], 1)
        parts = stack([paths, wide[:, 1:-1], wide[:, :-2] + two_back])
        after = maximum(logsumexp(parts, 0) + item[0], _LOW)
        return where(expand_dims(less(item[1], steps), 1), after, paths), None

    last, _ = FUNCTIONS["scan"](body, start, (emitted, arange(x.shape[1])))
    ends = take_along_axis(last, stack([counts * 2, maximum(counts * 2 - 1, 0)], 1), 1)
    result: Tensor = -FUNCTIONS["logaddexp"](ends[:, 0], where(equal(counts, 0), _LOW, ends[:, 1]))
    return result


def _cost(x: TensorSpec, labels: TensorSpec, *lengths: TensorSpec, blank: int) -> Cost:
    return Cost(flops=x.shape[0] * x.shape[1] * (labels.shape[1] * 2 + 1) * 40)


_COUNTS = spec("int64", (2,))


def _with_lengths(arrays: list[Any]) -> list[Any]:
    """Return the arrays of a sample with lengths that fit each other."""
    *others, steps, counts = arrays
    return [*others, steps * 0 + [4, 3], counts * 0 + [2, 1]]


# Losses (B,), and their slopes by the log-probabilities (B, T, classes).
_ctc: Op = register(
    Op(
        "ctc",
        infer=_infer,
        kernel=_ctc_kernel,
        into=_ctc_into,
        vjp=_ctc_vjp,
        batch=batching.merge_batches,
        sharding=sharding.equation_rule("b..,b.,b,b->b,b.."),
        cost=_cost,
        autocast="high",
        samples=(
            sample(
                spec("float32", (2, 4, 4)), spec("int64", (2, 2)), _COUNTS, _COUNTS,
                make=_with_lengths, blank=3,
            ),
        ),
        device_kinds=("cpu",),
        doc="The negative log-probability of labels, summed over all alignments in time.",
    )
)  # fmt: skip


# The function -----------------------------------------------------------------------------------


@composite("log_probabilities", to="high")
@function
def ctc_loss(
    log_probabilities: Any, targets: Any, input_lengths: Any = None, target_lengths: Any = None,
    blank: int = 0, reduction: str = "none", zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Compute the negative log-probability of label sequences, summed over all alignments.

    Args:
        log_probabilities: floats (T, B, classes), such as `log_softmax` gives; or (T, classes).
        targets: ints (B, S), or (S,) for one sequence. Labels beyond a length are ignored.
        input_lengths, target_lengths: ints (B,), or one int; default: T and S.
        blank: the class of no label.
        reduction: "none"; "sum"; or "mean", which first divides each loss by its target length, as
            in torch.
        zero_infinity: give 0 instead of infinity for targets that do not fit into their inputs.
            Their gradient is 0 in both cases.

    Returns:
        The losses (B,), or one number.

    Raises:
        DTypeError, ShapeError: the arguments do not fit each other.
        ArgumentError: the reduction is unknown, or there is no such blank.
        OpError: in a step, a length or a label is out of range.

    Source: Graves, Fernández, Gomez & Schmidhuber, ICML 2006.
    """
    x, labels = as_tensor(log_probabilities), as_tensor(targets)
    alone = x.ndim == 2
    if alone:
        x, labels = expand_dims(x, 1), expand_dims(labels, 0)
    if x.ndim != 3 or labels.ndim != 2:
        raise ShapeError(
            "log_probabilities are (T, B, classes) and targets (B, S), got "
            f"{show_shape(x.shape)} and {show_shape(labels.shape)}"
        )
    if not isinstance(zero_infinity, bool):
        raise ArgumentError(f"zero_infinity must be True or False, got {zero_infinity!r}")
    given = ((input_lengths, x.shape[0]), (target_lengths, labels.shape[1]))
    steps, counts = (_lengths(length, most, x.shape[1]) for length, most in given)
    ints = [FUNCTIONS["astype"](_require_ints(each), "int64") for each in (labels, steps, counts)]
    loss, _ = _ctc(moveaxis(x, 1, 0), *ints, blank=require_int("blank", blank))
    if zero_infinity:
        loss = where(equal(loss, math.inf), 0, loss)
    if reduction == "mean":
        loss = divide(loss, FUNCTIONS["astype"](maximum(ints[2], 1), loss.dtype))
    if alone and reduction == "none":
        loss = FUNCTIONS["squeeze"](loss, 0)
    return reduce_loss(loss, reduction)


def _require_ints(x: Tensor) -> Tensor:
    if kind(x.dtype) != "int":
        raise DTypeError(f"targets and lengths are ints, got {x.spec}")
    return x


def _lengths(given: Any, most: Any, batch: Any) -> Tensor:
    """Return one length for each sequence."""
    length = FUNCTIONS["full"]((), most, "int64") if given is None else as_tensor(given)
    result: Tensor = FUNCTIONS["broadcast_to"](length, (batch,)) if not length.ndim else length
    return result
