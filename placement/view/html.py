"""Plan → one HTML file that opens offline: bokeh's figures with bokeh's own code inside.

    Plan ─scene→ Scene ─here→ two figures (timeline, graph), linked ─page→ text

bokeh is an extra and loads when a page is drawn; the SVG drawing needs nothing.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Literal

from graphflow.errors import PlanError
from graphflow.placement.view import colours
from graphflow.placement.view.layout import NODE_HEIGHT, NODE_WIDTH
from graphflow.placement.view.page import LINK, ZOOM, fill
from graphflow.placement.view.scene import Scene, scene
from graphflow.placement.view.text import printable, seconds, shorten, size, time_unit

if TYPE_CHECKING:
    from graphflow.placement.plan import Plan

FONT = "Inter, Helvetica Neue, Helvetica, Arial, sans-serif"
ROW = 26  # pixels of a row of the timelines
ROOMY, FLATTEST, TALLEST = 1300.0, 3.2, 1.3  # least width of the graph's window; its width : height

_TIP = (
    '<div style="max-width:440px;font:12.5px/1.5 Inter,Helvetica,Arial,sans-serif;color:#1c2430">'
    "{}</div>"
)
_FACT = '<div><span style="color:#5c6877">{}</span> @{{{}}}</div>'


def render(plan: Plan) -> str:
    """A self-contained HTML page that makes no request.

    Raises:
        PlanError: bokeh is missing, or the plan's nodes read each other in a circle.
    """
    try:
        from bokeh.embed import components
        from bokeh.resources import Resources
    except ImportError:
        raise PlanError(
            "drawing .html needs bokeh: pip install 'graphflow[viz]' (.svg needs nothing)"
        ) from None
    drawn = scene(plan)
    graph, nodes, wires, routes = _graph(drawn)
    timeline, bars = _timeline(drawn)
    _link(nodes, bars, wires, routes)
    script, divs = components({"timeline": timeline, "graph": graph})
    return fill(
        summary=" · ".join(
            [_count(len(plan.nodes), "node"), _count(len(plan.cluster.devices), "device")]
        ),
        tiles=_tiles(drawn),
        devices=_devices(drawn),
        timeline=divs["timeline"],
        graph=divs["graph"],
        legend=_legend(drawn),
        library=Resources(mode="inline", components=["bokeh"]).render_js(),
        script=script,
    )


# Plain HTML ---------------------------------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _tiles(drawn: Scene) -> str:
    return "".join(
        f"<div class=tile><h3>{escape(title)}</h3><b>{escape(number)}</b>"
        f"<p>{escape(remark)}</p></div>"
        for title, number, remark in drawn.headlines()
    )


def _devices(drawn: Scene) -> str:
    rows, makespan = [], drawn.plan.makespan
    for use in drawn.usage:
        share = 100 * use.busy / makespan if makespan > 0 else 0.0
        full = min(100.0, 100 * use.peak / use.limit) if use.limit > 0 else 0.0
        measured = "" if use.busy_measured is None else f", measured {seconds(use.busy_measured)}"
        peak = "" if use.peak_measured is None else f", measured {size(use.peak_measured)}"
        rows.append(
            f"<tr><td><i style='background:{use.shade.strong}'></i>{escape(use.device)}"
            f"<td>{use.nodes}<td>{seconds(use.busy)} ({share:.0f} %){measured}"
            f"<td><span class=meter><span style='width:{full:.1f}%;background:{use.shade.strong}'>"
            f"</span></span>{size(use.peak)} of {size(use.limit)}{peak}"
        )
    return "".join(rows)


def _legend(drawn: Scene) -> str:
    devices = "".join(
        f"<span><i style='background:{drawn.shades[name].tint};"
        f"border:1.5px solid {drawn.shades[name].strong}'></i>{escape(printable(name))}</span>"
        for name in drawn.lanes
    )
    return (
        f"{devices}<span><u style='background:{colours.CUT}'></u>a tensor leaves its device</span>"
        f"<span><u style='background:{colours.WIRE}'></u>stays on it</span>"
        "<span>bar in a node: its seconds, against the longest node's</span>"
    )


# Figures ------------------------------------------------------------------------------------------


def _timeline(drawn: Scene) -> tuple[Any, Any]:
    """The figure and the source of its bars."""
    from bokeh.models import BoxZoomTool, FixedTicker, Range1d
    from bokeh.models.annotations import Span
    from bokeh.plotting import figure

    unit, name = time_unit(drawn.span)
    plot = figure(
        height=ROW * max(len(drawn.rows), 1) + 66,
        sizing_mode="stretch_width",
        x_range=Range1d(
            start=0, end=drawn.span / unit * 1.015, bounds=(0, drawn.span / unit * 1.05)
        ),
        y_range=Range1d(start=len(drawn.rows), end=0),
        tools=["xpan", "reset", "save", BoxZoomTool(dimensions="width"), *_wheel("width")],
        toolbar_location="above",
        x_axis_label=f"{name} since the step began",
        name="gf-timeline",
    )
    _plain(plot)
    plot.xgrid.grid_line_color, plot.xgrid.grid_line_alpha = "#8a95a3", 0.25
    plot.ygrid.grid_line_color = None
    plot.yaxis.ticker = FixedTicker(ticks=[i + 0.5 for i in range(len(drawn.rows))])
    plot.yaxis.major_label_overrides = {i + 0.5: label for i, label in enumerate(_labels(drawn))}
    plot.axis.major_label_text_font = plot.xaxis.axis_label_text_font = FONT
    plot.axis.major_label_text_font_size = plot.xaxis.axis_label_text_font_size = "12px"
    plot.xaxis.axis_label_text_font_style = "normal"
    plot.axis.major_tick_line_color = plot.axis.minor_tick_line_color = None
    plot.axis.axis_line_color = None
    ends = [(drawn.plan.makespan, "dashed")]
    if drawn.plan.measured is not None:
        ends.append((drawn.plan.measured.makespan, "dotted"))
    for end, dash in ends:
        plot.add_layout(
            Span(location=end / unit, dimension="height", line_color="#8a95a3", line_dash=dash)
        )
    return plot, _bars(plot, drawn, unit)


def _labels(drawn: Scene) -> list[str]:
    """The track's name before its first row."""
    labels, before = [], None
    for row in drawn.rows:
        side = "measured" if row.measured else "predicted"
        name = shorten(row.track, 44)
        if drawn.plan.measured is not None:
            name = side if row.track == before else f"{name}  {side}"
        labels.append(name)
        before = row.track
    return [printable(label) for label in labels]


