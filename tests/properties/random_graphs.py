"""Random graphs over the whole registry, the same for the same seed, and what they should give.

A graph grows from placeholders (one of symbolic batch size), variables and constants. Each further
node is an op of the registry with one of its samples; what feeds it is any earlier tensor, brought
to the sample's shape, dtype and range by further ops. Variables are then assigned: in place, from
each other (swaps), or with something else altogether.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import graphflow as gf
from graphflow.errors import DTypeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Sample, Tensor
from graphflow.ir.spec import TensorSpec, is_inexact, kind
from graphflow.runtime.memory.backend import CpuBackend

Array = np.ndarray[Any, Any]

_OF_THE_EXECUTOR = {"constant", "placeholder", "variable", "assign", "group", "send", "recv"}
_NOISY = {"print"}
_OF_ONE_PROCESS = {"host_call", "pure_host_call"}  # workers call what they were told to only
OPS = [
    op
    for name, op in sorted(REGISTRY.items())
    if op.samples
    and name not in _OF_THE_EXECUTOR | _NOISY | _OF_ONE_PROCESS
    and any(sample.make is None for sample in op.samples)
]


@dataclass(frozen=True)
class Case:
    """A graph with all that a run of it needs.

    Attributes:
        fetches: groups, assigns, placeholders and intermediates among them.
        variables: all that the graph reads or assigns.
        feeds: the placeholders' arrays at a step; their sizes change between steps.
    """

    seed: int
    fetches: tuple[Tensor, ...]
    variables: tuple[Tensor, ...]
    feeds: Callable[[int], dict[Tensor, Array]]

    @property
    def graph(self) -> Graph:
        return Graph(self.fetches).verify()


def random_case(seed: int, nodes: int = 20, pin: Callable[[], Any] | None = None) -> Case:
    """The case of a seed: about `nodes` ops of the registry, and what brings tensors to them.

    Args:
        pin: gives a context to build each node in, such as a `gf.device`.
    """
    return _Builder(seed, pin).case(nodes)


class _Builder:
    """A graph while it grows: tensors of known shape, and those of a symbolic batch."""

    def __init__(self, seed: int, pin: Callable[[], Any] | None) -> None:
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.pin = pin
        self.variables: list[Tensor] = []
        self.assigns: list[Tensor] = []
        self.x = gf.placeholder("float32", ("batch", 4), name="x")
        self.scalar = gf.placeholder("float32", (), name="scalar")
        self.batched: list[Tensor] = [self.x]
        self.known: list[Tensor] = [self.scalar, gf.constant(self.array((3, 4)))]

    def case(self, nodes: int) -> Case:
        with gf.random.seed(self.seed):
            for i in range(int(self.rng.integers(1, 5))):
                with self.scope():
                    self.variable(i)
            early = int(self.rng.integers(len(self.variables) + 1))
            for variables in (self.variables[:early], self.variables[early:]):
                for _ in range(nodes // 2):
                    with self.scope():
                        self.grow()
                for v in variables:
                    if self.happens(0.85):
                        self.assign(v)
        return Case(self.seed, self.fetches(), tuple(self.variables), self.feeds)

    def scope(self) -> Any:
        return gf.name_scope("n") if self.pin is None else self.pin()

    def array(self, shape: tuple[int, ...]) -> Array:
        return np.asarray(self.rng.uniform(-2, 2, shape)).astype("float32")

    def pick(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def happens(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def feeds(self, step: int) -> dict[Tensor, Array]:
        rng = np.random.default_rng((self.seed, step))
        batch = (5, 3, 5, 1)[step % 4]
        return {
            self.x: rng.uniform(-2, 2, (batch, 4)).astype("float32"),
            self.scalar: np.float32(rng.uniform(-2, 2)).reshape(()),
        }

    # Growing --------------------------------------------------------------------------------------

    def variable(self, number: int) -> None:
        shape = self.pick([(3, 4), (3, 4), (4, 4), (), (2, 3, 4)])
        initial: Any = gf.init.normal(shape, std=1.0) if self.happens(0.5) else self.array(shape)
        self.variables.append(gf.variable(initial, name=f"v{number}_{self.seed}"))
        self.known.append(self.variables[-1])

    def grow(self) -> None:
        self.pick([self.add_registered_op] * 6 + [self.batch] * 2 + [self.alias, self.random])()

    def add_registered_op(self) -> None:
        op = self.pick(OPS)
        sample: Sample = self.pick([s for s in op.samples if s.make is None])
        inputs = [self.fit_to_spec(self.pick(self.known), s, sample) for s in sample.inputs]
        if self.happens(0.1):
            half = self.pick(["float16", "bfloat16"])
            inputs = [gf.astype(t, half) if t.dtype == "float32" else t for t in inputs]
        try:
            outputs = op(*inputs, **sample.attrs)
        except DTypeError:  # it wants 32 bits
            return
        for tensor in outputs if isinstance(outputs, tuple) else (outputs,):
            self.known.append(tensor)

    def fit_to_spec(self, tensor: Tensor, spec: TensorSpec, sample: Sample) -> Tensor:
        """A tensor of a spec, its values in the sample's range, made of any tensor."""
        same = [t for t in self.known if t.spec == spec and kind(spec.dtype) == "bool"]
        if same and self.happens(0.5):
            return self.pick(same)
        if tensor.size == 0:
            tensor = self.scalar
        values = gf.astype(gf.real(tensor), "float32")
        if tensor.shape != spec.shape:
            assert isinstance(spec.size, int) and isinstance(tensor.size, int)
            flat = gf.reshape(values, (tensor.size,))
            values = gf.reshape(
                gf.take(flat, np.arange(spec.size) % tensor.size, axis=0), spec.shape
            )
        bounded = gf.where(gf.isfinite(values), gf.clip(values, -4.0, 4.0), 0.5)
        if kind(spec.dtype) == "bool":
            return gf.greater(bounded, 0.0)
        if kind(spec.dtype) == "int":
            return gf.remainder(gf.astype(gf.abs(bounded), spec.dtype), sample.classes)
        unit = gf.nn.sigmoid(bounded)
        values = unit * (sample.high - sample.low) + sample.low
        if kind(spec.dtype) == "complex":
            values = gf.complex(values, gf.flip(values) if spec.shape else values)
        return gf.astype(values, spec.dtype)

    def batch(self) -> None:
        """One more tensor of batch size, or what one comes down to."""
        t = self.pick(self.batched)
        match int(self.rng.integers(9)):
            case 0:
                self.batched.append(gf.tanh(t) * self.scalar)
            case 1 if t.ndim == 2 and t.shape[1] == 4:
                weight = gf.constant(self.array((4, 4)))
                self.batched.append(gf.matmul(t, self.pick([weight, *self.square()])))
            case 2:
                self.batched.append(t + self.pick([o for o in self.batched if o.shape == t.shape]))
            case 3 if t.ndim == 2:
                self.batched.append(gf.nn.softmax(t, axis=1) if self.happens(0.5) else t[:, 1:3])
            case 4 if t.ndim == 2:
                self.batched.append(gf.reshape(gf.flip(t, 0), (t.shape[0], t.shape[1], 1)))
            case 5:
                self.known.append(gf.sum(t, axis=0))
            case 6:
                self.known.append(gf.mean(t))
            case 7:
                self.known.append(REGISTRY["size_of"](size=self.x.shape[0] * 2, dtype="float32"))
            case _:
                self.batched.append(gf.nn.dropout(t, 0.25))

    def square(self) -> list[Tensor]:
        return [v for v in self.variables if v.shape == (4, 4)]

    def alias(self) -> None:
        t = self.pick(self.known)
        match int(self.rng.integers(3)):
            case 0:
                self.known.append(gf.reshape(t, (1, t.size)))
            case 1:
                self.known.append(gf.expand_dims(t, 0))
            case _:
                self.known.append(gf.squeeze(gf.expand_dims(t, 0), 0))

    def random(self) -> None:
        shape = self.pick([(3, 4), (4,), (self.x.shape[0], 4)])
        draw = self.pick([gf.random.uniform, gf.random.normal])
        (self.known if isinstance(shape[0], int) else self.batched).append(draw(shape))

    # State and fetches ----------------------------------------------------------------------------

    def assign(self, v: Tensor) -> None:
        peers = [w for w in self.variables if w is not v and w.shape == v.shape]
        match int(self.rng.integers(7)):
            case 0:
                new = v * 0.9 + self.fit_to_range(v)  # momentum: two steps, the last one in place
            case 1:
                new = v - self.fit_to_range(v)
            case 2 if peers:
                new = self.pick(peers)  # a swap, perhaps
            case 3 if peers:
                new = (v - self.pick(peers)) * 0.5
            case 4 if peers:
                new = gf.maximum(self.pick(peers), v)  # in place, but for its peer
            case 5:
                new = gf.reshape(gf.reshape(v, (v.size,)), v.shape)
            case _:
                new = self.fit_to_range(v)
        self.assigns.append(gf.assign(v, new))
        self.known += [new] if self.happens(0.3) else []
        self.known += [self.assigns[-1]] if self.happens(0.3) else []

    def fit_to_range(self, v: Tensor) -> Tensor:
        range_of_values = Sample((v.spec,), low=-1.0, high=1.0)
        return self.fit_to_spec(self.pick(self.known), v.spec, range_of_values)

    def fetches(self) -> tuple[Tensor, ...]:
        everything = self.known + self.batched
        chosen = [self.pick(everything) for _ in range(6)] + [self.known[-1], self.batched[-1]]
        chosen.append(self.x)  # so that it is fed, where only its size is read
        rest = list(self.assigns)
        if rest and self.happens(0.6):
            cut = int(self.rng.integers(len(rest) + 1))
            chosen.append(REGISTRY["group"](*rest[cut:], name="updates"))
            rest = rest[:cut]
        return (*chosen, *rest)


