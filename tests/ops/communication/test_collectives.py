"""Collectives as ops: what they compute, their gradients, and how they refuse bad input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, GraphflowError, ShapeError
from graphflow.ir.op import Tensor
from graphflow.ops.communication.collectives import groups_of, received_bytes
from graphflow.ops.communication.reduction_order import (
    ALGORITHMS,
    order_of,
    resolve_algorithm,
    shares,
    split_at,
)

P = gf.parallel
RNG = np.random.default_rng(0)


def constants(*shapes: tuple[int, ...], dtype: str = "float64") -> tuple[list[Tensor], list[Any]]:
    arrays = [(RNG.normal(size=shape) * 4).astype(dtype) for shape in shapes]
    return [gf.constant(a) for a in arrays], arrays


def run(tensors: list[Tensor]) -> list[Any]:
    with gf.Session() as session:
        return list(session.run(tensors))


# What they compute ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_reduce_is_the_reduction_over_replicas_at_each(op: str, algorithm: str) -> None:
    xs, arrays = constants(*[(3, 5)] * 5)
    ys = run(P.all_reduce(xs, op, algorithm, hosts=(0, 0, 1, 1, 2)))
    np.testing.assert_allclose(ys[0], getattr(np, op)(np.stack(arrays), axis=0), rtol=1e-12)
    assert len({y.tobytes() for y in ys}) == 1


def test_reduce_scatter_gives_each_replica_its_part_of_the_sum() -> None:
    xs, arrays = constants(*[(2, 8)] * 3)
    np.testing.assert_allclose(np.concatenate(run(P.reduce_scatter(xs, 1)), 1), sum(arrays))
    assert [y.shape for y in P.reduce_scatter(xs, 1)] == [(2, 3), (2, 3), (2, 2)]
    assert [y.shape for y in P.reduce_scatter(xs, -1, sizes=(8, 0, 0))][1] == (2, 0)


def test_all_gather_joins_what_may_differ_in_size() -> None:
    xs, arrays = constants((2, 3), (1, 3), (0, 3))
    for y in run(P.all_gather(xs, 0)):
        assert (y == np.concatenate(arrays)).all()


def test_all_to_all_turns_what_is_spread_over_replicas() -> None:
    xs, arrays = constants(*[(3, 4)] * 3)
    ys = run(P.all_to_all(xs, 0, 1))
    for rank, y in enumerate(ys):
        assert (y == np.concatenate([a[rank : rank + 1] for a in arrays], 1)).all()
    back = run(P.all_to_all(P.all_to_all(xs, 0, 1), 1, 0))
    assert all((b == a).all() for b, a in zip(back, arrays, strict=True))


def test_broadcast_gives_a_tensor_to_all() -> None:
    (x,), (array,) = constants((3,))
    assert [y.tolist() for y in run(P.broadcast(x, 3))] == [array.tolist()] * 3


def test_results_lie_where_their_tensors_do() -> None:
    xs = []
    for i in range(2):
        with gf.device(f"/worker:{i}/cpu:0"):
            xs.append(gf.placeholder("float32", (4,)) * 2)
    for results in (P.all_reduce(xs), P.reduce_scatter(xs), P.all_gather(xs), P.all_to_all(xs),
                    P.broadcast(xs[0], 2, like=xs)):  # fmt: skip
        assert [str(y.node.device) for y in results] == ["/worker:0/cpu:0", "/worker:1/cpu:0"]


def test_16_bit_floats_are_added_in_float32_and_rounded_once() -> None:
    xs = [gf.constant(np.array([1.0 if i == 0 else 2**-11], "float16")) for i in range(9)]
    for algorithm in ("direct", "ring", "tree", "halving"):
        (y, *_) = run(P.all_reduce(xs, algorithm=algorithm))
        assert y.dtype == np.float16 and y[0] == np.float16(1 + 8 * 2**-11)


def test_sizes_that_are_not_known_yet_are_taken() -> None:
    x = gf.placeholder("float32", (None, 3))
    fetches = [
        *P.all_reduce([x, x * 2]),
        *P.all_gather([x, x * 2], 0),
        *P.all_to_all([x] * 3, 1, 0),
    ]
    with gf.Session() as session:
        for size in (0, 2, 5):
            found = session.run(fetches, {x: np.ones((size, 3), "f4")})
            shapes = [(size, 3)] * 2 + [(2 * size, 3)] * 2 + [(3 * size, 1)] * 3
            assert [y.shape for y in found] == shapes
            assert (found[0] == 3).all()


# Orders ---------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.sampled_from(ALGORITHMS[1:]), st.data())
@settings(max_examples=100)
def test_an_order_combines_every_rank_once(count: int, algorithm: str, data: Any) -> None:
    hosts = tuple(data.draw(st.integers(0, 3)) for _ in range(count))
    share = data.draw(st.integers(0, count - 1))

    def ranks(order: Any) -> list[int]:
        return [order] if isinstance(order, int) else [r for part in order for r in ranks(part)]

    assert sorted(ranks(order_of(algorithm, count, share, hosts))) == list(range(count))


def test_orders_are_what_their_names_say() -> None:
    assert order_of("direct", 4, 2) == (((0, 1), 2), 3)
    assert order_of("ring", 4, 2) == (((3, 0), 1), 2)
    assert order_of("tree", 6, 0) == (((0, 1), (2, 3)), (4, 5))
    assert order_of("halving", 3, 0) == ((0, 1), 2)
    assert order_of("two_level", 4, 0, (0, 1, 0, 1)) == ((0, 2), (1, 3))
    assert [split_at(n) for n in range(2, 10)] == [1, 2, 2, 4, 4, 4, 4, 8]
    assert shares(7, 3) == [3, 2, 2] and shares(0, 2) == [0, 0]


def test_auto_follows_from_the_number_of_replicas_and_elements() -> None:
    assert (
        resolve_algorithm("auto", 2, 1 << 30, None)
        == resolve_algorithm("auto", 8, 1, None)
        == "direct"
    )
    assert resolve_algorithm("auto", 9, 1, None) == "halving"
    assert resolve_algorithm("auto", 9, 1 << 20, None) == "ring"
    assert resolve_algorithm("auto", 4, 1, (0, 0, 1, 1)) == "two_level"
    assert resolve_algorithm("auto", 4, 1, (0, 0, 0, 0)) == "direct"


# Gradients ------------------------------------------------------------------------------------

CASES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "sum": lambda xs: P.all_reduce(xs, "sum"),
    "mean": lambda xs: P.all_reduce(xs, "mean", "ring"),
    "max": lambda xs: P.all_reduce(xs, "max", "tree"),
    "prod": lambda xs: P.all_reduce(xs, "prod"),
    "reduce_scatter": lambda xs: P.reduce_scatter(xs, 1, "mean"),
    "all_gather": lambda xs: P.all_gather(xs, 0),
    "all_to_all": lambda xs: P.all_to_all(xs, 1, 0),
    "all_to_all along one axis": lambda xs: P.all_to_all(xs, 1, 1),
    "broadcast": lambda xs: P.broadcast(xs[0], len(xs)),
}


def fed(fetches: list[Tensor], xs: list[Tensor], arrays: list[Any]) -> dict[Tensor, Any]:
    """The feeds on which fetches depend."""
    read = {node.outputs[0] for node in gf.Graph(fetches).placeholders}
    return {x: a for x, a in zip(xs, arrays, strict=True) if x in read}


@pytest.mark.parametrize("case", CASES)
def test_gradients_match_finite_differences(case: str) -> None:
    arrays = [RNG.normal(size=(2, 5)) for _ in range(3)]
    xs = [gf.placeholder("float64", (2, 5)) for _ in arrays]
    ys = CASES[case](xs)
    weights = [RNG.normal(size=y.shape) for y in ys]
    loss = sum(gf.sum(gf.sin(y) * w) for y, w in zip(ys[1:], weights[1:], strict=True))
    loss = loss + gf.sum(ys[0] * weights[0])
    wanted = gf.gradients(loss, xs)
    with gf.Session() as session:
        found = session.run(wanted, fed(wanted, xs, arrays))
        for i, gradient in enumerate(found):
            for at in ((0, 0), (1, 3), (0, 4)):
                ends = []
                for step in (1e-6, -1e-6):
                    moved = [a.copy() for a in arrays]
                    moved[i][at] += step
                    ends.append(session.run(loss, fed([loss], xs, moved)))
                assert gradient[at] == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-6)


@pytest.mark.parametrize(
    "case, op",
    [("sum", "all_reduce"), ("mean", "all_reduce"), ("max", "all_reduce"),
     ("reduce_scatter", "all_gather"), ("all_gather", "reduce_scatter"),
     ("all_to_all", "all_to_all")],
)  # fmt: skip
def test_the_gradient_of_a_collective_is_one_again(case: str, op: str) -> None:
    xs = [gf.placeholder("float32", (2, 6)) for _ in range(4)]
    ys = CASES[case](xs)
    seeds = [gf.constant(np.ones(y.shape, "f4")) for y in ys]
    gradients = gf.Graph(gf.gradients(ys, xs, seeds)).nodes
    assert len(groups_of([n for n in gradients if n.op.name == op])) >= 1
    assert Counter(n.op.name for n in gradients)["add"] == 0


def test_the_gradient_of_one_replicas_result_reaches_all() -> None:
    xs = [gf.placeholder("float32", (2,)) for _ in range(3)]
    found = gf.gradients(gf.sum(P.all_reduce(xs)[1] * 3), xs)
    with gf.Session() as session:
        for g in session.run(found):
            assert g.tolist() == [3, 3]


# Cost -----------------------------------------------------------------------------------------


def sum_received_bytes(results: list[Tensor], rank: int = 0) -> float:
    node = results[rank].node
    specs = [t.spec for t in node.inputs]
    return sum(received_bytes(node, j, specs) for j in range(len(specs)) if j != rank)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_an_exchange_moves_the_bytes_of_the_textbook(count: int) -> None:
    xs = [gf.placeholder("float32", (24, 10)) for _ in range(count)]
    whole = 24 * 10 * 4
    assert sum_received_bytes(P.all_reduce(xs)) == pytest.approx(2 * (count - 1) / count * whole)
    assert sum_received_bytes(P.reduce_scatter(xs)) == pytest.approx((count - 1) / count * whole)
    assert sum_received_bytes(P.all_to_all(xs)) == pytest.approx((count - 1) / count * whole)
    assert sum_received_bytes(P.all_gather(xs)) == (count - 1) * whole
    assert sum_received_bytes(P.broadcast(xs[0], 2), rank=1) == whole


def test_plans_count_and_name_what_is_exchanged() -> None:
    xs = []
    for i in range(2):
        with gf.device(f"/worker:{i}"):
            xs.append(gf.variable(np.ones((64, 64), "f4"), name=f"w{i}") * 2)
    plan = gf.plan(P.all_reduce(xs), gf.Cluster.local(2))
    between = [t for t in plan.transfers if t.target != "/client"]
    assert [t.tensor for t in between] == ["multiply:all_reduce", "multiply_1:all_reduce"]
    assert [t.bytes for t in between] == [64 * 64 * 4] * 2


def test_plans_count_shares_of_sizes_that_a_feed_fixes() -> None:
    """A gather's gradient is a scatter whose parts are as large as what was gathered."""
    x = gf.placeholder("float32", (None, 3))
    xs = []
    for i in range(2):
        with gf.device(f"/worker:{i}"):
            xs.append(gf.tanh(x * (i + 1)))
    loss = sum(gf.sum(y * y) for y in P.all_gather(xs))
    plan = gf.plan(gf.gradients(loss, xs), gf.Cluster.local(2), {x: (6, 3)})
    scattered = [t.bytes for t in plan.transfers if t.tensor.endswith(":reduce_scatter")]
    assert scattered == [6 * 3 * 4] * 2


