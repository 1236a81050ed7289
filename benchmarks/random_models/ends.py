"""The two ends of a model: what it reads, what it is trained for; and changes of rank between.

A sequence becomes a vector by its mean or its last step, an image by its mean over places. A vector
becomes an image or a sequence through a linear map and a reshape.
"""

from __future__ import annotations

import math
from typing import Any

import graphflow as gf
from benchmarks.random_models.convolutional import MAX_CHANNELS, convolve
from benchmarks.random_models.network import Network, Signal
from benchmarks.random_models.tables import embed_tokens, lookup_features

MAX_CLASSES = 1000


def read_input(
    net: Network, axes: int, has_tables: bool, width: int
) -> tuple[Signal, gf.Tensor | None]:
    """Return the input of the first stage, and the table of tokens if there is one.

    Args:
        axes: of a sample, as the stage takes it.
        has_tables: the model looks up features in tables.
    """
    if has_tables:
        return lookup_features(net, width), None
    if axes == 2 and net.happens(0.5):
        return embed_tokens(net, width)
    if axes == 2:
        steps, size = net.integer(4, 256), net.integer(8, 512)
        return Signal(net.feed(steps, size), (steps, size)), None
    if axes == 3:
        channels, side = net.choose(1, 3), net.choose(8, 14, 16, 24, 28, 32, 48, 64)
        net.note(f"{channels}×{side}×{side}")
        return Signal(net.feed(channels, side, side), (channels, side, side)), None
    size = net.integer(8, 2048)
    return Signal(net.feed(size), (size,)), None


def change_rank(net: Network, signal: Signal, axes: int, width: int) -> Signal:
    """Return the signal with other axes of a sample: 1 vector, 2 sequence, 3 image."""
    if len(signal.sizes) == axes:
        return signal
    if axes == 1:
        return pool(net, signal)
    if axes == 2 and len(signal.sizes) == 3:
        channels, height, breadth = signal.sizes
        places = height * breadth
        flat = gf.reshape(signal.tensor, (-1, channels, places))
        return Signal(gf.permute_dims(flat, (0, 2, 1)), (places, channels))
    pooled = pool(net, signal)
    if axes == 2:
        sizes: tuple[int, ...] = (net.integer(4, 32), min(width, 64))
    else:
        sizes = (min(width, MAX_CHANNELS, 64), *[net.choose(4, 8, 16)] * 2)
    with net.layer():
        x = net.linear(pooled.tensor, pooled.sizes[0], math.prod(sizes))
        return Signal(gf.reshape(x, (-1, *sizes)), sizes)


def pool(net: Network, signal: Signal) -> Signal:
    """Return one vector for each sample."""
    if len(signal.sizes) == 1:
        return signal
    if len(signal.sizes) == 2:
        h = signal.tensor
        x = h[:, -1] if net.happens(0.3) else gf.mean(h, axis=1)
        return Signal(x, signal.sizes[1:])
    return Signal(gf.mean(signal.tensor, axis=(2, 3)), signal.sizes[:1])


def finish(
    net: Network, signal: Signal, table: gf.Tensor | None
) -> tuple[gf.Tensor, gf.Tensor | None]:
    """Return the output, and the loss if the network trains.

    Args:
        table: of tokens (tokens, size), to which the output may be tied.
    """
    with net.layer():
        if len(signal.sizes) == 2 and net.happens(0.5):
            return classify_steps(net, signal, table)
        if len(signal.sizes) == 3 and net.happens(0.6):
            channels = net.choose(1, 3)
            image = convolve(net, signal, channels, 1)
            net.note("image out")
            return image.tensor, squared_error(net, image.tensor, image.sizes)
        pooled = pool(net, signal)
        x, (size,) = pooled.tensor, pooled.sizes
        task = net.choose("classes", "numbers", "yes or no")
        if task == "classes":
            classes = net.integer(2, MAX_CLASSES)
            net.note(f"{classes} classes")
            return classify(net, net.linear(x, size, classes), (), classes)
        if task == "numbers":
            outputs = net.integer(1, 64)
            out = net.linear(x, size, outputs)
            return out, squared_error(net, out, (outputs,))
        out = widen(net.linear(x, size, 1))
        if not net.trains:
            return out, None
        target = net.feed(1, dtype="int64", below=2).astype("float32")
        loss = gf.nn.binary_cross_entropy_with_logits(out, target, reduction="mean")
        return out, loss


def classify_steps(
    net: Network, signal: Signal, table: gf.Tensor | None
) -> tuple[gf.Tensor, gf.Tensor | None]:
    """Return logits for each step, from a tied table where sizes allow it, and their loss."""
    steps, size = signal.sizes
    is_tied = table is not None and table.shape[1] == size and net.happens(0.6)
    if is_tied and table is not None:
        classes = int(table.shape[0])
        net.note("output tied to tokens")
        net.count(2.0 * net.batch * steps * size * classes, 2.0 * net.batch * steps * classes)
        logits = signal.tensor @ gf.matrix_transpose(table)
    else:
        classes = net.integer(2, MAX_CLASSES)
        net.note(f"{classes} classes each step")
        logits = net.linear(signal.tensor, size, classes, steps)
    return classify(net, logits, (steps,), classes)


def classify(
    net: Network, logits: gf.Tensor, sizes: tuple[int, ...], classes: int
) -> tuple[gf.Tensor, gf.Tensor | None]:
    """Return logits, and their cross-entropy with classes that are fed."""
    logits = widen(logits)
    if not net.trains:
        return gf.argmax(logits, -1), None
    labels = net.feed(*sizes, below=classes)
    return logits, gf.mean(gf.nn.cross_entropy(logits, labels))


def squared_error(net: Network, out: gf.Tensor, sizes: tuple[int, ...]) -> gf.Tensor | None:
    """Return the mean squared distance to numbers that are fed; None without training."""
    if not net.trains:
        return None
    target: Any = net.feed(*sizes)
    return gf.mean(gf.square(widen(out) - widen(target)))


def widen(x: gf.Tensor) -> gf.Tensor:
    """Return 16-bit numbers as float32, in which losses are computed."""
    return x.astype("float32") if x.spec.dtype in ("float16", "bfloat16") else x
