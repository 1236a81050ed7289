"""Models drawn from a seed: each (seed, index) is one training step, or one step of inference.

    (seed, index) ─draw→ RandomModel ─build→ Step: fetches and feeds

Family, dtype and optimiser are drawn first. Sizes are drawn again until the step fits, so that a
family is not rarer because its models are larger.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

import graphflow as gf
from benchmarks.random_models.control_flow import controlled_stack
from benchmarks.random_models.convolutional import conv_autoencoder, conv_encoder
from benchmarks.random_models.dense import (
    dense_stack,
    mixture_of_experts,
    tied_autoencoder,
    tower_stack,
)
from benchmarks.random_models.ends import change_rank, finish, read_input
from benchmarks.random_models.network import Network, Pin, Signal, TooLarge
from benchmarks.random_models.sequences import attention_stack, recurrent_stack, scan_stack
from graphflow.strategy import Strategy

Stage = Callable[[Network, Signal, int, int], Signal]

STAGES: dict[str, tuple[int, Stage]] = {
    "dense": (1, dense_stack),
    "towers": (1, tower_stack),
    "experts": (1, mixture_of_experts),
    "tied": (1, tied_autoencoder),
    "control flow": (1, controlled_stack),
    "attention": (2, attention_stack),
    "recurrent": (2, recurrent_stack),
    "recurrent by scan": (2, scan_stack),
    "convolutional": (3, conv_encoder),
    "encoder-decoder": (3, conv_autoencoder),
}
"""For each kind of layers: the axes of the sample that they take (1 for a vector, 2 for a sequence,
3 for an image), and the function that builds them."""

FAMILIES: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in STAGES},
    "tables": ("tables", "dense"),
    "composition": (),
}
"""For each family its stages; those of a composition are drawn."""

OPTIMIZERS: dict[str, Callable[[bool], gf.optim.Optimizer]] = {
    "SGD": lambda sparse: gf.optim.SGD(1e-4, sparse=sparse),
    "SGD with momentum": lambda sparse: gf.optim.SGD(1e-4, momentum=0.9, sparse=sparse),
    "SGD with Nesterov momentum": lambda sparse: gf.optim.SGD(
        1e-4, momentum=0.9, nesterov=True, weight_decay=1e-4, sparse=sparse
    ),
    "Adam": lambda sparse: gf.optim.Adam(1e-5, sparse=sparse),
    "AdamW": lambda sparse: gf.optim.AdamW(1e-5, sparse=sparse),
    "RMSProp": lambda sparse: gf.optim.RMSProp(1e-5, sparse=sparse),
    "RMSProp with momentum": lambda sparse: gf.optim.RMSProp(1e-5, momentum=0.9, sparse=sparse),
    "Adagrad": lambda sparse: gf.optim.Adagrad(1e-4, sparse=sparse),
}
"""Optimisers by name, given whether updates of tables are to be sparse."""

INFERENCE = "inference"
HALVES = ("float16", "bfloat16")
MAX_DEPTH, WIDTHS, MAX_BATCH = 60, (8, 2048), 1024
STATIC = frozenset({"recurrent by scan"})
"""Stages that need the size of the batch while they are built."""


@dataclass(frozen=True)
class Step:
    """A step that a session can run.

    Attributes:
        fetches: for `Session.run`: loss, training, updates of running moments; or the output.
        loss: a part of the fetches; None for inference.
        feeds: arrays by placeholder.
        layers: the number of layers that could be pinned.
    """

    fetches: list[gf.Tensor]
    loss: gf.Tensor | None
    feeds: dict[gf.Tensor, np.ndarray[Any, Any]]
    layers: int


@dataclass(frozen=True)
class Choices:
    """The part of a model that is drawn before its sizes.

    Attributes:
        stages: names of `STAGES`, after "tables" where features are looked up.
        optimizer: a name of `OPTIMIZERS`, or `INFERENCE`.
        autocast: a 16-bit dtype in which products run while variables are float32, or "".
    """

    family: str
    stages: tuple[str, ...]
    dtype: str
    autocast: str
    optimizer: str
    is_sparse: bool
    clips: bool
    scales_loss: bool

    @classmethod
    def draw(cls, random: np.random.Generator) -> Choices:
        """Draw a family, a dtype and an optimiser."""
        family = str(random.choice(list(FAMILIES)))
        stages = FAMILIES[family]
        if family == "composition":
            amount = int(random.integers(2, 4))
            stages = tuple(str(s) for s in random.choice(list(STAGES), amount, replace=False))
            stages = ("tables", *stages) if random.random() < 0.3 else stages
        dtypes = ("float32", "float64", *HALVES)
        dtype = str(random.choice(dtypes, p=(0.7, 0.1, 0.1, 0.1)))
        autocast = dtype if dtype in HALVES and random.random() < 0.5 else ""
        trains = random.random() > 0.12
        optimizer = str(random.choice(list(OPTIMIZERS))) if trains else INFERENCE
        sparse, clips, scales = (float(x) for x in random.random(3))
        return cls(
            family,
            stages,
            "float32" if autocast else dtype,
            autocast,
            optimizer,
            "tables" in stages and trains and sparse < 0.3,
            trains and clips < 0.1,
            trains and dtype == "float16" and scales < 0.5,
        )

    @property
    def trains(self) -> bool:
        """True for a training step."""
        return self.optimizer != INFERENCE

    def make_optimizer(self) -> gf.optim.Optimizer:
        """Return the optimiser of a training step."""
        return OPTIMIZERS[self.optimizer](self.is_sparse)

    def minimize(self, loss: gf.Tensor, strategy: Strategy | None = None) -> gf.Tensor:
        """Return the node that trains, with clipping and loss scaling as drawn.

        Args:
            strategy: how the step is divided over devices.
        """
        clip = (lambda g: gf.optim.clip_by_global_norm(g, 1.0)[0]) if self.clips else None
        scaling = gf.optim.LossScaling() if self.scales_loss else None
        return self.make_optimizer().minimize(
            loss, transform=clip, scaling=scaling, strategy=strategy
        )


@dataclass(frozen=True)
class RandomModel:
    """One drawn model.

    Attributes:
        attempt: how many draws of its sizes were too large.
        depth, width, batch: as drawn; stages divide the depth.
        notes: what else distinguishes it.
    """

    seed: int
    index: int
    attempt: int
    choices: Choices
    depth: int
    width: int
    batch: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Return one line: family, depth, width, batch, dtype, optimiser, and notes."""
        c = self.choices
        family = c.family if c.family != "composition" else " + ".join(c.stages)
        dtype = f"{c.autocast} by autocast" if c.autocast else c.dtype
        optimizer = c.optimizer + (", sparse" if c.is_sparse else "")
        parts = [
            f"depth {self.depth}", f"width {self.width}", f"batch {self.batch}", dtype, optimizer,
            "clipped" if c.clips else "", "loss scaling" if c.scales_loss else "", *self.notes,
        ]  # fmt: skip
        return f"{family}: " + ", ".join(part for part in parts if part)

    def build(self, pin: Pin | None = None) -> Step:
        """Return the step and its feeds, the same in each call.

        Args:
            pin: names a device for each layer, from 0. Gradients and updates follow their layer.
        """
        gf.random.seed(1_000 * self.seed + self.index)
        net, _ = start_network(self.choices, _generator(self.seed, self.index, self.attempt))
        net.pin = pin
        output, loss, updates = build_loss(net, self.choices, self.depth, self.width)
        fetches = [output]
        if loss is not None:
            fetches = [loss, self.choices.minimize(loss), *updates]
        random = _generator(self.seed, self.index, self.attempt, 1)
        feeds = {f.placeholder: f.array(random) for f in net.feeds}
        return Step(fetches, loss, feeds, net.layers)


