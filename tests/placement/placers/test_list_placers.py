"""List schedulers, search and proof: promises on random problems, and the answers of the papers."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.errors import MemoryLimitError, PlacementError, ProblemError
from graphflow.placement import Assignment, Problem, get_placer, place, placer_names, simulate
from graphflow.placement.placers import auto
from graphflow.placement.placers.auto import Auto
from graphflow.placement.placers.construction.evaluator import lower_bound
from graphflow.placement.placers.construction.mixed_integer import solve_relaxation
from graphflow.placement.placers.exact import Exact, _Layers
from graphflow.placement.placers.list_schedule import Flat, forward, insert
from graphflow.placement.placers.local_search import LocalSearch, Searcher
from graphflow.placement.placers.user import User
from tests.placement.instances import problems, topcuoglu, towers

ROOT = Path(__file__).resolve().parents[3]
LISTS = ("heft", "cpop", "peft", "etf", "critical_path")

ARABNEJAD_COMPUTE = [
    [22, 21, 36],
    [22, 18, 18],
    [32, 27, 43],
    [7, 10, 4],
    [29, 27, 35],
    [26, 17, 24],
    [14, 25, 30],
    [29, 23, 36],
    [15, 21, 8],
    [13, 16, 33],
]
ARABNEJAD_EDGES = [
    (0, 1, 17), (0, 2, 31), (0, 3, 29), (0, 4, 13), (0, 5, 7), (1, 7, 3), (1, 8, 30), (2, 6, 16),
    (3, 7, 11), (3, 8, 7), (4, 8, 57), (5, 7, 5), (6, 9, 9), (7, 9, 42), (8, 9, 7),
]  # fmt: skip


def arabnejad() -> Problem:
    """The ten tasks of the PEFT paper (Arabnejad & Barbosa 2014, figure 1): HEFT 133, PEFT 122,
    optimum 113.
    """
    rows = np.array(ARABNEJAD_EDGES)
    return Problem(np.array(ARABNEJAD_COMPUTE, float), rows[:, :2], rows[:, 2].astype(float))


def makespan(problem: Problem, placer: str) -> float:
    return simulate(problem, place(problem, placer)).makespan


def free(problem: Problem) -> Problem:
    """Without contention and without pins and groups, which schedulers need not foresee."""
    return replace(problem, contention=False)


# The papers -----------------------------------------------------------------------------------


def test_heft_gives_what_its_paper_gives() -> None:
    assert makespan(topcuoglu(), "heft") == 80.0
    assert makespan(arabnejad(), "heft") == 133.0


def test_cpop_gives_what_its_paper_gives() -> None:
    assert makespan(topcuoglu(), "cpop") == 86.0


def test_peft_gives_what_its_paper_gives() -> None:
    assert makespan(arabnejad(), "peft") == 122.0


def test_upward_ranks_are_those_of_the_papers() -> None:
    published = [108.0, 77.0, 80.0, 80.0, 69.0, 63.3333, 42.6667, 35.6667, 44.3333, 14.6667]
    assert Flat(topcuoglu()).upward == pytest.approx(published, abs=1e-4)
    published = [169.0, 114.3333, 102.6667, 110.0, 129.6667, 119.3333, 52.6667, 92.0, 42.3333]
    assert Flat(arabnejad()).upward[:9] == pytest.approx(published, abs=1e-4)


def test_insertion_fills_the_gap_a_transfer_leaves() -> None:
    # The chain of nodes 0 and 2 (on different devices: pins) leaves device 1 idle for 5
    # seconds; node 1, of lowest rank, fits in.
    inf = np.inf
    compute = np.array([[2.0, inf], [9.0, 3.0], [inf, 4.0]])
    problem = Problem(compute, np.array([[0, 2]]), np.array([3.0]))
    assignment = place(problem, "heft")
    timeline = simulate(problem, assignment)
    assert assignment.device.tolist() == [0, 1, 1]
    assert timeline.start.tolist() == [0.0, 0.0, 5.0]
    assert timeline.makespan == 9.0


def test_without_transfers_on_equal_devices_the_lists_that_go_forward_never_idle() -> None:
    # Graham: at most 2 - 1/m over the bound.
    rng = np.random.default_rng(3)
    pairs = np.array([(a, b) for a in range(40) for b in range(a + 1, 40) if rng.random() < 0.1])
    seconds = rng.integers(1, 10, (40, 1)).astype(float)
    problem = Problem(np.repeat(seconds, 4, axis=1), pairs, np.zeros(len(pairs)))
    for placer in ("etf", "critical_path"):
        assert makespan(problem, placer) <= (2 - 1 / 4) * lower_bound(problem)


# Promises on random problems ------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(problems(), st.sampled_from(sorted(placer_names())))
def test_every_placer_respects_pins_and_groups_and_the_critical_path_is_a_bound(
    problem: Problem, placer: str
) -> None:
    assignment = place(problem, placer)
    assignment.validate(problem)
    assert simulate(problem, assignment).makespan >= lower_bound(problem) - 1e-9


@settings(deadline=None, max_examples=60)
@given(problems(capacity=True), st.sampled_from(sorted(placer_names())))
def test_every_placer_is_deterministic_and_fits_or_says_what_is_missing(
    problem: Problem, placer: str
) -> None:
    def answer() -> tuple[list[int], list[int]] | str:
        try:
            assignment = place(problem, placer)
        except MemoryLimitError as error:
            assert "missing" in str(error)
            return str(error)
        assert np.all(simulate(problem, assignment).peak_memory <= problem.capacity)
        return assignment.device.tolist(), assignment.order.tolist()

    assert answer() == answer()


@settings(deadline=None)
@given(problems(capacity=True), st.sampled_from(LISTS))
def test_lists_fit_wherever_greedy_does(problem: Problem, placer: str) -> None:
    try:
        place(problem)
    except MemoryLimitError:
        return
    place(problem, placer)


@settings(deadline=None)
@given(problems(capacity=True))
def test_the_order_reproduces_the_schedule(problem: Problem) -> None:
    problem = free(problem)
    flat = Flat(problem)
    for device, order, finish in (
        insert(flat, flat.by_rank(flat.upward)),
        forward(flat, flat.upward, True),
        forward(flat, flat.level, False),
    ):
        timeline = simulate(problem, Assignment(device, order))
        assert np.all(timeline.finish <= finish + 1e-9)


@settings(deadline=None, max_examples=30)
@given(problems(capacity=True, max_nodes=80))
def test_compiled_and_plain_loops_give_the_same_bits(problem: Problem) -> None:
    plain, compiled = Flat(problem, False), Flat(problem, True)
    assert compiled.loops.compiled
    assert not plain.loops.compiled
    assert np.array_equal(plain.upward, compiled.upward)
    assert np.array_equal(plain.downward, compiled.downward)
    for schedule in (
        lambda f: insert(f, f.by_rank(f.upward)),
        lambda f: forward(f, f.upward, True),
        lambda f: forward(f, f.level, False),
    ):
        for one, other in zip(schedule(plain), schedule(compiled), strict=True):
            assert np.array_equal(one, other)


def test_many_gaps_are_searched_and_split() -> None:
    # Chains with transfers leave hundreds of gaps; single nodes fill them.
    rng = np.random.default_rng(0)
    chains, length, fillers = 4, 150, 800
    edges = [(c * length + i, c * length + i + 1) for c in range(chains) for i in range(length - 1)]
    n = chains * length + fillers
    compute = np.full((n, 2), np.inf)
    for v in range(chains * length):
        compute[v, v % 2] = 5.0
    compute[chains * length :] = rng.choice([0.0, 0.5, 1.0], (fillers, 1))
    problem = Problem(compute, np.array(edges), np.full(len(edges), 20.0))
    timeline = simulate(problem, place(problem, "heft"))
    alone = simulate(
        Problem(compute[: chains * length], np.array(edges), np.full(len(edges), 20.0)),
        place(
            Problem(compute[: chains * length], np.array(edges), np.full(len(edges), 20.0)), "heft"
        ),
    )
    assert timeline.makespan <= alone.makespan + 1e-9


def test_no_nodes_are_no_trouble() -> None:
    problem = Problem(np.zeros((0, 2)), np.zeros((0, 2), int), np.zeros(0))
    for placer in placer_names():
        assert len(place(problem, placer).device) == 0, placer


def test_a_team_goes_where_all_of_it_finishes_first() -> None:
    problem = Problem(
        np.array([[1.0, 2.0], [9.0, 2.0]]),
        np.array([[0, 1]]),
        np.array([1.0]),
        groups=np.array([3, 3]),
    )
    for placer in LISTS:
        assert len(set(place(problem, placer).device.tolist())) == 1
    assert place(problem, "heft").device.tolist() == [1, 1]


def test_memory_splits_what_the_lists_would_keep_together() -> None:
    problem = Problem(
        np.ones((2, 2)),
        np.array([[0, 1]]),
        np.array([100.0]),
        memory=np.array([6.0, 6.0]),
        capacity=np.array([10.0, 10.0]),
    )
    for placer in LISTS:
        assert sorted(place(problem, placer).device.tolist()) == [0, 1], placer


def test_placers_have_their_names() -> None:
    assert set(LISTS) <= set(placer_names())
    for name in LISTS:
        assert get_placer(name) == type(get_placer(name))()


# Search ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("placer", ["local_search", "auto"])
def test_search_finds_the_optimum_of_both_papers(placer: str) -> None:
    assert makespan(topcuoglu(), placer) == 73.0
    assert makespan(arabnejad(), placer) == 113.0


def pack_devices(devices: int, seed: int) -> tuple[Problem, float]:
    """Equal devices, free transfers, and an optimum that is known: every device is cut into nodes
    without idling, and only nodes that follow each other in time are joined by edges.
    """
    rng = np.random.default_rng(seed)
    length, pieces = 60, 12
    begins, ends = [], []
    for _ in range(devices):
        cuts = np.sort(rng.choice(np.arange(1, length), pieces - 1, replace=False))
        begins += [0, *cuts.tolist()]
        ends += [*cuts.tolist(), length]
    n = len(begins)
    shuffled = rng.permutation(n)
    begin, end = np.array(begins)[shuffled], np.array(ends)[shuffled]
    edges = np.array(
        [(a, b) for a in range(n) for b in range(n) if end[a] <= begin[b] and rng.random() < 0.05]
    )
    seconds = (end - begin).astype(float)[:, None]
    return Problem(np.repeat(seconds, devices, axis=1), edges, np.zeros(len(edges))), float(length)


def test_auto_is_within_half_a_percent_of_known_optima_on_equal_devices() -> None:
    found = []
    for devices in (2, 4, 8):
        for seed in range(3):
            problem, optimum = pack_devices(devices, seed)
            found.append(makespan(problem, "auto") / optimum)
    assert min(found) >= 1.0
    assert np.mean(found) <= 1.005


@settings(deadline=None, max_examples=25)
@given(problems(capacity=True, max_nodes=20))
def test_auto_is_never_predicted_slower_than_any_other(problem: Problem) -> None:
    spans = []
    for placer in set(placer_names()) - {"auto", "exact", "local_search"}:
        try:
            spans.append(makespan(problem, placer))
        except MemoryLimitError:
            continue
    if spans:
        assert simulate(problem, place(problem, Auto(100_000))).makespan <= min(spans) * (1 + 1e-9)


def test_a_large_problem_takes_the_quick_way_and_still_beats_the_baselines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "THOROUGH", 0)
    rng = np.random.default_rng(5)
    n = 300
    edges = np.array([(max(0, v - 1 - int(rng.integers(20))), v) for v in range(1, n)])
    for size in (1.0, 1000.0):  # with hopeless links one device is best
        problem = Problem(rng.uniform(1, 9, (n, 4)), edges, np.full(n - 1, size))
        others = min(makespan(problem, p) for p in ("single", "round_robin", "heft"))
        assert makespan(problem, "auto") <= others
    tight = replace(problem, memory=np.ones(n), capacity=np.full(4, 80.0))
    assert np.bincount(place(tight, "auto").device).max() <= 80


def test_auto_splits_the_towers_as_well_as_greedy() -> None:
    problem, _ = towers()
    assert makespan(problem, "auto") <= makespan(problem, "greedy") * (1 + 1e-9)


@settings(deadline=None, max_examples=15)
@given(problems(capacity=True, max_nodes=30), st.booleans())
def test_the_compiled_search_makes_the_same_moves(problem: Problem, free: bool) -> None:
    flat = Flat(problem, False)
    start = insert(flat, flat.by_rank(flat.upward))
    made = [
        Searcher(problem, 0, compiled).run(start.device, start.order, 200, 7, 0.0, free)
        for compiled in (False, True)
    ]
    for one, other in zip(*made, strict=True):
        assert np.array_equal(one, other)


@settings(deadline=None, max_examples=25)
@given(problems(max_nodes=20))
def test_the_quick_evaluation_agrees_with_the_simulator(problem: Problem) -> None:
    problem = free(problem)
    assignment = place(problem, "heft")
    quick = Searcher(problem, 0).makespan(assignment.device, assignment.order)
    assert quick == pytest.approx(simulate(problem, assignment).makespan, rel=1e-12)


def test_more_evaluations_never_hurt_and_seeds_repeat() -> None:
    problem = arabnejad()
    spans = [
        simulate(problem, place(problem, LocalSearch(budget, seed=3))).makespan
        for budget in (0, 200, 20_000)
    ]
    assert spans == sorted(spans, reverse=True)
    one, other = (place(problem, LocalSearch(500, seed=9)) for _ in range(2))
    assert np.array_equal(one.device, other.device)
    assert np.array_equal(one.order, other.order)


@pytest.mark.parametrize("settings_", [{"budget": -1}, {"seed": 0.5}, {"restarts": 0}])
def test_search_refuses_settings_without_sense(settings_: dict[str, int]) -> None:
    with pytest.raises(PlacementError, match=next(iter(settings_))):
        LocalSearch(**settings_)
    if "restarts" not in settings_:
        with pytest.raises(PlacementError, match=next(iter(settings_))):
            Auto(**settings_)


# Proof ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "optimum"), [(topcuoglu(), 73.0), (arabnejad(), 113.0)])
def test_exact_proves_the_optimum_of_both_papers(problem: Problem, optimum: float) -> None:
    proof = Exact().prove(problem)
    assert (proof.makespan, proof.bound, proof.optimal, proof.gap) == (optimum, optimum, True, 0.0)
    assert makespan(problem, "exact") == optimum
    alone = _Layers(problem, 1.2 * optimum)  # without being told where to stop
    assert alone.run(100_000) == optimum
    assert len(alone.order) == problem.nodes


def best_of_all(problem: Problem) -> float:
    """The least makespan over all device maps and orders."""
    best = np.inf
    for order in permutations(range(problem.nodes)):
        place_of = {v: i for i, v in enumerate(order)}
        if any(place_of[a] > place_of[b] for a, b in problem.edges.tolist()):
            continue
        for device in product(range(problem.devices), repeat=problem.nodes):
            assignment = Assignment(np.array(device, dtype=np.int64), np.array(order))
            try:
                timeline = simulate(problem, assignment)
            except ProblemError:
                continue
            if np.all(timeline.peak_memory <= problem.capacity):
                best = min(best, timeline.makespan)
    return float(best)


@settings(deadline=None, max_examples=40)
@given(problems(max_nodes=4))
def test_exact_agrees_with_trying_everything(problem: Problem) -> None:
    problem = free(problem)
    best = best_of_all(problem)
    assert simulate(problem, place(problem, "exact")).makespan == pytest.approx(best)
    layers = _Layers(problem, 1.5 * best + 1.0)
    assert layers.run(10_000) == pytest.approx(best)


@settings(deadline=None, max_examples=25)
@given(problems(max_nodes=4), st.booleans())
def test_no_program_says_more_than_the_optimum(problem: Problem, ordered: bool) -> None:
    problem = free(problem)
    best = best_of_all(problem)
    found = solve_relaxation(problem, best * 1.5 + 1.0, ordered)
    assert found is not None
    assert found.bound <= best * (1 + 1e-9)
    if ordered:
        assert found.bound >= best * (1 - 1e-6) - 1e-9


def test_independent_nodes_are_proven_by_who_runs_what() -> None:
    rng = np.random.default_rng(2)
    problem = Problem(rng.uniform(5, 20, (18, 3)), np.zeros((0, 2), int), np.zeros(0))
    proof = Exact(states=0).prove(problem)
    assert proof.optimal
    assert proof.by == "HiGHS"


@settings(deadline=None, max_examples=25)
@given(problems(capacity=True, max_nodes=4))
def test_the_bound_holds_under_contention_and_little_memory(problem: Problem) -> None:
    try:
        proof = Exact().prove(problem)
    except MemoryLimitError:
        return
    best = best_of_all(problem)
    assert proof.bound <= best * (1 + 1e-9)
    assert proof.makespan >= best * (1 - 1e-9)


def test_a_search_cut_short_says_how_far_it_may_be_off() -> None:
    rng = np.random.default_rng(1)
    pairs = np.array([(a, b) for a in range(20) for b in range(a + 1, 20) if rng.random() < 0.15])
    problem = Problem(rng.uniform(1, 9, (20, 3)), pairs, rng.uniform(1, 20, len(pairs)))
    proof = Exact(states=400).prove(problem)
    assert lower_bound(problem) * (1 - 1e-9) <= proof.bound <= proof.makespan
    assert proof.gap == pytest.approx(proof.makespan / proof.bound - 1)
    with pytest.raises(PlacementError, match="states"):
        Exact(states=-1)


# The user's pins ------------------------------------------------------------------------------


def test_the_user_decides_and_another_placer_does_the_rest() -> None:
    assignment = place(topcuoglu(), User({0: 1, 9: 0}, rest="heft"))
    assert assignment.device[[0, 9]].tolist() == [1, 0]
    assert set(assignment.device.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("pins", "message"), [({0: 3}, "3 devices"), ({10: 0}, "10 nodes"), ({-1: 0}, "10 nodes")]
)
def test_pins_to_nowhere_are_refused(pins: dict[int, int], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        place(topcuoglu(), User(pins))


def test_pins_that_contradict_are_refused() -> None:
    compute = np.array([[1.0, np.inf], [1.0, 1.0], [1.0, 1.0]])
    problem = Problem(compute, np.zeros((0, 2), int), np.zeros(0), groups=np.array([-1, 2, 2]))
    with pytest.raises(PlacementError, match=r"node 0 is pinned to device 1.*one of \[0\]"):
        place(problem, User({0: 1}))
    with pytest.raises(ProblemError, match="group 2"):
        place(problem, User({1: 0, 2: 1}))


# A limit on time ------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, 0.05, 60.0])
@pytest.mark.parametrize("contention", [False, True])
def test_auto_against_a_clock_marks_its_answer_and_still_keeps_its_promises(
    seconds: float, contention: bool
) -> None:
    problem = replace(topcuoglu(), contention=contention)
    found = place(problem, Auto(seconds=seconds))
    assert not found.reproducible
    baselines = [simulate(problem, place(problem, name)).makespan for name in ("single", "heft")]
    assert simulate(problem, found).makespan <= min(baselines) * (1 + 1e-9)
    if seconds == 60.0:
        assert (
            simulate(problem, found).makespan == simulate(problem, place(problem, Auto())).makespan
        )


def test_auto_without_a_clock_is_reproducible() -> None:
    first, second = place(topcuoglu(), "auto"), place(topcuoglu(), "auto")
    assert first.reproducible and second.reproducible
    assert np.array_equal(first.device, second.device) and np.array_equal(first.order, second.order)


def test_what_is_left_of_the_time_sizes_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searcher = Searcher(topcuoglu(), 100, compiled=False)
    clock = iter([0.0, 3.0, 3.0, 3.0, 11.0])  # three probes take three seconds
    monkeypatch.setattr("graphflow.placement.placers.local_search.monotonic", lambda: next(clock))
    assert searcher.affordable(1000, deadline=13.0) == 8  # four fifths of ten seconds
    assert searcher.affordable(5, deadline=13.0) == 5
    assert searcher.affordable(1000, deadline=11.0) == 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "1", True])
def test_a_limit_on_time_without_sense_is_refused(seconds: object) -> None:
    with pytest.raises(PlacementError, match="seconds must be a finite number >= 0"):
        Auto(seconds=seconds)  # type: ignore[arg-type]
