"""Recurrent layers: cells for one step, and stacks along a sequence. Public in `gf.nn`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graphflow.base.argument_checks import signature_of
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Tensor, as_tensor, user_location
from graphflow.ir.spec import show_shape
from graphflow.ops.networks.layers.basic_layers import Dropout
from graphflow.ops.networks.layers.layer_base import (
    Layer,
    inverse_root,
    require_layers,
    require_sizes,
    set_attributes,
    uniform_parameter,
)
from graphflow.ops.networks.recurrence.recurrent import initial_state, run_directions, run_step
from graphflow.ops.networks.recurrence.recurrent_cells import (
    Cell,
    RecurrentWeights,
    State,
    make_elman_cell,
    make_gru_cell,
    make_lstm_cell,
)
from graphflow.ops.tensors.shape import moveaxis
from graphflow.ops.tensors.slicing import stack


def _make_cell(layer: Layer, make: Callable[..., Cell], options: Mapping[str, Any]) -> Cell:
    """Make the cell of a layer from the options of its kind."""
    unknown = [name for name in options if name not in signature_of(make).parameters]
    if unknown:
        kind = type(layer).__name__
        raise ArgumentError(
            f"got an unexpected keyword argument {unknown[0]!r}; see help(gf.nn.{kind})"
        )
    return make(**options)


def _make_weights(
    cell: Cell, inputs: int, size: int, bias: bool, dtype: Any, suffix: str
) -> RecurrentWeights:
    """Make the variables of one direction under torch's names, uniform on ±1/√size."""
    rows, bound = len(cell.gates) * size, inverse_root(size)
    return RecurrentWeights(
        uniform_parameter(f"weight_ih{suffix}", (rows, inputs), bound, dtype),
        uniform_parameter(f"weight_hh{suffix}", (rows, size), bound, dtype),
        uniform_parameter(f"bias_ih{suffix}", (rows,), bound, dtype) if bias else None,
        uniform_parameter(f"bias_hh{suffix}", (rows,), bound, dtype) if bias else None,
    )


