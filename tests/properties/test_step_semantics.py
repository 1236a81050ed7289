"""A step is a function: it reads the state as it began, its updates happen together, or not at all.

A random step over a few variables is run by sessions (one device, two devices of one process) and
by a model in numpy that computes everything from the old state and then replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import CheckError

ONE = ("cpu:0",)
TWO = ("cpu:0", "cpu:1")
Array = np.ndarray[Any, Any]


@pytest.fixture(params=[ONE, TWO], ids=["one device", "two devices"])
def session(request: pytest.FixtureRequest) -> Iterator[gf.Session]:
    with gf.Session(gf.Cluster.here(devices=request.param)) as opened:
        yield opened


def _variables() -> tuple[gf.Tensor, gf.Tensor]:
    return gf.variable([1.0, 2.0], name="a"), gf.variable([3.0, 4.0], name="b")


# By hand --------------------------------------------------------------------------------------


def test_two_variables_swap_in_one_step(session: gf.Session) -> None:
    a, b = _variables()
    for old_a, old_b in [([1, 2], [3, 4]), ([3, 4], [1, 2])]:
        new_a, new_b = session.run([gf.assign(a, b), gf.assign(b, a)])
        assert new_a.tolist() == old_b and new_b.tolist() == old_a
        assert session.get(a).tolist() == old_b and session.get(b).tolist() == old_a


def test_variables_pinned_to_two_devices_swap_in_one_step() -> None:
    with gf.device("cpu:0"):
        a = gf.variable([1.0, 2.0], name="a")
    with gf.device("cpu:1"):
        b = gf.variable([3.0, 4.0], name="b")
        to_b = gf.assign(b, a)
    with gf.device("cpu:0"):
        to_a = gf.assign(a, b)
    with gf.Session(gf.Cluster.here(devices=TWO)) as s:
        s.run([to_a, to_b])
        assert s.get(a).tolist() == [3, 4] and s.get(b).tolist() == [1, 2]
        s.run([to_a, to_b])
        assert s.get(a).tolist() == [1, 2] and s.get(b).tolist() == [3, 4]


def test_each_assignment_reads_what_the_other_had(session: gf.Session) -> None:
    a, b = _variables()
    session.run([gf.assign(a, b + 1), gf.assign(b, a * 10)])
    assert session.get(a).tolist() == [4, 5] and session.get(b).tolist() == [10, 20]


def test_an_alias_of_a_variable_is_its_old_value(session: gf.Session) -> None:
    m = gf.variable(np.arange(6.0).reshape(2, 3), name="m")
    v = gf.variable(np.zeros(6), name="v")
    flat, back = gf.reshape(m, (6,)), gf.reshape(v, (2, 3))
    fetched = session.run([gf.assign(v, flat), gf.assign(m, back + 1), flat, back])
    assert fetched[0].tolist() == fetched[2].tolist() == [0, 1, 2, 3, 4, 5]
    assert session.get(v).tolist() == [0, 1, 2, 3, 4, 5]
    assert session.get(m).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_variable_assigned_to_itself_through_views_keeps_its_value(session: gf.Session) -> None:
    m = gf.variable(np.arange(6.0).reshape(2, 3), name="m")
    session.run(gf.assign(m, gf.reshape(gf.reshape(m, (6,)), (2, 3))))
    assert session.get(m).tolist() == [[0, 1, 2], [3, 4, 5]]
    session.run(gf.assign(m, gf.flip(m)))
    assert session.get(m).tolist() == [[5, 4, 3], [2, 1, 0]]


def test_a_variable_fetched_beside_its_assignment_gives_old_and_new(session: gf.Session) -> None:
    a, _ = _variables()
    new, old, double = session.run([gf.assign(a, a + 1), a, a * 2])
    assert (new.tolist(), old.tolist(), double.tolist()) == ([2, 3], [1, 2], [2, 4])


def test_a_fed_value_is_assigned_and_is_a_copy(session: gf.Session) -> None:
    a, _ = _variables()
    x = gf.placeholder("float32", (2,), name="x")
    fed = np.array([7, 8], "float32")
    new, same = session.run([gf.assign(a, x), x], {x: fed})
    fed[:] = -1
    new[:] = same[:] = -2
    assert session.get(a).tolist() == [7, 8]
    held = session.get(a)
    held[:] = -3
    assert session.get(a).tolist() == [7, 8]


def test_a_set_value_and_a_constant_are_copies(session: gf.Session) -> None:
    a, b = _variables()
    value = np.array([5, 6], "float32")
    session.set(a, value)
    value[:] = 0
    c = gf.constant(np.array([9, 9], "float32"))
    got_c, got_sum = session.run([c, gf.assign(b, a + c)])
    got_c[:] = 0
    assert got_sum.tolist() == [14, 15]
    assert session.run(c).tolist() == [9, 9]
    value = np.array([1, 1], "float32")
    session.set(a, value)
    value[:] = 0
    assert session.get(a).tolist() == [1, 1]


def test_a_counter_counts_the_steps(session: gf.Session) -> None:
    counter = gf.variable(np.int64(0), name="counter")
    tick = gf.assign(counter, counter + 1)
    assert [int(session.run(tick)) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert session.run([counter, tick]) == [5, 6]


def test_integers_whose_power_fails_leave_every_variable_alone(session: gf.Session) -> None:
    a, b = gf.variable(np.int64(2), name="a"), gf.variable(np.int64(3), name="b")
    e = gf.placeholder("int64", name="e")
    step = [gf.assign(a, a + 1), gf.assign(b, gf.pow(b, e))]
    with pytest.raises(gf.errors.OpError, match=r"test_step_semantics\.py:\d+"):
        session.run(step, {e: -1})
    assert (session.get(a), session.get(b)) == (2, 3)
    assert session.run(step, {e: 2}) == [3, 9]


# Random steps ---------------------------------------------------------------------------------

SHAPE = (2, 3)
COUNT = 3
Value = Callable[[list[Any], Any], Any]

# Each expression builds a tensor from tensors, or an array from arrays, by the same words.
_LEAVES: list[tuple[str, Value]] = [
    ("v0", lambda v, x: v[0]),
    ("v1", lambda v, x: v[1]),
    ("v2", lambda v, x: v[2]),
    ("x", lambda v, x: x),
]


def _sum(a: Value, b: Value) -> Value:
    return lambda v, x: a(v, x) + b(v, x)


def _product(a: Value, b: Value) -> Value:
    return lambda v, x: a(v, x) * b(v, x)


def _reshape_twice(a: Value) -> Value:
    return lambda v, x: _reshape(_reshape(a(v, x), (6,)), SHAPE)


def _plus_one(a: Value) -> Value:
    return lambda v, x: a(v, x) + 1.0


def _reshape(a: Any, shape: tuple[int, ...]) -> Any:
    return gf.reshape(a, shape) if isinstance(a, gf.Tensor) else np.reshape(a, shape)


def _grow(inner: st.SearchStrategy[tuple[str, Value]]) -> st.SearchStrategy[tuple[str, Value]]:
    one = st.sampled_from([("alias", _reshape_twice), ("inc", _plus_one)])
    two = st.sampled_from([("add", _sum), ("mul", _product)])
    return st.builds(lambda f, a: (f"{f[0]}({a[0]})", f[1](a[1])), one, inner) | st.builds(
        lambda f, a, b: (f"{f[0]}({a[0]}, {b[0]})", f[1](a[1], b[1])), two, inner, inner
    )


expressions = st.recursive(st.sampled_from(_LEAVES), _grow, max_leaves=4)


@dataclass(frozen=True)
class Step:
    """What to assign to each variable (or None), what to fetch, and where things are pinned."""

    assigned: list[tuple[str, Value] | None]
    fetched: list[tuple[str, Value]]
    pins: list[str]
    failing: int  # the expression in which a check may fail

    def __repr__(self) -> str:
        names = [None if e is None else e[0] for e in self.assigned]
        return f"Step({names}, {[e[0] for e in self.fetched]}, {self.pins}, {self.failing})"


steps = st.builds(
    Step,
    st.lists(st.none() | expressions, min_size=COUNT, max_size=COUNT),
    st.lists(expressions, max_size=2),
    st.lists(st.sampled_from(["", *TWO]), min_size=COUNT, max_size=COUNT),
    st.integers(0, 2 * COUNT),
)


class _Built:
    """A step's graph, with a check that fails when `ok` is fed as false."""

    def __init__(self, step: Step, pinned: bool) -> None:
        self.step = step
        self.x = gf.placeholder("float64", ("rows", 3), name="x")
        self.ok = gf.placeholder("bool", (), name="ok")
        self.variables = []
        for i, pin in enumerate(step.pins):
            with gf.device(pin) if pin and pinned else gf.name_scope("free"):
                self.variables.append(gf.variable(_initial(i), name=f"v{i}"))
        self.built = 0
        x = gf.reshape(gf.debug.check(self.x, self.ok, "on purpose"), SHAPE)
        self.assigns = [
            gf.assign(v, self._build_value(e[1], x))
            for v, e in zip(self.variables, step.assigned, strict=True)
            if e is not None
        ]
        self.fetches = [self._build_value(e[1], x) for e in step.fetched]
        self.always = self._add_check(self.variables[0])

    def _add_check(self, t: gf.Tensor) -> gf.Tensor:
        return gf.debug.check(t, self.ok, "on purpose")

    def _build_value(self, expression: Value, x: gf.Tensor) -> gf.Tensor:
        value = expression(self.variables, x)
        self.built += 1
        return self._add_check(value) if self.built == self.step.failing else value


