"""Problems that several tests share: random ones, the textbook's, and a training graph of wide
towers.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from graphflow.placement import Problem

TOPCUOGLU_COMPUTE = [
    [14, 16, 9],
    [13, 19, 18],
    [11, 13, 19],
    [13, 8, 17],
    [12, 13, 10],
    [13, 16, 9],
    [7, 15, 11],
    [5, 11, 14],
    [18, 12, 20],
    [21, 7, 16],
]
TOPCUOGLU_EDGES = [
    (0, 1, 18), (0, 2, 12), (0, 3, 9), (0, 4, 11), (0, 5, 14), (1, 7, 19), (1, 8, 16), (2, 6, 23),
    (3, 7, 27), (3, 8, 23), (4, 8, 13), (5, 7, 15), (6, 9, 17), (7, 9, 11), (8, 9, 13),
]  # fmt: skip


def topcuoglu() -> Problem:
    """The ten tasks of the HEFT paper (Topcuoglu, Hariri & Wu 2002, figure 2): HEFT 80, optimum
    73.
    """
    rows = np.array(TOPCUOGLU_EDGES)
    return Problem(np.array(TOPCUOGLU_COMPUTE, float), rows[:, :2], rows[:, 2].astype(float))


@st.composite
def problems(draw: st.DrawFn, capacity: bool = False, max_nodes: int = 14) -> Problem:
    """Random DAGs with pins, groups, shared tensors, costs of zero and, on request, little
    memory.
    """
    n = draw(st.integers(1, max_nodes))
    d = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    order = rng.permutation(n)
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 0.25]
    edges = np.array([(order[a], order[b]) for a, b in pairs], dtype=np.int64).reshape(-1, 2)
    shared = draw(st.booleans())
    size = rng.choice([0.0, 1.0, 5.0, 20.0], n)
    tensor = edges[:, 0] if shared else np.arange(len(edges))
    compute = rng.choice([0.0, 1.0, 2.0, 5.0, 10.0], (n, 1)) * rng.choice([1.0, 1.5], (n, d))
    groups = np.where(rng.random(n) < 0.3, rng.integers(0, 3, n), -1)
    pinned = (rng.random(n) < 0.2) & (groups < 0)
    home = rng.integers(0, d, n)
    compute[pinned[:, None] & (np.arange(d) != home[:, None])] = np.inf
    memory = rng.choice([0.0, 1.0, 4.0], n)
    total = float(memory.sum() + size.sum())
    return Problem(
        compute=compute,
        edges=edges,
        bytes=size[edges[:, 0]],
        tensor=tensor,
        latency=rng.choice([0.0, 0.5, 2.0], (d, d)),
        bandwidth=rng.choice([1.0, 4.0], (d, d)),
        memory=memory,
        output_memory=size,
        capacity=np.full(d, max(1.0, total * rng.uniform(0.4, 1.3)) if capacity else np.inf),
        groups=groups,
        contention=draw(st.booleans()),
        prefer=np.where(rng.random(n) < 0.3, rng.integers(0, n, n), -1),
    )


class TrainingGraph:
    """Grows a problem node by node; node outputs are tensors that travel once to a device."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.size: list[float] = []
        self.memory: list[float] = []
        self.group: list[int] = []
        self.edges: list[tuple[int, int]] = []

    def node(
        self,
        seconds: float,
        inputs: tuple[int, ...],
        size: float,
        group: int = -1,
        memory: float = 0.0,
    ) -> int:
        index = len(self.seconds)
        self.seconds.append(seconds)
        self.size.append(size)
        self.memory.append(memory)
        self.group.append(group)
        self.edges += [(source, index) for source in inputs]
        return index

    def problem(self, devices: int, latency: float, bandwidth: float) -> Problem:
        edges = np.array(self.edges)
        return Problem(
            compute=np.repeat(np.array(self.seconds)[:, None], devices, axis=1),
            edges=edges,
            bytes=np.array(self.size)[edges[:, 0]],
            tensor=edges[:, 0],
            latency=np.full((devices, devices), latency),
            bandwidth=np.full((devices, devices), bandwidth),
            memory=np.array(self.memory),
            output_memory=np.array(self.size),
            groups=np.array(self.group),
            contention=True,
        )


def towers(
    count: int = 4, layers: int = 3, devices: int = 2, latency: float = 1e-4
) -> tuple[Problem, list[list[int]]]:
    """An ensemble of wide towers with averaged logits, one training step; and each tower's weight
    nodes.

    Products take 1 ms, small nodes 5 µs; weights are 4 MB, activations 512 KB, logits 5 KB; a
    variable and its update are one group. Links: 100 µs and 1 GB/s.
    """
    matmul, tiny, weight, wide, small = 1e-3, 5e-6, 4e6, 512e3, 5e3
    graph = TrainingGraph()
    images, labels = graph.node(0.0, (), 32e3), graph.node(0.0, (), 1e3)
    weights: list[list[int]] = []
    inputs: list[list[int]] = []
    logits = []
    for tower in range(count):
        value, of_tower, seen = images, [], []
        for layer in range(layers):
            size = wide if layer < layers - 1 else small
            variable = graph.node(0.0, (), weight, tower * layers + layer, weight)
            of_tower.append(variable)
            seen.append(value)
            product = graph.node(matmul, (value, variable), size)
            value = graph.node(tiny, (graph.node(tiny, (product,), size),), size)
        weights.append(of_tower)
        inputs.append(seen)
        logits.append(value)
    mean = logits[0]
    for other in logits[1:]:
        mean = graph.node(tiny, (mean, other), small)
    mean = graph.node(tiny, (mean,), small)
    graph.node(tiny, (mean, labels), 8.0)
    error = graph.node(tiny, (mean, labels), small)
    for tower in range(count):
        cotangent = error
        for layer in reversed(range(layers)):
            size = wide if layer < layers - 1 else small
            variable = weights[tower][layer]
            cotangent = graph.node(tiny, (cotangent, inputs[tower][layer]), size)
            gradient = graph.node(matmul, (cotangent, inputs[tower][layer]), weight)
            step = graph.node(8 * tiny, (gradient,), weight)
            graph.node(8 * tiny, (step, variable), 0.0, graph.group[variable])
            if layer:
                cotangent = graph.node(matmul, (cotangent, variable), wide)
    return graph.problem(devices, latency, 1e9), weights
