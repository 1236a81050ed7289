"""The values of a what-if sweep: points, curves, speed-ups, and where more no longer pays.

Drawings read a `SweepData`; `Sweep` (sweep.py) adds the methods that draw and save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property

from graphflow.base.formatting import show_bytes, show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.reports.comparison import summary
from graphflow.placement.plans.reports.report import report
from graphflow.placement.plans.reports.tables import TextTable


@dataclass(frozen=True)
class Point:
    """A plan at one place of a sweep; `x` is a number of machines, bytes/s, …"""

    x: float
    plan: Plan

    @property
    def step(self) -> float:
        """Seconds of the predicted step."""
        return self.plan.makespan


@dataclass(frozen=True)
class Curve:
    """The points of one family of clusters, by rising x."""

    name: str
    points: tuple[Point, ...]

    def pays_until(self, worth: float) -> Point | None:
        """The first point from which no later one pays; None where the last still does.

        One pays over another if the speed it adds is at least `worth` of what is added to x, both
        as shares: at 0.25, twice the machines must make the step at least 1.25 times as fast.
        """
        for i, here in enumerate(self.points[:-1]):
            if not any(_pays(here, there, worth) for there in self.points[i + 1 :]):
                return here
        return None


def _pays(here: Point, there: Point, worth: float) -> bool:
    if there.step <= 0.0:
        return here.step > 0.0
    return here.step / there.step - 1.0 >= worth * (there.x / here.x - 1.0)


@dataclass(frozen=True)
class SweepData:
    """Speed-ups of one graph over clusters, as tables and drawings read them.

    Args:
        curves: one for each family of clusters.
        label: of x. worth: see `Curve.pays_until`.
    """

    curves: tuple[Curve, ...]
    label: str
    worth: float

    @property
    def base(self) -> float:
        """Seconds of the step that speed-ups are relative to: the first curve's first."""
        return self.curves[0].points[0].step

    def speedup(self, point: Point) -> float:
        """Return how many times as fast a point is as the first point of the first curve."""
        return self.base / point.step if point.step else math.inf

    def format_speedup(self, point: Point) -> str:
        """A speed-up for people."""
        ratio = self.speedup(point)
        return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.3g}×"

    @cached_property
    def marks(self) -> Mapping[str, Point | None]:
        """By curve, the point from which more no longer pays; None: it still does at the end."""
        return {curve.name: curve.pays_until(self.worth) for curve in self.curves}

    @property
    def counts_devices(self) -> bool:
        """Whether x counts the devices or the hosts of the clusters."""
        points = [point for curve in self.curves for point in curve.points]
        sizes = [(len(p.plan.cluster.devices), len(p.plan.cluster.workers)) for p in points]
        return any(
            all(p.x == size[i] for p, size in zip(points, sizes, strict=True)) for i in (0, 1)
        )

    def verdict(self, curve: Curve) -> str:
        """One sentence: where more no longer pays."""
        mark, last = self.marks[curve.name], curve.points[-1]
        what = "machines" if self.counts_devices else self.label
        if mark is None:
            return f"{curve.name}: still pays at {number(last.x)}"
        return (
            f"{curve.name}: beyond {number(mark.x)}, more {what} no longer pays "
            f"({self.format_speedup(mark)} there, {self.format_speedup(last)} at {number(last.x)})"
        )

    def tables(self) -> Iterator[TextTable]:
        """A table for each curve."""
        shares = ("efficiency",) if self.counts_devices else ()
        heads = (self.label, "devices", "step", "speed-up", *shares, "idle", "moved", "")
        for curve in self.curves:
            rows = []
            for point in curve.points:
                ideal = point.x / curve.points[0].x * self.base / curve.points[0].step
                share = self.speedup(point) / ideal
                moved = sum(transfer.bytes for transfer in point.plan.moved)
                rows.append(
                    (
                        number(point.x), summary(point.plan), show_seconds(point.step),
                        self.format_speedup(point), *(f"{100 * share:.0f} %" for _ in shares),
                        f"{100 * report(point.plan).idle:.0f} %", show_bytes(moved),
                        "← more no longer pays" if point is self.marks[curve.name] else "",
                    )
                )  # fmt: skip
            yield TextTable(self.verdict(curve), heads, tuple(rows), left=2)

    def __str__(self) -> str:
        return "\n".join(map(str, self.tables()))


def number(x: float) -> str:
    """A number for people: 8, 1.5, 12.5 G."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if abs(x) >= factor:
            return f"{x / factor:.4g}{unit}"
    return f"{x:.6g}"
