"""A network while it is drawn: choices, variables, feeds, pins, and an estimate of its work.

    random numbers ─Network→ layers (this folder's other files) ─models.py→ a step and its feeds

Layers take a `Signal` and return one. They draw what they need from `Network.choose`, `integer` and
`happens`, and announce their work by `count` before they build nodes, so that a draw that is too
large ends early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401
import numpy as np

import graphflow as gf

Choice = TypeVar("Choice")
Pin = Callable[[int], str]
"""From the number of a layer to a device name, which may be partial."""

MAX_SECONDS = 0.15
"""Estimated seconds of a step on one core beyond which sizes are drawn again.

The estimate is rough: few steps take three times as long.
"""
MAX_BYTES = 6e8
"""Estimated bytes of weights, slots, gradients and activations, likewise."""
FLOPS = 3e10
"""Rough floating-point operations a second of a core in float32; half as many in other dtypes."""
BANDWIDTH = 5e9
"""Rough bytes a second of a core for passes over activations."""
CONVERTED_BYTES = 24
"""Bytes moved for each element of 16 bits, which kernels convert to float32 and back."""
ITERATION_SECONDS = 2e-5
"""Rough overhead of one iteration of a loop."""
SLOTS = 2
"""Slots of the hungriest optimiser."""


class TooLarge(Exception):
    """The sizes drawn make a step that takes too long or needs too much memory."""


@dataclass(frozen=True)
class Signal:
    """A tensor between layers, and the sizes of one sample.

    A sample is a vector (size,), a sequence (steps, size) or an image (channels, height, width).
    The first axis of the tensor is the batch.
    """

    tensor: gf.Tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Feed:
    """A placeholder, and how to make its array: integers below `below`, else normal numbers."""

    placeholder: gf.Tensor
    dtype: str
    shape: tuple[int, ...]
    below: int | None

    def array(self, random: np.random.Generator) -> np.ndarray[Any, Any]:
        """Return an array of random values."""
        if self.below is not None:
            return random.integers(0, self.below, self.shape).astype(self.dtype)
        return random.normal(size=self.shape).astype(self.dtype)


@dataclass
class Network:
    """The choices of one model, and what they have built so far.

    Attributes:
        batch: samples in a step.
        dtype: of weights and activations.
        open_batch: placeholders leave the size of the batch to the feed.
        trains: the step trains; then work counts three times.
        converts: the step computes with 16-bit floats, or products of these by autocast.
        pin: names the device of each layer; None to leave placement open.
        feeds: what a step reads.
        notes: what a description tells beyond sizes.
        layers: layers built so far.
    """

    random: np.random.Generator
    batch: int
    dtype: str
    open_batch: bool
    trains: bool
    converts: bool
    pin: Pin | None = None
    feeds: list[Feed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layers: int = 0
    flops: float = 0.0
    elements: float = 0.0
    weights: float = 0.0
    iterations: float = 0.0

    # Choices --------------------------------------------------------------------------------

    def choose(self, *options: Choice, weights: Sequence[float] | None = None) -> Choice:
        """Return one of the options; each is as likely as the others unless weights are given."""
        shares = None if weights is None else np.asarray(weights) / np.sum(weights)
        return options[int(self.random.choice(len(options), p=shares))]

    def integer(self, low: int, high: int) -> int:
        """Return an integer from low to high, log-uniform."""
        drawn = np.exp(self.random.uniform(np.log(low), np.log(high + 1)))
        return int(min(high, max(low, np.floor(drawn))))

    def happens(self, probability: float) -> bool:
        """Return True with a probability."""
        return bool(self.random.random() < probability)

    def note(self, *texts: str) -> None:
        """Add to the description, each text once; empty ones say nothing."""
        self.notes += [t for t in dict.fromkeys(texts) if t and t not in self.notes]

    # Work -----------------------------------------------------------------------------------

    def count(self, flops: float = 0.0, elements: float = 0.0, iterations: float = 0.0) -> None:
        """Add forward work: floating-point operations, elements of activations, loop iterations.

        Raises:
            TooLarge: the step would take too long, or too much memory.
        """
        self.flops += flops
        self.elements += elements
        self.iterations += iterations
        if self.seconds > MAX_SECONDS or self.bytes > MAX_BYTES:
            raise TooLarge

    @property
    def seconds(self) -> float:
        """Estimated seconds of a step on one core."""
        passes = 3 if self.trains else 1
        width = CONVERTED_BYTES if self.converts else np.dtype(self.dtype).itemsize
        rate = FLOPS if self.dtype == "float32" and not self.converts else FLOPS / 2
        moved = passes * (2 * self.elements + (1 + SLOTS) * self.weights) * width
        return (
            passes * self.flops / rate
            + moved / BANDWIDTH
            + passes * self.iterations * ITERATION_SECONDS
        )

    @property
    def bytes(self) -> float:
        """Estimated bytes in use during a step."""
        copies = 2 + SLOTS if self.trains else 1
        kept = 2 * self.elements if self.trains else self.elements / 4
        return (copies * self.weights + kept) * np.dtype(self.dtype).itemsize

    # Building -------------------------------------------------------------------------------

    def layer(self) -> AbstractContextManager[None]:
        """Return the block in which the next layer is built, pinned where layers are pinned."""
        number, self.layers = self.layers, self.layers + 1
        return nullcontext() if self.pin is None else gf.device(self.pin(number))

    def weight(self, *shape: int, fan: int | None = None, dtype: str | None = None) -> gf.Tensor:
        """Return a variable of normal values with variance 1/fan; default: the first size."""
        self.weights += float(np.prod(shape))
        self.count()
        std = float((1.0 / max(1, fan or shape[0])) ** 0.5)
        return gf.variable(gf.init.normal(shape, std=std, dtype=dtype or self.dtype))

    def bias(self, size: int) -> gf.Tensor:
        """Return a variable of zeros."""
        return gf.variable(gf.init.zeros((size,), dtype=self.dtype))

    def scale(self, size: int) -> gf.Tensor:
        """Return a variable of ones."""
        return gf.variable(gf.init.ones((size,), dtype=self.dtype))

    def feed(self, *sizes: int, dtype: str | None = None, below: int | None = None) -> gf.Tensor:
        """Return a placeholder of (batch, *sizes) that steps feed.

        Args:
            dtype: default: that of the network, or int64 for integers.
            below: feed integers from 0 up to but without this number.
        """
        dtype = dtype or ("int64" if below is not None else self.dtype)
        rows = None if self.open_batch else self.batch
        made = gf.placeholder(dtype, (rows, *sizes))
        self.feeds.append(Feed(made, dtype, (self.batch, *sizes), below))
        return made

    def feed_once(self, *shape: int, dtype: str, below: int | None = None) -> gf.Tensor:
        """Return a placeholder of a shape without a batch."""
        made = gf.placeholder(dtype, shape)
        self.feeds.append(Feed(made, dtype, shape, below))
        return made

    def linear(self, x: gf.Tensor, inputs: int, outputs: int, rows: int = 1) -> gf.Tensor:
        """Return x @ W + b.

        Args:
            rows: rows of each sample that the product reads.
        """
        self.count(2.0 * self.batch * rows * inputs * outputs, self.batch * rows * outputs)
        y: gf.Tensor = x @ self.weight(inputs, outputs) + self.bias(outputs)
        return y
