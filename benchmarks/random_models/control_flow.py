"""Layers that hold bodies: branches, loops, loops over stacked layers, maps and recomputation."""

from __future__ import annotations

from typing import Any

import graphflow as gf
from benchmarks.random_models.dense import ACTIVATIONS
from benchmarks.random_models.network import Network, Signal


def controlled_stack(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return layers inside one kind of control flow."""
    kind = net.choose(*KINDS)
    net.note(kind)
    with net.layer():
        h = net.linear(signal.tensor, signal.sizes[0], width)
    return KINDS[kind](net, Signal(h, (width,)), depth, width)


def conditional_layers(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return layers that choose between two products by the sign of a mean."""
    h = signal.tensor
    for _ in range(depth):
        with net.layer():
            net.count(2.0 * net.batch * width**2, 3.0 * net.batch * width, 2.0)
            w, v = net.weight(width, width), net.weight(width, width)
            h = gf.cond(
                gf.mean(h) > 0.0,
                lambda x, w=w: gf.nn.relu(x @ w),
                lambda x, v=v: gf.tanh(x @ v) * 0.5,
                h,
            )
    return Signal(h, signal.sizes)


def repeated_layer(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return a loop that applies one layer until a limit of `depth` iterations."""
    net.count(2.0 * depth * net.batch * width**2, 3.0 * depth * net.batch * width, 3.0 * depth)
    with net.layer():
        w, b = net.weight(width, width), net.bias(width)
        _, h = gf.while_loop(
            lambda state: state[0] < depth,
            lambda state: (state[0] + 1, gf.tanh(state[1] @ w + b)),
            (gf.constant(0), signal.tensor),
            max_iterations=depth,
        )
    return Signal(h, signal.sizes)


def scanned_layers(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return a scan over layers whose weights are stacked in one variable."""
    activation = ACTIVATIONS[net.choose(*ACTIVATIONS)]
    net.count(2.0 * depth * net.batch * width**2, 3.0 * depth * net.batch * width, 3.0 * depth)
    with net.layer():
        stacked = net.weight(depth, width, width, fan=width)

        def apply(h: gf.Tensor, w: gf.Tensor) -> tuple[gf.Tensor, None]:
            return gf.nn.rms_norm(h + activation(h @ w)), None

        h, _ = gf.scan(apply, signal.tensor, stacked)
    return Signal(h, signal.sizes)


def mapped_members(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return the mean of an ensemble: one network mapped over stacked weights."""
    members = net.integer(2, 8)
    layers = min(depth, 8)
    net.note(f"{members} members")
    each = 2.0 * members * net.batch * width
    net.count(each * width * layers, each * layers)
    with net.layer():
        weights = [net.weight(members, width, width, fan=width) for _ in range(layers)]

        def member(x: gf.Tensor, *own: gf.Tensor) -> gf.Tensor:
            for w in own:
                x = gf.nn.relu(x @ w)
            return x

        axes: Any = (None, *(0 for _ in weights))
        h = gf.mean(gf.vmap(member, in_axes=axes)(signal.tensor, *weights), axis=0)
    return Signal(h, signal.sizes)


def mapped_samples(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return layers that are written for one sample and mapped over the batch."""
    h = signal.tensor
    for _ in range(depth):
        with net.layer():
            net.count(2.0 * net.batch * width**2, 2.0 * net.batch * width)
            w, b = net.weight(width, width), net.bias(width)
            h = gf.vmap(lambda x, w=w, b=b: gf.nn.silu(x @ w + b))(h)
    return Signal(h, signal.sizes)


def recomputed_layers(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return layers whose gradients compute their forward pass again."""
    h = signal.tensor
    for _ in range(depth):
        with net.layer():
            net.count(3.0 * net.batch * width**2, 2.0 * net.batch * width)
            w, b = net.weight(width, width), net.bias(width)
            h = gf.checkpoint(lambda x, w=w, b=b: gf.nn.layer_norm(x + gf.nn.gelu(x @ w + b)))(h)
    return Signal(h, signal.sizes)


KINDS = {
    "cond": conditional_layers,
    "while": repeated_layer,
    "scan over layers": scanned_layers,
    "vmap over members": mapped_members,
    "vmap over samples": mapped_samples,
    "recomputation": recomputed_layers,
}
