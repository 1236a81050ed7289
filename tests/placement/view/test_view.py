"""The drawings of a plan: complete, escaped, offline, and without errors in a real browser."""

from __future__ import annotations

import builtins
import dataclasses
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.base.formatting import show_bytes, show_seconds
from graphflow.errors import PlanError
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.plan_records import Interval
from graphflow.placement.view import colours, dot, svg
from graphflow.placement.view.page import html
from graphflow.placement.view.page.payload import KINDS, payload, unpack
from graphflow.placement.view.scene import headlines, scene
from graphflow.placement.view.text import printable, shorten, ticks
from tests.placement.view.view_plans import (
    HOSTILE,
    add_measurements,
    chain,
    kernels,
    plan_hostile_names,
    towers,
)

SVG = "{http://www.w3.org/2000/svg}"
# Attributes with which a page loads something, and the elements that exist to do so.
LOADS = {"src", "href", "srcset", "data", "action", "poster", "background", "formaction", "ping"}
LOADERS = {"iframe", "object", "embed", "base", "form", "img", "video", "audio", "frame"}


class Reader(HTMLParser):
    """What a page would load, and the scripts it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        if tag == "script":
            self.scripts.append("")
        if tag in LOADERS:
            self.loads.append(tag)
        self.loads += [
            f"{tag} {key}={value}"
            for key, value in attrs
            if key in LOADS and not (value or "").startswith("data:")
        ]
        assert not [key for key, _ in attrs if key.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag == "script":
            self.scripts[-1] += data
        elif self._tag == "style":
            assert "@import" not in data and "url(" not in data
        else:
            self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def unpack_page(page: str) -> Any:
    """The plan's data inside its page."""
    found = re.search(r'id="gf-plan">([^<]*)<', page)
    assert found is not None
    return unpack(found[1])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return add_measurements(towers())


@pytest.fixture(scope="module")
def page(plan: Plan) -> str:
    pytest.importorskip("bokeh")
    return html.render(plan)


# HTML ---------------------------------------------------------------------------------------------


def test_the_page_and_the_report_measure_a_device_alike(plan: Plan) -> None:
    """What a device takes to send is a bar, but not the time of its nodes."""
    assert plan.measured is not None
    name = next(iter(plan.cluster.devices))
    sends = (*plan.measured.timeline, Interval(name, "send/x/0", 9.0, 10.0, "send"))
    plan = plan.with_measured(replace(plan.measured, timeline=sends))
    busy = plan.report().devices[0].busy_measured
    assert busy is not None and busy < 1
    assert f"measured {show_seconds(busy)}" in html.render(plan)


def test_the_page_loads_nothing_from_anywhere(page: str) -> None:
    assert read(page).loads == []