def _bars(plot: Any, drawn: Scene, unit: float) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool, TapTool

    columns: dict[str, list[Any]] = {
        key: []
        for key in ("left", "right", "top", "bottom", "colour", "alpha", "node", "what", "took")
    }
    for i, row in enumerate(drawn.rows):
        # Waits first, so that what was done lies over what was waited for.
        for bar in sorted(row.bars, key=lambda bar: bar.kind != "wait"):
            values = (
                bar.start / unit, bar.finish / unit, i + 0.16, i + 0.84,
                colours.FAINT if bar.kind == "wait" else row.shade.strong,
                0.3 if bar.kind == "wait" else 0.7 if row.measured else 1.0,
                printable(bar.name),
                f"{bar.kind}, {'measured' if row.measured else 'predicted'}",
                f"{seconds(bar.finish - bar.start)}, from {seconds(bar.start)} "
                f"to {seconds(bar.finish)}",
            )  # fmt: skip
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    source = ColumnDataSource(columns)
    drawn_bars = plot.quad(
        "left", "right", "top", "bottom", source=source, fill_color="colour", fill_alpha="alpha",
        line_color="white", line_width=0.5, line_alpha=0.7, nonselection_fill_alpha=0.15,
    )  # fmt: skip
    facts = "<b>@{node}</b>" + _FACT.format("", "what") + _FACT.format("", "took")
    plot.add_tools(HoverTool(renderers=[drawn_bars], tooltips=_TIP.format(facts)))
    plot.add_tools(TapTool(renderers=[drawn_bars]))
    return source


def _graph(drawn: Scene) -> tuple[Any, Any, list[Any], list[Any]]:
    """The figure, the source of its nodes, the sources of its wires, and who reads whom."""
    from bokeh.models import BoxZoomTool, Range1d
    from bokeh.plotting import figure

    wide, high = drawn.layout.width + 24, drawn.layout.height + 44
    across = max(wide, ROOMY, TALLEST * high)
    down = max(high, across / FLATTEST)
    plot = figure(
        sizing_mode="scale_width",
        aspect_ratio=across / down,
        x_range=Range1d(start=(wide - across) / 2 - 12, end=(wide + across) / 2 - 12),
        y_range=Range1d(start=down - 32, end=-32),
        tools=[
            "pan",
            "reset",
            "save",
            "zoom_in",
            "zoom_out",
            BoxZoomTool(match_aspect=True),
            *_wheel("both"),
        ],
        toolbar_location="above",
        name="gf-graph",
    )
    _plain(plot)
    plot.axis.visible, plot.grid.visible = False, False
    texts = _lanes(plot, drawn)
    wires, lines, routes = _wires(plot, drawn)
    nodes, labels, border = _boxes(plot, drawn)
    _scale(plot, [*texts, *labels], [*lines, border])
    return plot, nodes, wires, routes


