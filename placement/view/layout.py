"""Layout of a graph: layers from top to bottom, a lane for each device.

`layering` gives every item its layer and its place in it. Coordinates come by isotonic regression:
each pass moves every item of a layer as near to its neighbours as order and spacing allow, exactly.

Source: Sugiyama, Tagawa & Toda, IEEE SMC 11(2), 1981.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.view.layering import (
    EdgeChain,
    Groups,
    LayerItems,
    add_chains,
    assign_layers,
    group_items,
    order_groups,
)

NODE_WIDTH, NODE_HEIGHT = 116.0, 34.0
GAP, ROW_GAP, LAYER_GAP, LANE_GAP = 12.0, 12.0, 36.0, 44.0
FLATTEST = 1.5  # width to height, beyond which wide layers wrap
TALLEST = 2.6  # height to width, beyond which a deep graph folds
COORDINATE_PASSES = 10

Segment = tuple[float, float, float, float]
Point = tuple[float, float]


@dataclass(frozen=True)
class EdgeRoute:
    """A tensor's way to its readers in one lane.

    Args:
        source: the node that makes it.
        lane: where its readers are.
        readers: their indices.
        paths: for each reader the points from the source's lower edge to the reader's upper edge.
    """

    source: int
    lane: int
    readers: tuple[int, ...]
    paths: tuple[tuple[Point, ...], ...]

    def segments(self) -> list[Segment]:
        """The pieces (x0, y0, x1, y1) of all paths, each once, though readers share them."""
        pieces = {(*start, *end): None for path in self.paths for start, end in pairwise(path)}
        return list(pieces)


@dataclass(frozen=True)
class GraphLayout:
    """Coordinates in pixels at zoom 1; y grows downwards.

    Args:
        x: (n,) centres of the nodes; y: (n,) their upper edges.
        layer: (n,) longest path from a source.
        column: (n,) into which column a very deep graph was folded; 0 elsewhere.
        routes: every edge, in deterministic order.
        lanes: (left, right, lane) of each lane in each column.
    """

    x: list[float]
    y: list[float]
    layer: list[int]
    column: list[int]
    routes: list[EdgeRoute]
    lanes: list[tuple[float, float, int]]
    width: float
    height: float


def arrange(
    count: int, edges: Sequence[tuple[int, int]], lanes: Sequence[int], lane_count: int
) -> GraphLayout:
    """Lay out `count` nodes; `lanes` (n,) says in which of `lane_count` lanes each is drawn.

    Deterministic; time is about linear in nodes and edges (10,000 nodes: seconds).

    Raises:
        PlanError: the edges form a cycle.
    """
    edges = list(dict.fromkeys(edges))
    layer = assign_layers(count, edges)
    items = LayerItems(list(lanes), list(layer), [NODE_WIDTH / 2] * count)
    items.up, items.down = [[] for _ in range(count)], [[] for _ in range(count)]
    chains = add_chains(items, edges, count)
    groups = group_items(items, lane_count)
    order_groups(items, groups)
    rows, widths = _rows(items, groups, lane_count)
    lefts = _lefts(widths)
    x = _coordinates(items, groups, rows, lefts, widths, chains)
    x, lefts, widths = _tighten(items, x, lane_count)
    return _fold(items, groups, rows, lefts, widths, x, chains, count)


def _min_distance(items: LayerItems, left: int, right: int) -> float:
    joints = (items.half[left] < NODE_WIDTH / 2) + (items.half[right] < NODE_WIDTH / 2)
    return items.half[left] + items.half[right] + (GAP, GAP / 2, GAP / 3)[joints]


def _natural(items: LayerItems, group: list[int]) -> float:
    """Width of a group in one row."""
    if not group:
        return 0.0
    ends = items.half[group[0]] + items.half[group[-1]]
    return ends + sum(_min_distance(items, a, b) for a, b in pairwise(group))


def _rows(items: LayerItems, groups: Groups, lane_count: int) -> tuple[list[int], list[float]]:
    """Rows of each layer and width of each lane: wide layers wrap until the drawing is not flat."""
    natural = [[_natural(items, group) for group in level] for level in groups]
    widest = [max((level[lane] for level in natural), default=0.0) for lane in range(lane_count)]
    limit = max(widest, default=0.0)
    while True:
        # Bricks of several rows stick out by up to a node's width on each side.
        widths = [width if width <= limit else limit + NODE_WIDTH for width in widest]
        rows = [
            max([1, *(-int(-width // limit) for width in level if width > limit)])
            for level in natural
        ]
        height = sum(r * (NODE_HEIGHT + ROW_GAP) + LAYER_GAP - ROW_GAP for r in rows)
        if sum(widths) <= FLATTEST * max(height, 400.0) or limit < 5 * NODE_WIDTH:
            return rows, [max(width, NODE_WIDTH / 2) for width in widths]
        limit *= 0.85


def _lefts(widths: Sequence[float]) -> list[float]:
    lefts, at = [], LANE_GAP / 2
    for width in widths:
        lefts.append(at)
        at += width + LANE_GAP
    return lefts


def _coordinates(
    items: LayerItems,
    groups: Groups,
    rows: list[int],
    lefts: list[float],
    widths: list[float],
    chains: list[EdgeChain],
) -> list[float]:
    """x of every item: as near to the mean of its neighbours as order, spacing and lane allow.

    In the last passes a joint's neighbours are all joints of its chain, so that a long edge becomes
    a straight line with a bend at each end.
    """
    x = [lefts[lane] + widths[lane] / 2 for lane in items.lane]
    weight = [8.0 if half < NODE_WIDTH / 2 else 1.0 for half in items.half]
    offsets = [[_offsets(items, group, rows[i]) for group in g] for i, g in enumerate(groups)]

    straight: dict[int, float] = {}

    def settle(i: int, neighbours: list[list[int]]) -> None:
        for lane, group in enumerate(groups[i]):
            if not group:
                continue
            offset = offsets[i][lane]
            low = lefts[lane] + items.half[group[0]]
            high = lefts[lane] + widths[lane] - items.half[group[-1]] - offset[-1]
            wish = []
            for item, shift in zip(group, offset, strict=True):
                near = neighbours[item]
                mean = sum(x[other] for other in near) / len(near) if near else x[item]
                wish.append(straight.get(item, mean) - shift)
            fitted = isotonic(wish, [weight[item] for item in group])
            for item, shift, at in zip(group, offset, fitted, strict=True):
                x[item] = min(max(at, low), max(low, high)) + shift

    both = [up + down for up, down in zip(items.up, items.down, strict=True)]
    for sweep in range(COORDINATE_PASSES):
        down = sweep % 2 == 0
        near = items.up if down else items.down
        if sweep >= COORDINATE_PASSES // 2:
            near = both
            for joints in (chain.joints.values() for chain in chains if chain.joints):
                straight.update(dict.fromkeys(joints, sum(x[j] for j in joints) / len(joints)))
        for i in range(len(groups)) if down else range(len(groups) - 1, -1, -1):
            settle(i, near)
    return x


def _tighten(
    items: LayerItems, x: list[float], lane_count: int
) -> tuple[list[float], list[float], list[float]]:
    """Narrow each lane to what its items take up."""
    low, high = [math.inf] * lane_count, [-math.inf] * lane_count
    for lane, half, at in zip(items.lane, items.half, x, strict=True):
        low[lane], high[lane] = min(low[lane], at - half), max(high[lane], at + half)
    widths = [max(b - a, NODE_WIDTH / 2) for a, b in zip(low, high, strict=True)]
    lefts = _lefts(widths)
    shift = [left - a for left, a in zip(lefts, low, strict=True)]
    return [at + shift[lane] for at, lane in zip(x, items.lane, strict=True)], lefts, widths


def _offsets(items: LayerItems, group: list[int], rows: int) -> list[float]:
    """Least distance of each item from the first. With several rows, node k lies in row k mod rows,
    so that neighbours may overlap sideways and only every rows-th may not."""
    offsets, at = [], 0.0
    for rank, item in enumerate(group):
        if rank:
            at += _min_distance(items, group[rank - 1], item) / rows
        offsets.append(at)
    return offsets


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted squares; linear time.

    Source: Ayer et al., "pool adjacent violators", Annals of Mathematical Statistics 26(4), 1955.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, mass, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, other, more = blocks.pop()
            mean = (mean * mass + before * other) / (mass + other)
            mass, length = mass + other, length + more
        blocks.append((mean, mass, length))
    return [mean for mean, _, length in blocks for _ in range(length)]


def _fold(
    items: LayerItems,
    groups: Groups,
    rows: list[int],
    lefts: list[float],
    widths: list[float],
    x: list[float],
    chains: list[EdgeChain],
    count: int,
) -> GraphLayout:
    """Give layers their heights; a very deep graph continues at the top of a further column."""
    heights = [r * (NODE_HEIGHT + ROW_GAP) + LAYER_GAP - ROW_GAP for r in rows]
    width, total = lefts[-1] + widths[-1] + LANE_GAP / 2 if lefts else 0.0, sum(heights)
    columns = 1
    while total / columns > TALLEST * width * columns:
        columns += 1
    tops: list[float] = []
    column: list[int] = []
    at = base = 0.0
    for height in heights:
        column.append(min(int(at / (total / columns + 1e-9)), columns - 1))
        if len(column) > 1 and column[-1] != column[-2]:
            base = at
        tops.append(at - base + LAYER_GAP)
        at += height
    bottom = max((t + h for t, h in zip(tops, heights, strict=True)), default=0.0)
    y = [tops[layer] for layer in items.layer]
    for i, level in enumerate(groups):
        for group in level:
            nodes = [item for item in group if item < count]
            for rank, item in enumerate(nodes):
                y[item] = tops[i] + (rank % rows[i]) * (NODE_HEIGHT + ROW_GAP)
    x = [value + width * column[layer] for value, layer in zip(x, items.layer, strict=True)]
    depth = [r * (NODE_HEIGHT + ROW_GAP) - ROW_GAP for r in rows]
    bands = [
        (left + c * width - LANE_GAP / 2, left + c * width + wide + LANE_GAP / 2, lane)
        for c in range(columns)
        for lane, (left, wide) in enumerate(zip(lefts, widths, strict=True))
    ]
    return GraphLayout(
        x[:count],
        y[:count],
        items.layer[:count],
        [column[layer] for layer in items.layer[:count]],
        [_route(chain, items, x, y, tops, depth) for chain in chains],
        bands,
        width * columns,
        bottom,
    )


def _route(
    chain: EdgeChain,
    items: LayerItems,
    x: list[float],
    y: list[float],
    tops: list[float],
    depth: list[float],
) -> EdgeRoute:
    paths = []
    for reader in chain.readers:
        path = [(x[chain.source], y[chain.source] + NODE_HEIGHT)]
        for level in range(items.layer[chain.source] + 1, items.layer[reader]):
            if level in chain.joints:
                at = x[chain.joints[level]]
                path += [(at, tops[level]), (at, tops[level] + depth[level])]
        path.append((x[reader], y[reader]))
        paths.append(tuple(path))
    return EdgeRoute(chain.source, chain.lane, chain.readers, tuple(paths))
