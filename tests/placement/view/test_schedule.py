"""The picture of a pipeline's schedule: its axes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from graphflow.placement.plans.plan import Plan
from graphflow.placement.view.schedule import FAR, LEFT, RIGHT, WIDTH, axes, legend, picture, rows
from tests.placement.view.view_plans import Drawing, add_measurements


def pipeline() -> Plan:
    """Two micro-batches through two stages and back."""
    d = Drawing(2)
    for micro in range(2):
        below = d.add(f"f{micro}", "tanh", 0, (), (8, 8), 1e-3)
        top = d.add(f"g{micro}", "tanh", 1, [below], (8, 8), 1e-3)
        back = d.add(f"b{micro}", "tanh", 1, [top], (8, 8), 2e-3)
        d.add(f"c{micro}", "tanh", 0, [back], (8, 8), 2e-3)
    for name, node in d.nodes.items():
        d.nodes[name] = replace(node, task=f"{'F' if name[0] in 'fg' else 'B'}{name[1]}")
    return d.plan()


def widths(text: str) -> list[float]:
    return [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', text)]


def test_predicted_and_measured_of_similar_length_share_an_axis() -> None:
    drawn = rows(add_measurements(pipeline(), 1.5))
    assert axes(drawn)["predicted"] == axes(drawn)["measured"]
    assert "axis" not in legend(drawn)


@pytest.mark.parametrize("slower", [100.0, 0.01])
def test_a_step_that_took_far_longer_or_shorter_has_an_axis_of_its_own(slower: float) -> None:
    drawn = rows(add_measurements(pipeline(), slower))
    found = axes(drawn)
    spans = {kind: end - begin for kind, (begin, end) in found.items()}
    assert max(spans.values()) > FAR * min(spans.values())
    assert "each on an axis of its own: predicted " in legend(drawn)
    assert ", measured " in legend(drawn)
    wide = iter(widths(picture(drawn)))
    for row in drawn:  # each kind fills the picture
        scale = (WIDTH - LEFT - RIGHT) / spans[row.kind]
        for bar in row.bars:
            assert next(wide) == pytest.approx((bar.finish - bar.start) * scale, abs=0.01)


def test_a_plan_that_was_not_run_has_one_axis() -> None:
    drawn = rows(pipeline())
    assert list(axes(drawn)) == ["predicted"]
    assert len(widths(picture(drawn))) == sum(len(row.bars) for row in drawn)
    assert rows(Drawing(1).plan()) == []


def test_a_common_axis_of_time_has_round_numbers_with_units() -> None:
    drawn = rows(add_measurements(pipeline(), 1.5))
    told = re.findall(
        r'<text x="([\d.]+)" y="\d+" text-anchor="middle"[^>]*>([^<]+)</text>', picture(drawn)
    )
    begin, end = axes(drawn)["predicted"]
    ticks = [(float(x), label) for x, label in told if re.fullmatch(r"0|[\d.]+ m?s", label)]
    assert 3 <= len(ticks) <= 10 and any(label.endswith("ms") for _, label in ticks)
    for x, label in ticks:
        time = 0.0 if label == "0" else float(label.split()[0]) / 1e3
        scale = (WIDTH - LEFT - RIGHT) / (end - begin)
        assert x == pytest.approx(LEFT + (time - begin) * scale, abs=1)
    far = picture(rows(add_measurements(pipeline(), 100.0)))
    assert "<line" not in far  # two axes: the legend tells how long they are