def _plain(plot: Any) -> None:
    plot.toolbar.logo = None
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    plot.min_border = 2


def _wheel(dimensions: Literal["width", "both"]) -> list[Any]:
    """Zooming by wheel with Ctrl held, so that the wheel alone scrolls the page."""
    from bokeh.models import WheelZoomTool

    try:
        return [WheelZoomTool(dimensions=dimensions, modifiers="ctrl")]
    except (AttributeError, ValueError):  # an older bokeh: chosen in the toolbar instead
        return [WheelZoomTool(dimensions=dimensions)]


def _lanes(plot: Any, drawn: Scene) -> list[tuple[Any, float]]:
    """A ground for each device's lane; returns its texts with their size at zoom 1."""
    lanes = drawn.layout.lanes
    shades = [drawn.shades[drawn.lanes[lane]] for _, _, lane in lanes]
    plot.quad(
        left=[x0 + 6 for x0, _, _ in lanes], right=[x1 - 6 for _, x1, _ in lanes],
        top=[-16] * len(lanes), bottom=[drawn.layout.height + 4] * len(lanes),
        fill_color=[shade.tint for shade in shades], fill_alpha=0.35, line_color=None,
        name="gf-lanes",
    )  # fmt: skip
    names = plot.text(
        x=[(x0 + x1) / 2 for x0, x1, _ in lanes], y=[-1] * len(lanes),
        text=[printable(drawn.lanes[lane]) for _, _, lane in lanes],
        text_color=[shade.strong for shade in shades], text_font={"value": FONT},
        text_font_style="bold", text_align="center", text_baseline="middle", text_font_size="9px",
    )  # fmt: skip
    return [(names, 13.0)]


def _wires(plot: Any, drawn: Scene) -> tuple[list[Any], list[tuple[Any, float]], list[Any]]:
    """Edges that stay, then those that leave, with arrow heads; a dot to hover over."""
    from bokeh.models import ColumnDataSource, HoverTool

    sources, lit = [], []
    for cut in (False, True):
        chosen = [(i, wire) for i, wire in enumerate(drawn.wires) if wire.cut == cut]
        colour = colours.CUT if cut else colours.WIRE
        pieces = [(i, *piece) for i, wire in chosen for piece in wire.route.segments()]
        lines = ColumnDataSource(
            {
                "route": [piece[0] for piece in pieces],
                "x0": [round(piece[1], 1) for piece in pieces],
                "y0": [round(piece[2], 1) for piece in pieces],
                "x1": [round(piece[3], 1) for piece in pieces],
                "y1": [round(piece[4], 1) for piece in pieces],
                "ym": [round((piece[2] + piece[4]) / 2, 1) for piece in pieces],
            }
        )
        drawn_lines = plot.bezier(
            "x0", "y0", "x1", "y1", "x0", "ym", "x1", "ym", source=lines, line_color=colour,
            line_width=1.8 if cut else 1.0, nonselection_line_alpha=0.12,
            selection_line_width=2.6, selection_line_color=colour if cut else "#66758a",
        )  # fmt: skip
        tips = [way[-1] for _, wire in chosen for way in wire.route.paths]
        plot.patches(
            xs=[[x - 3.4, x + 3.4, x] for x, _ in tips],
            ys=[[y - 6.5, y - 6.5, y] for _, y in tips],
            fill_color=colour, line_color=None,
        )  # fmt: skip
        sources.append(lines)
        lit.append((drawn_lines, 1.8 if cut else 1.1))
    cuts = [wire for wire in drawn.wires if wire.cut]
    dots = plot.circle(
        "x", "y", radius=4.5, fill_color="white", line_color=colours.CUT, line_width=1.8,
        source=ColumnDataSource(
            {
                "x": [wire.middle[0] for wire in cuts],
                "y": [wire.middle[1] for wire in cuts],
                "title": [wire.title() for wire in cuts],
            }
        ),
    )  # fmt: skip
    plot.add_tools(HoverTool(renderers=[dots], tooltips=_TIP.format("@{title}")))
    nodes = drawn.plan.nodes
    routes = [
        [printable(nodes[w.route.source].name), [printable(nodes[r].name) for r in w.route.readers]]
        for w in drawn.wires
    ]
    return sources, lit, routes


