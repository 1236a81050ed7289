"""The page's layout of one frame, without a browser: boxes of any sizes do not overlap, and edges
run beside them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.resources import files
from itertools import combinations
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.placement.view.layout import isotonic

SERVE = """
for await (const line of require("readline").createInterface({input: process.stdin})) {
  const [name, ...given] = JSON.parse(line)
  const made = {layered, isotonic}[name](...given)
  console.log(JSON.stringify([given, made]))
}
"""
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Calls a function of layered.js; returns its arguments, which it may have changed, and its
    value."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node to run the page's code outside of a browser")
    code = files("graphflow.placement.view.page").joinpath("layered.js").read_text(encoding="utf-8")
    process = subprocess.Popen(
        [node, "-e", f"{code}\n(async () => {{ {SERVE} }})()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None

    def call(*given: Any) -> Any:
        print(json.dumps(given), file=process.stdin, flush=True)
        assert process.stdout is not None
        return json.loads(process.stdout.readline())

    with process:
        yield call
        process.stdin.close()
        assert process.wait(20) == 0


@st.composite
def frames(draw: st.DrawFn) -> tuple[list[dict[str, int]], list[tuple[int, int]]]:
    """Boxes and opened groups among them, and edges in both directions."""
    count, widest = draw(st.integers(1, 50)), draw(st.sampled_from([158, 400, 3000]))
    random = Random(draw(st.integers(0, 1 << 32)))
    boxes = [
        {"w": random.choice([158, random.randint(130, widest)]), "h": random.randint(40, widest),
         "lane": random.randrange(3)}
        for _ in range(count)
    ]  # fmt: skip
    some = random.randint(0, draw(st.sampled_from([2, 120]))) if count > 1 else 0
    return boxes, [
        (pair[0], pair[1]) for pair in (random.sample(range(count), 2) for _ in range(some))
    ]


@given(frames())
def test_boxes_of_a_frame_are_apart_and_inside_it(
    call: Call, frame: tuple[list[dict[str, int]], list[tuple[int, int]]]
) -> None:
    (boxes, _), made = call("layered", *frame)
    for a, b in combinations(boxes, 2):
        beside = a["x"] + a["w"] <= b["x"] + 0.01 or b["x"] + b["w"] <= a["x"] + 0.01
        assert beside or a["y"] + a["h"] <= b["y"] + 0.01 or b["y"] + b["h"] <= a["y"] + 0.01
    for box in boxes:
        assert box["x"] >= -0.01 and box["x"] + box["w"] <= made["w"] + 0.01
        assert box["y"] >= -0.01 and box["y"] + box["h"] <= made["h"] + 0.01


@given(frames(), st.builds(Random, st.integers(0, 1 << 32)))
def test_edges_of_a_frame_and_those_that_leave_it_run_beside_its_boxes(
    call: Call, frame: tuple[list[dict[str, int]], list[tuple[int, int]]], random: Any
) -> None:
    boxes, pairs = frame
    ports = [f"{random.choice(['top', 'bottom'])} {random.randrange(len(boxes))}" for _ in pairs]
    (boxes, _, _), made = call("layered", boxes, pairs, [*dict.fromkeys(ports)])
    low = np.array([[box["x"], box["y"]] for box in boxes])
    size = np.array([[box["w"], box["h"]] for box in boxes])
    for key, path in made["paths"].items():
        side, *ends = [key, *map(int, key.split(","))] if "," in key else key.split(" ")
        first, *last = map(int, ends)
        down = side == "bottom" if not last else leads_down(boxes, first, *last)
        start = [low[first][0] + size[first][0] / 2, low[first][1] + down * size[first][1]]
        end = [[low[i][0] + size[i][0] / 2, low[i][1] + (not down) * size[i][1]] for i in last]
        points = sample_curves(np.array([start, *path, *end]))
        others = [i for i in range(len(boxes)) if i not in (first, *last)]
        inside = (points[:, None] > low[others] + 1) & (points[:, None] < (low + size)[others] - 1)
        assert not inside.all(axis=-1).any(), (key, points[inside.all(axis=-1).any(axis=1)])


def sample_curves(points: np.ndarray, steps: int = 12) -> np.ndarray:
    """Points on the curves from each of `points` (n, 2) to the next, which leave and arrive
    vertically: ((n - 1) * steps, 2)."""
    t = np.linspace(0, 1, steps)[None, :, None]
    start, end = points[:-1, None], points[1:, None]
    middle = (start[..., 1:] + end[..., 1:]) / 2
    first, second = (np.concatenate([p[..., :1], middle], -1) for p in (start, end))
    u = 1 - t
    curve = u**3 * start + 3 * u**2 * t * first + 3 * u * t**2 * second + t**3 * end
    return np.asarray(curve.reshape(-1, 2))


def leads_down(boxes: list[dict[str, int]], first: int, last: int) -> bool:
    return boxes[first]["column"] < boxes[last]["column"] or (
        boxes[first]["column"] == boxes[last]["column"] and boxes[first]["y"] < boxes[last]["y"]
    )


def test_boxes_of_one_size_fill_rows_in_turn(call: Call) -> None:
    boxes = [{"w": 158, "h": 40, "lane": 0} for _ in range(24)]
    (placed, _), made = call("layered", boxes, [])
    rows = sorted({box["y"] for box in placed})
    assert len(rows) > 2 and made["w"] < 6 * made["h"]
    assert [rows.index(box["y"]) for box in placed] == [i % len(rows) for i in range(24)]


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 8)), min_size=1, max_size=30))
def test_the_page_and_paper_agree_on_isotonic_regression(
    call: Call, pairs: list[tuple[int, int]]
) -> None:
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    assert call("isotonic", values, weights)[1] == pytest.approx(isotonic(values, weights))
