"""Functions in graphs: what is traced, how nests come back, what is refused and how it is told."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow import errors
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.graph import bodies
from graphflow.passes import optimize

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def placeholder() -> gf.Tensor:
    return gf.placeholder("float32", (2, 3))


# What comes out ---------------------------------------------------------------------------------


def test_a_scan_carries_and_stacks_nests() -> None:
    x = placeholder()

    def body(carry: Any, item: Any) -> Any:
        total = carry["total"] + item["x"]
        return {"total": total}, (total, item["x"] * item["factor"])

    init = {"total": gf.zeros((3,))}
    carry, (totals, scaled) = gf.scan(body, init, {"x": x, "factor": gf.constant([2.0, 3.0])})
    last, running, products = evaluate([carry["total"], totals, scaled], {x: X})
    np.testing.assert_array_equal(last, X.sum(axis=0))
    np.testing.assert_array_equal(running, X.cumsum(axis=0))
    np.testing.assert_array_equal(products, X * np.array([[2], [3]], np.float32))


def test_a_reversed_scan_keeps_the_places_of_what_it_makes() -> None:
    x = placeholder()
    _, sums = gf.scan(lambda c, row: (c + row, c + row), gf.zeros((3,)), x, reverse=True)
    (found,) = evaluate([sums], {x: X})
    np.testing.assert_array_equal(found, X[::-1].cumsum(axis=0)[::-1])


def test_a_scan_of_a_length_counts_without_items() -> None:
    (power,) = evaluate([gf.scan(lambda c, _: (c * 2, None), gf.constant(1.0), length=10)[0]])
    assert power == 1024


def test_a_scan_over_a_symbolic_length_takes_what_is_fed() -> None:
    x = gf.placeholder("float32", (None, 3))
    total, _ = gf.scan(lambda c, row: (c + row, None), gf.zeros((3,)), x)
    with gf.Session() as s:
        for rows in (4, 1, 0):
            value = np.ones((rows, 3), np.float32)
            np.testing.assert_array_equal(s.run(total, {x: value}), value.sum(axis=0))


def test_a_while_loop_goes_on_while_its_condition_holds() -> None:
    count, value = gf.while_loop(lambda s: s[1] < 100, lambda s: (s[0] + 1, s[1] * 3), (0, 1.0))
    assert evaluate([count, value]) == [5, 243.0]


def test_a_while_loop_ends_at_its_bound() -> None:
    value = gf.while_loop(lambda v: v < 100, lambda v: v * 3, gf.constant(1.0), max_iterations=2)
    assert evaluate([value]) == [9.0]


def test_only_the_branch_that_is_taken_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pred = gf.placeholder("bool")
    y = gf.cond(pred, lambda: gf.debug.print(gf.constant(1.0), "yes"), lambda: gf.constant(2.0))
    with gf.Session() as s:
        assert s.run(y, {pred: False}) == 2.0
        assert capsys.readouterr().out == ""
        assert s.run(y, {pred: True}) == 1.0
        assert capsys.readouterr().out.startswith("yes")


def test_a_python_bool_chooses_the_branch_when_the_graph_is_built() -> None:
    y = gf.cond(True, lambda a: a + 1, lambda a: a / 0, gf.constant(1.0))
    assert y.node.op.name == "add"


def test_a_call_of_a_graph_takes_its_placeholders_in_order() -> None:
    a, b = gf.placeholder("float32", (), "a"), gf.placeholder("float32", (), "b")
    scale = gf.variable(np.float32(10), "scale")
    graph = gf.Graph([a - b * scale, a + b])
    difference, total = gf.call(graph, 5.0, 2.0)
    assert evaluate([difference, total]) == [-15.0, 7.0]


def test_state_made_inside_a_body_is_the_sessions() -> None:
    x = placeholder()
    made = []

    def layer(a: gf.Tensor) -> gf.Tensor:
        made.append(gf.variable(np.ones((3, 3), np.float32), "made_inside"))
        return a @ made[0]

    y = gf.call(layer, x)
    (g,) = gf.gradients(gf.sum(y), made)
    with gf.Session() as s:
        np.testing.assert_array_equal(s.run(y, {x: X}), X @ np.ones((3, 3), np.float32))
        s.run(gf.assign(made[0], made[0] - g), {x: X})
        assert s.get(made[0])[0, 0] == 1 - X[:, 0].sum()


# gf.function, gf.checkpoint, gf.custom_vjp ------------------------------------------------------


def test_a_function_is_traced_once_for_each_signature() -> None:
    calls = []

    @gf.function
    def scale(x: gf.Tensor, factor: float = 2.0) -> gf.Tensor:
        calls.append(x.shape)
        return x * factor

    a, b = gf.constant([1.0, 2.0]), gf.constant([3.0])
    values = evaluate([scale(a), scale(a + 1), scale(b), scale(a, factor=5.0)])
    assert [v.tolist() for v in values] == [[2, 4], [4, 6], [6], [5, 10]]
    assert scale.traces == len(calls) == 3


def test_calls_of_a_function_share_what_it_built() -> None:
    layer = gf.function(lambda x: gf.tanh(x) + 1)
    y = layer(layer(gf.constant(1.0)))
    outer, inner = y.node, y.node.inputs[0].node
    assert bodies(outer)[0] is bodies(inner)[0]
    assert len(gf.Graph([y])) == 3


def test_each_call_of_a_function_draws_other_numbers() -> None:
    draw = gf.function(lambda: gf.random.normal((4,)))
    a, b = evaluate([draw(), draw()])
    assert not np.array_equal(a, b)


def test_each_iteration_draws_other_numbers_and_a_run_repeats_them() -> None:
    with gf.random.seed(3):
        _, ys = gf.scan(lambda c, _: (c, gf.random.uniform((2,))), gf.constant(0.0), length=50)
    (first,), (again,) = evaluate([ys]), evaluate([ys])
    assert len(np.unique(first)) == 100
    assert first.tobytes() == again.tobytes()


def test_a_functions_nests_come_back_as_they_were() -> None:
    @gf.function
    def pair(x: gf.Tensor) -> dict[str, Any]:
        return {"twice": x * 2, "parts": [x, (x + 1,)]}

    result = pair(gf.constant(1.0))
    assert evaluate([result["twice"], result["parts"][0], result["parts"][1][0]]) == [2, 1, 2]


def test_methods_can_be_functions() -> None:
    class Model:
        factor = 3.0

        @gf.function
        def apply(self, x: gf.Tensor) -> gf.Tensor:
            return x * self.factor

    assert evaluate([Model().apply(gf.constant(2.0))]) == [6.0]


def test_a_checkpointed_function_is_computed_again_by_its_gradient() -> None:
    x = gf.placeholder("float32", (8, 4))
    w = gf.variable(np.full((4, 4), 0.3, np.float32), "w")

    def block(a: gf.Tensor) -> gf.Tensor:
        return gf.tanh(gf.tanh(gf.tanh(a @ w) @ w) @ w)

    value = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    plain = gf.gradients(gf.sum(gf.call(block, x) ** 2), [w, x])
    again = gf.gradients(gf.sum(gf.checkpoint(block)(x) ** 2), [w, x])
    for a, b in zip(evaluate(plain, {x: value}), evaluate(again, {x: value}), strict=True):
        np.testing.assert_array_equal(a, b)
    forward, backward = (
        n for n in optimize(gf.Graph(again)).nodes if n.op.name == "call"
    )  # fmt: skip
    assert len(forward.outputs) == 1  # nothing is kept of what is inside
    assert sum(n.op.name == "tanh" for n in bodies(backward)[0].graph.nodes) == 3


def test_a_checkpoint_needs_less_memory() -> None:
    x = gf.placeholder("float32", (64, 64))

    def build_deep_network(a: gf.Tensor) -> gf.Tensor:
        for _ in range(6):
            a = gf.sin(a) * 1.5
        return a

    def peak(block: Any) -> int:
        y = x
        for _ in range(4):
            y = block(y)
        (g,) = gf.gradients(gf.sum(y), [x])
        with gf.Session() as s, s.trace() as trace:
            s.run(g, {x: np.ones((64, 64), np.float32)})
        return max(trace.steps[-1].peak.values())

    assert peak(gf.checkpoint(build_deep_network)) < 0.6 * peak(gf.function(build_deep_network))


def test_a_custom_vjp_is_the_gradient_to_second_order() -> None:
    def straight_through(g: gf.Tensor, y: gf.Tensor, x: gf.Tensor) -> gf.Tensor:
        return g * x

    rounded = gf.custom_vjp(gf.round, vjp=straight_through)
    x = gf.placeholder("float32", (3,))
    (g,) = gf.gradients(gf.sum(rounded(x) * 2), [x])
    (gg,) = gf.gradients(gf.sum(g**2), [x])
    value = np.array([0.4, 1.6, -2.2], np.float32)
    first, second = evaluate([g, gg], {x: value})
    np.testing.assert_allclose(first, 2 * value)
    np.testing.assert_allclose(second, 8 * value)


def test_a_custom_vjp_decorates_functions_of_nests() -> None:
    def rule(g: Any, y: Any, a: gf.Tensor, b: gf.Tensor) -> Any:
        return g["sum"], None

    @functools.partial(gf.custom_vjp, vjp=rule)
    def add(pair: tuple[gf.Tensor, gf.Tensor]) -> dict[str, gf.Tensor]:
        return {"sum": pair[0] + pair[1]}

    a, b = gf.constant(1.0), gf.constant(2.0)
    assert evaluate(gf.gradients(add((a, b))["sum"], [a, b])) == [1.0, 0.0]


# What is refused --------------------------------------------------------------------------------


def expect_error(kind: type[Exception], *words: str) -> Any:
    return pytest.raises(kind, match=r"[\s\S]*".join(words))


def test_bodies_change_no_state() -> None:
    v = gf.variable(np.zeros((), np.float32), "v")
    with expect_error(errors.VariableError, "scan at .*test_functions", "assign", "outside"):
        gf.scan(lambda c, _: (c + gf.assign(v, c), None), gf.constant(0.0), length=3)
    with expect_error(errors.VariableError, "call at .*test_functions", "train/assign", "outside"):
        gf.call(lambda: gf.optim.SGD(0.1).minimize(v * v))


def test_what_is_carried_keeps_its_nest_shape_and_dtype() -> None:
    x = placeholder()
    with expect_error(
        errors.ShapeError, "scan at .*test_functions", "carry 0", r"float32\(3", "back"
    ):
        gf.scan(lambda c, row: (c[:2], None), gf.zeros((3,)), x)
    with expect_error(errors.ShapeError, "state 0", "int64", "float32"):
        gf.while_loop(lambda n: n < 3, lambda n: n.astype("float32"), gf.constant(0))
    with expect_error(errors.ArgumentError, "carry begins as the nest"):
        gf.scan(lambda c, row: ((c, c), None), gf.zeros((3,)), x)
    with expect_error(errors.ArgumentError, "a pair", "y may be None"):
        gf.scan(lambda c, row: c, gf.zeros((3,)), x)


def test_items_share_their_first_size() -> None:
    with expect_error(errors.ShapeError, "first axis", "scan"):
        gf.scan(lambda c, i: (c, None), 0.0, gf.constant(1.0))
    with expect_error(errors.ArgumentError, "give xs, or length"):
        gf.scan(lambda c, i: (c, None), 0.0)
    with expect_error(errors.ShapeError, "2", "3"):
        gf.scan(lambda c, i: (c, None), 0.0, (gf.zeros((2,)), gf.zeros((3,))))


def test_branches_return_the_same() -> None:
    pred = gf.placeholder("bool")
    with expect_error(errors.ShapeError, "cond at .*test_functions", "branches differ", "float32"):
        gf.cond(pred, lambda: gf.zeros((2,)), lambda: gf.zeros((3,)))
    with expect_error(errors.ArgumentError, "different nests", "true_fn"):
        gf.cond(pred, lambda: gf.zeros((2,)), lambda: (gf.zeros((2,)),))
    with expect_error(errors.ShapeError, "predicate", "one bool"):
        gf.cond(gf.zeros((2,)) > 0, lambda: gf.zeros(()), lambda: gf.zeros(()))
    with expect_error(errors.DTypeError, "bool", "float32"):
        gf.cond(gf.constant(1.0), lambda: gf.zeros(()), lambda: gf.zeros(()))


@pytest.mark.parametrize("bound", [0, -1, 2.5, True, "3"])
def test_a_bound_is_a_positive_int(bound: Any) -> None:
    with expect_error(errors.ArgumentError, "while_loop at .*test_functions", "max_iterations"):
        gf.while_loop(lambda n: n < 3, lambda n: n, 0, max_iterations=bound)


def test_a_condition_is_one_bool() -> None:
    with expect_error(errors.ShapeError, "one bool"):
        gf.while_loop(lambda n: n, lambda n: n, gf.constant(0))
    with expect_error(errors.ShapeError, "one bool"):
        gf.while_loop(lambda n: (n < 1, n < 2), lambda n: n, gf.constant(0))


def test_an_unbounded_loop_has_no_gradient() -> None:
    x = gf.constant(1.5)
    y = gf.while_loop(lambda v: v < 10, lambda v: v * v, x)
    with expect_error(errors.DifferentiationError, "while_loop", "max_iterations"):
        gf.gradients(y, [x])


@pytest.mark.parametrize(
    "build",
    [
        lambda: gf.call(3),
        lambda: gf.cond(gf.placeholder("bool"), 1, 2),
        lambda: gf.scan(None, 0.0, length=2),
        lambda: gf.while_loop(1, 2, 0),
        lambda: gf.custom_vjp(lambda x: x),
        lambda: gf.function("f"),
        lambda: gf.call(lambda x: x, object()),
        lambda: gf.call(lambda x: "text", 1.0),
        lambda: gf.call(gf.Graph([gf.placeholder("float32")]), 1.0, 2.0),
        lambda: gf.function(lambda x: x)({1, 2}),
        lambda: gf.scan(lambda c: (c, c), 0.0, length=2),
        lambda: gf.while_loop(lambda: True, lambda v: v, 0),
        lambda: gf.call(lambda a, b: a, 1.0),
    ],
)
def test_bad_arguments_are_told_with_the_users_line(build: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"at .*test_functions\.py:\d+"):
        build()


def test_a_custom_vjp_gives_a_cotangent_of_each_tensors_spec() -> None:
    x = gf.placeholder("float32", (3,))
    few = gf.custom_vjp(lambda a, b: a + b, vjp=lambda g, y, a, b: (g,))
    with expect_error(errors.DifferentiationError, "1 cotangents for 2"):
        gf.gradients(gf.sum(few(x, x)), [x])
    wide = gf.custom_vjp(lambda a: a + 1, vjp=lambda g, y, a: gf.sum(g))
    with expect_error(errors.DifferentiationError, "cotangent 0", r"float32\(3,\)"):
        gf.gradients(gf.sum(wide(x)), [x])


def test_an_error_inside_a_body_names_the_line_inside() -> None:
    rows = gf.constant(np.eye(3, dtype=np.float32))
    picked, _ = gf.scan(
        lambda c, i: (c + gf.take(rows, i, axis=0)[0], None), gf.constant(0.0), gf.arange(5)
    )
    with (
        gf.Session() as s,
        expect_error(errors.OpError, "take", r"test_functions.py:\d+", "index 3"),
    ):
        s.run(picked)


def test_a_loop_that_does_not_end_is_ended_by_the_deadline() -> None:
    forever = gf.while_loop(lambda v: v < 1, lambda v: v * 1.0, gf.constant(0.5))
    with gf.Session(deadline=0.5) as s:
        with expect_error(
            errors.StepTimeout, "while_loop", r"test_functions.py:\d+", "max_iterations"
        ):
            s.run(forever)
        assert s.run(gf.constant(1.0) + 1) == 2.0


def test_a_body_shows_in_the_printed_graph() -> None:
    text = str(gf.Graph([gf.call(gf.tanh, gf.constant(1.0))]))
    assert "call(" in text and "tanh(argument_0)" in text


def test_sizes_of_different_placeholders_are_told_apart() -> None:
    x, y = gf.placeholder("float32", (None, 4)), gf.placeholder("float32", (None, 4))
    one, other = (rf"float32\(placeholder#{i}.shape\[0\], 4\)" for i in (1, 2))
    with expect_error(errors.ShapeError, f"carry 0 begins as {one} and comes back as {other}"):
        gf.scan(lambda h, e: (y, h), x, gf.zeros((3, 4)))
    with expect_error(errors.ShapeError, f"state 0 begins as {one} and comes back as {other}"):
        gf.while_loop(lambda s: gf.all(s > 0), lambda s: y, x)
    with expect_error(errors.ShapeError, rf"the branches differ: \({one}\) and \({other}\)"):
        gf.cond(gf.all(x > 0), lambda: x, lambda: y)
    named = gf.placeholder("float32", ("n", 4))
    alone = r"float32\(placeholder.shape\[0\], 4\)"
    with expect_error(errors.ShapeError, rf"begins as float32\(n, 4\) and comes back as {alone}"):
        gf.while_loop(lambda s: gf.all(s > 0), lambda s: y, named)