def _boxes(plot: Any, drawn: Scene) -> tuple[Any, list[tuple[Any, float]], tuple[Any, float]]:
    """The nodes; returns their source, and their texts and borders with sizes at zoom 1."""
    from bokeh.models import ColumnDataSource, HoverTool, TapTool

    boxes = drawn.boxes
    facts = [box.facts() for box in boxes]
    kinds = list(dict.fromkeys(what for fact in facts for what, _ in fact))
    columns: dict[str, list[Any]] = {
        "x": [round(box.left + NODE_WIDTH / 2, 1) for box in boxes],
        "y": [round(box.top + NODE_HEIGHT / 2, 1) for box in boxes],
        "label": [box.label for box in boxes],
        "detail": [box.detail for box in boxes],
        "fill": [box.shade.tint for box in boxes],
        "line": [box.shade.strong for box in boxes],
        "heat": [round(box.left + 5 + (NODE_WIDTH - 10) * box.heat, 1) for box in boxes],
        "left": [round(box.left + 5, 1) for box in boxes],
        "node": [printable(box.node.name) for box in boxes],
    }
    columns |= {what: [dict(fact).get(what, "") for fact in facts] for what in kinds}
    source = ColumnDataSource(columns)
    rects = plot.rect(
        "x", "y", NODE_WIDTH, NODE_HEIGHT, source=source, fill_color="fill", line_color="line",
        border_radius=4, nonselection_alpha=0.3, selection_line_width=2.5,
    )  # fmt: skip
    y = ColumnDataSource(
        {
            "left": columns["left"], "right": columns["heat"], "line": columns["line"],
            "top": [box.top + NODE_HEIGHT - 4 for box in boxes],
            "bottom": [box.top + NODE_HEIGHT - 1.6 for box in boxes],
        }
    )  # fmt: skip
    plot.quad("left", "right", "top", "bottom", source=y, fill_color="line", line_color=None)
    texts = []
    for field, up, pixels, style in (("label", -5, 11.0, "bold"), ("detail", 7, 9.5, "normal")):
        words = ColumnDataSource(
            {"x": columns["x"], "y": [at + up for at in columns["y"]], "text": columns[field]}
        )
        renderer = plot.text(
            "x", "y", "text", source=words, text_align="center", text_baseline="middle",
            text_font={"value": FONT}, text_font_style=style, text_font_size="6px",
            text_color=colours.INK if field == "label" else colours.FAINT,
        )  # fmt: skip
        texts.append((renderer, pixels))
    shown = "<b>@{node}</b>" + "".join(_FACT.format(escape(what), what) for what in kinds)
    plot.add_tools(HoverTool(renderers=[rects], tooltips=_TIP.format(shown), attachment="right"))
    plot.add_tools(TapTool(renderers=[rects]))
    source.name = "gf-nodes"
    source.tags = kinds
    return source, texts, (rects, 1.2)


# Behaviour ----------------------------------------------------------------------------------------


def _scale(plot: Any, texts: list[tuple[Any, float]], lines: list[tuple[Any, float]]) -> None:
    """Let texts and lines grow with their boxes; texts that nobody could read vanish."""
    from bokeh.models import CustomJS

    code = CustomJS(
        args={
            "plot": plot,
            "texts": [renderer for renderer, _ in texts],
            "sizes": [pixels for _, pixels in texts],
            "lines": [renderer for renderer, _ in lines],
            "widths": [pixels for _, pixels in lines],
        },
        code=ZOOM,
    )
    for attribute in ("start", "end"):
        plot.x_range.js_on_change(attribute, code)
    plot.js_on_change("inner_width", code)


def _link(nodes: Any, bars: Any, wires: list[Any], routes: list[Any]) -> None:
    """A node tapped in one drawing is lit in both, with its edges."""
    from bokeh.models import CustomJS

    args = {"nodes": nodes, "bars": bars, "wires": wires, "routes": routes}
    for source in (nodes, bars):
        code = CustomJS(args=args | {"tapped": source}, code=LINK)
        source.selected.js_on_change("indices", code)
