"""A check before a long training: can the model learn one batch by heart?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Tensor, user_location
from graphflow.ir.spec import kind
from graphflow.sessions.session import Session
from graphflow.transforms.reverse_mode import gradients

MAX_STEPS = 10_000


@dataclass(frozen=True)
class TrainingCheck:
    """The findings of a check of a training.

    Attributes:
        losses: of each step on the batch.
        without_gradient: names of trained variables whose gradient is 0 everywhere.
        not_trained: names of trainable variables that the loss reads and the step does not change.
        not_finite: names of variables whose gradient is not finite.
    """

    losses: list[float] = field(default_factory=list)
    without_gradient: list[str] = field(default_factory=list)
    not_trained: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)

    @property
    def learns(self) -> bool:
        """True if the loss fell, and every variable has a finite gradient."""
        bad = self.without_gradient or self.not_trained or self.not_finite
        return not bad and math.isfinite(self.losses[-1]) and self.losses[-1] < self.losses[0]

    def __str__(self) -> str:
        first, last = self.losses[0], self.losses[-1]
        lines = [f"loss {first:.4g} → {last:.4g} in {len(self.losses) - 1} steps on one batch"]
        for names, told in (
            (self.without_gradient, "the gradient is 0 everywhere"),
            (self.not_trained, "the loss reads it, and the step does not change it"),
            (self.not_finite, "the gradient is not finite"),
        ):
            lines += [f"{name}: {told}" for name in names]
        if not math.isfinite(last) or last >= first:
            lines.append("the loss did not fall: try a smaller rate, and look at the labels")
        return "\n".join(lines)


@checks_argument_names(ArgumentError)
def check_training(
    loss: Tensor, train: Any, batch: Mapping[Any, Any], steps: int = 50
) -> TrainingCheck:
    """Train on one batch again and again, in a session of its own, and say what does not learn.

    A model that cannot learn a batch by heart has a mistake somewhere.

    Args:
        loss: a float scalar.
        train: the result of `minimize`, or a list of it and further updates.
        batch: feeds.
        steps: an int from 1 to 10,000.

    Returns:
        What was found. `print` shows it; `learns` is True if nothing is wrong.
    """
    at = f"check_training at {user_location()}"
    fetches = list(train) if isinstance(train, list | tuple) else [train]
    if not isinstance(loss, Tensor) or loss.ndim or kind(loss.dtype) != "float":
        raise ArgumentError(f"{at}: loss must be a float scalar of the graph, not {loss!r}")
    if not fetches or not all(isinstance(t, Tensor) for t in fetches):
        raise ArgumentError(f"{at}: train must be the result of minimize, not {train!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
        raise ArgumentError(f"{at}: steps must be an int from 1 to {MAX_STEPS}, not {steps!r}")
    read = [n for n in Graph([loss]).variables if n.attrs["trainable"]]
    read = [node for node in read if kind(node.specs[0].dtype) in ("float", "complex")]
    changed = {
        update.node.inputs[0].node
        for fetch in fetches
        for update in (fetch, *fetch.node.inputs)
        if update.node.op is REGISTRY["assign"]
    }
    trained = [node for node in read if node in changed]
    with Session() as session:
        slopes = gradients(loss, [node.outputs[0] for node in trained]) if trained else []
        found = [np.asarray(g) for g in session.run(slopes, batch)] if slopes else []
        losses = [float(session.run([*fetches, loss], batch)[-1]) for _ in range(steps)]
        losses.append(float(session.run(loss, batch)))
    return TrainingCheck(
        losses,
        [n.name for n, g in zip(trained, found, strict=True) if not g.any()],
        [n.name for n in read if n not in changed],
        [n.name for n, g in zip(trained, found, strict=True) if not np.isfinite(g).all()],
    )
