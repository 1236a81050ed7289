"""Rules of a window stay with its node, on its way through passes, bytes and partitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import GraphError, ProtocolError
from graphflow.frontend.concurrent_loops import ConcurrentLoops, Party
from graphflow.ir.graph import Graph
from graphflow.passes import optimize
from graphflow.runtime.wire.graph_codec import decode, encode
from tests.ops.communication.servers import server_and_workers, window_rules
from tests.runtime.programs import make_partition

RULES = window_rules([2, 1], consistency="ssp", staleness=1, aggregate=2)


def rules_in(graph: Graph) -> list[Any]:
    return [n.attrs["rules"] for n in graph.walk() if "rules" in n.attrs]


def test_rules_survive_passes_and_bytes() -> None:
    weights, came, seen = server_and_workers(np.ones(3), [2, 1])
    graph = optimize(Graph([weights, came, *seen]))
    assert rules_in(graph) == [window_rules([2, 1])]
    (twin,) = decode(*encode([make_partition(*graph.outputs)]))
    assert rules_in(twin.graph) == [window_rules([2, 1])]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"workers": (1, 3)}, "3 parties"),
        ({"servers": ()}, "needs servers"),
        ({"servers": (1,)}, "other parties"),
        ({"turns": (1,)}, "number of turns"),
        ({"turns": (1, -1)}, "not negative"),
        ({"consistency": "eventual"}, "eventual"),
        ({"aggregate": 0}, "must be positive"),
        ({"staleness": -1}, "not negative"),
    ],
)
def test_rules_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    def party(party: Party) -> Any:
        return gf.constant(1.0)

    loops = ConcurrentLoops()
    for _ in range(3):
        loops.add(party)
    with pytest.raises(GraphError, match=message):
        loops.build(rules=replace(RULES, **wrong))
    no_rules: Any = "bsp"
    with pytest.raises(GraphError, match="TurnRules"):
        loops.build(rules=no_rules)
    assert len(loops.build(rules=RULES)) == 3


def test_rules_from_the_wire_are_checked() -> None:
    weights, _, _ = server_and_workers(np.ones(3), [2, 1])
    header, buffers = encode([make_partition(weights)])
    for wrong in ([[0], [7], [2], "ssp", 1, 1], [[0], [1], [-2], "ssp", 1, 1], [1, 2], "ssp"):
        parts = msgpack.unpackb(header)
        (attrs,) = [node[2] for node in parts[0]["nodes"] if node[0] == "concurrent"]
        attrs["rules"] = {"turns": wrong}
        with pytest.raises(ProtocolError):
            decode(msgpack.packb(parts), buffers)
