"""Loops that do not return to Python: the bits of those that do, and an end when one is due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import StepTimeout
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import Tensor
from graphflow.runtime.program.bodies import body_routines as routines
from graphflow.runtime.program.program import Program
from tests.interrupts import interrupt_after
from tests.properties.random_graphs import has_same_bits
from tests.runtime.programs import NoChannel, compile_program, make_partition


class Going(NoChannel):
    """Lets loops go on, and counts how often they asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def check_cancelled(self, step: int, loop: str, done: int, of: str) -> None:
        self.asked.append(done)


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which loops were compiled natively."""
    monkeypatch.delenv("GRAPHFLOW_JIT", raising=False)
    found: list[str] = []

    def record_op(node: Any, *args: Any) -> Any:
        found.append(node.op.name)
        return real(node, *args)

    real = routines.make_native_runner
    monkeypatch.setattr(routines, "make_native_runner", record_op)
    return found


def check(fetches: Sequence[Tensor], feeds: dict[Tensor, Any]) -> Program:
    """Program and interpreter give the same bits, twice."""
    part = make_partition(*fetches)
    bindings = {"n": 3}
    program = compile_program(part, bindings=bindings, channel=Going())
    want = evaluate(fetches, feeds)
    named = {t.node.name: np.asarray(a) for t, a in feeds.items() if t.node.name in part.feeds}
    for step in (1, 2):
        have = program.compute(named, step, 0)
        for i in range(len(fetches)):
            assert has_same_bits(have[str(i)], want[i]), i
    return program


def test_a_scan_with_all_kinds_of_operands_runs_natively(native: list[str]) -> None:
    x = gf.placeholder("float32", (6, 4), name="x")
    c = gf.placeholder("float32", (4,), name="c")

    def body(h: Any, row: Any) -> Any:
        h = gf.tanh(h * 0.5 + row) + c
        return h, (h, row, gf.exp(row))

    last, stacks = gf.scan(body, gf.constant(np.ones(4, "float32")), x)
    random = np.random.default_rng(0)
    feeds = {
        x: random.normal(size=(6, 4)).astype("float32"),
        c: random.normal(size=4).astype("float32"),
    }
    check([last, *stacks], feeds)
    assert native == ["scan"]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_states_that_change_places_do_not_overwrite_each_other(
    native: list[str], reverse: bool, length: int
) -> None:
    x = gf.placeholder("float32", (length, 3), name="x")

    def body(carry: Any, row: Any) -> Any:
        a, b, d = carry
        return (b, a, a + row), (a, d)

    start = tuple(gf.constant(np.full(3, i, "float32")) for i in range(3))
    last, stacks = gf.scan(body, start, x, reverse=reverse)
    check([*last, *stacks], {x: np.arange(3 * length, dtype="float32").reshape(length, 3)})
    assert native == ["scan"]


OPS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b,
    lambda a, b: gf.tanh(a) * 0.5,
    gf.maximum,
    lambda a, b: a - 0.25 * b,
    lambda a, b: gf.reshape(gf.reshape(a, (2, 2)), (4,)),
    lambda a, b: b,
]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), max_size=6),
    st.integers(1, 3), st.booleans(), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_random_scans_and_their_gradients_give_the_bits_of_the_interpreter(
    steps: list[tuple[int, int, int]], states: int, reverse: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x = gf.placeholder("float32", (4, 4), name="x")
    c = gf.placeholder("float32", (4,), name="c")

    def body(carry: Any, row: Any) -> Any:
        values = [*carry, row, c]
        for op, i, j in steps:
            values.append(OPS[op](values[i % len(values)], values[j % len(values)]))
        return tuple(values[-1 - k] for k in range(states)), (values[-1], values[0])

    start = tuple(gf.constant(random.normal(size=4).astype("float32")) for _ in range(states))
    last, stacks = gf.scan(body, start, x, reverse=reverse)
    loss = sum((gf.sum(t) for t in (*last, *stacks)), gf.constant(np.float32(0)))
    fetches = [*last, *stacks, *gf.gradients(loss, [x, c])]
    feeds = {
        x: random.normal(size=(4, 4)).astype("float32"),
        c: random.normal(size=4).astype("float32"),
    }
    check(fetches, feeds)


@pytest.mark.parametrize("limit", [None, 3, 100])
def test_a_while_loop_ends_where_its_condition_or_its_limit_says(
    native: list[str], limit: int | None
) -> None:
    x = gf.placeholder("float32", (), name="x")
    y = gf.placeholder("float32", (3,), name="y")
    end = gf.while_loop(
        lambda s: s[0] < 10.0, lambda s: (s[0] + x, gf.tanh(s[1]) + y), (x, y), limit
    )
    for value in (1.0, 100.0, 3.0):
        check(list(end), {x: np.float32(value), y: np.linspace(0, 1, 3, dtype="float32")})
    assert set(native) == {"while_loop"}


def test_a_condition_may_be_a_state_or_come_from_outside(native: list[str]) -> None:
    go = gf.placeholder("bool", (), name="go")
    x = gf.placeholder("float32", (), name="x")
    end = gf.while_loop(lambda s: s[0], lambda s: (s[1] < 5.0, s[1] + 1.0), (go, x))
    for flag in (True, False):
        check(list(end), {go: np.bool_(flag), x: np.float32(1)})
    never = gf.while_loop(lambda s: go, lambda s: s + 1.0, x, 4)
    for flag in (True, False):
        check([never], {go: np.bool_(flag), x: np.float32(1)})
    assert set(native) == {"while_loop"}


def test_gradients_of_a_bounded_while_loop_run_natively(native: list[str]) -> None:
    x = gf.placeholder("float32", (3,), name="x")
    y = gf.while_loop(lambda s: gf.sum(s) < 20.0, lambda s: s * 1.5 + gf.tanh(s), x, 12)
    check([y, *gf.gradients(gf.sum(y), [x])], {x: np.array([0.5, 1.0, 0.1], "float32")})
    assert "while_loop" in native


def test_random_numbers_in_a_body_leave_the_loop_to_python(native: list[str]) -> None:
    def body(h: Any, _: Any) -> Any:
        return h + gf.random.normal((3,)), None

    last, _ = gf.scan(body, gf.constant(np.zeros(3, "float32")), length=4)
    check([last], {})
    assert native == []


def test_a_loop_asks_whether_to_go_on_from_time_to_time() -> None:
    last = gf.while_loop(lambda s: s < 3_000_000.0, lambda s: s + 1.0, gf.constant(0.0))
    channel = Going()
    program = compile_program(make_partition(last), channel=channel)
    assert program.compute({}, 1, 0)["0"] == 3_000_000
    assert channel.asked[0] == 0 and 1 < len(channel.asked) < 1000


def test_an_endless_native_loop_ends_at_the_deadline() -> None:
    end = gf.while_loop(lambda s: s > -1.0, lambda s: gf.abs(s) + 0.0, gf.constant(1.0))
    x = gf.placeholder("float32", ())
    with gf.Session(deadline=0.2) as s:
        with pytest.raises(StepTimeout, match=r"while_loop.*was in iteration"):
            s.run(end)
        assert s.run(x + 1.0, {x: 1.0}) == 2.0


def test_ctrl_c_ends_a_native_loop_and_the_session_goes_on() -> None:
    v = gf.variable(np.float32(1), name="v")
    end = gf.while_loop(lambda s: s > -1.0, lambda s: gf.abs(s) + 0.0, v)
    with gf.Session(deadline=60) as s:
        interrupt_after(lambda: s.run(gf.assign(v, end + 1.0)), 0.3)
        assert s.get(v) == 1.0
        assert s.run(gf.assign(v, v + 1.0)) == 2.0


def test_a_threads_native_loop_lets_others_run() -> None:
    end = gf.while_loop(lambda s: s < 3e6, lambda s: s + 1.0, gf.constant(0.0))
    with gf.Session() as s:
        future = s.run_async(end)
        count = 0
        while not future.done():
            count += 1
        assert future.result() == 3e6 and count > 10
