"""The picture of fits: relative gaps over seconds, on logarithmic axes, as one SVG document."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from graphflow.linear.problem import Certificate
from graphflow.placement.view import colours

WIDTH, HEIGHT = 760.0, 420.0
LEFT, RIGHT, TOP, BOTTOM = 76.0, 150.0, 56.0, 56.0
_LEAST = 1e-16
"""The least gap that is drawn; gaps of 0 lie there."""

_STYLE = f"""
.gf-gap {{ --ink: {colours.INK}; --faint: {colours.FAINT}; --paper: {colours.PAPER};
  --grid: #e3e8ee; }}
@media (prefers-color-scheme: dark) {{ .gf-gap {{ --ink: #e4e9f0; --faint: #97a3b3;
  --paper: #181e26; --grid: #2a323d; }} }}
.gf-gap text {{ font-family: Inter, Helvetica, Arial, "DejaVu Sans", sans-serif; font-size: 12px;
  fill: var(--ink); }}
.gf-gap .h1 {{ font-size: 16px; font-weight: 650; }}
.gf-gap .small {{ fill: var(--faint); }}
.gf-gap line {{ stroke: var(--grid); }}
.gf-gap polyline {{ fill: none; stroke-width: 2.2; stroke-linejoin: round; }}
"""


def draw_gaps(fits: Sequence[tuple[str, Sequence[Certificate]]]) -> str:
    """Return an SVG document with a curve for each fit that has gaps.

    Args:
        fits: for each, the name of its curve and its certificates.
    """
    curves = [
        [(max(c.seconds, 1e-6), max(gap, _LEAST)) for c in certificates
         if (gap := c.relative_gap) is not None and math.isfinite(gap)]
        for _, certificates in fits
    ]  # fmt: skip
    points = [point for curve in curves for point in curve] or [(1e-3, 1.0), (1.0, 1e-6)]
    frame = _GapAxes([x for x, _ in points], [y for _, y in points])
    parts = [f'<text class="h1" x="{LEFT}" y="28">Relative duality gap over seconds</text>']
    parts += _axes(frame)
    for i, ((name, _), curve) in enumerate(zip(fits, curves, strict=True)):
        parts += _curve(frame, name or "fit", curve, colours.shade(i).strong)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gf-gap" width="{WIDTH:.0f}" '
        f'height="{HEIGHT:.0f}" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img">\n'
        f"<title>Relative duality gap over seconds</title>\n<style>{_STYLE}</style>\n"
        '<rect width="100%" height="100%" rx="10" fill="var(--paper)"/>\n'
        + "\n".join([*parts, "</svg>", ""])
    )


class _GapAxes:
    """Logarithmic axes over whole powers of ten."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x_powers = _powers(xs)
        self.y_powers = _powers(ys)

    def x(self, seconds: float) -> float:
        """From the left."""
        first, last = self.x_powers[0], self.x_powers[-1]
        return LEFT + (math.log10(seconds) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(self, gap: float) -> float:
        """From the top."""
        first, last = self.y_powers[0], self.y_powers[-1]
        return TOP + (last - math.log10(gap)) / (last - first) * (HEIGHT - TOP - BOTTOM)


def _powers(values: Sequence[float]) -> range:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return range(low, max(high, low + 1) + 1)


def _axes(frame: _GapAxes) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    step = 1 + len(frame.y_powers) // 9
    for power in frame.y_powers[::step]:
        y = frame.y(10.0**power)
        yield f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _note(LEFT - 8, y + 4, f"1e{power}", "end")
    for power in frame.x_powers:
        x = frame.x(10.0**power)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
        yield _note(x, bottom + 18, f"{10.0**power:g}", "middle")
    yield _note((LEFT + right) / 2, HEIGHT - 14, "seconds", "middle")


def _note(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="small" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _curve(
    frame: _GapAxes, name: str, curve: Sequence[tuple[float, float]], colour: str
) -> Iterator[str]:
    if not curve:
        return
    at = [(frame.x(seconds), frame.y(gap)) for seconds, gap in curve]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    yield f'<polyline stroke="{colour}" points="{line}"/>'
    for (x, y), (seconds, gap) in zip(at, curve, strict=True):
        told = escape(f"{name}: {gap:.1e} after {seconds:.3g} s")
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">'
        yield f"<title>{told}</title></circle>"
    x, y = at[-1]
    yield f'<text x="{x + 9:.1f}" y="{y + 4:.1f}" style="fill:{colour}">{escape(name)}</text>'
