"""Plan → one HTML file that opens offline: bokeh's figures with bokeh's own code inside.

    Plan ─payload→ data ┐
    empty figures ──────┴─page→ text          SCRIPTS fill the figures in the browser

The page lays the graph out itself, as groups are opened, so that 100,000 nodes need not be laid out
to show forty. bokeh is an extra and loads when a page is drawn; the SVG drawing needs nothing.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from graphflow.base.formatting import show_bytes, show_count, show_seconds, time_unit
from graphflow.base.html_escape import escape
from graphflow.errors import PlanError
from graphflow.placement.plans.reports.plan_notices import constraints, ports
from graphflow.placement.plans.reports.report import DeviceUse, device_uses, shown_devices
from graphflow.placement.plans.reports.tables import busy_share, off_by
from graphflow.placement.plans.reports.window_lines import window_lines
from graphflow.placement.view import colours, schedule
from graphflow.placement.view.page.payload import LINKS, pack, payload
from graphflow.placement.view.page.template import fill
from graphflow.placement.view.scene import headlines
from graphflow.placement.view.text import printable, shorten

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData

SCRIPTS = ("layered.js", "looks.js", "frames.js", "drawing.js", "explorer.js")
FONT = "Inter, Helvetica Neue, Helvetica, Arial, sans-serif"
ROW, THINNEST = 26, 13  # pixels of a row of the timelines: of few rows, of many
LETTERS, LEFT = 38, 250  # room for the names of tracks; the memory's axis takes as many pixels
FEW, NARROW = 21, 112  # the same in a narrow window

_TIP = (
    '<div style="max-width:440px;font:12.5px/1.5 Inter,Helvetica,Arial,sans-serif;color:#1c2430;'
    'overflow-wrap:anywhere">{}</div>'
)
_FACT = '<div><span style="color:#5c6877">{}</span> @{{{}}}</div>'


def render(plan: PlanData) -> str:
    """A self-contained HTML page that makes no request.

    Raises:
        PlanError: bokeh is missing.
    """
    try:
        from bokeh.embed import components
        from bokeh.resources import Resources
    except ImportError:
        raise PlanError(
            "drawing .html needs bokeh: pip install 'graphflow[viz]' (.svg needs nothing)"
        ) from None
    data = payload(plan)
    timeline = _timeline(data)
    figures = {"timeline": timeline, "graph": _graph()}
    figures["memory"] = _memory(data, timeline.x_range, timeline.tags[0])
    script, divs = components(figures)
    hidden = data["timeline"]["hidden"]
    here = files("graphflow.placement.view.page")
    return fill(
        summary=" · ".join(
            [show_count(len(plan.nodes), "node"), show_count(len(plan.cluster.devices), "device")]
        ),
        tiles=_tiles(plan),
        devices=_devices(plan),
        timeline=divs["timeline"],
        ports=_ports(plan),
        taken=_constraints_section(plan),
        schedule=_schedule(plan),
        links=f" · the {LINKS} links that move most; {hidden:,} more are not shown"
        if hidden
        else "",
        memory=divs["memory"],
        graph=divs["graph"],
        library=Resources(mode="inline", components=["bokeh"]).render_js(),
        script=script,
        plan=pack(data),
        js="\n".join(here.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS),
    )


# Plain HTML ---------------------------------------------------------------------------------------


def _tiles(plan: PlanData) -> str:
    return "".join(
        f"<div class=tile><h3>{escape(title)}</h3><b>{escape(number)}</b>"
        f"<p>{escape(remark)}</p></div>"
        for title, number, remark in headlines(plan)
    )


def _devices(plan: PlanData) -> str:
    shades = {name: colours.shade(i).strong for i, name in enumerate(plan.cluster.devices)}
    shown, others = shown_devices(device_uses(plan))
    rows = [_device(use, shades[use.device], plan.makespan) for use in shown]
    return "".join([*rows, *([f"<tr><td colspan=4>{others}"] if others else [])])


def _device(use: DeviceUse, strong: str, makespan: float) -> str:
    held = use.peak_memory or 0
    share = 100 * use.busy / makespan if makespan > 0 else 0.0
    full = min(100.0, 100 * held / use.memory) if use.memory > 0 else 0.0
    measured = ""
    if use.busy_measured is not None:
        off = off_by(use.busy, use.busy_measured)
        measured = f", measured {show_seconds(use.busy_measured)}" + (f" ({off})" if off else "")
    peak = "" if use.peak_measured is None else f", measured {show_bytes(use.peak_measured)}"
    return (
        f"<tr><td><i style='background:{strong}'></i>{escape(use.device)}"
        f"<td>{use.nodes:,}<td>{_meter(share, strong)}{show_seconds(use.busy)} ({share:.0f} %)"
        f"{measured}"
        f"<td>{_meter(full, strong)}{show_bytes(held)} of {show_bytes(use.memory)}{peak}"
    )


def _meter(percent: float, colour: str) -> str:
    """A bar that is empty at 0 only."""
    least = "2px" if percent > 0 else "0"
    return (
        f"<span class=meter><span style='width:{min(percent, 100):.1f}%;min-width:{least};"
        f"background:{colour}'></span></span>"
    )


def _ports(plan: PlanData) -> str:
    """A section, if transfers shared anything."""
    rows = "".join(
        f"<tr><td>{escape(printable(use.title))}<td>{use.transfers:,}<td>{show_bytes(use.bytes)}"
        f"<td>{show_bytes(use.bandwidth)}/s"
        f"<td>{_meter(100 * use.busy / (plan.makespan or 1.0), colours.CUT)}"
        f"{escape(busy_share(use.busy, plan.makespan))}<td>{100 * use.used:.0f} %"
        for use in ports(plan)
    )
    return rows and _section(
        "Ports that links share",
        "network cards and switches · busy: something is on its way through it",
        "<th>Port<th>Tensors<th>Bytes<th>Bandwidth<th>Busy in a step<th>Of its bandwidth",
        rows,
    )


def _schedule(plan: PlanData) -> str:
    """A section, if the plan is of a pipeline or of windows."""
    drawn = schedule.rows(plan)
    if not drawn:
        return ""
    title, remark = "Schedule of the pipeline", "F2: micro-batch 2 forward"
    if plan.windows:
        title = "Window of turns" if len(plan.windows) == 1 else "Windows of turns"
        told = [line for line in window_lines(plan) if line.startswith("window ")]
        remark = escape(printable("; ".join(told)))
    return (
        f"<section><header><h2>{title}</h2><span class=faint>{remark}"
        " · idle: of the time from a device's first task to its last</span></header>"
        f"<div class=legend>{schedule.legend(drawn)}</div>"
        f"<div class=scroll>{schedule.picture(drawn)}</div></section>"
    )


def _constraints_section(plan: PlanData) -> str:
    """A section, if anything took choices away."""
    rows = "".join(
        f"<tr><td>{escape(printable(each.why))}<td>{each.nodes or '':}"
        f"<td>{escape(printable(each.example))}"
        for each in constraints(plan)
    )
    heads = "<th>What<th>Nodes<th>Such as"
    return rows and _section("What took choices away", "pins, kernels, memory", heads, rows)


def _section(title: str, remark: str, heads: str, rows: str) -> str:
    return (
        f"<section><header><h2>{title}</h2><span class=faint>{remark}</span></header>"
        f"<div class=scroll><table><thead><tr>{heads}</thead><tbody>{rows}</tbody></table></div>"
        "</section>"
    )


# Figures ------------------------------------------------------------------------------------------


def _source(name: str, *columns: str) -> Any:
    """Data that the page fills in."""
    from bokeh.models import ColumnDataSource

    return ColumnDataSource({column: [] for column in columns}, name=name)


def _timeline(data: dict[str, Any]) -> Any:
    from bokeh.models import BoxZoomTool, FixedTicker, HoverTool, Range1d
    from bokeh.models.annotations import Span
    from bokeh.plotting import figure

    rows, bars = data["timeline"]["rows"], data["timeline"]["bars"]
    ends = [a + b for a, b in zip(bars["start"], bars["took"], strict=True)]
    span = max([data["makespan"], data["measured"] or 0.0, *ends]) or 1e-6
    unit, name = time_unit(span)
    height = ROW if len(rows) <= 40 else THINNEST
    plot = figure(
        height=height * max(len(rows), 1) + 66,
        sizing_mode="stretch_width",
        x_range=Range1d(start=0, end=span / unit * 1.015, bounds=(0, span / unit * 1.05)),
        y_range=Range1d(start=len(rows), end=0),
        tools=["xpan", "reset", "save", BoxZoomTool(dimensions="width"), *_wheel("width")],
        toolbar_location="above",
        x_axis_label=f"{name} since the step began",
        x_axis_location="below" if len(rows) < 18 else "above",  # long lists are scrolled
        name="gf-timeline",
        tags=[unit, _narrow(data, name)],
        min_border_left=LEFT,
    )
    _plain(plot)
    _axes(plot)
    plot.ygrid.grid_line_color = None
    plot.yaxis.ticker = FixedTicker(ticks=[i + 0.5 for i in range(len(rows))])
    plot.yaxis.major_label_overrides = {
        i + 0.5: label for i, label in enumerate(_labels(data, LETTERS))
    }
    if height < ROW:
        plot.yaxis.major_label_text_font_size = "9px"
    for end, dash in ((data["makespan"], "dashed"), (data["measured"], "dotted")):
        if end is not None:
            plot.add_layout(
                Span(location=end / unit, dimension="height", line_color="#8a95a3", line_dash=dash)
            )
    drawn = plot.quad(
        "left", "right", "top", "bottom", fill_color="colour", fill_alpha="alpha",
        line_color="edge", line_width="line", line_alpha=0.8,
        source=_source(
            "gf-bars", "left", "right", "top", "bottom", "colour", "alpha", "edge", "line", "name",
            "what", "took", "node",
        ),
    )  # fmt: skip
    facts = "<b>@{name}</b>" + _FACT.format("", "what") + _FACT.format("", "took")
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=_TIP.format(facts)))
    return plot


def _narrow(data: dict[str, Any], unit: str) -> dict[str, Any]:
    """Return short row names, their width and the axis title for narrow windows."""
    labels = {i + 0.5: label for i, label in enumerate(_labels(data, FEW, "/worker:"))}
    return {"left": NARROW, "labels": list(labels.items()), "title": unit}


def _labels(data: dict[str, Any], letters: int, prefix: str = "") -> list[str]:
    """The track's name before its first row, shortened end by end where it is a link."""
    labels: list[str] = []
    before = None
    for row in data["timeline"]["rows"]:
        ends = row["label"].split(" → ")
        name = " → ".join(
            shorten(end.removeprefix(prefix), letters // len(ends) - 1) for end in ends
        )
        labels.append("measured" if row["label"] == before else name)
        before = row["label"]
    return labels


def _memory(data: dict[str, Any], times: Any, unit: float) -> Any:
    """Step curves of the bytes held on each device; a dotted line for what was measured."""
    from bokeh.models import (
        BoxZoomTool,
        ColumnDataSource,
        CustomJSTickFormatter,
        HoverTool,
        Range1d,
    )
    from bokeh.models.annotations import Span
    from bokeh.models.tickers import AdaptiveTicker
    from bokeh.plotting import figure

    top = max([1, *(max(curve["y"]) for curve in data["memory"]), *data["peaks"].values()])
    plot = figure(
        height=210, sizing_mode="stretch_width", x_range=times,
        y_range=Range1d(start=0, end=top * 1.08),
        tools=["xpan", "reset", "save", BoxZoomTool(dimensions="width"), *_wheel("width")],
        toolbar_location=None, name="gf-memory", min_border_left=LEFT,
    )  # fmt: skip
    _plain(plot)
    _axes(plot)
    plot.yaxis.ticker = AdaptiveTicker(base=2, mantissas=[1], desired_num_ticks=4)
    plot.yaxis.formatter = CustomJSTickFormatter(code="return window.gfBytes(tick)")
    for curve in data["memory"]:
        device = data["devices"][curve["device"]]
        source = ColumnDataSource(
            {
                "x": [at / unit for at in curve["x"]], "y": curve["y"],
                "told": [f"{show_bytes(held)} at {show_seconds(at)}" for at, held in
                         zip(curve["x"], curve["y"], strict=True)],
                "name": [device["name"]] * len(curve["x"]),
            }
        )  # fmt: skip
        line = plot.step(
            "x", "y", mode="after", source=source, line_width=1.8, line_color=device["strong"],
            name=f"gf-memory-{curve['device']}",
        )  # fmt: skip
        facts = "<b>@{name}</b>" + _FACT.format("", "told")
        plot.add_tools(HoverTool(renderers=[line], tooltips=_TIP.format(facts), mode="mouse"))
    for number, peak in data["peaks"].items():
        plot.add_layout(
            Span(
                location=peak, dimension="width", line_dash="dotted", line_width=1.5,
                line_color=data["devices"][number]["strong"],
            )
        )  # fmt: skip
    return plot


def _graph() -> Any:
    """The empty figure of the graph: frames, cards behind folded groups, wires, boxes, texts."""
    from bokeh.models import BoxZoomTool, HoverTool, Range1d
    from bokeh.plotting import figure

    plot = figure(
        sizing_mode="stretch_width", height=720,
        x_range=Range1d(start=0, end=1200), y_range=Range1d(start=700, end=0),
        tools=["pan", "save", "zoom_in", "zoom_out", BoxZoomTool(match_aspect=True),
               *_wheel("both")],
        toolbar_location="above", name="gf-graph",
    )  # fmt: skip
    _plain(plot)
    plot.axis.visible, plot.grid.visible = False, False
    plot.rect(
        "x", "y", "w", "h", fill_color="fill", line_color="line", name="gf-frames-drawn",
        source=_source("gf-frames", "x", "y", "w", "h", "fill", "line"),
    )  # fmt: skip
    for name in ("gf-wires", "gf-cuts"):
        points = ("x0", "y0", "x1", "y1", "xa", "ya", "xb", "yb")
        plot.bezier(
            *points, line_color="colour", line_alpha="alpha", line_width="width",
            source=_source(name, *points, "colour", "alpha", "width"),
        )  # fmt: skip
    plot.patches(
        "xs", "ys", fill_color="colour", fill_alpha="alpha", line_color=None,
        source=_source("gf-heads", "xs", "ys", "colour", "alpha"),
    )  # fmt: skip
    sides = ("x", "y", "w", "h", "fill", "line", "alpha")
    plot.rect(
        "x", "y", "w", "h", fill_color="fill", line_color="line", fill_alpha="alpha",
        line_alpha="alpha", name="gf-stacks-drawn", source=_source("gf-stacks", *sides),
    )  # fmt: skip
    boxes = plot.rect(
        "x", "y", "w", "h", fill_color="fill", line_color="line", fill_alpha="alpha",
        line_alpha="alpha", line_width="width", name="gf-nodes-drawn",
        source=_source(
            "gf-nodes", *sides, "width", "item", "node", "what", "where", "took", "makes", "why"
        ),
    )  # fmt: skip
    plot.quad(
        "left", "right", "top", "bottom", fill_color="fill", fill_alpha="alpha", line_color=None,
        source=_source("gf-heat", "left", "right", "top", "bottom", "fill", "alpha"),
    )  # fmt: skip
    for kind, style, align in (
        ("label", "bold", "center"), ("detail", "normal", "center"), ("title", "bold", "left"),
    ):  # fmt: skip
        title = kind == "title"
        columns = ("x", "y", "text", "ink", "behind" if title else "alpha")
        texts = plot.text(
            "x", "y", "text", text_align=align, text_baseline="middle", text_color="ink",
            text_alpha=1.0 if title else "alpha",
            text_font={"value": FONT},
            text_font_style=style, text_font_size="6px", source=_source(f"gf-{kind}s", *columns),
            name=f"gf-{kind}-text",
        )  # fmt: skip
        if title:  # wires that pass behind it leave it readable
            texts.glyph.background_fill_color = "behind"
    told = {"what": "", "where": "on", "took": "takes", "makes": "makes", "why": ""}
    facts = "".join(_FACT.format(title, column) for column, title in told.items())
    shown = _TIP.format("<b>@{node}</b>" + facts)
    plot.add_tools(HoverTool(renderers=[boxes], tooltips=shown, attachment="right"))
    return plot


def _plain(plot: Any) -> None:
    plot.toolbar.logo = None
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    plot.min_border_right = plot.min_border_top = plot.min_border_bottom = 2


def _axes(plot: Any) -> None:
    plot.xgrid.grid_line_color = plot.ygrid.grid_line_color = "#dfe4ea"
    plot.axis.major_label_text_font = plot.xaxis.axis_label_text_font = FONT
    plot.axis.major_label_text_font_size = plot.xaxis.axis_label_text_font_size = "12px"
    plot.xaxis.axis_label_text_font_style = "normal"
    plot.axis.major_tick_line_color = plot.axis.minor_tick_line_color = None
    plot.axis.axis_line_color = None


def _wheel(dimensions: Literal["width", "both"]) -> list[Any]:
    """Zooming by wheel with Ctrl held, so that the wheel alone scrolls the page."""
    from bokeh.models import WheelZoomTool

    try:
        return [WheelZoomTool(dimensions=dimensions, modifiers="ctrl")]
    except (AttributeError, ValueError):  # an older bokeh: chosen in the toolbar instead
        return [WheelZoomTool(dimensions=dimensions)]
