"""Layers of a graph's layout: the layer of each node, and the order of items in each layer.

Layers by longest path, order within a layer by barycentres. An edge that skips layers gets a thin
placeholder ("joint") in each of them, shared by all readers of the tensor in one lane, so that a
long edge runs beside nodes and not under them.

Source: Sugiyama, Tagawa & Toda, IEEE SMC 11(2), 1981.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlanError

JOINT = 4.0  # the width of an edge that passes through a layer
ORDER_PASSES = 14


@dataclass
class LayerItems:
    """Nodes and joints: the items that occupy places in layers, by number.

    Attributes:
        half: half of the width, in pixels.
        up: the items above that an item is connected to.
        down: those below.
    """

    lane: list[int]
    layer: list[int]
    half: list[float]
    up: list[list[int]] = field(default_factory=list)
    down: list[list[int]] = field(default_factory=list)

    def add(self, lane: int, layer: int) -> int:
        """Add a joint and return its number."""
        self.lane.append(lane)
        self.layer.append(layer)
        self.half.append(JOINT / 2)
        self.up.append([])
        self.down.append([])
        return len(self.lane) - 1

    def connect(self, above: int, below: int) -> None:
        """Connect two items by a piece of an edge."""
        self.down[above].append(below)
        self.up[below].append(above)


def assign_layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the layer of each node: the longest path from the sources.

    A node with more readers than inputs moves down to its readers.

    Raises:
        PlanError: the edges form a cycle.
    """
    readers: list[list[int]] = [[] for _ in range(count)]
    inputs = [0] * count
    for source, target in edges:
        readers[source].append(target)
        inputs[target] += 1
    layer, missing = [0] * count, list(inputs)
    ready = [node for node in range(count) if not inputs[node]]
    for node in ready:  # grows as it is read
        for reader in readers[node]:
            layer[reader] = max(layer[reader], layer[node] + 1)
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    if len(ready) < count:
        stuck = next(node for node in range(count) if missing[node])
        raise PlanError(f"the plan's nodes read each other in a circle, through node {stuck}")
    for node in reversed(ready):
        if readers[node] and len(readers[node]) > inputs[node]:
            layer[node] = min(layer[reader] for reader in readers[node]) - 1
    return layer


@dataclass(frozen=True)
class EdgeChain:
    """A tensor's readers in one lane and the joints on the way, by layer."""

    source: int
    lane: int
    readers: tuple[int, ...]
    joints: dict[int, int]


def add_chains(items: LayerItems, edges: Sequence[tuple[int, int]], count: int) -> list[EdgeChain]:
    """Give long edges joints, as far as a number of joints in proportion to the nodes allows."""
    grouped: dict[tuple[int, int], list[int]] = {}
    for source, target in edges:
        grouped.setdefault((source, items.lane[target]), []).append(target)
    spans = sorted(
        max(items.layer[t] for t in targets) - items.layer[source] - 1
        for (source, _), targets in grouped.items()
    )
    budget, longest = 6 * count + 2000, 0
    for span in spans:
        budget -= span
        if budget < 0:
            break
        longest = span
    chains = []
    for (source, lane), targets in grouped.items():
        first, last = items.layer[source], max(items.layer[t] for t in targets)
        joints: dict[int, int] = {}
        above = source
        if last - first - 1 <= longest:
            for level in range(first + 1, last):
                joints[level] = items.add(lane, level)
                items.connect(above, joints[level])
                above = joints[level]
        for target in targets:
            items.connect(joints.get(items.layer[target] - 1, source), target)
        chains.append(EdgeChain(source, lane, tuple(targets), joints))
    return chains


Groups = list[list[list[int]]]  # layer → lane → items from left to right


def group_items(items: LayerItems, lane_count: int) -> Groups:
    """Return the items of each layer and lane, in the order of their numbers."""
    groups: Groups = [
        [[] for _ in range(lane_count)] for _ in range(max(items.layer, default=-1) + 1)
    ]
    for item, (layer, lane) in enumerate(zip(items.layer, items.lane, strict=True)):
        groups[layer][lane].append(item)
    return groups


def order_groups(items: LayerItems, groups: Groups) -> None:
    """Sort every layer by the mean position of its neighbours, downwards and upwards in turn."""
    position = [0.0] * len(items.lane)

    def number(group: list[int], lane: int) -> None:
        for rank, item in enumerate(group):
            position[item] = lane + (rank + 0.5) / len(group)

    for level in groups:
        for lane, group in enumerate(level):
            number(group, lane)
    for sweep in range(ORDER_PASSES):
        neighbours, levels = (items.down, groups[::-1]) if sweep % 2 else (items.up, groups)
        for level in levels:
            for lane, group in enumerate(level):
                if len(group) < 2:
                    continue
                wish = {
                    item: sum(position[other] for other in near) / len(near)
                    if (near := neighbours[item])
                    else position[item]
                    for item in group
                }
                group.sort(key=lambda item: (wish[item], position[item]))
                number(group, lane)
