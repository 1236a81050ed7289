"""The page of a plan in a browser: it opens, folds, searches and links, and asks for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphflow.placement.plans.plan import Plan
from graphflow.placement.view.page import html
from tests.placement.view.chromium import Page, find
from tests.placement.view.view_plans import (
    add_measurements,
    chain,
    kernels,
    network,
    plan_hostile_names,
    plan_nested_bodies,
    towers,
)

pytestmark = pytest.mark.browser

MODEL = "Bokeh.documents[0].get_model_by_name"


def open_page(plan: Plan, folder: Path, dark: bool = False, width: int = 1500) -> Page:
    pytest.importorskip("bokeh")
    if find() is None:
        pytest.skip("needs Chromium: apt install chromium, then pytest --run-browser")
    file = folder / "plan.html"
    file.write_text(html.render(plan), encoding="utf-8")
    return Page(file, dark, width)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with open_page(add_measurements(towers()), tmp_path) as page:
        yield page
        assert page.errors == []
        assert [url[:60] for url in page.requests[1:] if not url.startswith("data:")] == []


def list_shown_names(page: Page) -> list[str]:
    names: list[str] = page.evaluate("gfShown()")
    return names


def column(page: Page, source: str, name: str) -> list[Any]:
    values: list[Any] = page.evaluate(f"Array.from({MODEL}('{source}').data.{name})")
    return values


def lit(page: Page) -> set[str]:
    """Names on the bars that are not dimmed."""
    names, alphas = column(page, "gf-bars", "name"), column(page, "gf-bars", "alpha")
    return {name for name, alpha in zip(names, alphas, strict=True) if alpha > 0.4}


def unfold(page: Page, group: str, inside: str) -> None:
    """Open a group, unless it is open from the start."""
    if inside not in list_shown_names(page):
        page.click(f"gfWhere('{group}')")
        page.wait_until(f"gfShown().includes('{inside}')")


def panel(page: Page) -> str:
    text: str = page.evaluate("document.getElementById('detail').innerText")
    return text


@pytest.mark.parametrize(
    "make",
    [
        lambda: add_measurements(towers()),
        plan_hostile_names,
        lambda: add_measurements(kernels()),
        lambda: chain(0),
        lambda: chain(1),
        lambda: network(3000),
    ],
    ids=["towers", "hostile", "kernels", "empty", "one", "large"],
)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_opens_the_page_without_errors_or_requests(
    make: Any, dark: bool, tmp_path: Path
) -> None:
    with open_page(make(), tmp_path, dark) as page:
        assert page.errors == []
        assert page.requests[0].startswith("file://")
        assert all(url.startswith("data:image/") for url in page.requests[1:])
        assert page.evaluate("document.documentElement.dataset.theme") == ("light", "dark")[dark]


def test_a_click_opens_a_group_and_one_on_its_title_folds_it(page: Page) -> None:
    unfold(page, "tower1", "tower1/dense0")
    assert "tower1/dense0/matmul" not in list_shown_names(page)
    before = set(list_shown_names(page))
    page.click("gfWhere('tower1/dense0')")
    page.wait_until("gfShown().includes('tower1/dense0/matmul')")
    assert set(list_shown_names(page)) > before
    assert "tower1/dense0" in panel(page)
    page.click("gfWhere('tower1/dense0')")
    page.wait_until("!gfShown().includes('tower1/dense0/matmul')")
    assert set(list_shown_names(page)) == before


def test_a_node_is_followed_into_the_timelines_and_a_bar_back(page: Page) -> None:
    unfold(page, "tower1", "tower1/dense0")
    page.click("gfWhere('tower1/dense0')")
    page.wait_until("gfShown().includes('tower1/dense0/matmul')")
    page.click("gfWhere('tower1/dense0/matmul')")
    page.wait_until("document.querySelector('#detail h2').textContent === 'tower1/dense0/matmul'")
    assert lit(page) == {"tower1/dense0/matmul"}
    assert {"why here", "reads", "x, tower1/dense0/w"} <= set(panel(page).splitlines())
    bar = column(page, "gf-bars", "name").index("tower0/dense0/matmul")
    left, right, top, bottom = (
        column(page, "gf-bars", side)[bar] for side in ("left", "right", "top", "bottom")
    )
    page.click(f"gfAt('gf-timeline', {(left + right) / 2}, {(top + bottom) / 2})")
    page.wait_until("document.querySelector('#detail h2').textContent === 'tower0/dense0/matmul'")
    assert lit(page) == {"tower0/dense0/matmul"}


def test_a_group_lights_the_bars_of_all_its_nodes(page: Page) -> None:
    unfold(page, "tower2", "tower2/dense1")
    page.click("gfWhere('tower2/dense1')")
    page.wait_until("!document.getElementById('detail').hidden")
    assert len(lit(page)) > 5
    assert all(name.startswith("tower2/dense1/") or "bars" in name for name in lit(page))


def test_search_lists_nodes_and_enter_opens_the_way_to_the_first(page: Page) -> None:
    page.click("#find")
    page.write("dense1/b/mom")
    page.wait_until("document.querySelectorAll('#results li').length === 4")
    assert page.evaluate("document.getElementById('found').textContent") == "4 of 151"
    page.write("\n")
    page.wait_until("gfShown().includes('tower0/dense1/b/momentum')")
    assert "tower0/dense1/b/momentum" in panel(page)
    page.evaluate("document.getElementById('find').value = ''")
    page.click("#find")
    page.write("nothing of this name")
    page.wait_until("document.getElementById('found').textContent === '0 of 151'")
    assert "no node" in page.evaluate("document.getElementById('results').textContent")


def test_colours_and_the_critical_path_change_the_drawing(page: Page) -> None:
    drawings = {json.dumps(column(page, "gf-nodes", "fill"))}
    for by in ("op", "time", "memory"):
        page.click(f"[data-by={by}]")
        page.wait_until(f"document.querySelector('[data-by={by}]').ariaPressed === 'true'")
        drawings.add(json.dumps(column(page, "gf-nodes", "fill")))
    assert len(drawings) == 4
    assert set(column(page, "gf-nodes", "alpha")) == {1}
    page.click("#critical")
    page.wait_until("document.getElementById('critical').ariaPressed === 'true'")
    assert len(set(column(page, "gf-nodes", "alpha"))) == 2
    assert 0 < len(lit(page)) < 130


def test_a_node_that_holds_bodies_shows_them_when_it_is_opened(tmp_path: Path) -> None:
    with open_page(plan_nested_bodies(), tmp_path) as page:
        assert "net/scan/add" not in list_shown_names(page)
        page.click("gfWhere('net/scan')")
        page.wait_until("gfShown().includes('net/scan/add')")
        assert lit(page) == {"net/scan"}
        page.click("gfWhere('net/scan/cond')")
        page.wait_until("gfShown().includes('net/scan/cond/then')")
        page.click("gfWhere('net/scan/add')")
        page.wait_until("document.querySelector('#detail h2').textContent === 'net/scan/add'")
        assert lit(page) == {"net/scan"}  # as a part of which it runs
        assert "net/scan/cond, net/scan/multiply" in panel(page)
        assert page.errors == []


def test_a_kernel_is_opened_searched_and_followed_into_the_timeline(tmp_path: Path) -> None:
    with open_page(add_measurements(kernels()), tmp_path) as page:
        page.click("#fold")
        page.wait_until("!gfShown().includes('net/matmul')")
        page.click("gfWhere('net')")
        page.wait_until("gfShown().includes('net: kernel: multiply … subtract')")
        assert "net/tanh" not in list_shown_names(page)
        details = column(page, "gf-details", "text")
        assert any(text.startswith("kernel of 3") for text in details)

        page.click("gfWhere('net: kernel: multiply … subtract')")
        page.wait_until("gfShown().includes('net/tanh')")
        facts = panel(page).splitlines()
        assert {"one kernel of", "net/multiply, net/tanh, net/subtract"} <= set(facts)
        assert any(line.endswith("% of the step") for line in facts)
        assert {"net/multiply", "net/tanh", "net/subtract"} & lit(page)
        assert "net/matmul" not in lit(page)

        page.click("gfWhere('net: kernel: multiply … subtract')")  # its title folds it
        page.wait_until("!gfShown().includes('net/tanh')")
        page.click("#find")
        page.write("net/tan")
        page.wait_until("document.querySelectorAll('#results li').length === 1")
        page.write("\n")
        page.wait_until("document.querySelector('#detail h2')?.textContent === 'net/tanh'")
        assert "net/tanh" in list_shown_names(page)  # what was folded around it is open
        assert {"one kernel with", "net/multiply, net/subtract"} <= set(panel(page).splitlines())
        assert "33.3 % of the kernel's 30 µs" in panel(page)
        assert lit(page) == {"net/tanh"}

        bar = column(page, "gf-bars", "name").index("gate/exp")
        sides = [column(page, "gf-bars", side)[bar] for side in ("left", "right", "top", "bottom")]
        page.click(f"gfAt('gf-timeline', {sum(sides[:2]) / 2}, {sum(sides[2:]) / 2})")
        page.wait_until("document.querySelector('#detail h2').textContent === 'gate/exp'")
        assert page.errors == []
        assert all(url.startswith("data:") for url in page.requests[1:])


def test_a_kernel_over_two_scopes_names_the_part_that_is_elsewhere(tmp_path: Path) -> None:
    with open_page(kernels(), tmp_path) as page:
        page.click("#open")
        page.wait_until("gfShown().includes('right/sign')")
        page.click("gfWhere('right/sign')")
        page.wait_until("document.querySelector('#detail h2')?.textContent === 'right/sign'")
        assert "left/add, left/abs" in panel(page).splitlines()


def test_light_becomes_dark_on_a_click(page: Page) -> None:
    before = column(page, "gf-nodes", "fill")
    page.click("#theme")
    page.wait_until("document.documentElement.dataset.theme === 'dark'")
    assert column(page, "gf-nodes", "fill") != before


def test_all_groups_open_and_fold(page: Page) -> None:
    page.click("#open")
    page.wait_until("gfShown().includes('tower3/dense1/w/assign')")
    page.click("#fold")
    page.wait_until("!gfShown().includes('tower3/dense1')")
    assert "tower3" in list_shown_names(page)


def test_boxes_of_a_group_do_not_overlap(page: Page) -> None:
    page.click("#open")
    page.wait_until("gfShown().length > 100")
    sides = [column(page, "gf-nodes", side) for side in ("x", "y", "w", "h")]
    boxes = list(zip(*sides, strict=True))
    for i, (x0, y0, w0, h0) in enumerate(boxes):
        for x1, y1, w1, h1 in boxes[i + 1 :]:
            apart = abs(x0 - x1) >= (w0 + w1) / 2 - 0.01 or abs(y0 - y1) >= (h0 + h1) / 2 - 0.01
            assert apart


@pytest.mark.parametrize("make", [towers, kernels, lambda: network(3000)])
def test_the_drawing_fills_its_frame_from_edge_to_edge(make: Any, tmp_path: Path) -> None:
    with open_page(make(), tmp_path) as page:
        page.click("#fold")
        page.wait_until("state.open.size === 1")
        lefts = "state.items.map(i => state.boxes.get(i))"
        assert page.evaluate(f"Math.min(...{lefts}.map(b => b.x))") < 200
        assert page.evaluate(f"state.root.w - Math.max(...{lefts}.map(b => b.x + b.w))") < 200


@pytest.mark.parametrize("make", [lambda: chain(1), lambda: chain(3), towers])
def test_a_low_drawing_is_not_squeezed(make: Any, tmp_path: Path) -> None:
    scale = "{m}.inner_{side} / Math.abs({m}.{axis}_range.end - {m}.{axis}_range.start)"
    across, down = (
        scale.format(m=MODEL + "('gf-graph')", side=side, axis=axis)
        for side, axis in (("width", "x"), ("height", "y"))
    )
    with open_page(make(), tmp_path) as page:
        page.wait_until(f"Math.abs({across} / ({down}) - 1) < 0.01")


def test_a_narrow_window_gives_most_of_its_width_to_the_timelines(tmp_path: Path) -> None:
    with open_page(add_measurements(towers()), tmp_path, width=420) as page:
        for figure in ("gf-timeline", "gf-memory"):
            page.wait_until(f"{MODEL}('{figure}').inner_width > 200")
        labels = page.evaluate(
            f"Array.from({MODEL}('gf-timeline').left[0].major_label_overrides.values())"
        )
        assert labels[:2] == ["0/cpu:0", "measured"] and "0/cpu:0 → 1/cpu:0" in labels
        assert page.evaluate(f"{MODEL}('gf-timeline').below[0].axis_label") in ("ms", "µs")
        assert page.evaluate("document.documentElement.scrollWidth") == 420


def test_hostile_names_are_text_in_the_panel_and_in_the_results(tmp_path: Path) -> None:
    with open_page(plan_hostile_names(), tmp_path) as page:
        page.click("#find")
        page.write("<script>")
        page.wait_until("document.querySelectorAll('#results li').length > 1")
        page.write("\n")
        page.wait_until("!document.getElementById('detail').hidden")
        assert "<script>alert" in panel(page)
        assert (
            page.evaluate("document.querySelectorAll('#detail script, #results script').length")
            == 0
        )
        assert page.errors == []
