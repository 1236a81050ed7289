"""Prices of windows of turns: parties, messages, and what crosses between devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError
from graphflow.frontend.concurrent_loops import ConcurrentLoops, Party
from graphflow.ir.op import Tensor
from graphflow.ops.control_flow.turn_rules import TurnRules
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import Device, Link, Worker
from graphflow.placement.simulation.turns import TurnSeconds, simulate_window
from tests.ops.communication.servers import server_and_workers, window_rules

SIZE = 1000
START = np.linspace(0.1, 1.0, SIZE)
FLOPS, LATENCY, BANDWIDTH = 1e6, 1e-4, 1e7  # of 64 bits
PINS = ("/worker:0", "/worker:1", "/worker:2")


def build_cluster(count: int = 3) -> Cluster:
    """Workers whose speeds and links are given; only flops and messages take time."""
    workers = tuple(
        Worker(i, None, (Device(f"/worker:{i}/cpu:0", "cpu", 1 << 30, 1, 2 * FLOPS, 1e15, 0.0),))
        for i in range(count)
    )
    names = [worker.devices[0].name for worker in workers]
    links = tuple(Link(a, b, LATENCY, BANDWIDTH) for a in names for b in names if a != b)
    return Cluster(workers, links, kind="hypothetical")


def plan(turns: Sequence[int], rules: TurnRules | None = None, **options: Any) -> gf.Plan:
    weights, order, _ = server_and_workers(START, turns, pins=PINS[: len(turns) + 1], rules=rules)
    return gf.plan([weights, order], build_cluster(), **options)


def seconds_of_parts(workers: int) -> TurnSeconds:
    """By hand: a turn multiplies twice, an update subtracts; masks and counts take a flop each."""
    moving = np.full((workers, 1), 8 * SIZE / BANDWIDTH)
    turn = np.full(workers, 2 * SIZE / FLOPS)
    update = np.full(1, SIZE / FLOPS)
    return TurnSeconds(turn, update, moving, moving.T, np.full((workers, 1), LATENCY))


@pytest.mark.parametrize("consistency", ["async", "bsp", "pool", "ssp"])
def test_a_window_takes_what_its_turns_and_messages_take(consistency: Any) -> None:
    bound = 1 if consistency == "ssp" else None
    rules = window_rules([6, 6], consistency=consistency, staleness=bound)
    made = plan([6, 6], rules)
    (window,) = made.windows
    expected = simulate_window(rules, seconds_of_parts(2))
    assert window.seconds == pytest.approx(expected.seconds, rel=0.02)
    assert made.makespan == pytest.approx(window.seconds, rel=0.05)
    for party, seconds in expected.busy.items():
        device = f"/worker:{party}/cpu:0"
        assert window.busy[device] == pytest.approx(seconds, rel=0.02)
    letters = [bar.name.rpartition("/")[2][0] for bar in window.bars]
    assert [letters.count(letter) for letter in "TAE"] == [12, 12, 12 + 12]


def test_bytes_between_devices_are_those_of_the_messages() -> None:
    made = plan([3, 5])
    links = {(link.source, link.target): link for link in made.windows[0].links}
    one = 8 * SIZE
    for worker, turns in ((1, 3), (2, 5)):
        there, home = f"/worker:{worker}/cpu:0", "/worker:0/cpu:0"
        assert (links[there, home].transfers, links[there, home].bytes) == (turns, turns * one)
        pulls = links[home, there]
        assert (pulls.transfers, pulls.bytes) == (turns, turns * one)
        seconds = pulls.bytes / BANDWIDTH + pulls.transfers * LATENCY
        assert pulls.seconds == pytest.approx(seconds)
    told = {(use.source, use.target): use.bytes for use in made.report().links}
    assert told["/worker:2/cpu:0", "/worker:0/cpu:0"] == 5 * one
    assert sum(row.bytes for row in made.moved if "/client" not in row.target) == 16 * one


def echo(pins: Sequence[str], rules: TurnRules | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A party sends four numbers of a variable; another one sends their double back."""
    loops = ConcurrentLoops()
    there, back = loops.channel((SIZE,), "float64"), loops.channel((SIZE,), "float64")
    with gf.device(pins[1]):
        scale = gf.variable(np.full(SIZE, 2.0), name="scale")
    with gf.device(pins[0]):
        base = gf.variable(START, name="base")

    def ask(party: Party) -> Any:
        def turn(x: Any, _: Any) -> Any:
            party.send(there, x)
            return party.receive(back), None

        return party.scan(turn, base, length=4)[0]

    def answer(party: Party) -> Any:
        def turn(x: Any, _: Any) -> Any:
            y = party.receive(there) * scale
            party.send(back, y)
            return y, None

        return party.scan(turn, scale, length=4)[0]

    loops.add(ask, pins[0])
    loops.add(answer, pins[1])
    asked, answered = loops.build(rules=rules)
    return asked, answered, gf.assign(scale, answered)


