"""Plan → the schedule of its pipeline as SVG: a row for each device, a bar for each task, as it is
predicted and, where the plan has a trace, as it was measured.

A task is a forward pass (F), a backward pass (B) or the gradients of weights (W) of a micro-batch;
with several stages on a device, its stage follows it: F0/4. Replicas that take turns of their own
have turns (T), exchanges (E) and their results (A). So have the workers and servers of a window. A
device with several of these has a row for each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from graphflow.base.formatting import show_seconds
from graphflow.base.html_escape import escape
from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.view import colours
from graphflow.placement.view.text import printable

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData
    from graphflow.placement.plans.plan_records import Interval

WIDTH, LEFT, RIGHT = 1480, 260, 90
LEAST = 1000  # pixels: a narrower window scrolls, since its words would be too small
TICKS = 8  # of the axis of time, at most
ROW, BAR = 30, 24
LETTER = 7.2  # pixels
SEEN = 0.005  # share of a step
FAR = 5.0  # how many times as long measured as predicted, or the reverse, no common axis shows
PHASES = {
    "F": "forward pass",
    "B": "backward pass",
    "W": "gradients of weights",
    "T": "turn of a replica or worker",
    "E": "values sent to others",
    "A": "results of an exchange applied",
    "": "sums of gradients, updates, sizes",
}


_TURN = re.compile(r".*/([0-9]+)/([TAE][0-9]+)")
"""A part of a window: its party and its task; see `plan_records.PlannedWindow`."""


@dataclass(frozen=True)
class Bar:
    """A task on a device, in seconds."""

    task: str
    start: float
    finish: float


@dataclass(frozen=True)
class DeviceRow:
    """The tasks of a device in order.

    Attributes:
        busy: seconds in which it computes, from its first task on.
    """

    device: str
    kind: str
    bars: tuple[Bar, ...]
    busy: float

    @property
    def span(self) -> float:
        """Seconds from its first task to its last. What needs no micro-batch, such as the size of
        one, may come long before."""
        begin = min((b.start for b in self.bars if b.task), default=self.bars[0].start)
        return max(b.finish for b in self.bars) - begin

    @property
    def idle(self) -> float:
        """The share of that in which it waits."""
        return max(0.0, 1 - self.busy / self.span) if self.span > 0 else 0.0


def rows(plan: PlanData) -> list[DeviceRow]:
    """The rows of a plan's schedule, those of a device together; none if it has no tasks."""
    task_of = {node.name: node.task for node in plan.nodes}
    drawn = [window for window in plan.windows if window.bars]
    if not any(task_of.values()) and not drawn:
        return []
    label = _row_names(plan)
    for window in drawn:
        del task_of[window.node]
    predicted = [
        (n.device, n.task, n.start, n.finish)
        for n in plan.nodes
        if n.finish > n.start and n.name in task_of
    ]
    predicted += [
        (label(bar), task_of_turn(bar.name), bar.start, bar.finish)
        for window in drawn
        for bar in window.bars
    ]
    found = {"predicted": _by_device("predicted", predicted)}
    if plan.measured is not None:
        seen = [
            (label(i), task_of_turn(i.name) or task_of[i.name], i.start, i.finish)
            for i in plan.measured.timeline
            if task_of_turn(i.name) or (i.kind == "compute" and i.name in task_of)
        ]
        found["measured"] = _by_device("measured", seen)
    names = dict.fromkeys(name for row in found.values() for name in row)
    place = {device: i for i, device in enumerate(plan.cluster.devices)}
    order = sorted(
        (name for name in names if name.partition(" ")[0] in place),
        key=lambda name: place[name.partition(" ")[0]],
    )
    return [row[name] for name in order for row in found.values() if name in row]


def task_of_turn(name: str) -> str:
    """Return the task in the name of a part of a window: "T3" of "window/1/T3"; "" of others."""
    match = _TURN.fullmatch(name)
    return match[2] if match else ""


def _row_names(plan: PlanData) -> Callable[[Interval], str]:
    """Return the name of the row of a bar: its device, with its party if several are there."""
    parties: dict[str, set[str]] = {}
    for bar in [bar for window in plan.windows for bar in window.bars]:
        parties.setdefault(bar.track, set()).add(bar.name.rpartition("/")[0])

    def name(bar: Interval) -> str:
        match = _TURN.fullmatch(bar.name)
        several = match and len(parties.get(bar.track, ())) > 1
        return f"{bar.track} party {match[1]}" if match and several else bar.track

    return name


def _by_device(kind: str, parts: Iterable[tuple[str, str, float, float]]) -> dict[str, DeviceRow]:
    """A bar for what follows one another of a task; two, where another one or a wait came
    between that can be seen."""
    bars: dict[str, list[Bar]] = {}
    busy: dict[str, float] = {}
    ordered = sorted(parts, key=lambda part: part[2])
    before = {device for device, task, *_ in ordered if task}  # its first one
    wait = SEEN * max((part[3] for part in ordered), default=0.0)
    for device, task, start, finish in ordered:
        mine = bars.setdefault(device, [])
        if mine and mine[-1].task == task and start - mine[-1].finish <= wait:
            mine[-1] = Bar(task, mine[-1].start, max(mine[-1].finish, finish))
        else:
            mine.append(Bar(task, start, finish))
        if task:
            before.discard(device)
        busy[device] = busy.get(device, 0.0) + (device not in before) * (finish - start)
    return {name: DeviceRow(name, kind, tuple(each), busy[name]) for name, each in bars.items()}