# What they should give ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Fetched arrays of each step (None for a group), and the variables at the end."""

    fetched: list[list[Array | None]]
    variables: dict[str, Array]


def reference(case: Case, steps: int, first: int = 0) -> Outcome:
    """By the interpreter, with the state held here; random ops draw from step `first` on."""
    graph = case.graph
    used = [v for v in case.variables if v.node in graph.variables]
    state = {v: _initial(v.node) for v in used}
    assigns = [n.outputs[0] for n in graph.of_op("assign")]
    fetched = []
    for step in range(steps):
        feeds = {t: a for t, a in case.feeds(step).items() if t.node in graph.placeholders}
        with CpuBackend(1).active():  # BLAS on one thread, as in a program
            values = evaluate([*case.fetches, *assigns], {**feeds, **state}, step=first + step)
        fetched.append([to_array(t, v) for t, v in zip(case.fetches, values, strict=False)])
        new = values[len(case.fetches) :]
        state.update({a.node.inputs[0]: v for a, v in zip(assigns, new, strict=True)})
    return Outcome(fetched, {v.name: np.array(state[v]) for v in used})


def to_array(tensor: Tensor, value: Any) -> Array | None:
    return None if tensor.node.op.name == "group" else np.asarray(value)


def _initial(node: Node) -> Array:
    initial = node.attrs["initial"]
    return np.asarray(initial() if callable(initial) else initial)


def assert_same_bits(have: Outcome, want: Outcome, case: Case) -> None:
    for step, (mine, theirs) in enumerate(zip(have.fetched, want.fetched, strict=True)):
        for tensor, a, b in zip(case.fetches, mine, theirs, strict=True):
            assert has_same_bits(a, b), f"seed {case.seed}, step {step}: {tensor} is {a}, not {b}"
    assert_same_variables(have.variables, want.variables, case)


def assert_same_variables(have: Mapping[str, Array], want: Mapping[str, Array], case: Case) -> None:
    assert have.keys() == want.keys()
    for name in want:
        assert has_same_bits(have[name], want[name]), f"seed {case.seed}: variable {name}"


def has_same_bits(a: Any, b: Any) -> bool:
    """The same bytes, any NaN for any other: numpy does not say which NaN it gives."""
    if a is None or b is None:
        return a is b
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind == "c":
        a, b = (np.stack([t.real, t.imag]) for t in (a, b))
    if is_inexact(a.dtype):
        a, b = (np.where(np.isnan(t), t.dtype.type("nan"), t) for t in (a, b))
    return a.tobytes() == b.tobytes()