def _torch_names(weights: RecurrentWeights, suffix: str = "") -> dict[str, Tensor]:
    """Return the variables by torch's names, as attributes of the layer."""
    named = {
        f"weight_ih{suffix}": weights.w,
        f"weight_hh{suffix}": weights.r,
        f"bias_ih{suffix}": weights.bias,
        f"bias_hh{suffix}": weights.recurrent_bias,
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _document(base: type[Layer], what: str, extra: str = "") -> str:
    """Return the docstring of a base class, about one kind of network."""
    _, _, rest = (base.__doc__ or "").partition(":")
    return f"{what}:{rest}" + (f"\n    {extra}\n" if extra else "")


# Cells ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, init=False)
class _CellLayer(Layer):
    """One step of a recurrent network: x (B, inputs) and a state to the next state.

    The state is (B, size), zeros by default.

    Args:
        inputs, size: sizes of the last axis of x and of the state.
        bias: add biases.

    Variables: `weight_ih` (G·size, inputs), `weight_hh` (G·size, size), `bias_ih` and `bias_hh`
    (G·size,), for G gates in torch's order, uniform on ±1/√size.
    """

    cell: Cell
    weights: RecurrentWeights

    def __init__(
        self, inputs: int, size: int, bias: bool = True, *, dtype: Any = "float32",
        name: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        require_sizes(self, inputs=inputs, size=size)
        cell = _make_cell(self, self._make, options)
        with self.scope(name or type(self).__name__.lower()):
            weights = _make_weights(cell, inputs, size, bias, dtype, "")
        set_attributes(self, cell=cell, weights=weights, **_torch_names(weights))

    @staticmethod
    def _make() -> Cell:
        raise NotImplementedError

    def __call__(self, x: Any, state: Any = None) -> Any:
        x = as_tensor(x)
        if x.ndim != 2:
            raise ShapeError(
                f"{type(self).__name__} at {user_location()}: x must be (B, inputs), got "
                f"{show_shape(x.shape)}"
            )
        if state is None:
            before = initial_state(self.cell, x.shape[0], self.weights)
        else:
            before = _as_states(self, state, self.cell.states)
        after = run_step(self.cell, x, before, self.weights)
        return after[0] if self.cell.states == 1 else after


def _as_states(layer: Layer, state: Any, number: int) -> State:
    parts = (state,) if number == 1 and not isinstance(state, tuple | list) else tuple(state)
    if len(parts) != number:
        raise ArgumentError(
            f"{type(layer).__name__} at {user_location()}: the state holds {number} tensors, "
            f"not {len(parts)}"
        )
    return tuple(map(as_tensor, parts))


class RNNCell(_CellLayer):
    __doc__ = _document(
        _CellLayer,
        "One step of a recurrent network h = act(W·x + R·h + bias)",
        "`activation`: a function or its name.",
    )

    @staticmethod
    def _make(activation: Any = "tanh") -> Cell:
        return make_elman_cell(activation)


class LSTMCell(_CellLayer):
    __doc__ = _document(
        _CellLayer, "One step of long short-term memory", "The state is a pair (h, c)."
    )

    @staticmethod
    def _make() -> Cell:
        return make_lstm_cell()


class GRUCell(_CellLayer):
    __doc__ = _document(_CellLayer, "One step of gated recurrent units")

    @staticmethod
    def _make() -> Cell:
        return make_gru_cell()


# Along sequences --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, init=False)
class _Recurrent(Layer):
    """A stack of recurrent layers along a sequence: x to (y, last state), as in torch.

    x is (T, B, inputs), or (B, T, inputs) with `batch_first`; y is (T, B, D·size) or (B, T, D·size)
    for D directions, and the last state (num_layers·D, B, size).

    Args:
        inputs, size: sizes of the last axis of x and of the state.
        num_layers: number of layers; each takes the outputs of the one before.
        bias: add biases.
        dropout: rate between layers, in a `gf.nn.training` block.
        bidirectional: each layer runs in both directions, and their outputs are concatenated.

    Variables of layer k (those of the reverse direction end in `_reverse`): `weight_ih_lk`
    (G·size, inputs), `weight_hh_lk` (G·size, size), `bias_ih_lk` and `bias_hh_lk` (G·size,), for G
    gates in torch's order, uniform on ±1/√size.
    """

    cell: Cell
    stacked: tuple[tuple[RecurrentWeights, ...], ...]
    dropout: Dropout
    batch_first: bool

    def __init__(
        self, inputs: int, size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, *,
        dtype: Any = "float32", name: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        require_sizes(self, inputs=inputs, size=size)
        require_layers(self, num_layers)
        cell = _make_cell(self, self._cell, options)
        sides = ("", "_reverse") if bidirectional else ("",)
        rows: list[tuple[RecurrentWeights, ...]] = []
        named: dict[str, Tensor] = {}
        with self.scope(name or type(self).__name__.lower()):
            for k in range(num_layers):
                width = size * len(sides) if k else inputs
                row = []
                for side in sides:
                    row.append(_make_weights(cell, width, size, bias, dtype, f"_l{k}{side}"))
                    named |= _torch_names(row[-1], f"_l{k}{side}")
                rows.append(tuple(row))
        set_attributes(
            self, cell=cell, stacked=tuple(rows), dropout=Dropout(dropout), batch_first=batch_first,
            **named,
        )  # fmt: skip

    @staticmethod
    def _cell() -> Cell:
        raise NotImplementedError

    def __call__(self, x: Any, state: Any = None, *, lengths: Any = None) -> tuple[Tensor, Any]:
        """Return outputs and last state; `lengths` as for `gf.nn.lstm`."""
        x = as_tensor(x)
        if x.ndim != 3:
            raise ShapeError(
                f"{type(self).__name__} at {user_location()}: x must be (T, B, inputs), or "
                f"(B, T, inputs) with batch_first, got {show_shape(x.shape)}"
            )
        x = moveaxis(x, 0, 1) if self.batch_first else x
        lengths = None if lengths is None else as_tensor(lengths)
        given = None if state is None else _as_states(self, state, self.cell.states)
        ends: list[State] = []
        for k, row in enumerate(self.stacked):
            x = self.dropout(x) if k and self.dropout.rate else x
            first = k * len(row)
            states = None
            if given is not None:
                states = [tuple(s[first + i] for s in given) for i in range(len(row))]
            x, last = run_directions(self.cell, x, row, states, lengths)
            ends += last
        state = tuple(stack([end[j] for end in ends]) for j in range(self.cell.states))
        y = moveaxis(x, 0, 1) if self.batch_first else x
        return y, (state[0] if len(state) == 1 else state)


class RNN(_Recurrent):
    __doc__ = _document(
        _Recurrent,
        "A stack of recurrent networks h = act(W·x + R·h + bias)",
        "`activation`: a function or its name.",
    )

    @staticmethod
    def _cell(activation: Any = "tanh") -> Cell:
        return make_elman_cell(activation)


class LSTM(_Recurrent):
    __doc__ = _document(
        _Recurrent, "A stack of long short-term memories", "The state is a pair (h, c)."
    )

    @staticmethod
    def _cell() -> Cell:
        return make_lstm_cell()


class GRU(_Recurrent):
    __doc__ = _document(_Recurrent, "A stack of gated recurrent units")

    @staticmethod
    def _cell() -> Cell:
        return make_gru_cell()
