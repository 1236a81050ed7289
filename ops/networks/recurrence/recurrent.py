"""Recurrent networks along a sequence, in one direction or both. Public in `gf.nn`.

One product multiplies the inputs of all steps; a scan over the cell does the rest. A plain LSTM or
GRU is one op instead (`lstm_op`, `gru_op`), also with lengths. A word with one letter for each gate
gives the order of the weights' rows: torch has "ifgo" and "rzn", ONNX "iofg" and "zrn".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, function
from graphflow.ir.spec import Size, equate, is_half, kind, show_shape
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.networks.recurrence.gru_op import gru_op
from graphflow.ops.networks.recurrence.lstm_op import lstm_op
from graphflow.ops.networks.recurrence.recurrent_cells import (
    Cell,
    ElmanCell,
    GruCell,
    LstmCell,
    RecurrentWeights,
    State,
    find_activation,
    make_gru_cell,
    make_lstm_cell,
)
from graphflow.ops.pointwise.comparison import less
from graphflow.ops.pointwise.select import where
from graphflow.ops.reductions.reduce import sum
from graphflow.ops.tensors.creation import arange, zeros
from graphflow.ops.tensors.shape import expand_dims, moveaxis, reshape, squeeze
from graphflow.ops.tensors.slicing import concat, stack
from graphflow.ops.tensors.take import take
from graphflow.ops.tensors.take_along_axis import take_along_axis

DIRECTIONS = ("forward", "reverse", "bidirectional")


# Sequences --------------------------------------------------------------------------------------


def project_inputs(cell: Cell, x: Tensor, weights: RecurrentWeights) -> Tensor:
    """Return w·x for all gates, with the biases that can be added before the recurrent product."""
    bias = weights.bias
    if weights.recurrent_bias is not None and cell.joins_biases():
        bias = weights.recurrent_bias if bias is None else bias + weights.recurrent_bias
    z = matmul(x, weights.w, transpose_b=True)
    return z if bias is None else z + bias


def run_direction(
    cell: Cell,
    x: Tensor,
    weights: RecurrentWeights,
    state: State,
    lengths: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, State]:
    """Return outputs (T, B, H) and the last state for inputs (T, B, inputs).

    Beyond its length a sequence keeps its state, and its outputs are 0.
    """
    inside = None
    if lengths is not None:
        times = expand_dims(arange(x.shape[0]), 1)
        inside = expand_dims(less(times, expand_dims(lengths.astype("int64"), 0)), 2)
        x = where(inside, x, 0)  # padding may hold NaN; 0·NaN would reach the weights' gradients
    if _is_one_op(cell, weights):
        return _run_as_one_op(cell, x, weights, state, inside, reverse)
    z = project_inputs(cell, x, weights)

    def body(before: State, item: Any) -> tuple[State, Tensor]:
        after = cell.step(item[0], before, weights)
        if inside is None:
            return after, after[0]
        on = item[1]
        kept = tuple(where(on, new, old) for new, old in zip(after, before, strict=True))
        return kept, where(on, after[0], 0)

    items = (z,) if inside is None else (z, inside)
    last, y = FUNCTIONS["scan"](body, state, items, reverse=reverse)
    return y, last


@composite("x", "state", "weights")
def run_step(cell: Cell, x: Tensor, state: State, weights: RecurrentWeights) -> State:
    """Return the state after one step of inputs (B, inputs)."""
    return cell.step(project_inputs(cell, x, weights), state, weights)


def _is_one_op(cell: Cell, weights: RecurrentWeights) -> bool:
    """Return whether an op for whole sequences computes a cell."""
    usual: dict[type[Cell], tuple[str, ...]] = {
        LstmCell: ("sigmoid", "tanh", "tanh"), GruCell: ("sigmoid", "tanh"),
    }  # fmt: skip
    if cell.activations != tuple(FUNCTIONS[name] for name in usual.get(type(cell), ())):
        return False
    if cell.limit is not None or weights.peepholes is not None or is_half(weights.r.dtype):
        return False
    if isinstance(cell, LstmCell):
        return not cell.coupled
    return isinstance(cell, GruCell) and cell.gates.endswith("n")


def _run_as_one_op(
    cell: Cell,
    x: Tensor,
    weights: RecurrentWeights,
    state: State,
    inside: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, State]:
    """Run a plain LSTM or GRU by the op for whole sequences.

    Args:
        inside: (T, B, 1), whether a step lies within the length of its sequence.
    """
    turned = None
    if inside is not None and reverse:  # each sequence from its own end
        turned = _reversed_steps(inside)
        x = _take_steps(x, turned)
    states, last = _apply_op(cell, x, weights, state, reverse and inside is None)
    if inside is None:
        return states[0], last
    count = sum(inside.astype("int64"), 0, keepdims=True)
    last = tuple(
        squeeze(_take_steps(concat([expand_dims(first, 0), each], 0), squeeze(count, 2)), 0)
        for first, each in zip(state, states, strict=True)
    )
    y = states[0] if turned is None else _take_steps(states[0], turned)
    return where(inside, y, 0), last


def _apply_op(
    cell: Cell, x: Tensor, weights: RecurrentWeights, state: State, reverse: bool
) -> tuple[State, State]:
    """Return the states after each step (T, B, H), h first, and the last ones."""
    z = matmul(x, weights.w, transpose_b=True)
    given, recurrent = weights.bias, weights.recurrent_bias
    if isinstance(cell, GruCell) and cell.before_reset and given is not None:
        z, given = z + given, None  # the recurrent bias is within what the gate r multiplies
    parts = [b for b in (given, recurrent) if b is not None]
    bias = parts[0] + parts[1] if len(parts) > 1 else parts[0] if parts else None
    if bias is None:
        bias = zeros((weights.r.shape[0],), weights.r.dtype)
    attrs: dict[str, Any] = {"gates": cell.gates, "reverse": reverse}
    if isinstance(cell, GruCell):
        attrs["linear_before_reset"] = cell.before_reset
        y, h, _, _ = gru_op(z, weights.r, bias, *state, **attrs)
        return (y,), (h,)
    y, h, c, cs, _ = lstm_op(z, weights.r, bias, *state, **attrs)
    return (y, cs), (h, c)


def _reversed_steps(inside: Tensor) -> Tensor:
    """Return (T, B) the steps of each sequence from its last to its first; padding stays."""
    mask = squeeze(inside, 2)
    steps = expand_dims(arange(mask.shape[0]), 1)
    count = sum(mask.astype("int64"), 0, keepdims=True)
    return where(mask, count - 1 - steps, steps)


def _take_steps(x: Tensor, steps: Tensor) -> Tensor:
    """Return y[i, b] = x[steps[i, b], b] for x (T, B, n) and steps (S, B), as whole rows."""
    time, batch, size = x.shape
    rows = reshape(arange(time * batch), (time, batch))
    return take(reshape(x, (time * batch, size)), take_along_axis(rows, steps, 0), 0)


def initial_state(cell: Cell, batch: Size, weights: RecurrentWeights) -> State:
    """Return zeros (B, H) for each state, in the weights' dtype since inputs may be autocast."""
    shape = (batch, weights.size)
    return tuple(zeros(shape, weights.r.dtype) for _ in range(cell.states))