def _initial(i: int) -> Array:
    return np.random.default_rng(i).integers(-3, 4, SHAPE).astype("float64")


def _has_same_bits(a: Array, b: Array) -> bool:
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one device", "two devices"])
@settings(max_examples=40)
@given(step=steps)
def test_a_random_step_computes_from_the_old_state(devices: tuple[str, ...], step: Step) -> None:
    built = _Built(step, pinned=len(devices) > 1)
    state = [_initial(i) for i in range(COUNT)]
    with gf.Session(gf.Cluster.here(devices=devices)) as s, np.errstate(all="ignore"):
        for number in range(3):
            x = np.random.default_rng(100 + number).normal(size=SHAPE)
            everything = [built.assigns, built.fetches, built.variables, built.always, built.x]
            with pytest.raises(CheckError, match="on purpose"):
                s.run(everything, {built.x: x, built.ok: False})
            for variable, value in zip(built.variables, state, strict=True):
                assert _has_same_bits(s.get(variable), value)
            news, fetched, olds, *_ = s.run(everything, {built.x: x, built.ok: True})
            wanted = [None if e is None else e[1](state, x) for e in step.assigned]
            for got, e in zip(fetched, step.fetched, strict=True):
                assert _has_same_bits(got, e[1](state, x))
            for got, old in zip(olds, state, strict=True):
                assert _has_same_bits(got, old)
            for got, new in zip(news, (w for w in wanted if w is not None), strict=True):
                assert _has_same_bits(got, new)
            state = [old if new is None else new for old, new in zip(state, wanted, strict=True)]
            for variable, value in zip(built.variables, state, strict=True):
                assert _has_same_bits(s.get(variable), value)