def axes(drawn: Sequence[DeviceRow]) -> dict[str, tuple[float, float]]:
    """(begin, end) in seconds of the axis on which rows of a kind, predicted or measured, are
    drawn: the same for both, unless one of them is more than `FAR` times as long as the other."""
    found: dict[str, tuple[float, float]] = {}
    for row in drawn:
        begin, end = found.get(row.kind, (math.inf, -math.inf))
        begin = min(begin, *(bar.start for bar in row.bars))
        found[row.kind] = begin, max(end, *(bar.finish for bar in row.bars))
    spans = [end - begin for begin, end in found.values()]
    if max(spans) > FAR * min(spans):
        return found
    begins, ends = zip(*found.values(), strict=True)
    return dict.fromkeys(found, (min(begins), max(ends)))


def legend(drawn: Sequence[DeviceRow]) -> str:
    """Return the legend of colours, and of both axes if there are two, as HTML."""
    shades = [f"<i style='background:{_shade(phase).strong}'></i>" for phase in _phases(drawn)]
    told = [*meanings(drawn)]
    shades += [""] * (len(told) - len(shades))
    return "".join(f"<span>{i}{text}</span>" for i, text in zip(shades, told, strict=True))


def meanings(drawn: Sequence[DeviceRow]) -> list[str]:
    """Return what the letters of tasks mean, and how long both axes are if there are two."""
    told = [f"{phase}{': ' * bool(phase)}{PHASES[phase]}" for phase in _phases(drawn)]
    found = axes(drawn)
    if len(set(found.values())) > 1:
        wide = ", ".join(f"{kind} {show_seconds(b - a)}" for kind, (a, b) in found.items())
        told.append(f"each on an axis of its own: {wide}")
    return told


def _phases(drawn: Sequence[DeviceRow]) -> list[str]:
    seen = {bar.task[:1] for row in drawn for bar in row.bars}
    return [phase for phase in PHASES if phase in seen]


def height(drawn: Sequence[DeviceRow]) -> int:
    """Return the height of the picture, where its width is `WIDTH`."""
    return ROW * len(drawn) + 8 + (ROW - 8) * (len(set(axes(drawn).values())) == 1)


def picture(drawn: Sequence[DeviceRow]) -> str:
    """The rows as SVG."""
    found = axes(drawn)
    common = set(found.values())
    parts = [*_ticks(ROW * len(drawn) + 8, *common.pop())] if len(common) == 1 else []
    for number, row in enumerate(drawn):
        parts.extend(_row(row, number, *found[row.kind]))
    return (
        f'<svg viewBox="0 0 {WIDTH} {height(drawn)}" width="100%" style="min-width:{LEAST}px" '
        f'role="img" aria-label="the schedule" font-size="12.5">{"".join(parts)}</svg>'
    )


def _ticks(height: int, begin: float, end: float) -> Iterator[str]:
    """Times since the step began, at round numbers, with lines through all rows."""
    least = max(end - begin, 1e-12) / TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)
    scale = (WIDTH - LEFT - RIGHT) / max(end - begin, 1e-12)
    for count in range(math.ceil(begin / step - 1e-6), math.floor(end / step + 1e-6) + 1):
        x = LEFT + (count * step - begin) * scale
        told = show_seconds(count * step) if count else "0"
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="currentColor" '
            f'opacity="0.15"/><text x="{x:.1f}" y="{height + 14}" text-anchor="middle" '
            f'fill="currentColor">{told}</text>'
        )


def _row(row: DeviceRow, number: int, begin: float, end: float) -> Iterator[str]:
    scale = (WIDTH - LEFT - RIGHT) / max(end - begin, 1e-12)
    top = ROW * number + 4
    middle = top + BAR / 2 + 4.5
    yield (
        f'<text x="{LEFT - 12}" y="{middle:.1f}" text-anchor="end" fill="currentColor">'
        f"{escape(printable(row.device))}, {row.kind}</text>"
    )
    for bar in row.bars:
        left, width = LEFT + (bar.start - begin) * scale, (bar.finish - bar.start) * scale
        shade = _shade(bar.task[:1])
        task = escape(printable(bar.task)) or PHASES[""]
        yield (
            f'<rect x="{left:.2f}" y="{top}" width="{max(width, 1):.2f}" height="{BAR}" rx="2" '
            f'fill="{shade.tint}" stroke="{shade.strong}"><title>{task}: '
            f"{show_seconds(bar.finish - bar.start)}, from {show_seconds(bar.start)}</title></rect>"
        )
        if bar.task and width >= LETTER * len(bar.task) + 2:
            yield (
                f'<text x="{left + width / 2:.2f}" y="{middle:.1f}" text-anchor="middle" '
                f'fill="{colours.INK}" pointer-events="none">{task}</text>'
            )
    yield (
        f'<text x="{WIDTH - RIGHT + 10}" y="{middle:.1f}" fill="currentColor">idle '
        f"{row.idle:.0%}</text>"
    )


def _shade(phase: str) -> colours.Shade:
    return colours.shade([*PHASES].index(phase)) if phase else colours.CLIENT
