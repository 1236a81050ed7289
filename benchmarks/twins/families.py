"""Draw twins: for each family, the parts of a network, with sizes that nobody chose.

The family and the optimiser are drawn first. Sizes are drawn again until the step fits, so that a
family is not rarer because its networks are larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np

from benchmarks.random_models.network import Network, TooLarge
from benchmarks.twins.description import (
    CLASSES,
    NUMBERS,
    OPTIMIZERS,
    SPARSE_OPTIMIZERS,
    STEP_CLASSES,
    YES_OR_NO,
    Input,
    Part,
    Twin,
)

ACTIVATIONS = ("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "ELU", "LeakyReLU", "Softplus", "Mish")
MAX_BATCH = 512
EPSILON = 1e-5  # of RMSNorm, which has another default in torch
Drawn = tuple[list[Part], list[Input], str, int]
"""Parts, inputs and target, loss, and `Twin.product_rows`."""


@dataclass(frozen=True)
class Features:
    """The outputs of a network's body: parts so far, and the sizes of a sample."""

    parts: list[Part]
    sizes: tuple[int, ...]


def draw(seed: int, index: int) -> Twin:
    """Return the twin of a seed and an index: the same one on every machine."""
    random = np.random.default_rng((seed, index))
    family = str(random.choice(list(FAMILIES)))
    optimizer = str(random.choice(list(OPTIMIZERS)))
    sparse = family == "tables" and optimizer in SPARSE_OPTIMIZERS and random.random() < 0.5
    for attempt in count():
        net = Network(
            np.random.default_rng((seed, index, attempt)), 1, "float32", False, True, False
        )
        net.batch = net.integer(1, MAX_BATCH)
        try:
            parts, inputs, loss, rows = FAMILIES[family](net)
        except TooLarge:
            continue
        body = Part("TwinNetwork", (), tuple(parts))
        return Twin(
            seed, index, family, tuple(net.notes), net.batch, body, tuple(inputs), loss, optimizer,
            sparse, rows,
        )  # fmt: skip
    raise AssertionError("attempts do not end")


# Layers -----------------------------------------------------------------------------------------


def counted(number: int, noun: str) -> str:
    """Return a number and a noun, in the plural where it is due."""
    return f"{number} {noun}{'s' * (number != 1)}"


def linear(net: Network, n: int, m: int, rows: int = 1) -> Part:
    """Return a linear map, applied to so many rows of each sample."""
    net.weights += n * m
    net.count(2.0 * net.batch * rows * n * m, 2.0 * net.batch * rows * m)
    return Part("Linear", (n, m))


def norm_of(name: str, size: int) -> list[Part]:
    """Return a norm over vectors, or no part."""
    norms = {
        "layer norm": Part("LayerNorm", (size,)),
        "RMS norm": Part("RMSNorm", (size, EPSILON)),
        "batch norm": Part("BatchNorm1d", (size,)),
    }
    return [norms[name]] if name else []


