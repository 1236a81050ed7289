"""Sweeps: plans over many clusters, where more no longer pays, and the curves."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

import graphflow as gf
from graphflow.errors import PlanError
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.reports.sweep import Curve, Point, Sweep, number

SVG = "{http://www.w3.org/2000/svg}"


def towers(count: int = 4, width: int = 1024) -> gf.Tensor:
    """Equal towers that share an input: they fill as many devices as there are towers."""
    x = gf.placeholder("float32", (512, width), name="x")
    total = None
    for i in range(count):
        h = x
        for j in range(2):
            h = gf.tanh(h @ gf.variable(gf.init.zeros((width, width)), name=f"w{i}{j}"))
        one = gf.sum(h)
        total = one if total is None else total + one
    assert total is not None
    return total


def sweep_gpus(**options: object) -> Sweep:
    return gf.placement.sweep(
        towers(), lambda n: gf.Cluster.hypothetical(f"{n}xh100"), over=[1, 2, 4, 8], **options
    )  # type: ignore[arg-type]


def plan_of(seconds: float) -> Plan:
    cluster = gf.Cluster.hypothetical("h100")
    return Plan(cluster, "greedy", (), (), seconds, {}, {}, {}, "0")


def curve(*points: tuple[float, float]) -> Curve:
    return Curve("plans", tuple(Point(x, plan_of(seconds)) for x, seconds in points))


def test_a_sweep_finds_that_four_towers_fill_four_devices() -> None:
    found = sweep_gpus()
    (one,) = found.curves
    speeds = [found.speedup(point) for point in one.points]
    assert speeds[0] == 1.0 and speeds[1] > 1.8 and speeds[2] > 3.0
    assert speeds[3] == pytest.approx(speeds[2], rel=0.1)
    mark = found.marks["plans"]
    assert mark is not None and mark.x == 4
    assert "beyond 4, more machines no longer pays" in str(found)
    assert "← more no longer pays" in str(found)


@pytest.mark.parametrize(
    ("points", "worth", "mark"),
    [
        ([(1, 8.0), (2, 4.0), (4, 2.0)], 0.25, None),
        ([(1, 8.0), (2, 4.0), (4, 3.9)], 0.25, 2),
        ([(1, 8.0), (2, 8.0), (4, 2.0)], 0.25, None),  # nothing from 1 to 2, but much from 1 to 4
        ([(1, 8.0), (2, 7.0), (4, 6.5)], 0.25, 1),
        ([(1, 8.0), (2, 7.0), (4, 6.5)], 0.0, None),
        ([(1, 8.0), (2, 9.0)], 0.0, 1),
        ([(1, 8.0)], 0.25, None),
    ],
)
def test_more_pays_while_it_brings_its_share(
    points: list[tuple[float, float]], worth: float, mark: float | None
) -> None:
    found = curve(*points).pays_until(worth)
    assert (None if found is None else found.x) == mark


def test_bandwidths_can_be_swept_and_numbers_come_in_order() -> None:
    def cluster(bandwidth: float) -> gf.Cluster:
        return gf.Cluster.hypothetical(
            2, flops=5e13, bandwidth=2e12, memory=1 << 34, link_bandwidth=bandwidth
        )

    found = gf.placement.sweep(towers(2), cluster, over=[1e11, 1e8, 1e10, 1e9], label="bytes/s")
    assert [point.x for point in found.curves[0].points] == [1e8, 1e9, 1e10, 1e11]
    steps = [point.step for point in found.curves[0].points]
    assert steps == sorted(steps, reverse=True)
    assert not found.counts_devices and "efficiency" not in str(found)
    assert "100 M" in str(found) and "bytes/s" in found.svg()


def test_several_families_share_one_drawing_and_one_base() -> None:
    found = gf.placement.sweep(
        towers(),
        {
            "h100": lambda n: gf.Cluster.hypothetical(f"{n}xh100"),
            "t4, 10 GbE": lambda n: gf.Cluster.hypothetical(n, "t4", network="10gbe"),
        },
        over=[1, 2, 4],
    )
    assert [one.name for one in found.curves] == ["h100", "t4, 10 GbE"]
    slow = found.curves[1].points[0]
    assert found.speedup(slow) == pytest.approx(found.curves[0].points[0].step / slow.step)
    drawn = ET.fromstring(found.svg())
    lines = [line for line in drawn.iter(f"{SVG}polyline") if line.get("class") == "curve"]
    assert len(lines) == 2
    assert {"h100", "t4, 10 GbE"} <= {text.text for text in drawn.iter(f"{SVG}text")}


def test_clusters_themselves_are_swept_over_their_devices_or_over_numbers() -> None:
    clusters = [gf.Cluster.hypothetical(f"{n}xh100") for n in (4, 1)]
    found = gf.placement.sweep(towers(), clusters)
    assert [point.x for point in found.curves[0].points] == [1, 4] and found.label == "devices"
    found = gf.placement.sweep(towers(), clusters, over=[40, 10], label="euros")
    assert [len(p.plan.cluster.devices) for p in found.curves[0].points] == [1, 4]


def test_the_ring_is_where_the_curve_s_mark_is() -> None:
    found = sweep_gpus()
    drawn = ET.fromstring(found.svg())
    circles = list(drawn.iter(f"{SVG}circle"))
    (ring,) = [c for c in circles if c.get("class") == "ring"]
    dots = [c for c in circles if c.get("class") != "ring"]
    assert len(dots) == 4
    assert (ring.get("cx"), ring.get("cy")) == (dots[2].get("cx"), dots[2].get("cy"))
    assert any(line.get("class") == "ideal" for line in drawn.iter(f"{SVG}polyline"))


def test_everything_drawn_lies_on_the_page_however_wide_the_range() -> None:
    wide = Sweep((curve((1, 1e3), (1e3, 1.0), (1e9, 1e-3)),), "bytes/s", 0.25)
    flat = Sweep((curve((1, 1.0)),), "x", 0.25)
    free = Sweep((curve((1, 1.0), (2, 0.0)),), "x", 0.25)
    for found in (wide, flat, free, sweep_gpus()):
        drawn = ET.fromstring(found.svg())
        width, height = float(drawn.get("width", 0)), float(drawn.get("height", 0))
        for circle in drawn.iter(f"{SVG}circle"):
            assert 0 <= float(circle.get("cx", -1)) <= width
            assert 0 <= float(circle.get("cy", -1)) <= height
        for line in drawn.iter(f"{SVG}polyline"):
            for x, y in re.findall(r"([-\d.e]+),([-\d.e]+)", line.get("points", "")):
                assert 0 <= float(x) <= width and 0 <= float(y) <= height


def test_hostile_names_are_escaped() -> None:
    hostile = '<script>alert("x")</script>\x00'
    found = Sweep((replace(curve((1, 1.0), (2, 0.5)), name=hostile),) * 2, hostile, 0.25)
    text = found._repr_html_()
    assert "<script" not in text and "\x00" not in text
    ET.fromstring(found.svg())


def test_a_sweep_is_saved_as_a_drawing_or_a_page(tmp_path: Path) -> None:
    found = sweep_gpus()
    assert found.save(tmp_path / "s.svg").read_text().startswith("<svg")
    page = found.save(tmp_path / "s.html").read_text()
    assert (
        "default-src 'none'" in page
        and "<table" in page
        and "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    )
    with pytest.raises(PlanError, match=r"saved as \.svg or \.html, not '\.pdf'"):
        found.save(tmp_path / "s.pdf")
    with pytest.raises(PlanError, match="give its path, not 3"):
        found.save(3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="cannot write the sweep"):
        found.save(tmp_path / "nowhere" / "s.svg")


def one_device(n: float) -> gf.Cluster:
    return gf.Cluster.hypothetical("h100")


@pytest.mark.parametrize(
    ("clusters", "over", "message"),
    [
        (one_device, None, r"needs over=\[…\]"),
        (one_device, [], r"needs numbers to go over, not \[\]"),
        (one_device, "12", "needs numbers"),
        (one_device, 4, "needs numbers to go over, not 4"),
        (one_device, [1, 0], "finite numbers above 0, not 0"),
        (one_device, [1, math.nan], "finite numbers above 0, not nan"),
        (one_device, [True], "not True"),
        (one_device, [2, 2], "each number once"),
        (lambda n: n, [3], r"plans at 3 gives 3, not a gf\.Cluster"),
        ({}, [1], "a function of a number"),
        (7, [1], "not 7"),
        ([1], None, r"1 is no gf\.Cluster"),
        ([gf.Cluster.hypothetical("t4")], [1, 2], "1 clusters over 2 numbers"),
    ],
)
def test_what_cannot_be_swept_is_refused(clusters: object, over: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        gf.placement.sweep(towers(1), clusters, over)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="worth must lie between 0 and 1"):
        sweep_gpus(worth=2)


def test_an_error_of_one_plan_names_its_place_in_the_sweep() -> None:
    with pytest.raises(gf.errors.MemoryLimitError, match="plans at 1: no placement fits"):
        gf.placement.sweep(
            towers(1), lambda n: gf.Cluster.hypothetical(1, "h100", memory=1000), over=[1]
        )


def test_numbers_are_short() -> None:
    assert [number(x) for x in (8, 1.5, 12.5e9, 2e12, 3e6)] == ["8", "1.5", "12.5 G", "2 T", "3 M"]