# Randomness -----------------------------------------------------------------------------------


def _build_noisy_step() -> tuple[gf.Tensor, gf.Tensor, gf.Tensor]:
    with gf.random.seed(3):
        noise = gf.random.normal((4,), dtype="float64")
        other = gf.random.normal((4,), dtype="float64")
        ok = gf.placeholder("bool", (), name="ok")
    return noise, other, ok


def test_a_random_node_is_one_value_within_a_step_and_another_in_the_next(
    session: gf.Session,
) -> None:
    noise, other, _ = _build_noisy_step()
    one, twice, alien = session.run([noise, noise * 2, other])
    assert _has_same_bits(one * 2, twice) and not _has_same_bits(one, alien)
    assert not _has_same_bits(session.run(noise), one)


def test_numbers_repeat_from_run_to_run_under_a_seed(session: gf.Session) -> None:
    noise, other, _ = _build_noisy_step()
    first = [session.run([noise, other]) for _ in range(3)]
    again_noise, again_other, _ = _build_noisy_step()
    with gf.Session() as s:
        again = [s.run([again_noise, again_other]) for _ in range(3)]
    assert np.array_equal(first, again)


def test_a_step_that_is_tried_again_draws_the_same(session: gf.Session) -> None:
    noise, _, ok = _build_noisy_step()
    v = gf.variable(np.zeros(4), name="v")
    step = gf.assign(v, v + gf.debug.check(noise, ok, "on purpose"))
    with gf.Session() as steady:
        wanted = [steady.run(step, {ok: True}) for _ in range(3)]
    got = []
    for failures in (0, 2, 1):
        for _ in range(failures):
            with pytest.raises(CheckError):
                session.run(step, {ok: False})
        got.append(session.run(step, {ok: True}))
    assert np.array_equal(got, wanted)


def test_dropout_keeps_the_same_elements_forward_and_backward(session: gf.Session) -> None:
    w = gf.variable(np.ones(1000), name="w")
    dropped = gf.nn.dropout(w, 0.25)
    gradient = gf.gradients(gf.sum(dropped), [w])[0]
    first = session.run([dropped, gradient])
    second = session.run([dropped, gradient])
    assert (
        _has_same_bits(*first)
        and _has_same_bits(*second)
        and not _has_same_bits(first[0], second[0])
    )
    kept = np.count_nonzero(first[0])
    assert 650 < kept < 850
    assert np.allclose(first[0][first[0] != 0], 1 / 0.75)
