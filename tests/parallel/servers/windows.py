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
