"""Nodes and tensors: operators, weak scalars, scopes, and errors that point at the user's line."""

from __future__ import annotations

import inspect
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    GraphError,
    OpCheckError,
    ShapeError,
    VariableError,
)
from graphflow.frontend.builders import assign, constant, placeholder, variable
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import (
    FUNCTIONS,
    REGISTRY,
    Op,
    as_tensor,
    device,
    name_scope,
    next_stream,
    register,
    seed_scope,
)

HERE = Path(__file__).name
ARITHMETIC = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
]  # fmt: skip
A, B = np.array([1.0, 2.0, 5.0]), np.array([2.0, 2.0, 3.0])


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


@pytest.mark.parametrize("op", ARITHMETIC, ids=lambda f: f.__name__)
def test_operators_are_numpys_with_tensors_arrays_and_scalars_on_either_side(op: Any) -> None:
    x, y = placeholder("float64", (3,)), placeholder("float64", (3,))
    results = [op(x, y), op(x, B), op(A, y), op(x, 2), op(5, y), op(x, 2.5), op(x, [2.0, 2.0, 2.0])]
    wanted = [op(A, B), op(A, B), op(A, B), op(A, 2), op(5, B), op(A, 2.5), op(A, 2)]
    for value, want in zip(evaluate(results, {x: A, y: B}), wanted, strict=True):
        np.testing.assert_allclose(value, want)


def test_a_matrix_on_the_left_may_be_an_array() -> None:
    x = placeholder("float64", (2, 2))
    m = np.array([[1.0, 2.0], [3.0, 4.0]])
    left, right, flipped = evaluate([m @ x, x @ m, x.T], {x: m.T})
    np.testing.assert_array_equal(left, m @ m.T)
    np.testing.assert_array_equal(right, m.T @ m)
    np.testing.assert_array_equal(flipped, m)


def test_logic_and_signs_have_operators() -> None:
    x = placeholder("float64", (3,))
    a = A - 2
    values = evaluate([-x, +x, abs(x), (x > 0) & (x < 1), (x > 0) | (x < -0.5), ~(x > 0)], {x: a})
    wanted = [-a, a, abs(a), (a > 0) & (a < 1), (a > 0) | (a < -0.5), ~(a > 0)]
    for value, want in zip(values, wanted, strict=True):
        np.testing.assert_array_equal(value, want)


@pytest.mark.parametrize("ask", [bool, int, float, np.asarray, lambda x: 1 if x else 0])
def test_a_tensor_has_no_value_while_the_graph_is_built(ask: Any) -> None:
    x = placeholder("float32", (), name="mask")
    with pytest.raises(GraphError, match=rf"mask.*{HERE}.*gf\.where"):
        ask(x)


def test_known_first_axes_have_a_length_and_unpack_and_others_do_not() -> None:
    a, b = placeholder("float32", (2, 3))
    assert a.shape == b.shape == (3,)
    assert len(placeholder("float32", (4,))) == 4
    for x in (placeholder("float32", (None,)), placeholder("float32")):
        with pytest.raises(GraphError, match="no length"):
            list(x)
    with pytest.raises(GraphError, match=r"comes with a feed; x\.shape\[0\] is that size"):
        len(placeholder("float32", (None,)))


def test_equality_builds_a_node_and_identity_keys_dictionaries() -> None:
    x, y = placeholder("float32"), placeholder("float32")
    assert (x == y).dtype == "bool" and (x != y).node.op.name == "not_equal"
    assert {x: 1, y: 2}[x] == 1 and x in {x} and y not in {x}


@pytest.mark.parametrize(
    "dtype, scalar, fits",
    [
        ("float32", 1.5, True), ("float32", 2, True), ("float16", 2, True), ("int8", 3, True),
        ("int8", 300, False), ("uint8", -1, False), ("int32", 1.5, False), ("bool", 1, False),
        ("float32", True, True), ("int32", True, False), ("float16", 1e6, False),
        ("float32", 1e300, False), ("float16", float("inf"), True), ("int64", 2**63, False),
    ],
)  # fmt: skip
def test_python_scalars_take_the_tensors_dtype_or_are_refused(
    dtype: str, scalar: Any, fits: bool
) -> None:
    x = placeholder(dtype, (2,))
    if fits:
        assert FUNCTIONS["maximum"](x, scalar).dtype == dtype
        assert FUNCTIONS["maximum"](scalar, x).dtype == dtype
    else:
        with pytest.raises(DTypeError, match=rf"maximum at .*{HERE}:\d+"):
            FUNCTIONS["maximum"](x, scalar)


