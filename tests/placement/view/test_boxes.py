"""Boxes of the page, in every state of opening and folding: two lie beside each other or one in the
other, what is written in a box stays in it, and edges run beside those that they do not join."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.placement.plans.plan import Plan
from graphflow.placement.view.page import html
from graphflow.placement.view.page.payload import pack, payload
from tests.placement.view.chromium import Page, find
from tests.placement.view.view_plans import (
    Drawing,
    kernels,
    network,
    plan_hostile_names,
    plan_nested_bodies,
    towers,
)

pytestmark = pytest.mark.browser

P = gf.parallel
NEAR, CARDS = 0.01, 7  # pixels that are no overlap; how far the cards of a folded group reach

# Another plan in the same page.
LOAD = """(async () => {{
  D = Object.assign(await unpack("{}"), {{unit: D.unit}})
  shares.clear(); opShares.clear(); prepare(); wear("light"); return true
}})()"""

# All folded, as much open as at first, all open.
FOLDED = "state.open = new Set([N])"
FIRST, OPEN = "openSome(START[0])", "openSome(MOST, true)"

# What is on the screen: of each box its number, those around it, its corners with the cards as
# which a folded group is drawn, and whether it is open; of each text its corners; the edges that
# pass behind a box, and which.
SEEN = f"""(() => {{
  const boxes = state.items.map(item => {{
    const {{x, y, w, h}} = state.boxes.get(item), open = isGroup(item) && state.open.has(item)
    const more = isGroup(item) && !open ? {CARDS} : 0, around = ancestry(item).slice(1, -1)
    return {{item, around, open, low: [x, y], high: [x + w + more, y + h + more]}}
  }})
  const pen = document.createElement("canvas").getContext("2d")
  const texts = Object.fromEntries(Object.entries(PIXELS).map(([kind, size]) => {{
    const {{x, y, text}} = model(`gf-${{kind}}s`).data, glyph = model(`gf-${{kind}}-text`).glyph
    pen.font = `${{glyph.text_font_style.value}} ${{size}}px ${{glyph.text_font.value}}`
    return [kind, Array.from(text, (told, i) => {{
      const wide = pen.measureText(told).width, left = x[i] - (kind === "title" ? 0 : wide / 2)
      return {{told, low: [left, y[i] - size / 2], high: [left + wide, y[i] + size / 2]}}
    }})]
  }}))
  const shut = boxes.filter(box => !box.open).map(box => state.boxes.get(box.item))
  const behind = state.edges.flatMap(wire => {{
    const [start, end] = ends(wire), points = [start, ...wire.points ?? [], end]
    const others = shut.filter(box => box.item !== wire.a && box.item !== wire.b)
    return points.slice(1).flatMap(([x1, y1], k) => {{
      const [x0, y0] = points[k], y = (y0 + y1) / 2
      const inside = (b, px, py) =>
        px > b.x + 1 && px < b.x + b.w - 1 && py > b.y + 1 && py < b.y + b.h - 1
      return others.filter(b => Math.min(x0, x1) < b.x + b.w && Math.max(x0, x1) > b.x
        && Math.min(y0, y1) < b.y + b.h && Math.max(y0, y1) > b.y
        && Array.from({{length: 33}}, (_, step) => step / 32).some(t => {{
          const u = 1 - t, [a, c] = [u ** 3 + 3 * u * u * t, t ** 3 + 3 * u * t * t]
          const middle = 3 * u * u * t + 3 * u * t * t
          return inside(b, a * x0 + c * x1, u ** 3 * y0 + middle * y + t ** 3 * y1)
        }})).map(b => [fullName(wire.a), fullName(wire.b), fullName(b.item)])
    }})
  }})
  return {{boxes, texts, behind, whole: [state.root.w, state.root.h]}}
}})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    pytest.importorskip("bokeh")
    if find() is None:
        pytest.skip("needs Chromium: apt install chromium, then pytest --run-browser")
    file = tmp_path_factory.mktemp("page") / "plan.html"
    file.write_text(html.render(towers()), encoding="utf-8")
    with Page(file) as page:
        yield page
        assert page.errors == []


def show(page: Page, plan: Plan) -> None:
    page.evaluate(
        f"window.loaded = false; {LOAD.format(pack(payload(plan)))}.then(() => {{"
        "window.loaded = true})"
    )
    page.wait_until("window.loaded")


