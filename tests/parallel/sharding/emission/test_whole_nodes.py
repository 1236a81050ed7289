"""Copies at places are what a rule and a shape rule would have given."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph
from graphflow.ir.nodes.scopes import seed_scope
from graphflow.parallel.sharding.emission import emitter, local_nodes, state_emitter


def _describe_divided_step(strategy: Any) -> str:
    """All that a divided step of training says of itself, but where its objects are in memory."""
    with seed_scope(0):
        h = gf.placeholder("float32", ("batch", 4), name="x")
        for i in range(3):
            w = gf.variable(np.full((4, 4), 0.1 * i, np.float32), name=f"w{i}")
            b = gf.variable(np.zeros(4, np.float32), name=f"b{i}")
            h = gf.tanh(h @ w + b * 0.5)
        train = gf.optim.Adam(0.1).minimize(gf.mean(gf.square(h)), strategy=strategy)
    graph = strategy.divide(Graph([train]), gf.Cluster.local(1)).graph
    made = [f"{n.device} {n.location} {n.origin and n.origin.name}" for n in graph.nodes]
    return re.sub("0x[0-9a-f]+", "", "\n".join([str(graph), *made]))


@pytest.mark.parametrize(
    "strategy",
    [
        gf.parallel.Data(2),
        gf.parallel.Data(2, accumulate=2),
        gf.parallel.Data(2, shard_state=True),
        gf.parallel.Shard({"model": 2}, {"w0": (None, "model"), "w1": ("model", None)}),
    ],
    ids=["replicas", "turns", "shared state", "cut weights"],
)
def test_copies_are_what_rules_would_have_given(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = _describe_divided_step(strategy)
    monkeypatch.setattr(emitter, "copy_unsplit", lambda *_: None)
    monkeypatch.setattr(local_nodes, "have_specs", lambda *_: False)
    monkeypatch.setattr(state_emitter, "have_spec_of", lambda *_: False)
    assert copied == _describe_divided_step(strategy)