def test_a_symbolic_size_counts_as_a_python_int_on_either_side() -> None:
    x = placeholder("float32", ("n", 2))
    n = x.shape[0]
    rows = np.ones((4, 2), "float32")
    for y, wanted in [(x / n, 0.25), (n / x, 4), (n - x, 3), (x - n, -3), (n * x, 4), (x**n, 1)]:
        assert y.dtype == "float32"
        np.testing.assert_array_equal(evaluate([y], {x: rows})[0], np.full((4, 2), wanted))
    flags, filled = evaluate([x < n, FUNCTIONS["full"]((2,), n)], {x: rows})
    assert flags.all() and list(filled) == [4, 4] and filled.dtype == "int64"
    with pytest.raises(TypeError):
        n + "a"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: REGISTRY["exp"](x, x),
        lambda x: REGISTRY["add"](2, name="y"),
        lambda x: name_scope(""),
        lambda x: REGISTRY["add"](x, x, x),
        lambda x: FUNCTIONS["sum"](x, name=3),
        lambda x: FUNCTIONS["sum"](x, name=""),
        lambda x: FUNCTIONS["sum"]("text"),
        lambda x: x + [[1, 2], [3]],  # noqa: RUF005
        lambda x: FUNCTIONS["reshape"](x, 0.5),
        lambda x: x.astype("int32") + np.array([1j]),
        lambda x: FUNCTIONS["roll"](x, "a"),
        lambda x: FUNCTIONS["concat"](3),
        lambda x: FUNCTIONS["einsum"](x, x),
        lambda x: FUNCTIONS["tensordot"](x, x, None),
        lambda x: FUNCTIONS["arange"](float("inf")),
        lambda x: FUNCTIONS["linspace"]("a", 1, 3),
        lambda x: FUNCTIONS["full"]((2,), [1, 2]),
        lambda x: FUNCTIONS["one_hot"](x, None),
        lambda x: x.astype("ij->i"),
        lambda x: x.astype("int32") ** -1,
    ],
)
def test_arguments_of_other_kinds_are_refused_with_the_users_line(wrong: Any) -> None:
    x = placeholder("float32", (2, 2))
    with pytest.raises(GraphError, match=rf" at .*{HERE}:\d+"):
        wrong(x)


def test_arrays_and_numpy_scalars_promote_strongly_and_kinds_do_not_mix() -> None:
    x = placeholder("float32", (2,))
    assert (x + np.ones(2)).dtype == "float64"
    assert (x + np.float64(1)).dtype == "float64"
    assert (x + [1.0, 2.0]).dtype == "float32"  # noqa: RUF005
    assert (x + np.array([1j])).dtype == "complex128"
    assert (x + 1j).dtype == "complex64"
    with pytest.raises(DTypeError, match=r"add at .*astype"):
        x + np.ones(2, "int64")
    with pytest.raises(DTypeError, match=r"add at .*does not fit int32"):
        x.astype("int32") + 1j


@pytest.mark.parametrize("wrong", ["text", None, object(), {1: 2}, np.array(["a"])])
def test_what_is_no_array_is_no_tensor(wrong: Any) -> None:
    with pytest.raises(DTypeError):
        as_tensor(wrong)


def test_constants_are_copies_that_cannot_change() -> None:
    array = np.ones(3, "float32")
    x = constant(array, name="ones")
    array[0] = 5
    value = x.node.attrs["value"]
    np.testing.assert_array_equal(value, [1, 1, 1])
    assert x.name == "ones" and not value.flags.writeable


# Locations --------------------------------------------------------------------------------------


def test_every_node_remembers_the_users_line() -> None:
    x, made = placeholder("float32", (2, 2)), line()
    y, here = x @ x + FUNCTIONS["sum"](x[0]), line()
    assert (Path(x.node.location.file).name, x.node.location.line) == (HERE, made)
    for node in (y.node, *(t.node for t in y.node.inputs)):
        assert (Path(node.location.file).name, node.location.line) == (HERE, here)


def test_an_error_names_op_line_numbers_and_remedy() -> None:
    x, y = placeholder("float32", (2, 3)), placeholder("float32", (2, 3))
    at = line() + 2
    with pytest.raises(ShapeError, match=rf"matmul at .*{HERE}:{at}: .*3 != 2.*transpose"):
        x @ y


@pytest.mark.parametrize(
    "given",
    [None, "float32", gf.TensorSpec((1,), "int64"), [gf.spec("int64")], (3,)],  # type: ignore[arg-type]
)
def test_a_shape_rule_that_gives_no_specs_is_named_with_the_users_line(given: Any) -> None:
    op = Op("test.no_specs", infer=lambda x: given, kernel=lambda xp, x: x)
    with pytest.raises(OpCheckError, match=rf"no_specs at .*{HERE}:\d+: its infer gives .*gf.spec"):
        op(placeholder("float32", (2,)))


@pytest.mark.parametrize(
    "build, error, words",
    [
        (lambda: placeholder("float31"), DTypeError, "placeholder"),
        (lambda: placeholder("float32", (-1,)), ShapeError, "placeholder"),
        (lambda: variable(placeholder("float32")), VariableError, "variable"),
        (lambda: variable(np.array(["a"])), DTypeError, "variable"),
        (lambda: assign(placeholder("float32"), 1.0), VariableError, "not a variable"),
        (lambda: assign(variable(np.ones(2)), np.ones(3)), ShapeError, "3"),
        (lambda: assign(variable([1.0]), constant(np.ones(1))), DTypeError, "float32"),
    ],
)
def test_mistakes_at_the_beginning_of_a_graph_name_the_line(
    build: Any, error: type, words: str
) -> None:
    with pytest.raises(error, match=rf"{HERE}:\d+: ") as raised:
        build()
    assert words in str(raised.value)