def draw(seed: int, index: int) -> RandomModel:
    """Return the model of a seed and an index: the same one on every machine."""
    choices = Choices.draw(_generator(seed, index))
    for attempt in count():
        net, (depth, width) = start_network(choices, _generator(seed, index, attempt))
        try:
            build_loss(net, choices, depth, width)
        except TooLarge:
            continue
        return RandomModel(seed, index, attempt, choices, depth, width, net.batch, tuple(net.notes))
    raise AssertionError("attempts do not end")


def _generator(*numbers: int) -> np.random.Generator:
    return np.random.default_rng(numbers)


def start_network(choices: Choices, random: np.random.Generator) -> tuple[Network, tuple[int, int]]:
    """Return a network without layers, and the depth and width that were drawn for it."""
    converts = bool(choices.autocast) or choices.dtype in HALVES
    net = Network(random, 1, choices.dtype, False, choices.trains, converts)
    net.batch = net.integer(1, MAX_BATCH)
    net.open_batch = net.happens(0.3) and not STATIC & set(choices.stages)
    return net, (net.integer(1, MAX_DEPTH), net.integer(*WIDTHS))


def build_loss(
    net: Network, choices: Choices, depth: int, width: int
) -> tuple[gf.Tensor, gf.Tensor | None, list[gf.Tensor]]:
    """Return output, loss (None without training), and updates of running statistics.

    Raises:
        TooLarge: the step would take too long, or too much memory.
    """
    stages = [STAGES[name] for name in choices.stages if name != "tables"]
    each = max(1, depth // len(stages))
    with (
        gf.nn.training() if choices.trains else nullcontext([]) as updates,
        gf.autocast(choices.autocast or None),
    ):
        signal, table = read_input(net, stages[0][0], "tables" in choices.stages, width)
        for axes, build in stages:
            signal = build(net, change_rank(net, signal, axes, width), each, width)
        output, loss = finish(net, signal, table)
    return output, loss, list(updates)
