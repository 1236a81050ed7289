"""Loops whose state is updated in place: which are, that bits stay, and what memory they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import OpError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor
from graphflow.runtime.memory.memory_layout import BodyLayout, MemoryLayout, plan_layout
from tests.properties.random_graphs import has_same_bits
from tests.runtime.program.bodies.test_native_loops import Going
from tests.runtime.programs import compile_program, make_partition

ROWS, WIDTH, TURNS = 6, 4, 5
MB = 1 << 20


def start(value: float = 1.0) -> Tensor:
    random = np.random.default_rng(int(10 * value))
    return gf.constant(random.normal(size=(ROWS, WIDTH)).astype("float32"))


def turn_ids() -> Tensor:
    return gf.placeholder("int64", (TURNS, 2), name="ids")


def loop_node(layout: MemoryLayout) -> Node:
    (node,) = layout.body_layouts
    return node


def body_of(*fetches: Tensor) -> BodyLayout:
    (inner,) = plan_layout(make_partition(*fetches), {}).body_layouts.values()
    return inner


def set_rows(table: Any, ids: Any, rows: Any) -> Any:
    return REGISTRY["update_rows"](table, ids, rows, gf.constant(np.int64(ids.shape[0])))


def dense(w: Any, i: Any) -> Any:
    return w - 0.1 * gf.astype(i, "float32")[:1]


def rows_read_before(w: Any, i: Any) -> Any:
    return set_rows(w, i, gf.take(w, i, 0) * 0.5)


def sums(w: Any, i: Any) -> Any:
    ids = gf.reshape(i, (2, 1))
    return gf.scatter_nd(w, ids, gf.ones((2, WIDTH)), reduction="add")


def chain(w: Any, i: Any) -> Any:
    return rows_read_before(sums(w, i) * 0.5, i)


def nest_scan(w: Any, i: Any) -> Any:
    return gf.scan(lambda v, _: (rows_read_before(v, i), None), w, length=2)[0]


def another_view(w: Any, i: Any) -> Any:
    flat = gf.reshape(w, (ROWS * WIDTH,)) + 1.0
    return gf.reshape(flat * 0.5, (ROWS, WIDTH))


def read_before(w: Any, i: Any) -> Any:
    """What replaces the state does not read it itself."""
    return gf.flip(w, 0) * 2.0


def passed_on(w: Any, i: Any) -> Any:
    return w


IN_PLACE = [dense, rows_read_before, sums, chain, nest_scan, another_view, read_before, passed_on]


def scan_of(step: Callable[[Any, Any], Any], init: Any = None) -> tuple[Tensor, Tensor]:
    ids = turn_ids()
    last, _ = gf.scan(lambda w, i: (step(w, i), None), start() if init is None else init, ids)
    return last, ids


@pytest.mark.parametrize("step", IN_PLACE)
def test_a_state_that_is_not_read_later_is_updated_in_place(step: Any) -> None:
    last, _ = scan_of(step)
    (copies,) = body_of(last).copies
    assert copies.direct == copies.swapped == ()


def halve_and_stack(w: Any, i: Any) -> Any:
    return w * 0.5, w


def read_after(w: Any, i: Any) -> Any:
    new = rows_read_before(w, i)
    return new, gf.sum(new) - gf.sum(gf.flip(w, 0))


@pytest.mark.parametrize("step", [halve_and_stack, read_after])
def test_a_state_that_is_read_later_is_copied(step: Any) -> None:
    ids = turn_ids()
    last, ys = gf.scan(step, start(), ids)
    (copies,) = body_of(last, ys).copies
    assert copies.direct == (0,)
    check([last, ys])


def test_states_move_on_in_the_order_in_which_they_are_read() -> None:
    """Of a line of delays, no state needs spare memory; of two that change places, both do."""
    last, _ = gf.scan(
        lambda c, _: ((c[1], c[2], c[0][:1] + c[2]), None), (start(), start(), start()), length=3
    )
    (copies,) = body_of(*last).copies
    assert copies.direct == (0, 1, 2) and not copies.swapped
    check(list(last))
    last, _ = gf.scan(lambda c, _: ((c[1], c[0], c[2] + 1.0), None), last, length=3)
    inner = plan_layout(make_partition(*last), {}).body_layouts
    assert [i.copies[0].swapped for i in inner.values()] == [(), (0, 1)]
    check(list(last))


def test_each_moment_of_an_optimiser_stays_in_its_own_buffer() -> None:
    def step(state: Any, i: Any) -> Any:
        w, m, v = state
        g = w * 2.0 - 1.0
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return (w - 0.1 * m / (gf.sqrt(v) + 1e-3), m, v), None

    last, _ = gf.scan(step, (start(), start(0.0), start(0.5)), turn_ids())
    (copies,) = body_of(*last).copies
    assert copies.direct == copies.swapped == ()
    check(list(last))


def test_a_loop_takes_over_a_temporary_and_copies_a_variable() -> None:
    v = gf.variable(np.ones((ROWS, WIDTH), "float32"), name="v")
    for init, is_shared in ((v, False), (v * 1.0, True)):
        last, _ = scan_of(rows_read_before, init)
        layout = plan_layout(make_partition(last), {})
        node = loop_node(layout)
        assert layout.share_buffer(node.inputs[0], node.outputs[0]) == is_shared


def test_a_large_state_is_in_memory_once() -> None:
    v = gf.variable(np.ones((MB, 1), "float32"), name="v")
    last, _ = scan_of(rows_read_before, v)
    assert 4 * MB <= plan_layout(make_partition(last), {}).arena.nbytes < 4.1 * MB
    other = gf.while_loop(lambda s: s[0, 0] < 3.0, lambda s: s + 1.0, v)
    assert 4 * MB <= plan_layout(make_partition(other), {}).arena.nbytes < 4.1 * MB


@pytest.mark.parametrize("jit", ["on", "off"])
@pytest.mark.parametrize("step", IN_PLACE)
def test_bits_are_those_of_the_interpreter(
    step: Any, jit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", jit)
    check([scan_of(step)[0]], is_exact=jit == "on")


def check(fetches: list[Tensor], is_exact: bool = True) -> None:
    """Program and interpreter agree, twice."""
    part = make_partition(*fetches)
    random = np.random.default_rng(0)
    ids = random.permuted(np.tile(np.arange(ROWS), (TURNS, 1)), axis=1)[:, :2]
    placeholders = [n for n in Graph(fetches).walk() if n.name == "ids"]
    program = compile_program(part, channel=Going())
    want = evaluate(fetches, {node.outputs[0]: ids for node in placeholders})
    for turn in (1, 2):
        have = program.compute(dict.fromkeys(part.feeds, ids), turn, 0)
        for i, array in enumerate(want):
            if is_exact:
                assert has_same_bits(have[str(i)], array)
            else:
                np.testing.assert_allclose(have[str(i)], array, rtol=1e-6)


STEPS: list[Callable[[Any, Any, Any], Any]] = [
    lambda a, b, i: a + b,
    lambda a, b, i: gf.maximum(a, b) * 0.5,
    lambda a, b, i: gf.flip(a, 0),
    lambda a, b, i: b,
    lambda a, b, i: set_rows(a, i, gf.take(b, i, 0) * 0.5),
    lambda a, b, i: gf.scatter_nd(a, gf.reshape(i, (2, 1)), gf.take(b, i, 0), reduction="add"),
    lambda a, b, i: gf.cond(gf.sum(a) > 0.0, lambda: a * 0.5, lambda: b),
    lambda a, b, i: gf.scan(lambda s, _: (s - 0.5 * b, None), a, length=2)[0],
    lambda a, b, i: gf.while_loop(lambda s: gf.sum(s) > 1.0, lambda s: s * 0.5 - 0.1, a, 3),
]


@given(
    st.lists(
        st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)),
        min_size=1, max_size=6,
    ),
    st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 9), st.booleans(),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_random_loops_have_the_bits_of_the_interpreter(
    steps: list[tuple[int, int, int]], kept: list[int], stack: int, is_while: bool
) -> None:
    ids = turn_ids()

    def run(states: Any, i: Any) -> Any:
        values = list(states)
        for kind, a, b in steps:
            values.append(STEPS[kind](values[a % len(values)], values[b % len(values)], i))
        return tuple(values[-1 - k % len(values)] for k in kept), values[stack % len(values)]

    states = tuple(start(1.0 + k) for k in range(len(kept)))
    if is_while:
        last = gf.while_loop(
            lambda s: gf.sum(s[0]) < 50.0, lambda s: run(s, ids[0])[0], states, TURNS
        )
        check(list(last))
    else:
        last, ys = gf.scan(run, states, ids)
        check([*last, ys])


def test_a_loop_that_fails_halfway_leaves_its_variable_as_it_was() -> None:
    v = gf.variable(np.ones((ROWS, WIDTH), "float32"), name="v")
    last, ids = scan_of(rows_read_before, v)
    train = gf.assign(v, last)
    good = np.tile(np.arange(2), (TURNS, 1))
    bad = good.copy()
    bad[3] = 99
    with gf.Session() as s:
        s.run(train, {ids: good})
        before = s.get(v)
        with pytest.raises(OpError, match="99"):
            s.run(train, {ids: bad})
        assert has_same_bits(s.get(v), before)
        s.run(train, {ids: good})
        np.testing.assert_array_equal(s.get(v)[:2], np.full((2, WIDTH), 0.5 ** (2 * TURNS)))