# Scopes -----------------------------------------------------------------------------------------


def test_inner_device_scopes_refine_outer_ones() -> None:
    with device("/worker:1"):
        x = placeholder("float32")
        with device("gpu"):
            y = x + 1.0
            with device("/worker:0/cpu:1"):
                z = y + 1.0
        back = x + 2.0
    outside = x + 3.0
    pins = [str(t.node.device) for t in (x, y, z, back, outside)]
    assert pins == ["/worker:1", "/worker:1/gpu", "/worker:0/cpu:1", "/worker:1", ""]


def test_a_malformed_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="tpu"), device("tpu:x"):
        placeholder("float32")


def test_name_scopes_nest_and_end() -> None:
    with name_scope("tower"), name_scope("dense"):
        inner = placeholder("float32", name="x")
    assert inner.name == "tower/dense/x"
    assert placeholder("float32", name="x").name == "x"


def test_streams_are_numbered_from_the_seed() -> None:
    with seed_scope(7):
        first = [next_stream(), next_stream()]
    with seed_scope(7):
        second = [next_stream(), next_stream()]
    assert first == second == [(7, 0), (7, 1)]
    assert next_stream() != next_stream()


# The registry -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", None, 3, "\ud800", "half \udfff"])
def test_a_name_is_text_that_can_be_written_down(name: Any) -> None:
    """A checkpoint whose names no other program reads could not be read by us, either."""
    with pytest.raises(ArgumentError, match="name"), gf.name_scope(name):
        pass
    if name is not None:
        with pytest.raises(ArgumentError, match=r"variable at .*name"):
            gf.variable(1.0, name=name)
    assert gf.variable(1.0, name="größe 🙂\n").node.name == "größe 🙂\n"


def test_an_ops_name_is_its_own() -> None:
    with pytest.raises(GraphError, match=r"'add' at .* is registered twice.*graphflow itself"):
        register(Op("add", infer=lambda x: x))


def test_an_op_applies_to_whatever_converts_and_may_have_several_outputs() -> None:
    both = Op("both", infer=lambda x: (x, x.with_dtype("bool")), kernel=lambda xp, x: (x, x > 0))
    x, positive = both([1.0, -1.0])
    assert (x.dtype, positive.dtype, positive.index) == ("float32", "bool", 1)
    np.testing.assert_array_equal(evaluate([positive])[0], [True, False])


def test_an_op_without_a_kernel_says_that_it_is_not_computed() -> None:
    with pytest.raises(GraphError, match="placeholder"):
        REGISTRY["placeholder"].run(np, [], {})


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda x: gf.sum(x, keepdims="no"), "sum at .*keepdims must be True or False, not 'no'"),
        (lambda x: gf.nn.max_pool2d(x, 2, ceil_mode=np.ones(2)), "ceil_mode must be True or False"),
        (lambda x: gf.matmul(x, x, transpose_b=None), "matmul at .*True or False, not None"),
        (lambda x: gf.nn.interpolate(x, scale=2.0, mode=["linear"]), "mode must be a str, not"),
        (
            lambda x: gf.nn.mse_loss(x, x, reduction=np.array([1, 2])),
            "reduction must be a str, not",
        ),
        (lambda x: gf.nn.local_response_norm(x, 3, alpha="1"), "alpha must be a number, not '1'"),
        (
            lambda x: gf.nn.resize(x, scale=2.0, mode="cubic", cubic_a=None),
            "cubic_a must be a number",
        ),
        (lambda x: gf.linspace(None, 1.0, 3), "start must be a number, not None"),
    ],
)
def test_flags_words_and_numbers_are_what_they_are_said_to_be(build: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        build(gf.placeholder("float32", (1, 2, 4, 4)))
    assert "test_op.py:" in str(caught.value)


def test_an_op_refuses_arguments_that_it_has_not() -> None:
    with pytest.raises(ArgumentError, match=r"exp at .*test_op\.py.*unexpected.*'axis'"):
        gf.exp(placeholder("float32", (3,)), axis=1)


@pytest.mark.parametrize("module", [gf, gf.nn])
def test_help_tells_what_an_op_computes_takes_and_gives(module: Any) -> None:
    for name in module.__all__:
        if isinstance(op := getattr(module, name), Op):
            words = op.__doc__ or ""
            assert words != Op.__doc__ and not words.startswith("The op "), name
            assert "DTypeError" in words and "gradient" in words, name
            assert not op.elementwise or "Gives a tensor of" in words, name
    assert "shapes broadcast" in str(gf.less.__doc__) and ", bool." in str(gf.less.__doc__)
    assert "real for complex" in str(gf.abs.__doc__)
    assert str(gf.floor.__doc__).count("gradient is zero") == 1


def test_only_an_op_is_registered() -> None:
    with pytest.raises(ArgumentError, match=r"register_op at .*test_op\.py.*give a gf\.Op"):
        gf.register_op(abs)  # type: ignore[arg-type]
