"""The page of the dashboard: tiles, curves, workers, memory, links, and the plan's page below.

Names of nodes, devices and workers are strangers' text: they are escaped in HTML, and plain text in
figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphflow.base.formatting import show_bytes, show_seconds
from graphflow.base.html_escape import escape
from graphflow.dashboard.session_watcher import EVERY, SessionWatcher
from graphflow.placement.view.text import printable, shorten

if TYPE_CHECKING:
    from bokeh.document import Document

_HEIGHT = 230  # pixels of a curve
_LONGEST = 48  # letters of a name
_INK, _BLUE, _GREEN = "#1c2430", "#2f6db5", "#2d8a57"
_STYLE = """
:host, .bk-clearfix { width: 100%; }
.gf { font: 14px/1.5 Inter, Helvetica, Arial, sans-serif; color: #1c2430; }
.gf h3 { font-size: 15px; margin: 8px 0 4px; }
.gf .tiles { display: flex; gap: 12px; flex-wrap: wrap; }
.gf .tile { border: 1px solid #e1e6ec; border-radius: 10px; padding: 8px 16px; min-width: 150px; }
.gf .tile b { display: block; font-size: 22px; font-weight: 600; }
.gf .tile span, .gf th { color: #5c6877; font-weight: 500; font-size: 12.5px; }
.gf table { border-collapse: collapse; width: 100%; font-size: 13px; }
.gf th { text-align: left; } .gf th, .gf td { padding: 3px 18px 3px 0; }
.gf td { border-top: 1px solid #e1e6ec; overflow-wrap: anywhere; }
.gf .up { color: #2d8a57; } .gf .lost { color: #b3261e; font-weight: 600; }
.gf .meter { display: inline-block; width: 110px; height: 8px; border-radius: 4px;
  background: #e6eaef; overflow: hidden; margin-right: 8px; }
.gf .meter i { display: block; height: 100%; background: #2f6db5; }
.gf .problem { background: #fdecea; color: #8c1d18; border-radius: 8px; padding: 6px 12px; }
"""
_PLAN = (
    "<h3>Plan of the last step</h3><iframe src='/plan' loading=lazy title='plan' "
    "style='width:100%;height:900px;border:1px solid #e1e6ec;border-radius:10px'></iframe>"
)


class _Html(str):
    """A cell of a table that is HTML already; all other text is escaped."""


def build_page(document: Document, watcher: SessionWatcher) -> None:
    """Fill a browser's document, and keep it up to date until the browser leaves."""
    from bokeh.layouts import column, row
    from bokeh.models import ColumnDataSource, PlainText
    from bokeh.models.widgets import Div
    from bokeh.plotting import figure

    head, tables = _div(Div), _div(Div)
    points = ColumnDataSource({"seconds": [], "rate": [], "step": [], "loss": []})

    def curve(title: str, name: str, color: str) -> Any:
        plot: Any = figure(
            height=_HEIGHT, sizing_mode="stretch_width", tools="pan,xwheel_zoom,reset,save",
            toolbar_location="above", x_axis_label="seconds",
        )  # fmt: skip
        plot.title.text = PlainText(text=title)
        plot.line("seconds", name, source=points, color=color, line_width=2)
        plot.title.text_color = _INK
        return plot

    loss = curve("loss", "loss", _BLUE)
    rate = curve("steps a second", "rate", _GREEN)
    document.title = "graphflow"
    document.add_root(
        column(
            head, row(loss, rate, sizing_mode="stretch_width"), tables, _div(Div, _PLAN),
            sizing_mode="stretch_width",
        )
    )  # fmt: skip

    def update() -> None:
        head.text, tables.text = tiles(watcher), details(watcher)
        name = next(iter(watcher.state.get("scalars", {})), None)
        title = _name(name) if name else "no float scalar is fetched"
        if loss.title.text.text != title:
            loss.title.text = PlainText(text=title)
        known = len(points.data["seconds"])
        new = list(watcher.points)[known:] if known < len(watcher.points) else []
        if known > len(watcher.points) or (known == watcher.points.maxlen):
            new, points.data = list(watcher.points), {key: [] for key in points.data}
        points.stream(
            {
                "seconds": [each.seconds for each in new], "rate": [each.rate for each in new],
                "step": [each.step for each in new],
                "loss": [float("nan") if each.loss is None else each.loss for each in new],
            }
        )  # fmt: skip

    update()
    document.add_periodic_callback(update, int(EVERY * 1000))


def _div(kind: Any, text: str = "") -> Any:
    return kind(
        text=text, sizing_mode="stretch_width", stylesheets=[_STYLE], css_classes=["gf"],
        disable_math=True,
    )  # fmt: skip


def tiles(watcher: SessionWatcher) -> str:
    """Return the numbers at the top, as HTML."""
    state = watcher.state
    rate = watcher.points[-1].rate if watcher.points else 0.0
    told = [
        ("steps", f"{state.get('step', 0):,}"),
        ("steps a second", f"{rate:,.3g}"),
        ("last steps, measured", _seconds(state.get("measured"))),
        ("predicted", _seconds(state.get("predicted"))),
        ("measured / predicted", _ratio(state.get("measured"), state.get("predicted"))),
    ]
    told += [
        (name, "not finite" if value is None else f"{value:.5g}")
        for name, value in list(state.get("scalars", {}).items())[:4]
    ]
    shown = "".join(
        f"<div class=tile><span>{escape(_name(name))}</span><b>{escape(value)}</b></div>"
        for name, value in told
    )
    problem = watcher.problem and (
        f"<p class=problem>The session does not answer: {escape(watcher.problem)}. "
        "What is shown is its last state.</p>"
    )
    return f"<div class=gf>{problem}<div class=tiles>{shown}</div></div>"


def details(watcher: SessionWatcher) -> str:
    """Return the tables of workers, memory and links, as HTML."""
    return f"<div class=gf>{_workers(watcher)}{_memory(watcher)}{_links(watcher)}</div>"


def _workers(watcher: SessionWatcher) -> str:
    rows = []
    for each in watcher.state.get("workers", ()):
        report = watcher.reports.get(each["index"], {}) if each["state"] == "up" else {}
        state = each["state"] + (f": {each['reason']}" if each["reason"] else "")
        pid, resident = report.get("pid", each["pid"]), report.get("resident", each["memory"])
        rows.append(
            (
                each["index"], each["address"] or "this process", report.get("host", ""),
                "" if pid is None else pid, ", ".join(each["devices"]),
                "" if resident is None else show_bytes(resident),
                _Html(f"<td class={'up' if each['state'] == 'up' else 'lost'}>{_text(state)}"),
            )
        )  # fmt: skip
    heads = ("worker", "address", "host", "pid", "devices", "memory", "state")
    return _table("Workers", heads, rows)


def _memory(watcher: SessionWatcher) -> str:
    held: dict[str, int] = {}
    for report in watcher.reports.values():
        for session in report["sessions"]:
            for kind in ("arenas", "variables"):
                for device, nbytes in session[kind].items():
                    held[device] = held.get(device, 0) + nbytes
    rows = []
    for name, memory in watcher.state.get("memory", {}).items():
        share = 100.0 * memory["planned"] / memory["limit"] if memory["limit"] else 0.0
        meter = f"<span class=meter><i style='width:{min(share, 100.0):.1f}%'></i></span>"
        planned = _Html(f"<td>{meter}{_text(show_bytes(memory['planned']))}")
        has = show_bytes(held[name]) if name in held else ""
        rows.append((name, planned, has, show_bytes(memory["limit"])))
    return _table("Memory by device", ("device", "planned peak", "held", "limit"), rows)


def _links(watcher: SessionWatcher) -> str:
    numbers = {each["address"]: each["index"] for each in watcher.state.get("workers", ())}
    rows = [
        (
            f"worker {index}", f"worker {numbers.get(link['peer'], link['peer'])}",
            show_bytes(link["sent"]), show_bytes(link["received"]),
        )
        for index, report in sorted(watcher.reports.items())
        for link in report["links"]
    ]  # fmt: skip
    return (rows and _table("Links", ("from", "to", "sent", "received"), rows)) or ""


def _table(title: str, heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """Return a table as HTML."""
    head = "".join(f"<th>{_text(each)}" for each in heads)
    lines = "".join("<tr>" + "".join(map(_cell, row)) for row in rows)
    return f"<h3>{_text(title)}</h3><table><tr>{head}{lines}</table>"


def _cell(value: Any) -> str:
    return value if isinstance(value, _Html) else f"<td>{_text(value)}"


def _name(name: str) -> str:
    return shorten(printable(name), _LONGEST)


def _text(value: Any) -> str:
    return escape(printable(str(value)))


def _seconds(value: float | None) -> str:
    return "–" if value is None else show_seconds(value)


def _ratio(measured: float | None, predicted: float | None) -> str:
    return f"{measured / predicted:.2f}" if measured and predicted else "–"
