"""Images cut over devices: halos are what windows see, the bytes reported those that travel, and
results and gradients those of whole images."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ShapeError, ShardingError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import Layout
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph
from graphflow.parallel.sharding.partitioner import partition_graph

C, W, ITEM = 2, 5, 8


def cut(
    outputs: list[Any], x: gf.Tensor, mesh: dict[str, int], axes: tuple[str | None, str | None]
) -> ShardedGraph:
    """A graph whose images are cut along both axes."""
    names = [DeviceName.parse(f"/worker:{i}/cpu:0") for i in range(prod(mesh.values()))]
    dims = (AxisSplit(), AxisSplit(), *(AxisSplit((a,)) if a else AxisSplit() for a in axes))
    return partition_graph(Graph(outputs), Mesh(mesh, names), {x: Layout(dims)})


def run(division: ShardedGraph, feeds: dict[Any, Any]) -> list[Any]:
    arrays = {t.node: a for t, a in feeds.items()}
    own = {n.outputs[0]: a for n, a in division.feeds(arrays, {}).items()} | feeds
    used = {t: a for t, a in own.items() if t.node in division.graph.names}
    return list(evaluate(list(division.graph.outputs), used))


def count_crossing_bytes(division: ShardedGraph) -> int:
    """Bytes of all tensors but scalars that one device reads and another one made."""
    found = {
        (t, node.device): int(t.size) * t.dtype.itemsize  # type: ignore[arg-type]
        for node in division.graph.nodes
        for t in node.inputs
        if t.ndim and str(t.node.device) and t.node.device != node.device
    }
    return sum(found.values())


def halos(division: ShardedGraph) -> int:
    return sum(move.bytes for move in division.records if move.kind == "halo")


@pytest.mark.parametrize("places", [2, 3, 4])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7])
def test_an_inner_cut_costs_what_windows_see_beyond_it(k: int, places: int) -> None:
    """Twice ⌊k/2⌋ rows for odd windows; even ones see one row less on one side: k - 1."""
    x = gf.placeholder("float64", (1, C, 13, W))
    w = gf.placeholder("float64", (3, C, k, k))
    y = gf.nn.conv(x, w, padding=((k - 1) // 2, k // 2))
    division = cut([gf.sum(y)], x, {"s": places}, ("s", None))
    rows = 2 * (k // 2) if k % 2 else k - 1
    assert halos(division) == rows * W * C * ITEM * (places - 1)


def test_corners_come_with_the_second_of_two_axes() -> None:
    x = gf.placeholder("float64", (1, C, 8, 6))
    w = gf.placeholder("float64", (3, C, 3, 5))
    y = gf.nn.conv(x, w, padding=((1, 1), (2, 2)))
    division = cut([gf.sum(y)], x, {"a": 2, "b": 2}, ("a", "b"))
    down, across = 2 * 1 * 6, 2 * 2 * (8 + 2 * 1)
    assert [m.bytes for m in division.records if m.kind == "halo"] == [
        down * C * ITEM, across * C * ITEM,
    ]  # fmt: skip
    assert count_crossing_bytes(division) == (down + across) * C * ITEM


KINDS = ("conv", "conv_transpose", "max_pool", "avg_pool")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_windows_of_any_kind_get_no_more_than_is_reported(data: Any) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(KINDS))
    k = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    options: dict[str, Any] = {
        "stride": stride,
        "padding": tuple((draw(st.integers(0, n // 2)), draw(st.integers(0, n // 2))) for n in k),
    }
    if kind != "avg_pool":
        options["dilation"] = (draw(st.integers(1, 3)), 1)
    mesh, axes = draw(
        st.sampled_from(
            [({"s": 2}, ("s", None)), ({"s": 4}, ("s", None)), ({"s": 3}, (None, "s")),
             ({"s": 3, "t": 2}, ("s", "t")), ({"s": 2, "t": 2}, ("t", "s"))]
        )
    )  # fmt: skip
    size = draw(st.integers(4, 17)), draw(st.integers(4, 9))
    random = np.random.default_rng(draw(st.integers(0, 9)))
    x = gf.placeholder("float64", (2, 4, *size))
    feeds = {x: random.normal(size=(2, 4, *size))}
    if kind.startswith("conv"):
        groups = draw(st.sampled_from([1, 2, 4])) if kind == "conv" else 1
        options |= {"groups": groups} if kind == "conv" else {}
        w = gf.placeholder("float64", (4, 4 // groups, *k))
        feeds[w] = random.normal(size=(4, 4 // groups, *k))
    try:
        y = getattr(gf.nn, kind)(*([x, w] if kind.startswith("conv") else [x, k]), **options)
    except ShapeError:
        return  # no window fits
    loss = gf.sum(y * y * y)
    outputs = [y, loss, *gf.gradients(loss, list(feeds))]
    division = cut(outputs, x, mesh, axes)
    for have, want in zip(run(division, feeds), evaluate(outputs, feeds), strict=True):
        scale = max(1.0, float(np.abs(want).max()))
        assert have.shape == want.shape
        np.testing.assert_allclose(have / scale, want / scale, rtol=0, atol=1e-12)
    forward = cut([gf.sum(y)], x, mesh, axes)
    if {move.kind for move in forward.records} <= {"halo", "all-reduce"}:
        assert halos(forward) == count_crossing_bytes(forward)


def test_a_halo_may_be_wider_than_the_neighbours_piece() -> None:
    x = gf.placeholder("float64", (1, 1, 8, 3))
    w = gf.placeholder("float64", (1, 1, 3, 1))
    y = gf.nn.conv(x, w, dilation=(3, 1), padding=((3, 3), (0, 0)))
    loss = gf.sum(y * y)
    outputs = [y, *gf.gradients(loss, [x, w])]
    random = np.random.default_rng(0)
    feeds = {x: random.normal(size=(1, 1, 8, 3)), w: random.normal(size=(1, 1, 3, 1))}
    for places in (4, 8):
        division = cut(outputs, x, {"s": places}, ("s", None))
        assert not [move for move in division.records if move.kind == "all-gather"]
        for have, want in zip(run(division, feeds), evaluate(outputs, feeds), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)


def test_more_places_than_rows_is_an_error_with_the_numbers() -> None:
    x = gf.placeholder("float32", (1, 1, 3, 8), name="images")
    w = gf.variable(np.ones((1, 1, 3, 3), "float32"), name="w")
    loss = gf.mean(gf.square(gf.nn.conv(x, w, padding=1)))
    strategy = gf.parallel.Shard({"space": 4}, {"images": (None, None, "space")})
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    with pytest.raises(ShardingError, match=r"axis 2 into 4.*is 3, too small for 4"):
        strategy.report([loss, train])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_an_axis_may_be_cut_along_two_axes_of_the_mesh_in_either_order(data: Any) -> None:
    """Bands of bands are bands: as many bytes travel as between so many of one axis."""
    order = data.draw(st.sampled_from([("a", "b"), ("b", "a")]))
    sizes = {"a": 2, "b": data.draw(st.integers(2, 3))}
    k, stride = data.draw(st.sampled_from([2, 3, 5])), data.draw(st.integers(1, 2))
    bands = 2 * sizes["b"]
    height = data.draw(st.integers(3 * bands * stride, 3 * bands * stride + 5))
    x = gf.placeholder("float64", (1, C, height, W))
    w = gf.placeholder("float64", (2, C, k, 1))
    y = gf.nn.conv(x, w, stride=(stride, 1), padding=((k // 2, (k - 1) // 2), (0, 0)))
    loss = gf.sum(y * y)
    outputs = [y, loss, *gf.gradients(loss, [x, w])]
    names = [DeviceName.parse(f"/worker:{i}/cpu:0") for i in range(bands)]

    def divide(mesh: dict[str, int], axes: tuple[str, ...]) -> ShardedGraph:
        layout = Layout((AxisSplit(), AxisSplit(), AxisSplit(axes), AxisSplit()))
        return partition_graph(Graph(outputs), Mesh(mesh, names), {x: layout})

    division = divide(sizes, order)
    assert {move.kind for move in division.records} <= {"halo", "all-reduce"}
    if height % (bands * stride) == 0:  # else other bands are larger by one
        assert halos(division) == halos(divide({"a": bands}, ("a",)))
    random = np.random.default_rng(0)
    feeds = {x: random.normal(size=(1, C, height, W)), w: random.normal(size=(2, C, k, 1))}
    for have, want in zip(run(division, feeds), evaluate(outputs, feeds), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-11, atol=1e-11)


MODES = {
    "nearest": {}, "nearest-exact": {}, "bilinear": {}, "bicubic": {}, "area": {},
    "corners": {"mode": "bicubic", "align_corners": True},
    "wide": {"mode": "bilinear", "antialias": True},
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_resized_images_get_what_their_pieces_are_made_of(data: Any) -> None:
    draw = data.draw
    options = MODES[mode := draw(st.sampled_from([*MODES]))] or {"mode": mode}
    mesh, axes = draw(
        st.sampled_from(
            [({"s": 2}, ("s", None)), ({"s": 3}, (None, "s")), ({"s": 3, "t": 2}, ("s", "t"))]
        )
    )  # fmt: skip
    size = draw(st.integers(3, 13)), draw(st.integers(3, 9))
    x = gf.placeholder("float64", (2, C, *size))
    y = gf.nn.interpolate(x, (draw(st.integers(3, 20)), draw(st.integers(3, 9))), **options)
    loss = gf.sum(y * y * y)
    outputs = [y, loss, *gf.gradients(loss, [x])]
    division = cut(outputs, x, mesh, axes)
    feeds = {x: np.random.default_rng(0).normal(size=(2, C, *size))}
    for have, want in zip(run(division, feeds), evaluate(outputs, feeds), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)
    assert {move.kind for move in division.records} <= {"halo", "all-reduce"}
    forward = cut([gf.sum(y)], x, mesh, axes)
    assert halos(forward) == count_crossing_bytes(forward)


@pytest.mark.parametrize("places", [2, 4])
def test_a_row_each_way_is_what_images_twice_as_large_are_made_of(places: int) -> None:
    x = gf.placeholder("float64", (1, C, 12, W))
    y = gf.nn.interpolate(x, scale=2, mode="bilinear")
    assert halos(cut([gf.sum(y)], x, {"s": places}, ("s", None))) == 2 * W * C * ITEM * (places - 1)
    doubled = gf.nn.interpolate(x, scale=2, mode="nearest")
    assert not halos(cut([gf.sum(doubled)], x, {"s": places}, ("s", None)))
