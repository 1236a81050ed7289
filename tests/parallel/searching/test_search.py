"""The search over strategies: what it tries, what it chooses, and that the choice trains."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import (
    ArgumentError,
    DifferentiationError,
    MemoryLimitError,
    PlanError,
    ShardingError,
    VariableError,
)
from graphflow.ir.graph import Graph
from graphflow.ir.op import Tensor
from graphflow.parallel import Pipeline, auto
from graphflow.parallel.searching import strategy_search
from graphflow.parallel.searching.candidates import StrategyCandidate, candidates, tensor_rules
from graphflow.parallel.searching.measurement import measure_best
from graphflow.parallel.searching.search_result import SAME_TIME, CandidateResult, Search
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.cost_model.trace_observations import trace_observations
from graphflow.planning.feedback.node_observations import observe_steps

X = np.random.default_rng(1).normal(size=(64, 16)).astype("float32")


USERS = {
    "NODE_BUDGET": strategy_search.NODE_BUDGET,
    "HOPELESS_BUDGET": strategy_search.HOPELESS_BUDGET,
}


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer strategies are written than for users: of those that cannot win, hardly any."""
    for name, count in USERS.items():
        monkeypatch.setattr(strategy_search, name, count // 4)


@pytest.fixture
def as_for_users(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as for users."""
    for name, count in USERS.items():
        monkeypatch.setattr(strategy_search, name, count)


def network(width: int = 16, layers: int = 4) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    x = gf.placeholder("float32", ("B", width), name="x")
    h = x
    for i in range(layers):
        with gf.name_scope(f"layer{i}"):
            w = gf.variable(rng.normal(size=(width, width)).astype("float32") / 8, name=f"w{i}")
            h = gf.tanh(h @ w + gf.variable(np.zeros(width, "float32"), name=f"b{i}"))
    return x, gf.mean(gf.square(h - x))


def test_layers_are_cut_by_columns_and_rows_in_turns() -> None:
    _, loss = network()
    named = {t.name.rpartition("/")[2]: axes for t, axes in tensor_rules(loss).items()}
    assert named == {
        "w0": (None, "model"), "b0": ("model",), "w1": ("model", None),
        "w2": (None, "model"), "b2": ("model",), "w3": ("model", None),
    }  # fmt: skip


TWO, FAST = (
    gf.Cluster.hypothetical(
        n, flops=1e12, bandwidth=1e11, memory=1 << 30, launch=1e-6, link_latency=1e-6,
        link_bandwidth=1e12,
    )
    for n in (2, 4)
)  # fmt: skip


@pytest.mark.slow
def test_every_mesh_is_tried_and_the_best_comes_first(
    as_for_users: None, capsys: pytest.CaptureFixture[str]
) -> None:
    x, loss = network(256)
    found = auto(loss, FAST, shapes={x: (4096, 256)})
    names = [each.name for each in found.tried]
    for part in ("one device", "data 4", "model 4", "data 2 × model 2", "data 2 × 2 stages",
                 "model 2 × 2 stages", "4 stages 1f1b of 8", "4 stages zb-h1 of 4",
                 "data 3 on 3 of 4", "2 stages 1f1b of 2 on 2 of 4"):  # fmt: skip
        assert any(name.startswith(part) for name in names), part
    seconds = [each.seconds for each in found.tried if each.simulated]
    assert len(seconds) > 3 and seconds == sorted(seconds)
    assert found.best.name != "one device"  # links are free: four devices are faster than one
    told = capsys.readouterr().out
    assert f"chosen: {found.best.name}" in told and "times as fast as" in told


def test_what_does_not_fit_is_said_and_recomputation_is_tried() -> None:
    x, loss = network(64, 2)
    shapes = {x: (2048, 64)}
    free = auto(loss, TWO, shapes=shapes, quiet=True)
    pipes = {t.name: t.memory for t in free.tried if isinstance(t.strategy, Pipeline) and t.memory}
    name = min(pipes, key=pipes.__getitem__)
    tight = auto(loss, TWO, shapes=shapes, quiet=True, memory=pipes[name] - 1)
    again = {t.name: t for t in tight.tried}
    assert again[name].why_not.startswith("memory")
    assert f"{name}, recomputing" in again
    assert tight.best.memory < pipes[name]


def test_where_replicas_do_not_fit_they_share_the_state() -> None:
    """Adam's slots of a wide network are two thirds of what it takes; replicas halve them."""
    x, loss = network(512, 2)
    shapes = {x: (64, 512)}
    every = {t.name: t for t in auto(loss, TWO, shapes=shapes, quiet=True).tried}
    tight = auto(loss, TWO, shapes=shapes, quiet=True, memory=every["data 2"].memory - 1)
    again = {t.name: t for t in tight.tried}
    assert again["data 2"].why_not.startswith("memory")
    assert again["data 2, state shared"].strategy.shard_state
    assert 0 < again["data 2, state shared"].memory < every["data 2"].memory


def blocks(count: int = 2) -> Tensor:
    """Transformer blocks, whose activations are most of what they take."""
    gf.random.seed(0)
    h = x = gf.placeholder("float32", (4, 96, 16), name="x")
    for i in range(count):
        h = gf.nn.TransformerBlock(16, 2, name=f"block{i}")(h, causal=True)
    return gf.mean(gf.square(h - x))


@pytest.mark.parametrize("name, more", [
    ("model 2 on 2 of 4", "sequence cut"), ("data 2 × model 2", "state shared"),
])  # fmt: skip
def test_where_cut_layers_do_not_fit_the_rest_is_cut_too(
    name: str, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is between them along the sequence; slots in shares of replicas."""
    made = strategy_search.candidates
    monkeypatch.setattr(
        strategy_search, "candidates", lambda *given: [c for c in made(*given) if c.name == name]
    )
    loss = blocks() if more == "sequence cut" else network(512, 2)[1]
    shapes = {t.outputs[0]: (64, 512) for t in gf.Graph([loss]).placeholders if t.name == "x"}
    shapes = {t: shape for t, shape in shapes.items() if t.ndim == 2}
    (whole,) = auto(loss, FAST, shapes=shapes, quiet=True).tried
    tight = auto(loss, FAST, shapes=shapes, quiet=True, memory=whole.memory - 1)
    again = {t.name: t for t in tight.tried}
    assert again[name].why_not.startswith("memory")
    found = again[f"{name}, {more}"]
    assert found is tight.best and 0 < found.memory < whole.memory


def test_what_takes_as_much_as_what_was_refused_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a refusal says what a strategy takes in its own order: recomputing takes less."""
    tried, made = strategy_search.StrategySearch._simulate, strategy_search.candidates
    found: dict[str, CandidateResult] = {}

    def record_candidate(self: Any, candidate: StrategyCandidate) -> CandidateResult:
        found[candidate.name] = tried(self, candidate)
        return found[candidate.name]

    monkeypatch.setattr(strategy_search.StrategySearch, "_simulate", record_candidate)
    monkeypatch.setattr(
        strategy_search, "candidates", lambda *given: [c for c in made(*given) if "1f1b" in c.name]
    )
    x, loss = network(64, 4)
    with pytest.raises(MemoryLimitError, match=r"1f1b of 2 +memory: as 2 stages 1f1b of 8, "):
        auto(loss, TWO, shapes={x: (2048, 64)}, quiet=True, memory=1_000_000)
    assert list(found) == ["2 stages 1f1b of 8", "2 stages 1f1b of 8, recomputing"]
    first, again = (each.memory for each in found.values())
    assert 1_000_000 < again < first


def test_what_backward_passes_read_is_counted_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One device would hold all variables, slots and gradients (103,000 bytes), and no two of them
    what is kept of the batch beside these."""
    monkeypatch.setattr(strategy_search.StrategySearch, "_simulate", None)
    with pytest.raises(MemoryLimitError, match=r"data 2, state shared +memory: at least "):
        auto(blocks(), TWO, quiet=True, memory=120_000)


def test_of_the_same_stages_on_fewer_devices_each_takes_as_much() -> None:
    """Of fewer stages not: where layers do not divide evenly, some have more than with fewer."""
    many = StrategyCandidate(tuple("abcd"), data=2, stages=2, schedule="1f1b", microbatches=4, of=4)
    few = replace(many, devices=("a", "b"), data=1)
    assert few.takes_as_much_as(many) and not many.takes_as_much_as(few)
    assert not replace(few, recompute=True).takes_as_much_as(many)
    assert not few.takes_as_much_as(replace(many, data=1, stages=4))


def test_initial_values_are_not_made_to_look_for_a_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = gf.placeholder("float32", (64, 16))
    w = gf.variable(gf.init.normal((16, 32)), name="w")
    v = gf.variable(gf.init.normal((32, 16)), name="v")
    made = []
    draw = type(w.node.attrs["initial"]).__call__
    monkeypatch.setattr(
        type(w.node.attrs["initial"]), "__call__", lambda self: made.append(self) or draw(self)
    )
    loss = gf.mean(gf.square(x @ w @ v))
    found = {t.name: t for t in auto(loss, TWO, quiet=True).tried}
    assert found["model 2"].simulated and not made
    strategy = gf.parallel.Shard({"model": 2}, {w: (None, "model"), v: ("model",)})
    train = gf.optim.SGD(0.0).minimize(loss, strategy=strategy)
    with gf.Session(gf.Cluster.here(("cpu:0", "cpu:1"))) as s:
        s.run([train], {x: X})
        assert len(made) == 2  # one for both parts
        np.testing.assert_array_equal(s.get(w), draw(w.node.attrs["initial"]))


def test_what_fits_to_the_byte_is_not_refused() -> None:
    """Liveness alone counts more than the runtime takes, which computes in place."""

    def try_candidates(memory: int) -> dict[str, CandidateResult]:
        x, loss = network(64, 2)
        there = gf.Cluster.hypothetical(
            2, flops=1e12, bandwidth=1e11, memory=memory, launch=1e-6, link_latency=1e-6,
            link_bandwidth=1e12,
        )  # fmt: skip
        found = auto(loss, there, shapes={x: (2048, 64)}, quiet=True)
        assert "inf" not in str(found)  # what one device cannot hold, nothing is faster than
        return {each.name: each for each in found.tried}

    pipes = {
        n: t.memory for n, t in try_candidates(1 << 30).items() if isinstance(t.strategy, Pipeline)
    }
    name, peak = max(pipes.items(), key=lambda pair: pair[1])
    assert try_candidates(peak)[name].why_not == ""
    assert try_candidates(peak - 1)[name].why_not.startswith("memory: ")


def build_tied_table() -> Tensor:
    """A table that is looked into and multiplied with, and a bias that is large."""
    ids = gf.placeholder("int64", (64,), name="ids")
    table = gf.variable(gf.init.normal((300, 32)), name="table")
    h = gf.nn.embedding(ids, table) @ gf.variable(gf.init.normal((32, 32)), name="w")
    wide = h @ gf.permute_dims(table, (1, 0)) + gf.variable(
        np.zeros((64, 300), "float32"), name="wide"
    )
    return gf.mean(gf.nn.cross_entropy(wide, ids))


@pytest.mark.every(3)
@pytest.mark.parametrize("make, optimizer", [
    (lambda: network(128, 2)[1], gf.optim.Adam(1e-3)), (lambda: blocks(1), gf.optim.SGD(0.1)),
    (build_tied_table, gf.optim.Adam(1e-3)), (build_tied_table, gf.optim.SGD(0.1)),
])  # fmt: skip
def test_what_is_refused_unwritten_would_not_have_fitted(
    make: Callable[[], Tensor], optimizer: gf.optim.Optimizer
) -> None:
    loss = make()
    free = [n.outputs[0] for n in gf.Graph([loss]).placeholders if not n.specs[0].is_concrete]
    shapes = dict.fromkeys(free, (64, 128))
    made = strategy_search.StrategySearch(loss, TWO, shapes, optimizer, None, False)
    bounds = 0
    for each in candidates(made.fastest, made._rules):
        leaner: StrategyCandidate | None = each
        while leaner is not None:
            found = made._simulate(leaner)
            if found.memory:
                assert made._bounds(leaner).min_memory <= found.memory, leaner.name
                bounds += 1
            leaner = leaner.leaner()
    assert bounds > 5


def test_the_choice_is_a_strategy() -> None:
    def losses(strategy: object) -> list[float]:
        x, loss = network()
        train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            return [float(s.run([loss, train], {x: X})[0]) for _ in range(3)]

    x, loss = network()
    for cluster, memory in ((gf.Cluster.here(), None), (TWO, None)):
        found = auto(loss, cluster, shapes={x: X.shape}, memory=memory, quiet=True)
        np.testing.assert_allclose(losses(found), losses(None), rtol=1e-5)


def test_the_choice_has_a_report_and_goes_into_no_product() -> None:
    x, loss = network()
    found = auto(loss, TWO, shapes={x: X.shape}, quiet=True)
    assert repr(found) == f"<auto: {found.best.name}, the best of {len(found.tried)}>"
    train = gf.optim.SGD(0.1).minimize(loss, strategy=found)
    assert str(found.report([loss, train], TWO)).startswith("mesh ")
    for product in (lambda: found * 2, lambda: gf.parallel.Data(2) * found):
        with pytest.raises(ShardingError, match="auto has tried products, too"):
            product()


def test_of_what_cannot_be_told_apart_the_simplest_is_chosen() -> None:
    """Fewer devices, then fewer bytes; what is measured and what is not are not compared."""

    def choose(*tried: CandidateResult) -> tuple[str, str]:
        found = Search(tuple(sorted(tried, key=lambda t: t.key)), "/cpu:0")
        return found.best.name, str(found).splitlines()[-1]

    one = CandidateResult("one device", None, 1.01, 9)
    data = CandidateResult("data 2", None, 1.0, 9, devices=2, sent=4000)
    model = CandidateResult("model 2", None, 1.02, 9, devices=2, sent=1000)
    assert choose(one, data, model) == (
        "one device",
        "chosen: one device; data 2 would be 1.010 times as fast, less than can be told apart, for "
        "2 devices instead of 1",
    )
    assert choose(data, model) == (
        "model 2",
        "chosen: model 2; data 2 would be 1.020 times as fast, less than can be told apart, for "
        "3.91 KiB sent a step instead of 1000 B",
    )
    assert choose(data, replace(one, seconds=1.04))[0] == "data 2"
    assert choose(data, replace(one, why_not="memory"))[0] == "data 2"
    assert choose(replace(data, measured=1.5), replace(model, measured=1.52), one)[0] == "model 2"


# What is not simulated ----------------------------------------------------------------------------


@pytest.mark.slow  # simulates every candidate
@pytest.mark.usefixtures("as_for_users")
def test_what_is_not_simulated_would_not_have_been_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, loss = network(256)
    some = auto(loss, FAST, shapes={x: (4096, 256)}, quiet=True)
    monkeypatch.setattr(strategy_search, "NODE_BUDGET", 1 << 40)
    monkeypatch.setattr("graphflow.parallel.searching.cost_bounds.SLACK", 0.0)
    every = auto(loss, FAST, shapes={x: (4096, 256)}, quiet=True)
    assert all(each.simulated or each.why_not for each in every.tried)
    assert not all(each.simulated for each in some.tried)
    assert some.best.seconds == pytest.approx(every.best.seconds, rel=0.02)
    assert {each.name for each in some.tried} == {each.name for each in every.tried}


def test_closed_forms_are_near_what_the_simulator_says() -> None:
    x, loss = network(256)
    shapes = {x: (1 << 14, 256)}
    known = strategy_search.StrategySearch(loss, TWO, shapes, gf.optim.Adam(), None, False)
    for each in strategy_search.candidates(TWO.devices, tensor_rules(loss)):
        rough, exact = known._bounds(each), known._simulate(each).seconds
        assert rough.min_seconds <= exact * 1.001 and exact / 2 < rough.seconds < exact * 2, (
            each.name
        )


# Noise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_a_busy_machine_changes_what_nodes_took_and_not_the_choice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes take otherwise than predicted; three steps of ten have the processor taken away from
    each node, for up to three hundred times as long as it computes."""

    def search_with(noise: bool) -> Search:
        random = np.random.default_rng(seed)
        truth = np.random.default_rng(7)
        ratios: dict[str, float] = {}

        def replay_steps(learned: TraceCorrections, cluster: gf.Cluster, _: object, made: object,
                   bindings: dict[str, int], busy: bool, limits: object) -> int:  # fmt: skip
            known = trace_observations(made.graph, cluster, bindings, {}, None, busy)  # type: ignore[attr-defined]
            steps = []
            for _ in range(5):
                step = {}
                for name, lesson in known.items():
                    op = lesson.bucket.op
                    ratio = ratios.setdefault(op, float(truth.uniform(0.7, 1.6)))
                    late = random.random() < 0.3 if noise else False
                    more = 1 + 300 * random.random() if late else random.uniform(1, 1.05)
                    step[name] = lesson.predicted * ratio * more
                steps.append(step)
            observe_steps(learned, known, steps)
            return 5

        monkeypatch.setattr(strategy_search, "profile_first_steps", replay_steps)
        monkeypatch.setattr(strategy_search, "is_known", lambda cluster: True)
        monkeypatch.setattr(strategy_search, "save_corrections", lambda learned, cluster: None)
        x, loss = network(128, 2)
        return auto(loss, TWO, shapes={x: (4096, 128)}, quiet=True)

    quiet, noisy = search_with(False), search_with(True)
    told = {each.name: each.seconds for each in quiet.tried}
    assert told[noisy.best.name] <= 1.05 * quiet.best.seconds
    assert noisy.best.seconds == pytest.approx(quiet.best.seconds, rel=0.1)


# Clusters and models of all kinds -----------------------------------------------------------------


def make_unequal_cluster(
    *flops: float, latency: float = 1e-6, bandwidth: float = 1e12
) -> gf.Cluster:
    devices = [
        f'[[workers]]\ndevices = [{{ name = "gpu:0", flops = {f}, bandwidth = 1e11, '
        'memory = "1GiB", launch = 1e-6 }]'
        for f in flops
    ]
    links = [
        f'[[links]]\nsource = "/worker:{i}"\ntarget = "/worker:{j}"\n'
        f"latency = {latency}\nbandwidth = {bandwidth}"
        for j in range(len(flops))
        for i in range(j)
    ]
    return loads_cluster("\n".join(devices + links))


def loads_cluster(text: str) -> gf.Cluster:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return gf.Cluster.load(file.name)


@pytest.mark.slow
def test_of_devices_of_differing_speed_the_fast_ones_are_used() -> None:
    x, loss = network(256, 2)
    found = auto(
        loss, make_unequal_cluster(1e11, 1e12, 1e12, 1e12), shapes={x: (1 << 14, 256)}, quiet=True
    )
    assert found.best.name.endswith("on 3 of 4")
    assert found.best.strategy.devices[0] == "/worker:1/gpu:0"
    far = auto(loss, make_unequal_cluster(1e12, 1e10), shapes={x: (1 << 14, 256)}, quiet=True)
    assert far.best.strategy is None and far.device == "/worker:0/gpu:0"


@pytest.mark.slow
def test_over_a_slow_link_and_for_a_tiny_network_one_device_is_best() -> None:
    x, loss = network(256, 2)
    slow = make_unequal_cluster(1e12, 1e12, latency=1e-2, bandwidth=1e6)
    assert auto(loss, slow, shapes={x: (4096, 256)}, quiet=True).best.strategy is None
    there = gf.Cluster.hypothetical(
        4, flops=1e12, bandwidth=1e11, memory=1 << 30, launch=1e-6, link_latency=1e-4,
        link_bandwidth=1e9,
    )  # fmt: skip
    x, loss = network(8, 2)
    assert auto(loss, there, shapes={x: (4, 8)}, quiet=True).best.strategy is None


def test_one_device_leaves_no_choice(capsys: pytest.CaptureFixture[str]) -> None:
    x, loss = network()
    there = gf.Cluster.hypothetical(1, flops=1e12, bandwidth=1e11, memory=1 << 30, launch=1e-6)
    assert [each.name for each in auto(loss, there, shapes={x: X.shape}).tried] == ["one device"]
    assert "as nothing else is possible" in capsys.readouterr().out


def test_what_cannot_be_cut_is_said_and_the_rest_is_tried() -> None:
    def search_by_name(loss: Tensor) -> dict[str, CandidateResult]:
        return {each.name: each for each in auto(loss, TWO, quiet=True).tried}

    w = gf.variable(np.ones((512, 512), "float32"))
    without_batch = search_by_name(gf.mean(gf.square(w @ w)))
    assert "which placeholders hold the batch" in without_batch["data 2"].why_not
    assert not without_batch["model 2"].why_not
    x = gf.placeholder("float32", (3, 512))
    small = search_by_name(gf.mean(gf.square(gf.tanh(x @ w) @ w)))
    assert not small["data 2"].why_not  # a batch that does not divide has a remainder
    assert "batch of 3 is smaller than its 4 parts" in small["2 stages 1f1b of 4"].why_not


def test_weights_too_small_for_a_mesh_stay_whole_and_the_others_are_cut() -> None:
    def tensor_parallel(loss: Tensor) -> list[StrategyCandidate]:
        return [c for c in candidates("abcd", tensor_rules(loss)) if c.name == "model 4"]

    x, y = gf.placeholder("float32", (12, 16)), gf.placeholder("int64", (12,))
    first, second, head = (
        gf.variable(np.ones(s, "float32")) for s in ((16, 16), (16, 16), (16, 3))
    )
    logits = gf.tanh(gf.tanh(x @ first) @ second) @ head
    loss = gf.mean(gf.nn.cross_entropy(logits, y))
    (cut,) = tensor_parallel(loss)
    strategy = cut.strategy(tensor_rules(loss), "abcd")
    assert strategy.rules == {first: (None, "model"), second: ("model", None)}
    assert strategy.report(gf.optim.SGD(0.1).minimize(loss, strategy=strategy)).bytes > 0
    assert not tensor_parallel(gf.mean(x[:, :3] @ gf.variable(np.ones((3, 3), "float32"))))


@pytest.mark.slow
def test_under_a_name_scope_it_is_the_same() -> None:
    seconds = []
    for scope in ("", "outer"):
        with gf.name_scope(scope) if scope else nullcontext():
            x, loss = network(256, 2)
        found = auto(loss, TWO, shapes={x: (4096, 256)}, quiet=True)
        seconds.append([(each.name, each.seconds) for each in found.tried])
    assert seconds[0] == seconds[1]


def test_for_other_devices_than_the_first_the_choice_trains_where_there_is_one() -> None:
    x, loss = network(256, 2)
    cluster = make_unequal_cluster(1e11, 1e12, 1e12)
    found = auto(loss, cluster, shapes={x: (1 << 14, 256)}, quiet=True)
    assert found.best.strategy.devices is not None
    seen = []
    for strategy in (found, None):
        x, loss = network(256, 2)
        train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            data = np.random.default_rng(1).normal(size=(64, 256)).astype("float32")
            seen.append([float(s.run([loss, train], {x: data})[0]) for _ in range(2)])
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-5)


# On this machine ----------------------------------------------------------------------------------


@pytest.mark.slow  # starts workers, a session for each strategy that is measured
@pytest.mark.usefixtures("own_cache")
def test_what_is_measured_decides() -> None:
    x, loss = network(64)
    found = auto(loss, gf.Cluster.local(2, threads=1), shapes={x: (64, 64)}, measure=2, quiet=True)
    times = [each.measured for each in found.tried if each.measured is not None]
    assert len(times) == 2 and times == sorted(times)
    assert found.best.measured is not None and found.best.measured <= times[0] * SAME_TIME
    assert "measured" in str(found)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda loss: auto(loss, FAST), PlanError, "give its sizes"),
        (lambda loss: auto(loss, FAST, shapes={loss.node.inputs[0]: (1,)}), PlanError, "give its"),
        (lambda loss: auto(loss, 2), ArgumentError, r"auto at .*gf\.Cluster, not 2"),
        (lambda loss: auto(loss, optimizer="adam"), ArgumentError, "optim.*not 'adam'"),
        (lambda loss: auto(loss, memory="1GB"), ArgumentError, "number of bytes.*not '1GB'"),
        (lambda loss: auto(loss, memory=-1), ArgumentError, "number of bytes.*not -1"),
        (lambda loss: auto(loss, trial=1), ArgumentError, "trial must be True or False, not 1"),
        (lambda loss: auto(loss, measure=-1), ArgumentError, "measure must be a number"),
        (lambda loss: auto("loss"), ArgumentError, "a tensor, not 'loss'"),
        (lambda loss: auto(gf.mean(gf.placeholder("float32", (2,))), TWO), VariableError, "train"),
        (lambda loss: auto(loss.node.inputs[0], TWO), DifferentiationError, "float scalar"),
        (
            lambda loss: auto(loss, TWO, shapes={gf.placeholder("float32", (1,)): (1,)}),
            PlanError,
            "depends on it",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(
    make: Callable[[Tensor], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(network()[1])


def test_if_nothing_fits_all_that_was_tried_is_listed() -> None:
    x, loss = network()
    with pytest.raises(MemoryLimitError, match=r"fits in .*B of each.*\n.*one device.*memory"):
        auto(loss, gf.Cluster.here(), shapes={x: X.shape}, memory=1, quiet=True)


# Strategies that change the numbers -----------------------------------------------------------


def slow_link(devices: int = 4) -> gf.Cluster:
    return gf.Cluster.hypothetical(
        devices, flops=5e10, bandwidth=1e10, memory=8 << 30, launch=1e-6, link_latency=1e-3,
        link_bandwidth=1.25e7,
    )  # fmt: skip


@pytest.mark.slow
def test_over_a_slow_link_what_sends_less_is_chosen_if_it_may(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, loss = network(256, 2)
    exact = auto(loss, slow_link(), shapes={x: (512, 256)}, quiet=True)
    assert not any(t.trade for t in exact.tried)
    found = auto(loss, slow_link(), shapes={x: (512, 256)}, exact=False)
    by_name = {t.name: t for t in found.tried}
    local, data = by_name["local 4"], by_name["data 4"]
    assert found.best.trade and found.best.seconds < exact.best.seconds
    assert by_name["data 4, 8 bits"].sent < 0.3 * data.sent
    assert by_name["data 4, rank 4"].sent < 0.1 * data.sent
    assert local.seldom < 0.1 * local.seconds
    period = local.strategy.choose_period(
        Graph([loss, gf.optim.Adam().minimize(loss, strategy=local.strategy)]),
        slow_link(), {"B": 512},
    ).period  # fmt: skip
    assert f"replicas train by themselves for {period} steps" in local.trade
    assert local.sent * period == pytest.approx(data.sent, rel=0.05)
    assert "a step; replicas train by themselves" in capsys.readouterr().out


def test_over_a_quick_link_the_numbers_stay_as_they_are() -> None:
    x, loss = network(16, 2)
    there = gf.Cluster.hypothetical(
        2, flops=1e9, bandwidth=1e10, memory=8 << 30, link_latency=1e-7, link_bandwidth=1e12
    )
    assert not auto(loss, there, shapes={x: (4096, 16)}, exact=False, quiet=True).best.trade


def test_what_is_chosen_trains_on_workers() -> None:
    x, loss = network(16, 2)
    found = auto(loss, slow_link(2), shapes={x: (64, 16)}, exact=False, quiet=True)
    local = next(t.strategy for t in found.tried if t.name == "local 2, 8 bits")
    train = gf.optim.SGD(0.1).minimize(loss, strategy=local)
    with gf.Session(gf.Cluster.local(2)) as s:
        losses = [float(s.run([loss, train], {x: X})[0]) for _ in range(12)]
    assert losses[-1] < losses[0]


def test_measured_seconds_include_the_share_of_rare_exchanges() -> None:
    x, loss = network(16, 2)
    strategy = gf.parallel.LocalSGD(2, period=1000)
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    rare = CandidateResult("local 2", strategy, 30.1, 0, devices=2, seldom=30.0)
    feeds = {x: X}
    (found,) = measure_best([rare], 1, lambda _: [loss, train], gf.Cluster.local(2), feeds)
    assert found.measured is not None and 30.0 < found.measured < 31.0


def test_exact_is_true_or_false() -> None:
    with pytest.raises(ArgumentError, match="exact must be True or False, not 'no'"):
        auto(network()[1], slow_link(), exact=cast(Any, "no"))