def dense_layers(net: Network, n: int, depth: int, width: int, tapers: bool) -> Features:
    """Return layers of products, norms, activations, dropout and shortcuts in one style."""
    norms = ("", "layer norm", "RMS norm") + (("batch norm",) if net.batch > 1 else ())
    norm, activation = net.choose(*norms), net.choose(*ACTIVATIONS)
    dropout = net.choose(0.0, 0.1, 0.5, weights=(0.65, 0.2, 0.15))
    residual = net.happens(0.3)
    net.note(
        f"{counted(depth, 'layer')} of {width}", "tapered" if tapers else "", norm, activation,
        f"dropout {dropout}" if dropout else "", "residual" if residual else "",
    )  # fmt: skip
    parts: list[Part] = []
    for number in range(depth):
        m = max(8, width >> (2 * number // depth)) if tapers else width
        net.count(elements=3.0 * net.batch * m)
        layer = [linear(net, n, m), *norm_of(norm, m), Part(activation)]
        layer += [Part("Dropout", (dropout,))] if dropout else []
        parts += [Part("Residual", (), tuple(layer))] if residual and n == m else layer
        n = m
    return Features(parts, (n,))


def finish(net: Network, features: Features) -> tuple[list[Part], Input, str]:
    """Return parts with a head, the target, and the loss."""
    parts, sizes = list(features.parts), features.sizes
    if len(sizes) == 2:  # a sequence
        steps, size = sizes
        if net.happens(0.4):
            classes = net.integer(2, 2000)
            net.note(f"{classes} classes each step")
            head = linear(net, size, classes, steps)
            net.count(elements=3.0 * net.batch * steps * classes)
            return [*parts, head], Input((steps,), classes), STEP_CLASSES
        parts.append(Part("LastStep") if net.happens(0.5) else Part("MeanOver", (1,)))
    size = sizes[-1]
    loss = net.choose(CLASSES, NUMBERS, YES_OR_NO)
    if loss == CLASSES:
        classes = net.integer(2, 1000)
        net.note(f"{classes} classes")
        return [*parts, linear(net, size, classes)], Input((), classes), loss
    outputs = net.integer(1, 64)
    net.note(counted(outputs, "output"), loss)
    target = Input((outputs,), 2 if loss == YES_OR_NO else None)
    return [*parts, linear(net, size, outputs)], target, loss


# Families ---------------------------------------------------------------------------------------


def draw_mlp(net: Network) -> Drawn:
    """Draw dense layers over vectors."""
    n, depth, width = net.integer(4, 2048), net.integer(1, 8), net.integer(8, 2048)
    net.note(f"{n} features")
    body = dense_layers(net, n, depth, width, net.happens(0.3))
    parts, target, loss = finish(net, body)
    return parts, [Input((n,)), target], loss, net.batch


def draw_autoencoder(net: Network) -> Drawn:
    """Draw a dense encoder and a decoder that gives back vectors of the input's size."""
    n, depth, width = net.integer(16, 2048), net.integer(1, 4), net.integer(16, 1024)
    activation = net.choose(*ACTIVATIONS)
    norm = net.choose("", "layer norm", *(("batch norm",) if net.batch > 1 else ()))
    sizes = [n, *(max(4, width >> number) for number in range(depth))]
    net.note(f"{n} features", "to ".join(f"{size} " for size in sizes[1:]) + "and back", activation)
    net.note(norm)
    sizes += sizes[-2::-1]
    parts: list[Part] = []
    for before, after in pairwise(sizes[:-1]):
        net.count(elements=2.0 * net.batch * after)
        parts += [linear(net, before, after), *norm_of(norm, after), Part(activation)]
    parts.append(linear(net, sizes[-2], n))
    return parts, [Input((n,)), Input((n,))], NUMBERS, net.batch


def draw_transformer(net: Network) -> Drawn:
    """Draw a transformer's encoder over tokens or vectors."""
    heads, each = net.choose(1, 2, 3, 4, 6, 8, 12, 16), net.choose(8, 16, 24, 32, 40, 64, 80)
    size, steps, depth = heads * each, net.integer(2, 512), net.integer(1, 6)
    hidden = size * net.choose(1, 2, 4)
    dropout = net.choose(0.0, 0.1, weights=(0.7, 0.3))
    gelu, first, causal = net.happens(0.5), net.happens(0.6), net.happens(0.5)
    net.note(
        f"{counted(depth, 'block')} of {size}", counted(heads, "head"),
        f"{steps} steps", f"hidden {hidden}",
        "GELU" if gelu else "ReLU", "norm first" if first else "norm last",
        "causal" if causal else "", f"dropout {dropout}" if dropout else "",
    )  # fmt: skip
    parts, given = begin_sequence(net, steps, size)
    for _ in range(depth):
        net.weights += size * (4 * size + 2 * hidden)
        rows = net.batch * steps
        net.count(
            2.0 * rows * size * (4 * size + 2 * hidden) + 4.0 * rows * steps * size,
            rows * (12.0 * size + 2 * hidden) + net.batch * heads * steps**2,
        )
        parts.append(Part("Encoder", (size, heads, hidden, dropout, gelu, first, causal)))
    parts += [Part("LayerNorm", (size,))] if first else []
    parts, target, loss = finish(net, Features(parts, (steps, size)))
    return parts, [given, target], loss, net.batch * steps


def begin_sequence(net: Network, steps: int, size: int) -> tuple[list[Part], Input]:
    """Return embedded tokens or mapped vectors with positions, and the input."""
    net.count(elements=2.0 * net.batch * steps * size)
    if net.happens(0.6):
        tokens = net.integer(20, 30_000)
        net.weights += tokens * size
        net.count()
        net.note(f"{tokens} tokens")
        return [Part("Embedding", (tokens, size)), Part("Positions", (steps, size))], Input(
            (steps,), tokens
        )
    n = net.integer(4, 256)
    net.note(f"vectors of {n}")
    return [linear(net, n, size, steps), Part("Positions", (steps, size))], Input((steps, n))


def draw_recurrent(net: Network) -> Drawn:
    """Draw a stack of recurrent layers."""
    kind, both = net.choose("LSTM", "GRU", "RNN", weights=(0.45, 0.4, 0.15)), net.happens(0.25)
    steps, size, depth = net.integer(2, 200), net.integer(8, 512), net.integer(1, 3)
    dropout = 0.2 if depth > 1 and net.happens(0.25) else 0.0
    net.note(
        kind, f"{counted(depth, 'layer')} of {size}", f"{steps} steps",
        "both directions" if both else "", f"dropout {dropout}" if dropout else "",
    )  # fmt: skip
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    if net.happens(0.4):
        n, tokens = net.integer(8, 256), net.integer(20, 20_000)
        net.weights += n * tokens
        net.note(f"{tokens} tokens of {n}")
        parts, given = [Part("Embedding", (tokens, n))], Input((steps,), tokens)
    else:
        n = net.integer(1, 256)
        net.note(f"vectors of {n}")
        parts, given = [], Input((steps, n))
    inputs, sides = n, 1 + both
    for _ in range(depth):
        net.weights += sides * gates * size * (inputs + size)
        net.count(
            2.0 * net.batch * steps * sides * gates * size * (inputs + size),
            3.0 * net.batch * steps * sides * (gates + 1) * size,
            steps * sides,
        )
        inputs = sides * size
    parts.append(Part("Recurrent", (kind, n, size, depth, both, dropout)))
    parts, target, loss = finish(net, Features(parts, (steps, inputs)))
    return parts, [given, target], loss, 0


def draw_tables(net: Network) -> Drawn:
    """Draw lookups in tables beside dense features, and dense layers over both."""
    fields, rows, dim = net.integer(1, 26), net.integer(10, 100_000), net.integer(4, 64)
    dense, adds = net.integer(1, 64), net.happens(0.3)
    net.note(f"{counted(fields, 'table')} of {rows} × {dim}", "rows added" if adds else "")
    net.weights += fields * rows * dim
    net.count(elements=2.0 * net.batch * fields * dim)
    parts = [Part("Tables", (fields, rows, dim, adds))]
    n = dense + (dim if adds else fields * dim)
    body = dense_layers(net, n, net.integer(1, 4), net.integer(8, 1024), net.happens(0.5))
    parts, target, loss = finish(net, Features(parts + body.parts, body.sizes))
    return parts, [Input((fields,), rows), Input((dense,)), target], loss, 0


def draw_cnn(net: Network) -> Drawn:
    """Draw convolutions that make an image smaller, and a classifier."""
    channels, side, style, parts = begin_image(net)
    given = Input((channels, side, side))
    size, width, depth = side, net.integer(4, 128), net.integer(1, 8)
    net.note(f"{counted(depth, 'layer')} from {width} channels")
    for number in range(depth):
        halves = size >= 4 and number % style.every == style.every - 1
        stride = 2 if halves and style.strides else 1
        parts += conv_layer(net, style, channels, width, size, stride)
        channels, size = width, -(-size // stride)
        if halves and not style.strides:
            parts.append(Part(style.pool, (2,)))
            size //= 2
        width = min(512, 2 * width) if halves else width
    if net.happens(0.3) and channels * size**2 <= 8192:
        parts.append(Part("Flatten"))
        body = dense_layers(net, channels * size**2, 1, net.integer(16, 256), False)
        features = Features(parts + body.parts, body.sizes)
    else:
        features = Features([*parts, Part("MeanOver", (2, 3))], (channels,))
    made, target, loss = finish(net, features)
    return made, [given, target], loss, 0


def draw_conv_autoencoder(net: Network) -> Drawn:
    """Draw convolutions with strides, and transposed ones or enlargements that undo them."""
    channels, side, style, parts = begin_image(net)
    given = Input((channels, side, side))
    first, width = channels, net.integer(4, 64)
    halvings = net.choose(*(n for n in (1, 2, 3) if side % 2**n == 0))
    side_of, doubles = side, net.choose("transposed", "nearest")
    net.note(f"{counted(halvings, 'halving')} from {width} channels", doubles)
    widths = [width << number for number in range(halvings)]
    for m in widths:
        parts += conv_layer(net, style, channels, m, side_of, 2)
        channels, side_of = m, side_of // 2
    for m in [*widths[-2::-1], first]:
        side_of *= 2
        places = net.batch * side_of**2
        if doubles == "transposed":
            net.weights += channels * m * 16
            net.count(2.0 * places / 4 * channels * m * 16, 3.0 * places * m)
            parts.append(Part("ConvTranspose2d", (channels, m, 4, 2, 1)))
        else:
            net.count(2.0 * places * channels * m * 9, places * (channels + 3.0 * m))
            parts += [Part("DoubleSize"), Part("Conv2d", (channels, m, 3, 1, 1))]
        parts += [Part(style.activation)]
        channels = m
    return parts[:-1], [given, Input((first, side, side))], NUMBERS, 0


@dataclass(frozen=True)
class ConvStyle:
    """The choices that the layers of one network share."""

    kernel: int
    kind: str
    norm: str
    activation: str
    residual: bool
    strides: bool
    pool: str
    every: int


def begin_image(net: Network) -> tuple[int, int, ConvStyle, list[Part]]:
    """Return channels and side of the input, a style, and no parts yet."""
    channels, side = net.choose(1, 3), net.choose(8, 16, 24, 28, 32, 40, 48, 64, 96)
    style = ConvStyle(
        net.choose(1, 3, 5, 7, weights=(0.1, 0.6, 0.2, 0.1)),
        net.choose("", "depthwise", "grouped", weights=(0.65, 0.25, 0.1)),
        net.choose("", "batch norm", "group norm", weights=(0.3, 0.5, 0.2)),
        net.choose("ReLU", "GELU", "SiLU", "LeakyReLU"),
        net.happens(0.3),
        net.happens(0.5),
        net.choose("MaxPool2d", "AvgPool2d"),
        net.integer(1, 3),
    )
    net.note(f"{channels}×{side}×{side}", f"kernel {style.kernel}", style.kind, style.norm)
    net.note(style.activation, "residual" if style.residual else "")
    net.note("strides" if style.strides else style.pool)
    return channels, side, style, []


def conv_layer(
    net: Network, style: ConvStyle, n: int, m: int, side: int, stride: int
) -> list[Part]:
    """Return a convolution of the style's kind, norm, activation and shortcut."""
    k, pad, bias = style.kernel, style.kernel // 2, style.norm != "batch norm"
    after = -(-side // stride)
    places = net.batch * after**2

    def conv(n: int, m: int, k: int, stride: int, pad: int, groups: int) -> Part:
        net.weights += n // groups * m * k**2
        net.count(2.0 * places * (n // groups) * m * k**2, 2.0 * places * m)
        return Part("Conv2d", (n, m, k, stride, pad, 1, groups, bias))

    if style.kind == "depthwise" and n > 3:
        parts = [conv(n, n, k, stride, pad, n), conv(n, m, 1, 1, 0, 1)]
    else:
        groups = 4 if style.kind == "grouped" and n % 4 == m % 4 == 0 else 1
        parts = [conv(n, m, k, stride, pad, groups)]
    net.count(elements=3.0 * places * m)
    if style.norm == "batch norm" and places > 1:
        parts.append(Part("BatchNorm2d", (m,)))
    if style.norm == "group norm":
        parts.append(Part("GroupNorm", (next(g for g in (8, 4, 2, 1) if m % g == 0), m)))
    parts.append(Part(style.activation))
    return (
        [Part("Residual", (), tuple(parts))] if style.residual and n == m and stride == 1 else parts
    )


FAMILIES: dict[str, Callable[[Network], Drawn]] = {
    "MLP": draw_mlp,
    "autoencoder": draw_autoencoder,
    "transformer": draw_transformer,
    "recurrent": draw_recurrent,
    "tables": draw_tables,
    "CNN": draw_cnn,
    "convolutional autoencoder": draw_conv_autoencoder,
}
"""For each family the function that draws its network."""