def test_the_page_forbids_the_browser_to_make_requests(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "http" not in policy[1] and "*" not in policy[1]


def test_the_page_says_what_the_plan_says(page: str, plan: Plan) -> None:
    text = " ".join(read(page).text)
    assert show_seconds(plan.makespan) in text
    assert plan.measured is not None and show_seconds(plan.measured.makespan) in text
    for name, value in plan.baselines.items():
        assert name[1:] in text and show_seconds(value) in text
    for device in plan.cluster.devices:
        assert device in text
        assert show_bytes(plan.cluster.device(device).memory) in text
    assert set(unpack_page(page)["nodes"]["name"]) == {node.name for node in plan.nodes}


def test_hostile_names_stay_text_in_the_page() -> None:
    pytest.importorskip("bokeh")
    evil, good = read(html.render(plan_hostile_names())), read(html.render(chain(3)))
    assert evil.loads == []
    # As many scripts as the page of a harmless plan, and none that the user wrote.
    assert len(evil.scripts) == len(good.scripts)
    assert not [script for script in evil.scripts if script.strip().startswith("alert")]
    page = html.render(plan_hostile_names())
    assert "<script>alert" not in page
    names = unpack_page(page)["nodes"]["name"]
    assert names[0].startswith(HOSTILE[:20])
    assert not [letter for name in names for letter in name if letter in "\u202e\x1b\x00"]


def test_dollar_signs_in_names_are_not_placeholders_of_the_page() -> None:
    pytest.importorskip("bokeh")
    plan = towers(count=1, workers=1)
    marked = Plan(**{**vars(plan), "placer": "$css $library $nothing"})
    assert "placer: $css $library $nothing" in html.render(marked)


def test_without_bokeh_one_line_says_what_to_install(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def import_without_bokeh(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "bokeh":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", import_without_bokeh)
    with pytest.raises(PlanError, match=r"pip install 'graphflow\[viz\]'.*\.svg") as caught:
        html.render(plan)
    assert "\n" not in str(caught.value)
    assert svg.render(plan).startswith("<?xml")


# SVG ----------------------------------------------------------------------------------------------


def test_the_svg_is_xml_and_shows_every_node_and_interval(plan: Plan) -> None:
    root = ET.fromstring(svg.render(plan))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    for node in plan.nodes:
        assert any(title.startswith(node.name + "\n") and node.why in title for title in titles)
    assert plan.measured is not None
    bars = [title for title in titles if re.search(r": (compute|wait|transfer), ", title)]
    assert len(bars) == len(plan.timeline) + len(plan.measured.timeline)


def test_the_svg_refers_to_nothing_outside(plan: Plan) -> None:
    drawn = svg.render(plan).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|href|url\(|@import|<script|<image|<foreignObject", drawn)


def test_hostile_names_stay_text_in_the_svg() -> None:
    drawn = svg.render(plan_hostile_names())
    root = ET.fromstring(drawn)
    assert not list(root.iter(f"{SVG}script"))
    shown = printable(HOSTILE)
    assert shown.count("\ufffd") == 3  # a zero, a right-to-left override, an escape
    assert any(shown in (t.text or "") for t in root.iter(f"{SVG}title"))


def test_nodes_of_one_kernel_are_joined_in_the_svg_and_named_on_hovering() -> None:
    drawn = svg.render(kernels())
    assert drawn.count('class="band"') == 5  # two in each kernel of three, one in that of two
    titles = [t.text or "" for t in ET.fromstring(drawn).iter(f"{SVG}title")]
    assert any("one kernel with: net/multiply, net/subtract" in title for title in titles)


def test_the_page_tells_shared_ports_constraints_and_whether_a_clock_ended_the_search() -> None:
    pytest.importorskip("bokeh")
    x = gf.placeholder("float32", (256, 256), name="x")
    with gf.device("/worker:0"):
        a, b = gf.tanh(x), gf.exp(x)
    with gf.device("/worker:1"):
        y = a @ b
    made = gf.plan(y, gf.Cluster.hypothetical("2x2xt4", network="10gbe"))
    text = html.render(made)
    assert "Ports that links share" in text and "host 0 nic, out" in text
    assert "pinned by gf.device(&#x27;/worker:0&#x27;)" in text
    assert "placer: greedy, reproducible" in text
    hurried = dataclasses.replace(made, reproducible=False)
    assert "not reproducible: a clock ended the search" in html.render(hurried)
    assert "a clock ended the search" in svg.render(hurried)
    assert "Ports that links share" not in html.render(chain(3))


@pytest.mark.parametrize("drawing", [svg, dot, html], ids=["svg", "dot", "html"])
def test_a_plan_without_nodes_is_drawn(drawing: Any) -> None:
    if drawing is html:
        pytest.importorskip("bokeh")
    assert drawing.render(chain(0))


# DOT ----------------------------------------------------------------------------------------------


def test_dot_strings_are_quoted() -> None:
    assert dot.quote('a"b\\N\nc') == '"a\\"b\\\\N\\nc"'
    drawn = dot.render(plan_hostile_names())
    # Without its strings, nothing is left of DOT but its own words.
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "S", drawn)
    assert '"' not in bare and "script" not in bare
    for line in bare.splitlines():
        assert re.fullmatch(r"[\w\s\[\]=,;{}.>-]*", line), line


def test_dot_has_a_cluster_for_each_device_and_every_edge(plan: Plan) -> None:
    drawn = dot.render(plan)
    for device in plan.cluster.devices:
        assert f"label={dot.quote(device)}" in drawn
    assert drawn.count(" -> ") == sum(len(set(node.inputs)) for node in plan.nodes)
    assert drawn.count("{") == drawn.count("}")


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
@pytest.mark.parametrize("make", [towers, plan_hostile_names])
def test_graphviz_reads_the_dot(make: Any) -> None:
    done = subprocess.run(
        ["dot", "-Tcanon"], input=dot.render(make()), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# Scene --------------------------------------------------------------------------------------------


def test_cut_wires_are_those_that_leave_a_device_and_know_their_transfer(plan: Plan) -> None:
    drawn = scene(plan)
    cut = [wire for wire in drawn.wires if wire.cut]
    between = [t for t in plan.transfers if t.source != "/client"]
    assert {wire.transfer for wire in cut} == set(between)
    assert all(show_bytes(t.bytes) in " ".join(wire.title() for wire in cut) for t in between)


def test_measured_rows_stand_right_below_the_predicted(plan: Plan) -> None:
    rows = scene(plan).rows
    assert [row.measured for row in rows] == [False, True] * (len(rows) // 2)
    assert [row.track for row in rows[::2]] == [row.track for row in rows[1::2]]


def test_what_a_real_trace_over_two_workers_tells_has_a_page() -> None:
    with gf.device("/worker:0"):
        x = gf.placeholder("float32", (8, 64), name="x")
        h = gf.tanh(x @ gf.variable(np.ones((64, 64), "float32"), name="w"))
    with gf.device("/worker:1"):
        y = gf.sum(gf.exp(h))
    with gf.Session(gf.Cluster.local(2), trial=False) as s:
        feeds = {x: np.zeros((8, 64), "float32")}
        s.run(y, feeds)
        with s.trace():
            for _ in range(3):
                s.run(y, feeds)
        plan = s.plan(y)
    assert plan.measured is not None
    kinds = {bar.kind for bar in plan.measured.timeline}
    assert kinds == {"compute", "send", "transfer", "wait"}
    bars = payload(plan)["timeline"]["bars"]
    assert {KINDS[k] for k in bars["kind"]} == kinds
    assert str(list(KINDS)).replace("'", '"') in html.render(plan)  # explorer.js knows them too


def test_feeds_and_fetches_that_were_not_measured_have_no_empty_rows(plan: Plan) -> None:
    assert plan.measured is not None
    inside = tuple(bar for bar in plan.measured.timeline if CLIENT not in bar.track)
    rows = scene(replace(plan, measured=replace(plan.measured, timeline=inside))).rows
    assert {row.measured for row in rows if CLIENT in row.track} == {False}


def test_a_plan_that_gains_nothing_says_so() -> None:
    plan = chain(3)
    slow = Plan(**{**vars(plan), "baselines": {"one device: /worker:0/cpu:0": plan.makespan}})
    assert ("this plan gains nothing") in [remark for _, _, remark in headlines(slow)]


def test_each_of_many_devices_has_its_own_colour() -> None:
    assert len({colours.shade(i) for i in range(40)}) == 40


def test_long_names_keep_their_last_part() -> None:
    assert shorten("tower0/dense1/w/momentum", 18) == "tower0/…/momentum"
    assert shorten("an_ensemble/dense1/matmul", 14) == "…/matmul"
    assert len(shorten("x" * 100, 16)) == 16
    assert shorten("matmul", 16) == "matmul"
    assert shorten("x" * 10 + "層" * 10, 16) == "xxxxx…層層層層層"  # which are as wide as ten
    assert shorten("層/層", 4) == "…/層" and shorten("層", 2) == "層"


@pytest.mark.parametrize("longest", [3e-9, 7.7e-5, 1.94e-3, 0.3, 86.0, 4000.0])
def test_an_axis_has_a_handful_of_round_marks(longest: float) -> None:
    marks = ticks(longest)
    assert 3 <= len(marks) <= 12
    assert marks[0][1] == "0" and marks[-1][0] <= longest * (1 + 1e-9)
