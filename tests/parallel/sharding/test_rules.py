"""Every op, cut along every axis of every sample, gives what it gives whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.base.lazy_dataclass import dataclass
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Op, Sample
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import Layout, whole
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph
from graphflow.parallel.sharding.partitioner import partition_graph
from graphflow.parallel.sharding.rules.node_rule import rule_of
from graphflow.transforms.op_testing import draw

AXIS = "m"
OPS = [op for op in REGISTRY.values() if op.samples and op.name not in ("print", "check")]

MOVING = ("placeholder", "slice", "concat", "all_gather", "all_to_all", "reshape", "constant")
BY_SHAPE = (
    "matmul", "accumulate_product", "conv", "conv_transpose", "conv_weight_grad", "solve",
    "csr_matmul", "attention", "attention_grad", "attention_mask_grad", "batch_norm",
    "batch_norm_grad", "prod", "prod_others",
)  # fmt: skip
"""Ops that add in an order which depends on the shapes of what they get: BLAS, LAPACK, numpy."""


def mesh_of(count: int) -> Mesh:
    names = [DeviceName.parse(f"/worker:{i}/cpu:0") for i in range(count)]
    return Mesh({AXIS: count}, names)


def cut_along(axis: int, rank: int) -> Layout:
    return whole(rank).with_dim(axis, AxisSplit((AXIS,)))


def run(division: ShardedGraph, feeds: dict[Any, Any]) -> list[Any]:
    """The outputs of a divided graph, on one device."""
    sizes: dict[str, int] = {}
    arrays = {t.node: a for t, a in feeds.items()}
    own = {t: a for t, a in feeds.items() if t.node in division.graph.names}
    own |= {n.outputs[0]: a for n, a in division.feeds(arrays, sizes).items()}
    own = {t: a for t, a in own.items() if t.node in division.graph.names}
    return list(evaluate(list(division.graph.outputs), own))


def cases(op: Op) -> list[tuple[int, int, int, int]]:
    """Sample, input (-1: the output), axis, shards."""
    found = []
    for s, sample in enumerate(op.samples):
        specs = list(sample.inputs)
        if not specs:
            made = op.infer(**sample.attrs)
            specs = [made if not isinstance(made, tuple) else made[0]]
        for i, spec in enumerate(specs):
            for d, size in enumerate(spec.shape):
                for count in (2, 3):
                    if isinstance(size, int) and size >= count:
                        found.append((s, i if sample.inputs else -1, d, count))
    return found


def close(have: Any, want: Any, sample: Sample) -> bool:
    if have.dtype.kind not in "fcV":
        return bool(np.array_equal(have, want))
    wide = np.complex128 if have.dtype.kind == "c" else np.float64
    return bool(
        np.allclose(have.astype(wide), want.astype(wide), rtol=2e-5, atol=2e-5, equal_nan=True)
    )


@dataclass(frozen=True)
class Ran:
    """A sample of an op, cut along an axis, and what it gave."""

    told: str
    sample: Sample
    whole: list[Any]
    cut: list[Any]
    partial: bool  # whether sums were divided
    ops: frozenset[str]  # that it was written with


def ran(op: Op) -> Iterator[Ran]:
    """All cases of an op."""
    for s, i, d, count in cases(op):
        sample = op.samples[s]
        arrays = draw(sample, op.name)
        xs = [gf.placeholder(a.dtype, a.shape) for a in arrays]
        made = op(*xs, **sample.attrs)
        outputs = list(made) if isinstance(made, tuple) else [made]
        target = xs[i] if i >= 0 else outputs[0]
        division = partition_graph(
            Graph(outputs), mesh_of(count), {target: cut_along(d, target.ndim)}
        )
        feeds = dict(zip(xs, arrays, strict=True))
        with np.errstate(all="ignore"):
            want, have = evaluate(outputs, feeds), run(division, feeds)
        yield Ran(
            f"sample {s}, input {i}, axis {d}, {count} shards", sample, list(want), have,
            any(division.values[t].layout.partial for t in outputs),
            frozenset(n.op.name for n in division.graph.nodes),
        )  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_op_cut_along_any_axis_gives_what_it_gives_whole(op: Op) -> None:
    """To the bit, where no sum is divided, and the op does not add in another order."""
    for each in ran(op):
        for a, b in zip(each.cut, each.whole, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), each.told
            assert close(a, b, each.sample), f"{each.told}: {a!r} is not {b!r}"
        if op.rows is not None or op.name in BY_SHAPE or each.partial:
            continue
        if each.ops - {op.name, *MOVING}:
            continue  # made of simpler ops
        pairs = zip(each.cut, each.whole, strict=True)
        assert all(a.tobytes() == b.tobytes() for a, b in pairs), f"{each.told}: other bits"


def test_most_ops_are_cut_where_they_can_be() -> None:
    """Those that need everything whole are known by name."""
    whole_ones = {op.name for op in OPS if not any(letters_of(op, s) for s in op.samples)}
    assert whole_ones == {
        "accumulate_product", "all_gather", "all_reduce", "all_to_all", "broadcast",
        "compressed_sum", "coordinate_order", "coordinate_pass", "count_keys", "csr_places",
        "flat_elements", "gram", "hash_find", "hash_insert", "host_call", "merge_ids",
        "merge_keys", "merge_row_sums", "non_max_suppression", "nonzero", "pack_planes",
        "part_product", "part_squares", "part_sums", "place_rows",
        "pure_host_call", "pushed_gradient", "read_rows", "reduce_scatter", "route_ids",
        "route_rows", "size_of", "split_row_sums", "svmlight_rows", "svmlight_sizes",
        "tap_positions", "unique", "unpack_planes", "window_rows",
    }  # fmt: skip


def letters_of(op: Op, sample: Sample) -> set[str]:
    """The letters of an op's equation for a sample."""
    xs = [gf.placeholder(s.dtype, s.shape) for s in sample.inputs]
    made = op(*xs, **sample.attrs)
    node = (made[0] if isinstance(made, tuple) else made).node
    return set(rule_of(node).sizes)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_windows_of_any_form_are_cut_with_their_gradients(data: Any) -> None:
    size = data.draw(st.integers(4, 13))
    kernel, stride, dilation = (data.draw(st.integers(1, 3)) for _ in range(3))
    span = (kernel - 1) * dilation + 1
    before, after = (data.draw(st.integers(0, kernel // 2 + 1)) for _ in range(2))
    if size + before + after < span:
        return
    out = (size + before + after - span) // stride + 1
    count = data.draw(st.integers(2, 4))
    if min(out, size) < count:
        return
    groups = data.draw(st.sampled_from([1, 2]))
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    x = gf.placeholder("float64", (2, 4, size, 3))
    w = gf.placeholder("float64", (4, 4 // groups, kernel, 1))
    y = gf.nn.conv(
        x, w, stride=(stride, 1), dilation=(dilation, 1), padding=((before, after), (0, 0)),
        groups=groups,
    )  # fmt: skip
    loss = gf.sum(y * y)
    outputs = [y, loss, *gf.gradients(loss, [x, w])]
    division = partition_graph(Graph(outputs), mesh_of(count), {x: cut_along(2, 4)})
    feeds = {x: random.normal(size=(2, 4, size, 3)), w: random.normal(size=tuple(w.shape))}  # type: ignore[arg-type]
    for have, want in zip(run(division, feeds), evaluate(outputs, feeds), strict=True):
        assert np.allclose(have, want, rtol=1e-10, atol=1e-10)


def test_an_op_of_the_users_is_cut_by_its_own_rule() -> None:
    op = Op(
        "test_doubled_rows",
        infer=lambda x: x,
        kernel=lambda xp, x: x * 2,
        sharding=lambda x: "a.->a.",
    )
    x = gf.placeholder("float64", (4, 3))
    division = partition_graph(Graph([op(x)]), mesh_of(2), {x: cut_along(0, 2)})
    assert not division.records
    (have,) = run(division, {x: np.ones((4, 3))})
    assert np.array_equal(have, np.full((4, 3), 2.0))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_axes_that_are_merged_and_parted_again_keep_their_cut(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    count = data.draw(st.integers(2, 3))
    if shape[axis] < count:
        return
    x = gf.placeholder("float64", shape)
    first = data.draw(st.integers(0, len(shape) - 2))
    last = data.draw(st.integers(first + 2, len(shape)))
    merged = int(np.prod(shape[first:last]))
    one = gf.reshape(x, (*shape[:first], merged, *shape[last:]))
    scaled = one * 2.0 + gf.mean(one, axis=first, keepdims=True)
    back = gf.reshape(scaled, shape)
    other = gf.reshape(scaled, (-1,))
    table = gf.constant(np.arange(float(merged)))
    weighted = gf.sum(gf.moveaxis(scaled, first, -1) * table)
    outputs = [back, other, weighted, gf.cumsum(back, axis=axis), *gf.gradients(weighted, [x])]
    division = partition_graph(Graph(outputs), mesh_of(count), {x: cut_along(axis, len(shape))})
    feeds = {x: np.random.default_rng(0).normal(size=shape)}
    for have, want in zip(run(division, feeds), evaluate(outputs, feeds), strict=True):
        assert np.allclose(have, want, rtol=1e-12, atol=1e-12)


def test_what_becomes_one_axis_is_cut_in_it_beside_another_one() -> None:
    """(T, B, D) -> (T·B, D), batch and features cut, as a recurrent layer's gradients are."""
    x = gf.placeholder("float64", (5, 6, 4), name="x")
    both = gf.reshape(x, (30, 4))
    mesh = Mesh({"d": 2, "m": 2}, [DeviceName()] * 4)
    cut = Layout((AxisSplit(), AxisSplit(("d",)), AxisSplit(("m",))))
    division = partition_graph(Graph([gf.sum(both)]), mesh, {x: cut})
    assert not division.records  # but what is fetched is added up at the first place


def test_units_of_a_size_that_a_feed_fixes_are_cut() -> None:
    """(5, n) -> (5·n): the five are cut, in units of n."""
    x = gf.placeholder("float64", (5, "n"), name="x")
    one = gf.reshape(x, (-1,))
    division = partition_graph(Graph([gf.sum(one)]), mesh_of(2), {x: cut_along(0, 2)})
    assert not division.records
    assert [str(part.shape[0]) for part in division.values[one].shards] == ["3*n", "2*n"]


ROWS, WIDE = 6, 8
ROW = 4 * WIDE * 8
"""Bytes of one place of the axis that is cut, over the others."""
TRAVELS: dict[str, tuple[Any, dict[str, int]]] = {
    "one place": (lambda x: x[:, 3], {"halo": ROW}),
    "the last place": (lambda x: x[:, -1], {"halo": ROW}),
    "a part": (lambda x: x[:, 1:5], {}),
    "every other": (lambda x: x[:, ::2], {}),
    "differences": (lambda x: x[:, 1:] - x[:, :-1], {"halo": ROW}),
    "rolled": (lambda x: gf.roll(x, 1, 1), {"halo": 2 * ROW}),
    "turned round": (lambda x: gf.flip(x, 1), {"halo": ROWS * ROW}),
    "padded": (lambda x: gf.pad(x, ((0, 0), (1, 2), (0, 0))), {"halo": ROW}),
    "joined": (lambda x: gf.concat([x, x * 2.0], 1), {"halo": 6 * ROW}),
    "a token before": (lambda x: gf.concat([gf.zeros((4, 1, WIDE), "float64"), x], 1), {"halo": 0}),
    "largest place": (lambda x: gf.argmax(x, 1), {"all-reduce": 2 * ROW}),
    "smallest place of all": (gf.argmin, {"all-reduce": 2 * 8}),
    "sorted along others": (lambda x: gf.sort(x, axis=2), {}),
    "sums along others": (lambda x: gf.cumsum(x, axis=0), {}),
    "the largest along others": (lambda x: gf.top_k(x, 2)[0], {}),
    "running sums": (lambda x: gf.cumsum(x, axis=1), {"meeting": ROW}),
    "running maxima": (lambda x: gf.cummax(x, axis=1), {"meeting": ROW}),
    "the largest one": (lambda x: gf.top_k(x, 1, 1)[1], {"meeting": 2 * 2 * ROW}),
    "the largest half": (lambda x: gf.top_k(x, 3, 1)[0], {"all-to-all": ROWS * ROW // 2}),
    "sorted": (lambda x: gf.sort(x, 1), {"all-to-all": ROWS * ROW // 2}),
    "sorted, nothing beside": (lambda x: gf.sort(gf.sum(x, (0, 2))), {"all-gather": ROWS * 8}),
    "frequencies": (lambda x: gf.abs(gf.fft.fft(x, axis=1)), {"all-to-all": ROWS * ROW // 2}),
    "frequencies, there and back": (
        lambda x: gf.fft.irfft(gf.fft.rfft(x, axis=1) * 2.0, axis=1) + x,
        {"all-to-all": ROWS * ROW},
    ),
    "frequencies, nothing beside": (
        lambda x: gf.real(gf.fft.fft(gf.sum(x, (0, 2)))), {"all-gather": ROWS * 8},
    ),
    "softmax": (lambda x: gf.nn.softmax(x, 1), {"all-reduce": 4 * ROW}),
    "a product": (lambda x: gf.einsum("bth,hk->btk", x, gf.eye(WIDE, dtype="float64")), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAVELS)
def test_what_is_cut_stays_so_and_no_more_travels_than_is_seen(name: str) -> None:
    build, expected = TRAVELS[name]
    x = gf.placeholder("float64", (4, ROWS, WIDE))
    y = build(x)
    division = partition_graph(Graph([y]), mesh_of(2), {x: cut_along(1, 3)})
    found: dict[str, int] = {}
    for move in division.records:
        found[move.kind] = found.get(move.kind, 0) + move.bytes
    feeds = {x: np.random.default_rng(0).normal(size=(4, ROWS, WIDE))}
    (have,), (want,) = run(division, feeds), evaluate([y], feeds)
    np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-13)
    assert found == {kind: size for kind, size in expected.items() if size}


@pytest.mark.parametrize(
    "build",
    [
        lambda x: gf.tril(x, k=2),
        lambda x: gf.nn.batch_norm(
            gf.reshape(x, (1, 1, 6, 1)), None, None, np.zeros(1), np.ones(1), training=True
        )[0],
        lambda x: x + gf.eye(1, 6, dtype="float64"),
        lambda x: gf.var(x, axis=(0, 1)),
    ],
)
def test_axes_of_one_element_stand_beside_those_that_are_cut(build: Any) -> None:
    x = gf.placeholder("float64", (1, 6))
    loss = gf.sum(build(x) ** 2.0)
    fetches = [loss, *gf.gradients(loss, [x])]
    division = partition_graph(Graph(fetches), mesh_of(2), {x: cut_along(1, 2)})
    feeds = {x: np.random.default_rng(0).normal(size=(1, 6))}
    for have, want in zip(run(division, feeds), evaluate(fetches, feeds), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-13)


def test_a_place_of_one_axis_travels_in_the_pieces_of_another() -> None:
    x = gf.placeholder("float64", (4, 6, 8))
    names = [DeviceName.parse(f"/worker:{i}/cpu:0") for i in range(4)]
    layout = cut_along(1, 3).with_dim(2, AxisSplit(("n",)))
    division = partition_graph(Graph([x[:, -1]]), Mesh({AXIS: 2, "n": 2}, names), {x: layout})
    assert [(move.kind, move.bytes) for move in division.records] == [("halo", 4 * 8 * 8)]
    assert str(division.values[division.source.outputs[0]].layout) == "(·, n)"


def test_the_first_of_equal_elements_is_found_and_what_is_no_number_before_it() -> None:
    values = np.array([[1.0, 3.0, 3.0, 0.0, 3.0], [1.0, np.inf, np.nan, np.nan, 2.0]])
    x = gf.placeholder("float64", (2, 5))
    outputs = [gf.argmax(x, 1), gf.argmin(x, 1, keepdims=True), gf.argmax(x)]
    for count in (2, 3, 5):
        division = partition_graph(Graph(outputs), mesh_of(count), {x: cut_along(1, 2)})
        for have, want in zip(
            run(division, {x: values}), evaluate(outputs, {x: values}), strict=True
        ):
            assert np.array_equal(have, want)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_the_largest_few_of_pieces_are_those_of_the_whole(largest: bool, ordered: bool) -> None:
    """With equals, of which the first come first, and what is no number."""
    random = np.random.default_rng(0)
    values = random.integers(0, 4, (5, 23)).astype("float32")
    values[1, 3:20:4], values[2] = np.nan, 1.0
    x = gf.placeholder("float32", (5, 23))
    best, places = gf.top_k(x, 5, largest=largest, sorted=ordered)
    outputs = [best, places, *gf.gradients(gf.sum(best * 2.0), [x])]
    for count in (2, 3, 7):
        division = partition_graph(Graph(outputs), mesh_of(count), {x: cut_along(1, 2)})
        assert "all-gather" not in {move.kind for move in division.records}
        feeds = {x: values}
        for have, want in zip(run(division, feeds), evaluate(outputs, feeds), strict=True):
            assert have.tobytes() == want.tobytes()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_running_sums_go_on_from_piece_to_piece(data: Any) -> None:
    """Forwards and, in the gradient, backwards; beside another axis of the mesh."""
    shape = (data.draw(st.integers(2, 5)), data.draw(st.integers(2, 9)))
    axis = data.draw(st.integers(0, 1))
    sizes = {"a": data.draw(st.integers(2, 3)), "b": 2}
    layout = whole(2).with_dim(axis, AxisSplit(("a",))).with_dim(1 - axis, AxisSplit(("b",)))
    if shape[axis] < sizes["a"]:
        return
    x = gf.placeholder("float64", shape)
    y = gf.cumsum(x, axis=axis)
    outputs = [y, *gf.gradients(gf.sum(y * y * y), [x])]
    names = [DeviceName.parse(f"/worker:{i}/cpu:0") for i in range(2 * sizes["a"])]
    division = partition_graph(Graph(outputs), Mesh(sizes, names), {x: layout})
    assert {move.kind for move in division.records} == {"meeting"}
    feeds = {x: np.random.default_rng(0).normal(size=shape)}
    for have, want in zip(run(division, feeds), evaluate(outputs, feeds), strict=True):
        assert np.allclose(have, want, rtol=1e-12, atol=1e-12)
