"""vmap: every op equals a stack of calls; nests, gradients, control flow, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, ShapeError, VariableError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import Op, Sample
from graphflow.ops.control_flow.control import is_control
from graphflow.transforms.op_testing import check_batches
from tests.ops.test_registry import CASES

MAPPED = [c for c in CASES if c.values[1].inputs and not is_control(c.values[0])]


@pytest.mark.every(2)
@pytest.mark.parametrize("op, sample", MAPPED)
def test_the_map_of_an_op_is_a_stack_of_calls(op: Op, sample: Sample) -> None:
    check_batches(op, sample)


def test_ops_that_have_a_rule_need_no_loop() -> None:
    x, w = gf.placeholder("float64", (5, 3, 4)), gf.placeholder("float64", (4, 2))

    def f(x: gf.Tensor) -> gf.Tensor:
        h = gf.nn.softmax(gf.tanh(x @ w), axis=0)
        return gf.sum(gf.concat([h, x[:, 1:3]], 1).T[0] * gf.max(h), keepdims=True)

    graph = gf.Graph(gf.vmap(f)(x))
    assert graph.of_op("scan") == ()
    assert len(graph.of_op("matmul")) == 1


def test_a_shared_matrix_multiplies_the_whole_batch_at_once() -> None:
    x, w = gf.placeholder("float64", (5, 3, 4)), gf.placeholder("float64", (4, 2))
    (product,) = gf.Graph(gf.vmap(lambda x: x @ w)(x)).of_op("matmul")
    assert product.specs[0].shape == (15, 2)


# Axes and nests ---------------------------------------------------------------------------------


def test_any_axis_may_be_mapped_and_come_out() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 3)), rng.normal(size=(3,))
    x, y = gf.placeholder("float64", (4, 3)), gf.placeholder("float64", (3,))

    def f(pair: dict[str, gf.Tensor], y: gf.Tensor) -> tuple[gf.Tensor, dict[str, gf.Tensor]]:
        return pair["x"] * y + pair["c"], {"y": y}

    result, rest = gf.vmap(f, in_axes=({"x": 1, "c": None}, -1), out_axes=(1, {"y": 0}))(
        {"x": x, "c": 2.0}, y
    )
    have, same = evaluate([result, rest["y"]], {x: a, y: b})
    np.testing.assert_array_equal(have, a * b + 2.0)
    np.testing.assert_array_equal(same, b)


def test_a_result_that_does_not_depend_on_the_example_is_repeated_or_shared() -> None:
    x, w = gf.placeholder("float64", (4,)), gf.placeholder("float64", (2,))
    both = gf.vmap(lambda x: (w * 2.0, w * 3.0), out_axes=(0, None))(x)
    assert [t.shape for t in both] == [(4, 2), (2,)]
    values = evaluate(both, {x: np.zeros(4), w: np.array([1.0, 2.0])})
    assert values[0].tolist() == [[2, 4]] * 4
    assert values[1].tolist() == [3, 6]


def test_the_batch_may_have_an_unknown_size() -> None:
    x, y = gf.placeholder("float64", ("n", 3)), gf.placeholder("float64", (3, "m"))
    z = gf.vmap(lambda a, b: gf.concat([a, gf.cumsum(b)])[::-1], in_axes=(0, 1))(x, y)
    for n in (1, 4):
        a, b = np.random.default_rng(n).normal(size=(2, n, 3))
        (have,) = evaluate([z], {x: a, y: b.T})
        np.testing.assert_allclose(have, np.concatenate([a, b.cumsum(1)], 1)[:, ::-1])


def test_sizes_that_turn_out_to_differ_are_refused_when_they_are_fed() -> None:
    x, y = gf.placeholder("float64", ("n", 3)), gf.placeholder("float64", ("m", 3))
    z = gf.vmap(lambda a, b: (a, b))(x, y)
    with gf.Session() as session, pytest.raises(gf.errors.FeedError, match=r"n.*m|m.*n"):
        session.run(z, {x: np.zeros((2, 3)), y: np.zeros((4, 3))})


def test_maps_nest() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(4, 3)), rng.normal(size=(5, 3))
    x, y = gf.placeholder("float64", (4, 3)), gf.placeholder("float64", (5, 3))
    distances = gf.vmap(lambda p: gf.vmap(lambda q: gf.sum(gf.square(p - q)))(y))(x)
    (have,) = evaluate([distances], {x: a, y: b})
    np.testing.assert_allclose(have, ((a[:, None] - b[None]) ** 2).sum(-1), rtol=1e-14)


def test_random_ops_draw_for_each_example() -> None:
    with gf.random.seed(3):
        x = gf.placeholder("float64", (4, 50))
        y = gf.vmap(lambda x: gf.nn.dropout(x, 0.5) + gf.random.normal((50,), dtype="float64"))(x)
    (have,) = evaluate([y], {x: np.ones((4, 50))})
    assert len(np.unique(have)) == have.size


# Gradients --------------------------------------------------------------------------------------


def loss_of(w: gf.Tensor, x: gf.Tensor, label: gf.Tensor) -> gf.Tensor:
    return gf.nn.cross_entropy(gf.tanh(x @ w) @ w.T, label)


def test_gradients_of_each_example_come_from_a_map_of_gradients() -> None:
    rng = np.random.default_rng(2)
    w = gf.placeholder("float64", (3, 4))
    x, labels = gf.placeholder("float64", (5, 3)), gf.placeholder("int64", (5,))
    each = gf.vmap(lambda x, k: gf.gradients(loss_of(w, x, k), [w])[0])(x, labels)
    singles = [gf.gradients(loss_of(w, x[i], labels[i]), [w])[0] for i in range(5)]
    feeds = {
        w: rng.normal(size=(3, 4)), x: rng.normal(size=(5, 3)), labels: np.array([0, 2, 1, 1, 0])
    }  # fmt: skip
    have, *want = evaluate([each, *singles], feeds)
    np.testing.assert_allclose(have, np.stack(want), rtol=1e-12, atol=1e-14)


def test_gradients_of_each_image_of_a_convolutional_network_need_no_loop() -> None:
    rng = np.random.default_rng(3)
    k, w = gf.placeholder("float64", (4, 2, 3, 3)), gf.placeholder("float64", (4, 3))
    x, labels = gf.placeholder("float64", (5, 2, 6, 6)), gf.placeholder("int64", (5,))

    def gradients_of(image: gf.Tensor, label: gf.Tensor) -> list[gf.Tensor]:
        h = gf.nn.max_pool(gf.nn.relu(gf.nn.conv(image[None], k)), 2)
        return gf.gradients(gf.nn.cross_entropy(gf.mean(h, (0, 2, 3)) @ w, label), [k, w])

    each = gf.vmap(gradients_of)(x, labels)
    assert gf.Graph(each).of_op("scan") == ()
    feeds = {
        k: rng.normal(size=(4, 2, 3, 3)), w: rng.normal(size=(4, 3)),
        x: rng.normal(size=(5, 2, 6, 6)), labels: np.array([0, 2, 1, 1, 0]),
    }  # fmt: skip
    for i in range(5):
        single = evaluate(gradients_of(x[i], labels[i]), feeds)
        for have, want in zip(evaluate(each, feeds), single, strict=True):
            np.testing.assert_allclose(have[i], want, rtol=1e-11, atol=1e-14)


def test_a_map_is_differentiated_like_what_it_stands_for() -> None:
    rng = np.random.default_rng(2)
    w = gf.placeholder("float64", (3, 4))
    x, labels = gf.placeholder("float64", (5, 3)), gf.placeholder("int64", (5,))
    mapped = gf.sum(gf.vmap(lambda x, k: loss_of(w, x, k))(x, labels))
    stacked = gf.sum(gf.stack([loss_of(w, x[i], labels[i]) for i in range(5)]))
    feeds = {
        w: rng.normal(size=(3, 4)), x: rng.normal(size=(5, 3)), labels: np.array([0, 2, 1, 1, 0])
    }  # fmt: skip
    results = [
        [*gf.gradients(y, [w, x]), *gf.jvp([y], [w], [np.ones((3, 4))])] for y in (mapped, stacked)
    ]
    for have, want in zip(*(evaluate(r, feeds) for r in results), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("activation", [gf.tanh, gf.nn.gelu, gf.nn.sigmoid, gf.nn.silu])
def test_gradients_of_each_example_are_trained_by_their_gradients(activation: Any) -> None:
    """Two layers and a map of their gradient, as a network that solves an equation has."""
    random = np.random.default_rng(0)
    examples = random.normal(size=(5, 3))
    inner, outer = (gf.variable(random.normal(size=s)) for s in ((3, 4), (4,)))
    x = gf.placeholder("float64", (None, 3))

    def slope(row: gf.Tensor) -> gf.Tensor:
        return gf.gradients(activation(row @ inner) @ outer, [row])[0]

    mapped, single = gf.vmap(slope)(x), gf.stack([slope(x[i]) for i in range(5)])
    both = [gf.gradients(gf.sum(gf.square(found)), [inner, outer, x]) for found in (mapped, single)]
    with gf.Session() as session:
        have, want = session.run(both, {x: examples})
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_a_jacobian_is_a_map_of_tangents_over_the_identity() -> None:
    x = gf.placeholder("float64", (4,))
    jacobian = gf.vmap(lambda t: gf.jvp(lambda x: gf.sin(x) * gf.sum(x), (x,), (t,))[1], 0, 1)(
        gf.eye(4, dtype="float64")
    )
    at = np.array([0.1, 0.5, -0.3, 1.0])
    (have,) = evaluate([jacobian], {x: at})
    np.testing.assert_allclose(have, np.diag(np.cos(at) * at.sum()) + np.sin(at)[:, None])


# Bodies -----------------------------------------------------------------------------------------


def check_against_a_stack(f: Any, *arrays: np.ndarray, differentiate: bool = True) -> None:
    """Values of a map, and gradients through it and inside it, equal those of single calls."""
    xs = [gf.placeholder(a.dtype, a.shape) for a in arrays]
    feeds = dict(zip(xs, arrays, strict=True))
    smooth = [i for i, a in enumerate(arrays) if a.dtype == np.float64]

    def value_and_gradients(*args: gf.Tensor) -> list[gf.Tensor]:
        y = f(*args)
        if not differentiate:
            return [y]
        return [y, *gf.gradients(y, [args[i] for i in smooth])]

    singles = [value_and_gradients(*(x[i] for x in xs)) for i in range(len(arrays[0]))]
    want = evaluate([gf.stack(column) for column in zip(*singles, strict=True)], feeds)
    have = evaluate(gf.vmap(value_and_gradients)(*xs), feeds)
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    if differentiate:
        ys = gf.vmap(f)(*xs)
        outside = evaluate(gf.gradients(ys, [xs[i] for i in smooth]), feeds)
        for a, b in zip(outside, want[1:], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
        with gf.Session() as session:  # where forward bodies and those of gradients become one
            for a, b in zip(
                session.run(gf.vmap(value_and_gradients)(*xs), feeds), want, strict=True
            ):
                np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


SERIES = np.random.default_rng(4).uniform(0.5, 1.5, (3, 4, 2))
START = np.random.default_rng(5).uniform(0.5, 1.5, (3, 2))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_over_the_series_of_each_example(reverse: bool) -> None:
    def f(xs: gf.Tensor, start: gf.Tensor) -> gf.Tensor:
        def body(carry: gf.Tensor, x: gf.Tensor) -> tuple[gf.Tensor, gf.Tensor]:
            carry = gf.tanh(carry * x + start)
            return carry, carry * carry

        last, ys = gf.scan(body, gf.zeros((2,), "float64"), xs, reverse=reverse)
        return gf.sum(last) + gf.sum(ys * xs)

    check_against_a_stack(f, SERIES, START)


def test_a_scan_over_a_shared_series() -> None:
    shared = gf.constant(SERIES[0])

    def f(start: gf.Tensor) -> gf.Tensor:
        last, ys = gf.scan(lambda c, x: (c * x, x * 2.0), start, shared)
        return gf.sum(last) + gf.sum(ys)

    check_against_a_stack(f, START)


def test_a_while_loop_that_ends_at_another_time_for_each_example() -> None:
    def f(x: gf.Tensor) -> gf.Tensor:
        return gf.sum(
            gf.while_loop(lambda v: gf.sum(v) < 40.0, lambda v: v * v + 0.7, x, max_iterations=9)
        )

    check_against_a_stack(f, START)


def test_a_while_loop_with_a_shared_condition() -> None:
    def f(x: gf.Tensor) -> gf.Tensor:
        _, y = gf.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, gf.sin(s[1]) * x), (0, x), max_iterations=5
        )
        return gf.sum(y)

    check_against_a_stack(f, START)


def test_a_choice_of_each_example_and_a_shared_one() -> None:
    def f(x: gf.Tensor) -> gf.Tensor:
        own = gf.cond(gf.sum(x) < 2.0, lambda v: gf.sum(v * v), lambda v: gf.sum(gf.exp(v)), x)
        shared = gf.cond(gf.constant(True), lambda v: gf.sum(gf.sin(v)), lambda v: own, x)
        return own + shared

    check_against_a_stack(f, START)


def sink(x: gf.Tensor) -> gf.Tensor:
    """log of log of x … until it is no longer above 1."""
    found: gf.Tensor = gf.while_loop(lambda v: v > 1.0, gf.log, x * 1.0, max_iterations=9)
    return found


def running_root(xs: gf.Tensor) -> gf.Tensor:
    def body(carry: gf.Tensor, x: gf.Tensor) -> tuple[gf.Tensor, gf.Tensor]:
        return gf.cond(x > 0, lambda: carry * gf.sqrt(x), lambda: carry), carry

    last, ys = gf.scan(body, gf.constant(1.0, "float64"), xs)
    return last + gf.sum(ys)


UNTAKEN: dict[str, tuple[Any, list[Any]]] = {
    "cond": (lambda x: gf.cond(x > 0, lambda: gf.sqrt(x), lambda: x * 0.0), [-1.0, 0, 4]),
    "cond of two": (lambda x: gf.cond(x > 0, lambda: gf.log(x), lambda: 1 / (x - 1)), [-1.0, 1, 4]),
    "nested cond": (
        lambda x: gf.cond(
            x > 0,
            lambda: gf.cond(x > 1, lambda: gf.log(x - 1), lambda: gf.sqrt(1 - x)),
            lambda: x * 2.0,
        ),
        [-1.0, 0.5, 3],
    ),
    "while": (sink, [0.0, 20, 1, -3]),
    "cond of while": (
        lambda x: gf.cond(x > 0, lambda: sink(gf.sqrt(x)), lambda: x * 3.0),
        [-1.0, 9, 1],
    ),
    "while of cond": (
        lambda x: gf.while_loop(
            lambda v: v > 1.0,
            lambda v: gf.cond(v > 4, lambda: gf.sqrt(v - 4), lambda: gf.log(v)),
            x * 1.0,
            max_iterations=9,
        ),
        [0.0, 20, 3, -5],
    ),
    "scan": (running_root, [[1.0, 2, 4], [3, -1, -1], [0, 0, 0]]),
}


@pytest.mark.parametrize("f, points", UNTAKEN.values(), ids=UNTAKEN)
def test_branches_and_iterations_that_an_example_does_not_take_leave_it_alone(
    f: Any, points: list[Any]
) -> None:
    """Those compute NaN and infinite slopes of it; its own result and gradient are finite."""
    at = np.array(points)
    with np.errstate(all="ignore"):
        check_against_a_stack(f, at)
        x = gf.placeholder("float64", at.shape)
        y = gf.vmap(f)(x)
        assert all(np.isfinite(t).all() for t in evaluate([y, *gf.gradients(y, [x])], {x: at}))


def test_what_examples_share_gets_gradients_of_those_only_that_read_it() -> None:
    x, w = gf.placeholder("float64", (3,)), gf.placeholder("float64", ())
    y = gf.vmap(lambda x: gf.cond(x > 0, lambda: x * gf.log(w), lambda: x * w))(x)
    (slope,) = gf.gradients(y, [w])
    with np.errstate(all="ignore"):
        for at, want in (([-1.0, -2, -3], -6.0), ([-1.0, 2, -3], np.inf)):
            assert evaluate([slope], {x: np.array(at), w: np.array(0.0)})[0] == want


def test_calls_and_checkpoints() -> None:
    @gf.function
    def inner(x: gf.Tensor, scale: gf.Tensor) -> gf.Tensor:
        return gf.sin(x) * scale

    def f(x: gf.Tensor) -> gf.Tensor:
        y = inner(x, gf.constant(2.0, "float64"))
        return gf.sum(gf.checkpoint(lambda v: gf.exp(v) * v)(y))

    check_against_a_stack(f, START)


def test_a_vjp_of_ones_own_is_mapped_as_well() -> None:
    weight = gf.placeholder("float64", (2,))

    def double_vjp(g: gf.Tensor, y: gf.Tensor, x: gf.Tensor, w: gf.Tensor) -> tuple[Any, Any]:
        return g * w * 2.0, g * x * 3.0

    f = gf.custom_vjp(lambda x, w: x * w, vjp=double_vjp)
    x = gf.placeholder("float64", (3, 2))
    loss = gf.sum(gf.vmap(lambda x: f(x, weight))(x))
    gx, gw = evaluate(gf.gradients(loss, [x, weight]), {x: START, weight: np.array([1.0, 5.0])})
    assert gx.tolist() == [[2.0, 10.0]] * 3
    np.testing.assert_allclose(gw, 3.0 * START.sum(0))


def test_random_numbers_in_a_body_differ_between_examples() -> None:
    x = gf.placeholder("float64", (4,))

    @gf.function
    def draw_noise(scale: gf.Tensor) -> gf.Tensor:
        return gf.random.uniform((5,), dtype="float64") * scale

    y = gf.vmap(lambda x: draw_noise(gf.constant(1.0, "float64")) + x * 0.0)(x)
    (have,) = evaluate([y], {x: np.zeros(4)})
    assert len(np.unique(have)) == have.size


# Bad input --------------------------------------------------------------------------------------

HERE = r"vmap at .*test_vmap\.py:\d+: .*"


def test_wrong_arguments_are_told_with_the_users_line() -> None:
    x = gf.placeholder("float64", (4, 3))
    with pytest.raises(ArgumentError, match=HERE + "fn must be a function"):
        gf.vmap(x)
    with pytest.raises(ArgumentError, match=HERE + "nothing is mapped"):
        gf.vmap(gf.sin, in_axes=None)(x)
    with pytest.raises(ShapeError, match=HERE + "axis 2 is outside"):
        gf.vmap(gf.sin, in_axes=2)(x)
    with pytest.raises(ShapeError, match=HERE + "argument 1 has 3 along its mapped axis 1.*4"):
        gf.vmap(gf.add, in_axes=(0, 1))(x, x)
    with pytest.raises(ArgumentError, match=HERE + "in_axes is an axis .*tuple of 1.*not .0, 0"):
        gf.vmap(gf.sin, in_axes=(0, 0))(x)
    with pytest.raises(ArgumentError, match=HERE + "in_axes is an axis .* not 'rows'"):
        gf.vmap(gf.sin, in_axes="rows")(x)
    with pytest.raises(ArgumentError, match=HERE + "depends on the example"):
        gf.vmap(gf.sin, out_axes=None)(x)


def test_an_error_inside_points_at_the_line_inside() -> None:
    x = gf.placeholder("float64", (4, 3))
    with pytest.raises(ShapeError, match=r"matmul at .*test_vmap\.py:\d+.*\(3,\)|inner sizes"):
        gf.vmap(lambda row: row @ gf.zeros((2, 2), "float64"))(x)


def test_an_assignment_of_what_depends_on_the_example_is_refused() -> None:
    x, v = gf.placeholder("float32", (4,)), gf.variable(np.zeros((), "float32"))
    with pytest.raises(VariableError, match=r"assign .* depends on the batch.*reduce it"):
        gf.vmap(lambda x: gf.assign(v, x))(x)
