"""Convolutional layers: encoders with strides and pooling, and decoders that enlarge again."""

from __future__ import annotations

from dataclasses import dataclass

import graphflow as gf
from benchmarks.random_models.dense import ACTIVATIONS, MAX_PLAIN_DEPTH
from benchmarks.random_models.network import Network, Signal

MAX_CHANNELS = 512


@dataclass(frozen=True)
class ConvStyle:
    """The choices that the layers of one encoder share."""

    activation: str
    norm: str
    kernel: int
    kind: str
    residual: bool
    shrink: str
    every: int

    @classmethod
    def draw(cls, net: Network, depth: int) -> ConvStyle:
        """Draw a style for layers of a depth, and note it."""
        residual = net.happens(0.3)
        norms = ["batch norm", "group norm"]
        if not residual or depth <= MAX_PLAIN_DEPTH:
            norms.append("")
        style = cls(
            net.choose("relu", "gelu", "silu", "leaky relu"),
            net.choose(*norms),
            net.choose(1, 3, 5, 7, weights=(0.1, 0.6, 0.2, 0.1)),
            net.choose("", "depthwise", "grouped", weights=(0.6, 0.25, 0.15)),
            residual,
            net.choose("strides", "max pooling", "average pooling"),
            net.integer(1, 4),
        )
        net.note(
            style.activation, style.norm, f"kernel {style.kernel}", style.kind,
            "residual" if style.residual else "", style.shrink,
        )  # fmt: skip
        return style


def normalize_channels(net: Network, x: gf.Tensor, sizes: tuple[int, ...], norm: str) -> gf.Tensor:
    """Return x after a norm over batches or groups of channels."""
    channels, height, width = sizes
    if not norm:
        return x
    net.count(elements=net.batch * channels * height * width)
    if norm == "batch norm" and net.batch * height * width > 1:
        return gf.nn.BatchNorm(channels, dtype=net.dtype)(x)
    groups = next(g for g in (8, 4, 2, 1) if channels % g == 0)
    return gf.nn.group_norm(x, groups, net.scale(channels), net.bias(channels))


def convolve(
    net: Network, signal: Signal, channels: int, kernel: int, stride: int = 1, groups: int = 1
) -> Signal:
    """Return a convolution with bias, padded so that stride 1 keeps the size."""
    n, height, width = signal.sizes
    height, width = -(-height // stride), -(-width // stride)
    places = net.batch * height * width
    net.count(2.0 * places * (n // groups) * channels * kernel**2, 2.0 * places * channels)
    w = net.weight(channels, n // groups, kernel, kernel, fan=n // groups * kernel**2)
    x = gf.nn.conv(
        signal.tensor, w, net.bias(channels), stride=stride, padding=kernel // 2, groups=groups
    )
    return Signal(x, (channels, height, width))


def conv_layer(
    net: Network, signal: Signal, channels: int, style: ConvStyle, stride: int
) -> Signal:
    """Return one layer: a convolution of the style's kind, norm, activation and shortcut."""
    with net.layer():
        n = signal.sizes[0]
        if style.kind == "depthwise":
            h = convolve(net, signal, n, style.kernel, stride, groups=n)
            h = convolve(net, h, channels, 1)
        else:
            groups = 4 if style.kind == "grouped" and n % 4 == channels % 4 == 0 else 1
            h = convolve(net, signal, channels, style.kernel, stride, groups)
        x = normalize_channels(net, h.tensor, h.sizes, style.norm)
        x = ACTIVATIONS[style.activation](x)
        if style.residual and h.sizes == signal.sizes:
            x = x + signal.tensor
        return Signal(x, h.sizes)


def shrink(net: Network, signal: Signal, pooling: str) -> Signal:
    """Return an image of half the size, by pooling."""
    channels, height, width = signal.sizes
    pool = gf.nn.max_pool if pooling == "max pooling" else gf.nn.avg_pool
    net.count(elements=net.batch * channels * height * width / 4)
    return Signal(pool(signal.tensor, 2), (channels, height // 2, width // 2))


def encode_image(
    net: Network, signal: Signal, depth: int, width: int, style: ConvStyle
) -> tuple[Signal, list[Signal]]:
    """Return the encoder's output, and the signals before each halving."""
    channels, h, before = min(width, MAX_CHANNELS), signal, []
    widest = min(MAX_CHANNELS, 4 * channels)
    for number in range(depth):
        halves = number % style.every == style.every - 1 and min(h.sizes[1:]) >= 4
        even = h.sizes[1] % 2 == h.sizes[2] % 2 == 0
        if halves and even:
            before.append(h)
            h = conv_layer(net, h, channels, style, 2 if style.shrink == "strides" else 1)
            h = h if style.shrink == "strides" else shrink(net, h, style.shrink)
            channels = min(widest, 2 * channels)
        else:
            h = conv_layer(net, h, channels, style, 1)
    return h, before


def conv_encoder(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return a stack of convolutions that halve the image now and then."""
    return encode_image(net, signal, depth, width, ConvStyle.draw(net, depth))[0]


def conv_autoencoder(net: Network, signal: Signal, depth: int, width: int) -> Signal:
    """Return an encoder and a decoder of as many halvings and doublings."""
    style = ConvStyle.draw(net, depth)
    enlarge = net.choose("transposed convolution", "nearest upsampling", "linear upsampling")
    skips = net.happens(0.4)
    net.note(enlarge, "skip connections" if skips else "")
    h, before = encode_image(net, signal, max(1, depth // 2), width, style)
    for earlier in reversed(before):
        channels = max(8, h.sizes[0] // 2)
        with net.layer():
            h = double_size(net, h, channels, enlarge)
            if skips:
                joined = gf.concat([h.tensor, earlier.tensor], axis=1)
                h = Signal(joined, (channels + earlier.sizes[0], *h.sizes[1:]))
        h = conv_layer(net, h, channels, style, 1)
    return h


def double_size(net: Network, signal: Signal, channels: int, enlarge: str) -> Signal:
    """Return an image of twice the size and other channels."""
    n, height, width = signal.sizes
    height, width = 2 * height, 2 * width
    if enlarge == "transposed convolution":
        places = net.batch * height * width / 4
        net.count(2.0 * places * n * channels * 16, 2.0 * 4 * places * channels)
        w = net.weight(n, channels, 4, 4, fan=4 * n)
        x = gf.nn.conv_transpose(signal.tensor, w, net.bias(channels), stride=2, padding=1)
        return Signal(x, (channels, height, width))
    net.count(elements=net.batch * n * height * width)
    mode = "nearest" if enlarge == "nearest upsampling" else "linear"
    x = gf.nn.interpolate(signal.tensor, scale=2.0, mode=mode)
    return convolve(net, Signal(x, (n, height, width)), channels, 3)
