"""The layered layout: nothing overlaps, arrows go forward, the same graph is drawn the same way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.errors import PlanError
from graphflow.placement.view.layout import NODE_HEIGHT, NODE_WIDTH, GraphLayout, arrange, isotonic


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[int], int]:
    count = draw(st.integers(1, 60))
    lane_count = draw(st.integers(1, 4))
    lanes = draw(st.lists(st.integers(0, lane_count - 1), min_size=count, max_size=count))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    edges = [(min(p), max(p)) for p in draw(st.lists(pairs, max_size=150)) if p[0] != p[1]]
    return count, edges, lanes, lane_count


def overlaps(layout: GraphLayout) -> list[tuple[int, int]]:
    boxes = sorted(range(len(layout.x)), key=lambda i: layout.y[i])
    found = []
    for k, a in enumerate(boxes):
        for b in boxes[k + 1 :]:
            if layout.y[b] >= layout.y[a] + NODE_HEIGHT:
                break
            if abs(layout.x[a] - layout.x[b]) < NODE_WIDTH - 1e-6:
                found.append((a, b))
    return found


@given(graphs())
def test_no_two_nodes_overlap(graph: tuple[int, list[tuple[int, int]], list[int], int]) -> None:
    assert overlaps(arrange(*graph)) == []


@given(graphs())
def test_every_arrow_goes_forward(graph: tuple[int, list[tuple[int, int]], list[int], int]) -> None:
    layout = arrange(*graph)
    for a, b in graph[1]:
        assert layout.layer[a] < layout.layer[b]
        assert (layout.column[a], layout.y[a]) < (layout.column[b], layout.y[b])


@given(graphs())
def test_routes_are_exactly_the_edges_and_end_at_their_nodes(
    graph: tuple[int, list[tuple[int, int]], list[int], int],
) -> None:
    layout = arrange(*graph)
    drawn = {(route.source, reader) for route in layout.routes for reader in route.readers}
    assert drawn == set(graph[1])
    for route in layout.routes:
        for reader, path in zip(route.readers, route.paths, strict=True):
            assert path[0] == (layout.x[route.source], layout.y[route.source] + NODE_HEIGHT)
            assert path[-1] == (layout.x[reader], layout.y[reader])


@given(graphs())
def test_nodes_stay_in_their_lanes_and_in_the_picture(
    graph: tuple[int, list[tuple[int, int]], list[int], int],
) -> None:
    layout = arrange(*graph)
    for i, lane in enumerate(graph[2]):
        left, right = layout.x[i] - NODE_WIDTH / 2, layout.x[i] + NODE_WIDTH / 2
        assert any(a <= left and right <= b for a, b, which in layout.lanes if which == lane)
        assert left >= 0 and right <= layout.width
        assert layout.y[i] >= 0 and layout.y[i] + NODE_HEIGHT <= layout.height


def test_the_same_graph_is_drawn_the_same_way() -> None:
    edges = [(i // 3, i) for i in range(1, 90)]
    lanes = [i % 3 for i in range(90)]
    assert arrange(90, edges, lanes, 3) == arrange(90, edges, lanes, 3)


def test_a_wide_layer_wraps_into_rows_without_overlap() -> None:
    layout = arrange(301, [(0, i) for i in range(1, 301)], [0] * 301, 1)
    assert layout.width < 3 * layout.height
    assert overlaps(layout) == []


def test_a_very_deep_graph_folds_into_columns() -> None:
    layout = arrange(500, [(i, i + 1) for i in range(499)], [0] * 500, 1)
    assert max(layout.column) > 2
    assert layout.height < 4 * layout.width


def test_ten_thousand_nodes_deep_and_wide_are_laid_out() -> None:
    edges = [(max(0, i - 1 - (i * 7919) % 97), i) for i in range(1, 10_000)]
    layout = arrange(10_000, edges, [i % 4 for i in range(10_000)], 4)
    assert len(layout.x) == 10_000
    assert overlaps(layout) == []


def test_nothing_is_laid_out_as_nothing() -> None:
    layout = arrange(0, [], [], 0)
    assert (layout.x, layout.routes, layout.width) == ([], [], 0.0)


def test_nodes_that_read_each_other_are_refused() -> None:
    with pytest.raises(PlanError, match="circle"):
        arrange(3, [(0, 1), (1, 2), (2, 1)], [0, 0, 0], 1)


@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(0.5, 8)), min_size=1, max_size=30))
def test_isotonic_regression_is_sorted_and_keeps_the_weighted_mean(
    pairs: list[tuple[float, float]],
) -> None:
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    fitted = isotonic(values, weights)
    assert all(a <= b + 1e-9 for a, b in pairwise(fitted))
    total = sum(v * w for v, w in pairs)
    assert sum(f * w for f, w in zip(fitted, weights, strict=True)) == pytest.approx(
        total, abs=1e-6
    )
