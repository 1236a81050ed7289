"""RNN, GRU and LSTM, each direction by our layer with its activations; and linear attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.networks import piecewise_activations as piecewise
from graphflow.ops.networks.recurrence import recurrent
from graphflow.ops.networks.recurrence.recurrent_cells import LstmCell, RecurrentWeights, State
from graphflow.ops.pointwise import arithmetic, comparison, rectifiers, select, transcendental
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.reductions import extrema
from graphflow.ops.tensors.creation import zeros
from graphflow.ops.tensors.shape import expand_dims, moveaxis, reshape, squeeze
from graphflow.ops.tensors.slicing import concat, stack, window

_Function = Callable[[Tensor], Tensor]
_DIRECTIONS = {
    "forward": ["forward"], "reverse": ["reverse"], "bidirectional": ["forward", "reverse"],
}  # fmt: skip

_PLAIN = ("relu", "tanh", "sigmoid", "softsign", "softplus")

# Parametric activations by lower-case name: (x, alpha, beta) -> y, and both defaults.
_ACTIVATIONS: dict[str, tuple[Callable[[Any, float, float], Any], float, float]] = {
    "affine": (lambda x, a, b: x * a + b, 1.0, 0.0),
    "leakyrelu": (lambda x, a, b: rectifiers.leaky_relu(x, a), 0.01, 0),
    "thresholdedrelu": (lambda x, a, b: piecewise.thresholded_relu(x, a), 1.0, 0),
    "scaledtanh": (lambda x, a, b: transcendental.tanh(x * b) * a, 1.0, 1.0),
    "hardsigmoid": (piecewise.hard_sigmoid, 0.2, 0.5),
    "elu": (lambda x, a, b: rectifiers.elu(x, a), 1.0, 0),
}
_TAKES = {
    "affine": 2, "leakyrelu": 1, "thresholdedrelu": 1, "scaledtanh": 2, "hardsigmoid": 2, "elu": 1,
}  # fmt: skip


def _activations(call: NodeCall, defaults: tuple[str, ...], directions: int) -> list[_Function]:
    """Return the activations of all directions, one after the other.

    The attributes activation_alpha and activation_beta list values, in order, for those activations
    that have such a parameter.
    """
    names = [n.lower() for n in call.attr("activations", list(defaults) * directions)]
    unknown = [n for n in names if n not in _ACTIVATIONS and n not in _PLAIN]
    if unknown or len(names) != len(defaults) * directions:
        raise call.unsupported_error(
            f"activations {names}; there are {len(defaults)} a direction of "
            f"{', '.join([*_PLAIN, *_ACTIVATIONS])}"
        )
    alphas = list(call.attr("activation_alpha", []))
    betas = list(call.attr("activation_beta", []))
    functions: list[_Function] = []
    for name in names:
        if name in _PLAIN:
            functions.append(FUNCTIONS[name])  # layers recognise their defaults by identity
            continue
        make, alpha, beta = _ACTIVATIONS[name]
        takes = _TAKES[name]
        a = alphas.pop(0) if takes > 0 and alphas else alpha
        b = betas.pop(0) if takes > 1 and betas else beta
        functions.append(partial(_apply_activation, make, a, b))
    return functions


def _apply_activation(make: Callable[..., Any], a: float, b: float, x: Tensor) -> Tensor:
    result: Tensor = make(x, a, b)
    return result


def _slice_direction(x: Tensor | None, i: int, count: int) -> Tensor | None:
    """Return direction i of (directions, …), as (1, …)."""
    return x if x is None or count == 1 else window(x, 0, i, 1)


def _layer(
    call: NodeCall,
    layer: Callable[..., Any],
    defaults: tuple[str, ...],
    weights: tuple[Tensor, Tensor] | None = None,
    **choices: Any,
) -> Outputs:
    """Run a layer in each direction, with inputs 1 and 2 as weights, or with `weights`.

    ONNX's y is (time, directions, batch, hidden). With layout 1, the batch axis is first in all
    tensors that have one.
    """
    direction = call.attr("direction", "forward")
    if direction not in _DIRECTIONS:
        raise call.unsupported_error(f"direction {direction!r}")
    directions = _DIRECTIONS[direction]
    count, batch_first = len(directions), bool(call.attr("layout", 0))
    lstm = len(defaults) == 3
    w, r = weights or (call.tensor(1), call.tensor(2))
    bias = call.optional(3)
    states = [call.optional(i) for i in ((5, 6) if lstm else (5,))]
    if batch_first:
        states = [s if s is None else moveaxis(s, 0, 1) for s in states]
    functions = _activations(call, defaults, count)
    each = len(defaults)
    outputs, ends = [], []
    for i, way in enumerate(directions):
        chosen = tuple(functions[i * each : (i + 1) * each])
        started = tuple(_slice_direction(state, i, count) for state in states)
        if lstm:
            choices["peepholes"] = _slice_direction(call.optional(7), i, count)
        y, last = layer(
            call.tensor(0),
            _slice_direction(w, i, count),
            _slice_direction(r, i, count),
            _slice_direction(bias, i, count),
            started if lstm else started[0],
            lengths=call.optional(4),
            direction=way,
            clip=call.attr("clip"),
            activations=chosen if lstm or each > 1 else chosen[0],
            batch_first=batch_first,
            **choices,
        )
        outputs.append(y)
        ends.append(last if lstm else (last,))
    at = 2 if batch_first else 1
    lasts = [_concat_directions([end[j] for end in ends]) for j in range(len(ends[0]))]
    return [
        stack(outputs, at),
        *(moveaxis(last, 0, 1) if batch_first else last for last in lasts),
    ]


def _concat_directions(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else concat(parts, 0)


@operator("RNN")
def _rnn(call: NodeCall) -> Outputs:
    return _layer(call, recurrent.rnn, ("Tanh",))


@operator("GRU")
def _gru(call: NodeCall) -> Outputs:
    return _layer(
        call,
        recurrent.gru,
        ("Sigmoid", "Tanh"),
        linear_before_reset=bool(call.attr("linear_before_reset", 0)),
        gates="zrn",
    )


@operator("LSTM")
def _lstm(call: NodeCall) -> Outputs:
    return _layer(
        call,
        recurrent.lstm,
        ("Sigmoid", "Tanh", "Tanh"),
        input_forget=bool(call.attr("input_forget", 0)),
        gates="iofg",
    )


class _QuantizedLstm(LstmCell):
    """An LSTM whose hidden state is quantised to 8 bits before the recurrent product."""

    def step(self, z: Tensor, state: State, weights: RecurrentWeights) -> State:
        return super().step(z, (_quantize_dynamically(state[0]), *state[1:]), weights)


def _quantize_dynamically(x: Tensor) -> Tensor:
    """Round x as `DynamicQuantizeLinear` does: to 256 levels between its minimum and maximum."""
    low, high = (select.minimum(extrema.min(x), 0), select.maximum(extrema.max(x), 0))
    width = (high - low) / 255
    step = select.where(comparison.equal(width, 0), 1.0, width)
    zero = select.clip(arithmetic.round(-low / step), 0, 255)
    whole = select.clip(arithmetic.round(x / step) + zero, 0, 255)
    result: Tensor = (whole - zero) * step
    return result


def _run_quantized_lstm(
    x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None, initial: Any, *, gates: str,
    activations: tuple[_Function, ...], clip: float | None, input_forget: bool, **others: Any,
) -> tuple[Tensor, State]:  # fmt: skip
    """Run `recurrent.lstm` with inputs and hidden states rounded to 8 bits."""
    cell = _QuantizedLstm(gates, activations, 2, clip, input_forget)
    return recurrent.run_layer(cell, _quantize_dynamically(x), w, r, bias, initial, **others)


@operator("DynamicQuantizeLSTM", domain="com.microsoft")
def _quantized_lstm(call: NodeCall) -> Outputs:
    """Translate onnxruntime's LSTM with 8-bit weights (directions, inputs, gates·hidden).

    Each direction, or each column, has a scale and a zero point.
    """

    def weights(i: int, scale: int) -> Tensor:
        q, factors, zero = (call.tensor(j) for j in (i, scale, scale + 1))
        wide = factors.ndim == 2
        factors, zero = (reshape(t, (q.shape[0], 1, -1 if wide else 1)) for t in (factors, zero))
        whole = astype(q, "int32") - astype(zero, "int32")
        return moveaxis(astype(whole, factors.dtype) * factors, 1, 2)

    return _layer(
        call,
        _run_quantized_lstm,
        ("Sigmoid", "Tanh", "Tanh"),
        (weights(1, 8), weights(2, 10)),
        input_forget=bool(call.attr("input_forget", 0)),
        gates="iofg",
    )


# Linear attention -----------------------------------------------------------------------------


def _time_major(x: Tensor | None, heads: int) -> Tensor | None:
    """Reshape (batch, time, heads·size) to (time, batch, heads, size), in float32 or wider."""
    if x is None:
        return None
    wide = x if x.dtype.itemsize > 2 else astype(x, "float32")
    return moveaxis(reshape(wide, (x.shape[0], x.shape[1], heads, -1)), 0, 1)


@operator("LinearAttention")
def _linear_attention(call: NodeCall) -> Outputs:
    """Translate LinearAttention: each step decays, updates and reads a state.

    The state is (batch, heads, keys, values).

    Source: Yang, Kautz & Hatamizadeh, "Gated Delta Networks", ICLR 2025.
    """
    rule = call.attr("update_rule", "gated_delta")
    decays, corrects = "gated" in rule, "delta" in rule
    if rule not in ("linear", "gated", "delta", "gated_delta"):
        raise call.unsupported_error(f"update_rule {rule!r}")
    if (decays, corrects) != (call.has(4), call.has(5)):
        raise call.unsupported_error(f"update_rule {rule!r} with the inputs that are given")
    heads, queries = call.required_attr("kv_num_heads"), call.required_attr("q_num_heads")
    if min(heads, queries) < 1 or queries % heads:
        raise call.unsupported_error(f"{queries} heads of queries for {heads} of keys")
    q, k, v = (_time_major(call.tensor(i), h) for i, h in ((0, queries), (1, heads), (2, heads)))
    assert q is not None and k is not None and v is not None
    steps, batch, _, size = q.shape
    given = call.optional(3)
    start = zeros((batch, heads, size, v.shape[-1]), q.dtype)
    rate = call.optional(5)
    items = [
        reshape(q, (steps, batch, heads, queries // heads, size)),
        k,
        v,
        _time_major(call.optional(4), heads),
        None if rate is None else _time_major(rate, call.static_size(rate.shape[2])),
    ]

    def step(state: Tensor, now: Any) -> tuple[Tensor, Tensor]:
        query, key, value, *others = now
        if decays:
            state = state * expand_dims(transcendental.exp(others[0]), -1)
        if corrects:
            past = squeeze(matmul(expand_dims(key, -2), state), -2)
            value = others[-1] * (value - past)
        state = state + expand_dims(key, -1) * expand_dims(value, -2)
        return state, matmul(query, state)

    first = start if given is None else astype(given, q.dtype)
    last, y = FUNCTIONS["scan"](step, first, tuple(item for item in items if item is not None))
    scale = call.attr("scale", 0.0) or 1 / math.sqrt(call.static_size(size))
    y = reshape(moveaxis(y * scale, 0, 1), (batch, steps, -1))
    wanted = call.spec(0).dtype
    return [astype(y, wanted), astype(last, wanted if given is None else given.dtype)]
