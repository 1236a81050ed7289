"""Sweep → speed-up curves: one SVG document, light and dark, or a page with the tables below.

Needs no library. A ring marks where more no longer pays; a dashed line is what machines that cost
nothing to connect would give.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from graphflow.base.html_escape import escape
from graphflow.placement.plans.reports.sweep_data import Curve, SweepData, number
from graphflow.placement.view import colours
from graphflow.placement.view.text import printable, shorten

WIDTH, HEIGHT = 860.0, 470.0
LEFT, RIGHT, TOP, BOTTOM = 66.0, 190.0, 84.0, 62.0
LINE = 17.0  # of text
WIDE = 20.0
"""Numbers that span a wider range are drawn by their logarithms."""

_STYLE = f"""
.gf-sweep {{ --ink: {colours.INK}; --faint: {colours.FAINT}; --paper: {colours.PAPER};
  --grid: #e3e8ee; }}
@media (prefers-color-scheme: dark) {{ .gf-sweep {{ --ink: #e4e9f0; --faint: #97a3b3;
  --paper: #181e26; --grid: #2a323d; }} }}
.gf-sweep text {{ font-family: Inter, "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif;
  font-size: 12px; fill: var(--ink); font-variant-numeric: tabular-nums; }}
.gf-sweep .h1 {{ font-size: 17px; font-weight: 650; }}
.gf-sweep .small {{ fill: var(--faint); font-size: 11.5px; }}
.gf-sweep .grid {{ stroke: var(--grid); }}
.gf-sweep .ideal {{ stroke: var(--faint); stroke-dasharray: 5 5; fill: none; }}
.gf-sweep .curve {{ fill: none; stroke-width: 2.4; stroke-linejoin: round; }}
.gf-sweep .ring {{ fill: none; stroke-width: 2; }}
"""


class _Frame:
    """The axes of the drawing: linear, or logarithmic if numbers span a wide range."""

    def __init__(self, swept: SweepData) -> None:
        xs = sorted({point.x for curve in swept.curves for point in curve.points})
        found = (swept.speedup(point) for curve in swept.curves for point in curve.points)
        speeds = [speed for speed in found if 0.0 < speed < math.inf] or [1.0]
        self.xs = xs
        self.log_x = xs[-1] / xs[0] > WIDE
        self.log_y = self.log_x and max(speeds) / min(speeds) > WIDE / 4
        self.high = 1.12 * max(speeds)
        self.low = min(speeds) / 1.12 if self.log_y else 0.0

    def x(self, x: float) -> float:
        """From the left."""
        first, last = self.xs[0], self.xs[-1]
        share = _share(x, first, last, self.log_x) if last > first else 0.5
        return LEFT + 14 + share * (WIDTH - LEFT - RIGHT - 28)

    def y(self, speed: float) -> float:
        """From the top."""
        share = _share(min(speed, self.high), self.low, self.high, self.log_y)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def marks(self) -> list[float]:
        """Round speed-ups for the lines across."""
        if not self.log_y:
            step = _step(self.high)
            return [i * step for i in range(int(self.high / step) + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        ratio = self.high / self.low
        digits = (1, 2, 5) if ratio < 300 else (1,)
        marks = [10.0**power * digit for power in powers for digit in digits]
        return [mark for mark in marks if self.low <= mark <= self.high]


def _share(value: float, low: float, high: float, logarithmic: bool) -> float:
    """Return the position of a value between low and high, from 0 to 1."""
    if logarithmic:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def draw(swept: SweepData) -> str:
    """A standalone SVG document."""
    frame = _Frame(swept)
    parts = [*_heads(swept), *_axes(swept, frame)]
    if swept.counts_devices:
        parts.append(_ideal(swept, frame))
    for i, curve in enumerate(swept.curves):
        parts += _curve(swept, frame, curve, colours.shade(i).strong)
    parts += _labels(swept, frame)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gf-sweep" width="{WIDTH:.0f}" '
        f'height="{HEIGHT:.0f}" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img">\n'
        f"<title>Speed-up over {escape(printable(swept.label))}</title>\n<style>{_STYLE}</style>\n"
        '<rect width="100%" height="100%" rx="10" fill="var(--paper)"/>\n'
        + "\n".join([*parts, "</svg>", ""])
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(printable(text))}</text>'


def _heads(swept: SweepData) -> Iterator[str]:
    yield _text(LEFT, 32, f"Speed-up of a step over {swept.label}", ' class="h1"')
    verdicts = [swept.verdict(curve) for curve in swept.curves]
    told = verdicts[0].removeprefix("plans: ") if len(verdicts) == 1 else _rings(swept)
    yield _text(LEFT, 54, shorten(told, 118), ' class="small"')


def _rings(swept: SweepData) -> str:
    if not any(swept.marks.values()):
        return "more still pays at the end of every curve"
    return "a ring marks where more no longer pays"


def _axes(swept: SweepData, frame: _Frame) -> Iterator[str]:
    right = WIDTH - RIGHT
    for mark in frame.marks():
        y = frame.y(mark)
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(LEFT - 9, y + 4, f"{mark:g}×", ' class="small" text-anchor="end"')
    last = -math.inf
    for x in frame.xs:
        at = frame.x(x)
        if at - last >= 34:  # room for the number
            yield _text(at, HEIGHT - BOTTOM + 19, number(x), ' class="small" text-anchor="middle"')
            last = at
    middle = (LEFT + right) / 2
    yield _text(middle, HEIGHT - 18, swept.label, ' class="small" text-anchor="middle"')


def _step(high: float) -> float:
    """A round distance between some five marks."""
    rough = high / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * k for k in (1, 2, 5, 10) if rough <= power * k)


def _ideal(swept: SweepData, frame: _Frame) -> str:
    """Draw the line of ideal speed-up."""
    first = swept.curves[0].points[0].x
    fits = [frame.xs[0] + (frame.xs[-1] - frame.xs[0]) * i / 60 for i in range(61)]
    fits = [x for x in fits if frame.low <= x / first <= frame.high]
    points = " ".join(f"{frame.x(x):.1f},{frame.y(x / first):.1f}" for x in fits)
    return f'<polyline class="ideal" points="{points}"><title>proportional</title></polyline>'


def _curve(swept: SweepData, frame: _Frame, curve: Curve, colour: str) -> Iterator[str]:
    at = [(frame.x(p.x), frame.y(swept.speedup(p))) for p in curve.points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    yield f'<polyline class="curve" stroke="{colour}" points="{line}"/>'
    for (x, y), point in zip(at, curve.points, strict=True):
        told = f"{curve.name}, {swept.label} {number(point.x)}: {swept.format_speedup(point)}"
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="{colour}">'
            f"<title>{escape(printable(told))}</title></circle>"
        )
        if point is swept.marks[curve.name]:
            yield f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9" stroke="{colour}"/>'


def _labels(swept: SweepData, frame: _Frame) -> Iterator[str]:
    """Names at the ends of their curves, one below the other where they would meet; what the
    dashed line is."""
    wanted = []
    for i, curve in enumerate(swept.curves):
        last = curve.points[-1]
        told = f"{swept.format_speedup(last)}"
        mark = swept.marks[curve.name]
        if mark is not None:
            told += f", pays to {number(mark.x)}"
        lines = [told] if len(swept.curves) == 1 else [shorten(curve.name, 26), told]
        wanted.append((frame.y(swept.speedup(last)), lines, colours.shade(i).strong))
    wanted.sort(key=lambda label: label[0])
    lowest = -math.inf
    for y, lines, colour in wanted:
        top = max(y - LINE * (len(lines) - 1) / 2, lowest)
        for i, line in enumerate(lines):
            weight = 600 if i == 0 else 400
            style = f' style="fill:{colour};font-weight:{weight}"'
            yield _text(WIDTH - RIGHT + 8, top + i * LINE + 4, line, style)
        lowest = top + LINE * len(lines) + 5
    if swept.counts_devices:
        told = "dashed: as many times as fast as there are machines"
        yield _text(LEFT, 73, told, ' class="small"')


def page(swept: SweepData) -> str:
    """A page with the curves and the tables, that needs nothing from anywhere."""
    tables = "".join(f"<section>{table.html()}</section>" for table in swept.tables())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,"><title>graphflow sweep</title>\n'
        f"<style>{_PAGE}</style></head>\n<body><main>"
        f"<div class=chart>{draw(swept)}</div>{tables}</main></body></html>\n"
    )


_PAGE = """
:root { color-scheme: light dark; }
body { margin: 0; background: #f5f7f9; color: #1c2430; font: 13px/1.5 Inter, "Helvetica Neue",
  Helvetica, Arial, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 28px; }
svg { max-width: 100%; min-width: 700px; height: auto; }  /* narrower, its words are too small */
.chart { overflow-x: auto; }
section { margin-top: 18px; }
@media (max-width: 640px) { main { padding: 14px; } }
@media (prefers-color-scheme: dark) { body { background: #10141a; color: #e4e9f0; } }
"""
