"""Plans to draw: an ensemble of towers in training over several workers, and hostile names."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.plan_records import (
    BodyNode,
    Interval,
    MeasuredSteps,
    PlannedNode,
    PlannedTransfer,
)

HOSTILE = '<script>alert("x&y\')</script>\x00"\\-->]]>{{ x }}\u202e\x1b[2J'


class Drawing:
    """A graph written down node by node, scheduled in that order."""

    def __init__(self, workers: int, scale: float = 1.0) -> None:
        self.cluster = Cluster.local(workers=workers)
        self.scale = scale
        self.nodes: dict[str, PlannedNode] = {}
        self.transfers: dict[tuple[str, str], PlannedTransfer] = {}
        self.free = dict.fromkeys(self.cluster.devices, 0.0)

    def add(
        self,
        name: str,
        op: str,
        worker: int | None,
        inputs: Sequence[str] = (),
        shape: tuple[int, ...] = (),
        cost: float = 20e-6,
        why: str = "finishes first here: 1.20 ms, /worker:1/cpu:0 1.42 ms",
    ) -> str:
        device = CLIENT if worker is None else self.cluster.devices[worker]
        start = 0.0 if worker is None else self.free[device]
        for read in inputs:
            start = max(start, self._arrival(self.nodes[read], device))
        finish = start if worker is None else start + cost * self.scale
        if worker is not None:
            self.free[device] = finish
        size = 4
        for dim in shape:
            size *= dim
        self.nodes[name] = PlannedNode(
            name, op, device, start, finish, f"float32{shape}", size, tuple(inputs),
            "train.py:12", why, dict.fromkeys(self.cluster.devices, cost),
        )  # fmt: skip
        return name

    def _arrival(self, node: PlannedNode, device: str) -> float:
        if node.device == device:
            return node.finish
        key = (node.name, device)
        if key not in self.transfers:
            finish = node.finish + 60e-6 + node.bytes / 4e9
            self.transfers[key] = PlannedTransfer(
                node.name, node.device, device, node.finish, finish, node.bytes,
                len(self.transfers),
            )  # fmt: skip
        return self.transfers[key].finish

    def plan(self) -> Plan:
        makespan = max((node.finish for node in self.nodes.values()), default=0.0)
        total = sum(node.finish - node.start for node in self.nodes.values())
        return Plan(
            cluster=self.cluster,
            placer="greedy",
            nodes=tuple(self.nodes.values()),
            transfers=tuple(self.transfers.values()),
            makespan=makespan,
            peak_memory={name: 48_000_000 + i * 9_000_000 for i, name in enumerate(self.free)},
            baselines={f"one device: {self.cluster.devices[0]}": total, "round robin": total * 1.3},
            shapes={"x": (128, 64)},
            fingerprint="0" * 16,
        )


def towers(
    workers: int = 2, count: int = 4, layers: int = 2, width: int = 1024, optimiser: int = 5
) -> Plan:
    """An ensemble with averaged logits: forward, backward, momentum; a tower stays on a worker."""
    d = Drawing(workers)
    d.add("x", "placeholder", None, (), (128, 64))
    d.add("y", "placeholder", None, (), (128,))
    sizes = [64, *[width] * (layers - 1), 10]
    tops = [_forward(d, t, t * workers // count, sizes) for t in range(count)]
    mean = tops[0]
    for t in range(1, count):
        mean = d.add(f"add_{t}", "add", 0, [mean, tops[t]], (128, 10))
    mean = d.add("mul", "mul", 0, [mean], (128, 10))
    logp = d.add("cross_entropy/log_softmax", "log_softmax", 0, [mean], (128, 10))
    picked = d.add("cross_entropy/take", "take_along_axis", 0, [logp, "y"], (128,))
    d.add("mean", "mean", 0, [picked])
    grad = d.add("cross_entropy/grad", "sub", 0, [logp, "y"], (128, 10))
    grad = d.add("mul_1", "mul", 0, [grad], (128, 10))
    for t in range(count):
        _backward(d, t, t * workers // count, sizes, grad, optimiser)
    return d.plan()


def _forward(d: Drawing, t: int, worker: int, sizes: list[int]) -> str:
    at = "x"
    for i, (rows, columns) in enumerate(pairwise(sizes)):
        scope = f"tower{t}/dense{i}"
        d.add(f"{scope}/w", "variable", worker, (), (rows, columns), 0, "its first home")
        d.add(f"{scope}/b", "variable", worker, (), (columns,), 0, "its first home")
        cost = rows * columns * 128 * 2 / 9e10
        d.add(f"{scope}/matmul", "matmul", worker, [at, f"{scope}/w"], (128, columns), cost)
        at = d.add(f"{scope}/add", "add", worker, [f"{scope}/matmul", f"{scope}/b"], (128, columns))
        if i + 2 < len(sizes):
            at = d.add(f"{scope}/relu", "relu", worker, [at], (128, columns))
    return at


def _backward(d: Drawing, t: int, worker: int, sizes: list[int], grad: str, optimiser: int) -> None:
    for i in range(len(sizes) - 2, -1, -1):
        scope, (rows, columns) = f"tower{t}/dense{i}", (sizes[i], sizes[i + 1])
        cost = rows * columns * 128 * 2 / 9e10
        below = f"tower{t}/dense{i - 1}/relu" if i else "x"
        if i + 2 < len(sizes):
            grad = d.add(
                f"{scope}/relu_grad", "where", worker, [grad, f"{scope}/add"], (128, columns)
            )
        gb = d.add(f"{scope}/sum", "sum", worker, [grad], (columns,))
        gw = d.add(f"{scope}/matmul_w", "matmul", worker, [below, grad], (rows, columns), cost)
        if i:
            grad = d.add(
                f"{scope}/matmul_x", "matmul", worker, [grad, f"{scope}/w"], (128, rows), cost
            )
        for name, g, shape in (("w", gw, (rows, columns)), ("b", gb, (columns,))):
            _momentum(d, worker, f"{scope}/{name}", g, shape, optimiser)


def _momentum(
    d: Drawing, worker: int, name: str, grad: str, shape: tuple[int, ...], ops: int
) -> None:
    cost = 5e-6 + shape[0] * 4 / 2e9
    at = grad
    why = f"beside its variable '{name}'"
    if ops > 2:
        d.add(f"{name}/slot", "variable", worker, (), shape, 0, why)
        at = d.add(f"{name}/momentum", "mul_add", worker, [f"{name}/slot", at], shape, cost, why)
        d.add(f"{name}/slot_assign", "assign", worker, [at], shape, cost, why)
    at = d.add(f"{name}/step", "sub", worker, [name, at], shape, cost, why)
    d.add(f"{name}/assign", "assign", worker, [at], shape, cost, why)


def add_measurements(plan: Plan, slower: float = 1.15, seed: int = 0) -> Plan:
    """The plan after a run in which everything took about `slower` times as long."""
    draw = random.Random(seed)
    bars = []
    for bar in plan.timeline:
        start = bar.start * slower
        finish = start + (bar.finish - bar.start) * slower * draw.uniform(0.85, 1.0)
        bars.append(Interval(bar.track, bar.name, start, finish, bar.kind))
    for t in plan.transfers:
        if t.target in plan.cluster.devices:
            finish = t.finish * slower
            bars.append(
                Interval(t.target, f"recv/{t.tensor}/{t.edge}", finish * 0.9, finish, "wait")
            )
    peak = {name: int(value * 1.02) for name, value in plan.peak_memory.items()}
    return plan.with_measured(MeasuredSteps(plan.makespan * slower, tuple(bars), peak, 20))


def plan_hostile_names() -> Plan:
    """Every string that a user can choose is an attack."""
    d = Drawing(2)
    d.add(HOSTILE, "placeholder", None, (), (3, 4), why=HOSTILE)
    d.add(HOSTILE + "2", HOSTILE, 0, [HOSTILE], (3, 4), why=HOSTILE)
    d.add('a"b\\', "neg", 1, [HOSTILE + "2"], (3, 4), why=HOSTILE)
    return d.plan()


def chain(length: int) -> Plan:
    d = Drawing(1)
    for i in range(length):
        d.add(f"tanh_{i}", "tanh", 0, [f"tanh_{i - 1}"] if i else [], (8, 8))
    return d.plan()


def network(nodes: int, workers: int = 4) -> Plan:
    """A deep network of attention and perceptrons, 50 nodes a layer, in stages over the workers."""
    d = Drawing(workers)
    layers = nodes // 50
    at = d.add("x", "placeholder", None, (), (128, 64))
    for layer in range(layers):
        worker = layer * workers // layers
        for part in ("attention", "mlp"):
            at = _part(d, f"model/layer_{layer}/{part}", worker, at)
    return d.plan()


def _part(d: Drawing, scope: str, worker: int, at: str) -> str:
    base, heads = at, []
    for j in range(8):
        d.add(f"{scope}/w{j}", "variable", worker, (), (64, 64), 0, "its first home")
    for head in range(3):
        inside = f"{scope}/head{head}"
        a = d.add(f"{inside}/matmul", "matmul", worker, [at, f"{scope}/w{head}"], (128, 64), 4e-5)
        a = d.add(f"{inside}/softmax", "softmax", worker, [a], (128, 64), 3e-6)
        heads.append(
            d.add(f"{inside}/mul", "mul", worker, [a, f"{scope}/w{head + 3}"], (128, 64), 2e-6)
        )
    at = d.add(f"{scope}/concat", "concat", worker, heads, (128, 64), 2e-6)
    at = d.add(f"{scope}/add", "add", worker, [at, base], (128, 64), 2e-6)
    for j, op in enumerate(("relu", "mul", "layer_norm", "sub", "exp", "add")):
        at = d.add(f"{scope}/{op}_{j}", op, worker, [at], (128, 64), (j + 1) * 1e-6)
    return at


def kernels() -> Plan:
    """Nodes that run as one kernel: a part of a scope, a whole scope, and some of two scopes."""
    d = Drawing(2)
    d.add("x", "placeholder", None, (), (64, 64))
    at = d.add("net/matmul", "matmul", 0, ["x"], (64, 64), 2e-4)
    for name in ("net/multiply", "net/tanh", "net/subtract"):
        at = d.add(name, name[4:], 0, [at], (64, 64), 1e-5)
    at = d.add("net/matmul_1", "matmul", 0, [at], (64, 64), 2e-4)
    for name in ("gate/exp", "gate/divide"):
        at = d.add(name, name[5:], 0, [at], (64, 64), 3e-5)
    at = d.add("left/neg", "neg", 1, [at], (64, 64), 1e-5)
    at = d.add("left/matmul", "matmul", 1, [at], (64, 64), 1e-4)
    for name in ("left/add", "left/abs", "right/sign"):
        at = d.add(name, name.rpartition("/")[2], 1, [at], (64, 64), 1e-5)
    d.add("right/matmul", "matmul", 1, [at], (64, 64), 1e-4)
    for name, last in (
        ("net/multiply", "net/subtract"), ("net/tanh", "net/subtract"),
        ("net/subtract", "net/subtract"), ("gate/exp", "gate/divide"),
        ("gate/divide", "gate/divide"), ("left/add", "right/sign"), ("left/abs", "right/sign"),
        ("right/sign", "right/sign"),
    ):  # fmt: skip
        d.nodes[name] = replace(d.nodes[name], fused=last)
    return d.plan()


def plan_nested_bodies() -> Plan:
    """A loop in a scope that holds a body with a branch in it."""
    d = Drawing(1)
    d.add("x", "placeholder", None, (), (4, 8))
    d.add("net/first", "tanh", 0, ["x"], (8,))
    d.add("net/scan", "scan", 0, ["net/first", "x"], (4, 8), 1e-3)
    d.add("net/last", "exp", 0, ["net/scan"], (4, 8))
    inside = [
        ("argument_0", "placeholder", ()),
        ("add", "add", ("argument_0",)),
        ("cond", "cond", ("add",)),
        ("cond/then/argument_0", "placeholder", ()),
        ("cond/then/neg", "neg", ("cond/then/argument_0",)),
        ("cond/orelse/argument_0", "placeholder", ()),
        ("multiply", "multiply", ("cond", "add")),
    ]
    held = tuple(BodyNode(n, op, "float32(8,)", reads, "train.py:9") for n, op, reads in inside)
    d.nodes["net/scan"] = replace(d.nodes["net/scan"], holds=held)
    return d.plan()
