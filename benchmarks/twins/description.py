"""A training step as data: parts, inputs, loss and optimiser, without any library's objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

OPTIMIZERS: Mapping[str, tuple[str, dict[str, float]]] = {
    "SGD": ("SGD", {"lr": 1e-2}),
    "SGD with momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "Adam": ("Adam", {"lr": 1e-4}),
    "AdamW": ("AdamW", {"lr": 1e-4, "weight_decay": 0.01}),
    "RMSProp": ("RMSProp", {"lr": 1e-4}),
    "Adagrad": ("Adagrad", {"lr": 1e-3}),
}
"""Optimisers by name: the rule, and its arguments, which both libraries have under these names."""
UNIT_DESCENT = "SGD of rate 1"
"""Not drawn: weights before a step less those after it are the gradient."""
RULES = {**OPTIMIZERS, UNIT_DESCENT: ("SGD", {"lr": 1.0})}
SPARSE_OPTIMIZERS = ("SGD", "Adam", "Adagrad")
"""Optimisers that torch has for sparse gradients, too."""
CLASSES, STEP_CLASSES, NUMBERS, YES_OR_NO = "classes", "classes each step", "numbers", "yes or no"
DROPOUT_PLACES = {"Dropout": 0, "Encoder": 3, "Recurrent": 5}
"""Where the arguments of a part have its rate of dropout."""


@dataclass(frozen=True)
class Part:
    """A layer, or a structure that holds parts.

    Attributes:
        kind: a class that `gf.nn` and `torch.nn` have under this name, or one of the builders'.
        arguments: by position; both libraries take these.
        inner: the parts of a structure, one after the other.
    """

    kind: str
    arguments: tuple[Any, ...] = ()
    inner: tuple[Part, ...] = ()

    def without_dropout(self) -> Part:
        """Return the part with all its rates of dropout 0."""
        inner = tuple(part.without_dropout() for part in self.inner)
        arguments = list(self.arguments)
        if self.kind in DROPOUT_PLACES:
            arguments[DROPOUT_PLACES[self.kind]] = 0.0
        return replace(self, arguments=tuple(arguments), inner=inner)


@dataclass(frozen=True)
class Input:
    """An array that each step feeds: (batch, *sizes), integers below `below` or normal numbers."""

    sizes: tuple[int, ...]
    below: int | None = None


@dataclass(frozen=True)
class Twin:
    """One drawn training step.

    Attributes:
        family: the kind of network.
        notes: what distinguishes it, for people.
        body: the network.
        inputs: what it reads; the last of them is the target of the loss.
        loss: `CLASSES`, `STEP_CLASSES`, `NUMBERS` or `YES_OR_NO`.
        optimizer: a name of `RULES`.
        is_sparse: gradients and updates of tables hold only the rows that a step looked up.
        product_rows: the least number of rows of the left operands of products, where products are
            most of the work; else 0.
    """

    seed: int
    index: int
    family: str
    notes: tuple[str, ...]
    batch: int
    body: Part
    inputs: tuple[Input, ...]
    loss: str
    optimizer: str
    is_sparse: bool = False
    product_rows: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """Return one line: family, batch, notes and optimiser."""
        sparse = ", sparse" if self.is_sparse else ""
        return (
            f"{self.family}: batch {self.batch}, {', '.join(self.notes)}, {self.optimizer}{sparse}"
        )

    def without_dropout(self) -> Twin:
        """Return the step whose numbers do not depend on random ones."""
        return replace(self, body=self.body.without_dropout())

    def feeds(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Return arrays for the inputs, the same in each call."""
        random = np.random.default_rng((self.seed, self.index, 1))
        made = []
        for each in self.inputs:
            shape = (self.batch, *each.sizes)
            if each.below is None:
                made.append(random.normal(size=shape).astype("float32"))
            else:
                made.append(random.integers(0, each.below, shape))
        return tuple(made)
