"""Plan → one SVG document: headline numbers, timelines and graph, for print and for a README.

Needs no library. Tooltips are `<title>` elements, which browsers show on hovering.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphflow.base.formatting import show_bytes, show_count, show_seconds
from graphflow.base.html_escape import escape
from graphflow.placement.plans.reports.report import shown_devices
from graphflow.placement.view import colours, schedule
from graphflow.placement.view.layout import NODE_HEIGHT, NODE_WIDTH
from graphflow.placement.view.scene import Box, DrawnEdge, Scene, TimelineRow, headlines, scene
from graphflow.placement.view.text import printable, shorten, ticks

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData
    from graphflow.placement.plans.plan_records import Interval
    from graphflow.placement.plans.reports.report import DeviceUse

MARGIN, NARROWEST = 32.0, 1120.0
ROW, BAR = 24.0, 16.0
MANY = 500  # bars in a row, beyond which those too thin to tell apart are drawn as one
LABELS = 300.0  # room for the names of tracks
BAND = 120.0  # pixels down, beyond which a band would cross too much of the drawing
LETTER = 5.9  # width of a character of the smallest text, in pixels

_STYLE = f"""
text {{ font-family: Inter, "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif;
  fill: {colours.INK}; }}
.h1 {{ font-size: 22px; font-weight: 650; }} .h2 {{ font-size: 14px; font-weight: 650; }}
.big {{ font-size: 21px; font-weight: 600; }}
.small {{ font-size: 10.5px; fill: {colours.FAINT}; }} .track {{ font-size: 11.5px; }}
.label {{ font-size: 11px; font-weight: 600; text-anchor: middle; }}
.detail {{ font-size: 9.5px; fill: {colours.FAINT}; text-anchor: middle; }}
.inbar {{ font-size: 9.5px; fill: #fff; pointer-events: none; }}
.wire {{ fill: none; stroke: {colours.WIRE}; stroke-width: 1.1; }}
.band {{ fill: none; stroke-width: 12; stroke-opacity: 0.28; }}
.cut {{ fill: none; stroke: {colours.CUT}; stroke-width: 1.9; }}
"""


def render(plan: PlanData) -> str:
    """A standalone SVG document.

    Raises:
        PlanError: the plan's nodes read each other in a circle.
    """
    drawn = scene(plan)
    width = max(NARROWEST, drawn.layout.width + 2 * MARGIN)
    parts: list[str] = []
    y = MARGIN
    for section in (_headlines, _usage, _schedule, _timelines, _graph):
        body, height = section(drawn, width)
        if not body:
            continue
        parts.append(f'<g transform="translate(0 {y:.1f})">\n{body}\n</g>')
        y += height + 30
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y:.0f}" '
        f'viewBox="0 0 {width:.0f} {y:.0f}" role="img">\n'
        f"<title>graphflow: a plan for {show_count(len(plan.nodes), 'node')}</title>\n"
        f"<style>{_STYLE}</style>\n"
        f'<rect width="100%" height="100%" fill="{colours.PAPER}"/>\n'
        + "\n".join([*parts, "</svg>", ""])
    )


def _text(x: float, y: float, text: str, kind: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{more}>{escape(printable(text))}</text>'


def _headlines(drawn: Scene, width: float) -> tuple[str, float]:
    parts = [_text(MARGIN, 18, "Where each node runs, and when", "h1")]
    lines = headlines(drawn.plan)
    step = min(260.0, (width - 2 * MARGIN) / max(len(lines), 1))
    for i, (title, number, remark) in enumerate(lines):
        x = MARGIN + i * step
        parts.append(_text(x, 50, shorten(title, int(step / LETTER)), "small"))
        parts.append(_text(x, 75, number, "big"))
        parts.append(_text(x, 92, shorten(remark, int(step / LETTER)), "small"))
    return "\n".join(parts), 92


def _usage(drawn: Scene, width: float) -> tuple[str, float]:
    parts = [_text(MARGIN, 12, "Devices", "h2")]
    shown, others = shown_devices(drawn.usage)
    for i, use in enumerate(shown):
        strong = drawn.shades[use.device].strong
        parts += _device(use, strong, 32 + i * 20, drawn.plan.makespan)
    bottom = 32 + len(shown) * 20
    if others:
        parts.append(_text(MARGIN + 18, bottom, others, "track"))
        bottom += 20
    return "\n".join(parts), bottom


def _device(use: DeviceUse, strong: str, y: float, makespan: float) -> Iterator[str]:
    peak_memory = use.peak_memory or 0
    yield f'<rect x="{MARGIN}" y="{y - 9}" width="11" height="11" rx="2" fill="{strong}"/>'
    yield _text(MARGIN + 18, y, use.device, "track")
    busy = f"{show_count(use.nodes, 'node')} · busy {show_seconds(use.busy)}"
    if makespan > 0:
        busy += f" ({100 * use.busy / makespan:.0f} %)"
    yield _text(LABELS, y, busy, "track")
    x = LABELS + 240
    share = min(1.0, peak_memory / use.memory) if use.memory > 0 else 0.0
    yield f'<rect x="{x}" y="{y - 8}" width="120" height="8" rx="4" fill="{colours.WAIT}"/>'
    if share:  # empty at 0 only
        yield (
            f'<rect x="{x}" y="{y - 8}" width="{max(2.0, 120 * share):.1f}" height="8" rx="4" '
            f'fill="{strong}"/>'
        )
    peak = f"peak memory {show_bytes(peak_memory)} of {show_bytes(use.memory)}"
    if use.peak_measured is not None:
        peak += f", measured {show_bytes(use.peak_measured)}"
    yield _text(x + 132, y, peak, "track")


def _schedule(drawn: Scene, width: float) -> tuple[str, float]:
    """Draw the tasks of a pipeline or a window, if the plan has some."""
    rows = schedule.rows(drawn.plan)
    if not rows:
        return "", 0.0
    title = "Schedule"
    parts = [_text(MARGIN, 12, title, "h2")]
    legend = schedule.meanings(rows)
    parts.append(_text(MARGIN + 80, 12, " · ".join(legend), "small"))
    wide = width - 2 * MARGIN
    tall = wide * schedule.height(rows) / schedule.WIDTH
    picture = schedule.picture(rows).replace(
        "<svg ", f'<svg x="{MARGIN}" y="26" height="{tall:.1f}" ', 1
    )
    parts.append(picture.replace('width="100%"', f'width="{wide:.1f}"', 1))
    return "\n".join(parts), tall + 30


def _timelines(drawn: Scene, width: float) -> tuple[str, float]:
    scale = (width - LABELS - MARGIN - 8) / drawn.span
    bottom = 26 + len(drawn.rows) * ROW
    parts = [_text(MARGIN, 12, "Timeline of a step", "h2")]
    for at, label in ticks(drawn.span):
        x = LABELS + at * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="24" y2="{bottom}" stroke="#e3e8ee"/>'
            + _text(x, bottom + 14, label, "small", ' text-anchor="middle"')
        )
    for i, row in enumerate(drawn.rows):
        parts += _row(row, 26 + i * ROW, scale, first=not i or row.track != drawn.rows[i - 1].track)
    return "\n".join(parts), bottom + 16


def _row(row: TimelineRow, y: float, scale: float, first: bool) -> Iterator[str]:
    if first:
        yield _text(MARGIN, y + 13, shorten(row.track, 38), "track")
    yield _text(
        LABELS - 8, y + 13, "measured" if row.measured else "predicted", "small",
        ' text-anchor="end"',
    )  # fmt: skip
    for bar in _merge_bars(row.bars, 0.8 / scale):
        yield _bar(bar, row, y + (ROW - BAR) / 2, scale)


def _merge_bars(bars: Sequence[Interval], pixel: float) -> Iterator[Interval]:
    """Merge bars that are too close to be told apart."""
    if len(bars) <= MANY:
        yield from bars
        return
    last, count = bars[0], 1
    for bar in bars[1:]:
        thin = bar.finish - bar.start < pixel and last.kind == bar.kind
        if thin and bar.start - last.finish < pixel:
            last, count = replace(last, finish=max(last.finish, bar.finish)), count + 1
            continue
        yield last if count == 1 else replace(last, name=f"{count:,} bars")
        last, count = bar, 1
    yield last if count == 1 else replace(last, name=f"{count:,} bars")


def _bar(bar: Interval, row: TimelineRow, y: float, scale: float) -> str:
    x, wide = LABELS + bar.start * scale, max((bar.finish - bar.start) * scale, 0.6)
    fill = colours.WAIT if bar.kind == "wait" else row.shade.strong
    look = ' fill-opacity="0.72"' if row.measured else ""
    took = (
        f"{bar.name}: {bar.kind}, {show_seconds(bar.finish - bar.start)} from "
        f"{show_seconds(bar.start)}"
    )
    drawn = (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" height="{BAR}" fill="{fill}"{look} '
        f'stroke="#fff" stroke-width="{0.6 if wide > 3 else 0}">'
        f"<title>{escape(printable(took))}</title></rect>"
    )
    letters = int((wide - 6) / LETTER)
    if letters >= 5 and bar.kind != "wait":
        drawn += _text(x + 4, y + 11.5, shorten(bar.name, letters), "inbar")
    return drawn


def _graph(drawn: Scene, width: float) -> tuple[str, float]:
    layout = drawn.layout
    left = (width - layout.width) / 2
    parts = [_text(MARGIN, 12, "The graph", "h2"), _text(MARGIN + 80, 12, LEGEND, "small")]
    parts.append(f'<g transform="translate({left:.1f} 42)">')
    for x0, x1, lane in layout.lanes:
        name = drawn.lanes[lane]
        shade = drawn.shades[name]
        parts.append(
            f'<rect x="{x0 + 6:.1f}" y="-16" width="{x1 - x0 - 12:.1f}" '
            f'height="{layout.height + 20:.1f}" rx="10" fill="{shade.tint}" fill-opacity="0.35"/>'
            f'<text x="{(x0 + x1) / 2:.1f}" y="2" text-anchor="middle" class="track" '
            f'style="fill:{shade.strong};font-weight:600">{escape(printable(name))}</text>'
        )
    parts += _kernels(drawn)
    parts += [_wire(wire) for wire in sorted(drawn.wires, key=lambda wire: wire.cut)]
    parts += [_box(box) for box in drawn.boxes]
    parts += [_mark(wire) for wire in drawn.wires if wire.cut]
    parts.append("</g>")
    return "\n".join(parts), layout.height + 60


LEGEND = (
    "colour: device · red edge: a tensor that leaves its device · "
    "bar under a node: its share of the longest node's time · wide band: one kernel"
)


def _kernels(drawn: Scene) -> Iterator[str]:
    """A band between nodes that run as one kernel: what one hands to another is never stored."""
    at = {box.node.name: box for box in drawn.boxes}
    for box in drawn.boxes:
        for name in dict.fromkeys(box.node.inputs):
            source = at.get(name)
            if source is None or not box.kernel or source.node.fused != box.node.fused:
                continue
            x0, y0 = source.left + NODE_WIDTH / 2, source.top + NODE_HEIGHT
            x1, y1 = box.left + NODE_WIDTH / 2, box.top
            if y1 - y0 > BAND:
                continue
            ym = (y0 + y1) / 2
            yield (
                f'<path class="band" stroke="{box.shade.strong}" '
                f'd="M{x0:.1f} {y0:.1f}C{x0:.1f} {ym:.1f} {x1:.1f} {ym:.1f} {x1:.1f} {y1:.1f}"/>'
            )


def _wire(wire: DrawnEdge) -> str:
    path = "".join(
        f"M{x0:.1f} {y0:.1f}"
        + (
            f"V{y1:.1f}"
            if abs(x0 - x1) < 0.05
            else f"C{x0:.1f} {(y0 + y1) / 2:.1f} {x1:.1f} {(y0 + y1) / 2:.1f} {x1:.1f} {y1:.1f}"
        )
        for x0, y0, x1, y1 in wire.route.segments()
    )
    heads = "".join(
        f"M{x:.1f} {y:.1f}l-3.4 -6.5h6.8z" for x, y in (way[-1] for way in wire.route.paths)
    )
    colour = colours.CUT if wire.cut else colours.WIRE
    kind = "cut" if wire.cut else "wire"
    return f'<path class="{kind}" d="{path}"/><path fill="{colour}" d="{heads}"/>'


def _mark(wire: DrawnEdge) -> str:
    x, y = wire.middle
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colours.PAPER}" '
        f'stroke="{colours.CUT}" stroke-width="2"><title>{escape(wire.title())}</title></circle>'
    )


def _box(box: Box) -> str:
    x, y, middle = box.left, box.top, box.left + NODE_WIDTH / 2
    facts = "\n".join([printable(box.node.name), *(f"{k}: {v}" for k, v in box.facts())])
    heat = (
        f'<rect x="{x + 5:.1f}" y="{y + NODE_HEIGHT - 4:.1f}" height="2.4" rx="1.2" '
        f'width="{(NODE_WIDTH - 10) * box.heat:.1f}" fill="{box.shade.strong}"/>'
        if box.heat > 0.01
        else ""
    )
    return (
        f"<g><title>{escape(facts)}</title>"
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="5" '
        f'fill="{box.shade.tint}" stroke="{box.shade.strong}"/>{heat}'
        + _text(middle, y + 14, box.label, "label")
        + _text(middle, y + 26, box.detail, "detail")
        + "</g>"
    )
