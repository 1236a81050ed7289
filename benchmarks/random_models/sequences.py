"""Layers over sequences: attention blocks, recurrent ops, and recurrences written as scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import graphflow as gf
from benchmarks.random_models.dense import ACTIVATIONS, MAX_PLAIN_DEPTH, normalize
from benchmarks.random_models.network import Network, Signal

State = tuple[gf.Tensor, ...]


def attention_stack(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return transformer blocks: attention and a feed-forward part, each with a shortcut."""
    steps, n = signal.sizes
    heads = net.choose(*(h for h in (1, 2, 4, 8, 16) if h <= width // 4 or h == 1))
    width = max(heads, width // heads * heads)
    shared = net.choose(heads, 1, weights=(0.8, 0.2))
    masking = net.choose("no mask", "causal", "padding mask", "window")
    norms = ("layer norm", "rms norm", *([""] if depth <= MAX_PLAIN_DEPTH // 2 else []))
    norm, first = net.choose(*norms), net.happens(0.7)
    ratio, activation = net.choose(0, 2, 4), net.choose("relu", "gelu", "silu")
    net.note(f"{heads} heads", f"{steps} steps", masking, norm)
    net.note(f"feed-forward ×{ratio}" if ratio else "", "shared keys" if shared < heads else "")
    mask = None
    if masking == "padding mask":
        mask = net.feed(1, 1, steps, dtype="bool", below=2)
    h = signal.tensor
    if n != width:
        with net.layer():
            h = net.linear(h, n, width, steps)

    def branch(h: gf.Tensor, inner: Callable[[gf.Tensor], gf.Tensor]) -> gf.Tensor:
        """Return h plus a branch, with the norm before the branch or after the sum."""
        total: gf.Tensor = h + inner(normalize(net, h, width, norm, steps) if first else h)
        return total if first else normalize(net, total, width, norm, steps)

    def attend(x: gf.Tensor) -> gf.Tensor:
        return attend_heads(net, x, steps, width, (heads, shared), masking, mask)

    def feed_forward(x: gf.Tensor) -> gf.Tensor:
        wide = ACTIVATIONS[activation](net.linear(x, width, ratio * width, steps))
        return net.linear(wide, ratio * width, width, steps)

    for _ in range(depth):
        with net.layer():
            h = branch(h, attend)
            h = branch(h, feed_forward) if ratio else h
    return Signal(h, (steps, width))


def attend_heads(
    net: Network,
    x: gf.Tensor,
    steps: int,
    width: int,
    heads: tuple[int, int],
    masking: str,
    mask: gf.Tensor | None,
) -> gf.Tensor:
    """Return attention over the steps, with linear maps before and after.

    Args:
        heads: the numbers of heads of queries, and of keys and values.
    """
    size = width // heads[0]

    def split_heads(count: int) -> gf.Tensor:
        y = gf.reshape(net.linear(x, width, count * size, steps), (-1, steps, count, size))
        return gf.permute_dims(y, (0, 2, 1, 3))

    q, k, v = split_heads(heads[0]), split_heads(heads[1]), split_heads(heads[1])
    net.count(4.0 * net.batch * steps**2 * width, net.batch * steps * width)
    window = max(1, steps // 4) if masking == "window" else None
    seen = gf.nn.attention(q, k, v, mask, causal=masking == "causal", window=window)
    seen = gf.reshape(gf.permute_dims(seen, (0, 2, 1, 3)), (-1, steps, width))
    return net.linear(seen, width, width, steps)


def recurrent_stack(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return recurrent layers of one kind: the ops of `gf.nn`."""
    kind = net.choose("LSTM", "GRU", "RNN")
    both, layers = net.happens(0.25), min(depth, 6)
    steps, n = signal.sizes
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    net.note(kind, f"{layers} layers", f"{steps} steps", "both directions" if both else "")
    h = signal.tensor
    for _ in range(layers):
        directions = 1 + both
        net.count(
            2.0 * net.batch * steps * directions * gates * width * (n + width),
            3.0 * net.batch * steps * directions * (gates + 1) * width,
            2.0 * steps * directions,
        )
        net.weights += directions * gates * width * (n + width)
        with net.layer():
            make = getattr(gf.nn, kind)
            h, _ = make(n, width, batch_first=True, bidirectional=both, dtype=net.dtype)(h)
        n = directions * width
    return Signal(h, (steps, n))


def scan_stack(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return recurrent layers whose cells are written out and run by `gf.scan`."""
    kind = net.choose("LSTM", "GRU", "Elman", "decay")
    layers, backwards = min(depth, 4), net.happens(0.2)
    steps, n = signal.sizes
    net.note(f"{kind} cell", f"{layers} layers", f"{steps} steps", "reverse" if backwards else "")
    h = gf.permute_dims(signal.tensor, (1, 0, 2))
    for _ in range(layers):
        with net.layer():
            gates = {"LSTM": 4, "GRU": 3, "Elman": 1, "decay": 1}[kind]
            net.count(
                2.0 * net.batch * steps * gates * width * (n + width),
                3.0 * net.batch * steps * (gates + 2) * width,
                6.0 * steps,
            )
            cell, states = make_cell(net, kind, n, width)
            start = tuple(gf.zeros((net.batch, width), net.dtype) for _ in range(states))
            _, h = gf.scan(cell, start, h, reverse=backwards)
        n = width
    return Signal(gf.permute_dims(h, (1, 0, 2)), (steps, width))


def make_cell(net: Network, kind: str, n: int, width: int) -> tuple[Callable[[Any, Any], Any], int]:
    """Return the body of a scan over rows (batch, n), and how many states it carries."""
    if kind == "LSTM":
        wx, wh, b = net.weight(n, 4 * width), net.weight(width, 4 * width), net.bias(4 * width)

        def lstm(state: State, row: gf.Tensor) -> tuple[State, gf.Tensor]:
            h, c = state
            i, f, g, o = gf.split(row @ wx + h @ wh + b, 4, axis=-1)
            c = gf.nn.sigmoid(f) * c + gf.nn.sigmoid(i) * gf.tanh(g)
            h = gf.nn.sigmoid(o) * gf.tanh(c)
            return (h, c), h

        return lstm, 2
    if kind == "GRU":
        wx, wh = net.weight(n, 3 * width), net.weight(width, 3 * width)

        def gru(state: State, row: gf.Tensor) -> tuple[State, gf.Tensor]:
            (h,) = state
            r, z, candidate = gf.split(row @ wx, 3, axis=-1)
            hr, hz, hn = gf.split(h @ wh, 3, axis=-1)
            z = gf.nn.sigmoid(z + hz)
            candidate = gf.tanh(candidate + gf.nn.sigmoid(r + hr) * hn)
            h = (1.0 - z) * candidate + z * h
            return (h,), h

        return gru, 1
    if kind == "Elman":
        wx, wh, b = net.weight(n, width), net.weight(width, width), net.bias(width)

        def elman(state: State, row: gf.Tensor) -> tuple[State, gf.Tensor]:
            h = gf.tanh(row @ wx + state[0] @ wh + b)
            return (h,), h

        return elman, 1
    wx, rate = net.weight(n, width), net.bias(width)

    def decay(state: State, row: gf.Tensor) -> tuple[State, gf.Tensor]:
        h = gf.nn.sigmoid(rate) * state[0] + row @ wx
        return (h,), gf.nn.silu(h)

    return decay, 1
