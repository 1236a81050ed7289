"""Dense layers: stacks with norms and shortcuts, towers, mixtures, and tied weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import graphflow as gf
from benchmarks.random_models.network import Network, Signal

ACTIVATIONS: dict[str, Callable[[gf.Tensor], gf.Tensor]] = {
    "relu": gf.nn.relu,
    "gelu": gf.nn.gelu,
    "silu": gf.nn.silu,
    "tanh": gf.tanh,
    "sigmoid": gf.nn.sigmoid,
    "leaky relu": gf.nn.leaky_relu,
    "elu": gf.nn.elu,
    "softplus": gf.nn.softplus,
    "mish": gf.nn.mish,
}


MAX_PLAIN_DEPTH = 6
"""Layers with shortcuts beyond which a norm keeps numbers from overflowing."""


@dataclass(frozen=True)
class DenseStyle:
    """The choices that the layers of one stack share."""

    activation: str
    norm: str
    norm_first: bool
    residual: bool
    dropout: float
    has_bias: bool

    @classmethod
    def draw(cls, net: Network, depth: int) -> DenseStyle:
        """Draw a style for layers of a depth, and note it."""
        residual = net.happens(0.4)
        norms = ["layer norm", "rms norm"]
        if net.batch > 1:  # one sample has no variance
            norms.append("batch norm")
        if not residual or depth <= MAX_PLAIN_DEPTH:
            norms.append("")
        style = cls(
            net.choose(*ACTIVATIONS),
            net.choose(*norms),
            net.happens(0.5),
            residual,
            net.choose(0.0, 0.1, 0.5, weights=(0.7, 0.2, 0.1)),
            net.happens(0.8),
        )
        net.note(
            style.activation,
            style.norm,
            "residual" if style.residual else "",
            "dropout" if style.dropout else "",
            "" if style.has_bias else "no bias",
        )
        return style


def normalize(net: Network, x: gf.Tensor, size: int, norm: str, rows: int = 1) -> gf.Tensor:
    """Return x after a norm over its last axis (or over the batch), with its parameters."""
    if not norm:
        return x
    net.count(elements=net.batch * rows * size)
    if norm == "layer norm":
        return gf.nn.layer_norm(x, net.scale(size), net.bias(size))
    if norm == "rms norm":
        return gf.nn.rms_norm(x, net.scale(size))
    return gf.nn.BatchNorm(size, dtype=net.dtype)(x)


def dense_layer(net: Network, x: gf.Tensor, n: int, m: int, style: DenseStyle) -> gf.Tensor:
    """Return one layer: a product, bias, norm, activation, dropout, and a shortcut if sizes fit."""
    with net.layer():
        h = normalize(net, x, n, style.norm) if style.norm_first else x
        net.count(2.0 * net.batch * n * m, 2.0 * net.batch * m)
        h = h @ net.weight(n, m)
        h = h + net.bias(m) if style.has_bias else h
        h = h if style.norm_first else normalize(net, h, m, style.norm)
        h = ACTIVATIONS[style.activation](h)
        h = gf.nn.Dropout(style.dropout)(h) if style.dropout else h
        return h + x if style.residual and n == m else h


def dense_stack(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return a stack of dense layers of one width, or of widths that taper off."""
    style = DenseStyle.draw(net, depth)
    tapers = net.happens(0.2)
    h, (n,) = signal.tensor, signal.sizes
    for number in range(depth):
        m = max(8, width >> (number * 4 // max(1, depth))) if tapers else width
        h = dense_layer(net, h, n, m, style)
        n = m
    return Signal(h, (n,))


def tower_stack(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return towers side by side that meet at the end, by concatenation, sum or product."""
    count = net.integer(2, 8)
    meeting = net.choose("concat", "sum", "product")
    net.note(f"{count} towers meet by {meeting}")
    ends = []
    for number in range(count):
        own = signal
        if number and net.happens(0.3):  # reads features of its own
            size = net.integer(8, 512)
            own = Signal(net.feed(size), (size,))
        ends.append(dense_stack(net, own, max(1, depth // count), width))
    with net.layer():
        if meeting == "concat":
            sizes = sum(end.sizes[0] for end in ends)
            return Signal(gf.concat([end.tensor for end in ends], axis=1), (sizes,))
        size = ends[0].sizes[0]
        total = ends[0].tensor
        for end in ends[1:]:
            h = end.tensor
            h = h if end.sizes[0] == size else net.linear(h, end.sizes[0], size)
            total = total + h if meeting == "sum" else total * gf.nn.sigmoid(h)
        return Signal(total, (size,))


def mixture_of_experts(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return layers of experts whose outputs a softmax gate weighs."""
    experts = net.integer(2, 8)
    net.note(f"{experts} experts")
    h, (n,) = signal.tensor, signal.sizes
    layers = max(1, depth // experts)
    style = DenseStyle.draw(net, layers)
    for _ in range(layers):
        with net.layer():
            gate = gf.nn.softmax(net.linear(h, n, experts))
        parts = []
        for i in range(experts):
            out = dense_layer(net, h, n, width, style)
            parts.append(out * gate[:, i : i + 1])
        with net.layer():
            h = sum(parts[1:], parts[0])
        n = width
    return Signal(h, (n,))


def tied_autoencoder(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return an autoencoder whose decoder multiplies by the encoder's weights, transposed."""
    activation = net.choose(*ACTIVATIONS)
    net.note(activation, "decoder tied to the encoder")
    h, (n,) = signal.tensor, signal.sizes
    tied = []
    for number in range(max(1, depth // 2)):
        m = max(8, width >> min(number, 3))
        with net.layer():
            w = net.weight(n, m)
            net.count(4.0 * net.batch * n * m, 2.0 * net.batch * (n + m))
            h = ACTIVATIONS[activation](h @ w + net.bias(m))
        tied.append((w, n))
        n = m
    for w, n in reversed(tied):
        with net.layer():
            h = ACTIVATIONS[activation](h @ gf.matrix_transpose(w) + net.bias(n))
    return Signal(h, (n,))