@composite("x", "sides", "states")
def run_directions(
    cell: Cell,
    x: Tensor,
    sides: Sequence[RecurrentWeights],
    states: Sequence[State] | None,
    lengths: Tensor | None,
    first_reversed: bool = False,
) -> tuple[Tensor, list[State]]:
    """Return outputs (T, B, D·H) and the last states of one direction or both."""
    outputs, ends = [], []
    for i, weights in enumerate(sides):
        state = initial_state(cell, x.shape[1], weights) if states is None else states[i]
        y, last = run_direction(cell, x, weights, state, lengths, reverse=bool(i) or first_reversed)
        outputs.append(y)
        ends.append(last)
    return outputs[0] if len(outputs) == 1 else concat(outputs, -1), ends


# Functions --------------------------------------------------------------------------------------


def _direction_part(x: Any, i: int) -> Tensor | None:
    """Return the part of an argument (D, …) that belongs to direction i."""
    if x is None:
        return None
    if x.shape[0] == 1:
        return squeeze(x, 0)
    part: Tensor = x[i]
    return part


def _require(what: str, tensor: Tensor, wanted: Sequence[Any], dtype: Any) -> None:
    text = f"{what} {show_shape(tensor.shape)} is not {show_shape(tuple(wanted))}"
    if tensor.dtype != dtype:
        raise DTypeError(f"{what} is {tensor.dtype}, x is {dtype}; convert one with .astype")
    if tensor.ndim != len(wanted):
        raise ShapeError(text)
    for have, want in zip(tensor.shape, wanted, strict=True):
        equate(want, have, text)


