"""The windows of a plan as lines of text: seconds, and a letter for what each device does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from graphflow.base.formatting import show_seconds
from graphflow.placement.view import schedule

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData
    from graphflow.placement.plans.plan_records import PlannedWindow

COLUMNS = 64
"""Letters of a line."""


def window_lines(plan: PlanData) -> Iterator[str]:
    """Yield the lines of a plan's windows: T is a turn, A an update, E a push or a pull."""
    for window in plan.windows:
        text = f"window {window.node}: {window.text}, {show_seconds(window.seconds)}"
        if window.high is not None:
            text += f" (median; 9 of 10 within {show_seconds(window.high)})"
        took = measured_seconds(plan, window)
        yield text + ("" if took is None else f", measured {show_seconds(took)}")
    drawn = schedule.rows(plan) if any(window.bars for window in plan.windows) else []
    axes = schedule.axes(drawn) if drawn else {}
    wide = max((len(row.device) for row in drawn), default=0)
    for row in drawn:
        yield f"  {row.device:{wide}} {row.kind:9} {_letters(row.bars, *axes[row.kind])}"


def measured_seconds(plan: PlanData, window: PlannedWindow) -> float | None:
    """Return the measured seconds of a window, from its first part to its last; None without."""
    seen = [
        bar
        for bar in (plan.measured.timeline if plan.measured else ())
        if bar.name.startswith(f"{window.node}/") and schedule.task_of_turn(bar.name)
    ]
    if not seen:
        return None
    return max(bar.finish for bar in seen) - min(bar.start for bar in seen)


def _letters(bars: Sequence[schedule.Bar], begin: float, end: float) -> str:
    """Return for each stretch of time the letter of its longest part; a dot if it mostly waits."""
    width = max(end - begin, 1e-12) / COLUMNS
    filled = [dict[str, float]() for _ in range(COLUMNS)]
    for bar in bars:
        first = max(0, int((bar.start - begin) / width))
        for i in range(first, min(COLUMNS, int((bar.finish - begin) / width) + 1)):
            left = begin + i * width
            inside = min(bar.finish, left + width) - max(bar.start, left)
            letter = bar.task[:1] or "."
            filled[i][letter] = filled[i].get(letter, 0.0) + inside
    return "".join(
        max(parts, key=lambda letter: (parts[letter], letter))
        if sum(parts.values()) > width / 2
        else "."
        for parts in filled
    )
