"""A model that is written once for each library, and its training step there.

`Model` holds numpy arrays and one loss function for each library, over the same named parameters.
`contest` makes the steps: SGD with momentum, a batch from numpy in, the loss as a Python float out.
Before anything is timed, the first losses must agree.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from peers import Steps, interleaved, optional, report

Arrays = Mapping[str, np.ndarray]
Loss = Callable[..., Any]
"""(parameters by name, *feeds) -> the loss, in a library's own tensors."""
AGREEING = 3  # steps
WARMING = 4  # steps before a profile


@dataclass(frozen=True)
class Model:
    """A model and its data.

    Attributes:
        goal: our step time over that of the best peer that is to be reached.
        parameters, feeds: arrays.
        ours, torch, jax, tensorflow: its loss; TensorFlow has channels last.
        layout: a memory format of torch's to try besides the default.
        products: numpy doing the step's matrix products alone, a floor.
        compiled: whether torch.compile takes part.
        any_size: whether steps may be called with feeds of other sizes.
    """

    title: str
    goal: float
    parameters: Arrays
    feeds: tuple[np.ndarray, ...]
    ours: Loss
    torch: Loss
    jax: Loss
    rate: float = 0.05
    momentum: float = 0.9
    layout: str | None = None
    products: Callable[[], object] | None = None
    compiled: bool = True
    any_size: bool = False
    tensorflow: Loss | None = None


class Ours:
    """A training step of graphflow; on this machine's processors, if no cluster is given."""

    def __init__(self, model: Model, cluster: Any = None) -> None:
        import graphflow as gf

        variables = {k: gf.variable(v, name=k) for k, v in model.parameters.items()}
        inputs = [
            gf.placeholder(a.dtype, (None,) * a.ndim if model.any_size else a.shape)
            for a in model.feeds
        ]
        loss = model.ours(variables, *inputs)
        update = gf.optim.SGD(model.rate, momentum=model.momentum).minimize(loss)
        self._session = gf.Session(cluster or gf.Cluster.here(devices=["cpu:0"]))
        self._fetches = [loss, update]
        self._inputs = inputs
        self._feeds = model.feeds

    def __call__(self, *feeds: np.ndarray) -> float:
        fed = dict(zip(self._inputs, feeds or self._feeds, strict=True))
        return float(self._session.run(self._fetches, fed)[0])

    def memory(self) -> dict[str, int]:
        """Bytes at most in use: as planned, and as a step recorded them."""
        with self._session.trace(memory=True):
            self()
        (each,) = self._session.memory().values()
        assert each.recorded is not None
        return {"planned": each.predicted, "recorded": each.recorded}

    def profile(self, most: int = 10, steps: int = 5) -> dict[str, float]:
        """Milliseconds a step by kind of node, the longest first, and what is around it."""
        for _ in range(WARMING):
            self()
        with self._session.trace() as trace:
            for _ in range(steps):
                self()
        spent: Counter[str] = Counter()
        for step in trace.steps:
            for event in step.events:
                kind = re.sub(r"_\d+$", "", event.name.rsplit("/", 1)[-1])
                spent[kind] += event.end - event.start
            spent["around the program"] += step.end - step.start
            spent["around the program"] -= sum(e.end - e.start for e in step.events)
        return {kind: ns / len(trace.steps) / 1e6 for kind, ns in spent.most_common(most)}


def torch_step(
    model: Model, compiled: bool = False, layout: str | None = None
) -> Callable[..., float]:
    import torch

    def tensor(array: np.ndarray) -> Any:
        made = torch.from_numpy(array)
        return made.to(memory_format=getattr(torch, layout)) if layout and made.ndim == 4 else made

    parameters = {k: tensor(v.copy()).requires_grad_() for k, v in model.parameters.items()}
    fused = torch.optim.SGD(parameters.values(), model.rate, model.momentum, fused=True)
    loss_of = torch.compile(model.torch) if compiled else model.torch

    def step(*feeds: np.ndarray) -> float:
        fused.zero_grad()
        loss = loss_of(parameters, *(tensor(a) for a in feeds or model.feeds))
        loss.backward()
        fused.step()
        return loss.item()  # type: ignore[no-any-return]

    return step


