"""Curves over one axis as one SVG document, light and dark: losses over steps, gaps over seconds.

Needs no library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field

from graphflow.base.html_escape import escape
from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.view import colours

WIDTH, HEIGHT = 760.0, 420.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, 150.0, 56.0, 56.0
MAX_DOTS = 60
"""Points of a curve up to which each has a dot that says its numbers."""

_STYLE = f"""
.gf-lines {{ --ink: {colours.INK}; --faint: {colours.FAINT}; --paper: {colours.PAPER};
  --grid: #e3e8ee; }}
@media (prefers-color-scheme: dark) {{ .gf-lines {{ --ink: #e4e9f0; --faint: #97a3b3;
  --paper: #181e26; --grid: #2a323d; }} }}
.gf-lines text {{ font-family: Inter, Helvetica, Arial, "DejaVu Sans", sans-serif; font-size: 12px;
  fill: var(--ink); }}
.gf-lines .h1 {{ font-size: 16px; font-weight: 650; }}
.gf-lines .small {{ fill: var(--faint); }}
.gf-lines line {{ stroke: var(--grid); }}
.gf-lines polyline {{ fill: none; stroke-width: 2.2; stroke-linejoin: round; }}
"""


@dataclass(frozen=True)
class LineChart:
    """The contents of a picture.

    Args:
        title: the headline.
        label: what the axis across is, such as "seconds".
        curves: (name, points) of each; points are (x, y), both finite.
        log_x, log_y: the axis is logarithmic, and its numbers are above 0.
        unit: follows the numbers of the axis across in what dots say.
    """

    title: str
    label: str
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]] = field(default_factory=list)
    log_x: bool = False
    log_y: bool = False
    unit: str = ""


def draw_lines(chart: LineChart) -> str:
    """Return an SVG document."""
    points = [point for _, curve in chart.curves for point in curve]
    across = _Axis([x for x, _ in points], chart.log_x, LEFT, WIDTH - RIGHT)
    upright = _Axis([y for _, y in points], chart.log_y, HEIGHT - BOTTOM, TOP)
    title = escape(chart.title)
    parts = [f'<text class="h1" x="{LEFT}" y="28">{title}</text>', *_grid(chart, across, upright)]
    ends: list[float] = []
    for i, (name, curve) in enumerate(chart.curves):
        parts += _curve(chart, across, upright, name, curve, colours.shade(i).strong, ends)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gf-lines" width="{WIDTH:.0f}" '
        f'height="{HEIGHT:.0f}" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n"
        '<rect width="100%" height="100%" rx="10" fill="var(--paper)"/>\n'
        + "\n".join([*parts, "</svg>", ""])
    )


class _Axis:
    """An axis, linear or logarithmic, from one place of the picture to another.

    Attributes:
        marks: numbers that are written at it.
    """

    def __init__(
        self, values: Sequence[float], logarithmic: bool, start: float, end: float
    ) -> None:
        self._log = logarithmic
        self._start, self._end = start, end
        found = list(values) or ([1e-3, 1.0] if logarithmic else [0.0, 1.0])
        if logarithmic:
            low, high = math.floor(math.log10(min(found))), math.ceil(math.log10(max(found)))
            high = max(high, low + 1)
            self.marks = [10.0**power for power in range(low, high + 1, 1 + (high - low) // 9)]
            self._low, self._high = float(low), float(high)
            return
        least, most = min(found), max(found)
        span = most - least or abs(most) or 1.0
        step = _round_step(span)
        low, high = math.floor(least / step), math.ceil(most / step)
        high = max(high, low + 1)
        self.marks = [step * i for i in range(low, high + 1)]
        self._low, self._high = self.marks[0], self.marks[-1]

    def place(self, value: float) -> float:
        """Return where a number lies in the picture."""
        at = math.log10(value) if self._log else value
        share = (at - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)


def _round_step(span: float) -> float:
    """Return a round distance between some five marks."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * k for k in (1, 2, 5, 10) if span / 5 <= power * k)


def _grid(chart: LineChart, across: _Axis, upright: _Axis) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for mark in upright.marks:
        y = upright.place(mark)
        yield f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _note(LEFT - 8, y + 4, _number(mark), "end")
    for mark in across.marks:
        x = across.place(mark)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
        yield _note(x, bottom + 18, _number(mark), "middle")
    yield _note((LEFT + right) / 2, HEIGHT - 14, chart.label, "middle")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.6g}"


def _note(x: float, y: float, text: str, anchor: str) -> str:
    told = escape(text)
    return f'<text class="small" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{told}</text>'


def _curve(
    chart: LineChart, across: _Axis, upright: _Axis, name: str,
    curve: Sequence[tuple[float, float]], colour: str, ends: list[float],
) -> Iterator[str]:  # fmt: skip
    """Draw a curve, dots, and its name at its end, above names that are there already."""
    if not curve:
        return
    at = [(across.place(x), upright.place(y)) for x, y in curve]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    yield f'<polyline stroke="{colour}" points="{line}"/>'
    if len(curve) <= MAX_DOTS:
        for (x, y), (value, height) in zip(at, curve, strict=True):
            told = escape(f"{name}: {height:.4g} at {value:.4g}{chart.unit}")
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">'
            yield f"<title>{told}</title></circle>"
    x, y = at[-1]
    while any(abs(y - other) < 14 for other in ends):
        y -= 2
    ends.append(y)
    yield f'<text x="{x + 9:.1f}" y="{y + 4:.1f}" style="fill:{colour}">{escape(name)}</text>'
