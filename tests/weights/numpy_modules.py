"""Modules of torch in numpy, from its documentation: each takes a state dict of torch's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
State = Mapping[str, Array]


def make_state(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, Array]:
    """Return weights of torch's names and shapes; variances are above 0."""
    random = np.random.default_rng(seed)
    return {
        name: random.normal(size=tuple(shape)).astype("float32") * 0.4
        if not name.endswith("running_var")
        else random.uniform(0.5, 2.0, tuple(shape)).astype("float32")
        for name, shape in shapes.items()
    }


def part_of(state: State, prefix: str) -> dict[str, Array]:
    """Return the weights of a submodule, by their names in it."""
    return {n[len(prefix) + 1 :]: v for n, v in state.items() if n.startswith(prefix + ".")}


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def linear(state: State, x: Array) -> Array:
    return np.asarray(x @ state["weight"].T + state["bias"])


def layer_norm(state: State, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return np.asarray(scaled * state["weight"] + state["bias"])


def batch_norm(state: State, x: Array) -> Array:
    """In evaluation: by the running moments, along axis 1."""
    along = [state[n].reshape(-1, *(1,) * (x.ndim - 2)) for n in ("running_mean", "running_var")]
    scaled = (x - along[0]) / np.sqrt(along[1] + 1e-5)
    weight, bias = (state[n].reshape(-1, *(1,) * (x.ndim - 2)) for n in ("weight", "bias"))
    return np.asarray(scaled * weight + bias)


def lstm_direction(state: State, x: Array, end: str) -> Array:
    """Gates in the order input, forget, cell, output; x (T, B, inputs)."""
    size = state[f"weight_hh{end}"].shape[1]
    h = c = np.zeros((x.shape[1], size), "float32")
    out = []
    for step in x:
        gates = step @ state[f"weight_ih{end}"].T + state[f"bias_ih{end}"]
        gates = gates + h @ state[f"weight_hh{end}"].T + state[f"bias_hh{end}"]
        i, f, g, o = np.split(gates, 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        out.append(h)
    return np.stack(out)


def gru_direction(state: State, x: Array, end: str) -> Array:
    """Gates in the order reset, update, new; the reset gate acts after the product with h."""
    size = state[f"weight_hh{end}"].shape[1]
    h = np.zeros((x.shape[1], size), "float32")
    out = []
    for step in x:
        r, z, n = np.split(step @ state[f"weight_ih{end}"].T + state[f"bias_ih{end}"], 3, -1)
        hr, hz, hn = np.split(h @ state[f"weight_hh{end}"].T + state[f"bias_hh{end}"], 3, -1)
        reset, update = sigmoid(r + hr), sigmoid(z + hz)
        h = (1 - update) * np.tanh(n + reset * hn) + update * h
        out.append(h)
    return np.stack(out)


def recurrent(direction: Any, state: State, x: Array, layers: int, sides: int) -> Array:
    """Several layers; the outputs of both directions are concatenated."""
    for k in range(layers):
        found = [direction(state, x, f"_l{k}")]
        if sides == 2:
            found.append(direction(state, x[::-1], f"_l{k}_reverse")[::-1])
        x = np.concatenate(found, -1)
    return x


def attention(state: State, x: Array, heads: int) -> Array:
    """Self-attention (B, T, size) with one projection of queries, keys and values."""
    together = x @ state["in_proj_weight"].T + state["in_proj_bias"]
    b, t, size = x.shape
    q, k, v = (
        p.reshape(b, t, heads, size // heads).swapaxes(1, 2) for p in np.split(together, 3, -1)
    )
    scores = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(size // heads))
    return linear(part_of(state, "out_proj"), (scores @ v).swapaxes(1, 2).reshape(b, t, size))


def encoder_layer(state: State, x: Array, heads: int) -> Array:
    """A TransformerEncoderLayer whose norms follow each sum."""
    norms = [part_of(state, f"norm{i}") for i in (1, 2)]
    x = layer_norm(norms[0], x + attention(part_of(state, "self_attn"), x, heads))
    hidden = np.maximum(linear(part_of(state, "linear1"), x), 0)
    return layer_norm(norms[1], x + linear(part_of(state, "linear2"), hidden))