def check(page: Page, opened: str) -> dict[str, Any]:
    """Change what is open by the code `opened`, and look at the drawing."""
    page.evaluate(f"{opened}; relayout(); fit(); paint(); 0")
    seen: dict[str, Any] = page.evaluate(SEEN)
    boxes = seen["boxes"]
    low = np.array([box["low"] for box in boxes]).reshape(-1, 2)
    high = np.array([box["high"] for box in boxes]).reshape(-1, 2)
    number = {box["item"]: i for i, box in enumerate(boxes)}
    nested = np.eye(len(boxes), dtype=bool)
    for i, box in enumerate(boxes):
        around = [number[item] for item in box["around"]]
        assert (low[i] >= low[around]).all() and (high[i] <= high[around]).all(), box
        nested[i, around] = nested[around, i] = True
    over = np.argwhere(overlap(low, high) & ~nested)
    assert not len(over), [(boxes[i], boxes[k]) for i, k in over[:4]]
    assert not seen["behind"], seen["behind"][:4]
    assert (low >= -NEAR).all() and (high <= np.array(seen["whole"]) + CARDS + NEAR).all()
    for kind, texts in seen["texts"].items():
        mine = np.array([box["open"] == (kind == "title") for box in boxes], dtype=bool)
        for text, left, right in zip(texts, low[mine], high[mine], strict=True):
            assert (left <= text["low"]).all() and (text["high"] <= right).all(), text
    return seen


def overlap(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """(n, n): of which boxes, by their corners (n, 2), one lies over the other."""
    depth = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    found: np.ndarray = (depth > NEAR).all(axis=-1)
    return found


PARTS = ["a", "b", "weight", "i", "W" * 30, "a_long_name_of_a_scope", "層" * 20, "\U0001d400" * 30]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Scopes in scopes, from wide and flat to narrow and deep, with few edges or many."""
    count, deepest = draw(st.integers(1, 120)), draw(st.integers(1, 6))
    kinds, most = draw(st.integers(1, len(PARTS))), draw(st.integers(0, 3))
    random = draw(st.randoms(use_true_random=False))
    d = Drawing(3)
    names: list[str] = []
    for i in range(count):
        scopes = [
            f"{random.choice(PARTS[:kinds])}{random.randrange(3)}"
            for _ in range(random.randrange(deepest))
        ]
        reads = sorted({random.choice(names) for _ in range(random.randint(0, most)) if names})
        names.append("/".join([*scopes, f"{random.choice(PARTS[:kinds])}_{i}"]))
        d.add(names[-1], "tanh", random.randrange(3), reads, (8, 8))
    return d.plan()


def open_some_groups(page: Page, seed: int, share: float) -> str:
    """Code that opens a share of the groups, as clicks would."""
    count = page.evaluate("G.label.length")
    chosen = np.flatnonzero(np.random.default_rng(seed).random(count) < share)
    return f"state.open = new Set([0, ...{json.dumps(chosen.tolist())}].map(group => N + group))"


@given(plans(), st.integers(0, 2**32 - 1))
def test_boxes_of_random_scopes_are_apart_or_nested_in_any_state(
    page: Page, plan: Plan, seed: int
) -> None:
    show(page, plan)
    for opened in (
        FOLDED,
        FIRST,
        OPEN,
        *(open_some_groups(page, seed, share) for share in (0.3, 0.6, 0.85)),
    ):
        check(page, opened)


def pipeline() -> Plan:
    trainer = example("strategies").Trainer(P.Pipeline(2, "1f1b", microbatches=4))
    shapes = {trainer.ids: trainer.ids.shape, trainer.targets: trainer.targets.shape}
    return gf.plan(trainer.step, gf.Cluster.local(2), shapes)


def digits() -> Plan:
    model = example("digits_towers").Towers(4, 64)
    shapes = {model.images: (128, 64), model.labels: (128,)}
    return gf.plan([model.loss, model.train], gf.Cluster.local(2), shapes)


def example(name: str) -> Any:
    folder = str(Path(__file__).parents[3] / "examples")
    sys.path.insert(0, folder)
    try:
        return import_module(name)
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize(
    "make",
    [pipeline, digits, towers, kernels, plan_nested_bodies, plan_hostile_names,
     lambda: network(3000)],
    ids=["pipeline", "digits", "towers", "kernels", "holding", "hostile", "large"],
)  # fmt: skip
def test_boxes_of_models_are_apart_or_nested_in_any_state(
    page: Page, make: Callable[[], Plan]
) -> None:
    show(page, make())
    first, opened = check(page, FIRST), check(page, OPEN)
    assert len(check(page, FOLDED)["boxes"]) <= len(first["boxes"]) <= len(opened["boxes"])
    groups = page.evaluate("G.label.length")
    for group in range(1, groups, max(1, groups // 25)):
        check(page, f"{FOLDED}; reveal(range(N + {group})[0]); state.open.add(N + {group})")
        check(page, f"{FIRST}; state.open.delete(N + {group}) || state.open.add(N + {group})")
    for seed in range(6):
        check(page, open_some_groups(page, seed, 0.2 + 0.15 * seed))
