"""The shorter way of a step like the last one: it gives and refuses what the long one does."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import FeedError, FetchError, OpError, SessionError
from graphflow.execution.cached_step import CachedStep
from graphflow.execution.compiled_fetches import MAX_CACHED_STEPS
from graphflow.ir.op import REGISTRY, Op, register
from graphflow.planning import deployment


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each step that went the shorter way was fed."""
    found: list[Any] = []
    named = CachedStep.match_feeds

    def record_feeds(self: CachedStep, given: Any) -> Any:
        result = named(self, given)
        if result is not None:
            found.append(given)
        return result

    monkeypatch.setattr(CachedStep, "match_feeds", record_feeds)
    return found


def parts() -> tuple[Any, Any]:
    x = gf.placeholder("float32", ("n", 3), name="x")
    return x, gf.tanh(x) * 2.0


def rows(count: int, value: float = 0.5) -> np.ndarray[Any, Any]:
    return np.full((count, 3), value, "float32")


def test_the_second_step_goes_the_shorter_way_in_every_structure(taken: list[Any]) -> None:
    x, y = parts()
    z = gf.sum(y)
    with gf.Session() as s:
        structures: list[Any] = [y, [y, z], (z, y), {"a": y, "b": z}]
        for fetches in structures:
            first = s.run(fetches, {x: rows(2)})
            before = len(taken)
            second = s.run(fetches, {x: rows(2)})
            assert type(first) is type(second)
            assert len(taken) == before + 1
            np.testing.assert_equal(first, second)
        nest = {"a": [y, {"b": z}]}
        np.testing.assert_equal(s.run(nest, {x: rows(2)}), s.run(nest, {x: rows(2)}))


def test_other_shapes_find_their_own_way_and_come_back_to_it(taken: list[Any]) -> None:
    x, y = parts()
    with gf.Session() as s:
        for count in (2, 3, 2, 3, 3, 2):
            value = rows(count, count / 10)
            np.testing.assert_allclose(s.run(y, {x: value}), np.tanh(value) * 2, rtol=1e-6)
        assert len(taken) == 4


def test_values_that_convert_are_fed_and_others_are_refused_as_ever() -> None:
    x = gf.placeholder("float32", (), name="x")
    n = gf.placeholder("int32", (), name="n")
    y = x * 2.0
    m = n + 1
    with gf.Session() as s:
        for _ in range(3):
            for value in (1.5, np.float32(1.5), np.float64(1.5), np.array(1.5), 3):
                have = s.run(y, {x: value})
                assert have.dtype == np.float32 and have == 2 * value
            with pytest.raises(FeedError, match=r"1e\+300 is out of the range of float32"):
                s.run(y, {x: 1e300})
            assert s.run(m, {n: 3}) == 4
            with pytest.raises(FeedError, match="<U2; give numbers"):
                s.run(y, {x: "no"})
            with pytest.raises(FeedError, match="int32"):
                s.run(m, {n: 1.5})
            with pytest.raises(FeedError, match="has shape"):
                s.run(y, {x: np.zeros(2, "float32")})


def test_missing_unknown_and_wrong_feeds_are_told_after_a_good_step_too() -> None:
    x, y = parts()
    other = gf.placeholder("float32", (), name="other")
    with gf.Session() as s:
        for _ in range(2):
            s.run(y, {x: rows(2)})
            with pytest.raises(FeedError, match=r"'x' .*is not fed"):
                s.run(y)
            with pytest.raises(FeedError, match=r"'other' .*unknown"):
                s.run(y, {x: rows(2), other: 1.0})
            with pytest.raises(FeedError, match=r"'other' .*unknown"):
                s.run(y, {other: 1.0})
            with pytest.raises(FeedError, match="a dict from placeholders"):
                s.run(y, [rows(2)])
            with pytest.raises(FeedError):
                s.run(y, {x: None})
            with pytest.raises(FetchError):
                s.run([y, "y"], {x: rows(2)})


def test_fetched_placeholders_constants_and_training_come_as_ever(taken: list[Any]) -> None:
    x, y = parts()
    w = gf.variable(np.float32(1), name="w")
    train = gf.optim.SGD(0.1).minimize(w * w)
    fetches = [x, gf.constant(np.float32(3)), y, train]
    with gf.Session() as s:
        for step in range(3):
            value = rows(2, step + 1.0)
            mine, constant, _, nothing = s.run(fetches, {x: value})
            assert mine is not value and mine.tolist() == value.tolist()
            assert constant == 3 and nothing is None
            assert np.isclose(s.get(w), 0.8 ** (step + 1))
        assert len(taken) == 2


