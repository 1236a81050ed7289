"""Cells of recurrent networks: how one step computes the next state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.pointwise.select import clip
from graphflow.ops.tensors.slicing import window as rows_of

Activation = Callable[[Tensor], Tensor]


State = tuple[Tensor, ...]


_ACTIVATIONS = (
    "elu", "hard_sigmoid", "hard_tanh", "leaky_relu", "relu", "sigmoid", "softplus", "softsign",
    "tanh", "thresholded_relu",
)  # fmt: skip


def find_activation(f: Any) -> Activation:
    """Return a function as given, or the function of `gf.nn` with a given name.

    Raises:
        ArgumentError: f is neither a function nor a known name.
    """
    if callable(f):
        given: Activation = f
        return given
    if f not in _ACTIVATIONS:
        raise ArgumentError(
            f"an activation must be a function or one of {', '.join(_ACTIVATIONS)}, got {f!r}"
        )
    named: Activation = FUNCTIONS[f]
    return named


@dataclass(frozen=True)
class RecurrentWeights:
    """Weights of one direction: w (G·H, inputs), r (G·H, H), biases (G·H,), peepholes (3·H,)."""

    w: Tensor
    r: Tensor
    bias: Tensor | None = None
    recurrent_bias: Tensor | None = None
    peepholes: Tensor | None = None

    @property
    def size(self) -> int:
        """Size H of the state."""
        return int(self.r.shape[1])


@dataclass(frozen=True)
class Cell:
    """A recurrent cell: how the next state follows from the inputs' part of the gates.

    Attributes:
        gates: one letter for each gate, in the order of the weights' rows.
        activations: functions of the gates and states.
        states: number of tensors in the state.
        limit: limit the inputs of activations to ±limit.
    """

    gates: str
    activations: tuple[Activation, ...]
    states: int = 1
    limit: float | None = None

    def joins_biases(self) -> bool:
        """Return True if the recurrent bias may be added to that of the inputs, for all steps."""
        return True

    def step(self, z: Tensor, state: State, weights: RecurrentWeights) -> State:
        """Return the next state (h first) from z = w·x + bias."""
        raise NotImplementedError

    def clip_preactivation(self, x: Tensor) -> Tensor:
        return x if self.limit is None else clip(x, -self.limit, self.limit)

    def gate_columns(self, x: Tensor, gate: str, size: int) -> Tensor:
        """Return the columns of x that belong to a gate."""
        return rows_of(x, x.ndim - 1, self.gates.index(gate) * size, size)


@dataclass(frozen=True)
class ElmanCell(Cell):
    """A plain recurrent cell: h = f(w·x + r·h + bias).

    Source: Elman, Cognitive Science 14, 1990.
    """

    def step(self, z: Tensor, state: State, weights: RecurrentWeights) -> State:
        total = z + matmul(state[0], weights.r, transpose_b=True)
        return (self.activations[0](self.clip_preactivation(total)),)


@dataclass(frozen=True)
class LstmCell(Cell):
    """A cell of gates i, f, o and candidates g: c = f·c + i·g; h = o·act(c).

    `coupled`: f is 1 - i. Source: Hochreiter & Schmidhuber, Neural Computation 9, 1997; Gers &
    Schmidhuber, IJCNN 2000 (peepholes).
    """

    coupled: bool = False

    def step(self, z: Tensor, state: State, weights: RecurrentWeights) -> State:
        h, c = state
        n, (sigmoid, squash, out) = weights.size, self.activations
        total = z + matmul(h, weights.r, transpose_b=True)
        i, f, g, o = (self.gate_columns(total, gate, n) for gate in "ifgo")
        peepholes = weights.peepholes

        def peek(x: Tensor, at: int, c: Tensor) -> Tensor:
            """Add the peephole of a gate; peepholes are stored in the order i, o, f."""
            return x if peepholes is None else x + rows_of(peepholes, 0, at * n, n) * c

        i = sigmoid(self.clip_preactivation(peek(i, 0, c)))
        f = 1 - i if self.coupled else sigmoid(self.clip_preactivation(peek(f, 2, c)))
        c = f * c + i * squash(self.clip_preactivation(g))
        o = sigmoid(self.clip_preactivation(peek(o, 1, c)))
        return o * out(c), c


@dataclass(frozen=True)
class GruCell(Cell):
    """A cell of gates z and r and candidates n: h = (1 - z)·n + z·h.

    `before_reset`: r multiplies r·h + bias as in torch, otherwise h itself. Source: Cho et al.,
    EMNLP 2014.
    """

    before_reset: bool = True

    def joins_biases(self) -> bool:
        return not self.before_reset

    def step(self, z: Tensor, state: State, weights: RecurrentWeights) -> State:
        (h,), n = state, weights.size
        sigmoid, squash = self.activations
        keeps, resets, fresh = (self.gate_columns(z, gate, n) for gate in "zrn")
        if self.before_reset:
            total = matmul(h, weights.r, transpose_b=True)
            if weights.recurrent_bias is not None:
                total = total + weights.recurrent_bias
            past_z, past_r, past_n = (self.gate_columns(total, gate, n) for gate in "zrn")
            keep = sigmoid(self.clip_preactivation(keeps + past_z))
            reset = sigmoid(self.clip_preactivation(resets + past_r))
            new = squash(self.clip_preactivation(fresh + reset * past_n))
        else:
            rows = [rows_of(weights.r, 0, self.gates.index(g) * n, n) for g in "zrn"]
            keep = sigmoid(self.clip_preactivation(keeps + matmul(h, rows[0], transpose_b=True)))
            reset = sigmoid(self.clip_preactivation(resets + matmul(h, rows[1], transpose_b=True)))
            new = squash(
                self.clip_preactivation(fresh + matmul(reset * h, rows[2], transpose_b=True))
            )
        return ((1 - keep) * new + keep * h,)


def make_elman_cell(f: Any = "tanh") -> ElmanCell:
    return ElmanCell("h", (find_activation(f),))


def make_lstm_cell() -> LstmCell:
    tanh = FUNCTIONS["tanh"]
    return LstmCell("ifgo", (FUNCTIONS["sigmoid"], tanh, tanh), states=2)


def make_gru_cell() -> GruCell:
    return GruCell("rzn", (FUNCTIONS["sigmoid"], FUNCTIONS["tanh"]))
