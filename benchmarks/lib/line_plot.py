"""A plot of lines with logarithmic axes, as one SVG document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720.0, 400.0, 70.0, 130.0, 44.0, 50.0
COLOURS = ("#2f6fde", "#d9622b", "#2c9a5b", "#a23fb5", "#8a6d1d")
STYLE = """text { font-family: Inter, Helvetica, Arial, sans-serif; font-size: 12px; fill: #57606a }
.h1 { font-size: 15px; font-weight: 600 }
rect { fill: none }
@media (prefers-color-scheme: dark) { text { fill: #c3ccd8 } }"""
Points = Sequence[tuple[float, float]]


def draw_lines(
    title: str,
    x: str,
    y: str,
    lines: Mapping[str, Points],
    marks: Mapping[str, tuple[float, float]],
) -> str:
    """Return a plot of lines by name, each with a mark of the same colour.

    Args:
        title, x, y: texts of the plot and of its axes.
        lines: points of each line, all positive.
        marks: a point to mark, for some of the lines.
    """
    every = [p for points in (*lines.values(), list(marks.values())) for p in points]
    spans = [(math.log10(min(v)), math.log10(max(v))) for v in zip(*every, strict=True)]
    (left, right), (low, high) = ((a - 0.08, max(b, a + 0.1) + 0.08) for a, b in spans)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = (math.log10(point[0]) - left) / (right - left)
        up = (math.log10(point[1]) - low) / (high - low)
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)
        )  # fmt: skip

    parts = [f'<text class="h1" x="{LEFT}" y="24">{escape(title)}</text>']
    for power in range(math.ceil(left), math.floor(right) + 1):
        px, _ = place((10.0**power, 10.0**low))
        parts.append(
            f'<text x="{px:.0f}" y="{HEIGHT - 30}" text-anchor="middle">{10**power:,}</text>'
        )
    for power in range(math.ceil(low), math.floor(high) + 1):
        _, py = place((10.0**left, 10.0**power))
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py:.1f}" y2="{py:.1f}" '
                     'stroke="#8884"/>')  # fmt: skip
        parts.append(
            f'<text x="{LEFT - 8}" y="{py + 4:.0f}" text-anchor="end">{10.0**power:g}</text>'
        )
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" '
                 f'text-anchor="middle">{escape(x)}</text>')  # fmt: skip
    parts.append(f'<text x="{LEFT}" y="38">{escape(y)}</text>')
    for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
        spots = [place(p) for p in points]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in spots]
        a, b = spots[-1]
        parts.append(f'<text x="{a + 8:.0f}" y="{b + 4:.0f}">{escape(name)}</text>')
        if name in marks:
            a, b = place(marks[name])
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="8" fill="none" stroke="{colour}" '
                         'stroke-width="2.5"/>')  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0f}" height="{HEIGHT:.0f}" '
        f'viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )
