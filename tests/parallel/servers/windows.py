"""Windows of parameter servers, run and computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import graphflow as gf
from graphflow.parallel.servers.window_history import WindowHistory
from tests.parallel.models import Model

Array = np.ndarray[Any, Any]


class Trained(NamedTuple):
    """What some windows gave."""

    losses: list[float]
    values: list[Any]
    history: tuple[WindowHistory, ...]


def train(
    model: Model, windows: Sequence[dict[Any, Any]], cluster: Any = None, **options: Any
) -> Trained:
    """Run windows of a model; fetch the losses, then the variables."""
    with gf.Session(cluster, **options) as s:
        losses = [float(s.run(model.fetches, feeds)[0]) for feeds in windows]
        return Trained(losses, [s.get(v) for v in model.variables], s.history())


def feeds_of(model: Model, windows: int, rows: int, seed: int = 1) -> list[dict[Any, Any]]:
    """Feeds of some windows, the same for each model with the same placeholders."""
    random = np.random.default_rng(seed)
    return [model.feeds(random, rows) for _ in range(windows)]


def parts_of(feeds: dict[Any, Any], count: int) -> list[dict[Any, Any]]:
    """Feeds in equal parts."""
    pieces = {x: np.split(value, count) for x, value in feeds.items()}
    return [{x: own[i] for x, own in pieces.items()} for i in range(count)]


def difference(a: Sequence[Any], b: Sequence[Any]) -> float:
    """The largest difference between variables."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def traced_bytes(trace: Any) -> int:
    """The bytes that devices sent each other."""
    edges = (e for e in trace.edges if "client" not in e.source + e.target)
    return sum(e.bytes * e.count for e in edges)


def traced_links(trace: Any) -> dict[tuple[str, str], int]:
    """The bytes that devices sent each other, by sender and receiver."""
    found: dict[tuple[str, str], int] = {}
    for e in trace.edges:
        if "client" not in e.source + e.target:
            found[e.source, e.target] = found.get((e.source, e.target), 0) + e.bytes * e.count
    return found


class Reference(NamedTuple):
    """A window computed by hand.

    Attributes:
        weights: after the window.
        staleness: of each push.
        lead: the most turns by which a worker was ahead of the slowest one when it read.
        dropped: the number of pushes that were too late.
    """

    weights: Array
    staleness: list[int]
    lead: int
    dropped: int


def window_by_hand(
    strategy: Any,
    start: Array,
    rows: Array,
    order: Sequence[int],
    numbers: Sequence[int],
    rate: Any,
) -> Reference:
    """Descent on ½(w − row)² of one row a micro-batch, in the order in which pushes came."""
    workers, each = strategy.workers, strategy.window
    kind, bound = strategy.consistency, strategy.staleness
    together = strategy.aggregate or (workers if kind in ("pool", "bsp") else 1)
    w, version, lead, dropped = start, 0, 0, 0
    seen = [(w, 0)] * workers
    clocks, waiting = [0] * workers, set[int]()
    pushed: list[Array] = []
    staleness = []
    for k, m in zip(order, numbers, strict=True):
        values, then = seen[k]
        staleness.append(version - then)
        clocks[k] += 1
        waiting.add(k)
        if kind == "bsp" and version > then:  # late: it joins the present round
            dropped += 1
            seen[k] = (w, version)
            waiting.discard(k)
            continue
        pushed.append(values - rows[m])
        is_update = len(pushed) == together
        if is_update:
            total = pushed[0]
            for gradient in pushed[1:]:
                total = total + gradient
            w = w - rate * (total * (1.0 / together) if together > 1 else total)
            version, pushed = version + 1, []
        running = [clock for clock in clocks if clock < each]
        if kind == "ssp":
            answered = {j for j in waiting if clocks[j] - min(running, default=0) <= bound}
            leads = [clocks[j] - min(running) for j in answered if clocks[j] < each]
            lead = max([lead, *leads])
        else:
            answered = waiting.copy() if kind != "bsp" or is_update else set()
        for j in answered:
            seen[j] = (w, version)
        waiting -= answered
    return Reference(w, staleness, lead, dropped)