def _require_known(what: str, size: Any) -> int:
    if not isinstance(size, int):
        raise ShapeError(f"the size of {what} must be known while the graph is built, got {size}")
    return size


def run_layer(
    cell: Cell, x: Any, w: Any, r: Any, bias: Any, initial: Any, lengths: Any, direction: Any,
    batch_first: Any, peepholes: Any = None,
) -> tuple[Tensor, State]:  # fmt: skip
    """Check a user's arguments, run the cell, and return outputs and last states (D, B, H)."""
    if direction not in DIRECTIONS:
        raise ArgumentError(f"direction must be one of {', '.join(DIRECTIONS)}, got {direction!r}")
    if not isinstance(batch_first, bool):
        raise ArgumentError(f"batch_first must be True or False, got {batch_first!r}")
    x, w, r = as_tensor(x), as_tensor(w), as_tensor(r)
    require_kind(x.spec, "float")
    if x.ndim != 3 or r.ndim != 3:
        raise ShapeError(
            f"x must be (T, B, inputs) and r (D, G·H, H), got {show_shape(x.shape)} and "
            f"{show_shape(r.shape)}"
        )
    if batch_first:
        x = moveaxis(x, 0, 1)
    sides, n = 1 + (direction == "bidirectional"), _require_known("H", r.shape[2])
    rows = len(cell.gates) * n
    _require("w", w, (sides, rows, x.shape[2]), x.dtype)
    _require("r", r, (sides, rows, n), x.dtype)
    bias, peepholes = (p if p is None else as_tensor(p) for p in (bias, peepholes))
    if bias is not None:
        _require("bias", bias, (sides, 2 * rows), x.dtype)
        bias = reshape(bias, (sides, 2, rows))
    if peepholes is not None:
        _require("peepholes", peepholes, (sides, 3 * n), x.dtype)
    if lengths is not None:
        lengths = as_tensor(lengths)
        if kind(lengths.dtype) != "int" or lengths.ndim != 1:
            raise DTypeError(f"lengths must be ints (B,), got {lengths.spec}")
    weights = []
    for i in range(sides):
        both = _direction_part(bias, i)
        weights.append(
            RecurrentWeights(
                _not_none(_direction_part(w, i)),
                _not_none(_direction_part(r, i)),
                None if both is None else both[0],
                None if both is None else both[1],
                _direction_part(peepholes, i),
            )
        )
    states = _initial_states(cell, initial, (sides, x.shape[1], n), x.dtype)
    y, ends = run_directions(cell, x, weights, states, lengths, direction == "reverse")
    last = tuple(
        stack([end[j] for end in ends]) if sides > 1 else expand_dims(ends[0][j], 0)
        for j in range(cell.states)
    )
    return moveaxis(y, 0, 1) if batch_first else y, last


