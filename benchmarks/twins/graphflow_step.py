"""A twin as graphflow builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import graphflow as gf
from benchmarks.twins.description import CLASSES, NUMBERS, RULES, STEP_CLASSES, Part, Twin

Arrays = Mapping[str, np.ndarray[Any, Any]]


class Residual(gf.nn.Layer):
    """x plus the output of inner parts."""

    def __init__(self, *parts: Any) -> None:
        self.inner = gf.nn.Sequential(*parts)

    def __call__(self, x: Any) -> Any:
        return x + self.inner(x)


class Recurrent(gf.nn.Layer):
    """The outputs of a recurrent stack, without its last state."""

    def __init__(
        self, kind: str, inputs: int, size: int, layers: int, both: bool, dropout: float
    ) -> None:
        make = getattr(gf.nn, kind)
        self.stack = make(
            inputs, size, layers, batch_first=True, dropout=dropout, bidirectional=both
        )

    def __call__(self, x: Any) -> Any:
        return self.stack(x)[0]


class Encoder(gf.nn.Layer):
    """A layer of a transformer's encoder."""

    def __init__(
        self, size: int, heads: int, hidden: int, dropout: float, gelu: bool, first: bool,
        causal: bool,
    ) -> None:  # fmt: skip
        activation = gf.nn.gelu if gelu else gf.nn.relu
        self.layer = gf.nn.TransformerEncoderLayer(
            size, heads, hidden, dropout, activation=activation, norm_first=first
        )
        self.causal = causal

    def __call__(self, x: Any) -> Any:
        return self.layer(x, causal=self.causal)


class Positions(gf.nn.Layer):
    """x plus a learned vector for each step."""

    def __init__(self, steps: int, size: int) -> None:
        self.weight = gf.variable(gf.init.zeros((steps, size)))

    def __call__(self, x: Any) -> Any:
        return x + self.weight


class Tables(gf.nn.Layer):
    """Rows of one table for each field, concatenated or added, beside dense features."""

    def __init__(self, fields: int, rows: int, size: int, adds: bool) -> None:
        self.tables = [gf.nn.Embedding(rows, size) for _ in range(fields)]
        self.adds = adds

    def __call__(self, ids: Any, dense: Any) -> Any:
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return gf.concat([sum(found[1:], found[0]), dense] if self.adds else [*found, dense], 1)


class TwinNetwork(gf.nn.Layer):
    """A first part that takes all inputs, and the others."""

    def __init__(self, first: Any, *parts: Any) -> None:
        self.first, self.rest = first, gf.nn.Sequential(*parts)

    def __call__(self, *inputs: Any) -> Any:
        return self.rest(self.first(*inputs))


class MeanOver(gf.nn.Layer):
    """The mean over some axes."""

    def __init__(self, *axes: int) -> None:
        self.axes = axes

    def __call__(self, x: Any) -> Any:
        return gf.mean(x, axis=self.axes)


class LastStep(gf.nn.Layer):
    """The last step of a sequence."""

    def __call__(self, x: Any) -> Any:
        return x[:, -1]


class DoubleSize(gf.nn.Layer):
    """An image of twice the height and width, by nearest neighbours."""

    def __call__(self, x: Any) -> Any:
        return gf.nn.interpolate(x, scale=2.0, mode="nearest")


STRUCTURES: dict[str, Any] = {
    each.__name__: each
    for each in (
        Residual, Recurrent, Encoder, Positions, Tables, TwinNetwork, MeanOver, LastStep,
        DoubleSize,
    )
}  # fmt: skip


def make_layer(part: Part) -> Any:
    """Return the layer of a part."""
    inner = [make_layer(each) for each in part.inner]
    make = STRUCTURES.get(part.kind) or getattr(gf.nn, part.kind)
    return make(*inner, *part.arguments)


def loss_of(twin: Twin, output: gf.Tensor, target: gf.Tensor) -> gf.Tensor:
    """Return the loss that is minimised, a scalar."""
    if twin.loss in (CLASSES, STEP_CLASSES):
        return gf.nn.cross_entropy(output, target, reduction="mean")
    if twin.loss == NUMBERS:
        return gf.nn.mse_loss(output, target, reduction="mean")
    number = target.astype("float32")
    return gf.nn.binary_cross_entropy_with_logits(output, number, reduction="mean")


class GraphflowStep:
    """A training step in a session on this machine's processors: feeds in, the loss out.

    Args:
        twin: what to build.
        state: weights by torch's names.
        threads: of the session.
    """

    def __init__(self, twin: Twin, state: Arrays, threads: int) -> None:
        self._feeds = twin.feeds()
        self._model = make_layer(twin.body)
        self._inputs = [gf.placeholder(a.dtype, a.shape) for a in self._feeds]
        with gf.nn.training() as updates:
            self._loss = loss_of(twin, self._model(*self._inputs[:-1]), self._inputs[-1])
        rule, arguments = RULES[twin.optimizer]
        optimizer = getattr(gf.optim, rule)(**arguments, sparse=twin.is_sparse)
        self._fetches = [self._loss, optimizer.minimize(self._loss), *updates]
        self.session = gf.Session(gf.Cluster.here(devices=["cpu:0"], threads=threads))
        self._model.load(self.session, state, names="torch")

    def __call__(self) -> float:
        """Take a step and return its loss."""
        fed = dict(zip(self._inputs, self._feeds, strict=True))
        return float(self.session.run(self._fetches, fed)[0])

    def state(self) -> Arrays:
        """Return all weights and buffers by torch's names."""
        return self._model.state(self.session, names="torch")

    def close(self) -> None:
        """End the session."""
        self.session.close()
