"""Transfers that share links: timelines worked out by hand, and what holds of all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import ProblemError
from graphflow.placement import Assignment, Cluster, Problem, Timeline, place, simulate
from graphflow.placement.clusters.port_routes import shared_links
from graphflow.placement.clusters.shared_ports import Port
from graphflow.placement.simulation.simulator import schedule
from tests.placement.instances import problems


def senders(
    sizes: list[float],
    shared: list[float],
    ways: dict[int, list[int]],
    starts: list[float] | None = None,
) -> Problem:
    """Node i on device i sends `sizes[i]` bytes, at up to 1 byte/s, to node k + i on device k + i;
    it passes the shared links `ways[i]`."""
    k = len(sizes)
    compute = np.full((2 * k, 2 * k), np.inf)
    np.fill_diagonal(compute, [*(starts or [0.0] * k), *[0.0] * k])
    routes = [(i, k + i, link) for i, links in ways.items() for link in links]
    return Problem(
        compute=compute,
        edges=np.array([(i, k + i) for i in range(k)]),
        bytes=np.array(sizes),
        contention=True,
        shared=np.array(shared),
        routes=np.array(routes),
    )


def arrivals(problem: Problem) -> list[float]:
    """When each receiver has its tensor."""
    n = problem.nodes
    timeline = simulate(problem, Assignment(np.arange(n), np.arange(n)))
    return [float(timeline.start[n // 2 + i]) for i in range(n // 2)]


def test_two_transfers_through_one_card_take_twice_as_long() -> None:
    assert arrivals(senders([10, 10], [1.0], {0: [0], 1: [0]})) == [20.0, 20.0]


def test_a_card_wide_enough_for_both_slows_neither() -> None:
    assert arrivals(senders([10, 10], [2.0], {0: [0], 1: [0]})) == [10.0, 10.0]


def test_the_shorter_transfer_ends_first_and_leaves_the_card_to_the_longer() -> None:
    # Half a byte a second each until 8 s (4 bytes each); the other 6 bytes then at full speed.
    assert arrivals(senders([4, 10], [1.0], {0: [0], 1: [0]})) == [8.0, 14.0]


def test_a_transfer_that_comes_later_takes_its_half_from_then_on() -> None:
    # 4 bytes alone; from 4 s half each: the first has 6 left, 12 s; the second's last 4 alone.
    assert arrivals(senders([10, 10], [1.0], {0: [0], 1: [0]}, [0.0, 4.0])) == [16.0, 20.0]


def test_what_one_cannot_use_the_others_get() -> None:
    # The first is held to a quarter by a link of its own; the second gets the other three.
    assert arrivals(senders([1, 3], [1.0, 0.25], {0: [0, 1], 1: [0]})) == [4.0, 4.0]


def test_three_of_one_card_and_two_of_another_share_max_min_fairly() -> None:
    # Link 0 (0.9) carries 0, 1, 2 at 0.3 each; link 1 (1.0) leaves 0.7 to transfer 3.
    found = arrivals(senders([3, 3, 3, 7], [0.9, 1.0], {0: [0], 1: [0], 2: [0, 1], 3: [1]}))
    assert found == pytest.approx([10.0, 10.0, 10.0, 10.0])


def test_without_contention_nothing_is_shared() -> None:
    problem = senders([10, 10], [1.0], {0: [0], 1: [0]})
    assert arrivals(replace(problem, contention=False)) == [10.0, 10.0]


def test_a_pair_still_moves_one_tensor_at_a_time() -> None:
    problem = Problem(
        compute=np.array([[0.0, np.inf], [np.inf, 0.0], [np.inf, 0.0]]),
        edges=np.array([[0, 1], [0, 2]]),
        bytes=np.array([10.0, 10.0]),
        latency=np.full((2, 2), 2.0),
        contention=True,
        shared=np.array([1.0]),
        routes=np.array([[0, 1, 0], [1, 0, 0]]),
    )
    timeline = simulate(problem, Assignment(np.array([0, 1, 1]), np.arange(3)))
    assert timeline.transfers["start"].tolist() == [0.0, 10.0]
    assert timeline.transfers["finish"].tolist() == [12.0, 22.0]


def cards(cluster: Cluster, sends: list[tuple[int, int, float]]) -> Timeline:
    """Transfers (source, target, bytes) that start at once between devices of a cluster."""
    from graphflow.placement.calibration.cluster_rates import link_matrices

    latency, bandwidth = link_matrices(cluster)
    d, k = len(cluster.devices), len(sends)
    compute = np.full((2 * k, d), np.inf)
    for i, (source, target, _) in enumerate(sends):
        compute[i, source] = compute[k + i, target] = 0.0
    shared, routes = shared_links(cluster)
    problem = Problem(
        compute=compute,
        edges=np.array([(i, k + i) for i in range(k)]),
        bytes=np.array([size for *_, size in sends]),
        latency=latency[:d, :d],
        bandwidth=bandwidth[:d, :d],
        contention=True,
        shared=shared,
        routes=routes,
    )
    device = [source for source, *_ in sends] + [target for _, target, _ in sends]
    return simulate(problem, Assignment(np.array(device), np.arange(2 * k)))


def test_hosts_share_their_card_and_not_what_is_inside_them() -> None:
    cluster = Cluster.hypothetical("2x4xh100", network="100gbe")
    card, inside = 12.5e9 * 0.9, 450e9 * 0.8
    one = cards(cluster, [(0, 4, card)])
    assert one.makespan == pytest.approx(1.0 + 30e-6)
    two = cards(cluster, [(0, 4, card), (1, 5, card)])
    assert two.makespan == pytest.approx(2.0 + 30e-6)
    both_ways = cards(cluster, [(0, 4, card), (5, 1, card)])
    assert both_ways.makespan == pytest.approx(1.0 + 30e-6)
    within = cards(cluster, [(0, 1, inside), (2, 3, inside), (0, 4, card)])
    assert within.makespan == pytest.approx(1.0 + 30e-6)
    fanned = cards(cluster, [(0, 1, inside), (0, 2, inside)])  # one place on the NVLink switch
    assert fanned.makespan == pytest.approx(2.0 + 3e-6)


def test_a_port_names_ends_that_there_are_and_a_speed() -> None:
    cluster = Cluster.hypothetical("2xh100")
    with pytest.raises(Exception, match="port 'nic': no '/worker:3' here; did you mean"):
        replace(cluster, ports=(Port("nic", ("/worker:3",), None, 1.0),))
    with pytest.raises(Exception, match=r"port 'nic': bandwidth \(bytes/s\) is 0"):
        replace(cluster, ports=(Port("nic", ("/worker:0",), None, 0.0),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared": [0.0]}, r"shared\[0\] = 0 is not above 0"),
        ({"shared": [np.nan]}, r"shared\[0\] = nan is not above 0"),
        ({"routes": [[0, 2, 1]]}, r"routes\[0, 2\] = 1 is not a shared link \(there are 1\)"),
        ({"routes": [[0, 9, 0]]}, r"routes\[0, 1\] = 9 is not a device \(there are 4\)"),
    ],
)
def test_wrong_shared_links_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        replace(senders([1, 1], [1.0], {0: [0], 1: [0]}), **changes)  # type: ignore[arg-type]


@st.composite
def shared_problems(draw: st.DrawFn) -> tuple[Problem, list[int]]:
    problem = draw(problems())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    links = int(rng.integers(1, 4))
    off = [(a, b) for a in range(problem.devices) for b in range(problem.devices) if a != b]
    routes = [(a, b, i) for a, b in off for i in range(links) if rng.random() < 0.5]
    usable = np.where(np.isfinite(problem.bandwidth), problem.bandwidth, 1.0)
    problem = replace(
        problem,
        contention=True,
        shared=rng.uniform(0.2, 2.0, links) * float(np.median(usable)),
        routes=np.array(routes).reshape(-1, 3),
    )
    home: dict[int, int] = {}
    device = []
    for v, group in enumerate(problem.groups.tolist()):
        choice = int(rng.choice(np.flatnonzero(problem.allowed[v])))
        device.append(home.setdefault(group, choice) if group >= 0 else choice)
    return problem, device


@given(shared_problems())
def test_shared_links_carry_no_more_than_they_can_and_delay_only(
    case: tuple[Problem, list[int]],
) -> None:
    problem, device = case
    order = problem.topological
    timeline = simulate(problem, Assignment(np.array(device), order))
    arrived = {(row["tensor"], row["target"]): row["finish"] for row in timeline.transfers}
    for (source, target), tensor in zip(
        problem.edges.tolist(), problem.tensor.tolist(), strict=True
    ):
        come = timeline.finish[source]
        if device[source] != device[target]:
            come = arrived[tensor, device[target]]
        assert timeline.start[target] >= come - 1e-9
    for row in timeline.transfers:
        ends = (int(row["source"]), int(row["target"]))
        least = problem.latency[ends] + row["bytes"] / problem.bandwidth[ends]
        assert row["finish"] - row["start"] >= least * (1 - 1e-9) - 1e-9
    for link, width in enumerate(problem.shared.tolist()):
        users = {(a, b) for a, b, i in problem.routes.tolist() if i == link}
        mine = [r for r in timeline.transfers if (int(r["source"]), int(r["target"])) in users]
        if mine:
            ends = [float(r["finish"] - problem.latency[r["source"], r["target"]]) for r in mine]
            window = max(ends) - min(float(r["start"]) for r in mine)
            assert sum(float(r["bytes"]) for r in mine) <= width * window * (1 + 1e-6) + 1e-6


@given(shared_problems(), st.integers(0, 2**32 - 1))
def test_with_shared_links_too_an_order_gives_the_times_of_its_schedule(
    case: tuple[Problem, list[int]], seed: int
) -> None:
    problem, device = case
    priority = np.random.default_rng(seed).integers(0, 5, problem.nodes).tolist()
    made = schedule(problem, device, priority)
    timeline = simulate(problem, made.assignment())
    assert timeline.start.tolist() == made.start
    assert timeline.makespan == made.makespan


@pytest.mark.parametrize("placer", ["greedy", "local_search", "auto", "heft"])
def test_placers_see_that_a_card_is_shared(placer: str) -> None:
    # Four sources on host 0 feed four long nodes; a wide card makes host 1 worth it, a narrow one
    # does not, for it is shared.
    def make_problem(width: float) -> Problem:
        compute = np.full((8, 8), np.inf)
        compute[:4, :4], compute[4:, :] = 0.1, 10.0
        for i in range(4):
            compute[i, [j for j in range(4) if j != i]] = np.inf
        compute[4:, 1:4] = 40.0
        routes = [(a, b, 0) for a in range(4) for b in range(4, 8)]
        return Problem(
            compute=compute,
            edges=np.array([(i, 4 + i) for i in range(4)]),
            bytes=np.full(4, 5.0),
            contention=True,
            shared=np.array([width]),
            routes=np.array(routes),
        )

    for width in (4.0, 0.1):
        problem = make_problem(width)
        answer = place(problem, placer)
        assert np.array_equal(place(problem, placer).device, answer.device)
    wide, narrow = (
        simulate(make_problem(w), place(make_problem(w), placer)).makespan for w in (4.0, 0.1)
    )
    assert wide == pytest.approx(15.1)
    if placer != "heft":  # which prices transfers without contention, as its paper does
        assert narrow <= 70.0
