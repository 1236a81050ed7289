"""The picture of fits: relative gaps over seconds, on logarithmic axes, as one SVG document."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphflow.linear.problem import Certificate
from graphflow.placement.view.line_chart import LineChart, draw_lines

_LEAST = 1e-16
"""The least gap that is drawn; gaps of 0 lie there."""


def draw_gaps(fits: Sequence[tuple[str, Sequence[Certificate]]]) -> str:
    """Return an SVG document with a curve for each fit that has gaps.

    Args:
        fits: for each, the name of its curve and its certificates.
    """
    curves = [
        (name or "fit", [
            (max(c.seconds, 1e-6), max(gap, _LEAST)) for c in certificates
            if (gap := c.relative_gap) is not None and math.isfinite(gap)
        ])
        for name, certificates in fits
    ]  # fmt: skip
    title = "Relative duality gap over seconds"
    return draw_lines(LineChart(title, "seconds", curves, log_x=True, log_y=True, unit=" s"))