# Bad input ------------------------------------------------------------------------------------

X = gf.placeholder("float32", (4, 3), name="x")
BAD: list[tuple[Callable[[], Any], type[GraphflowError], str]] = [
    (lambda: P.all_reduce([]), ArgumentError, "no tensors"),
    (lambda: P.all_reduce(X), ArgumentError, "tensors must be a list or tuple, not <Tensor"),
    (lambda: P.all_reduce([X, X[:2]]), ShapeError, r"axis 0.*4 != 2"),
    (lambda: P.all_reduce([X, X[0]]), ShapeError, "2 and 1 axes"),
    (lambda: P.all_reduce([X, gf.astype(X, "float64")]), DTypeError, r"tensor 1.*astype"),
    (lambda: P.all_reduce([X, X], "average"), ArgumentError, "sum, mean, max, min, prod"),
    (lambda: P.all_reduce([X, X], algorithm="star"), ArgumentError, "ring, tree, halving"),
    (lambda: P.all_reduce([X, X], algorithm="two_level"), ArgumentError, r"hosts=\(0, 0, 1, 1\)"),
    (lambda: P.all_reduce([X, X], hosts=[0]), ArgumentError, "2 ints"),
    (lambda: P.all_reduce([X > 0, X > 0]), DTypeError, "op='max' is true where any is"),
    (lambda: P.all_reduce([gf.astype(X, "int32")] * 2, "mean"), DTypeError, "astype"),
    (lambda: P.all_reduce([gf.astype(X, "complex64")] * 2, "max"), DTypeError, "no order"),
    (lambda: P.all_gather([X, X], 2), ShapeError, "axis 2 is outside a tensor of rank 2"),
    (lambda: P.all_gather([X, X[:, :2]], 0), ShapeError, "axis 1.*3 != 2"),
    (lambda: P.all_gather([X, X], 1.5), ArgumentError, "int"),  # type: ignore[arg-type]
    (lambda: P.reduce_scatter([X, X], sizes=(1, 2)), ShapeError, "3 != 4"),
    (lambda: P.reduce_scatter([X, X], sizes=(4,)), ShapeError, "1 sizes for 2 ranks"),
    (lambda: P.reduce_scatter([X, X], sizes=(5, -1)), ArgumentError, "ints of at least 0"),
    (lambda: P.reduce_scatter([X, X], op="max"), ArgumentError, '"sum" or "mean"'),
    (lambda: P.reduce_scatter([gf.placeholder("float32", (None,))] * 2), ShapeError, "2 ranks"),
    (lambda: P.broadcast(X, 0), ArgumentError, "positive int"),
    (lambda: P.broadcast(X, True), ArgumentError, "count must be an int, not True"),
    (lambda: P.broadcast(X, 2, like=[X]), ArgumentError, "1 tensors for 2 replicas"),
    (lambda: P.all_to_all([X, X[:3]], 0, 1), ShapeError, "4 != 3"),
    (lambda: P.all_to_all([X, X], 0, 5), ShapeError, "axis 5"),
]


@pytest.mark.parametrize("call, kind, words", BAD)
def test_bad_input_is_refused_with_numbers_and_the_users_line(
    call: Callable[[], Any], kind: type[GraphflowError], words: str
) -> None:
    with pytest.raises(kind, match=words) as raised:
        call()
    assert __file__ in str(raised.value)