def test_operands_and_results_stay_with_their_parties() -> None:
    _, _, update = echo(PINS)
    made = gf.plan(update, build_cluster(2))
    assert made.placement["scale"] == "/worker:1/cpu:0"
    # the second party reads and makes what lives with it
    assert [row.target for row in made.transfers] == ["/client"]
    assert sum(row.bytes for row in made.moved) == (8 + 1) * 8 * SIZE


def test_parties_without_rules_take_as_long_as_the_slowest() -> None:
    asked, answered, _ = echo(PINS)
    (window,) = gf.plan([asked, answered], build_cluster()).windows
    work = 4 * (SIZE / FLOPS + 8 * SIZE / BANDWIDTH + LATENCY)
    assert window.seconds == pytest.approx(work, rel=0.01)
    assert not window.bars and window.text == "2 parties"


def test_parties_on_one_device_run_one_at_a_time() -> None:
    pins = ["/worker:0"] * 3
    weights, _, _ = server_and_workers(START, [3, 5], pins=pins)
    (window,) = gf.plan(weights, build_cluster(1)).windows
    assert window.seconds == pytest.approx(8 * 3 * SIZE / FLOPS, rel=0.02)
    assert not window.links


def test_jitter_tells_the_median_and_nine_of_ten() -> None:
    rules = window_rules([32, 32], consistency="bsp", aggregate=2)
    plain = plan([32, 32], rules).windows[0]
    jitter = gf.parallel.Jitter(share=0.1, factor=5, draws=20)
    shaken = plan([32, 32], rules, jitter=jitter).windows[0]
    draws = sorted(
        simulate_window(rules, seconds_of_parts(2), scale).seconds for scale in jitter.scales(rules)
    )
    assert shaken.high is not None and plain.high is None
    assert shaken.seconds == pytest.approx(draws[9], rel=0.02)
    assert shaken.high == pytest.approx(draws[17], rel=0.02)
    assert plain.seconds < shaken.seconds < shaken.high
    again = plan([32, 32], rules, jitter=jitter).windows[0]
    assert again.seconds == shaken.seconds


@pytest.mark.parametrize("wrong", [{"share": 1.5}, {"factor": 0.0}, {"draws": 0}, {"seed": -1}])
def test_bad_jitter_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        gf.parallel.Jitter(**wrong)


def test_a_saved_plan_keeps_its_window(tmp_path: Path) -> None:
    made = plan([3, 5], jitter=gf.parallel.Jitter(draws=3))
    made.save(tmp_path / "plan.json")
    assert gf.Plan.load(tmp_path / "plan.json").windows == made.windows


def test_text_and_drawings_show_turns_updates_and_messages(tmp_path: Path) -> None:
    made = plan([3, 5])
    text = str(made)
    assert "window concurrent: async of 2 workers, 3 to 5 turns each" in text
    rows = [line.split()[2] for line in text.splitlines() if " predicted " in line]
    assert [set(row) - {"."} for row in rows] == [{"A", "E"}, {"T", "E"}, {"T", "E"}]
    svg = made._repr_html_()
    for task in ("T0", "T4", "A7", "E2"):
        assert f">{task}<" in svg or f"<title>{task}:" in svg
    made.save(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "Window of turns" in page and "T: turn of a replica or worker" in page