def test_what_was_fetched_belongs_to_the_caller(taken: list[Any]) -> None:
    x, y = parts()
    with gf.Session() as s:
        results = [s.run(y, {x: rows(2, float(i))}) for i in range(4)]
        results[0].fill(7)
        np.testing.assert_allclose([r[0, 0] for r in results[1:]], 2 * np.tanh([1, 2, 3]), 1e-6)


def test_programs_that_were_let_go_are_compiled_again(taken: list[Any]) -> None:
    x, y = parts()
    with gf.Session() as s:
        for count in (*range(1, 20), 1, 2, 19, 1):
            assert s.run(y, {x: rows(count)}).shape == (count, 3)


def test_a_trace_is_complete_though_the_step_is_known(taken: list[Any]) -> None:
    x, y = parts()
    with gf.Session() as s:
        for _ in range(3):
            s.run(y, {x: rows(2)})
        before = len(taken)
        with s.trace() as trace:
            s.run(y, {x: rows(2)})
        assert len(trace.steps) == 1 and len(taken) == before
        s.run(y, {x: rows(2)})
        assert len(taken) == before + 1


def test_threads_take_turns_and_each_gets_its_own(taken: list[Any]) -> None:
    x, y = parts()
    with gf.Session() as s:
        s.run(y, {x: rows(2)})
        wrong: list[int] = []

        def work(which: int) -> None:
            value = rows(2 + which % 2, which / 10)
            want = s.run(y, {x: value})
            for _ in range(200):
                if s.run(y, {x: value}).tobytes() != want.tobytes():
                    wrong.append(which)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and len(taken) > 700


def test_a_step_that_fails_on_the_shorter_way_changes_nothing_and_names_its_node() -> None:
    def kernel(xp: Any, x: Any) -> Any:
        if (x < 0).any():
            raise FloatingPointError("below zero")
        return x + 1

    op = register(Op("fragile_route", infer=lambda x: x, kernel=kernel))
    try:
        x = gf.placeholder("float32", (2, 3), name="x")
        v = gf.variable(np.zeros((2, 3), "float32"), name="v")
        step = gf.assign(v, v + op(x, name="culprit"))
        with gf.Session() as s:
            for _ in range(2):
                s.run(step, {x: rows(2, 1.0)})
            before = s.get(v)
            with pytest.raises(OpError, match="fragile_route 'culprit'"):
                s.run(step, {x: rows(2, -1.0)})
            assert s.get(v).tolist() == before.tolist()
            s.run(step, {x: rows(2, 1.0)})
    finally:
        del REGISTRY["fragile_route"]


def test_a_closed_session_refuses_known_steps() -> None:
    x, y = parts()
    s = gf.Session()
    for _ in range(2):
        s.run(y, {x: rows(2)})
    s.close()
    with pytest.raises(SessionError, match="closed"):
        s.run(y, {x: rows(2)})


def test_graphs_that_are_built_in_a_loop_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployment, "_WARN_AT", 3)
    x = gf.placeholder("float32", ())
    with gf.Session() as s, pytest.warns(RuntimeWarning, match="before the loop") as told:
        for i in range(2):
            s.run(gf.exp(x) * 2.0, {x: i})
            s.run(gf.exp(x) - 2.0, {x: i})
        for i in range(7):
            s.run(x + float(i), {x: i})
    assert [warning.filename for warning in told] == [__file__]


def test_many_graphs_of_many_lines_are_what_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "_WARN_AT", 3)
    x = gf.placeholder("float32", ())
    with gf.Session() as s, warnings.catch_warnings():
        warnings.simplefilter("error")
        s.run(x + 1.0, {x: 1})
        s.run(x + 2.0, {x: 1})
        s.run(x + 3.0, {x: 1})


def test_so_many_sizes_have_a_shorter_way_and_no_more() -> None:
    """Each keeps what was compiled for it, and each step with other feeds looks at all of them."""
    x = gf.placeholder("float32", (None,), name="x")
    total = gf.sum(x)
    with gf.Session() as s:
        for size in (*range(1, MAX_CACHED_STEPS + 4), 1, 2):
            assert s.run(total, {x: np.ones(size, "float32")}) == size
        compiled = s._deployment.find([total])
        assert compiled is not None and len(compiled._cached_steps) == MAX_CACHED_STEPS