def _not_none(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _initial_states(cell: Cell, initial: Any, shape: Any, dtype: Any) -> list[State] | None:
    """Return the first states of each direction from h (D, B, H) or a tuple; None is zeros."""
    given = initial if isinstance(initial, tuple | list) else (initial,) * cell.states
    if len(given) != cell.states:
        raise ArgumentError(f"initial must hold {cell.states} tensors, got {len(given)}")
    if all(part is None for part in given):
        return None
    parts = [zeros(shape, dtype) if p is None else as_tensor(p) for p in given]
    for name, part in zip("hc", parts, strict=False):
        _require(f"initial {name}", part, shape, dtype)
    return [tuple(_not_none(_direction_part(p, i)) for p in parts) for i in range(shape[0])]


def _configure_cell(cell: Cell, activations: Any, limit: Any, gates: Any) -> Cell:
    """Return the cell with the user's activations, clipping and order of gates."""
    given = (activations,) if callable(activations) or isinstance(activations, str) else activations
    if not isinstance(given, tuple | list) or len(given) != len(cell.activations):
        raise ArgumentError(
            f"there must be {len(cell.activations)} activations, got {activations!r}"
        )
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if limit is not None and not (number and limit > 0):
        raise ArgumentError(f"clip must be a positive number or None, got {limit!r}")
    if not isinstance(gates, str) or sorted(gates) != sorted(cell.gates):
        raise ArgumentError(
            f"gates must be the letters of {cell.gates!r} in some order, got {gates!r}"
        )
    limit = None if limit is None else float(limit)
    return replace(cell, activations=tuple(map(find_activation, given)), limit=limit, gates=gates)


@function
def rnn(
    x: Any, w: Any, r: Any, bias: Any = None, initial: Any = None, *, lengths: Any = None,
    direction: str = "forward", clip: float | None = None, activations: Any = "tanh",
    batch_first: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run h = f(w·x + r·h + bias) along a sequence, from `initial` h (D, B, H).

    Arguments, results and errors as for `lstm`.

    Source: Elman, Cognitive Science 14, 1990.
    """
    cell = _configure_cell(ElmanCell("h", (FUNCTIONS["tanh"],)), activations, clip, "h")
    y, (h,) = run_layer(cell, x, w, r, bias, initial, lengths, direction, batch_first)
    return y, h


@function
def lstm(
    x: Any, w: Any, r: Any, bias: Any = None, initial: Any = None, *, peepholes: Any = None,
    lengths: Any = None, direction: str = "forward", clip: float | None = None,
    activations: Any = ("sigmoid", "tanh", "tanh"), input_forget: bool = False,
    batch_first: bool = False, gates: str = "ifgo",
) -> tuple[Tensor, State]:  # fmt: skip
    """Run long short-term memory along a sequence, from `initial` (h, c), (D, B, H) each.

    A step computes c = f·c + i·g and h = o·act(c).

    Args:
        x: floats (T, B, inputs), or (B, T, inputs) with `batch_first`.
        w, r: (D, G·H, inputs) and (D, G·H, H), for D directions and G gates.
        bias: (D, 2·G·H): the bias of w, then that of r.
        initial: (h, c), zeros by default.
        peepholes: (D, 3·H): factors by which i, o and f, in this order, see c.
        lengths: ints (B,), the length of each sequence. Beyond it the state stays, and outputs are
            0.
        direction: "forward", "reverse" or "bidirectional".
        clip: limit the inputs of activations to ±clip.
        activations: names or functions of tensors: of the gates, of g, and of c.
        input_forget: couple f = 1 - i.
        gates: the order of the gates in the weights' rows.

    Returns:
        y (T, B, D·H), batch first if x is; and the last state, (D, B, H) each.

    Raises:
        DTypeError, ShapeError: tensors do not fit each other.
        ArgumentError: arguments of another form.

    Source: Hochreiter & Schmidhuber, Neural Computation 9, 1997.
    """
    chosen = _configure_cell(make_lstm_cell(), activations, clip, gates)
    if not isinstance(input_forget, bool):
        raise ArgumentError(f"input_forget must be True or False, got {input_forget!r}")
    cell = replace(chosen, coupled=input_forget)  # type: ignore[call-arg]
    return run_layer(
        cell, x, w, r, bias, initial, lengths, direction, batch_first, peepholes
    )  # fmt: skip


@function
def gru(
    x: Any, w: Any, r: Any, bias: Any = None, initial: Any = None, *, lengths: Any = None,
    direction: str = "forward", clip: float | None = None,
    activations: Any = ("sigmoid", "tanh"), linear_before_reset: bool = True,
    batch_first: bool = False, gates: str = "rzn",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run gated recurrent units h = (1 - z)·n + z·h along a sequence, from `initial` h (D, B, H).

    With `linear_before_reset` (torch) the gate r multiplies the product of h in n, otherwise h
    itself. Other arguments, results and errors as for `lstm`.

    Source: Cho et al., EMNLP 2014.
    """
    chosen = _configure_cell(make_gru_cell(), activations, clip, gates)
    if not isinstance(linear_before_reset, bool):
        raise ArgumentError(
            f"linear_before_reset must be True or False, got {linear_before_reset!r}"
        )
    cell = replace(chosen, before_reset=linear_before_reset)  # type: ignore[call-arg]
    y, (h,) = run_layer(cell, x, w, r, bias, initial, lengths, direction, batch_first)
    return y, h
