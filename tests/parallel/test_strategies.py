"""Strategies: what one device computes, whatever the strategy; and what travels for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, ShardingError
from graphflow.ir.spec import sole_symbol
from graphflow.passes import optimize
from graphflow.runtime.partitioning.partition import UNPLACED_OPS, partition
from tests.parallel.models import cnn, difference, gpt, mlp, train_on_one_device

Data, Shard = gf.parallel.Data, gf.parallel.Shard
EXACT = 1e-12


def count(report: Any) -> dict[str, int]:
    return {m.kind: report.count(m.kind) for m in report.collectives}


# Data -------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "strategy",
    [
        Data(2), Data(3), Data(7), Data(2, bucket=0), Data(3, shard_state=True),
        Data(3, shard_state=True, bucket=0), Data(2, shard_state=True, bucket=1000),
        Data(2, accumulate=3), Data(1, accumulate=2), Data(2, accumulate=2, shard_state=True),
    ],
    ids=lambda s: f"{s.mesh}{s.shard_state}{s.bucket}",
)  # fmt: skip
def test_replicas_with_uneven_shares_update_as_one_device_on_the_whole_batch(
    strategy: Any,
) -> None:
    assert difference(mlp(strategy).train(), train_on_one_device(mlp)) < EXACT


@pytest.mark.parametrize("optimizer", [
    gf.optim.SGD(0.1), gf.optim.SGD(0.1, momentum=0.9, nesterov=True), gf.optim.AdamW(0.1),
    gf.optim.RMSProp(0.01, momentum=0.5), gf.optim.Adagrad(0.1),
], ids=lambda o: type(o).__name__)  # fmt: skip
def test_every_optimiser_gives_the_same_with_replicas(optimizer: Any) -> None:
    alone, together = mlp(optimizer=optimizer), mlp(Data(2), optimizer=optimizer)
    assert difference(together.train(), alone.train()) < EXACT


def test_gradients_clipped_by_their_joint_norm_are_the_same_with_replicas() -> None:
    def build_clipped_step(strategy: Any) -> Any:
        x = gf.placeholder("float64", (None, 4))
        w = gf.variable(np.arange(4.0), name="w")
        loss = gf.mean((x @ gf.reshape(w, (4, 1))) ** 2.0)
        train = gf.optim.SGD(0.1).minimize(
            loss, strategy=strategy, transform=lambda g: gf.optim.clip_by_global_norm(g, 0.5)[0]
        )
        with gf.Session() as s:
            s.run(train, {x: np.random.default_rng(0).normal(size=(5, 4))})
            return s.get(w)

    assert np.abs(build_clipped_step(Data(2)) - build_clipped_step(None)).max() < EXACT


UNLIKE = [
    Data(2) * Shard({"a": 2}, {"t": ("a",)}), Shard({"a": 2, "b": 2}, {"t": ("a",)}, batch="b"),
    Shard({"a": 2, "b": 2}, {"x": (("a", "b"),), "t": (("b", "a"),)}),
]  # fmt: skip


def _pair(strategy: Any, sizes: tuple[Any, Any]) -> list[Any]:
    """A step over inputs and targets whose first sizes the loss needs to be equal."""
    random = np.random.default_rng(0)
    x, t = (gf.placeholder("float64", (n, 3), name=k) for n, k in zip(sizes, "xt", strict=True))
    w = gf.variable(random.normal(size=(3, 3)), name="w")
    loss = gf.mean((gf.tanh(x @ w) - t) ** 2.0)
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    with gf.Session() as s:
        feeds = {x: random.normal(size=(8, 3)), t: random.normal(size=(8, 3))}
        return [s.run([loss, train], feeds)[0], s.get(w)]


@pytest.mark.parametrize("strategy", UNLIKE, ids=["data", "batch", "order"])
def test_sizes_that_have_to_be_equal_are_cut_in_one_way_or_refused(strategy: Any) -> None:
    for open_sizes in ((None, None), ("n", "m"), ("n", "n")):
        with pytest.raises(ShardingError, match=r"its size .* another placeholder.* cut both"):
            _pair(strategy, open_sizes)


def test_a_size_that_a_pipeline_cuts_otherwise_is_told_by_its_micro_batches() -> None:
    strategy = gf.parallel.Pipeline(1, microbatches=2) * Shard({"m": 2}, {"t": ("m",)})
    with pytest.raises(ShardingError, match=r"into 2 micro-batches, .* 2 \(m\)") as caught:
        _pair(strategy, ("n", "n"))
    assert "cut along" not in str(caught.value)


@pytest.mark.parametrize("sizes", [(None, 8), (8, None), (8, 8)], ids=str)
@pytest.mark.parametrize("strategy", UNLIKE, ids=["data", "batch", "order"])
def test_known_sizes_may_be_cut_in_unlike_ways(strategy: Any, sizes: tuple[Any, Any]) -> None:
    for have, want in zip(_pair(strategy, sizes), _pair(None, sizes), strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=EXACT)


def test_two_workers_give_the_bits_of_one_process() -> None:
    here = mlp(Data(2)).train()
    there = mlp(Data(2)).train(gf.Cluster.local(2))
    assert here[0] == there[0]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(here[1], there[1], strict=True))


def test_small_gradients_share_one_exchange() -> None:
    model = mlp(Data(2))
    assert count(Data(2).report(model.fetches)) == {"all-reduce": 1}
    assert count(Data(2, bucket=0).report(mlp(Data(2, bucket=0)).fetches)) == {"all-reduce": 3}


@pytest.mark.parametrize("bucket, exchanges", [(4 << 20, 1), (0, 3)])
def test_shares_of_the_state_take_scatters_and_gathers_of_as_many_bytes(
    bucket: int, exchanges: int
) -> None:
    strategy = Data(2, shard_state=True, bucket=bucket)
    report = strategy.report(mlp(strategy).fetches)
    assert count(report) == {"reduce-scatter": exchanges, "all-gather": exchanges}
    assert sum(m.bytes for m in report.collectives) == 2 * 8 * (6 * 8 + 8 + 8 * 3)
    slots = [n for n in report.division.variables if "adam_mean" in n.name]
    for slot in slots:
        sizes = {node.specs[0].shape for node in report.division.variables[slot].nodes}
        assert sum(s[0] for s in sizes) * (2 if len(sizes) == 1 else 1) == slot.specs[0].shape[0]


def test_the_state_of_16_bit_weights_is_shared_out_too() -> None:
    """It has 32 bits: most of what training them takes."""
    weight = np.ones((7, 5), "float32").astype(gf.placeholder("bfloat16", ()).dtype)

    def step(strategy: Any) -> tuple[gf.Tensor, list[gf.Tensor]]:
        x = gf.placeholder("bfloat16", ("n", 7), name="x")
        w = gf.variable(weight, name="w")
        loss = gf.mean((gf.tanh(x @ w)) ** 2.0)
        return x, [loss, gf.optim.Adam(0.01).minimize(loss, strategy=strategy), w]

    strategy = Data(2, shard_state=True)
    report = strategy.report(step(strategy)[1][:2])
    slots = {
        node.name: [n.specs[0].shape for n in pieces.nodes]
        for node, pieces in report.division.variables.items() if "adam_" in node.name
    }  # fmt: skip
    assert len(slots) == 2 and all(shapes == [(4, 5), (3, 5)] for shapes in slots.values())
    values = []
    for each in (strategy, None):
        x, (_, train, w) = step(each)
        with gf.Session() as s:
            s.run(train, {x: (np.arange(42).reshape(6, 7) / 42).astype(weight.dtype)})
            values.append(s.get(w).astype("float32"))
    assert np.abs(values[0] - values[1]).max() < 1e-2


def test_each_replica_is_fed_its_share_of_the_batch_only() -> None:
    model = mlp(Data(3))
    division = Data(3).report(model.fetches).division
    random = np.random.default_rng(0)
    arrays = {t.node: a for t, a in model.feeds(random, 7).items()}
    sizes = {sole_symbol(n.specs[0].shape[0]): 7 for n in arrays}
    fed = division.feeds(arrays, division.bindings(sizes))
    assert sorted(a.shape[0] for a in fed.values()) == [2, 2, 2, 2, 3, 3]
    assert sum(a.nbytes for a in fed.values()) == sum(a.nbytes for a in arrays.values())


def test_batch_norm_is_synchronised_unless_told_otherwise() -> None:
    alone = cnn().train()
    assert difference(cnn(Data(2)).train(), alone) < EXACT
    apart = cnn(Data(2, synchronised=False))
    assert 1e-6 < difference(apart.train(), alone) < 1.0
    kinds = count(Data(2, synchronised=False).report(cnn(Data(2, synchronised=False)).fetches))
    assert kinds == {"all-reduce": 2}  # of gradients, and of both running moments
    assert count(Data(2).report(cnn(Data(2)).fetches)) == {"all-reduce": 3}


def test_variables_are_read_and_set_whole() -> None:
    model = mlp(Shard({"model": 2}, {"w1": (None, "model")}))
    with gf.Session() as s:
        feeds = model.feeds(np.random.default_rng(0), 4)
        s.run(model.fetches, feeds)
        w1 = model.variables[0]
        value = s.get(w1)
        s.set(w1, value * 2)
        assert np.array_equal(s.get(w1), value * 2)
        s.run(model.fetches, feeds)
        assert not np.array_equal(s.get(w1), value * 2)


def test_what_was_trained_whole_goes_on_in_pieces() -> None:
    random = np.random.default_rng(0)
    model = mlp(Data(2))
    loss, train = model.fetches
    feeds = model.feeds(random, 6)
    with gf.Session() as s:
        before = s.run(loss, feeds)  # whole: no strategy is known yet
        s.set(model.variables[2], np.ones((8, 3)))
        other = s.run(loss, feeds)
        first, _ = s.run([loss, train], feeds)
        after = s.run(loss, feeds)
    assert before != other
    assert abs(first - other) < EXACT
    assert after < first


# Shard ------------------------------------------------------------------------------------------


def test_a_column_and_a_row_parallel_layer_take_one_all_reduce() -> None:
    strategy = Shard({"model": 2}, {"w1": (None, "model")})
    model = mlp(strategy)
    report = strategy.report(model.fetches)
    assert count(report) == {"all-reduce": 1}
    assert report.collectives[0].location.file.endswith("models.py")
    assert report.bytes == 2 * 8 * 3 * 64  # of a batch of 64, where none is known
    assert difference(model.train(), train_on_one_device(mlp)) < EXACT


@pytest.mark.parametrize("mesh, rules", [
    ({"model": 3}, {"w1": (None, "model")}),
    ({"model": 2}, {"w2": ("model",)}),
    ({"model": 2}, {"w1": ("model",)}),
    ({"data": 2, "model": 2}, {"x": ("data",), "w1": (None, "model")}),
    ({"a": 2, "b": 2}, {"w1": (None, ("a", "b"))}),
    ({"a": 2, "b": 2}, {"x": (("a", "b"),), "w1": ("a",)}),
    ({"data": 3}, {"w1": ("data",), "x": ("data",), "w2": (None, "data")}),
])  # fmt: skip
def test_any_rules_give_what_one_device_gives(mesh: Any, rules: Any) -> None:
    assert difference(mlp(Shard(mesh, rules)).train(), train_on_one_device(mlp)) < EXACT


GPT_RULES = {
    "tensor": {"*linear1/weight": ("model",), "*linear1/bias": ("model",),
               "*linear2/weight": (None, "model")},
    "vocabulary": {"embedding": ("model",), "head": (None, "model")},
    "sequence": {"ids": (None, "model")},
}  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.parametrize("rules", GPT_RULES.values(), ids=GPT_RULES)
@pytest.mark.parametrize("size", [2, 3])
def test_a_gpt_gives_the_same_by_tensor_vocabulary_and_sequence(rules: Any, size: int) -> None:
    strategy = Shard({"model": size}, rules)
    assert difference(gpt(strategy).train(steps=2), train_on_one_device(gpt, 2)) < EXACT


def test_dropout_draws_the_same_numbers_on_any_mesh() -> None:
    alone = train_on_one_device(gpt, 2, dropout=0.2)
    for strategy in (Data(2), Data(3), Shard({"m": 2}, {"ids": (None, "m")})):
        assert difference(gpt(strategy, dropout=0.2).train(steps=2), alone) < EXACT


def test_logits_of_a_vocabulary_in_pieces_are_nowhere_together() -> None:
    strategy = Shard({"model": 2}, {"head": (None, "model")})
    division = strategy.report(gpt(strategy).fetches).division
    wide = [n for n in division.graph.nodes for s in n.specs
            if s.rank == 3 and s.shape[-1] == 12 and s.dtype.kind == "f"]  # fmt: skip
    assert not wide


@pytest.mark.parametrize("options", [
    {}, {"kernel": 5, "norm": False}, {"stride": 2, "pool": None}, {"shape": (2, 3, 13, 11)},
    {"pool": gf.nn.avg_pool},
], ids=lambda options: ", ".join(options) or "plain")  # fmt: skip
@pytest.mark.parametrize("mesh, rule", [
    ({"s": 2}, (None, None, "s")), ({"s": 3}, (None, None, "s")),
    ({"h": 2, "w": 2}, (None, None, "h", "w")), ({"d": 2, "s": 2}, ("d", None, None, "s")),
], ids=str)  # fmt: skip
@pytest.mark.every(3)
def test_images_in_pieces_train_as_whole_ones(options: Any, mesh: Any, rule: Any) -> None:
    strategy = Shard(mesh, {"images": rule})
    assert (
        difference(cnn(strategy, **options).train(steps=2), train_on_one_device(cnn, 2, **options))
        < 1e-6
    )


def rows_of_halos(report: Any, shards: int) -> list[float]:
    """Rows that travel at each inner cut, a number for each halo."""
    row = 2 * 10 * 3 * 8  # images, width, channels, bytes of a number
    assert {m.kind for m in report.collectives} <= {"halo", "all-reduce"}
    return [m.bytes / (shards - 1) / row for m in report.collectives if m.kind == "halo"]


@pytest.mark.every(5)
@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("height, shards", [(12, 2), (13, 2), (23, 3)])
@pytest.mark.parametrize("kernels", [(1,), (2,), (3,), (4,), (7,), (3, 5)], ids=str)
def test_a_halo_has_the_rows_that_windows_see_and_no_more(
    kernels: tuple[int, ...], height: int, shards: int, last: bool
) -> None:
    """Those of odd size half of them on each side; of even size there is one row less."""
    x = gf.placeholder("float64", (2, height, 10, 3) if last else (2, 3, height, 10), name="x")
    rule = (None, "space") if last else (None, None, "space")
    random, y, weights = np.random.default_rng(0), x, []
    for k in kernels:
        weights.append(gf.variable(random.normal(size=(3, 3, k, k)) / k, name=f"w{len(weights)}"))
        y = gf.nn.conv(y, weights[-1], padding="same", channels_last=last)
    strategy = Shard({"space": shards}, {x: rule})
    wanted = [2 * (k // 2) - (k % 2 == 0) for k in kernels if k > 1]
    assert rows_of_halos(strategy.report(y), shards) == wanted
    gradients = gf.gradients(gf.sum(gf.square(y)), [x, *weights])
    found = rows_of_halos(strategy.report([y, *gradients]), shards)
    assert found == wanted + wanted[::-1]  # weights' gradients see what the forward pass saw
    if height == 23:
        return
    train = gf.optim.SGD(1e-4).minimize(gf.sum(gf.square(y)), strategy=strategy)
    feeds = {x: random.normal(size=x.shape)}
    with gf.Session() as whole, gf.Session() as pieces:
        whole_ones = whole.run([y, *gradients], feeds)
        for a, b in zip(pieces.run([y, *gradients, train], feeds), whole_ones, strict=False):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("pool", ["max_pool", "avg_pool"])
@pytest.mark.parametrize("windows", [2, 3, 4])
def test_windows_of_pooling_that_overlap_get_the_rows_that_they_see(
    windows: int, pool: str, last: bool
) -> None:
    x = gf.placeholder("float64", (2, 13, 10, 3) if last else (2, 3, 13, 10), name="x")
    y = getattr(gf.nn, pool)(x, windows, stride=1, padding="same", channels_last=last)
    strategy = Shard({"space": 2}, {x: (None, "space") if last else (None, None, "space")})
    assert rows_of_halos(strategy.report(y), 2) == [windows - 1]


# Errors -----------------------------------------------------------------------------------------


def train_one_step(strategy: Any, cluster: Any = None, batch: int = 7) -> None:
    mlp(strategy).train(cluster, steps=1, batch=batch)


def test_a_mesh_larger_than_the_cluster_is_refused_with_numbers() -> None:
    cluster = gf.Cluster.local(2)
    with pytest.raises(ShardingError, match=r"data 3\) takes 3 devices, and the cluster has 2"):
        Data(3).report(mlp(Data(3)).fetches, cluster)


def test_a_batch_smaller_than_the_replicas_is_refused_when_it_is_fed() -> None:
    with pytest.raises(
        ShardingError, match=r"batch of 2 .* smaller than its 3 shards, 3 .data.; feed at least 3"
    ):
        train_one_step(Data(3), batch=2)


def test_a_known_batch_smaller_than_the_replicas_is_refused_before() -> None:
    with pytest.raises(ShardingError, match=r"batch of 4 .of 'ids'.* smaller than its 5 shards"):
        Data(5).report(gpt(Data(5)).fetches)


@pytest.mark.parametrize("rules, told", [
    (
        {"w*": ("m",), "*1": (None, "m")},
        r"two rules for 'w1'.*'w\*' says \(m, ·\), '\*1' says \(·, m\)",
    ),
    ({"w1": ("m", "m")}, "axis 'm' of the mesh twice.*one axis of a tensor, into 2; leave out one"),
    ({"w1": "m"}, r"as a tuple: \('m', None\)"),
])  # fmt: skip
def test_rules_that_contradict_are_met_with_both_and_a_remedy(rules: Any, told: str) -> None:
    strategy = Shard({"m": 2}, rules)
    with pytest.raises(ShardingError, match=told):
        strategy.report(mlp(strategy).fetches)


@pytest.mark.parametrize("turned", [False, True])
def test_a_rule_by_name_goes_before_patterns(turned: bool) -> None:
    rules: dict[Any, Any] = {"w*": ("m",), "w1": (None, "m")}
    strategy = Shard({"m": 2}, dict(reversed(rules.items())) if turned else rules)
    report = strategy.report(mlp(strategy).fetches)
    layouts = {n.name: str(p.layout) for n, p in report.division.variables.items()}
    assert layouts["w1"] == "(·, m)"
    assert layouts["w2"] == "(m, ·)"


@pytest.mark.parametrize("rules, told", [
    ({"w3": ("m",)}, r"names 'w3'.*did you mean 'w2' or 'w1'"),
    ({"w1": ("n",)}, r"the mesh has no axis 'n'; it has m"),
    ({"w1": (None, None, "m")}, r"is for 3 axes, but 'w1' is float64\(6, 8\)"),
    ({"w2": (None, "m")}, r"cuts axis 1 into 4.*is 3, too small for 4 shards"),
    ({"w1": ("m", "m")}, r"uses axis 'm' of the mesh twice"),
    ({"w1": 3}, r"as a tuple"),
    ({5: ("m",)}, r"the key of a rule must be a tensor or a name, not 5"),
    ({"w1": (0,)}, r"rule 'w1'.*or None for each axis, not 0"),
])  # fmt: skip
def test_rules_that_cannot_be_followed_are_refused_with_the_remedy(rules: Any, told: str) -> None:
    with pytest.raises(ShardingError, match=told):
        train_one_step(Shard({"m": 4}, rules))


def test_a_size_that_is_cut_in_two_ways_is_refused_with_the_remedy() -> None:
    a, b = (gf.placeholder("float64", ("B", 3), name=name) for name in "ab")
    w = gf.variable(np.ones((3, 3)), name="w")
    strategy = Shard({"d": 2, "e": 2}, {"a": ("d",), "b": ("e",)})
    train = gf.optim.SGD(0.1).minimize(gf.mean(a @ w @ b.T), strategy=strategy)
    with pytest.raises(
        ShardingError, match=r"'b'.*size B is that of another .* into 2 .d.; cut both"
    ):
        strategy.report(train)


@pytest.mark.parametrize("strategy", [
    Data(10**9), Data(10**30), Shard({"d": 10**9}), Data(2, accumulate=10**9),
    gf.parallel.Pipeline(2) * Data(10**9),
])  # fmt: skip
def test_more_places_than_can_be_written_are_refused_at_once(strategy: Any) -> None:
    with pytest.raises(ShardingError, match=r"places, for each of which the .* nodes .* at most"):
        strategy.report(mlp(strategy).fetches)


def test_a_batch_of_open_size_is_cut_into_so_many_pieces_and_no_more() -> None:
    with pytest.raises(ShardingError, match=r"cut into 2,000 pieces, and 1,024 is the most; give"):
        Data(2000).report(mlp(Data(2000)).fetches)


@pytest.mark.parametrize("make", [
    lambda: Data(0), lambda: Data(True), lambda: Data(2, accumulate=0),
    lambda: Data(2, shard_state=1), lambda: Data(2, bucket=-1), lambda: Shard({}),
    lambda: Shard({"a b": 2}), lambda: Shard({"a": 0}), lambda: Shard(3),
    lambda: Shard({"a": 2}, ["w"]), lambda: Shard({"a": 2}, batch="b"),
    lambda: Shard({"a": 2}, batch=5), lambda: Shard({"a": 2}, bucket="4"),
    lambda: Shard({"a": 2}, bucket=-1), lambda: Shard({"a": 2}, shard_state=True),
    lambda: Shard({"a": 2}, accumulate=0), lambda: Shard({"a": 2}, synchronised=1),
])  # fmt: skip
def test_strategies_refuse_what_makes_no_sense(make: Any) -> None:
    with pytest.raises(ShardingError):
        make()


@pytest.mark.parametrize("make, told", [
    (lambda: Data(2) * 3, r"a Data goes with .* not with 3"),
    (lambda: 3 * Data(2), r"a Data goes with"),
    (lambda: Data(2) * Data(3), r"write Data\(6\)"),
    (lambda: Shard({"a": 2}) * "x", r"a Shard goes with .* not with 'x'"),
    (lambda: Shard({"a": 2}) * Shard({"b": 2}), r"one Shard, mesh=\{'a': 2, 'b': 2\}"),
    (lambda: Shard({"a": 3}) * Data(2, devices=["x", "y"]), r"each of the 2 replicas takes 3 .* a "
     r"list of 3 for each, such as \[\['/worker:0/cpu:0', .* not \['x', 'y'\]"),
    (lambda: Shard({"a": 1}, devices=["x"]) * Data(2, devices=["x", "y"]), r"both say devices="),
    (lambda: Data(2, accumulate=4) * Shard({"a": 2}, accumulate=3), r"say it in one of them"),
    (lambda: Data(2) * Shard({"data": 2}), r"the Shard cuts the batch already"),
    (lambda: Data(2) * Shard({"d": 2}, batch="d"), r"the Shard cuts the batch already"),
    (lambda: Data(2) * Data, r"a Data goes with"),
])  # fmt: skip
def test_products_that_there_are_not_are_refused_with_the_remedy(make: Any, told: str) -> None:
    with pytest.raises(ShardingError, match=told):
        make()


def test_replicas_of_a_shard_are_one_mesh_in_any_order() -> None:
    rules = {"w1": (None, "model"), "x": (None, "model")}
    for product in (Data(2) * Shard({"model": 2}, rules), Shard({"model": 2}, rules) * Data(2)):
        assert difference(mlp(product).train(), train_on_one_device(mlp)) < 1e-12
        report = product.report(mlp(product).fetches)
        assert str(report).startswith("mesh data 2 × model 2:")
        assert "(data, model)" in str(report)


@pytest.mark.parametrize("wrong, told", [
    ({"batch": ["z"]}, r"batch names 'z'.*there are 'x', 't'"),
    ({"batch": "x"}, r"batch must be a list .*not 'x'"),
    ({"batch": 5}, r"batch must be a list .*not 5"),
    ({"batch": [gf.variable(1.0)]}, r"batch names .*, which is no placeholder"),
    ({"batch": [5]}, r"batch must be a list"), ({"batch": []}, r"batch must be a list"),
    ({"devices": 5}, r"devices must be a list .*not 5"),
    ({"devices": [0, 1]}, r"devices must be a"),
    ({"devices": "cpu:0"}, r"devices must be a list .*not 'cpu:0'"),
])  # fmt: skip
def test_a_batch_and_devices_that_are_none_are_refused(wrong: Any, told: str) -> None:
    with pytest.raises(ShardingError, match=told):
        train_one_step(Data(2, **wrong))


def test_a_report_is_for_a_cluster() -> None:
    model = mlp(Data(2))
    with pytest.raises(ShardingError, match=r"report at .*gf\.Cluster, not 4"):
        Data(2).report(model.fetches, 4)  # type: ignore[arg-type]


def test_minimize_refuses_what_is_no_strategy() -> None:
    with pytest.raises(ArgumentError, match=r"strategy must be one of gf\.parallel's"):
        mlp("data")


def test_two_strategies_in_one_step_are_refused() -> None:
    w = gf.variable(np.ones(2), name="w")
    v = gf.variable(np.ones(2), name="v")
    x = gf.placeholder("float64", (None, 2))
    both = [
        gf.optim.SGD(0.1).minimize(gf.mean(x * t), strategy=s)
        for t, s in ((w, Data(2)), (v, Data(3)))
    ]
    with gf.Session() as s, pytest.raises(ShardingError, match="must share one strategy"):
        s.run(both, {x: np.ones((4, 2))})


# Plans ------------------------------------------------------------------------------------------


def test_a_strategy_is_planned_and_drawn_as_any_graph() -> None:
    model = mlp(Data(2))
    x, t = model.feeds(np.random.default_rng(0), 4)
    plan = gf.plan(model.fetches, gf.Cluster.local(2), {x: (8, 6), t: (8, 3)})
    assert {n.device for n in plan.nodes} >= {"/worker:0/cpu:0", "/worker:1/cpu:0"}


def test_a_report_tells_the_lines_that_cause_collectives() -> None:
    told = str(Data(2).report(mlp(Data(2)).fetches))
    assert "all-reduce" in told and "models.py" in told and "(data, ·)" in told


# Checkpoints ------------------------------------------------------------------------------------


def test_a_report_calls_what_an_op_is_made_of_by_the_op() -> None:
    """A norm along an axis that is cut is written by simpler ops, which nobody wrote."""
    x = gf.placeholder("float64", (4, 8), name="x")
    loss = gf.mean(gf.square(gf.nn.LayerNorm(8, dtype="float64", name="norm")(x)))
    train = gf.optim.SGD(0.1).minimize(loss, strategy=(cut := Shard({"m": 2}, {"x": (None, "m")})))
    found = cut.report([loss, train]).collectives
    assert [move for move in found if move.cause.startswith("norm/")]
    assert not [move for move in found if "moves/" in move.cause + move.tensor]


@pytest.mark.parametrize(
    "other", [None, Data(3, shard_state=True), Shard({"model": 2}, {"w1": (None, "model")})]
)
def test_a_checkpoint_of_one_strategy_goes_on_under_another(other: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    first, second, alone = mlp(Data(2, shard_state=True)), mlp(other), mlp()
    batches = [first.feeds(random, 6) for _ in range(3)]

    def steps(session: gf.Session, model: Any, given: Any) -> list[float]:
        def rename_feeds(feeds: Any) -> Any:
            values = {t.name: a for t, a in feeds.items()}
            return {t: values[t.name] for t in model.feeds(np.random.default_rng(0), 1)}

        return [float(session.run(model.fetches, rename_feeds(f))[0]) for f in given]

    with gf.Session() as s:
        steps(s, first, batches[:2])
        s.save(tmp_path / "kept")
    with gf.Session() as s:
        s.load(tmp_path / "kept")
        (found,) = steps(s, second, batches[2:])
    with gf.Session() as s:
        wanted = steps(s, alone, batches)[-1]
    assert abs(found - wanted) < EXACT


# Runs -------------------------------------------------------------------------------------------


def test_sums_of_gradients_begin_before_the_backward_pass_ends() -> None:
    x = gf.placeholder("float32", (256, 64))
    h, variables = x, []
    for i in range(3):
        variables.append(gf.variable(np.ones((64, 64), "float32"), name=f"w{i}"))
        h = gf.tanh(h @ variables[-1])
    strategy = Data(2, bucket=1 << 14)
    train = gf.optim.SGD(0.1, momentum=0.9).minimize(gf.mean(h), strategy=strategy)
    graph = optimize(strategy.report(train, gf.Cluster.local(2)).division.graph)
    devices = {n: str(n.device) for n in graph.nodes if n.op.name not in UNPLACED_OPS}
    for part in partition(graph, devices).values():
        ops = [n.op.name for n in part.graph.nodes]
        products = [i for i, name in enumerate(ops) if name == "matmul"]
        starts = [i for i, name in enumerate(ops) if name == "collective_start"]
        assert len(starts) == 3
        assert starts[0] < products[-1] and starts[1] < products[-1]


# What else a step may hold ------------------------------------------------------------------------


def lookup(
    strategy: Any, optimizer: Any, scaling: Any = None, cast: str | None = None
) -> tuple[list[float], list[Any]]:
    """Steps of a model whose table gets gradients by rows."""
    random = np.random.default_rng(0)
    ids = gf.placeholder("int64", (None, 6), name="ids")
    labels = gf.placeholder("int64", (None,), name="labels")
    table = gf.variable(random.normal(size=(20, 8)).astype("float32"), name="table")
    w = gf.variable(random.normal(size=(8, 5)).astype("float32"), name="w")
    with gf.autocast(cast):
        h = gf.mean(gf.nn.embedding(ids, table), axis=1)
        loss = gf.mean(gf.nn.cross_entropy(h @ w, labels))
    train = optimizer.minimize(loss, strategy=strategy, scaling=scaling)
    losses = []
    with gf.Session() as s:
        for _ in range(3):
            feeds = {ids: random.integers(0, 20, (7, 6)), labels: random.integers(0, 5, 7)}
            losses.append(float(s.run([loss, train], feeds)[0]))
        return losses, [s.get(table), s.get(w)]


@pytest.mark.parametrize("strategy", [
    Data(2), Data(3, shard_state=True), Shard({"m": 2}, {"table": ("m",)}),
    Shard({"m": 3}, {"table": (None, "m")}),
])  # fmt: skip
@pytest.mark.parametrize("options, near", [
    ({"optimizer": gf.optim.SGD(0.1)}, 1e-6),
    ({"optimizer": gf.optim.Adam(0.1, sparse=True)}, 1e-6),
    ({"optimizer": gf.optim.RowwiseAdagrad(0.1)}, 1e-6),
    ({"optimizer": gf.optim.SGD(0.1), "scaling": gf.optim.LossScaling()}, 1e-6),
    ({"optimizer": gf.optim.SGD(0.1), "cast": "bfloat16"}, 5e-3),
], ids=["rows", "sparse", "row-wise", "scaled", "cast"])  # fmt: skip
@pytest.mark.every(3)
def test_rows_of_tables_scaled_losses_and_short_floats_go_with_strategies(
    strategy: Any, options: Any, near: float
) -> None:
    assert difference(lookup(strategy, **options), lookup(None, **options)) < near


@pytest.mark.every(3)
@pytest.mark.parametrize("rule", [("m",), (None, "m")], ids=["rows", "columns"])
@pytest.mark.parametrize("optimizer", [
    gf.optim.SGD(0.1), gf.optim.Adam(0.1), gf.optim.Adam(0.1, sparse=True), gf.optim.Adagrad(0.1),
], ids=["SGD", "Adam", "sparse Adam", "Adagrad"])  # fmt: skip
def test_a_table_in_pieces_and_what_is_kept_of_it_stay_where_they_are(
    rule: Any, optimizer: Any
) -> None:
    """What travels is as many rows as were looked up, not the table; slots lie as it does."""
    rows, random = 999, np.random.default_rng(0)
    table, head = random.normal(size=(rows, 6)), random.normal(size=(6, rows))

    def step(strategy: Any) -> tuple[list[gf.Tensor], Any]:
        ids = gf.placeholder("int64", (4, 5), name="ids")
        h = gf.tanh(gf.nn.embedding(ids, gf.variable(table, name="table")))
        logits = h @ gf.variable(head, name="head")
        loss = gf.mean(gf.nn.cross_entropy(logits, ids))
        return [ids], [loss, optimizer.minimize(loss, strategy=strategy)]

    def losses(strategy: Any) -> list[float]:
        (ids,), fetches = step(strategy)
        draws = np.random.default_rng(1)
        with gf.Session() as s:
            batches = [draws.integers(0, rows, (4, 5)) // 7 * 7 for _ in range(3)]
            return [float(s.run(fetches, {ids: batch})[0]) for batch in batches * 2]

    strategy = Shard({"m": 3}, {"table": rule, "head": (None, "m")})
    report = strategy.report(step(strategy)[1])
    assert report.bytes < table.nbytes // 2
    for node, pieces in report.division.variables.items():
        if node.origin is not None and node.origin in report.division.variables:
            assert pieces.spans == report.division.variables[node.origin].spans
    assert np.allclose(losses(strategy), losses(None), rtol=1e-12, atol=1e-12)


def test_what_is_printed_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    x = gf.placeholder("float32", (4, 3))
    w = gf.variable(np.ones((3, 2), "float32"), name="w")
    h = gf.debug.print(x @ w, "h is")
    train = gf.optim.SGD(0.1).minimize(gf.mean(h * h), strategy=Data(2))
    with gf.Session() as s:
        s.run(train, {x: np.ones((4, 3))})
    out, err = capfd.readouterr()
    assert (out + err).count("h is") == 1


@pytest.mark.parametrize("strategy", [Data(2), Data(3, shard_state=True), Shard({"m": 2})])
def test_what_is_assigned_besides_the_training_step_is_so_at_every_place(strategy: Any) -> None:
    """A rate that falls with a count of steps, which is fetched and not part of the training."""

    def run_training(strategy: Any, cluster: Any = None) -> tuple[list[float], list[Any]]:
        x = gf.placeholder("float64", ("n", 3), name="x")
        w = gf.variable(np.ones(3), name="w")
        done = gf.variable(np.zeros(()), name="done", trainable=False)
        loss = gf.mean((gf.sum(x * w, axis=1) - 1.0) ** 2.0)
        train = gf.optim.SGD(0.1 / (1.0 + done)).minimize(loss, strategy=strategy)
        count = gf.assign(done, done + 1.0)
        random = np.random.default_rng(0)
        with gf.Session(cluster) as s:
            losses = []
            for step in range(4):
                found = s.run([loss, train, count], {x: random.normal(size=(5, 3))})
                assert len(found) == 3 and found[2] == step + 1
                losses.append(float(found[0]))
            assert float(s.run(count)) == 5
            return losses, [s.get(w), s.get(done)]

    here = run_training(strategy)
    assert difference(here, run_training(None)) < EXACT
    if isinstance(strategy, Data) and strategy.replicas == 2:
        assert difference(here, run_training(strategy, gf.Cluster.local(2))) == 0.0


def test_patterns_mean_neither_slots_nor_scalars() -> None:
    """An optimiser's slots lie as their variables; its scalars have no axis to cut."""
    strategy = Shard({"m": 2}, {"*": ("m",)})
    assert difference(mlp(strategy).train(), train_on_one_device(mlp)) < EXACT
    variables = strategy.report(mlp(strategy).fetches).division.variables
    whole = {node.name for node, pieces in variables.items() if not pieces.layout.axes()}
    assert whole == {"train/adam/beta1_power", "train/adam/beta2_power"}
    other = Shard({"m": 2}, {"zzz": ("m",)})
    with pytest.raises(ShardingError, match=r"there are 'x', 't', 'w1', 'b1', 'w2'$"):
        other.report(mlp(other).fetches)