def jax_step(model: Model) -> Callable[..., float]:
    import jax
    import jax.numpy as jnp

    parameters = {k: jnp.asarray(v) for k, v in model.parameters.items()}
    state = [parameters, jax.tree.map(jnp.zeros_like, parameters)]

    def update(parameters: Any, velocity: Any, *feeds: Any) -> Any:
        loss, grads = jax.value_and_grad(model.jax)(parameters, *feeds)
        velocity = jax.tree.map(lambda v, g: model.momentum * v + g, velocity, grads)
        parameters = jax.tree.map(lambda w, v: w - model.rate * v, parameters, velocity)
        return parameters, velocity, loss

    run = jax.jit(update, donate_argnums=(0, 1))

    def step(*feeds: np.ndarray) -> float:
        state[0], state[1], loss = run(*state, *(feeds or model.feeds))
        return float(loss)

    return step


def tensorflow_step(model: Model) -> Callable[[], float]:
    """Return a step as one `tf.function`.

    Convolutions of TensorFlow on a CPU need channels last, so arrays are put into this order once.
    """
    import tensorflow as tf

    assert model.tensorflow
    loss_of = model.tensorflow
    parameters = {
        k: tf.Variable(v.transpose(2, 3, 1, 0) if v.ndim == 4 else v)
        for k, v in model.parameters.items()
    }
    velocity = {k: tf.Variable(tf.zeros_like(v)) for k, v in parameters.items()}
    feeds = [
        np.ascontiguousarray(a.transpose(0, 2, 3, 1)) if a.ndim == 4 else a for a in model.feeds
    ]

    @tf.function
    def update(*feeds: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(parameters, *feeds)
        for k, grad in tape.gradient(loss, parameters).items():
            moved = velocity[k].assign(model.momentum * velocity[k] + tf.convert_to_tensor(grad))
            parameters[k].assign_sub(model.rate * moved)
        return loss

    return lambda: float(update(*map(tf.convert_to_tensor, feeds)))


def contest(model: Model, rounds: int, each: int = 5) -> dict[str, Any]:
    """Time a model's step in all libraries; our figures, ratios, and where our time went."""
    ours = Ours(model)
    steps: Steps = {"graphflow": ours, **optional("torch", lambda: torch_step(model))}
    if model.layout:
        named = f"torch {model.layout.replace('_', ' ')}"
        steps |= optional(named, lambda: torch_step(model, layout=model.layout))
    if model.compiled:
        steps |= optional("torch.compile", lambda: torch_step(model, True, model.layout))
    steps |= optional("jax", lambda: jax_step(model))
    firsts = {name: first(step) for name, step in steps.items()}
    agree(model.title, {name: losses for name, (_, losses) in firsts.items()})
    if model.products:
        steps["matmuls"] = model.products
    result = report(model.title, interleaved(steps, rounds, each), goal=model.goal)
    result["first_call_seconds"] = {name: seconds for name, (seconds, _) in firsts.items()}
    result["profile_ms"] = ours.profile()
    for kind, ms in result["profile_ms"].items():
        print(f"    {ms:8.3f} ms  {kind}")
    return result


def first(step: Callable[[], object]) -> tuple[float, list[float]]:
    """Seconds of the first call, and the first losses."""
    start = time.perf_counter()
    losses = [step()]
    seconds = time.perf_counter() - start
    losses += [step() for _ in range(AGREEING - 1)]
    return seconds, losses  # type: ignore[return-value]


def agree(title: str, losses: Mapping[str, list[float]]) -> None:
    """Stop where contenders do not compute the same."""
    for step in zip(*losses.values(), strict=True):
        if max(step) - min(step) > 1e-2 * max(1e-3, abs(median(step))):
            raise SystemExit(f"{title}: the contenders' losses differ: {dict(losses)}")
