"""Plans of parameter servers: windows with their turns, and the bytes that reports tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from tests.placement.cost_model.test_windows import build_cluster


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("consistency", ["pool", "bsp", "ssp", "async"])
def test_a_window_has_the_bytes_of_the_report(servers: int, consistency: Any) -> None:
    strategy = gf.parallel.ParameterServer(
        servers, consistency=consistency, staleness=1 if consistency == "ssp" else None, window=4
    )
    x = gf.placeholder("float32", ("B", 20), name="x")
    first = gf.variable(np.ones((20, 8), np.float32), name="first")
    last = gf.variable(np.ones(8, np.float32), name="last")
    loss = gf.mean((gf.tanh(x @ first) @ last) ** 2.0)
    fetches = [loss, gf.optim.Adam(1e-3).minimize(loss, strategy=strategy)]
    cluster = build_cluster(servers + 2)
    plan = gf.plan(fetches, cluster, shapes={x: (4 * 2 * 16, 20)})
    (window,) = plan.windows
    told = strategy.report(fetches, cluster).bytes_by_kind
    sent = sum(told[kind] for kind in ("push", "pull", "number", "fetch"))
    assert sum(link.bytes for link in window.links) == sent
    assert window.text.startswith(consistency)
    tasks = {bar.name.rpartition("/")[2] for bar in window.bars}
    turns = {f"T{i}" for i in range(8 if consistency == "pool" else 4)}
    assert {task for task in tasks if task[0] == "T"} == turns
    assert {task for task in tasks if task[0] == "A"} == {f"A{i}" for i in range(8)}
    assert plan.makespan > window.seconds > 0


@pytest.mark.parametrize("consistency", ["pool", "bsp", "async"])
def test_filtered_messages_have_the_bytes_of_the_report(consistency: Any) -> None:
    """The first pull is of whole values, and goes through no filter."""
    filters = (gf.parallel.TopK(0.1),)
    strategy = gf.parallel.ParameterServer(1, consistency=consistency, window=4, filters=filters)
    x = gf.placeholder("float32", ("B", 20), name="x")
    w = gf.variable(np.ones((20, 64), np.float32), name="w")
    loss = gf.mean((x @ w) ** 2.0)
    fetches = [loss, gf.optim.SGD(0.1).minimize(loss, strategy=strategy)]
    cluster = build_cluster(3)
    (window,) = gf.plan(fetches, cluster, shapes={x: (4 * 2 * 4, 20)}).windows
    told = strategy.report(fetches, cluster).bytes_by_kind
    assert sum(link.bytes for link in window.links) == sum(told.values())