@pytest.mark.parametrize("strategy", [Data(2), Data(3, accumulate=2)], ids=["2", "turns"])
def test_of_pairs_in_an_open_batch_places_take_the_diagonal_of_their_rows(strategy: Any) -> None:
    """Of what is fed for columns, each needs all; the matrix of all pairs is nowhere together."""

    def model(strategy: Any) -> Any:
        x, y = (gf.placeholder("float64", ("n", 4), name=name) for name in "xy")
        w = gf.variable(np.random.default_rng(1).normal(size=(4, 4)), name="w")
        pairs = gf.matmul(gf.tanh(x @ w), y, transpose_b=True)
        loss = gf.mean(gf.logsumexp(pairs, axis=1) - gf.diagonal(pairs))
        return [loss, gf.optim.SGD(0.1).minimize(loss, strategy=strategy)], (x, y)

    def losses(strategy: Any) -> list[float]:
        fetches, placeholders = model(strategy)
        random = np.random.default_rng(0)
        with gf.Session() as s:
            return [
                float(s.run(fetches, {t: random.normal(size=(n, 4)) for t in placeholders})[0])
                for n in (7, 9)
            ]

    np.testing.assert_allclose(losses(strategy), losses(None), rtol=0, atol=EXACT)
    moves = strategy.report(model(strategy)[0]).collectives
    assert {m.tensor for m in moves if m.kind == "all-gather"} == {"y"}
