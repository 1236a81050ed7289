"""Numbers for people: units, digits, nouns; and what public objects look like in a prompt."""

from __future__ import annotations

import graphflow as gf
from graphflow.base.formatting import show_bytes, show_count, show_memory, show_seconds
from graphflow.placement import Problem


def test_seconds_have_three_digits_and_a_unit_but_never_an_exponent() -> None:
    shown = [show_seconds(v) for v in (0, 3e-9, 1.23456e-3, 999.6e-6, -2.5, 1234.5)]
    assert shown == ["0 s", "3 ns", "1.23 ms", "1000 µs", "-2.5 s", "1234 s"]


def test_bytes_have_three_digits_and_what_is_compared_with_a_limit_four() -> None:
    shown = [show_bytes(v) for v in (0, 1023, 1536, -1536, 643_825_664, 5 * 2**30)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "-1.5 KiB", "614 MiB", "5 GiB"]
    shown = [show_memory(v) for v in (0.9999, 1_263_616, 2**20 * 1000, float("inf"))]
    assert shown == ["1 B", "1.205 MiB", "1000 MiB", "unlimited memory"]


def test_one_thing_is_not_things() -> None:
    assert [show_count(n, "node") for n in (0, 1, 1234)] == ["0 nodes", "1 node", "1,234 nodes"]


def test_public_objects_are_short_in_a_prompt() -> None:
    x = gf.placeholder("float32", (4,), name="x")
    assert repr(gf.Graph([x])) == "<Graph of 1 node, 1 output>"
    assert repr(gf.plan(x, gf.Cluster.here())).startswith("<Plan of 1 node on 1 device by greedy")
    problem = Problem(compute=[[1, 2], [3, 4]], edges=[[0, 1]], bytes=[3])
    assert repr(problem) == "<Problem of 2 nodes and 1 edge on 2 devices>"
    two = gf.Cluster.local(2, devices=["cpu:0", "cpu:1"])
    devices = "/worker:0/cpu:0, /worker:0/cpu:1, /worker:1/cpu:0, /worker:1/cpu:1"
    assert repr(two) == f"<Cluster of 2 workers (local): {devices}>"
    cards = "/worker:0/gpu:0 (h100-sxm), /worker:0/gpu:1 (h100-sxm)"
    assert repr(gf.Cluster.hypothetical("2xh100")) == (
        f"<Cluster of 1 worker (hypothetical): {cards}>"
    )
    assert repr(gf.Cluster.hypothetical("8xh100")).endswith(", … 8 in all>")
    with gf.Session() as s:
        s.run(x, {x: [1, 2, 3, 4]})
        assert repr(s) == "<Session on <Cluster of 1 worker (here): /worker:0/cpu:0>, step 1>"
    assert repr(s) == "<Session, closed>"
