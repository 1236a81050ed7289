"""Tensors, graphs, sessions and layers in notebooks: small tables, all texts escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.base.formatting import show_bytes
from graphflow.base.notebook_html import SHOWN_ROWS, html_table

HOSTILE = "<script>alert('x')</script>&\x1b[31m\"><img src=x onerror=y>"


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style"}

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def parse_page(value: Any) -> Page:
    page = Page(value._repr_html_())
    assert page.tags <= {"p", "b", "div", "table", "tr", "th", "td"}
    return page


@pytest.fixture
def layer() -> gf.nn.Linear:
    return gf.nn.Linear(3, 2, name="head")


def test_a_tensor_shows_its_spec_its_inputs_and_its_line() -> None:
    x = gf.placeholder("float32", (None, 3), name="x")
    cells = parse_page(gf.exp(x, name="grown")).cells
    assert {"exp", "x", "float32"} <= set(cells) and "grown" in cells[0]
    assert any("test_notebook_html.py" in cell for cell in cells)


def test_a_graph_shows_its_nodes_and_how_many_are_left_out() -> None:
    y = gf.placeholder("float32", (2,), name="x")
    for _ in range(SHOWN_ROWS + 9):
        y = gf.exp(y)
    page = parse_page(gf.Graph([y]))
    assert page.cells[0] == f"Graph of {SHOWN_ROWS + 10} nodes, 1 output" and "x" in page.cells
    assert (
        page.cells[-1] == "and 10 more" and page.cells.count("exp") == SHOWN_ROWS
    )  # one is a name


def test_a_layer_shows_its_variables_and_their_number(layer: gf.nn.Linear) -> None:
    cells = parse_page(layer).cells
    assert cells[0] == f"Linear: 8 parameters, {show_bytes(32)}"
    assert {"head/weight", "(2, 3)", "head/bias", "(2,)"} <= set(cells)


def test_a_session_shows_where_it_runs() -> None:
    with gf.Session() as session:
        session.run(gf.constant(np.ones(2)) + 1.0)
        cells = parse_page(session).cells
    assert cells[0] == "Session, step 1" and "cpu" in "".join(cells)
    assert parse_page(session).cells == ["Session, closed"]


def test_hostile_names_are_escaped_and_control_characters_replaced() -> None:
    x = gf.placeholder("float32", (2,), name="x")
    tensor = gf.exp(x, name="named")
    tensor.node.name = HOSTILE
    for value in (tensor, gf.Graph([gf.exp(tensor)])):
        page = parse_page(value)
        assert any("<script>" in cell for cell in page.cells), "as text"
        assert "\x1b" not in "".join(page.cells)
    text = html_table(HOSTILE, [HOSTILE], [[HOSTILE * 9]])
    assert "<script" not in text and "<img" not in text and len(text) < 2000
